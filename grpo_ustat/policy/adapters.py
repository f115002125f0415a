"""LoRA adapters (Hu et al. 2022), attached to a model or merged into it.

Adapters need PEFT, which is an optional dependency.
"""

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
    """Freeze a model and return it with new trainable adapters.

    Args:
        lora: settings of the adapters.
        model: base model.
        seed: seed of the adapters' random initial weights.
        revision: revision of the base model on the hub, stored in the adapters' configuration.
        rollout: name of the sampler. If it is vLLM, adapters that vLLM cannot apply are refused.
    """
    names = lora.target_modules
    assert names is not None
    peft = _peft(f"lora.r={lora.r}")
    # All ranks use the same seed, because they must start from the same random adapters.
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
    """Raise an error if vLLM is the sampler and an adapted layer shares its weight with another.

    vLLM would then change both layers, although the adapters belong to one.

    Args:
        model: model with or without adapters.
        rollout: name of the sampler.
        what: setting that requested the adapters, for the error message.
    """
    shared = adapted_shared_layers(model)
    if shared and rollout != "local":
        layer = next(iter(shared)).rpartition(".")[2]
        raise ConfigError(
            f"{what} with rollout={rollout}: {layer} shares its weight with another layer, which "
            "vLLM would change too: leave out this layer, or use rollout=local"
        )


def with_stored_adapters(
    model: PreTrainedModel, folder: str, *, merge: bool = False
) -> torch.nn.Module:
    """Return the model with adapters from a folder, kept separate or merged into the weights.

    Separate adapters are the only trainable parameters, as in the run that trained them. After
    merging, all weights are trainable; in a 16-bit model, the sums of weights and adapters are
    rounded. If an adapted embedding shares its weight with the output layer, merging first gives
    the embedding its own copy of the weight, because its adapters must not change the output layer.

    Args:
        model: base model of the adapters; changed in place.
        folder: folder of the adapters.
        merge: True to add the adapters to the weights, False to keep them separate.
    """
    peft = _peft(f"{folder} with LoRA adapters")
    try:
        with _quiet():
            options = peft.PeftConfig.from_pretrained(folder)
            if tokens := getattr(options, "alora_invocation_tokens", None):
                raise ValueError(f"they apply only after alora_invocation_tokens={tokens}")
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
            f"the adapters do not fit their base model: only one of the two has {differing[0]}"
        )
    if merge:
        adapted.requires_grad_(True)
        # If new adapters are later trained on the merged model, they store this folder as the name
        # of their base model.
        adapted.name_or_path = os.path.abspath(folder)
    return adapted


def adapted_shared_layers(model: Any) -> dict[str, Any]:
    """Return the adapted layers, by name, that share their weight with another layer.

    For example, a tied embedding shares the weight of the output layer, so merging adapters into
    the embedding would change both layers. PEFT's trainable tokens count as adapters here. They are
    excluded if PEFT ties them across the two layers, because they are then meant to change both.
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
    """Silence PEFT's warnings about a deprecated transformers attribute and about tied weights.

    Callers treat tied weights themselves, with `adapted_shared_layers`.
    """
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "`is_gradient_checkpointing`", FutureWarning)
        warnings.filterwarnings("ignore", ".*(tie_word_embeddings|save_embedding_layers)")
        yield


def checkpoint_layers(model: PreTrainedModel) -> None:
    """Enable gradient checkpointing, which takes effect only in a block of `recomputing`."""
    dropout = {k: v for k, v in model.config.to_dict().items() if "drop" in k and v}
    if dropout:
        name, value = next(iter(dropout.items()))
        raise ConfigError(
            f"gradient_checkpointing=true with the model's {name}={value}: layers in training mode "
            "would apply dropout; use gradient_checkpointing=false"
        )
    later_name = getattr(model, "activation_checkpointing_enable", None)
    (later_name or model.gradient_checkpointing_enable)({"use_reentrant": False})


@contextmanager
def recomputing(model: torch.nn.Module) -> Iterator[None]:
    """Make layers prepared by `checkpoint_layers` recompute their activations in the backward pass.

    Transformers recomputes activations only in layers in training mode, and these layers then use
    no cache. The block therefore sets these layers to training mode and sets them back at the end,
    because sampling needs the cache. All other modules stay in evaluation mode, because gradients
    must be computed without dropout, like the sampling probabilities.
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
