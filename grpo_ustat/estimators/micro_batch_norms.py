r"""Gradient noise from the norms of a gradient that accumulates over the micro-batches of a step.

A step adds K micro-batch gradients g_1 ... g_K. Let A_k = g_1 + ... + g_k be the sum after
micro-batch k, n the number of rollouts (rows) of the step, G the group size and P = n/G the number
of groups. The loss is a mean over rollouts with leave-one-out advantages. Therefore A_K is the
gradient estimate ghat with E[ghat] = grad J. Row i adds c_i / n to it, where c_i is the advantage
of the row times its score. For a prompt x with gradient g_x,

    E[ <c_i, c_j> | x ] = ||g_x||^2 (1 + 1/(G-1)^2)     for two rows of one group
    E[ <c_i, c_j> ]     = ||grad J||^2                  for rows of two prompts
    E||ghat||^2         = ||grad J||^2 + V/P            with V = C1 + C2/G + C3/(G (G-1))

The factor 1 + 1/(G-1)^2 arises because the baseline of row j contains the reward of row i with the
factor -1/(G-1), and vice versa. The functions of this module estimate the *signal* ||grad J||^2 and
the *noise* V/P. What the norms reveal depends on how the rows of groups are split among
micro-batches. tests/estimators/test_micro_batch_norms.py checks the three splits by enumeration.

1. Each micro-batch contains whole groups. Micro-batches are then independent, so the expectation of
   the products K^2 <g_j, g_k> is ||grad J||^2, and the rest of ||A_K||^2 is V/P. Both estimates are
   unbiased.

2. The rows of a group are spread at random over micro-batches. Two rows of different micro-batches
   belong to the same group with probability (G-1)/(n-1). The mean of the products therefore has the
   bias

       (G-1)/(n-1) { C1 + E||g_x||^2 / (G-1)^2 }

   and the estimate of V/P is too small by the same amount. The noise that the random choice of
   prompts causes, G C1 / n, is nearly invisible. The bias cannot be removed without another
   estimate of C1. Both errors make the noise scale n V / (P ||grad J||^2) too small, so it is a
   lower bound.

3. The rows of a group are split over consecutive micro-batches. A block is a sequence of h
   micro-batches that together contain whole groups. Products between micro-batches of different
   blocks have the same expectation as in split 1. Products inside a block estimate
   E||g_x||^2 (1 + 1/(G-1)^2) and therefore C1. Since n V/P = G C1 + C2 + C3/(G-1), the sum
   F = C2 + C3/(G-1) is known too, but not C2 and C3. Because C2 >= 0 and C3 >= 2 E||g_x||^2, C3 is
   between 2 E||g_x||^2 and (G-1) F. This also bounds G* = 1 + sqrt(C3/C1).

**Norms of single micro-batches.** If ranks add their gradients during the backward pass, only
||A_k||^2 can be measured; ||g_k||^2 would need a copy of the gradient. The estimates are then
fitted to the increments d_k = ||A_k||^2 - ||A_{k-1}||^2. For split 1, the expectation of d_k is
E||g||^2 + 2 (k-1) <g_j, g_k>. If noise dominates, increments are uncorrelated and their variance is
proportional to 2k - 1. A least-squares fit with these weights is then the best linear fit, and its
sum of signal and noise is ||A_K||^2. If ||g_k||^2 is known, only <g_k, A_{k-1}> is fitted, whose
variance is proportional to k - 1. For split 1, the result is the mean of all products. The variance
of the signal is then smaller than without ||g_k||^2, by a factor of 2 at K = 2 and 1.5 at K = 32.

**Unequal micro-batches.** Let c be the coefficient of variation of the micro-batches' shares in the
loss. If ||g_k||^2 is known, the expected signal is multiplied by 1 - c^2/(K-1), and the sum of
signal and noise is unbiased. The same holds for the fit to increments if the shares have no trend
in k. With a trend, this fit confuses signal and noise. For example, if the last of 8 micro-batches
is half as large as the others, the noise is 10 % too large, and the signal is too small by 10 % of
the noise.
"""

from __future__ import annotations

from functools import cache
from typing import NamedTuple

import numpy as np

from grpo_ustat.estimators.scaling import ScalingLaw
from grpo_ustat.records import Array


