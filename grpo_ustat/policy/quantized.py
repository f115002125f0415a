"""Protection of 4-bit base weights, which bitsandbytes would repack for inference on a CPU."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from torch import nn

from grpo_ustat.config.schema import ConfigError

# If this attribute of a bitsandbytes layer is True, the layer packs its weights for the CPU.
PACKS = "support_avx512bf16_for_cpu"


@contextmanager
def unpacked(model: nn.Module) -> Iterator[None]:
    """Prevent bitsandbytes from packing the weights of its 4-bit layers within the block.

    On a CPU with AVX512-BF16, bitsandbytes would pack the weights for inference in the first
    forward pass that is in evaluation mode and without gradients. The weights would then stay
    packed during training, and no gradient can flow through packed weights.
    """
    layers = [m for m in model.modules() if getattr(m, PACKS, False)]
    for layer in layers:
        state = getattr(layer.weight, "quant_state", None)
        if getattr(state, "packing_format_for_cpu", False):
            raise ConfigError(
                "bitsandbytes has packed 4-bit weights for inference on this CPU, so no gradient "
                "flows through them: reload the model, and run it in evaluation mode only on "
                "a GPU"
            )
    for layer in layers:
        vars(layer)[PACKS] = False
    try:
        yield
    finally:
        for layer in layers:
            vars(layer)[PACKS] = True
