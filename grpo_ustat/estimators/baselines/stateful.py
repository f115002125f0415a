"""Baselines that are learned from past batches, and the updates of their memory.

`train.baseline_state` keeps the memory between batches; this module contains the arithmetic. For
`running_mean` and `critic`, the memory is read before the current batch is added to it. The
value b that is subtracted is then independent of the batch's completions. If the memory were
updated first, it would not be independent, and the estimate would be biased. "Unbiased given the
past" means that the expectation, conditional on past batches, is the gradient.
"""

from __future__ import annotations

import numpy as np

from grpo_ustat.estimators.baselines.base import quotient, require
from grpo_ustat.estimators.baselines.registry import baseline
from grpo_ustat.records import Array, BaselineContext


@baseline(
    "Reward minus a moving average over past batches, from 0. Unbiased given the past.",
    unbiased=True, min_group_size=1, prompt_only=True, needs={"running"}, memory={"decay": 0.95},
)  # fmt: skip
def running_mean(rewards_PG: Array, context: BaselineContext) -> Array:
    """Subtract the moving average of past rewards (Williams 1992; prime-rl's rae): `A_i = r_i - b`.

    The moving average b starts at 0. The estimate is unbiased given the past, because b is used
    before `running_update` adds the batch to it.

    >>> running_mean(np.array([[1.0, 0.0]]), BaselineContext(running=0.25)).tolist()
    [[0.75, -0.25]]
    """
    return rewards_PG - require(context.running, "running", "running_mean")


def running_update(running: float, rewards_PG: Array, decay: float) -> float:
    """Update the moving average: `b <- decay b + (1 - decay) mean reward`.

    >>> running_update(0.5, np.array([[1.0, 1.0]]), decay=0.75)
    0.625
    """
    return decay * running + (1 - decay) * float(rewards_PG.mean())


@baseline(
    "Reward minus a linear value head of past batches, discounted by decay; training only. "
    "Unbiased.",
    unbiased=True, min_group_size=1, prompt_only=True, needs={"critic_P"},
    memory={"decay": 0.9, "ridge": 1.0},
)  # fmt: skip
def critic(rewards_PG: Array, context: BaselineContext) -> Array:
    """Subtract a learned value (A2C, Mnih et al. 2016): `A_i = r_i - v(x)`.

    The value v(x) predicts the expected reward of prompt x. The estimate is unbiased given the
    past, because v is fitted only on past batches and depends only on the prompt.

    >>> critic(np.array([[1.0, 0.0]]), BaselineContext(critic_P=np.array([0.75]))).tolist()
    [[0.25, -0.75]]
    """
    return rewards_PG - require(context.critic_P, "critic_P", "critic")[:, None]


@baseline(
    "EBPO: reward minus the group mean shrunken towards the mean of all past rewards, then "
    "whitened over the batch (arXiv 2602.05165). Biased.",
    unbiased=False, min_group_size=2, couples_prompts=True, needs={"history"},
    target="multiple_of_g",
)  # fmt: skip
def ebpo(rewards_PG: Array, context: BaselineContext, *, epsilon: float = 1e-8) -> Array:
    """Subtract the group mean shrunken towards the policy's mean, then whiten the batch: EBPO.

    The source is Han et al. 2026, arXiv 2602.05165v1, algorithm 1. The baseline shrinks the group
    mean rbar towards mu, the mean of all rewards so far: `b(x) = (1 - S) rbar + S mu`. The
    advantages A are then whitened over the batch, `(A - mean) / (std + epsilon)`. S is the amount
    of shrinkage:

        S = (sigma^2 / G) / (sigma^2 / G + tau^2)
        sigma^2 = variance of all rewards so far
        tau^2 = variance of all groups' means so far

    All three statistics, mu, sigma^2 and tau^2, include the current batch. All groups have the same
    S, so **mu cancels** when the batch mean is subtracted. The result before the division is
    `r_i - (1 - S) rbar - S (mean of the batch)`, in which only S depends on the past. Groups with
    equal rewards have nonzero advantages, because the batch mean is subtracted.

    The estimate is biased because rbar, S, the batch mean and the std depend on the completion's
    reward. For a given S, the expectation of the estimate before the division by the std has the
    right direction, and its length is too small by the fraction `(1 - S)/G + S/(P G)`. The paper
    specifies neither the divisors nor epsilon. Here the divisor of sigma^2 and tau^2 is the number
    of values, and the std has divisor P G - 1.

    >>> nothing = BaselineContext(history=np.zeros((2, 3)))  # sigma^2 = 3/16, tau^2 = 1/16
    >>> ebpo(np.array([[1.0, 0.0], [0.0, 0.0]]), nothing, epsilon=0.0).round(3).tolist()  # S = 3/5
    [[1.466, -0.789], [-0.338, -0.338]]
    """
    history_23 = add_to_history(require(context.history, "history", "ebpo"), rewards_PG)
    sigma_sq, tau_sq = history_23[:, 2] / history_23[:, 0]
    noise = sigma_sq / rewards_PG.shape[1]
    shrink = noise / (noise + tau_sq) if noise else 0.0
    shifted_PG = rewards_PG - rewards_PG[0, 0]
    raw_PG = shifted_PG - (1 - shrink) * shifted_PG.mean(axis=1, keepdims=True)
    deviation_PG = raw_PG - raw_PG.mean()
    return quotient(deviation_PG, deviation_PG.std(ddof=1) + epsilon)


def add_to_history(history_23: Array, rewards_PG: Array) -> Array:
    """Return `BaselineContext.history` with a batch added.

    The counts, means and sums of squared deviations are combined by the parallel Welford update
    (Chan et al. 1983).

    >>> add_to_history(np.zeros((2, 3)), np.array([[1.0, 0.0], [0.0, 0.0]])).tolist()
    [[4.0, 0.25, 0.75], [2.0, 0.25, 0.125]]
    """
    result = history_23.copy()
    for row_3, values in zip(result, (rewards_PG, rewards_PG.mean(axis=1)), strict=True):
        count, mean, squares = row_3
        total, step = count + values.size, values.mean() - mean
        row_3[:] = (
            total,
            mean + step * values.size / total,
            squares
            + np.square(values - values.mean()).sum()
            + step**2 * count * values.size / total,
        )
    return result
