"""Chunk sizes and memory estimates; importing this module does not need torch."""

from __future__ import annotations

# Largest size in bytes of the logits that may be in memory at a time, by device type.
LOGIT_BYTES = {"cpu": 2**26, "cuda": 2**30}


def pass_bytes(
    tokens: int, entry: int, layers: int, hidden: int, intermediate: int, by_layer: bool
) -> int:
    """Estimate the bytes of memory that a backward pass over `tokens` tokens needs.

    For each token and layer, autograd's graph holds about 16 vectors of the hidden size and 4
    vectors of the intermediate size. On a model of Qwen2.5-7B's shape in bfloat16, this was
    measured as 238 kB per token and layer. If the backward pass proceeds layer by layer, the graph
    holds these vectors for one layer only, and the inputs of all layers.

    Args:
        tokens: number of rows times number of columns of the token array, padding included.
        entry: bytes per number.
        layers: number of decoder layers.
        hidden, intermediate: sizes of a layer's vectors, from the model's config.json.
        by_layer: True if only one layer's graph is in memory at a time.
    """
    graph = 16 * hidden + 4 * intermediate
    return entry * tokens * (graph + layers * hidden if by_layer else layers * graph)
