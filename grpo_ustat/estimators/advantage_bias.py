r"""Effect of groups of equal rewards: the value of a prompt is biased, the gradient is not.

A group of G has 0/1 rewards of probability p and mean `m`. Let M be the event that its rewards
differ, and `h = p^G + (1-p)^G` the probability that they do not. Over all groups m has mean p. Over
mixed groups

    E[ m - p | M ] = ( p (1-p)^G - (1-p) p^G ) / (1 - h)

This is above 0 if p < 1/2: a hard prompt looks easier than it is, so each of its advantages `z - m`
is too low, and an easy prompt looks harder (arXiv 2601.08521). But the advantages of a group of
equal rewards are 0, so dropping it removes nothing from the gradient's mean, for any baseline:

    E[ ghat | M ] = E[ ghat ] / (1 - h)        P(M) E[ ghat | M ] = E[ ghat ]

The mean gradient of kept groups is longer by 1/(1 - h), which compensates that groups are kept less
often. With the mean of the other completions as baseline ghat has mean g, with the group mean
(G-1)/G g, for easy and hard prompts equally.

A group that was all wrong marks a hard prompt: over prompts, training after such a group has the
mean E[ (1-p)^G x(p) ], for a mean x of a prompt's groups.
"""

from __future__ import annotations

import math
from typing import NamedTuple

import numpy as np

from grpo_ustat.estimators.intervals import CONFIDENCE, Interval, jackknife_interval
from grpo_ustat.estimators.ustatistic import zero_variance_share
from grpo_ustat.records import Array, Integers

# Least number of prompts whose shift is not 0, for a jackknife.
MIN_PROMPTS = 8


class MixedGroups(NamedTuple):
    """Mixed groups of prompts of a difficulty, each prompt with the weight w(p)."""

    # Unbiased estimates of w(p), the probability that another group was all wrong, or all right.
    weight_P: Array
    # Unbiased estimates of w(p) E[(m - p) 1(M)].
    shift_P: Array
    # Unbiased estimates of w(p) P(M).
    mixed_P: Array

    def shift(self, level: float = CONFIDENCE) -> Interval:
        """Return E[m - p | M], with its interval for new prompts."""
        return _ratio(self.shift_P, self.mixed_P, level)

    def longer(self, level: float = CONFIDENCE) -> Interval:
        """Return 1/P(M), the factor by which the mean gradient of mixed groups is longer."""
        kept, low, high = _ratio(self.mixed_P, self.weight_P, level)
        return Interval(1 / kept, 1 / min(high, 1.0), 1 / low if low > 0 else math.inf)


def mixed_groups_after(rewards_PN: Array, group_size: int) -> dict[str, MixedGroups]:
    """Return mixed groups of prompts with another group all wrong, `hard`, or all right, `easy`.

    A difficulty is missing if fewer than `MIN_PROMPTS` prompts have a shift other than 0. One half
    of a prompt's completions estimates the weight, the other half the groups, in both directions.
    With the same completions hard prompts would look harder than they are, and a prompt that is
    hard by its share among few completions may not be hard.

    Args:
        rewards_PN: 0/1 rewards of N >= 2 (G + 1) completions.
        group_size: G.
    """
    half = rewards_PN.shape[1] // 2
    halves = rewards_PN[:, :half], rewards_PN[:, half : 2 * half]
    groups_by_difficulty: dict[str, MixedGroups] = {}
    for name, reward in (("hard", 0.0), ("easy", 1.0)):
        orders: list[Array] = []
        for deciding_PN, judged_PN in (halves, halves[::-1]):
            equal_groups_P = _choose((deciding_PN == reward).sum(axis=1), group_size)
            weight_P = equal_groups_P / math.comb(half, group_size)
            mixed_P = 1 - zero_variance_share(judged_PN, group_size)
            shift_P = mean_shift(judged_PN, group_size)
            orders.append(weight_P * np.stack([np.ones_like(mixed_P), shift_P, mixed_P]))
        groups = MixedGroups(*np.mean(orders, axis=0))
        if np.count_nonzero(groups.shift_P) >= MIN_PROMPTS:
            groups_by_difficulty[name] = groups
    return groups_by_difficulty


def _ratio(above_P: Array, below_P: Array, level: float) -> Interval:
    """Return the ratio of two means over prompts, jackknifed."""
    above, below = above_P.sum(), below_P.sum()
    delete_one_P = (above - above_P) / (below - below_P)
    return jackknife_interval(float(above / below), delete_one_P[None], level)


def mean_shift(rewards_PN: Array, group_size: int) -> Array:
    """Return unbiased estimates of `E[(m - p) 1(M)] = p (1-p)^G - (1-p) p^G`, [P].

    Each is the mean of `-(m - z) 1(rewards equal)` over all groups of G of a pool and a completion
    outside the group.

    Args:
        rewards_PN: 0/1 rewards of N > G completions.
        group_size: G.

    >>> mean_shift(np.array([[1.0, 0.0, 0.0], [1.0, 1.0, 0.0]]), 2).round(3).tolist()
    [0.333, -0.333]
    """
    count = rewards_PN.shape[1]
    right_P = rewards_PN.sum(axis=1)
    wrong_P = count - right_P
    groups = math.comb(count, group_size) * (count - group_size)
    all_wrong_P = _choose(wrong_P, group_size) * right_P
    all_right_P = _choose(right_P, group_size) * wrong_P
    return (all_wrong_P - all_right_P) / groups


def _choose(counts_P: Array | Integers, size: int) -> Array:
    """Count the groups of a size among so many completions."""
    return np.array([math.comb(int(count), size) for count in counts_P], dtype=np.float64)
