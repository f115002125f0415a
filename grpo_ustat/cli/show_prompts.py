"""Preview of a run's prompts and of the extraction of answers."""

from __future__ import annotations

from grpo_ustat.config.common import Common
from grpo_ustat.policy.chat import warn_of_options, writes_turns
from grpo_ustat.policy.configured import configured_task
from grpo_ustat.policy.source import context_length
from grpo_ustat.policy.tokenizer import configured_tokenizer, encode, stop_tokens
from grpo_ustat.tasks.base import warn_of_prompt
from grpo_ustat.tasks.prompts import render
from grpo_ustat.terminal.console import warn
from grpo_ustat.terminal.streams import tell

# Mark after the last character of a prompt, which makes trailing white space visible.
PROMPT_END = "\N{LEFTWARDS ARROW TO BAR}"


def show_prompts(config: Common, split: str) -> None:
    """Print the first `show_prompts` prompts of a split and the length of its longest prompt.

    After each prompt come the expected answer and the answer that is read from the reference
    solution, so that a user can check both. Only the tokenizer is loaded, not the model.
    """
    tokenizer = configured_tokenizer(config.model)
    task = configured_task(config.task_options, config.model, tokenizer)
    limit = config.most_questions
    questions, prompts = task.questions(split)[:limit], task.prompts(split)[:limit]
    warn_of_prompt(config.task_options, prompts)
    warn_of_options(config.prompt, tokenizer)
    texts = [prompt.text for prompt in prompts]
    in_turns = writes_turns(config.prompt.chat, tokenizer)
    tokens = encode(tokenizer, texts, special_tokens=not in_turns)
    for i in range(min(config.show_prompts, len(prompts))):
        ids = tokens[i] if len(tokens[i]) <= 4 else [*tokens[i][:2], *tokens[i][-2:]]
        # Tokens are decoded one by one, so that a repeated special token is visible.
        words = [repr(tokenizer.decode([token])) for token in ids]
        ends = " ".join(words if ids is tokens[i] else [*words[:2], "...", *words[2:]])
        tell(f"--- {split} prompt {i + 1}: {len(tokens[i])} tokens, {ends}")
        tell(visible(texts[i]) + PROMPT_END)
        reference = render(config.prompt.reply or "{solution}", questions[i])
        answer, (reward,) = task.extract(reference), task.rewards([prompts[i]], [reference])
        tell(f"expected answer: {visible(questions[i].answer)}")
        tell(f"reference: {visible(reference).strip()}")
        answer = "nothing" if answer is None else visible(answer)
        tell(f"answer read from the reference: {answer}, reward {reward:g}\n")
    if config.prompt.stop is not None:
        stops = stop_tokens(tokenizer, config.prompt.stop)
        tell(f"{len(stops)} tokens contain prompt.stop={config.prompt.stop!r} and end a completion")

    longest = max(range(len(tokens)), key=lambda i: len(tokens[i]))
    count, limit = len(tokens[longest]), context_length(config.model)
    total = count + config.max_completion_length
    tell(
        f"longest of {len(prompts)} {split} prompts: {count} tokens "
        f"({visible(prompts[longest].id)}); with max_completion_length="
        f"{config.max_completion_length}: {total} tokens (limit of the model: {limit or 'unknown'})"
    )
    if limit is not None and total > limit:
        warn(
            f"prompt and completion can reach {total} tokens, but the model has {limit} positions: "
            "lower max_completion_length or shorten the prompt"
        )


def visible(text: str) -> str:
    r"""Return the text with escape sequences in place of control characters, except newlines.

    >>> visible("[b]\x1b")
    '[b]\\x1b'
    """
    return "".join(c if c.isprintable() or c == "\n" else repr(c)[1:-1] for c in text)