class Layout(NamedTuple):
    """Split of the groups among the micro-batches of a step; see the module's docstring."""

    # Number of micro-batches, K.
    micro_batches: int
    # Number h of consecutive micro-batches that form a block, so that each block contains whole
    # groups; 1 if each micro-batch contains whole groups.
    per_block: int = 1

    @property
    def is_measurable(self) -> bool:
        """True if there are at least two blocks, all of the same size."""
        blocks, rest = divmod(self.micro_batches, self.per_block)
        return blocks >= 2 and rest == 0


@cache
def norm_weights(layout: Layout, own_norms: bool) -> Array:
    """Return the weights with which squared norms are summed to signal, noise and inside product.

    Args:
        layout: split of the groups among micro-batches.
        own_norms: True if the squared norms of single micro-batches are known.

    Returns:
        Weights [3, 2K] of ||A_1||^2 ... ||A_K||^2, ||g_1||^2 ... ||g_K||^2. The three rows give

        - signal: the squared length of the expected gradient, estimated by K^2 <g_j, g_k> for
          micro-batches j and k of different blocks
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
    """Return the matrix that maps K observations to J weighted least-squares coefficients.

    The coefficient of a column of zeros is 0.
    """
    roots_K1: Array = np.sqrt(weights_K)[:, None]
    return np.asarray(np.linalg.pinv(roots_K1 * design_KJ) * roots_K1.T, float)


def signal_and_noise_of_ranks(
    sq_norm_S: Array, own_sum_S: Array, ranks: int, parts_S: Array
) -> tuple[Array, Array]:
    """Return signal and noise of S steps from gradient norms of data-parallel ranks.

    The ranks average their gradients. The averaged gradient is therefore the sum of the micro-batch
    gradients of all ranks, divided by the number of ranks. One micro-batch per rank suffices.

    Args:
        sq_norm_S: squared norm of the averaged gradient at each step.
        own_sum_S: sum of the squared norms of the micro-batch gradients of all ranks.
        ranks: number of ranks.
        parts_S: number of micro-batches of all ranks together at each step, at least 2.

    >>> signal_S, noise_S = signal_and_noise_of_ranks(
    ...     np.array([5.0]), np.array([12.0]), ranks=2, parts_S=np.array([2])
    ... )
    >>> signal_S.tolist(), noise_S.tolist()
    ([4.0], [1.0])
    """
    signal_S = (sq_norm_S - own_sum_S / ranks**2) * parts_S / (parts_S - 1)
    return signal_S, sq_norm_S - signal_S


def law_of_norms(signal_S: Array, noise_S: Array, rollouts: float, group_size: int) -> ScalingLaw:
    """Return a scaling law that is valid only for the noise scale at this group size.

    If micro-batches contain whole groups, their norms do not separate C1, C2 and C3. They give only
    the sum n V/P = G C1 + C2 + C3/(G-1). The result contains this sum as C2, with C1 = C3 = 0.

    Args:
        signal_S, noise_S: signal and noise at each of S >= 2 steps.
        rollouts, group_size: number of rollouts per step, n, and group size, G.
    """
    zeros_S = np.zeros_like(signal_S)
    values_4S = np.stack([zeros_S, rollouts * noise_S, zeros_S, signal_S])
    return ScalingLaw.of_steps(values_4S, rollouts / group_size)


def law_of_blocks(
    values_3S: Array, rollouts: float, group_size: int, groups_at_once: int
) -> ScalingLaw:
    """Return a scaling law from micro-batches that contain parts of groups.

    The norms do not separate C2 and C3. The result contains the sum C2 + C3/(G-1) as C2, with
    C3 = 0; C1 and ||grad J||^2 are valid.

    Args:
        values_3S: signal, noise and inside product (see `norm_weights`) at each of S >= 2 steps.
        rollouts, group_size: number of rollouts per step, n, and group size, G.
        groups_at_once: number of groups that have rows in one micro-batch. It is the number of
            data-parallel ranks whose gradients are added.
    """
    signal_S, noise_S, inside_S = values_3S
    same_group_S = groups_at_once * inside_S - (groups_at_once - 1) * signal_S
    c1_S = same_group_S / (1 + 1 / (group_size - 1) ** 2) - signal_S
    rest_S = rollouts * noise_S - group_size * c1_S
    values_4S = np.stack([c1_S, rest_S, np.zeros_like(c1_S), signal_S])
    return ScalingLaw.of_steps(values_4S, rollouts / group_size)
