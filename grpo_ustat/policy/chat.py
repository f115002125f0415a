"""Prompts in the chat format of a model, written by its tokenizer's chat template."""

from __future__ import annotations

import re
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from datetime import datetime
from typing import Any, cast

from jinja2 import TemplateError
from transformers import PreTrainedTokenizerBase
from transformers.utils import chat_template_utils

from grpo_ustat.config.model import ModelConfig, PromptConfig
from grpo_ustat.config.schema import ConfigError, did_you_mean
from grpo_ustat.distributed.ranks import is_main
from grpo_ustat.policy.tokenizer import configured_tokenizer
from grpo_ustat.tasks.prompts import Turn
from grpo_ustat.terminal.console import warn
from grpo_ustat.terminal.streams import single_line, tell

# Contents of the turns with which `around_answers` runs a template. They can be found again in the
# template's output, because no chat template contains these words itself.
_QUESTION, _ANSWER = "Question 7", "Answer 7"


def in_chat_format(
    tokenizer: PreTrainedTokenizerBase,
    turns: Sequence[Any],
    options: Mapping[str, Any],
    moment: datetime | None,
    *,
    answers: bool = True,
) -> str:
    """Return the text that the model reads for these turns, with special tokens.

    A chat template is a program that is distributed with a model. Transformers runs it in a sandbox
    without access to Python objects.

    Args:
        tokenizer: tokenizer with a chat template.
        turns: turns of the conversation, as dictionaries with `role` and `content`.
        options: keyword arguments of the template.
        moment: date and time that the template writes if it calls `strftime_now`. If `moment` is
            None, such a call raises an error.
        answers: True to end the text where the model's answer starts; False to end it after the
            last turn.

    Raises:
        ValueError: if the template refuses the turns, if it fails, or if it needs the date and
            `moment` is None.
    """
    try:
        with _clock(moment):
            text = tokenizer.apply_chat_template(
                cast(Any, turns), tokenize=False, add_generation_prompt=answers, **options
            )
    except (TemplateError, ArithmeticError, LookupError, RecursionError, TypeError) as error:
        raise ValueError(str(error) or type(error).__name__) from error
    return cast(str, text)


def around_answers(
    tokenizer: PreTrainedTokenizerBase, options: Mapping[str, Any]
) -> tuple[str, str]:
    """Return the text that a chat template writes before an answer, and the text after it.

    The first text lies between the question and the answer.

    Both texts are stripped of white space. Both are empty if the template refuses a question with
    an answer.

    Args:
        tokenizer: tokenizer with a chat template.
        options: keyword arguments of the template.
    """
    # Templates write the date before the question, so it is in neither text, and any date will do.
    day = datetime(2000, 1, 1)
    turns = [{"role": "user", "content": _QUESTION}, {"role": "assistant", "content": _ANSWER}]
    try:
        before = in_chat_format(tokenizer, turns[:1], options, day).rpartition(_QUESTION)[2]
        after = in_chat_format(tokenizer, turns, options, day, answers=False)
    except ValueError:
        return "", ""
    return before.strip(), after.rpartition(_ANSWER)[2].strip()


@contextmanager
def _clock(moment: datetime | None) -> Iterator[None]:
    """Set the clock of chat templates to `moment` within the block.

    If `moment` is None, a template that reads the clock raises an error. Templates read it with the
    function `strftime_now` of transformers, which calls `datetime.now()`. The block therefore
    replaces the name `datetime` in the module that defines `strftime_now`.
    """

    class Clock:
        """Replacement for `datetime.datetime`."""

        @staticmethod
        def now() -> datetime:
            """Return `moment`."""
            if moment is None:
                raise ValueError("it writes today's date, not the date of the log")
            return moment

    module = cast(Any, chat_template_utils)
    before, module.datetime = module.datetime, Clock
    try:
        yield
    finally:
        module.datetime = before


def writes_turns(chat: bool | None, tokenizer: PreTrainedTokenizerBase) -> bool:
    """Return True if prompts are written in the model's chat format.

    Texts in the chat format already contain the special tokens, so the tokenizer must not add them.

    Args:
        chat: setting `prompt.chat`; None to use the chat format if the tokenizer has a template.
        tokenizer: tokenizer of the model.
    """
    return tokenizer.chat_template is not None if chat is None else chat


