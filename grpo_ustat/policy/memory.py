"""Memory that backward passes need, free memory, and out-of-memory errors."""

from __future__ import annotations

import psutil
import torch
from accelerate.utils.memory import should_reduce_batch_size
from transformers import PreTrainedModel

from grpo_ustat.config.schema import ConfigError
from grpo_ustat.policy.limits import pass_bytes

# Largest share of the free memory that the autograd graph of the whole model is allowed to use.
GRAPH_MEMORY_SHARE = 1 / 2


def free_bytes(device: torch.device) -> int:
    """Return the bytes free for new tensors, including what PyTorch reserves unused."""
    if device.type != "cuda":
        return psutil.virtual_memory().available
    unused = torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)
    return torch.cuda.mem_get_info(device)[0] + unused


def score_bytes(model: PreTrainedModel, tokens: int, by_layer: bool) -> int:
    """Estimate the bytes that a backward pass over `tokens` tokens needs; see `pass_bytes`."""
    config = model.config.get_text_config(decoder=True)
    inner = getattr(config, "intermediate_size", None) or 0
    inner = max(inner) if isinstance(inner, list) else inner
    shape = (config.num_hidden_layers, config.hidden_size, inner)
    return pass_bytes(tokens, model.dtype.itemsize, *shape, by_layer)


def check_weights(weights: int, completion: int, free: int, device: str) -> None:
    """Raise an error if the model and one completion do not fit into a device's free memory.

    Args:
        weights: bytes of the model's weights.
        completion: bytes needed for the layer-by-layer backward pass of one completion.
        free: free bytes.
        device: device of the model, for the error message.
    """
    if weights + completion <= free:
        return
    words = [f"{size / 1e9:.1f} GB" for size in (weights, completion, weights + completion, free)]
    raise ConfigError(
        f"the measurement needs {words[2]} on one device ({words[0]} for the weights, {words[1]} "
        f"for one completion), but {device} has {words[3]} free: use model.dtype=bfloat16, a "
        "shorter max_completion_length, or a GPU with more memory"
    )


def out_of_memory(error: RuntimeError) -> bool:
    """Return True if the error means that an accelerator or the CPU ran out of memory."""
    return isinstance(error, torch.OutOfMemoryError) or should_reduce_batch_size(error)
