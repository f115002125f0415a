"""Typed schemas of models and prompts, with what can be checked of them."""

from __future__ import annotations

from dataclasses import dataclass

from grpo_ustat.checks import ConfigError, check_model, one_of, positive
from grpo_ustat.meanings import key, part

DTYPES = ("float32", "float64", "bfloat16", "float16")
ATTENTION = ("eager", "sdpa", "flex_attention", "flash_attention_2", "flash_attention_3")


@dataclass
class ModelSize:
    """What costs depend on; read from config.json where the model is a folder."""

    parameters: int | None = key("how many it has; null: unknown")
    layers: int | None = key("how many it has; null: unknown")
    kv_width: int | None = key(
        "that a token leaves in one layer's keys: key-value heads x their width; null: unknown",
        "numbers",
    )
    vocabulary: int | None = key("that it knows; null: unknown", "tokens")


@dataclass
class ModelConfig:
    """Which policy."""

    name: str = key("in the run folder's name")
    model_name_or_path: str = key(
        "embedded:NAME, cached:NAME (made by a script), a folder with a model or with LoRA "
        "adapters of one, or org/name on the hub"
    )
    revision: str | None = key("branch, tag or commit on the hub; null: its main branch")
    dtype: str = key("of the weights", choices=DTYPES)
    attn_implementation: str | None = key(
        "of attention, by transformers' name; null: its own choice", choices=ATTENTION
    )
    trust_remote_code: bool = key(
        "run code that comes with the model; only ever on the command line"
    )
    size: ModelSize = part(
        ModelSize, "what costs are estimated from, where the model is no folder that says it"
    )

    def check(self, *, cached: bool = True) -> None:
        """Refuse what cannot be loaded.

        Raises:
            ConfigError: naming the values and the fix.
        """
        one_of("model.dtype", self.dtype, DTYPES)
        if self.attn_implementation is not None:
            one_of("model.attn_implementation", self.attn_implementation, ATTENTION)
        for name, value in vars(self.size).items():
            if value is not None:
                positive(self.size, name, prefix="model.size.")
        check_model(self.model_name_or_path, cached=cached)


@dataclass
class PromptConfig:
    """How a question is put to the model."""

    name: str = key("of the prompt, in messages")
    template: str = key("a question as the model reads it, with {question}")
    reply: str | None = key(
        "how an example goes on after its question, with {answer} or {solution}; null: no examples"
    )
    shots: int = key(
        "with their solutions before the question, the same for all questions, from outside train, "
        "test and study",
        "examples",
    )
    seed: int = key("which examples are drawn")
    chat: bool = key("write turns in the model's own chat format")
    system: str | None = key("the system turn of a chat; null: the format's own")
    stop: str | None = key(
        "every token that contains it ends a completion, as its last; null: the model's end tokens "
        "alone"
    )
    max_length: int | None = key(
        "of a prompt, examples included; questions with a longer one are left out of train, test "
        "and study; null: no limit",
        "tokens",
    )

    def check(self) -> None:
        """Refuse what shows no question or no answer.

        Raises:
            ConfigError: naming the values and the fix.
        """
        if "{question}" not in self.template:
            raise ConfigError(
                f"prompt.template={self.template!r} never shows the question: "
                "put {question} into it"
            )
        if self.shots < 0:
            raise ConfigError(f"prompt.shots={self.shots}: use 0 or more")
        if self.shots and not any(f in (self.reply or "") for f in ("{answer}", "{solution}")):
            raise ConfigError(
                f"prompt.shots={self.shots} with prompt.reply={self.reply!r}: examples need a "
                "reply that shows {answer} or {solution}"
            )
        if self.system is not None and not self.chat:
            raise ConfigError(
                f"prompt.system={self.system!r} is a turn of a chat: use prompt.chat=true, or null"
            )
        if self.stop == "":
            raise ConfigError("prompt.stop='' is in every token: use null to stop at end tokens")
        if self.max_length is not None:
            positive(self, "max_length", prefix="prompt.")
