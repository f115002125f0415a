"""Counts of a group's outcomes as U-statistics: silent groups, and pass@k."""

from __future__ import annotations

import math

import numpy as np
from scipy.linalg import toeplitz  # pyright: ignore[reportUnknownVariableType]
from scipy.special import binom

from grpo_ustat.records import Array, Integers


def silent_share(rewards_PN: Array, group_size: int) -> Array:
    """Probability that a group's rewards are all equal, so that it says nothing, per prompt [P].

    Unbiased: the share of all groups of G of the N completions, sum_c C(n_c, G) / C(N, G) over the
    counts n_c of equal rewards.

    >>> silent_share(np.array([[1.0, 1.0, 1.0, 0.0]]), 2).tolist()
    [0.5]
    """
    whole = math.comb(rewards_PN.shape[1], group_size)
    counts = [np.unique(row, return_counts=True)[1] for row in rewards_PN]
    return np.array([sum(math.comb(c, group_size) for c in row.tolist()) / whole for row in counts])


def silent_share_if_alike(successes_P: Integers, group_size: int) -> float:
    """Share of silent groups, `p^G + (1-p)^G`, were every prompt as hard as their average p.

    By convexity at most the share that the prompts' own chances give, mean_x p_x^G + (1-p_x)^G;
    what is silent beyond it comes from prompts of unequal difficulty, which no larger group cures.
    Unbiased for the prompts at hand: with `p = sum_x p_x / P`, the power p^G is G! times the
    coefficient of t^G in `prod_x sum_m (t/P)^m p_x^m / m!`; prompts are independent and p_x^m has
    the unbiased estimate `(S)_m / (G)_m`. (Of one prompt's own `p_x^G + (1-p_x)^G`, G draws have
    no unbiased estimate but whether they were silent.)

    Args:
        successes_P: S, right ones among each prompt's G completions.
        group_size: G.

    >>> silent_share_if_alike(np.array([2, 0]), 2), silent_share_if_alike(np.array([2, 2]), 2)
    (0.5, 1.0)
    """
    wrong_P = group_size - successes_P
    return _power_of_mean(successes_P, group_size) + _power_of_mean(wrong_P, group_size)


def _power_of_mean(successes_P: Integers, size: int) -> float:
    """The unbiased estimate of p^G, p the mean of the prompts' chances, see above."""
    powers = np.arange(size + 1)
    choose = binom(powers[:, None], powers)
    draws = np.arange(size)
    total = (powers == 0).astype(float)  # of no prompt
    for successes in successes_P:
        own = np.cumprod([1, *((successes - draws).clip(0) / (size - draws) / len(successes_P))])
        shift: Array = toeplitz(total, np.zeros(size + 1))
        total = (choose * shift) @ own
    return float(total[-1])


def pass_at_k(successes_P: Integers, count: int, k: int) -> Array:
    """Probability that one of k completions is right, per prompt [P] (Chen et al. 2021).

    `1 - C(n-c, k) / C(n, k)` with c right ones of n: unbiased, the share of all subsets of k.

    >>> pass_at_k(np.array([0, 1, 3]), 4, 2).tolist()
    [0.0, 0.5, 1.0]
    """
    draws_k = np.arange(k)
    wrong_Pk = (count - successes_P[:, None] - draws_k).clip(0)
    return 1 - (wrong_Pk / (count - draws_k)).prod(axis=1)
