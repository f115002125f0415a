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
the *noise* V/P. tests/estimators/test_micro_batch_norms.py checks both cases by enumeration.

1. Each micro-batch contains whole groups. If W_k is the share of the step's rows in the first k
   micro-batches, then

       E||A_k||^2 = W_k^2 ||grad J||^2 + W_k V/P

   Norms at two shares therefore determine signal and noise, and both estimates are unbiased.

2. The rows of a group are spread at random over micro-batches. Two rows of different micro-batches
   belong to the same group with probability (G-1)/(n-1). The estimate of the signal then has the
   bias

       (G-1)/(n-1) { C1 + E||g_x||^2 / (G-1)^2 }

   and the estimate of V/P is too small by the same amount. The noise that the random choice of
   prompts causes, G C1 / n, is nearly invisible. The bias cannot be removed without another
   estimate of C1. Both errors make the noise scale n V / (P ||grad J||^2) too small, so it is a
   lower bound. The same holds if each micro-batch contains a part of one group.

**Fit.** The estimates are fitted to the increments d_k = ||A_k||^2 - ||A_{k-1}||^2. If noise
dominates, increments are uncorrelated and their variance is proportional to W_k^2 - W_{k-1}^2. A
least-squares fit with these weights is then the best linear fit, and its sum of signal and noise is
||A_K||^2. If ||g_k||^2 were known too, which takes a copy of the gradient, the variance of the
signal would be smaller by a factor of 1.5 at K = 2 or 32, and of 1.7 at K = 8.
"""

from __future__ import annotations

import numpy as np

from grpo_ustat.estimators.scaling import ScalingLaw
from grpo_ustat.records import Array


def signal_of_increments(sq_norms_K: Array, shares_K: Array) -> float:
    """Return the signal from the squared norms of the gradient after each micro-batch.

    Args:
        sq_norms_K: ||A_1||^2 ... ||A_K||^2, with K >= 2.
        shares_K: share of the step's rows in each micro-batch; the sum is 1.

    >>> signal, noise = 3.0, 2.0
    >>> norms = np.array([signal / 4 + noise / 2, signal + noise])
    >>> round(signal_of_increments(norms, np.array([0.5, 0.5])), 9)
    3.0
    """
    squares_K: Array = np.square(np.cumsum(shares_K))
    growth_K: Array = np.diff(squares_K, prepend=0.0)
    increments_K: Array = np.diff(sq_norms_K, prepend=0.0)
    roots_K: Array = 1 / np.sqrt(growth_K)
    design_K2: Array = np.stack([growth_K, shares_K], axis=1) * roots_K[:, None]
    return float(np.linalg.lstsq(design_K2, increments_K * roots_K, rcond=None)[0][0])


def signal_of_ranks(sq_norm: float, sq_norms_R: Array, share: float) -> float:
    """Return the signal from the averaged gradient and from the gradients before it.

    Args:
        sq_norm: squared norm of the gradient that R ranks have averaged at the end of the step.
        sq_norms_R: squared norm of each rank's gradient before its last micro-batch.
        share: share of a rank's rows in that gradient, below 1.

    >>> noise, signal = 2.0, 3.0  # of one rank's rows
    >>> before = 0.5**2 * signal + 0.5 * noise
    >>> signal_of_ranks(signal + noise / 2, np.array([before, before]), 0.5)
    3.0
    """
    ranks = len(sq_norms_R)
    return float((sq_norm - sq_norms_R.mean() / (ranks * share)) / (1 - share / ranks))


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
