"""Statistics of each reward function by itself, from the same completions: C1, C2, C3 and G*."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import replace
from itertools import combinations

import numpy as np

from grpo_ustat.estimators.intervals import Interval, pool_mean_reward
from grpo_ustat.estimators.reward_correlation import reward_correlation
from grpo_ustat.mse.closed_form import ClosedForm, Request, closed_form
from grpo_ustat.records import ScorePool

FUNCTION_COLUMNS = ("c1", "c2", "c3", "gstar", "a_v", "grad_sq")
SUM_NAME = "weighted sum"


def function_pool(pool: ScorePool, f: int) -> ScorePool:
    """Return the same completions, judged only by function f."""
    assert pool.rewards_PNF is not None and pool.centred_sums_PFR is not None
    return replace(
        pool,
        rewards_PN=pool.rewards_PNF[..., f],
        centred_sums_PR=pool.centred_sums_PFR[:, f],
        rewards_PNF=None,
        centred_sums_PFR=None,
        reward_weights_F=None,
    )


def function_statistics(
    pool: ScorePool, names: list[str], population: ClosedForm, request: Request
) -> Iterator[tuple[str, float | None, dict[str, Interval]]]:
    """Yield (name, weight, statistics) of each function and of their weighted sum.

    A function is measured in its own scale. Statistics are NaN if it never varies within a prompt.

    Args:
        pool: with the rewards of every function.
        population: closed forms of the weighted sum, over questions.
        request: the request of `population`.
    """
    assert pool.rewards_PNF is not None and pool.reward_weights_F is not None
    for f, (name, weight) in enumerate(zip(names, pool.reward_weights_F, strict=True)):
        of_function = function_pool(pool, f)
        rewards_PN = of_function.rewards_PN
        values = dict.fromkeys(FUNCTION_COLUMNS, Interval(math.nan, math.nan, math.nan))
        if (rewards_PN != rewards_PN[:, :1]).any():  # else it has no gradient, and no G*
            of_pool = closed_form(of_function, replace(request, points=[]), "questions")
            values = {key: of_pool[key] for key in FUNCTION_COLUMNS}
        yield name, float(weight), values | {"mean": pool_mean_reward(rewards_PN)}
    values = {key: population[key] for key in FUNCTION_COLUMNS}
    yield SUM_NAME, None, values | {"mean": pool_mean_reward(pool.rewards_PN)}


def function_correlations(pool: ScorePool, names: list[str]) -> Iterator[tuple[str, str, Interval]]:
    """Yield (first, second, correlation within prompts) of every pair of functions that vary.

    Intervals are over questions.
    """
    assert pool.rewards_PNF is not None
    for f, g in combinations(range(len(names)), 2):
        value = reward_correlation(pool.rewards_PNF, f, g, "questions")
        if np.isfinite(value.estimate):
            yield names[f], names[g], value
