r"""What groups of equal rewards do to advantages: the value is misjudged, the gradient is not.

Of 0/1 rewards with chance p, a group of G and its mean `m`, let M be that rewards differ, and
`h = p^G + (1-p)^G` the chance that they do not. Over all groups m has mean p. Over mixed ones

    E[ m - p | M ] = ( p (1-p)^G - (1-p) p^G ) / (1 - h)

above 0 where p < 1/2: a hard prompt looks easier than it is, so each of its advantages `z - m` is
too low, and an easy prompt looks harder (arXiv 2601.08521). But advantages of a group of equal
rewards are 0, so nothing is left out of the gradient's mean, whatever the baseline:

    E[ ghat | M ] = E[ ghat ] / (1 - h)        P(M) E[ ghat | M ] = E[ ghat ]

A kept group of a prompt is longer by 1/(1 - h) exactly as it is kept less often. Of the mean of the
others ghat has mean g, of the group's own mean (G-1)/G g, for easy and hard prompts alike.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
from scipy.special import binom

from grpo_ustat.estimators.intervals import (
    CONFIDENCE,
    Interval,
    clustered_wilson,
    jackknife_interval,
)
from grpo_ustat.estimators.ustatistic import silent_share
from grpo_ustat.records import Array

BINS = {"hard": (0.0, 0.25), "middle": (0.25, 0.75), "easy": (0.75, 1.0)}  # of p
LEAST_PROMPTS = 8  # of a bin, for a jackknife over them


class MixedGroups(NamedTuple):
    """Mixed groups of the prompts of a bin.

    Attributes:
        shift_P: unbiased estimates of E[(m - p) 1(M)] of every prompt.
        mixed_P: of P(M).
        most: independent groups behind the latter.
    """

    shift_P: Array
    mixed_P: Array
    most: int

    def shift(self, level: float = CONFIDENCE) -> Interval:
        """E[m - p | M] of the bin's groups, with its interval for new prompts."""
        above, below = self.shift_P.sum(), self.mixed_P.sum()
        delete_one_P = (above - self.shift_P) / (below - self.mixed_P)
        return jackknife_interval(float(above / below), delete_one_P[None], level)

    def longer(self, level: float = CONFIDENCE) -> Interval:
        """1/P(M): the mean gradient of mixed groups is longer by this than that of all."""
        kept, low, high = clustered_wilson(self.mixed_P, self.most, level)
        return Interval(*(1 / x if x > 0 else np.inf for x in (kept, high, low)))


def mixed_groups_by_chance(rewards_PN: Array, group_size: int) -> dict[str, MixedGroups]:
    """Mixed groups of hard, middle and easy prompts, see `BINS`; those of which enough is known.

    One half of a prompt's completions says in which bin it is, the other what its groups are like:
    the same ones would make hard prompts look harder than they are.

    Args:
        rewards_PN: 0/1 rewards of N >= 2 (G + 1) completions.
        group_size: G.
    """
    half = rewards_PN.shape[1] // 2
    chance_P, other_PN = rewards_PN[:, :half].mean(axis=1), rewards_PN[:, half:]
    shift_P = mean_shift(other_PN, group_size)
    mixed_P = 1 - silent_share(other_PN, group_size)
    bins: dict[str, MixedGroups] = {}
    for name, (low, high) in BINS.items():
        own_P = (chance_P >= low) & ((chance_P < high) | (high == 1))
        # without any one prompt there has to be a mixed group
        if own_P.sum() >= LEAST_PROMPTS and (mixed_P[own_P] > 0).sum() > 1:
            most = other_PN.shape[1] // group_size
            bins[name] = MixedGroups(shift_P[own_P], mixed_P[own_P], most)
    return bins


def mean_shift(rewards_PN: Array, group_size: int) -> Array:
    """Unbiased estimates of `E[(m - p) 1(M)] = p (1-p)^G - (1-p) p^G`, [P].

    The mean over all groups of G of a pool and a completion outside, of `-(m - z) 1(all alike)`.

    Args:
        rewards_PN: 0/1 rewards of N > G completions.
        group_size: G.

    >>> mean_shift(np.array([[1.0, 0.0, 0.0], [1.0, 1.0, 0.0]]), 2).round(3).tolist()
    [0.333, -0.333]
    """
    count = rewards_PN.shape[1]
    right_P = rewards_PN.sum(axis=1)
    wrong_P = count - right_P
    groups = binom(count, group_size) * (count - group_size)
    all_wrong_P = np.asarray(binom(wrong_P, group_size)) * right_P
    all_right_P = np.asarray(binom(right_P, group_size)) * wrong_P
    return (all_wrong_P - all_right_P) / groups
