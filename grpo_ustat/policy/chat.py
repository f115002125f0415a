"""A model's own chat format."""

from __future__ import annotations

from typing import cast

from jinja2 import TemplateError
from transformers import PreTrainedTokenizerBase

from grpo_ustat.config.schema import ConfigError
from grpo_ustat.tasks.prompts import Turn


class ChatFormat:
    """Writes turns in a model's chat format, up to where its answer begins.

    Args:
        tokenizer: the model's.
        name: the model's, for messages.

    Raises:
        ConfigError: the tokenizer has no chat format.
    """

    def __init__(self, tokenizer: PreTrainedTokenizerBase, name: str):
        if tokenizer.chat_template is None:
            raise ConfigError(
                f"prompt.chat=true, but {name} has no chat format, as base models have none: "
                "use prompt.chat=false (prompt=plain), or the instruct model"
            )
        self._tokenizer, self._name = tokenizer, name

    def __call__(self, turns: list[Turn]) -> str:
        """The text that the model reads, special tokens included.

        Raises:
            ConfigError: the format has no place for one of the turns.
        """
        try:
            text = cast(
                str,  # as tokenize=False says
                self._tokenizer.apply_chat_template(
                    turns, tokenize=False, add_generation_prompt=True
                ),
            )
        except (TemplateError, ValueError) as error:
            reason = " ".join(str(error).split())[:200]
            raise self._refused(turns[0], f"refuses these turns ({reason})") from error
        for turn in turns:
            if turn["content"].strip() not in text:
                raise self._refused(turn, f"leaves out the {turn['role']} turn")
        return text

    def _refused(self, turn: Turn, what: str) -> ConfigError:
        fix = "use prompt.chat=false"
        if turn["role"] == "system":
            fix = "use prompt.system=null and say it in prompt.template"
        return ConfigError(f"the chat format of {self._name} {what}: {fix}")
