r"""The U-statistic behind GRPO (paper, Lemma 1) and its Hoeffding decomposition.

For one prompt with scores s_i (vectors) and rewards z_i, kernel `h(w, w') = (s - s')(z - z') / 2`:

    1/G sum_i s_i (z_i - zbar_{-i})  =  2 / (G (G-1)) sum_{i<j} h(w_i, w_j)
                                     =  g + linear + degenerate

with `linear` the mean of `s_i (z_i - V) - g` and `degenerate` the mean over pairs of
`-[ s_i (z_j - V) + s_j (z_i - V) ] / 2`.
"""

from __future__ import annotations

import math

import numpy as np


def estimate(scores_GD: np.ndarray, advantages_G: np.ndarray) -> np.ndarray:
    """`1/G sum_i s_i A_i`, shape [D]: the gradient estimate of one prompt's group."""
    return advantages_G @ scores_GD / len(advantages_G)


def pairwise(scores_GD: np.ndarray, rewards_G: np.ndarray) -> np.ndarray:
    """The average of the kernel over all pairs, shape [D]; equals leave-one-out exactly.

    >>> pairwise(np.array([[1.0], [-1.0]]), np.array([1.0, 0.0])).tolist()
    [1.0]
    """
    i, j = np.triu_indices(len(rewards_G), k=1)
    kernel = (scores_GD[i] - scores_GD[j]) * (rewards_G[i] - rewards_G[j])[:, None] / 2
    return kernel.mean(axis=0)


def hoeffding(
    scores_GD: np.ndarray, rewards_G: np.ndarray, value: float, gradient_D: np.ndarray
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """The three components (mean, linear, degenerate) of the leave-one-out estimate, each [D].

    Args:
        scores_GD: scores of the group.
        rewards_G: rewards of the group.
        value: the true V(x).
        gradient_D: the true gradient g(x).
    """
    centred_G = rewards_G - value
    linear = estimate(scores_GD, centred_G) - gradient_D
    i, j = np.triu_indices(len(rewards_G), k=1)
    second = -(scores_GD[i] * centred_G[j, None] + scores_GD[j] * centred_G[i, None]) / 2
    return gradient_D, linear, second.mean(axis=0)


def silent_share(rewards_PN: np.ndarray, group_size: int) -> np.ndarray:
    """Probability that a group's rewards are all equal, so that it says nothing, per prompt [P].

    Unbiased: the share of all groups of G of the N completions, sum_c C(n_c, G) / C(N, G) over the
    counts n_c of equal rewards.

    >>> silent_share(np.array([[1.0, 1.0, 1.0, 0.0]]), 2).tolist()
    [0.5]
    """
    whole = math.comb(rewards_PN.shape[1], group_size)
    counts = [np.unique(row, return_counts=True)[1] for row in rewards_PN]
    return np.array([sum(math.comb(c, group_size) for c in row.tolist()) / whole for row in counts])
