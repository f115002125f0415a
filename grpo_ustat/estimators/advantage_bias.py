r"""Effect of dropping zero-variance groups: it biases a prompt's mean reward, not its gradient.

A group has G rewards z of 0 or 1, each 1 with probability p, and mean `m`. Let M be the event that
the group is mixed, that is, its rewards are not all equal. All rewards are equal with probability
`h = p^G + (1-p)^G`. Over all groups, m has mean p. Over mixed groups only, its mean is shifted:

    E[ m - p | M ] = ( p (1-p)^G - (1-p) p^G ) / (1 - h)

For p < 1/2 this shift is positive, so a hard prompt looks easier than it is, and each of its
advantages `z - m` is too low. An easy prompt looks harder than it is (arXiv 2601.08521). The
gradient ghat of a group has no such bias. If all rewards in a group are equal, all its advantages
are 0. For every baseline with this property, dropping such groups only rescales the mean gradient:

    E[ ghat | M ] = E[ ghat ] / (1 - h)        P(M) E[ ghat | M ] = E[ ghat ]

The mean gradient of the kept groups is longer by the factor 1/(1 - h), which exactly compensates
for the dropped groups. For both easy and hard prompts, E[ ghat ] is g if the baseline is the mean
reward of the other completions, and (G-1)/G g if the baseline is the group mean.

The functions of this module estimate the shift for hard and for easy prompts. A prompt is hard to
the degree that a group is likely to have only wrong completions. Means over hard prompts therefore
give each prompt the weight (1-p)^G. If a quantity has mean x(p) over a prompt's groups, its
weighted mean over prompts is E[ (1-p)^G x(p) ] / E[ (1-p)^G ]. For easy prompts, the weight is p^G.
"""

from __future__ import annotations

import math
from typing import NamedTuple

import numpy as np

from grpo_ustat.estimators.intervals import CONFIDENCE, Interval, jackknife_interval
from grpo_ustat.estimators.ustatistic import zero_variance_share
from grpo_ustat.records import Array, Integers

# Smallest number of prompts with a nonzero shift for an estimate; the jackknife needs this number.
MIN_PROMPTS = 8


class MixedGroups(NamedTuple):
    """Estimates for the mixed groups of hard or easy prompts, with prompts weighted by w(p)."""

    # Unbiased estimates of the weight w(p): (1-p)^G for hard prompts, p^G for easy prompts.
    weight_P: Array
    # Unbiased estimates of w(p) E[(m - p) 1(M)].
    shift_P: Array
    # Unbiased estimates of w(p) P(M).
    mixed_P: Array

    def shift(self, level: float = CONFIDENCE) -> Interval:
        """Return the shift E[m - p | M] of the mean reward, with an interval for new prompts.

        The shift is the ratio of the weighted means of E[(m - p) 1(M)] and P(M).
        """
        return _ratio(self.shift_P, self.mixed_P, level)

    def longer(self, level: float = CONFIDENCE) -> Interval:
        """Return 1/P(M), the factor by which the mean gradient of mixed groups is longer.

        The interval includes the random choice of prompts.
        """
        kept, low, high = _ratio(self.mixed_P, self.weight_P, level)
        return Interval(1 / kept, 1 / min(high, 1.0), 1 / low if low > 0 else math.inf)


def mixed_groups_after(rewards_PN: Array, group_size: int) -> dict[str, MixedGroups]:
    """Return estimates for the mixed groups of hard and easy prompts, keyed by difficulty.

    The difficulties are `hard`, with the weight (1-p)^G of a prompt, and `easy`, with the weight
    p^G. A difficulty is omitted if fewer than `MIN_PROMPTS` prompts have a nonzero shift.

    The weight is estimated from one half of a prompt's completions, and the shift and the share of
    mixed groups from the other half. Then the halves change places, and the results are averaged.
    If both were estimated from the same completions, hard prompts would look harder than they are,
    because a prompt with few right answers in a small sample is not always hard.

    Args:
        rewards_PN: 0/1 rewards of N >= 2 (G + 1) completions of each prompt.
        group_size: group size, G.
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
    """Return the ratio of two means over prompts, with its jackknife interval."""
    above, below = above_P.sum(), below_P.sum()
    delete_one_P = (above - above_P) / (below - below_P)
    return jackknife_interval(float(above / below), delete_one_P[None], level)


def mean_shift(rewards_PN: Array, group_size: int) -> Array:
    """Return unbiased estimates of `E[(m - p) 1(M)] = p (1-p)^G - (1-p) p^G`, [P].

    Because E[m - p] = 0, this expectation is `-E[(m - p) 1(rewards equal)]`. To estimate it without
    bias, p is replaced by the reward z of a completion outside the group. The estimate is the mean
    of `-(m - z) 1(rewards equal)` over all ways to choose a group of G completions and one further
    completion of the prompt.

    Args:
        rewards_PN: 0/1 rewards of N > G completions of each prompt.
        group_size: group size, G.

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
    """Return the number of groups of `size` that can be formed from each count of completions."""
    return np.array([math.comb(int(count), size) for count in counts_P], dtype=np.float64)
