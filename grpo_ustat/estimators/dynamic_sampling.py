r"""Effect of dynamic sampling on the gradient, and the cost of a kept group (DAPO, 2503.14476).

Dynamic sampling draws groups until B of them have unequal rewards, and drops zero-variance groups.
Let rho(x) be the distribution of prompts, q_x the probability that a group of prompt x has zero
variance (`p^G + (1-p)^G` for 0/1 rewards), and `K = E[1 - q_X]` the share of groups that are kept.
Let ghat be any estimate from one group that is 0 on zero-variance groups.

**Direction.** The prompt of a kept group has the distribution rho(x) (1 - q_x) / K, and

    E[ ghat | kept ] = E ghat / K       E[ ||ghat||^2 | kept ] = E||ghat||^2 / K

The factor 1 - q_x cancels because `E[ghat | x] = (1 - q_x) E[ghat | x, kept]`. The mean gradient of
kept groups therefore has the same direction as the mean gradient of all groups. It is longer by the
factor 1/K, which changes with the policy.

**Error.** On average, B kept groups need N = B / K generated groups. Let ghat be unbiased and
`M = E||ghat||^2`. If the mean of the kept groups is multiplied by K, it has the error

    ( K M - ||grad J||^2 ) / B  =  ( M - ||grad J||^2 / K ) / N        with dynamic sampling

The mean of N generated groups, none of which is dropped, has the same cost and the error

    ( M - ||grad J||^2 ) / N                                           without dynamic sampling

The first error is smaller, because the number of kept groups is fixed. The difference, as a share
of the second error, is only `(1/K - 1) G / n_c(G)`, where n_c is the noise scale. Dynamic sampling
also has a disadvantage: it generates groups in batches and discards mixed groups in excess of B. At
equal cost it therefore has the smaller error only if the discarded share of mixed groups is less
than the break-even share

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

    # Share K of generated groups that are kept, with an interval for new prompts.
    kept: Interval
    # Number of generated groups per kept group, 1/K. It is also the factor by which the mean
    # gradient of kept groups is longer than the mean gradient of all groups.
    generated: Interval
    # Break-even share s: dynamic sampling reduces the error at equal cost only if it discards less
    # than this share of the mixed groups. The interval combines the intervals of K and n_c and has
    # a coverage of at least 90 %.
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
        most: number of independent groups behind each estimate of q_x, at least 1.
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
        """Return the break-even share s, given 1/K and n_c."""
        if math.isinf(noise):
            return 0.0
        return (more - 1) * group_size / noise if noise > 0 else math.nan

    break_even = Interval(
        threshold(generated.estimate, scale.estimate),
        threshold(generated.low, scale.high),
        threshold(generated.high, scale.low),
    )
    return KeptGroups(kept, generated, break_even)
