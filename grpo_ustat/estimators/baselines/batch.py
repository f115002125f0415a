"""Rules that read the rewards of the whole batch of prompts."""

from __future__ import annotations

import math

import numpy as np

from grpo_ustat.estimators.baselines.base import centred, divided, field
from grpo_ustat.records import BaselineContext

NO_SPREAD = 1e-12  # variance of group means in [0, 1] below which no Beta distribution is fitted


def batch_std(rewards_PG: np.ndarray, context: BaselineContext, *, epsilon: float) -> np.ndarray:
    """Batch scaling (Liu et al. 2025, TRL): `A_i = (r_i - rbar) / (std of the batch + epsilon)`.

    Biased by a scale common to all prompts that depends on the rewards at hand; in direction by
    O(1/(P G)). The std has divisor P G - 1.

    >>> batch_std(np.array([[1.0, 0.0], [0.0, 0.0]]), BaselineContext(), epsilon=0.5).tolist()
    [[0.5, -0.5], [0.0, 0.0]]
    """
    return divided(centred(rewards_PG), (rewards_PG - rewards_PG[0, 0]).std(ddof=1) + epsilon)


def reinforce_pp(rewards_PG: np.ndarray, context: BaselineContext, *, epsilon: float) -> np.ndarray:
    """REINFORCE++ (Hu 2025): `(r_i - batch mean)`, then whitened over all tokens of the batch.

    Biased: token-weighted mean and scale hold the completion's own reward and length. The batch
    mean cancels in the whitening, see `_whitened`.

    >>> context = BaselineContext(lengths_PG=np.array([[3, 1]]))
    >>> reinforce_pp(np.array([[1.0, 0.0]]), context, epsilon=0.0).tolist()
    [[0.5, -1.5]]
    """
    lengths_PG = field(context, "lengths_PG", "reinforce_pp")
    return _whitened(rewards_PG - rewards_PG[0, 0], lengths_PG, epsilon)


def reinforce_pp_baseline(
    rewards_PG: np.ndarray, context: BaselineContext, *, epsilon: float
) -> np.ndarray:
    """REINFORCE++-baseline (Hu 2025): `r_i - rbar`, then whitened over all tokens of the batch.

    Biased for the reasons of `reinforce_pp` and `group_mean`.

    >>> context = BaselineContext(lengths_PG=np.array([[3, 1]]))
    >>> reinforce_pp_baseline(np.array([[1.0, 0.0]]), context, epsilon=0.0).tolist()
    [[0.5, -1.5]]
    """
    lengths_PG = field(context, "lengths_PG", "reinforce_pp_baseline")
    return _whitened(centred(rewards_PG), lengths_PG, epsilon)


def _whitened(values_PG: np.ndarray, lengths_PG: np.ndarray, epsilon: float) -> np.ndarray:
    """Values minus their mean over tokens, over sqrt(variance over tokens + epsilon).

    Each value counts once per token of its completion; the variance has divisor tokens - 1 and
    epsilon stands under the root, as in verl's masked_whiten (epsilon 1e-8).
    """
    tokens = lengths_PG.sum()
    deviation_PG = values_PG - (lengths_PG * values_PG).sum() / tokens
    variance = (lengths_PG * deviation_PG**2).sum() / max(tokens - 1, 1)
    return divided(deviation_PG, math.sqrt(variance + epsilon))


