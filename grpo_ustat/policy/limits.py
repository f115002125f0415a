"""How much is computed at a time, and what it holds; known before torch is imported, for costs."""

from __future__ import annotations

LOGIT_BYTES = {"cpu": 2**26, "cuda": 2**30}  # of the logits behind scores, at a time


def pass_bytes(
    tokens: int, entry: int, layers: int, hidden: int, intermediate: int, by_layer: bool
) -> int:
    """About how many bytes scoring so many tokens holds at once, rows of a batch times columns.

    Of each token and layer a graph holds some 16 vectors of the hidden size and 4 of the
    intermediate size (238 kB measured on a model of Qwen2.5-7B's shape in bfloat16); layer by layer
    that of one layer, and of the others their inputs.

    Args:
        tokens: how many.
        entry: bytes of a number.
        layers, hidden, intermediate: of the model.
        by_layer: whether layers are computed twice.
    """
    graph = 16 * hidden + 4 * intermediate
    return entry * tokens * (graph + layers * hidden if by_layer else layers * graph)
