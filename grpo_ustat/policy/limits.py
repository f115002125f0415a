"""Chunk sizes and memory estimates; importing this module does not need torch."""

from __future__ import annotations

# Largest size in bytes of the logits that scoring keeps in memory at a time.
LOGIT_BYTES = {"cpu": 2**26, "cuda": 2**30}


def pass_bytes(
    tokens: int, entry: int, layers: int, hidden: int, intermediate: int, by_layer: bool
) -> int:
    """Estimate the bytes of memory needed to score `tokens` tokens (rows times columns).

    For each token and layer, the graph holds about 16 vectors of the hidden size and 4 vectors of
    the intermediate size (238 kB measured on a model of Qwen2.5-7B's shape in bfloat16). If scoring
    proceeds layer by layer, the graph holds these vectors for one layer and only the inputs of the
    other layers.

    Args:
        entry: bytes per number.
        by_layer: True if scoring proceeds layer by layer.
    """
    graph = 16 * hidden + 4 * intermediate
    return entry * tokens * (graph + layers * hidden if by_layer else layers * graph)
