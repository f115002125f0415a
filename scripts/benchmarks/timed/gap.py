"""Time Algorithm 1 on test problems with a known solution.

    python scripts/benchmarks/speed.py gap
    python scripts/benchmarks/speed.py gap --replicates 1000 --turns 3

By default there are 10 000 replicates with 1 000 steps, n = 16 completions per step and 8
parameters, in 2 processes. The measured time includes the start of the processes.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable

from grpo_ustat.cli.compose import compose_config
from grpo_ustat.gap.problems import build_problem
from grpo_ustat.gap.simulate import Estimator, Rate, Simulation, run_simulations

PROGRAMS = {
    "coins, vanilla": ("coins", Estimator("none", 16, 1)),
    "coins, GRPO G = 4": ("coins", Estimator("leave_one_out", 4, 4)),
    "softmax, GRPO G = 4": ("softmax", Estimator("leave_one_out", 4, 4)),
    "softmax, GRPO G = 16": ("softmax", Estimator("leave_one_out", 1, 16)),
    "softmax, oracle G = 4": ("softmax", Estimator("oracle", 4, 4)),
}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add options for the numbers of replicates, steps and processes."""
    parser.add_argument("--replicates", type=int, default=10_000)
    parser.add_argument("--steps", type=int, default=1000)
    parser.add_argument("--workers", type=int, default=2)
    parser.set_defaults(turns=1)


def programs(asked: argparse.Namespace) -> list[str]:
    """List all programs."""
    return list(PROGRAMS)


def prepare(asked: argparse.Namespace, program: str) -> Callable[[], object]:
    """Build the test problem; a run simulates all replicates."""
    name, estimator = PROGRAMS[program]
    problem = build_problem(compose_config("gap", [f"problem={name}"]).problem)
    simulation = Simulation(estimator, Rate("constant", 0.05), (asked.steps,))

    def run() -> None:
        run_simulations([simulation], problem, asked.replicates, asked.number, asked.workers)

    return run
