r"""Effect of dynamic sampling on the gradient, and cost of a kept group (DAPO, 2503.14476).

Groups are drawn until B of them have rewards that differ; the rest, of zero variance, are dropped.
With q_x the probability that a group of prompt x has zero variance (`p^G + (1-p)^G` for 0/1
rewards), `K = E[1 - q_X]` the share of kept groups, and ghat any estimate that is 0 on
zero-variance groups,

    prompt of a kept group              distribution rho(x) (1 - q_x) / K
    E[ ghat | kept ] = E ghat / K       E[ ||ghat||^2 | kept ] = E||ghat||^2 / K

because `E[ghat | x] = (1 - q_x) E[ghat | x, kept]`: the two factors cancel. So the direction is
that of all groups and the scale is 1/K, which changes with the policy. B kept groups need `B / K`
generated ones on average. Rescaled by K, with `M = E||ghat||^2` and ghat unbiased,

    B kept groups                      ( K M - ||grad J||^2 ) / B
    N = B / K generated, none dropped  (   M - ||grad J||^2 ) / N

Per generated group the first is `(M - ||grad J||^2 / K) / N`: better, because the number of kept
groups is fixed, but only by the share `(1/K - 1) G / n_c(G)` (n_c is the noise scale). The same
generated groups, without replacement of zero-variance ones, have the error of the second line at
the cost of the first. So dynamic sampling pays if it throws away less than a share

    s = (1/K - 1) G / n_c(G)

of its kept groups; some are thrown away because they come in batches larger than needed.
"""

from __future__ import annotations

import math
from typing import NamedTuple

import numpy as np

from grpo_ustat.estimators.intervals import CONFIDENCE, Interval, clustered_wilson
from grpo_ustat.records import Array


class KeptGroups(NamedTuple):
    """Numbers of kept and generated groups of one size in dynamic sampling."""

    # K, with its interval over prompts.
    kept: Interval
    # 1/K, generated groups for a kept one, which is also the scale of the gradient.
    generated: Interval
    # s; its interval joins those of K and n_c and covers at least 90 %.
    break_even: Interval


def kept_groups(
    zero_variance_P: Array,
    group_size: int,
    scale: Interval,
    most: int = 1,
    level: float = CONFIDENCE,
) -> KeptGroups:
    """Estimate the cost and the break-even share of dynamic sampling.

    Args:
        zero_variance_P: unbiased estimates of q_x, see `ustatistic.zero_variance_share`.
        group_size: G.
        scale: n_c(G), in rollouts; an unknown end is NaN, a missing upper end infinite.
        most: number of groups for an estimate of q_x, at least 1.
        level: coverage of the interval of K, and of `scale`.

    >>> shares = np.array([0.5, 0.5, 0.5, 0.5])  # half of the groups of every prompt
    >>> groups = kept_groups(shares, 8, Interval(80.0, 40.0, math.inf))
    >>> groups.kept.estimate, groups.generated.estimate, groups.break_even.estimate
    (0.5, 2.0, 0.1)
    >>> groups.break_even.low
    0.0
    """
    kept = clustered_wilson(1 - np.asarray(zero_variance_P), most, level)
    generated = Interval(*(1 / x if x > 0 else math.inf for x in (kept[0], kept[2], kept[1])))

    def threshold(more: float, noise: float) -> float:
        """Compute s from 1/K and n_c."""
        if math.isinf(noise):
            return 0.0
        return (more - 1) * group_size / noise if noise > 0 else math.nan

    break_even = Interval(
        threshold(generated.estimate, scale.estimate),
        threshold(generated.low, scale.high),
        threshold(generated.high, scale.low),
    )
    return KeptGroups(kept, generated, break_even)
