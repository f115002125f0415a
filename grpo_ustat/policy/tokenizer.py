"""Loading and saving of a model's tokenizer, and encoding of texts."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from transformers import AutoTokenizer, PreTrainedTokenizerBase, PreTrainedTokenizerFast
from transformers.models.auto.tokenization_auto import get_tokenizer_config

from grpo_ustat.config.model import ModelConfig, adapter_base
from grpo_ustat.config.schema import ConfigError
from grpo_ustat.policy.source import errors_in_one_line, resolve

# Generic class of a fast tokenizer: its name since transformers 5.0, and its earlier name.
CLASSES_OF_NO_MODEL = ("TokenizersBackend", "PreTrainedTokenizerFast")


def load_tokenizer(
    model_name_or_path: str,
    *,
    revision: str | None = None,
    trust_remote_code: bool = False,
    key: str = "model_name_or_path",
) -> PreTrainedTokenizerBase:
    """Load a model's tokenizer with AutoTokenizer, or as it is stored if its class is generic.

    AutoTokenizer would replace the pre-tokenizer of a generic class with the default of the model
    type. Adapters without a tokenizer use the tokenizer of their base model. `key`: name of the
    setting, for error messages.
    """
    source = resolve(model_name_or_path)
    common: dict[str, Any] = {"revision": revision, "trust_remote_code": trust_remote_code}
    adapters = adapter_base(Path(source))
    if adapters is not None and not (Path(source) / "tokenizer_config.json").is_file():
        base, revision = adapters
        return load_tokenizer(base, revision=revision, trust_remote_code=trust_remote_code, key=key)
    with errors_in_one_line(model_name_or_path, key):
        config = get_tokenizer_config(source, **common)
        plain = config.get("tokenizer_class") in CLASSES_OF_NO_MODEL
        loader = PreTrainedTokenizerFast if plain else AutoTokenizer
        return loader.from_pretrained(source, padding_side="left", **common)


def configured_tokenizer(
    model: ModelConfig, key: str = "model_name_or_path"
) -> PreTrainedTokenizerBase:
    """Load the configured model's tokenizer; `key`: name of the model's setting, for errors."""
    return load_tokenizer(
        model.model_name_or_path, revision=model.revision,
        trust_remote_code=model.trust_remote_code, key=key,
    )  # fmt: skip


def save_tokenizer(tokenizer: PreTrainedTokenizerBase, folder: Path) -> None:
    """Write a tokenizer's files so that any version of transformers can load them.

    The class name TokenizersBackend is replaced with PreTrainedTokenizerFast, its name before
    version 5.0.
    """
    tokenizer.save_pretrained(folder)
    file = folder / "tokenizer_config.json"
    text = file.read_text(encoding="utf-8")
    newer, older = (f'"tokenizer_class": "{name}"' for name in CLASSES_OF_NO_MODEL)
    file.write_text(text.replace(newer, older), encoding="utf-8")


def encode(
    tokenizer: PreTrainedTokenizerBase, texts: list[str], *, special_tokens: bool
) -> list[list[int]]:
    """Return the token ids of each text, with or without the tokenizer's special tokens."""
    return [tokenizer(text, add_special_tokens=special_tokens)["input_ids"] for text in texts]


def stop_tokens(tokenizer: PreTrainedTokenizerBase, stop: str) -> frozenset[int]:
    """Return the ids of all tokens whose text contains `stop`.

    A `stop` that spans two tokens is not recognised.
    """
    texts = tokenizer.batch_decode([[t] for t in range(len(tokenizer))], skip_special_tokens=False)
    stops = frozenset(t for t, text in enumerate(texts) if stop in text)
    if not stops:
        raise ConfigError(
            f"prompt.stop={stop!r} occurs in none of the tokenizer's {len(texts)} tokens: "
            "use a shorter string, or null"
        )
    return stops
