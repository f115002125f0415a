"""How often `advise` is wrong about a training run, given that it says something, by simulation.

Runs of 4, 8 or 20 monitored steps of n / G prompts x G completions, from populations whose
constants are enumerated (`populations.py`). A step's C1, C2 and C3 are those that
`monitor.gradient_mse_every` measures, and the steps are averaged as `advise` does. G is each of 4
to 64 that divides n and leaves a step 4 prompts. *Wrong* is as of "change" and "keep" in
`decisions.py`.

A row has the share of the runs that say a verdict, the share of these that are wrong, and the 95 %
interval of the latter (Clopper & Pearson 1934). The last lines have, for each population, the worst
cells of those where 1 % or more of the runs say it.

    python scripts/benchmarks/advice.py --runs 300
"""

from __future__ import annotations

import argparse
from collections import Counter
from collections.abc import Iterator
from itertools import islice
from typing import Any

import numpy as np
from decisions import IN_USE, POPULATIONS, judged_advice
from populations import Population, clopper_pearson

from grpo_ustat.advise.sources import LEAST_STEPS
from grpo_ustat.estimators.scaling import ScalingLaw
from grpo_ustat.pages.advice import KEEP, LOWER, RAISE
from grpo_ustat.records import Array

STEPS, BUDGETS, LEAST_PROMPTS = (4, 8, 20), (64, 256), 4
ASKED = ("opposed", "few loud", "light, G* 3.1", "light, G* 8.8", "Pareto, high", "sparse, high")


def monitored_runs(
    population: Population, prompts: int, size: int, steps: int, runs: int, rng: np.random.Generator
) -> Iterator[Array]:
    """C1, C2, C3, ||grad J||^2 of every step of a run, [4, S]; NaN where no group has variance."""
    every = population.studies(prompts, size, runs * steps, rng)
    while values := [law.constants_4 for law in islice(every, steps)]:
        values_4S = np.array(values).T
        yield np.where(values_4S[2] == 0, np.nan, values_4S)


def rows_of(
    name: str, runs: int, budgets: tuple[int, ...] = BUDGETS, seed: int = 0
) -> Iterator[dict[str, Any]]:
    """A row for every n, G, number of steps and verdict."""
    population = POPULATIONS[name]()
    cells = [(n, size) for n in budgets for size in IN_USE if n >= LEAST_PROMPTS * size]
    for n, size in cells:
        rng = np.random.default_rng([seed, n, size])
        said, wrong = Counter[tuple[int, str]](), Counter[tuple[int, str]]()
        for values_4S in monitored_runs(population, n // size, size, max(STEPS), runs, rng):
            for steps in STEPS:
                measured_4S = values_4S[:, :steps]
                measured_4S = measured_4S[:, np.isfinite(measured_4S[0])]
                if measured_4S.shape[1] < LEAST_STEPS:
                    continue
                law = ScalingLaw.of_steps(measured_4S, n // size)
                verdict, is_wrong = judged_advice(population.law, law, size, n)
                said[steps, verdict] += 1
                wrong[steps, verdict] += is_wrong
        sizes = [other for other in range(2, n + 1) if n % other == 0]
        extra = population.law.n_mse(size) / min(map(population.law.n_mse, sizes)) - 1
        for steps in STEPS:
            for verdict in (RAISE, LOWER, KEEP):
                yield {
                    "population": name, "gstar": population.law.best_size(), "rollouts": n,
                    "size": size, "extra": extra, "steps": steps, "verdict": verdict, "runs": runs,
                    "said": said[steps, verdict], "wrong": wrong[steps, verdict],
                }  # fmt: skip


def row_text(row: dict[str, Any]) -> str:
    """A row of the table."""
    said, wrong = row["said"], row["wrong"]
    low, high = clopper_pearson(wrong, said)
    return (
        f"| {row['population']} | {row['gstar']:.1f} | {row['rollouts']} | {row['size']} | "
        f"{100 * row['extra']:.0f} % | {row['steps']} | {row['verdict']} | "
        f"{said / row['runs']:.3f} | {wrong / said:.3f} [{low:.3f}, {high:.3f}] |"
    )


def main() -> None:
    """Print a row for every cell in which a run says a verdict, and the worst ones."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--runs", type=int, default=300, help="of a cell")
    parser.add_argument("--populations", nargs="+", default=list(ASKED))
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args()
    print("| population | G* | n | G | true extra error | steps | verdict | said by | wrong |")
    print("|---" * 9 + "|")
    worst: list[dict[str, Any]] = []
    for name in options.populations:
        rows = [row for row in rows_of(name, options.runs, seed=options.seed) if row["said"]]
        print(*map(row_text, rows), sep="\n", flush=True)
        often = [row for row in rows if row["said"] >= 0.01 * row["runs"]]
        for verdict in (RAISE, LOWER, KEEP):
            of = [row for row in often if row["verdict"] == verdict]
            worst += sorted(of, key=lambda row: row["wrong"] / row["said"])[-1:]
    print("worst:", *map(row_text, worst), sep="\n")


if __name__ == "__main__":
    main()
