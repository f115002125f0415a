"""LoRA adapters (Hu et al. 2022) by PEFT, an optional dependency: on a model or merged into it."""

from __future__ import annotations

import importlib
import os
import warnings
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from transformers import PreTrainedModel
from transformers.modeling_layers import GradientCheckpointingLayer

from grpo_ustat.config.command_line import install_line
from grpo_ustat.config.schema import ConfigError
from grpo_ustat.config.train import LoraConfig
from grpo_ustat.terminal.streams import single_line


def with_adapters(
    lora: LoraConfig, model: PreTrainedModel, *, seed: int, revision: str | None, rollout: str
) -> torch.nn.Module:
    """The model frozen, with the configured adapters to be trained; they name it as their base.

    Args:
        lora: the adapters.
        model: whose layers get them.
        seed: of their random start.
        revision: of the model on the hub, which they name.
        rollout: the name of what samples.
    """
    names = lora.target_modules
    assert names is not None
    peft = _peft(f"lora.r={lora.r}")
    torch.manual_seed(seed)  # adapters start at random, the same on every rank
    options = peft.LoraConfig(
        r=lora.r,
        lora_alpha=lora.lora_alpha,
        lora_dropout=0.0,
        target_modules=names if names == "all-linear" else names.split(","),
        revision=revision,
    )
    try:
        with _quiet():
            adapted = peft.get_peft_model(model, options).eval()
    except ValueError as error:
        reason = single_line(error, 300)
        raise ConfigError(f"lora.target_modules={names}: {reason}") from error
    check_vllm_reads(adapted, rollout, f"lora.target_modules={names}")
    return adapted


def check_vllm_reads(model: Any, rollout: str, what: str) -> None:
    """Refuse vLLM where adapters are on a weight that layers share, see `adapted_shared_layers`.

    Args:
        model: with or without adapters.
        rollout: the name of what samples.
        what: has the adapters, as they were asked for.
    """
    shared = adapted_shared_layers(model)
    if shared and rollout != "local":
        layer = next(iter(shared)).rpartition(".")[2]
        raise ConfigError(
            f"{what} with rollout={rollout}: {layer} shares its weight with another layer, which "
            "vLLM would change too: leave it out, or use rollout=local"
        )


def with_stored_adapters(
    model: PreTrainedModel, folder: str, *, merge: bool = False
) -> torch.nn.Module:
    """The model with a folder's adapters on it, which alone are trainable, as in the run that
    trained them; or with them added to its weights, all of which are trainable again.

    In a model of 16 bits the sums are rounded. Where adapters are on an embedding that is the
    output layer's too, the two are two weights once they are merged, as they are two layers to
    PEFT.

    Args:
        model: the adapters' own.
        folder: of the adapters.
        merge: whether they are added to the weights.
    """
    peft = _peft(f"{folder} with LoRA adapters")
    try:
        with _quiet():
            options = peft.PeftConfig.from_pretrained(folder)
            if tokens := getattr(options, "alora_invocation_tokens", None):
                raise ValueError(
                    f"after alora_invocation_tokens={tokens} alone they are part of it"
                )
            options.inference_mode = merge
            adapted = peft.PeftModel(model, options)
            report = adapted.load_adapter(
                folder, "default", torch_device="cpu", is_trainable=not merge
            )
            if merge:
                for layer in adapted_shared_layers(adapted).values():
                    layer.weight = torch.nn.Parameter(layer.weight.detach().clone())
                    model.config.get_text_config().tie_word_embeddings = False
                adapted = adapted.merge_and_unload()
    except (RuntimeError, ValueError, LookupError, TypeError, AttributeError) as error:
        reason = single_line(f"{type(error).__name__}: {error}", 300)
        raise ConfigError(f"the adapters do not fit their base model: {reason}") from error
    differing = [*report.missing_keys, *report.unexpected_keys]
    if differing:
        raise ConfigError(
            f"the adapters do not fit their base model: {differing[0]} is in one only"
        )
    if merge:
        adapted.requires_grad_(True)
        adapted.name_or_path = os.path.abspath(folder)  # what adapters on top name as their base
    return adapted


def adapted_shared_layers(model: Any) -> dict[str, Any]:
    """Layers of a PEFT model, by name, that have adapters or trained tokens on a weight which other
    layers share, as a tied embedding is the output layer's: put into that weight they would move
    both. Trained tokens that PEFT ties as well are meant to.
    """
    owners = Counter(weight for _, weight in model.named_parameters(remove_duplicate=False))
    ties = {
        tied
        for layer in model.modules()
        if (other := getattr(layer, "tied_adapter", None)) is not None
        for tied in (layer, other)
    }
    layers = {
        name: layer.get_base_layer()
        for name, layer in model.named_modules()
        if hasattr(layer, "lora_A")
        or (hasattr(layer, "trainable_tokens_delta") and layer not in ties)
    }
    return {
        name: layer for name, layer in layers.items() if owners[getattr(layer, "weight", None)] > 1
    }


def _peft(what: str) -> Any:
    try:
        return importlib.import_module("peft")
    except ImportError as error:
        raise ConfigError(f"{what} needs peft: {install_line('lora')}") from error


@contextmanager
def _quiet() -> Iterator[None]:
    """Within, PEFT gives no warning of a deprecated attribute of transformers, nor of tied weights,
    see `adapted_shared_layers`.
    """
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "`is_gradient_checkpointing`", FutureWarning)
        warnings.filterwarnings("ignore", ".*(tie_word_embeddings|save_embedding_layers)")
        yield


def checkpoint_layers(model: PreTrainedModel) -> None:
    """Prepare a model's layers for recomputing their activations, see `recomputing`."""
    dropout = {k: v for k, v in model.config.to_dict().items() if "drop" in k and v}
    if dropout:
        name, value = next(iter(dropout.items()))
        raise ConfigError(
            f"gradient_checkpointing=true with the model's {name}={value}: layers in training mode "
            "would drop at random; use gradient_checkpointing=false"
        )
    later_name = getattr(model, "activation_checkpointing_enable", None)
    (later_name or model.gradient_checkpointing_enable)({"use_reentrant": False})


@contextmanager
def recomputing(model: torch.nn.Module) -> Iterator[None]:
    """Within, layers prepared by `checkpoint_layers` recompute their activations in the backward
    pass.

    transformers does so in training mode only, and then takes no cache: elsewhere the layers stay
    out of it, or sampling would read one token at a time without the others. The mode is set on
    the layers alone, because what is scored must be what was sampled, without dropout.
    """
    layers = [m for m in model.modules() if getattr(m, "gradient_checkpointing", False)]
    layers = [layer for layer in layers if isinstance(layer, GradientCheckpointingLayer)]
    for layer in layers:
        layer.training = True
    try:
        yield
    finally:
        for layer in layers:
            layer.training = False
