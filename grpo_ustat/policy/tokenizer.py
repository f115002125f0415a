"""Loading and saving of a model's tokenizer, and encoding of texts."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from transformers import AutoTokenizer, PreTrainedTokenizerBase, PreTrainedTokenizerFast
from transformers.models.auto.tokenization_auto import get_tokenizer_config

from grpo_ustat.config.model import ModelConfig, adapter_base
from grpo_ustat.config.schema import ConfigError
from grpo_ustat.policy.source import errors_in_one_line, resolve

# Names of transformers' generic class of fast tokenizers: since version 5.0, and before.
CLASSES_OF_NO_MODEL = ("TokenizersBackend", "PreTrainedTokenizerFast")


def load_tokenizer(
    model_name_or_path: str,
    *,
    revision: str | None = None,
    trust_remote_code: bool = False,
    key: str = "model_name_or_path",
) -> PreTrainedTokenizerBase:
    """Load the tokenizer of a model, or of the base model if adapters have no tokenizer.

    If the stored class is generic, the tokenizer is not loaded with AutoTokenizer, which would
    replace its pre-tokenizer with the default of the model type.

    Args:
        model_name_or_path: folder or hub id.
        revision: branch, tag or commit on the hub.
        trust_remote_code: True to run code that is distributed with the tokenizer.
        key: name of the setting that contains the folder or id, for error messages.
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
    """Write a tokenizer's files so that older and newer versions of transformers can load them.

    The class name TokenizersBackend, new in version 5.0, is replaced with the older name
    PreTrainedTokenizerFast, which all versions accept.
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

    If a completion spells `stop` with two tokens, sampling does not stop there.
    """
    texts = tokenizer.batch_decode([[t] for t in range(len(tokenizer))], skip_special_tokens=False)
    stops = frozenset(t for t, text in enumerate(texts) if stop in text)
    if not stops:
        raise ConfigError(
            f"prompt.stop={stop!r} occurs in none of the tokenizer's {len(texts)} tokens: "
            "use a shorter string, or null"
        )
    return stops
