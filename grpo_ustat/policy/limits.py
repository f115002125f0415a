"""Chunk sizes and memory estimates; importing this module does not need torch."""

from __future__ import annotations

# Bytes of the logits that scoring computes at a time.
LOGIT_BYTES = {"cpu": 2**26, "cuda": 2**30}


def pass_bytes(
    tokens: int, entry: int, layers: int, hidden: int, intermediate: int, by_layer: bool
) -> int:
    """Estimate the bytes in memory while `tokens` tokens (rows times columns) are scored.

    For each token and layer, the graph holds about 16 vectors of the hidden size and 4 vectors of
    the intermediate size (238 kB measured on a model of Qwen2.5-7B's shape in bfloat16). If scoring
    proceeds layer by layer, the graph holds these vectors for one layer and only the inputs of the
    other layers.

    Args:
        entry: bytes per number.
        by_layer: True if layers are computed twice, one at a time.
    """
    graph = 16 * hidden + 4 * intermediate
    return entry * tokens * (graph + layers * hidden if by_layer else layers * graph)
