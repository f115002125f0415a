"""Time Algorithm 1 on test problems whose truth is known.

    python scripts/benchmarks/speed.py gap
    python scripts/benchmarks/speed.py gap --replicates 1000 --turns 3

10 000 replicates of 1 000 steps, n = 16 completions per step, 8 parameters, 2 processes, whose
start is counted.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable

from grpo_ustat.cli.compose import compose_config
from grpo_ustat.gap.simulate import Estimator, Rate, Simulation, run_simulations
from grpo_ustat.gap.testbeds import build_testbed

PROGRAMS = {
    "coins, vanilla": ("coins", Estimator("none", 16, 1)),
    "coins, GRPO G = 4": ("coins", Estimator("leave_one_out", 4, 4)),
    "softmax, GRPO G = 4": ("softmax", Estimator("leave_one_out", 4, 4)),
    "softmax, GRPO G = 16": ("softmax", Estimator("leave_one_out", 1, 16)),
    "softmax, oracle G = 4": ("softmax", Estimator("oracle", 4, 4)),
}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the numbers of replicates, steps and processes."""
    parser.add_argument("--replicates", type=int, default=10_000)
    parser.add_argument("--steps", type=int, default=1000)
    parser.add_argument("--workers", type=int, default=2)
    parser.set_defaults(turns=1)


def programs(options: argparse.Namespace) -> list[str]:
    """List all programs."""
    return list(PROGRAMS)


def prepare(options: argparse.Namespace, program: str) -> Callable[[], object]:
    """Build the test problem; a run simulates all replicates."""
    bed, estimator = PROGRAMS[program]
    testbed = build_testbed(compose_config("gap", [f"bed={bed}"]).bed)
    simulation = Simulation(estimator, Rate("constant", 0.05), (options.steps,))

    def run() -> None:
        run_simulations([simulation], testbed, options.replicates, options.number, options.workers)

    return run
