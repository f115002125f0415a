r"""Gradient noise from the norms of a gradient that accumulates over the micro-batches of a step.

A step adds K micro-batch gradients g_1 ... g_K, and A_k = g_1 + ... + g_k. Let n be the number of
rollouts of the step, G the group size and P = n/G. The loss is a mean over rollouts with leave-one-
out advantages, so A_K is the gradient ghat, E[ghat] = grad J, and row i adds c_i / n, where c_i is
its advantage times its score. For a prompt x with gradient g_x,

    E[ <c_i, c_j> | x ] = ||g_x||^2 (1 + 1/(G-1)^2)     two rows of one group
    E[ <c_i, c_j> ]     = ||grad J||^2                  rows of two prompts
    E||ghat||^2         = ||grad J||^2 + V/P            V = C1 + C2/G + C3/(G (G-1))

The second term of the first line comes from the rewards z_i and z_j, which the baselines of rows j
and i contain with the factor -1/(G-1). tests/estimators/test_micro_batch_norms.py enumerates all
three splits below.

1. Whole groups in each micro-batch. Micro-batches are independent, so the mean of the products
   K^2 <g_j, g_k> is ||grad J||^2, and the rest of ||A_K||^2 is V/P. Both are unbiased.

2. Rows of a group spread at random over micro-batches. Two rows of different micro-batches belong
   to the same group with probability (G-1)/(n-1), so the mean of the products has the bias

       (G-1)/(n-1) { C1 + E||g_x||^2 / (G-1)^2 }

   and the estimate of V/P is too small by the same amount. The noise that the draw of prompts
   causes, G C1 / n, is nearly invisible. C1 cannot be removed without a second estimate of it.
   Both errors make the noise scale n V / (P ||grad J||^2) too small, so it is a lower bound.

3. Parts of a group, with the rows of a group in consecutive micro-batches. A block is h consecutive
   micro-batches with whole groups. Products between blocks are those of split 1. Products inside a
   block estimate E||g_x||^2 (1 + 1/(G-1)^2) and therefore C1. Since n V/P = G C1 + C2 + C3/(G-1),
   the sum F = C2 + C3/(G-1) is known too, but not its parts. C2 >= 0 and C3 >= 2 E||g_x||^2 bound
   G* = 1 + sqrt(C3/C1): C3 is between 2 E||g_x||^2 and (G-1) F.

Without a copy of the gradient, ||g_k||^2 is unknown if ranks add their gradients during the
backward pass. Then the increments d_k = ||A_k||^2 - ||A_{k-1}||^2 are fitted. For split 1, their
expectation is E||g||^2 + 2 (k-1) <g_j, g_k>. If noise dominates, increments are uncorrelated and
their variance is proportional to 2k - 1. So the weighted fit is the best linear one, and its sum of
signal and noise is ||A_K||^2. With known ||g_k||^2, only <g_k, A_{k-1}> is fitted, with variance
proportional to k - 1. For split 1, the result is the mean of all products. The variance of the
signal is then smaller by a factor of 2 at K = 2 and 1.5 at K = 32.

Unequal micro-batches: let w_k be the share of micro-batch k in the loss, and c the coefficient of
variation of the shares. If ||g_k||^2 is known, the signal is multiplied by 1 - c^2/(K-1) and the
sum of both is unbiased. The same holds for increments if the shares have no trend in k. With a
trend, increments mistake noise for signal: if the last of 8 micro-batches is half as large as the
others, the noise is 10 % too large, and the signal is too small by 10 % of the noise.
"""

from __future__ import annotations

from functools import cache
from typing import NamedTuple

import numpy as np

from grpo_ustat.estimators.scaling import ScalingLaw
from grpo_ustat.records import Array


class Layout(NamedTuple):
    """Order of the groups in the micro-batches of a step."""

    # Number of micro-batches, K.
    micro_batches: int
    # Number of consecutive micro-batches that contain the whole groups of a block, h; 1 if each
    # micro-batch has whole groups.
    per_block: int = 1

    @property
    def is_measurable(self) -> bool:
        """True if there are at least two blocks, all of the same size."""
        blocks, rest = divmod(self.micro_batches, self.per_block)
        return blocks >= 2 and rest == 0


