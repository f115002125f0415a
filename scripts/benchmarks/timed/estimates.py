"""Compare the memory and time that `dry_run=true` estimates with actual runs.

    python scripts/benchmarks/speed.py estimates --model FOLDER

Time is estimated from a short run of the same model, as `dry_run=true` recommends. The wall seconds
of a command include its start. MB is the peak memory of the largest process.
"""

from __future__ import annotations

import argparse
import math
import resource
import subprocess
import sys
import tempfile
from collections.abc import Callable
from importlib import import_module

from grpo_ustat.cli.compose import parse
from grpo_ustat.costs.cost import total
from grpo_ustat.costs.duration import duration, one_after_the_other

SMALL = ("dataset=plus_one", "prompt=plain", "max_completion_length=24", "study.questions=4")
# Command, its words, and the words of the short run before it, by name.
COMMANDS = {
    "train, seconds": ("train", ["debug=train"], None),
    "train": (
        "train",
        ["model=tiny", "max_steps=4", "eval_steps=4"],
        ["model=tiny", "max_steps=2"],
    ),
    "mse": ("mse", ["study.questions=100"], ["study.questions=8"]),
    "mse, another model": (
        "mse",
        ["model={model}", *SMALL, "budget.pool_completions=16", "baselines=[none,oracle]"],
        ["model={model}", *SMALL, "budget.pool_completions=4", "study.questions=2"],
    ),
    "sweep": (
        "mse",
        ["-m", "model=tiny_direct", "study.questions=40", "budget.pool_completions=16,32"],
        ["model=tiny_direct", "study.questions=8"],
    ),
}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add options for a study's model and for the choice of commands."""
    parser.add_argument("--model", help="model's folder, for a study of a further model")
    parser.add_argument("--only", nargs="*", default=list(COMMANDS))
    parser.set_defaults(turns=1)


def programs(options: argparse.Namespace) -> list[str]:
    """Return the names of the commands that can run."""
    return [name for name in options.only if options.model or name != "mse, another model"]


def prepare(options: argparse.Namespace, program: str) -> Callable[[], dict[str, float]]:
    """Run the short command and estimate the long command; a run executes the long command."""
    verb, words, before = COMMANDS[program]
    folder = tempfile.TemporaryDirectory()

    def typed(words: list[str]) -> list[str]:
        return [word.format(model=options.model) for word in words] + [f"output_root={folder.name}"]

    if before is not None:
        execute(verb, typed(before))
    seconds, megabytes = estimated(verb, typed(words))

    def run() -> dict[str, float]:
        execute(verb, typed(words))
        peak = resource.getrusage(resource.RUSAGE_CHILDREN).ru_maxrss * 1024 / 1e6
        return {"MB": peak, "estimated s": seconds, "estimated MB": megabytes}

    return run


def execute(verb: str, words: list[str]) -> None:
    """Run a command in a separate process."""
    command = [sys.executable, "-m", "grpo_ustat", verb, *words]
    subprocess.run(command, stdout=subprocess.DEVNULL, check=True)


def estimated(verb: str, words: list[str]) -> tuple[float, float]:
    """Return the estimated seconds and MB; unknown values are NaN."""
    planner = import_module(f"grpo_ustat.{verb}.plan")
    plans = [planner.plan(planned) for planned in parse(verb, words).planned_runs]
    seconds = one_after_the_other([duration(plan) for plan in plans])
    memory = total([plan.cost for plan in plans]).memory
    return (
        math.nan if seconds is None else seconds,
        math.nan if memory is None else memory / 1e6,
    )
