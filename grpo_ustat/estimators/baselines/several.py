"""Advantages of completions that are scored by several reward functions.

There are two ways. The rewards of a completion are added, and any baseline normalises the sum
(`weighted_sum`). Or each function's rewards are normalised before they are added (`gdpo`). In array
shapes, F is the number of reward functions.
"""

from __future__ import annotations

import numpy as np

from grpo_ustat.estimators.baselines.base import quotient, require
from grpo_ustat.estimators.baselines.group import group_std
from grpo_ustat.estimators.baselines.registry import baseline
from grpo_ustat.records import Array, BaselineContext


def weighted_sum(rewards_PGF: Array, weights_F: Array) -> Array:
    """Compute the weighted sum of each completion's rewards, `sum_f w_f r_f`, [P, G].

    The functions are added one after the other, in a fixed order. A matrix product could round the
    sums of two completions with equal rewards differently. Here such sums are exactly equal, on
    any number of ranks.

    >>> weighted_sum(np.array([[[1.0, 0.5], [0.0, 1.0]]]), np.array([1.0, 0.2])).tolist()
    [[1.1, 0.2]]
    """
    total_PG = weights_F[0] * rewards_PGF[..., 0]
    for place in range(1, len(weights_F)):
        total_PG = total_PG + weights_F[place] * rewards_PGF[..., place]
    return total_PG


def normalise_then_sum(rewards_PGF: Array, weights_F: Array, *, epsilon: float) -> Array:
    """Normalise each function's rewards, then add them: GDPO, TRL's `normalize_then_sum`, [P, G].

    The source is Shih-Yang Liu et al. 2026, arXiv 2601.05242. `group_std` is applied to each
    function's rewards separately. The weighted sum of the results is divided by its own std over
    the batch (divisor P G - 1) plus epsilon. TRL also subtracts the batch mean, which is 0 up to
    rounding. This function does not subtract it, so a group with zero variance under every function
    has advantages of exactly 0. A function with zero variance in a group adds 0 to the advantages
    of this group and does not affect the other functions. The estimate is biased for the same
    reason as with `group_std`: with many completions its mean converges to the mean over prompts of
    sum_f w_f g_f/sigma_f, times a factor that is the same for the whole batch.

    Args:
        rewards_PGF: rewards from each of the F reward functions, float64.
        weights_F: weight w_f of each function in the sum.
        epsilon: number added to every std (TRL: 1e-4).

    >>> z = np.array([[[1.0, 0.0], [0.0, 5.0], [0.0, 0.0]]])  # the second function's scale is 5
    >>> normalise_then_sum(z, np.ones(2), epsilon=0.0).round(3).tolist()
    [[0.577, 0.577, -1.155]]
    """
    normalised_PGF = np.stack(
        [
            group_std(rewards_PG, BaselineContext(), epsilon=epsilon)
            for rewards_PG in np.moveaxis(rewards_PGF, -1, 0)
        ],
        axis=-1,
    )
    total_PG = weighted_sum(normalised_PGF, weights_F)
    return quotient(total_PG, total_PG.std(ddof=1) + epsilon)


@baseline(
    "GDPO: each reward function divided by its own std in the group; their weighted sum divided "
    "by its std in the batch: TRL's multi_objective_aggregation=normalize_then_sum. Needs at "
    "least two reward_funcs. Biased.",
    unbiased=False, min_group_size=2, couples_prompts=True,
    needs={"reward_weights_F", "rewards_PGF"}, target="sum_g_over_sigma",
)  # fmt: skip
def gdpo(rewards_PG: Array, context: BaselineContext, *, epsilon: float = 1e-4) -> Array:
    """Apply `normalise_then_sum` to the rewards of each function; `rewards_PG` is not used.

    >>> z = np.array([[[1.0, 0.0], [0.0, 5.0], [0.0, 0.0]]])
    >>> context = BaselineContext(rewards_PGF=z, reward_weights_F=np.ones(2))
    >>> gdpo(z.sum(axis=-1), context, epsilon=0.0).round(3).tolist()
    [[0.577, 0.577, -1.155]]
    """
    rewards_PGF = require(context.rewards_PGF, "rewards_PGF", "gdpo")
    weights_F = require(context.reward_weights_F, "reward_weights_F", "gdpo")
    return normalise_then_sum(rewards_PGF, weights_F, epsilon=epsilon)
