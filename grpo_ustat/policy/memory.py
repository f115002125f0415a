"""The memory that scoring needs, and the memory that is free."""

from __future__ import annotations

import psutil
import torch
from transformers import PreTrainedModel

SHARE = 1 / 2  # of the free memory that the graph of a whole model may take


def free_bytes(device: torch.device) -> int:
    """Bytes that a tensor could still take; what PyTorch's allocator holds unused is free, too."""
    if device.type != "cuda":
        return psutil.virtual_memory().available
    unused = torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)
    return torch.cuda.mem_get_info(device)[0] + unused


def score_bytes(model: PreTrainedModel, tokens: int, by_layer: bool) -> int:
    """About how many bytes scoring so many tokens holds at once, rows of a batch times columns.

    Of each token and layer a graph holds some 16 vectors of the hidden size and 4 of the
    intermediate size (238 kB measured on a model of Qwen2.5-7B's shape in bfloat16); layer by layer
    that of one layer, and of the others their inputs.
    """
    config, entry = model.config.get_text_config(decoder=True), model.dtype.itemsize
    hidden, layers = config.hidden_size, config.num_hidden_layers
    inner = getattr(config, "intermediate_size", None) or 0
    graph = 16 * hidden + 4 * (max(inner) if isinstance(inner, list) else inner)
    return entry * tokens * (graph + layers * hidden if by_layer else layers * graph)
