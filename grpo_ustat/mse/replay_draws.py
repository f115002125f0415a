"""Groups drawn from a pool without replacement, and what the completions outside them say.

A group A of G completions and the rest of the pool are independent given the question: an inner
product of A's estimate with the rest's leave-one-out gradient is unbiased for <E ghat, g>, and one
of two disjoint groups for ||E ghat||^2. With the gradient of the whole pool, A included, the error
would be underestimated; the more, the larger the group.
"""

from __future__ import annotations

import numpy as np

from grpo_ustat.rollout.draws import generator

LEAST_REST = 3  # completions outside a group, so that one more may be left out of them


def orders(seed: int, part: int, question: int, draws: int, count: int) -> np.ndarray:
    """Permutations of a pool's N completions, [draws, N], shared by all rules and group sizes.

    The first G of a row are its group A, the next G its group B, all but A its rest. The numbers
    are a function of (seed, part, question) alone.
    """
    rng = generator(seed, "replay", part, str(question))
    return rng.permuted(np.tile(np.arange(count), (draws, 1)), axis=1)


def scattered(values_RG: np.ndarray, index_RG: np.ndarray, count: int) -> np.ndarray:
    """Values at their completions' places in the pool, zero elsewhere, [R, N]."""
    result = np.zeros((len(index_RG), count))
    np.put_along_axis(result, index_RG, values_RG, axis=1)
    return result


def outside(order_RN: np.ndarray, taken: int) -> np.ndarray:
    """1.0 where a completion is not among the first `taken` of a draw, else 0.0, [R, N]."""
    return 1 - scattered(np.ones((len(order_RN), taken)), order_RN[:, :taken], order_RN.shape[1])


def rest_gradient(toward_RN: np.ndarray, rewards_N: np.ndarray, rest_RN: np.ndarray) -> np.ndarray:
    """<u, g_rest> of every draw, [R], from the products <u, s_j>, [R, N].

    `g_rest = (n a - Sz b) / (n (n-1))`, `a = sum z s` and `b = sum s` over the n of the rest.
    """
    return (toward_RN * rest_weights(rewards_N, rest_RN)).sum(axis=1)


def rest_weights(rewards_N: np.ndarray, rest_RN: np.ndarray) -> np.ndarray:
    """Weights w with `g_rest = sum_j w_j s_j` of every draw, [R, N]."""
    count_R1 = rest_RN.sum(axis=1, keepdims=True)
    total_R1 = (rest_RN @ rewards_N)[:, None]
    return rest_RN * (count_R1 * rewards_N - total_R1) / (count_R1 * (count_R1 - 1))


def rest_gradient_without(
    toward_RN: np.ndarray, rewards_N: np.ndarray, rest_RN: np.ndarray
) -> np.ndarray:
    """The same with completion i left out of the rest, [R, N]; of no meaning for i in A."""
    inside_RN = toward_RN * rest_RN
    count_R1 = rest_RN.sum(axis=1, keepdims=True) - 1
    a_RN = (inside_RN @ rewards_N)[:, None] - toward_RN * rewards_N
    b_RN = inside_RN.sum(axis=1, keepdims=True) - toward_RN
    total_RN = (rest_RN @ rewards_N)[:, None] - rewards_N
    return (count_R1 * a_RN - total_RN * b_RN) / (count_R1 * (count_R1 - 1))


def masked_mean(mask_RN: np.ndarray, values: np.ndarray) -> np.ndarray:
    """Mean over the draws that a completion's column admits, [N]; NaN where there are none."""
    count_N = mask_RN.sum(axis=0)
    total_N = values @ mask_RN if values.ndim == 1 else (values * mask_RN).sum(axis=0)
    return np.divide(total_N, count_N, out=np.full(len(count_N), np.nan), where=count_N > 0)
