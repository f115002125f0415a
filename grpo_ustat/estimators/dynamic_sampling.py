r"""Effect of dynamic sampling on the gradient, and the cost of a kept group (DAPO, 2503.14476).

Groups are drawn until B of them have unequal rewards; zero-variance groups are dropped. Let q_x be
the probability that a group of prompt x has zero variance (`p^G + (1-p)^G` for 0/1 rewards),
`K = E[1 - q_X]` the share of kept groups, and ghat any estimate that is 0 on zero-variance groups.
Then

    prompt of a kept group              distribution rho(x) (1 - q_x) / K
    E[ ghat | kept ] = E ghat / K       E[ ||ghat||^2 | kept ] = E||ghat||^2 / K

The factor 1 - q_x cancels because `E[ghat | x] = (1 - q_x) E[ghat | x, kept]`. The mean gradient of
kept groups therefore has the direction of the mean gradient of all groups and is longer by the
factor 1/K, which changes with the policy. On average, B kept groups need `B / K` generated groups.
If ghat is unbiased and `M = E||ghat||^2`, the errors after multiplying the mean of the kept groups
by K are

    B kept groups                      ( K M - ||grad J||^2 ) / B
    N = B / K generated, none dropped  (   M - ||grad J||^2 ) / N

In terms of N, the first error is `(M - ||grad J||^2 / K) / N`. It is smaller than the second error
because the number of kept groups is fixed, but the difference, as a share of the second error, is
only `(1/K - 1) G / n_c(G)`, where n_c is the noise scale. Without dynamic sampling, the same N
groups give the second error at the same cost. Dynamic sampling, however, generates groups in
batches and discards mixed groups in excess of B. At equal cost it therefore has the smaller error
only if the discarded share of mixed groups is less than

    s = (1/K - 1) G / n_c(G)
"""

from __future__ import annotations

import math
from typing import NamedTuple

import numpy as np

from grpo_ustat.estimators.intervals import CONFIDENCE, Interval, clustered_wilson
from grpo_ustat.records import Array


class KeptGroups(NamedTuple):
    """Share and cost of the kept groups in dynamic sampling, for one group size."""

    # Share of kept groups, K, with an interval over prompts.
    kept: Interval
    # Generated groups per kept group, 1/K. The mean gradient of kept groups is longer than that of
    # all groups by the same factor.
    generated: Interval
    # Break-even value s of the share of mixed groups that are discarded. Its interval combines the
    # intervals of K and n_c and has a coverage of at least 90 %.
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
        group_size: group size, G.
        scale: noise scale in rollouts, n_c(G). Unknown ends must be NaN, and a missing upper end
            must be infinite.
        most: number of independent groups from which each q_x was estimated, at least 1.
        level: coverage of the intervals of K and of `scale`.

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
        """Compute the break-even share s from 1/K and n_c."""
        if math.isinf(noise):
            return 0.0
        return (more - 1) * group_size / noise if noise > 0 else math.nan

    break_even = Interval(
        threshold(generated.estimate, scale.estimate),
        threshold(generated.low, scale.high),
        threshold(generated.high, scale.low),
    )
    return KeptGroups(kept, generated, break_even)
