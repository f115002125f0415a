"""Baselines that read the rewards of the whole batch of prompts.

In the formulas, A_i is the advantage of completion i, r_i its reward and L_i its length. The mean
reward of its group is rbar.
"""

from __future__ import annotations

import math

import numpy as np

from grpo_ustat.estimators.baselines.base import UnfitRewards, quotient, require
from grpo_ustat.estimators.baselines.group import group_std
from grpo_ustat.estimators.baselines.registry import baseline
from grpo_ustat.estimators.moments import centred
from grpo_ustat.records import Array, BaselineContext, Integers

# `beta` fits a Beta distribution only if the variance of the group means is at least this value.
NO_SPREAD = 1e-12


@baseline(
    "(reward - group mean) / (std of all rewards of the batch + epsilon). Biased.",
    unbiased=False, min_group_size=2, couples_prompts=True, target="multiple_of_g",
)  # fmt: skip
def batch_std(rewards_PG: Array, context: BaselineContext, *, epsilon: float = 1e-4) -> Array:
    """Divide by the std of the batch (Lite PPO, Zihe Liu et al. 2025, arXiv 2508.08221).

    The advantage is `A_i = (r_i - rbar) / (std of the batch + epsilon)`, where rbar is the group
    mean and the std has divisor P G - 1. TRL offers this scale as an option.

    The estimate is biased because the std depends on the same rewards as the numerator. The std is
    the same for all prompts, so the direction is almost right: its bias is O(1/(P G)).

    >>> batch_std(np.array([[1.0, 0.0], [0.0, 0.0]]), BaselineContext(), epsilon=0.5).tolist()
    [[0.5, -0.5], [0.0, 0.0]]
    """
    return quotient(centred(rewards_PG), (rewards_PG - rewards_PG[0, 0]).std(ddof=1) + epsilon)


@baseline(
    "REINFORCE++: (reward - mean) / sqrt(variance + epsilon) over the batch's tokens. Biased.",
    unbiased=False, min_group_size=1, couples_prompts=True, needs={"lengths_PG"},
    target="multiple_of_g",
)  # fmt: skip
def reinforce_pp(rewards_PG: Array, context: BaselineContext, *, epsilon: float = 1e-8) -> Array:
    """Whiten `r_i - batch mean` over all tokens of the batch: REINFORCE++ (Hu 2025).

    Whitening means to subtract the mean over tokens and to divide by the std over tokens; see
    `_whiten`. The batch mean cancels, so the code does not compute it. The estimate is biased
    because the mean and the std over tokens depend on the completion's own reward and length.

    >>> context = BaselineContext(lengths_PG=np.array([[3, 1]]))
    >>> reinforce_pp(np.array([[1.0, 0.0]]), context, epsilon=0.0).tolist()
    [[0.5, -1.5]]
    """
    lengths_PG = require(context.lengths_PG, "lengths_PG", "reinforce_pp")
    return _whiten(rewards_PG - rewards_PG[0, 0], lengths_PG, epsilon)


@baseline(
    "Reward minus group mean, then whitened over the batch's tokens as in reinforce_pp. Biased.",
    unbiased=False, min_group_size=2, couples_prompts=True, needs={"lengths_PG"},
    target="multiple_of_g",
)  # fmt: skip
def reinforce_pp_baseline(
    rewards_PG: Array, context: BaselineContext, *, epsilon: float = 1e-8
) -> Array:
    """Whiten `r_i - rbar` over all tokens of the batch: REINFORCE++-baseline (Hu 2025).

    The estimate is biased for the reasons given in `reinforce_pp` and `group_mean`.

    >>> context = BaselineContext(lengths_PG=np.array([[3, 1]]))
    >>> reinforce_pp_baseline(np.array([[1.0, 0.0]]), context, epsilon=0.0).tolist()
    [[0.5, -1.5]]
    """
    lengths_PG = require(context.lengths_PG, "lengths_PG", "reinforce_pp_baseline")
    return _whiten(centred(rewards_PG), lengths_PG, epsilon)


