"""Cost of `gu.watch`: optimizer steps with and without the meter, in alternation.

    python scripts/benchmarks/speed.py meter embedded:tiny_base --rows 32 --micro-batches 4
    python scripts/benchmarks/speed.py meter FOLDER --rows 8 --completion 216 --repeats 10

A run takes a step of two copies of a model, one with a meter, in random order. `extra %` is the
median over the runs of a turn of the extra wall time with the meter, in percent of the step without
it. `hooks %` is the CPU time inside the meter's hooks, in percent of the CPU time of its step. On a
busy CPU, only `hooks %` is precise. On a GPU, only `extra %` contains the kernels.
"""

from __future__ import annotations

import argparse
import copy
import random
import statistics
import time
from collections.abc import Callable
from typing import Any

import torch
from both_sides import now

import grpo_ustat as gu
from grpo_ustat.policy.loading import load_policy
from grpo_ustat.policy.logprobs import Rows, completion_logprobs
from grpo_ustat.policy.watch import Meter
from timed import scores


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add options for the model and the shape of a step."""
    parser.add_argument("model", help="embedded:NAME, or a model's folder")
    parser.add_argument("--rows", type=int, default=32, help="rollouts per step")
    parser.add_argument("--micro-batches", type=int, default=4)
    parser.add_argument("--prompt", type=int, default=40, help="tokens")
    parser.add_argument("--completion", type=int, default=88, help="tokens")
    parser.add_argument("--spread", type=float, default=0.0)
    parser.add_argument("--device", default="cpu", choices=["cpu", "cuda"])
    parser.add_argument("--dtype", default="float32", choices=["float32", "bfloat16"])
    parser.set_defaults(warm=2, repeats=20, turns=3)


def programs(options: argparse.Namespace) -> list[str]:
    """Return the only program, which compares two loops itself."""
    return ["meter"]


def time_hooks(seconds: list[float]) -> None:
    """Have the meter's hooks add their CPU seconds to the last entry of a list."""

    def timed(hook: Callable[..., None]) -> Callable[..., None]:
        def run(*arguments: Any) -> None:
            start = time.thread_time()
            hook(*arguments)
            seconds[-1] += time.thread_time() - start

        return run

    for name in ("_own_gradient", "_end_of_micro_batch", "_before_step"):
        setattr(Meter, name, timed(getattr(Meter, name)))


def prepare(options: argparse.Namespace, program: str) -> Callable[[], dict[str, float]]:
    """Load the model twice; a run takes a step of each."""
    torch.set_num_threads(options.threads)
    plain = load_policy(options.model, dtype=options.dtype).model.to(options.device)
    models = {"plain": plain, "meter": copy.deepcopy(plain)}
    optimizers = {name: torch.optim.AdamW(m.parameters(), lr=1e-6) for name, m in models.items()}
    hooks: list[float] = [0.0]
    time_hooks(hooks)
    gu.watch(models["meter"], optimizers["meter"], options.rows)
    batch = scores.batch(options, plain.config.vocab_size)
    parts = list(zip(*(x.chunk(options.micro_batches) for x in batch), strict=True))
    extra: list[float] = []
    shares: list[float] = []

    def step(name: str) -> tuple[float, float]:
        """Take a step; return its wall seconds and the CPU seconds of this thread."""
        start, cpu = now(options.device)[0], time.thread_time()
        for part in parts:
            logprobs = completion_logprobs(models[name], Rows(*part, width=options.completion))
            (-logprobs.sum() / options.rows).backward()
        optimizers[name].step()
        optimizers[name].zero_grad()
        return now(options.device)[0] - start, time.thread_time() - cpu

    def run() -> dict[str, float]:
        """Take a step of each model."""
        hooks.append(0.0)
        seconds = {name: step(name) for name in random.sample(list(models), 2)}
        extra.append(100 * (seconds["meter"][0] / seconds["plain"][0] - 1))
        shares.append(100 * hooks[-1] / seconds["meter"][1])
        return {"extra %": statistics.median(extra), "hooks %": statistics.median(shares)}

    return run
