"""U-statistics of the outcomes of a group: the zero-variance share and pass@k."""

from __future__ import annotations

import math

import numpy as np

from grpo_ustat.records import Array, Integers


def zero_variance_share(rewards_PN: Array, group_size: int) -> Array:
    """Estimate, for each prompt, the probability that all rewards of a group are equal, [P].

    A group with equal rewards adds nothing to the gradient. The estimate is the share of groups
    with equal rewards among all groups of G that can be formed from the N completions. This share
    is `sum_c C(n_c, G) / C(N, G)`, where n_c is the number of completions with reward c and the sum
    runs over the distinct rewards. The estimate is unbiased.

    >>> zero_variance_share(np.array([[1.0, 1.0, 1.0, 0.0]]), 2).tolist()
    [0.5]
    """
    all_groups = math.comb(rewards_PN.shape[1], group_size)
    counts = [np.unique(row, return_counts=True)[1] for row in rewards_PN]
    return np.array(
        [sum(math.comb(c, group_size) for c in row.tolist()) / all_groups for row in counts]
    )


def zero_variance_share_if_equal(successes_P: Integers, group_size: int) -> float:
    """Estimate `p^G + (1-p)^G`, the zero-variance share if every prompt had the average p.

    By convexity, this share is at most the actual share, which is the mean over prompts x of
    `p_x^G + (1-p_x)^G`. The actual share is larger because prompts differ in difficulty; larger
    groups do not remove this difference.

    The estimate is unbiased for the given prompts. With `p = sum_x p_x / P`, the power p^G is G!
    times the coefficient of t^G in `prod_x sum_m (t/P)^m p_x^m / m!`. Prompts are independent, and
    p_x^m has the unbiased estimate `(S)_m / (G)_m`, where `(S)_m = S (S-1) .. (S-m+1)`.

    Args:
        successes_P: number of right completions in each prompt's group of G, S.
        group_size: G.

    >>> zero_variance_share_if_equal(np.array([2, 0]), 2)
    0.5
    >>> zero_variance_share_if_equal(np.array([2, 2]), 2)
    1.0
    """
    wrong_P = group_size - successes_P
    return _power_of_mean(successes_P, group_size) + _power_of_mean(wrong_P, group_size)


def _power_of_mean(successes_P: Integers, size: int) -> float:
    """Estimate p^G without bias, as derived in `zero_variance_share_if_equal`."""
    # SciPy is imported here so that a rejected command line fails without loading it.
    from scipy.linalg import toeplitz  # pyright: ignore[reportUnknownVariableType]
    from scipy.special import binom

    powers = np.arange(size + 1)
    choose = binom(powers[:, None], powers)
    draws = np.arange(size)
    # Start with the coefficients of the empty product, which is the constant polynomial 1.
    total = (powers == 0).astype(float)
    for successes in successes_P:
        coefficients = np.cumprod(
            [1, *((successes - draws).clip(0) / (size - draws) / len(successes_P))]
        )
        shift: Array = toeplitz(total, np.zeros(size + 1))
        total = (choose * shift) @ coefficients
    return float(total[-1])


def pass_at_k(successes_P: Integers, count: int, k: int) -> Array:
    """Estimate, for each prompt, the probability that at least one of k completions is right, [P].

    The estimate is the share of subsets of k that contain a right completion,
    `1 - C(n-c, k) / C(n, k)` for c right completions of n. It is unbiased (Chen et al. 2021).

    >>> pass_at_k(np.array([0, 1, 3]), 4, 2).tolist()
    [0.0, 0.5, 1.0]
    """
    draws_k = np.arange(k)
    wrong_Pk = (count - successes_P[:, None] - draws_k).clip(0)
    return 1 - (wrong_Pk / (count - draws_k)).prod(axis=1)
