"""Sizes and memory of parts that are computed at a time; importing this needs no torch."""

from __future__ import annotations

# Bytes of the logits behind scores that are computed at a time.
LOGIT_BYTES = {"cpu": 2**26, "cuda": 2**30}


def pass_bytes(
    tokens: int, entry: int, layers: int, hidden: int, intermediate: int, by_layer: bool
) -> int:
    """Estimate the bytes in memory while tokens, rows of a batch times columns, are scored.

    For each token and layer a graph holds about 16 vectors of the hidden size and 4 of the
    intermediate size (238 kB measured on a model of Qwen2.5-7B's shape in bfloat16). Layer by layer
    it holds the vectors of one layer, and the inputs of the others.

    Args:
        entry: bytes of a number.
        by_layer: True if layers are computed twice, one at a time.
    """
    graph = 16 * hidden + 4 * intermediate
    return entry * tokens * (graph + layers * hidden if by_layer else layers * graph)
