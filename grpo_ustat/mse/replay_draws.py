"""Groups drawn from a pool without replacement, and what the completions outside them say.

A group A of G completions and the rest of the pool are independent given the question: an inner
product of A's estimate with the rest's leave-one-out gradient is unbiased for <E ghat, g>, and one
of two disjoint groups for ||E ghat||^2. With the gradient of the whole pool, A included, the error
would be underestimated; the more, the larger the group.
"""

from __future__ import annotations

import numpy as np

from grpo_ustat.draws import generator
from grpo_ustat.records import Array, Integers

LEAST_OUTSIDE = 3  # of a group, so that one more may be left out of them


def draw_orders(seed: int, part: int, question: int, draws: int, count: int) -> Integers:
    """Permutations of a pool's N completions, [draws, N], shared by all rules and group sizes.

    The first G of a row are its group A, the next G its group B, all but A its rest. The numbers
    are a function of (seed, part, question) alone.
    """
    rng = generator(seed, "replay", part, str(question))
    return rng.permuted(np.tile(np.arange(count), (draws, 1)), axis=1)


def scatter(values_RG: Array, index_RG: Integers, count: int) -> Array:
    """Values placed at their completions' indices in the pool, zero elsewhere, [R, N]."""
    result = np.zeros((len(index_RG), count))
    np.put_along_axis(result, index_RG, values_RG, axis=1)
    return result


def rest_mask(order_RN: Integers, size: int) -> Array:
    """1.0 where a completion is not among the first `size` of a draw, else 0.0, [R, N]."""
    return 1 - scatter(np.ones((len(order_RN), size)), order_RN[:, :size], order_RN.shape[1])


def rest_gradient(toward_RN: Array, rewards_N: Array, rest_RN: Array) -> Array:
    """<u, g_rest> of every draw, [R], from the products <u, s_j>, [R, N].

    `g_rest = (n a - Sz b) / (n (n-1))`, `a = sum z s` and `b = sum s` over the n of the rest.
    """
    return (toward_RN * rest_weights(rewards_N, rest_RN)).sum(axis=1)


def rest_weights(rewards_N: Array, rest_RN: Array) -> Array:
    """Weights w with `g_rest = sum_j w_j s_j` of every draw, [R, N]."""
    count_R1 = rest_RN.sum(axis=1, keepdims=True)
    total_R1 = (rest_RN @ rewards_N)[:, None]
    return rest_RN * (count_R1 * rewards_N - total_R1) / (count_R1 * (count_R1 - 1))


def delete_one_rest_gradient(toward_RN: Array, rewards_N: Array, rest_RN: Array) -> Array:
    """`rest_gradient` with completion i left out of the rest, [R, N]; meaningless for i in A."""
    inside_RN = toward_RN * rest_RN
    count_R1 = rest_RN.sum(axis=1, keepdims=True) - 1
    a_RN = (inside_RN @ rewards_N)[:, None] - toward_RN * rewards_N
    b_RN = inside_RN.sum(axis=1, keepdims=True) - toward_RN
    total_RN = (rest_RN @ rewards_N)[:, None] - rewards_N
    return (count_R1 * a_RN - total_RN * b_RN) / (count_R1 * (count_R1 - 1))


def masked_mean(mask_RN: Array, values: Array) -> Array:
    """Mean over the draws where a completion's column of the mask is 1, [N]; NaN where none is."""
    count_N = mask_RN.sum(axis=0)
    total_N = values @ mask_RN if values.ndim == 1 else (values * mask_RN).sum(axis=0)
    return np.divide(total_N, count_N, out=np.full(len(count_N), np.nan), where=count_N > 0)
