"""Location of a model, one-line errors while loading it, and values of its config.json."""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from huggingface_hub import constants as hub_settings
from huggingface_hub.errors import StrictDataclassError
from safetensors import SafetensorError
from transformers import AutoConfig, PretrainedConfig

from grpo_ustat.config.model import ModelConfig, adapter_base, model_folder
from grpo_ustat.config.schema import ConfigError
from grpo_ustat.policy.memory import out_of_memory
from grpo_ustat.tasks.hub import go_offline_if_unreachable
from grpo_ustat.terminal.streams import single_line


def resolve(model_name_or_path: str) -> str:
    """Return the absolute path if the name is an existing folder, otherwise the name (a hub id)."""
    folder = model_folder(model_name_or_path)
    return str(folder.absolute()) if folder.exists() else model_name_or_path


@contextmanager
def errors_in_one_line(model_name_or_path: str, key: str = "model_name_or_path") -> Iterator[None]:
    """Convert any exception in the block into a ConfigError with a one-line message and a fix.

    Out-of-memory errors pass through unchanged, because callers handle them.

    Args:
        model_name_or_path: folder or hub id that is loaded in the block.
        key: name of the setting that contains it, for the error message.
    """
    of_hub = not Path(resolve(model_name_or_path)).exists()
    unreachable = of_hub and go_offline_if_unreachable()
    try:
        yield
    except Exception as error:
        # A damaged file can make transformers raise any exception.
        if isinstance(error, RuntimeError) and out_of_memory(error):
            raise
        plain = isinstance(error, OSError | ValueError | ImportError | StrictDataclassError)
        reason = single_line(error if plain else f"{type(error).__name__}: {error}", 300)
        if isinstance(error, json.JSONDecodeError):
            reason = f"one of its JSON files is incomplete or damaged ({reason}): download it again"
        if isinstance(error, SafetensorError):
            reason = f"a weight file is incomplete or damaged ({reason}): download it again"
        if unreachable:
            reason = (
                "it is not in the hub's local cache, and the hub does not answer: download it "
                "on a machine with network access and set HF_HUB_OFFLINE=1, or name a folder"
            )
        elif hub_settings.HF_HUB_OFFLINE and of_hub:
            reason = (
                "it is not in the hub's local cache, and HF_HUB_OFFLINE=1 prevents its download: "
                "unset HF_HUB_OFFLINE, or name a folder"
            )
        if "trust_remote_code" in str(error):
            reason = (
                "it needs Python code from the model's repository; read that code, and if you "
                "trust it, add model.trust_remote_code=true to the command line"
            )
        raise ConfigError(
            f"no model could be loaded from {key}={model_name_or_path}: {reason}"
        ) from error


def _text_config(model: ModelConfig) -> PretrainedConfig:
    """Return the part of the configured model's config.json that describes the language model."""
    name, revision = model.model_name_or_path, model.revision
    while adapters := adapter_base(model_folder(name)):
        name, revision = adapters
    with errors_in_one_line(name):
        stored = AutoConfig.from_pretrained(
            resolve(name), revision=revision, trust_remote_code=model.trust_remote_code
        )
    return stored.get_text_config(decoder=True)


def context_length(model: ModelConfig) -> int | None:
    """Return the largest number of tokens of prompt and completion together; None if unknown."""
    return getattr(_text_config(model), "max_position_embeddings", None)


def rope_switch(config: PretrainedConfig) -> int | None:
    """Return the row length up to which LongRoPE uses its short factors; None without LongRoPE.

    LongRoPE scales position embeddings by short or long factors. It compares the longest row of a
    forward pass with this length. If the longest row exceeds it, the long factors are used for all
    rows, including their first tokens; see `dynamic_rope_update` in transformers. For
    the RoPE type `dynamic`, that function also rescales the embeddings, but only for rows longer
    than `max_position_embeddings`. No row here is that long.
    """
    rope = getattr(config, "rope_parameters", None) or getattr(config, "rope_scaling", None) or {}
    # A model with several kinds of layers has a dictionary of rope parameters for each kind.
    kinds = [rope, *(kind for kind in rope.values() if isinstance(kind, dict))]
    switches = [
        kind.get("original_max_position_embeddings")
        or getattr(config, "original_max_position_embeddings", None)
        for kind in kinds
        if "longrope" in (kind.get("rope_type"), kind.get("type"))
    ]
    return min((switch for switch in switches if switch is not None), default=None)


def crossed_switch(model: ModelConfig, shortest: int, longest: int) -> int | None:
    """Return `rope_switch` if some forward passes exceed this length and others do not, else None.

    If some passes use LongRoPE's long factors and others its short factors, a token's
    log-probability depends on the other rows of the pass and on the cache.

    Args:
        model: configured model.
        shortest: number of tokens in the shortest prompt. The sampler's first pass can be one token
            shorter than the prompt.
        longest: number of tokens in the longest row, including its completion.
    """
    switch = rope_switch(_text_config(model))
    return switch if switch is not None and shortest <= switch + 1 and longest > switch else None
