"""Unbiased baselines `A_i = r_i - b(x)`, where b does not depend on the group's completions.

The expectation of a score s given the prompt x is 0. Such a b therefore does not change
E[s (r - b)], the expectation of the estimate. The errors of these baselines have closed forms.
"""

from __future__ import annotations

import numpy as np

from grpo_ustat.estimators.baselines.base import require
from grpo_ustat.estimators.baselines.registry import baseline
from grpo_ustat.records import Array, BaselineContext


@baseline(
    "REINFORCE: no baseline. Unbiased.",
    unbiased=True, min_group_size=1, prompt_only=True,
)  # fmt: skip
def none(rewards_PG: Array, context: BaselineContext) -> Array:
    """Return the rewards, `A_i = r_i`: REINFORCE (Williams 1992), called "vanilla" in the paper.

    The estimate is unbiased because E[S Z | x] is the gradient by definition.

    >>> none(np.array([[1.0, 0.0, 0.0]]), BaselineContext()).tolist()
    [[1.0, 0.0, 0.0]]
    """
    return rewards_PG.copy()


@baseline(
    "Reward minus the same number for all prompts. Unbiased.",
    unbiased=True, min_group_size=1, prompt_only=True,
)  # fmt: skip
def constant(rewards_PG: Array, context: BaselineContext, *, value: float = 0.5) -> Array:
    """Subtract the same number for all prompts (Williams 1992): `A_i = r_i - value`.

    The estimate is unbiased because the number is fixed beforehand.

    >>> constant(np.array([[1.0, 0.0]]), BaselineContext(), value=0.25).tolist()
    [[0.75, -0.25]]
    """
    return rewards_PG - value


@baseline(
    "Reward minus its mean over budget.value_completions other completions. Unbiased.",
    unbiased=True, min_group_size=1, prompt_only=True, needs={"value_P"},
)  # fmt: skip
def oracle(rewards_PG: Array, context: BaselineContext) -> Array:
    """Subtract V(x), from completions outside the group: the paper's oracle, `A_i = r_i - V(x)`.

    V(x) is the expected reward of the prompt. The estimate is unbiased even if V is itself
    estimated, as long as V is independent of the group. An estimate of V from K completions
    increases the variance: it adds `M_0 sigma^2 / K` to A_V = E[q (Z - V)^2], where q is the
    squared score norm, M_0 = E[q] and Z is the reward.

    >>> oracle(np.array([[1.0, 0.0]]), BaselineContext(value_P=np.array([0.25]))).tolist()
    [[0.75, -0.25]]
    """
    return rewards_PG - require(context.value_P, "value_P", "oracle")[:, None]


@baseline(
    "oracle with the mean weighted by squared score norms, E[q Z]/E[q]. Unbiased.",
    unbiased=True, min_group_size=1, prompt_only=True, needs={"optimal_P"},
)  # fmt: skip
def optimal(rewards_PG: Array, context: BaselineContext) -> Array:
    """Subtract the prompt-only baseline with the smallest variance.

    The sources are Greensmith et al. 2004 and Hao et al. 2025. The advantage is `A_i = r_i - b*(x)`
    with `b* = E[q Z | x] / E[q | x]`, where q is the squared score norm and Z the reward. The
    estimate is unbiased because b* is estimated from completions outside the group.

    >>> optimal(np.array([[1.0, 0.0]]), BaselineContext(optimal_P=np.array([0.625]))).tolist()
    [[0.375, -0.625]]
    """
    return rewards_PG - require(context.optimal_P, "optimal_P", "optimal")[:, None]


def best_constant(q_PK: Array, rewards_PK: Array) -> Array:
    """Estimate the baseline b*(x) of `optimal`: sum q z / sum q, [P], or 0 if every q is 0.

    The K completions of each prompt must be outside the group.

    >>> norms = np.array([[3.0, 1.0], [0.0, 0.0]])
    >>> best_constant(norms, np.array([[1.0, 0.0], [1.0, 1.0]])).tolist()
    [0.75, 0.0]
    """
    total_P = q_PK.sum(axis=1)
    weighted_P = (q_PK * rewards_PK).sum(axis=1)
    return np.divide(weighted_P, total_P, out=np.zeros_like(total_P), where=total_P > 0)


@baseline(
    "ReMax: reward minus the reward of a greedy completion of the prompt. Unbiased.",
    unbiased=True, min_group_size=1, prompt_only=True, needs={"greedy_P"},
)  # fmt: skip
def remax(rewards_PG: Array, context: BaselineContext) -> Array:
    """Subtract the greedy completion's reward: `A_i = r_i - r(greedy completion of x)`.

    This is ReMax (Li et al. 2023). The estimate is unbiased because the greedy completion depends
    only on the prompt and the policy.

    >>> remax(np.array([[1.0, 0.0]]), BaselineContext(greedy_P=np.array([1.0]))).tolist()
    [[0.0, -1.0]]
    """
    return rewards_PG - require(context.greedy_P, "greedy_P", "remax")[:, None]
