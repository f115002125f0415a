"""LoRA adapters (Hu et al. 2022) by PEFT, an optional dependency: on a model or merged into it."""

from __future__ import annotations

import importlib
import os
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from transformers import PreTrainedModel

from grpo_ustat.checks import ConfigError
from grpo_ustat.config import TrainConfig


def with_adapters(config: TrainConfig, model: PreTrainedModel) -> torch.nn.Module:
    """The model frozen, with the configured adapters to be trained; they name it as their base.

    Raises:
        ConfigError: peft is missing, or the model has no such modules.
    """
    lora, names = config.lora, config.lora.target_modules
    peft = _peft(f"lora.r={lora.r}")
    torch.manual_seed(config.seed)  # adapters start at random, the same on every rank
    options = peft.LoraConfig(
        r=lora.r,
        lora_alpha=lora.lora_alpha,
        lora_dropout=0.0,
        target_modules=names if names == "all-linear" else names.split(","),
        revision=config.model.revision,
    )
    try:
        with _quiet():
            return peft.get_peft_model(model, options).eval()
    except ValueError as error:
        reason = " ".join(str(error).split())[:300]
        raise ConfigError(f"lora.target_modules={names}: {reason}") from error


def merged(model: PreTrainedModel, folder: str) -> PreTrainedModel:
    """The model with a folder's adapters added to its weights, all of them trainable again.

    In a model of 16 bits the sums are rounded.

    Raises:
        ConfigError: peft is missing, or the adapters are of another model.
    """
    peft = _peft(f"{folder} with LoRA adapters")
    try:
        with _quiet():
            adapted = peft.PeftModel(model, peft.PeftConfig.from_pretrained(folder))
            found = adapted.load_adapter(folder, "default", torch_device="cpu")
    except (RuntimeError, ValueError) as error:
        reason = " ".join(str(error).split())[:300]
        raise ConfigError(f"the adapters do not fit their base model: {reason}") from error
    differing = [*found.missing_keys, *found.unexpected_keys]
    if differing:
        raise ConfigError(
            f"the adapters do not fit their base model: {differing[0]} is in one only"
        )
    result = adapted.merge_and_unload().requires_grad_(True)
    result.name_or_path = os.path.abspath(folder)  # what adapters on top of it name as their base
    return result


def _peft(what: str) -> Any:
    try:
        return importlib.import_module("peft")
    except ImportError as error:
        raise ConfigError(f"{what} needs peft: pip install 'grpo-ustat[lora]'") from error


@contextmanager
def _quiet() -> Iterator[None]:
    """PEFT asks transformers by a name of before."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "`is_gradient_checkpointing`", FutureWarning)
        yield
