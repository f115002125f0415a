"""Simulations of a study, shared out among processes; the results do not depend on how many."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np

from grpo_ustat.estimators.intervals import LEVEL, Interval, t_interval
from grpo_ustat.policy.beds import Bed
from grpo_ustat.study.workers import Done, share
from grpo_ustat.theorems.algorithm1 import BLOCK, Estimator, Paths, simulate


@dataclass(frozen=True)
class Rate:
    """A learning rate: constant, `value`, or falling, `value / (t + offset)` for t = 1 ..."""

    kind: str
    value: float
    offset: int = 0

    @property
    def name(self) -> str:
        """For legends and rows.

        >>> Rate("constant", 0.1).name, Rate("decaying", 2.0, 20).name
        ('eta = 0.1', 'eta_t = 2 / (t + 20)')
        """
        if self.kind == "constant":
            return f"eta = {self.value:g}"
        return f"eta_t = {self.value:g} / " + (f"(t + {self.offset})" if self.offset else "t")

    def values(self, steps: int) -> np.ndarray:
        """eta_1 ... eta_T."""
        if self.kind == "constant":
            return np.full(steps, self.value)
        return self.value / (np.arange(1, steps + 1) + self.offset)


@dataclass(frozen=True)
class Job:
    """One simulation: who estimates, how fast it learns, which steps are kept."""

    estimator: Estimator
    rate: Rate
    steps: tuple[int, ...]

    @property
    def work(self) -> int:
        """Completions of one replicate."""
        return self.estimator.rollouts * self.steps[-1]


def simulated(
    jobs: Sequence[Job], bed: Bed, replicates: int, seed: int, workers: int
) -> tuple[list[Paths], int]:
    """Every job's paths in the jobs' order, and how many completions were drawn."""
    items = [
        (place, range(first, min(first + BLOCK, replicates)))
        for place in range(len(jobs))
        for first in range(0, replicates, BLOCK)
    ]
    weights = [float(jobs[place].work * len(block)) for place, block in items]
    total = int(sum(weights))
    parts, _ = share(
        _simulate, items, workers, "replicates", total, list(jobs), bed, seed, weights=weights
    )
    parts.sort(key=lambda part: part[:2])
    grouped = [[paths for place, _, paths in parts if place == i] for i in range(len(jobs))]
    return [Paths.joined(group) for group in grouped], total


def _simulate(items: list, jobs: list[Job], bed: Bed, seed: int) -> Iterator:
    for place, block in items:
        job = jobs[place]
        rates_T = job.rate.values(job.steps[-1])
        yield place, block[0], simulate(bed, job.estimator, rates_T, block, seed, list(job.steps))
        yield Done(rollouts=job.work * len(block))


def spaced(last: int, count: int = 12) -> list[int]:
    """About so many steps from 1 to the last, evenly on a logarithmic axis.

    >>> spaced(100, 5)
    [1, 3, 10, 32, 100]
    """
    return sorted({int(round(x)) for x in np.geomspace(1, last, count)})


def mean_interval(values_R: np.ndarray, among: int = 1) -> Interval:
    """The mean over replicates; one of so many intervals that hold together (Bonferroni)."""
    count = len(values_R)
    variance = float(values_R.var(ddof=1)) / count
    return t_interval(float(values_R.mean()), variance, count - 1, 1 - (1 - LEVEL) / among)
