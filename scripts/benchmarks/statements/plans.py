"""Bias and efficiency of plans: intervals for new questions.

direction   cos^2 of a plan's expected update and the gradient
generated   relative efficiency if generated rollouts are counted
trained     relative efficiency if trained rollouts are counted
all rows    any of a study's decided efficiencies misses
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping

import numpy as np
from counting import Asked, Cell, Kind, covers
from populations import POPULATIONS

from grpo_ustat.estimators.intervals import Interval
from grpo_ustat.estimators.plan_efficiencies import PlanRow, plan_efficiencies
from grpo_ustat.records import ScorePool
from statements.losses import pools_of

# Number of rollouts per update, group sizes of the unbiased estimate, and mean size of the plans.
ROLLOUTS, SIZES, MEAN_SIZE = 64, (2, 4, 8, 16), 4
JUDGED = ("refill", "until_mixed", "until_success", "reinforce_ada", "aero", "pilot_commit", "vip")
# Populations with rewards 0 and 1.
JUDGED_POPULATIONS = (
    "opposed", "clustered", "light, G* 3.1", "light, G* 8.8", "mixed, mid", "sparse, low",
    "Pareto, mid", "opposite camps", "partly turned",
)  # fmt: skip
CELLS = ((100, 32), (300, 32))


def rows_by_name(pool: ScorePool, seed: int) -> dict[str, PlanRow]:
    """Judge all plans on a pool; the keys are plan and estimate."""
    rows = plan_efficiencies(pool, JUDGED, (MEAN_SIZE,), SIZES, ROLLOUTS, seed)
    return {f"{row.plan.name}, {row.estimate}": row for row in rows if row.reason is None}


def intervals_of(row: PlanRow) -> dict[str, Interval]:
    """Return the decided intervals of a row by statement."""
    intervals = {
        "direction": None if row.unbiased else row.direction,
        "generated": row.at_generated,
        "trained": row.at_trained,
    }
    return {name: x for name, x in intervals.items() if x is not None and x.is_known}


def plans(name: str, asked: Asked) -> Iterator[Cell]:
    """Judge intervals for the direction and the efficiency of plans.

    The true values are estimates from all prompts of the population with 64 completions each.
    """
    population = POPULATIONS[name]()
    large = population.pool(np.arange(len(population.p_PY)), 64, np.random.default_rng(9))
    truth = {
        f"{plan}: {statement}": interval.estimate
        for plan, row in rows_by_name(large, 1).items()
        for statement, interval in intervals_of(row).items()
    }
    for prompts, completions in asked.cells:
        pools = pools_of(population, prompts, completions, asked.studies, np.random.default_rng(10))
        yield Cell(
            {"prompts": prompts, "completions": completions},
            (judged(rows_by_name(pool, number), truth) for number, pool in enumerate(pools)),
            truth,
        )


def judged(rows: Mapping[str, PlanRow], truth: Mapping[str, float]) -> dict[str, bool]:
    """Return True for each interval that misses the true value."""
    wrong = {
        f"{plan}: {statement}": not covers(interval, truth[f"{plan}: {statement}"])
        for plan, row in rows.items()
        for statement, interval in intervals_of(row).items()
        if f"{plan}: {statement}" in truth
    }
    return wrong | {"all rows": any(wrong.values())} if wrong else {}


KINDS = {"plans": Kind(plans, JUDGED_POPULATIONS, CELLS, 200)}
