"""Unbiased estimates for each prompt from two random halves of its pool.

A pool contains N scored completions of each prompt. Given the prompt, the estimates from the two
halves are independent. One half can therefore evaluate a plan or a ranking that was made from the
other half, without the bias of using the same data twice.
"""

from __future__ import annotations

import numpy as np

from grpo_ustat.estimators.moments import norm_moments, pool_gradient_weights
from grpo_ustat.records import Array, Integers, ScorePool

# Number of random splits into two halves, over which results are averaged.
HALVINGS = 16
# Minimum number of prompts for a jackknife over results from halves.
MIN_PROMPTS = 10
# Minimum number of completions for unbiased moments in both halves.
MIN_COMPLETIONS = 6


def halves_of(pool: ScorePool) -> tuple[dict[str, Array], dict[str, Array]]:
    """Return estimates for each prompt from both halves of its pool, and from the full pool.

    The two results are dictionaries of arrays: [2, S, P] for both halves of each of S random
    splits, and [P] for the full pool. The keys are `value` (expected reward V), `variance` (of the
    reward), `score` (mean squared score norm), `g_sq` (||g||^2), `length` (mean length), `first`
    and `second`. The error of leave_one_out with a group of G is
    `first / G + second / (G (G-1))`; see `estimators.moments`.

    Args:
        pool: pool of N >= 6 completions for each of P prompts. If N is odd, one completion of each
            prompt is in neither half.
    """
    z, q, lengths_PN = pool.rewards_PN, pool.sq_norm_PN, pool.lengths_PN
    count, size = z.shape
    rng = np.random.default_rng(0)
    orders = [rng.permutation(size) for _ in range(HALVINGS)]
    parts: list[Integers] = [
        order[half * (size // 2) :][: size // 2] for half in (0, 1) for order in orders
    ]
    parts.append(np.arange(size, dtype=np.int64))
    weights_PNK = np.zeros((count, size, len(parts)))
    for k, part in enumerate(parts):
        weights_PNK[:, part, k] = pool_gradient_weights(z[:, part])
    ghat_sq_PK = (weights_PNK * (pool.gram_PNN @ weights_PNK)).sum(axis=1)

    def estimates(k: int, part: Integers) -> dict[str, Array]:
        """Return estimates by name, [P], from part k of the completions."""
        moments = norm_moments(q[:, part], z[:, part], ghat_sq_PK[:, k])
        return {
            "value": moments.value, "variance": moments.var_z, "score": moments.m0,
            "g_sq": moments.g_sq, "first": moments.a_v - moments.g_sq,
            "second": moments.d + moments.g_sq, "length": lengths_PN[:, part].mean(axis=1),
        }  # fmt: skip

    *each, full_pool = [estimates(k, part) for k, part in enumerate(parts)]
    halves = {
        name: np.array([x[name] for x in each]).reshape(2, HALVINGS, count) for name in full_pool
    }
    return halves, full_pool


def group_error(first: Array, second: Array, group_size: Array | float) -> Array:
    """Return the error of leave_one_out with a group of G, `first / G + second / (G (G-1))`.

    >>> group_error(np.array([8.0]), np.array([12.0]), 4.0).tolist()
    [3.0]
    """
    return first / group_size + second / (group_size * (group_size - 1))
