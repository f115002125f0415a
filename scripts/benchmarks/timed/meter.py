"""Cost of `gu.watch`: optimizer steps with and without the meter, in alternation.

    python scripts/benchmarks/speed.py meter embedded:tiny_base --rows 32 --micro-batches 4
    python scripts/benchmarks/speed.py meter FOLDER --rows 8 --completion 216 --repeats 10

A run takes a step of two copies of a model, one with a meter, in random order. `extra %` is the
median over the runs of a turn of the extra time with the meter, in percent of the step without it
(`extra CPU %`: of CPU seconds).
"""

from __future__ import annotations

import argparse
import copy
import random
import statistics
from collections.abc import Callable

import torch
from both_sides import now

import grpo_ustat as gu
from grpo_ustat.policy.loading import load_policy
from grpo_ustat.policy.logprobs import Rows, completion_logprobs
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


def prepare(options: argparse.Namespace, program: str) -> Callable[[], dict[str, float]]:
    """Load the model twice; a run takes a step of each."""
    torch.set_num_threads(options.threads)
    plain = load_policy(options.model, dtype=options.dtype).model.to(options.device)
    models = {"plain": plain, "meter": copy.deepcopy(plain)}
    optimizers = {name: torch.optim.AdamW(m.parameters(), lr=1e-6) for name, m in models.items()}
    gu.watch(models["meter"], optimizers["meter"], options.rows)
    batch = scores.batch(options, plain.config.vocab_size)
    parts = list(zip(*(x.chunk(options.micro_batches) for x in batch), strict=True))
    extra: dict[str, list[float]] = {"wall": [], "cpu": []}

    def step(name: str) -> tuple[float, float]:
        """Take a step; return its wall and CPU seconds."""
        start = now(options.device)
        for part in parts:
            logprobs = completion_logprobs(models[name], Rows(*part, width=options.completion))
            (-logprobs.sum() / options.rows).backward()
        optimizers[name].step()
        optimizers[name].zero_grad()
        end = now(options.device)
        return end[0] - start[0], end[1] - start[1]

    def run() -> dict[str, float]:
        """Take a step of each model."""
        order = random.sample(list(models), 2)
        seconds = {name: step(name) for name in order}
        for place, key in enumerate(extra):
            ratio = seconds["meter"][place] / seconds["plain"][place]
            extra[key].append(100 * (ratio - 1))
        medians = {key: statistics.median(values) for key, values in extra.items()}
        return {"extra %": medians["wall"], "extra CPU %": medians["cpu"]}

    return run
