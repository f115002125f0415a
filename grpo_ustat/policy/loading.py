"""Loading of a causal language model from a folder, from this package, or from the hub.

If the folder contains LoRA adapters, they are attached to the base model that they name, or merged
into it.
"""

from __future__ import annotations

import json
import re
import warnings
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast

import torch
from safetensors import safe_open
from torch import nn
from transformers import (
    AutoModelForCausalLM,
    PretrainedConfig,
    PreTrainedModel,
    PreTrainedTokenizerBase,
)
from transformers.utils import logging as transformers_logging

from grpo_ustat.config.model import adapter_base, check_stored_config, weight_files
from grpo_ustat.config.schema import ConfigError
from grpo_ustat.policy.adapters import with_stored_adapters
from grpo_ustat.policy.source import errors_in_one_line, resolve
from grpo_ustat.policy.tokenizer import encode, load_tokenizer

# Accepted weight types, named as in safetensors.
WEIGHT_DTYPES = ("F64", "F32", "BF16", "F16")
# Settings of config.json that make a forward pass return more than logits.
EXTRA_OUTPUTS = ("output_router_logits", "output_attentions", "output_hidden_states")


@dataclass(frozen=True)
class Policy:
    """Model with its tokenizer and special tokens."""

    # Causal language model, in evaluation mode.
    model: PreTrainedModel
    tokenizer: PreTrainedTokenizerBase
    # Ids of the end-of-sequence tokens.
    end_tokens: frozenset[int]
    # Token id that fills padded positions. Masks mark these positions, so any id will do.
    pad_token: int
    # True if sampling and scoring compute in bfloat16 although the weights have a wider type.
    bf16: bool = False
    # True if the tokenizer adds special tokens to prompts; False if the chat format contains them.
    special_tokens: bool = True

    def encode(self, texts: list[str]) -> list[list[int]]:
        """Return the token ids of each prompt."""
        return encode(self.tokenizer, texts, special_tokens=self.special_tokens)

    def computing(self) -> torch.autocast:
        """Return a context manager for forward passes: bfloat16 autocast if `bf16` is set."""
        return torch.autocast(self.model.device.type, torch.bfloat16, enabled=self.bf16)


def load_policy(
    model_name_or_path: str,
    *,
    revision: str | None = None,
    dtype: str = "float32",
    device: str = "cpu",
    attn_implementation: str | None = None,
    trust_remote_code: bool = False,
    tokenizer: PreTrainedTokenizerBase | None = None,
    merge_adapters: bool = True,
) -> Policy:
    """Load a policy in evaluation mode, with all parameters or only LoRA adapters trainable.

    Args:
        model_name_or_path: `embedded:NAME`, `cached:NAME`, `org/name`, or a folder written by
            save_pretrained (of a model or of PEFT's LoRA adapters).
        revision: branch, tag or commit on the hub.
        dtype: name of a torch dtype.
        device: torch device.
        attn_implementation: transformers' name of the attention implementation; None for the
            default.
        trust_remote_code: True to run code that is distributed with the model.
        tokenizer: tokenizer of the model, if it is already loaded; None to load it.
        merge_adapters: matters only for a folder of LoRA adapters. True to add the adapters to the
            weights of their base model, which are then trainable; False to keep the adapters
            separate, as the only trainable parameters.
    """
    transformers_logging.disable_progress_bar()
    common = {"revision": revision, "trust_remote_code": trust_remote_code}
    tokenizer = tokenizer or load_tokenizer(model_name_or_path, **common)
    with errors_in_one_line(model_name_or_path):
        options = dict(attn_implementation=attn_implementation, **common)
        model = _model(
            resolve(model_name_or_path), merge=merge_adapters, dtype=getattr(torch, dtype),
            **options,
        )  # fmt: skip
        for name, parameter in model.named_parameters():
            if not torch.isfinite(parameter).all():
                raise ConfigError(f"{name} is not finite: download the model again")
    end_tokens = _end_tokens(model, tokenizer)
    pad = _pad_token(model, tokenizer, model_name_or_path)
    # The decorator of `to` in transformers loses the type of `self`.
    model.to(device).eval()  # pyright: ignore[reportArgumentType]
    return Policy(model, tokenizer, end_tokens, min(end_tokens) if pad is None else pad)


def _model(source: str, *, revision: str | None, merge: bool, **options: Any) -> PreTrainedModel:
    """Load the causal language model from a folder or the hub.

    LoRA adapters are attached to the base model that they name, or merged into it. If the base
    model is itself a folder of adapters, its own adapters are always merged.

    Args:
        source: folder or hub id.
        revision: branch, tag or commit on the hub.
        merge: True to merge LoRA adapters into the weights.
        options: further arguments of transformers' `from_pretrained`.
    """
    adapters = adapter_base(Path(source))
    if adapters is not None:
        base, revision = adapters
        model = _model(resolve(base), revision=revision, merge=True, **options)
        # A PeftModel has all attributes of its base model, so it can be used as one.
        return cast(PreTrainedModel, with_stored_adapters(model, source, merge=merge))
    stored, _ = PretrainedConfig.get_config_dict(source, revision=revision)
    check_stored_config(stored, source, trusted=options.get("trust_remote_code", False))
    folder = Path(source)
    files = weight_files(folder) if folder.is_dir() else []
    if (file := folder / "generation_config.json").is_file():
        # Transformers would ignore a damaged file silently. Parsing it here raises an error.
        json.loads(file.read_text(encoding="utf-8"))
    verbosity = transformers_logging.get_verbosity()
    # Messages are silenced, because `_check_weights` reports the same facts from `report`.
    transformers_logging.set_verbosity_error()
    try:
        loaded: Any = AutoModelForCausalLM.from_pretrained(
            source, revision=revision, use_safetensors=True, output_loading_info=True,
            ignore_mismatched_sizes=True, **options,
        )  # fmt: skip
    finally:
        transformers_logging.set_verbosity(verbosity)
    model, report = loaded
    if getattr(model, "_hf_peft_config_loaded", False):
        raise ConfigError("the hub has adapters under this name: download them to a folder")
    _check_weights(model, report, files)
    for part in (model.config, model.config.get_text_config()):
        # Extra outputs cost memory and time. Without them, the logits stay the same.
        for name in EXTRA_OUTPUTS:
            if getattr(part, name, False):
                setattr(part, name, False)
        part.return_dict = True
    return model


