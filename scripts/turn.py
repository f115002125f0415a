"""What both sides of `bench_train.py` share; knows neither this project nor TRL."""

from __future__ import annotations

import random
import time
from collections import Counter
from collections.abc import Callable
from pathlib import Path


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


def clock(job: dict) -> Callable[[], float]:
    """Seconds, all work so far done: of the wall or of this process alone."""
    read = {"wall": time.perf_counter, "process": time.process_time}[job["clock"]]
    if job["device"] == "cpu":
        return read
    import torch

    return lambda: torch.cuda.synchronize() or read()


def peak_memory(device: str) -> int:
    """Bytes: on a GPU what its allocator held at most, else this process's largest resident set.

    The resident set counts libraries and the loaded model. It is VmHWM, which begins with the
    program; ru_maxrss would begin with the program that started this one.
    """
    if device != "cpu":
        import torch

        return torch.cuda.max_memory_allocated()
    status = Path("/proc/self/status").read_text()
    return int(status.split("VmHWM:")[1].split()[0]) * 1024
