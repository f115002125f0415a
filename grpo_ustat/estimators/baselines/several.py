"""Advantages where several reward functions judge a completion: sum, then normalise, or the other
way round. They take rewards of every function, so they are no rules of `BASELINES`.
"""

from __future__ import annotations

import numpy as np

from grpo_ustat.estimators.baselines.base import centre, quotient
from grpo_ustat.estimators.baselines.group import group_std
from grpo_ustat.records import Array, BaselineContext


def sum_then_normalise(rewards_PGF: Array, weights_F: Array, *, epsilon: float) -> Array:
    """`group_std` of the weighted sum of F rewards, [P, G]: TRL's `sum_then_normalize`.

    A function of small spread beside another of large spread hardly counts: completions with the
    same sum get the same advantage, whatever the sum is made of.

    Args:
        rewards_PGF: of every reward function, float64.
        weights_F: of the functions.
        epsilon: added to the std (TRL: 1e-4).

    >>> z = np.array([[[1.0, 0.0], [0.0, 1.0], [0.0, 0.0]]])
    >>> sum_then_normalise(z, np.ones(2), epsilon=0.0).round(3).tolist()
    [[0.577, 0.577, -1.155]]
    """
    return group_std(rewards_PGF @ weights_F, BaselineContext(), epsilon=epsilon)


def normalise_then_sum(rewards_PGF: Array, weights_F: Array, *, epsilon: float) -> Array:
    """GDPO (Shih-Yang Liu et al. 2026, arXiv 2601.05242), as TRL's `normalize_then_sum`, [P, G].

    `group_std` of each function's rewards apart, their weighted sum, and of this (x - mean) /
    (std + epsilon) over the whole batch, std with divisor P G - 1. A function that is silent in a
    group counts nothing there, and the others as much as ever. Biased, function by function as
    `group_std`: with many completions its mean goes to that of sum_f w_f g_f/sigma_f, times one
    number for the batch, since the batch's mean is 0 but for rounding.

    Args:
        rewards_PGF: of every reward function, float64.
        weights_F: of the functions.
        epsilon: added to every std (TRL: 1e-4).

    >>> z = np.array([[[1.0, 0.0], [0.0, 5.0], [0.0, 0.0]]])  # the second function's scale is 5
    >>> normalise_then_sum(z, np.ones(2), epsilon=0.0).round(3).tolist()
    [[0.577, 0.577, -1.155]]
    """
    total_PG = sum(
        weight * group_std(rewards_PGF[..., place], BaselineContext(), epsilon=epsilon)
        for place, weight in enumerate(weights_F)
    )
    deviation_PG = centre(np.reshape(total_PG, (1, -1))).reshape(rewards_PGF.shape[:2])
    return quotient(deviation_PG, deviation_PG.std(ddof=1) + epsilon)
