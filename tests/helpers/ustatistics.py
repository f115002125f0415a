r"""The U-statistic behind GRPO (paper, Lemma 1), pair by pair, and its Hoeffding decomposition.

For one prompt with scores s_i (vectors) and rewards z_i, kernel `h(w, w') = (s - s')(z - z') / 2`:

    1/G sum_i s_i (z_i - zbar_{-i})  =  2 / (G (G-1)) sum_{i<j} h(w_i, w_j)
                                     =  g + linear + degenerate

with `linear` the mean of `s_i (z_i - V) - g` and `degenerate` the mean over pairs of
`-[ s_i (z_j - V) + s_j (z_i - V) ] / 2`.
"""

from __future__ import annotations

import numpy as np

from grpo_ustat.records import Array


def estimate(scores_GD: Array, advantages_G: Array) -> Array:
    """`1/G sum_i s_i A_i`, shape [D]: the gradient estimate of one prompt's group."""
    return advantages_G @ scores_GD / len(advantages_G)


def pairwise(scores_GD: Array, rewards_G: Array) -> Array:
    """The average of the kernel over all pairs, shape [D]; equals leave-one-out exactly."""
    i, j = np.triu_indices(len(rewards_G), k=1)
    kernel = (scores_GD[i] - scores_GD[j]) * (rewards_G[i] - rewards_G[j])[:, None] / 2
    return kernel.mean(axis=0)


def hoeffding(
    scores_GD: Array, rewards_G: Array, value: float, gradient_D: Array
) -> tuple[Array, Array, Array]:
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
