"""Sizes of what is computed at a time, and its memory; usable for costs without importing torch."""

from __future__ import annotations

# Bytes of the logits behind scores that are computed at a time.
LOGIT_BYTES = {"cpu": 2**26, "cuda": 2**30}


def pass_bytes(
    tokens: int, entry: int, layers: int, hidden: int, intermediate: int, by_layer: bool
) -> int:
    """Estimate the bytes that scoring so many tokens holds at once, rows of a batch times columns.

    For each token and layer a graph holds some 16 vectors of the hidden size and 4 of the
    intermediate size (238 kB measured on a model of Qwen2.5-7B's shape in bfloat16). Layer by layer
    it holds those of one layer, and the inputs of the others.

    Args:
        entry: bytes of a number.
        by_layer: layers are computed twice, one at a time.
    """
    graph = 16 * hidden + 4 * intermediate
    return entry * tokens * (graph + layers * hidden if by_layer else layers * graph)