def reads_clock(tokenizer: PreTrainedTokenizerBase) -> bool:
    """Return True if the model's chat template can write the date."""
    return "strftime_now" in str(tokenizer.chat_template)


def unread_options(tokenizer: PreTrainedTokenizerBase, options: Mapping[str, Any]) -> list[str]:
    """Return the options whose names do not occur in the model's chat template."""
    words = set(re.findall(r"\w+", str(tokenizer.chat_template)))
    return [name for name in options if name not in words]


class ChatFormat:
    """Function from the turns of a prompt to the text that the model reads, up to its answer.

    Args:
        tokenizer: tokenizer with a chat template.
        name: name of the model, for error messages.
        options: keyword arguments of the chat template.
        moment: date and time for templates that write the date; None for the current time.
    """

    def __init__(
        self,
        tokenizer: PreTrainedTokenizerBase,
        name: str,
        options: Mapping[str, Any] | None = None,
        moment: datetime | None = None,
    ):
        if tokenizer.chat_template is None:
            raise ConfigError(
                f"prompt.chat=true, but {name} has no chat format, as is usual for base models: "
                "use prompt.chat=false (prompt=plain), or the instruct model"
            )
        self._tokenizer, self._name = tokenizer, name
        self._options, self._moment = options or {}, moment or datetime.now()

    def __call__(self, turns: list[Turn]) -> str:
        """Return the text that the model reads, including special tokens."""
        try:
            text = in_chat_format(self._tokenizer, turns, self._options, self._moment)
        except ValueError as error:
            reason = single_line(error, 200)
            raise self._refused(turns[0], f"refuses these turns ({reason})") from error
        for turn in turns:
            if turn["content"].strip() not in text:
                raise self._refused(turn, f"leaves out the {turn['role']} turn")
        return text

    def _refused(self, turn: Turn, what: str) -> ConfigError:
        fix = "use prompt.chat=false"
        if turn["role"] == "system":
            fix = "use prompt.system=null and put its text into prompt.template"
        return ConfigError(f"the chat format of {self._name} {what}: {fix}")


def chat_format(
    model: ModelConfig,
    prompt: PromptConfig,
    tokenizer: PreTrainedTokenizerBase | None = None,
    moment: datetime | None = None,
) -> ChatFormat | None:
    """Return the function that writes turns in the configured model's chat format, or None.

    The result is None if `prompt.chat` is false, or if it is null and the model has no chat format.

    Args:
        model: configured model.
        prompt: settings of the prompts.
        tokenizer: tokenizer of the model, if it is already loaded; None to load it.
        moment: date and time for templates that write the date; None for the current time.
    """
    if prompt.chat is False:
        return None
    tokenizer, name = tokenizer or configured_tokenizer(model), model.model_name_or_path
    if not writes_turns(prompt.chat, tokenizer):
        if prompt.template_options:
            raise ConfigError(
                f"prompt.template_options={prompt.template_options} need a chat template, but "
                f"{name} has none: remove them, or use the instruct model"
            )
        return None
    return ChatFormat(tokenizer, name, prompt.template_options, moment)


def tell_date(moment: datetime | None) -> None:
    """Print a note on rank 0 if chat templates write a date (`moment`) that is not today's."""
    if moment is not None and moment.date() != datetime.now().date() and is_main():
        tell(
            "note: the model's chat template writes the date into prompts. Prompts still say "
            f"{moment:%Y-%m-%d}, the date on which this run or its pool of completions was started",
            file=sys.stderr,
        )


def warn_of_options(prompt: PromptConfig, tokenizer: PreTrainedTokenizerBase) -> None:
    """Warn on rank 0 about options that the model's chat template never reads."""
    for name in unread_options(tokenizer, prompt.template_options or {}) if is_main() else ():
        names = set(re.findall(r"\w+", str(tokenizer.chat_template)))
        warn(
            f"prompt.template_options has {name}, which the model's chat template never reads: "
            f"{did_you_mean(name, names)}this option has no effect"
        )
