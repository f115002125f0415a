"""Gradient checkpointing: layers are recomputed in the backward pass, for memory."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch
from transformers.modeling_layers import GradientCheckpointingLayer

from grpo_ustat.checks import ConfigError


def checkpoint_layers(model: torch.nn.Module) -> None:
    """Let layers be recomputed in the backward pass, inside `recomputing`.

    Raises:
        ConfigError: the model has dropout.
    """
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
    """Layers that may be recomputed in the backward pass are, in here.

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