def _whiten(values_PG: Array, lengths_PG: Integers, epsilon: float) -> Array:
    """Subtract the mean over tokens, then divide by sqrt(variance over tokens + epsilon).

    Each value counts once per token of its completion. The variance is divided by the number of
    tokens minus 1. Epsilon is added under the root, as in verl's masked_whiten (epsilon 1e-8).
    """
    tokens = lengths_PG.sum()
    deviation_PG = values_PG - (lengths_PG * values_PG).sum() / tokens
    variance = (lengths_PG * deviation_PG**2).sum() / max(tokens - 1, 1)
    return quotient(deviation_PG, math.sqrt(variance + epsilon))


@baseline(
    "VL-Norm: group_std times weights length^-power, whose mean in the batch is 1. Biased.",
    unbiased=False, min_group_size=2, couples_prompts=True, needs={"lengths_PG"},
    target="weighted_by_length",
)  # fmt: skip
def length_weighted(
    rewards_PG: Array, context: BaselineContext, *, power: float = 0.75, epsilon: float = 1e-4
) -> Array:
    """Multiply `group_std` by weights L_i^-power: VL-Norm (Zhiyuan He et al. 2025).

    The source is arXiv 2509.07558. The weights are divided by their mean in the batch,
    `w_i = L_i^-power / mean of L^-power`, as in the authors' code (Delta-L-Normalization). Prompts
    with short completions therefore count more.

    With power 1 the weights minimise the variance if two conditions hold: the variance of a
    completion's gradient is proportional to its length L, and the mean of this gradient does not
    depend on L. Under these conditions the weighted mean is also unbiased. Neither condition holds
    in general. The weights then cause a bias in addition to the bias of `group_std`, because they
    depend on the completion. For large groups the mean converges to
    `E[L^-power (z - V) s] / (sigma + epsilon)` divided by the batch mean of L^-power. If all
    lengths are equal, the limit is the same as for `group_std`; otherwise it is not a multiple of
    g.

    >>> context = BaselineContext(lengths_PG=np.array([[1, 1], [2, 4]]))  # 1/L: mean 11/16
    >>> z = np.array([[1.0, 0.0], [1.0, 1.0]])
    >>> length_weighted(z, context, power=1.0, epsilon=0.0).round(4).tolist()
    [[1.0285, -1.0285], [0.0, 0.0]]
    """
    lengths_PG = require(context.lengths_PG, "lengths_PG", "length_weighted")
    weight_PG = np.asarray(lengths_PG, dtype=np.float64) ** -power
    return weight_PG / weight_PG.mean() * group_std(rewards_PG, context, epsilon=epsilon)


@baseline(
    "leave_one_out, but its baseline is shrunk towards the mean reward of the other prompts, whose "
    "rewards also determine the amount of shrinkage (arXiv 2511.03710). Unbiased.",
    unbiased=True, min_group_size=2, min_prompts=3, couples_prompts=True,
)  # fmt: skip
def james_stein(rewards_PG: Array, context: BaselineContext, *, epsilon: float = 1e-8) -> Array:
    """Shrink the leave-one-out mean towards the other prompts: James-Stein (Zeng et al. 2025).

    The source is arXiv 2511.03710v1, section 3.3. The baseline b_i of completion i of prompt x is

        b_i = (1 - lambda_x) leave-one-out mean_i + lambda_x mean of the other prompts' means
        lambda_x = (P - 1) / P * v / (v + s + epsilon)
        v = mean over other prompts of (variance of the prompt's rewards, divisor G-1) / G
        s = mean over other prompts of (prompt mean - mean of these prompt means)^2

    P is the number of prompts in the batch. The factor (P - 1)/P is from equation 15 of the paper;
    the authors' released code omits it. The paper has no epsilon; here it prevents a
    division of 0 by 0.

    The estimate is unbiased because lambda_x and the mean of the other prompts do not depend on
    the rewards of prompt x. At least three prompts are needed: with two, there is a single other
    prompt, s is 0, and v / (v + s) would be 1 for any rewards.

    >>> rewards = np.array([[1.0, 0.0], [1.0, 1.0], [0.0, 0.0]])
    >>> james_stein(rewards, BaselineContext(), epsilon=0.0)[0].tolist()
    [1.0, -1.0]
    >>> james_stein(rewards, BaselineContext(), epsilon=0.0)[1].round(4).tolist()  # lambda = 4/9
    [0.3333, 0.3333]
    """
    count, size = rewards_PG.shape
    loo_PG = (rewards_PG.sum(axis=1, keepdims=True) - rewards_PG) / (size - 1)
    mean_P, noise_P = rewards_PG.mean(axis=1), rewards_PG.var(axis=1, ddof=1) / size
    others_PQ = np.broadcast_to(mean_P, (count, count))[~np.eye(count, dtype=bool)]
    others_PQ = others_PQ.reshape(count, count - 1)
    noise_P = (noise_P.sum() - noise_P) / (count - 1)
    shrink_P = quotient(noise_P, noise_P + others_PQ.var(axis=1) + epsilon)
    shrink_P1 = (count - 1) / count * shrink_P[:, None]
    pooled_P1 = others_PQ.mean(axis=1, keepdims=True)
    return rewards_PG - (1 - shrink_P1) * loo_PG - shrink_P1 * pooled_P1


