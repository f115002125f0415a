"""Rules that read the rewards of the completion's own group, and of no other."""

from __future__ import annotations

import numpy as np

from grpo_ustat.estimators.baselines.base import centre, quotient, require
from grpo_ustat.records import Array, BaselineContext


def leave_one_out(rewards_PG: Array, context: BaselineContext) -> Array:
    """The paper's GRPO (Lemma 1), RLOO (Kool et al. 2019): `A_i = r_i - sum_{j != i} r_j / (G-1)`.

    Unbiased: the baseline of completion i is independent of its score, which has mean zero.

    >>> leave_one_out(np.array([[1.0, 0.0, 0.0]]), BaselineContext()).tolist()
    [[1.0, -0.5, -0.5]]
    """
    group_size = rewards_PG.shape[-1]
    others = rewards_PG.sum(axis=-1, keepdims=True) - rewards_PG
    return rewards_PG - others / (group_size - 1)


def group_mean(rewards_PG: Array, context: BaselineContext) -> Array:
    """Dr. GRPO (Zichen Liu et al. 2025, arXiv 2503.20783): `A_i = r_i - rbar`, own group's mean.

    Biased by shrinking: it is (G-1)/G times leave_one_out on every sample, so its direction is
    right and its length short; it can beat unbiased rules on raw MSE for that reason alone.

    >>> group_mean(np.array([[1.0, 0.0, 0.0, 0.0]]), BaselineContext()).tolist()
    [[0.75, -0.25, -0.25, -0.25]]
    """
    return rewards_PG - np.mean(rewards_PG, axis=-1, keepdims=True)


def group_std(rewards_PG: Array, context: BaselineContext, *, epsilon: float) -> Array:
    """GRPO (Shao et al. 2024): `A_i = (r_i - rbar) / (std + epsilon)`, std with divisor G-1.

    Biased: for large groups its mean goes to g(x) / sigma(x) for each prompt, which for 0/1 rewards
    is the gradient of E[2 arcsin sqrt V]. TRL has epsilon 1e-4, verl 1e-6, OpenRLHF 1e-9; these
    divide by the std with divisor G-1, GRPO-Zero by that with divisor G.

    >>> group_std(np.array([[2.0, 0.0, 1.0]]), BaselineContext(), epsilon=1.0).tolist()
    [[0.5, -0.5, 0.0]]
    """
    centred_PG = centre(rewards_PG)
    return quotient(centred_PG, centred_PG.std(axis=1, ddof=1, keepdims=True) + epsilon)


def maxrl(rewards_PG: Array, context: BaselineContext, *, epsilon: float) -> Array:
    """MaxRL (arXiv 2602.02710): `A_i = (r_i - rbar) / (rbar + epsilon)`, 0 where every reward is 0.

    Biased: for large groups its mean goes to g(x) / V(x), the gradient of E[log V]. For 0/1 rewards
    and epsilon = 0 its mean is exactly `(1 - (1-V)^(G-1)) / V` times g(x), the gradient of log V
    cut after G - 1 terms.

    Raises:
        ValueError: a reward is negative, so that rbar could be 0 or change the sign.

    >>> maxrl(np.array([[1.0, 0.0], [0.0, 0.0]]), BaselineContext(), epsilon=0.0).tolist()
    [[1.0, -1.0], [0.0, 0.0]]
    """
    if rewards_PG.min() < 0:
        raise ValueError(
            f"baseline maxrl divides by the mean reward and needs rewards of at least 0, got "
            f"{rewards_PG.min()}: shift the rewards"
        )
    return quotient(centre(rewards_PG), rewards_PG.mean(axis=1, keepdims=True) + epsilon)


def opo(rewards_PG: Array, context: BaselineContext) -> Array:
    """OPO without the completion itself: `A_i = r_i - sum_{j!=i} L_j r_j / sum_{j!=i} L_j`.

    Lengths L stand in for squared score norms in the optimal baseline (Hao et al. 2025). Unbiased:
    rewards and lengths of the others are independent of completion i.

    >>> lengths = np.array([[1, 1, 3]])
    >>> opo(np.array([[1.0, 0.0, 1.0]]), BaselineContext(lengths_PG=lengths)).tolist()
    [[0.25, -1.0, 0.5]]
    """
    lengths_PG = require(context.lengths_PG, "lengths_PG", "opo")
    weighted_PG = lengths_PG * rewards_PG
    others_PG = weighted_PG.sum(axis=1, keepdims=True) - weighted_PG
    return rewards_PG - others_PG / (lengths_PG.sum(axis=1, keepdims=True) - lengths_PG)


def opo_self(rewards_PG: Array, context: BaselineContext) -> Array:
    """OPO as it is shipped (Hao et al. 2025, verl): `A_i = r_i - sum_j L_j r_j / sum_j L_j`.

    Biased, in direction too: the baseline holds the completion's own reward and length.

    >>> lengths = np.array([[1, 1, 2]])
    >>> opo_self(np.array([[1.0, 0.0, 1.0]]), BaselineContext(lengths_PG=lengths)).tolist()
    [[0.25, -0.75, 0.25]]
    """
    lengths_PG = require(context.lengths_PG, "lengths_PG", "opo_self")
    mean_P1 = (lengths_PG * rewards_PG).sum(axis=1, keepdims=True)
    return rewards_PG - mean_P1 / lengths_PG.sum(axis=1, keepdims=True)
