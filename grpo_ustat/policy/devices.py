"""Devices: whether one can be used, and whether its memory ran out."""

from __future__ import annotations

import torch
from accelerate.utils.memory import should_reduce_batch_size

from grpo_ustat.checks import ConfigError


def check_device(device: str) -> None:
    """Refuse a device that this PyTorch cannot use.

    Raises:
        ConfigError: naming it.
    """
    try:
        torch.empty(0, device=device)
    except (RuntimeError, AssertionError) as error:
        reason = str(error).splitlines()[0]
        raise ConfigError(
            f"launch.device={device} cannot be used ({reason}): use launch.device=cpu"
        ) from error


def out_of_memory(error: RuntimeError) -> bool:
    """Whether an accelerator's or the CPU's memory ran out."""
    return isinstance(error, torch.OutOfMemoryError) or should_reduce_batch_size(error)
