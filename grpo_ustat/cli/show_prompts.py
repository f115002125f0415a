"""What a run would ask, before it runs: rendered prompts and how their answers are read."""

from __future__ import annotations

from grpo_ustat.config import Common
from grpo_ustat.policy.loading import (
    configured_task,
    configured_tokenizer,
    context_length,
    encode,
    stop_tokens,
)
from grpo_ustat.records import Prompt, Question
from grpo_ustat.runs.log import warn
from grpo_ustat.tasks.base import Task
from grpo_ustat.tasks.prompts import render

END = "\N{LEFTWARDS ARROW TO BAR}"  # after the last character of a prompt


def show_prompts(config: Common, split: str) -> None:
    """Print the split's first `show_prompts` prompts, how their answers are read, and the length of
    its longest; loads the tokenizer, not the model.

    Raises:
        ConfigError: data set or tokenizer cannot be loaded, or no token holds `prompt.stop`.
    """
    tokenizer = configured_tokenizer(config)
    task = configured_task(config, tokenizer)
    limit = config.study.questions if split == "study" else None
    questions, prompts = (found(split)[:limit] for found in (task.questions, task.prompts))
    texts = [prompt.text for prompt in prompts]
    tokens = encode(tokenizer, texts, special_tokens=not config.prompt.chat)
    shown = min(config.show_prompts, len(prompts))
    for i in range(shown):
        ends = " ".join(repr(tokenizer.decode([t])) for t in _outermost(tokens[i]))
        print(f"--- {split} prompt {i + 1}: {len(tokens[i])} tokens, {ends}")
        print(visible(texts[i]) + END)
        print(_answer(config, task, questions[i], prompts[i]))
    if config.prompt.stop is not None:
        stops = stop_tokens(tokenizer, config.prompt.stop)
        print(f"{len(stops)} tokens hold prompt.stop={config.prompt.stop!r} and end a completion")
    _lengths(config, split, prompts, tokens)


def visible(text: str) -> str:
    r"""The text with control characters written out, but for new lines: no text acts on a terminal.

    >>> visible("[b]\x1b")
    '[b]\\x1b'
    """
    return "".join(c if c.isprintable() or c == "\n" else repr(c)[1:-1] for c in text)


def _outermost(ids: list[int]) -> list[int]:
    """The first and last two, where a doubled special token would show."""
    return ids if len(ids) <= 4 else [*ids[:2], *ids[-2:]]


def _answer(config: Common, task: Task, question: Question, prompt: Prompt) -> str:
    """The expected answer, and what is read from a right completion."""
    right = render(config.prompt.reply or "{solution}", question)
    read, (reward,) = task.extract(right), task.rewards([prompt], [right])
    found = "nothing" if read is None else visible(read)
    return (
        f"expected answer: {visible(question.answer)}\n"
        f"reference: {visible(right).strip()}\n"
        f"read from the reference: {found}, reward {reward:g}\n"
    )


def _lengths(config: Common, split: str, prompts: list[Prompt], tokens: list[list[int]]) -> None:
    """The longest prompt, and whether it and a completion fit into the model's positions."""
    longest = max(range(len(tokens)), key=lambda i: len(tokens[i]))
    count, limit = len(tokens[longest]), context_length(config)
    total = count + config.max_completion_length
    print(
        f"longest of {len(prompts)} {split} prompts: {count} tokens "
        f"({visible(prompts[longest].id)}); with max_completion_length="
        f"{config.max_completion_length} {total}, of the model's {limit or 'unknown number'}"
    )
    if limit is not None and total > limit:
        warn(
            f"prompt and completion can reach {total} tokens, the model has positions for {limit}: "
            "lower max_completion_length, or shorten the prompt"
        )
