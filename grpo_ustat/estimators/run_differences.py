"""Difference of the mean rewards of two runs, and how many prompts or seeds a comparison needs."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import NamedTuple

import numpy as np

from grpo_ustat.estimators.intervals import (
    CONFIDENCE,
    Interval,
    matched_difference,
    normal_quantile,
    pooled_dof,
    t_interval,
    t_quantile,
)

# Probability that a comparison of the size from `units_to_show` shows the difference.
POWER = 0.8
# Runs are paired if they share at least this part of the prompts of the run with fewer prompts.
MIN_COMMON = 0.5


class Difference(NamedTuple):
    """Mean reward of a second run minus that of a first run."""

    # Difference with its interval for new prompts.
    interval: Interval
    # Number of prompts by which the runs are paired; 0 if they are not paired.
    pairs: int
    # Standard deviation between prompts: the standard error of the difference times the square root
    # of the number of prompts per run.
    spread: float


def reward_difference(
    first: Mapping[str, float],
    second: Mapping[str, float],
    level: float = CONFIDENCE,
    is_binary: bool = False,
) -> Difference | None:
    """Estimate the difference of two mean rewards, with an interval for new prompts.

    The runs are paired by prompt if they share at least half of the prompts of the run with fewer
    prompts; the other prompts are then not used. Runs that are not paired are compared by Welch's
    t, with prompts as independent clusters.

    Args:
        first, second: mean reward of each prompt, by a key of the prompt.
        level: confidence level.
        is_binary: True if every reward is 0 or 1. If all paired prompts changed equally, the
            interval then comes from `matched_difference`, so that its width is positive.

    Returns:
        The difference; None if there are fewer than two prompts to compare.

    >>> ones, rest = {"a": 1.0, "b": 0.5, "c": 0.0}, {"a": 1.0, "b": 1.0, "c": 0.25}
    >>> reward_difference(ones, rest).pairs, round(reward_difference(ones, rest).spread, 2)
    (3, 0.25)
    """
    common = [prompt for prompt in first if prompt in second]
    if len(common) >= max(2, MIN_COMMON * min(len(first), len(second))):
        before_P = np.array([first[prompt] for prompt in common])
        after_P = np.array([second[prompt] for prompt in common])
        change_P = after_P - before_P
        variance = float(change_P.var(ddof=1))
        interval = t_interval(change_P.mean(), variance / len(common), len(common) - 1, level)
        if is_binary and variance == 0:
            interval = matched_difference(after_P, before_P, level)
        return Difference(interval, len(common), math.sqrt(variance))
    runs = [np.array([*run.values()]) for run in (first, second)]
    if min(map(len, runs)) < 2:
        return None
    variances = np.array([run.var(ddof=1) / len(run) for run in runs])
    # The degrees of freedom of the run with fewer prompts are used for both runs. This is
    # conservative if the runs have unequal numbers of prompts.
    dof = pooled_dof(variances, min(map(len, runs)) - 1)
    difference = float(runs[1].mean() - runs[0].mean())
    interval = t_interval(difference, float(variances.sum()), dof, level)
    return Difference(interval, 0, math.sqrt(sum(float(run.var(ddof=1)) for run in runs)))


def units_to_show(spread: float, effect: float, level: float = CONFIDENCE, sets: int = 1) -> int:
    """Return how many prompts or seeds per run show a true difference in 4 of 5 comparisons.

    Args:
        spread: standard deviation between units (prompts or seeds), or between the differences of
            paired units.
        effect: true difference.
        level: confidence level of the comparison.
        sets: 1 if units are paired, or if `spread` is the standard deviation of a difference; 2 for
            two independent sets of units. The standard error is `spread sqrt(sets / units)` with
            `sets (units - 1)` degrees of freedom.

    >>> units_to_show(0.25, 0.01), units_to_show(0.01, 0.01, sets=2)
    (4908, 17)
    """
    # The power needs a one-sided quantile, which is the two-sided quantile at level 2 POWER - 1.
    quantiles = normal_quantile(level) + normal_quantile(2 * POWER - 1)
    units = max(2, math.ceil(sets * (quantiles * spread / effect) ** 2))

    def is_shown() -> bool:
        dof = sets * (units - 1)
        quantiles = t_quantile(dof, level) + t_quantile(dof, 2 * POWER - 1)
        return quantiles * spread * math.sqrt(sets / units) <= effect

    # Student's t needs a few units more than the normal distribution.
    while not is_shown():
        units += 1
    return units