@cache
def norm_weights(layout: Layout, own_norms: bool) -> Array:
    """Return the weights that turn squared norms into signal, noise and product in a block.

    Args:
        layout: order of the groups.
        own_norms: True if the squared norms of single micro-batches are known.

    Returns:
        Weights [3, 2K] of ||A_1||^2 ... ||A_K||^2, ||g_1||^2 ... ||g_K||^2. The rows give

        - signal: the squared length of the expected gradient, K^2 <g_j, g_k> for different blocks
        - noise: E||A_K||^2 minus the signal
        - inside: K^2 <g_j, g_k> for two micro-batches of one block; 0 if h = 1

    Raises:
        ValueError: the layout is not measurable.

    >>> sq_norms = np.array([3.0, 8.0, 3.0, 3.0])  # <g_1, g_2> = (8 - 3 - 3) / 2 = 1
    >>> (norm_weights(Layout(2), True) @ sq_norms).round(9).tolist()
    [4.0, 4.0, 0.0]
    """
    if not layout.is_measurable:
        raise ValueError(f"{layout}: use at least two blocks of equal size")
    count, size = layout
    place_K: Array = np.arange(count, dtype=float)
    before_block_K: Array = np.floor(place_K / size) * size
    # Increment k is ||g_k||^2 + 2 <g_k, A_{k-1}>.
    columns = [np.ones(count), 2.0 * before_block_K, 2.0 * (place_K - before_block_K)]
    increments_KN: Array = np.hstack(
        [np.eye(count) - np.eye(count, k=-1), np.zeros((count, count))]
    )
    own_KN = np.hstack([np.zeros((count, count)), np.eye(count)])
    if own_norms:
        design: Array = np.stack(columns[1:], axis=1)[1:]
        found = _fit(design, 1 / place_K[1:]) @ (increments_KN - own_KN)[1:]
        between_N, inside_N = found
        length_N = own_KN.mean(axis=0)
    else:
        found = _fit(np.stack(columns, axis=1), 1 / (2.0 * place_K + 1)) @ increments_KN
        length_N, between_N, inside_N = found
    noise_N = count * ((length_N - between_N) + (size - 1) * (inside_N - between_N) * (size > 1))
    return np.stack([count**2 * between_N, noise_N, count**2 * inside_N])


def _fit(design_KJ: Array, weights_K: Array) -> Array:
    """Return the matrix of a weighted least-squares fit; a column of zeros has coefficient 0."""
    roots_K1: Array = np.sqrt(weights_K)[:, None]
    return np.asarray(np.linalg.pinv(roots_K1 * design_KJ) * roots_K1.T, float)


def signal_and_noise_of_ranks(
    sq_norm_S: Array, own_sum_S: Array, ranks: int, parts_S: Array
) -> tuple[Array, Array]:
    """Return signal and noise from the norms of ranks' micro-batches and of the averaged gradient.

    Data-parallel ranks average their gradients, so the averaged gradient is the sum of all ranks'
    micro-batch gradients over the number of ranks. One micro-batch per rank suffices.

    Args:
        sq_norm_S: squared norm of the averaged gradient at each step.
        own_sum_S: sum of the squared norms of the micro-batch gradients of all ranks.
        ranks: number of ranks.
        parts_S: number of micro-batches of all ranks together, at least 2.

    >>> signal_S, noise_S = signal_and_noise_of_ranks(
    ...     np.array([5.0]), np.array([12.0]), ranks=2, parts_S=np.array([2])
    ... )
    >>> signal_S.tolist(), noise_S.tolist()
    ([4.0], [1.0])
    """
    signal_S = (sq_norm_S - own_sum_S / ranks**2) * parts_S / (parts_S - 1)
    return signal_S, sq_norm_S - signal_S


def law_of_norms(signal_S: Array, noise_S: Array, rollouts: float, group_size: int) -> ScalingLaw:
    """Return a scaling law with ||grad J||^2 and the sum of C1, C2 and C3, over S >= 2 steps.

    Whole groups do not separate C1, C2 and C3. The constant C2 of the result is n V/P at this group
    size, G C1 + C2 + C3/(G-1), and the others are 0. So only the noise scale at this G is valid.
    """
    zeros_S = np.zeros_like(signal_S)
    values_4S = np.stack([zeros_S, rollouts * noise_S, zeros_S, signal_S])
    return ScalingLaw.of_steps(values_4S, rollouts / group_size)


def law_of_blocks(
    values_3S: Array, rollouts: float, group_size: int, groups_at_once: int
) -> ScalingLaw:
    """Return a scaling law with ||grad J||^2, C1 and C2 + C3/(G-1), from parts of groups.

    The constant C2 of the result is C2 + C3/(G-1), and C3 is 0.

    Args:
        values_3S: signal, noise and product in a block at each of S >= 2 steps.
        rollouts, group_size: n and G.
        groups_at_once: number of groups with rows in a micro-batch, R; the number of data-parallel
            ranks whose gradients are added.
    """
    signal_S, noise_S, inside_S = values_3S
    same_group_S = groups_at_once * inside_S - (groups_at_once - 1) * signal_S
    c1_S = same_group_S / (1 + 1 / (group_size - 1) ** 2) - signal_S
    rest_S = rollouts * noise_S - group_size * c1_S
    values_4S = np.stack([c1_S, rest_S, np.zeros_like(c1_S), signal_S])
    return ScalingLaw.of_steps(values_4S, rollouts / group_size)
