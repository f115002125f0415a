"""How fast Algorithm 1 runs on beds whose truth is known: replicates, steps and seconds.

    python scripts/benchmarks/gap.py
    python scripts/benchmarks/gap.py --replicates 1000 --rounds 3

10 000 replicates of 1 000 steps, n = 16 completions a step, 8 parameters, 2 processes; the seconds
are those of the clock, starting the processes included, and their CPU time beside them.
"""

from __future__ import annotations

import argparse
import os
import time

import numpy as np

from grpo_ustat.cli.compose import compose_config
from grpo_ustat.gap.simulate import Estimator, Rate, Simulation, run_simulations
from grpo_ustat.gap.testbeds import build_testbed

CASES = {
    "coins, vanilla": ("coins", Estimator("none", 16, 1)),
    "coins, GRPO G = 4": ("coins", Estimator("leave_one_out", 4, 4)),
    "softmax, GRPO G = 4": ("softmax", Estimator("leave_one_out", 4, 4)),
    "softmax, GRPO G = 16": ("softmax", Estimator("leave_one_out", 1, 16)),
    "softmax, oracle G = 4": ("softmax", Estimator("oracle", 4, 4)),
}


def cpu() -> float:
    """Seconds of this process and of its children."""
    return sum(os.times()[:4])


def main() -> None:
    """A line for each case."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n\n")[0])
    parser.add_argument("--replicates", type=int, default=10_000)
    parser.add_argument("--steps", type=int, default=1000)
    parser.add_argument("--workers", type=int, default=2)
    parser.add_argument("--rounds", type=int, default=1)
    options = parser.parse_args()
    print(f"{'case':24}{'seconds, median [all]':>36}{'CPU seconds':>14}")
    for name, (bed, estimator) in CASES.items():
        testbed = build_testbed(compose_config("gap", [f"bed={bed}"]).bed)
        simulation = Simulation(estimator, Rate("constant", 0.05), (options.steps,))
        wall, used = [], []
        for turn in range(options.rounds):
            start, before = time.perf_counter(), cpu()
            run_simulations([simulation], testbed, options.replicates, turn, options.workers)
            wall.append(time.perf_counter() - start)
            used.append(cpu() - before)
        times = f"{np.median(wall):.1f} [{', '.join(f'{x:.1f}' for x in sorted(wall))}]"
        print(f"{name:24}{times:>36}{np.median(used):>14.1f}", flush=True)


if __name__ == "__main__":
    main()