@baseline(
    "BNPO: (reward - group mean) / (fitted Beta density); rewards in [minimum, maximum]. Biased.",
    unbiased=False, min_group_size=2, couples_prompts=True, target="g_over_density",
)  # fmt: skip
def beta(
    rewards_PG: Array,
    context: BaselineContext,
    *,
    minimum: float = 0.0,
    maximum: float = 1.0,
    ceiling: float = 1e6,
) -> Array:
    """Divide by a fitted Beta density f: BNPO (Xiao et al. 2025), `A_i = (r_i - rbar) / f(rbar)`.

    Rewards are first mapped from [minimum, maximum] to [0, 1]. A distribution Beta(a, b) is fitted
    to the group means rbar by the method of moments. The density f is Beta with the parameters
    1 + a/3 and 1 + b/3, each at least 1. The weight 1/f is at most `ceiling` (1e6 in the authors'
    code). If there is only one prompt, or if the group means do not vary, f = 1. The estimate is
    biased because rbar and f depend on the completion's reward, and because prompts have different
    weights.

    Raises:
        UnfitRewards: a reward is outside [minimum, maximum].

    >>> rewards = np.array([[1.0, 0.0, 0.0, 0.0], [1.0, 1.0, 1.0, 0.0]])
    >>> options = {"minimum": 0.0, "maximum": 1.0, "ceiling": 1e6}
    >>> beta(rewards[:1], BaselineContext(), **options).tolist()
    [[0.75, -0.25, -0.25, -0.25]]
    >>> beta(rewards, BaselineContext(), **options)[0].round(4).tolist()  # Beta(7/6, 7/6): .9555
    [0.7166, -0.2389, -0.2389, -0.2389]
    """
    low, high = rewards_PG.min(), rewards_PG.max()
    if low < minimum or high > maximum:
        raise UnfitRewards(
            f"baseline beta maps rewards from [{minimum}, {maximum}], got {low} to {high}: "
            "widen its options minimum and maximum"
        )
    scaled_PG = (rewards_PG - minimum) / (maximum - minimum)
    mean_P = scaled_PG.mean(axis=1)
    variance = mean_P.var(ddof=1) if len(mean_P) > 1 else 0.0
    alpha = gamma = 1.0
    if variance >= NO_SPREAD:
        mean = mean_P.mean()
        both = mean * (1 - mean) / variance - 1
        alpha, gamma = max(1.0, 1 + both * mean / 3), max(1.0, 1 + both * (1 - mean) / 3)
    log_norm = math.lgamma(alpha) + math.lgamma(gamma) - math.lgamma(alpha + gamma)
    # If a group mean is 0 or 1, all rewards of the group are equal.
    inside_P = (mean_P > 0) & (mean_P < 1)
    p = mean_P[inside_P]
    log_inverse = log_norm - (alpha - 1) * np.log(p) - (gamma - 1) * np.log1p(-p)
    weight_P = np.zeros_like(mean_P)
    weight_P[inside_P] = np.exp(np.minimum(log_inverse, math.log(ceiling)))
    return weight_P[:, None] * centred(scaled_PG)
