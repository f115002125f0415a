"""What both sides of `compare_trl.py` and `speed.py train` share; knows neither project."""

from __future__ import annotations

import os
import random
import time
from collections import Counter
from pathlib import Path

import torch
from torch.utils._python_dispatch import TorchDispatchMode


class DrawnRewards:
    """A reward for each completion, uniform on [0, 1), whatever it says: no advantage is zero.

    Args:
        seed: of the draws.
        silent: ids of prompts whose completions all get 0.
    """

    def __init__(self, seed: int, silent: list[str]):
        self.seed, self.silent, self.drawn = seed, set(silent), Counter()

    def draw(self, prompt_id: str) -> float:
        """The next completion's reward."""
        self.drawn[prompt_id] += 1
        key = f"{self.seed}/{prompt_id}/{self.drawn[prompt_id]}"
        return 0.0 if prompt_id in self.silent else random.Random(key).random()


def now(device: str) -> tuple[float, float]:
    """Seconds of the clock, and of this process and its children, all work so far done."""
    if device != "cpu":
        torch.cuda.synchronize()
    return time.perf_counter(), sum(os.times()[:4])


def peak_memory(device: str) -> int:
    """Bytes: on a GPU what its allocator held at most, else this process's largest resident set.

    The resident set counts libraries and the loaded model. It is VmHWM, which begins with the
    program; ru_maxrss would begin with the program that started this one.
    """
    if device != "cpu":
        return torch.cuda.max_memory_allocated()
    status = Path("/proc/self/status").read_text()
    return int(status.split("VmHWM:")[1].split()[0]) * 1024


def put(weights: dict[str, torch.Tensor], model: torch.nn.Module) -> None:
    """Give every parameter its new value."""
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            parameter.copy_(weights[name])


class InDouble(TorchDispatchMode):
    """Whatever is asked for in float32, or in no type by name, is made in float64.

    transformers computes norms and softmaxes, TRL rewards and log-probabilities, in float32 even
    for a float64 model. Values rounded to float32 before this mode begins stay as they were.
    """

    def __enter__(self):
        """Begin."""
        self.before = torch.get_default_dtype()
        torch.set_default_dtype(torch.float64)
        return super().__enter__()

    def __exit__(self, *error):
        """Leave everything as it was."""
        torch.set_default_dtype(self.before)
        return super().__exit__(*error)

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        """Run one operator with float64 in place of float32 among its arguments."""
        wide = {name: _double(value) for name, value in (kwargs or {}).items()}
        return func(*map(_double, args), **wide)


def _double(value):
    return torch.float64 if value is torch.float32 else value
