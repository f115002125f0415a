"""Quantised base weights under adapters, which are never trained or repacked here."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from torch import nn

from grpo_ustat.config.schema import ConfigError

# A bitsandbytes layer with this attribute set packs its weights for the CPU.
PACKS = "support_avx512bf16_for_cpu"


@contextmanager
def unpacked(model: nn.Module) -> Iterator[None]:
    """Keep bitsandbytes from packing the weights of its 4-bit layers.

    On a CPU with AVX512-BF16 a forward pass in evaluation mode and without gradients would pack
    them for inference. Packed weights propagate no gradient, and stay packed in training.
    """
    layers = [m for m in model.modules() if getattr(m, PACKS, False)]
    for layer in layers:
        state = getattr(layer.weight, "quant_state", None)
        if getattr(state, "packing_format_for_cpu", False):
            raise ConfigError(
                "bitsandbytes has packed 4-bit weights for inference on this CPU, so no gradient "
                "flows through them: load the model anew, and run it in evaluation mode only on "
                "a GPU"
            )
    for layer in layers:
        vars(layer)[PACKS] = False
    try:
        yield
    finally:
        for layer in layers:
            vars(layer)[PACKS] = True
