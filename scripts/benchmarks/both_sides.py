"""Code shared by both sides of `compare_trl.py` and `speed.py train`.

This module imports neither grpo_ustat nor TRL.
"""

from __future__ import annotations

import os
import random
import time
from collections import Counter
from pathlib import Path

import torch
from torch.utils._python_dispatch import TorchDispatchMode


class DrawnRewards:
    """Uniform rewards in [0, 1) that ignore the text, so that no advantage is zero.

    Args:
        seed: seed of the draws.
        zero_variance: ids of prompts for which every completion gets the reward 0.
    """

    def __init__(self, seed: int, zero_variance: list[str]):
        self.seed, self.zero_variance, self.drawn = seed, set(zero_variance), Counter()

    def draw(self, prompt_id: str) -> float:
        """Draw the next completion's reward."""
        self.drawn[prompt_id] += 1
        key = f"{self.seed}/{prompt_id}/{self.drawn[prompt_id]}"
        return 0.0 if prompt_id in self.zero_variance else random.Random(key).random()


def now(device: str) -> tuple[float, float]:
    """Return wall seconds and CPU seconds, children included, after waiting for the device."""
    if device != "cpu":
        torch.cuda.synchronize()
    return time.perf_counter(), sum(os.times()[:4])


def peak_memory(device: str) -> int:
    """Return the peak memory in bytes, of the allocator on a GPU and of this process on a CPU.

    On a CPU, the peak resident set is returned, which includes libraries and the loaded model. It
    is read from VmHWM, which starts with this program; ru_maxrss would include the program that
    started this process.
    """
    if device != "cpu":
        return torch.cuda.max_memory_allocated()
    status = Path("/proc/self/status").read_text()
    return int(status.split("VmHWM:")[1].split()[0]) * 1024


def put(weights: dict[str, torch.Tensor], model: torch.nn.Module) -> None:
    """Set every parameter to its new value."""
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            parameter.copy_(weights[name])


class InDouble(TorchDispatchMode):
    """Mode in which computations requested in float32 or in the default type use float64.

    Even for a float64 model, transformers computes norms and softmaxes in float32, and TRL computes
    rewards and log-probabilities in float32. Values that were rounded to float32 before this mode
    begins stay rounded.
    """

    def __enter__(self):
        """Make float64 the default type."""
        self.before = torch.get_default_dtype()
        torch.set_default_dtype(torch.float64)
        return super().__enter__()

    def __exit__(self, *error):
        """Restore the default type."""
        torch.set_default_dtype(self.before)
        return super().__exit__(*error)

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        """Run an operator with every float32 among its arguments replaced by float64."""
        wide = {name: _double(value) for name, value in (kwargs or {}).items()}
        return func(*map(_double, args), **wide)


def _double(value):
    return torch.float64 if value is torch.float32 else value