def james_stein(rewards_PG: np.ndarray, context: BaselineContext, *, epsilon: float) -> np.ndarray:
    """Shrinkage towards the other prompts (arXiv 2511.03710, the form that excludes prompt x).

        b_i = (1 - lambda_x) leave-one-out mean_i + lambda_x mean of the other prompts' means
        lambda_x = v / (v + s + epsilon)
        v = mean over other prompts of (variance, divisor G-1) / G
        s = mean over other prompts of (prompt mean - their mean)^2

    Unbiased: lambda and pooled mean hold no reward of prompt x. Needs three prompts: a single
    other prompt has no spread s, and lambda would be 1 whatever the rewards.

    >>> rewards = np.array([[1.0, 0.0], [1.0, 1.0], [0.0, 0.0]])
    >>> james_stein(rewards, BaselineContext(), epsilon=0.0)[0].tolist()
    [1.0, -1.0]
    >>> james_stein(rewards, BaselineContext(), epsilon=0.0)[1].tolist()  # lambda = 2/3
    [0.5, 0.5]
    """
    count, size = rewards_PG.shape
    loo_PG = (rewards_PG.sum(axis=1, keepdims=True) - rewards_PG) / (size - 1)
    mean_P, noise_P = rewards_PG.mean(axis=1), rewards_PG.var(axis=1, ddof=1) / size
    others_PQ = np.broadcast_to(mean_P, (count, count))[~np.eye(count, dtype=bool)]
    others_PQ = others_PQ.reshape(count, count - 1)
    noise_P = (noise_P.sum() - noise_P) / (count - 1)
    shrink_P1 = divided(noise_P, noise_P + others_PQ.var(axis=1) + epsilon)[:, None]
    pooled_P1 = others_PQ.mean(axis=1, keepdims=True)
    return rewards_PG - (1 - shrink_P1) * loo_PG - shrink_P1 * pooled_P1


def beta(
    rewards_PG: np.ndarray,
    context: BaselineContext,
    *,
    minimum: float,
    maximum: float,
    ceiling: float,
) -> np.ndarray:
    """BNPO (Xiao et al. 2025): `A_i = (r_i - rbar) / f(rbar)`, f the density of a Beta law.

    Rewards are first mapped from [minimum, maximum] to [0, 1]. Its parameters 1 + a/3 and 1 + b/3,
    at least 1, follow from the moment fit Beta(a, b) to the group means; 1/f is at most `ceiling`
    (1e6 in the authors' code). Biased: rbar, fit and weight hold the completion's own reward, and
    prompts are reweighted. One prompt, or group means without spread, have nothing to fit: f = 1.

    Raises:
        ValueError: a reward is outside [minimum, maximum].

    >>> rewards = np.array([[1.0, 0.0, 0.0, 0.0], [1.0, 1.0, 1.0, 0.0]])
    >>> options = {"minimum": 0.0, "maximum": 1.0, "ceiling": 1e6}
    >>> beta(rewards[:1], BaselineContext(), **options).tolist()
    [[0.75, -0.25, -0.25, -0.25]]
    >>> beta(rewards, BaselineContext(), **options)[0].round(4).tolist()  # Beta(7/6, 7/6): .9555
    [0.7166, -0.2389, -0.2389, -0.2389]
    """
    low, high = rewards_PG.min(), rewards_PG.max()
    if low < minimum or high > maximum:
        raise ValueError(
            f"baseline beta maps rewards from [{minimum}, {maximum}], got {low} to {high}: "
            "widen its options minimum and maximum"
        )
    scaled_PG = (rewards_PG - minimum) / (maximum - minimum)
    weight_P = _inverse_density(scaled_PG.mean(axis=1), ceiling)
    return weight_P[:, None] * centred(scaled_PG)


def _inverse_density(mean_P: np.ndarray, ceiling: float) -> np.ndarray:
    """1/f at each group mean, at most `ceiling`; 0 at means 0 and 1, whose groups are equal."""
    alpha, gamma = _beta_fit(mean_P)
    log_norm = math.lgamma(alpha) + math.lgamma(gamma) - math.lgamma(alpha + gamma)
    inside = (mean_P > 0) & (mean_P < 1)
    p = mean_P[inside]
    log_inverse = log_norm - (alpha - 1) * np.log(p) - (gamma - 1) * np.log1p(-p)
    result = np.zeros_like(mean_P)
    result[inside] = np.exp(np.minimum(log_inverse, math.log(ceiling)))
    return result


def _beta_fit(mean_P: np.ndarray) -> tuple[float, float]:
    """(1 + a/3, 1 + b/3), at least 1, of the moment fit Beta(a, b)."""
    variance = mean_P.var(ddof=1) if len(mean_P) > 1 else 0.0
    if variance < NO_SPREAD:
        return 1.0, 1.0
    centre = mean_P.mean()
    both = centre * (1 - centre) / variance - 1
    return max(1.0, 1 + both * centre / 3), max(1.0, 1 + both * (1 - centre) / 3)
