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
    """Return the frozen model with the configured adapters, which are trainable.

    Args:
        seed: seed of the adapters' random initial weights.
        revision: revision of the model on the hub; the adapters name it with their base model.
        rollout: name of the sampler, to refuse adapters that vLLM cannot read.
    """
    names = lora.target_modules
    assert names is not None
    peft = _peft(f"lora.r={lora.r}")
    # Adapters start at random, the same on every rank.
    torch.manual_seed(seed)
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
    """Refuse vLLM with adapters on a weight that layers share, see `adapted_shared_layers`.

    Args:
        model: with or without adapters.
        rollout: name of the sampler.
        what: the request for the adapters, for the message.
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
    """Return the model with a folder's adapters, separate or merged into its weights.

    If separate, only the adapters are trainable, as in the run that trained them. If merged, all
    weights are trainable; in a model of 16 bits the sums are rounded. If adapters are on an
    embedding that shares its weight with the output layer, merging makes them two weights, because
    PEFT treats them as two layers.

    Args:
        model: the adapters' base model; changed in place.
        folder: folder of the adapters.
        merge: add the adapters to the weights.
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
        # Adapters on top of it name this folder as their base.
        adapted.name_or_path = os.path.abspath(folder)
    return adapted


def adapted_shared_layers(model: Any) -> dict[str, Any]:
    """Return the layers of a PEFT model, by name, with adapters on a weight that layers share.

    Trained tokens count like adapters. A tied embedding shares the output layer's weight, so
    adapters that are merged into it would change both layers. Trained tokens that PEFT also ties
    are excluded, because they are meant to change both.
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
    """Silence PEFT's warnings of a deprecated attribute of transformers, and of tied weights.

    For the latter see `adapted_shared_layers`.
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
    """Make layers prepared by `checkpoint_layers` recompute their activations in the backward pass.

    Transformers recomputes only in training mode, and then uses no cache. Outside the block the
    layers must not recompute, because sampling would read each token without the others. Only the
    layers are set to training mode, because scores need the sampled policy, without dropout.
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