def _check_weights(model: PreTrainedModel, report: dict[str, Any], files: list[Path]) -> None:
    """Raise an error if the checkpoint's weights do not match the model.

    The check is needed because transformers initialises missing weights at random. Buffers of the
    checkpoint, such as masks, are ignored, because the model creates them itself.

    Args:
        model: model as loaded.
        report: transformers' lists of weights that are missing, unexpected or of another shape.
        files: checkpoint files whose weight types are checked; empty for a model on the hub.
    """
    names = [name for name, _ in model.named_parameters()]
    if differing := sorted(report["mismatched_keys"]):
        name, in_file, in_model = differing[0]
        raise ConfigError(
            f"{name} has shape {list(in_file)} in the checkpoint, but {list(in_model)} by "
            f"config.json ({len(differing)} weights differ): use the config.json that was saved "
            "with these weights"
        )
    if lacking := sorted(report["missing_keys"], key=[*names, *report["missing_keys"]].index):
        tied = " (with tie_word_embeddings=true it would share the embedding's weight)"
        raise ConfigError(
            f"the checkpoint lacks {lacking[0]}{_more(lacking)}, which config.json needs"
            f"{tied if lacking[0] == 'lm_head.weight' else ''}: download the model again, or use "
            "the config.json that was saved with these weights"
        )
    for file in files:
        with safe_open(file, "pt") as tensors:
            for key in tensors.keys():  # noqa: SIM118, it is no mapping
                kind = tensors.get_slice(key).get_dtype()
                if kind not in WEIGHT_DTYPES and any(name.endswith(key) for name in names):
                    raise ConfigError(
                        f"{key} has type {kind}: use weights of type {', '.join(WEIGHT_DTYPES)}"
                    )
    buffers = {name.rpartition(".")[2] for name, _ in model.named_buffers()}
    unexpected = [
        x for x in sorted(report["unexpected_keys"]) if x.rpartition(".")[2] not in buffers
    ]
    modules = {name.rpartition(".")[0] for name in names}
    # Names of the model's weights with every layer number replaced by 0. They show whether an
    # unexpected weight belongs to a layer beyond those of config.json.
    layers = {re.sub(r"\d+", "0", name) for name in names}
    placeless = [
        name
        for name in unexpected
        if name.rpartition(".")[0] in modules or re.sub(r"\d+", "0", name) in layers
    ]
    if placeless:
        raise ConfigError(
            f"the checkpoint contains {placeless[0]}{_more(placeless)}, but the model of "
            "config.json has no such weight: use the config.json that was saved with these weights"
        )
    if unexpected:
        warnings.warn(
            f"ignored in the checkpoint: {unexpected[0]}{_more(unexpected)}, because the model "
            "of config.json has no such weight",
            stacklevel=2,
        )


def _more(names: list[Any]) -> str:
    return f" and {len(names) - 1} more" * (len(names) > 1)


def _end_tokens(model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase) -> frozenset[int]:
    """Return the end-of-sequence ids that the generation configuration and the tokenizer name."""
    configured = model.generation_config.eos_token_id
    listed = configured if isinstance(configured, list) else [configured]
    candidates = (*listed, cast("int | None", tokenizer.eos_token_id))
    end_tokens = frozenset(token for token in candidates if token is not None)
    if not end_tokens:
        raise ConfigError(
            "the model has no end-of-sequence token: set eos_token_id in generation_config.json"
        )
    return end_tokens


def _pad_token(model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase, name: str) -> int | None:
    """Return the tokenizer's padding id; None if it has none or the embedding has no row for it.

    Tokenizers of base models often have an added padding token for which the embedding has no row.
    If any other token has no row in the embedding, the function raises an error.

    Args:
        model: loaded model.
        tokenizer: tokenizer of the model.
        name: name of the model, for the error message.
    """
    pad = cast("int | None", tokenizer.pad_token_id)
    rows = len(cast(nn.Embedding, model.get_input_embeddings()).weight)
    rowless = [x for x, token in tokenizer.get_vocab().items() if token >= rows and token != pad]
    if rowless:
        raise ConfigError(
            f"no model could be loaded from model_name_or_path={name}: its tokenizer "
            f"has {len(tokenizer)} tokens and its embedding {rows} rows, none for {rowless[0]!r}"
            f"{_more(rowless)}: use the tokenizer that was saved with these weights"
        )
    return None if pad is not None and pad >= rows else pad
