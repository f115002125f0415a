"""Correlation of two reward functions over the completions of a prompt."""

from __future__ import annotations

import numpy as np

from grpo_ustat.estimators.intervals import Interval, jackknife_interval
from grpo_ustat.records import Array


def reward_correlation(rewards_PNF: Array, f: int, g: int, interval: str) -> Interval:
    """Estimate the correlation of functions f and g within prompts, with a jackknife interval.

    The correlation is `E Cov(Z_f, Z_g | X) / sqrt(E Var(Z_f | X) E Var(Z_g | X))`, where Z_f is the
    reward from function f and X the prompt. Each of the three means is estimated without bias
    (divisor N - 1), and the ratio is consistent. The result is NaN if the rewards of one function
    never vary within a prompt.

    Args:
        rewards_PNF: rewards of N >= 3 completions for each of P prompts, from F reward functions.
        f, g: indices of the two functions.
        interval: `completions` for an interval that holds the prompts fixed, `questions` for an
            interval for new prompts.

    >>> z = np.array([[[0.0, 1.0], [1.0, 0.0], [1.0, 0.0]], [[0.0, 0.5], [0.0, 0.5], [1.0, 0.5]]])
    >>> round(reward_correlation(z, 0, 1, "questions").estimate, 4)
    -0.7071
    """
    count, size = rewards_PNF.shape[:2]
    d_PN, e_PN = (
        z - z.mean(axis=1, keepdims=True) for z in np.moveaxis(rewards_PNF, -1, 0)[[f, g]]
    )
    products_3PN = np.stack([d_PN * e_PN, d_PN * d_PN, e_PN * e_PN])
    sums_3P = products_3PN.sum(axis=-1)
    moments_3P = sums_3P / (size - 1)
    if interval == "questions":
        others_31P = (moments_3P.sum(axis=1, keepdims=True) - moments_3P)[:, None] / (count - 1)
        delete_one = _ratio(others_31P)
    else:
        # Leaving out completion i reduces a sum of products by N / (N - 1) times the product of
        # completion i.
        deleted_3PN = (sums_3P[..., None] - products_3PN * size / (size - 1)) / (size - 2)
        means_311 = moments_3P.mean(axis=1)[:, None, None]
        delete_one = _ratio(means_311 + (deleted_3PN - moments_3P[..., None]) / count)
    return jackknife_interval(float(_ratio(moments_3P.mean(axis=1))), delete_one)


def _ratio(moments_3: Array) -> Array:
    """Divide the covariance by the square root of the product of the variances.

    The result is NaN if this product is 0.
    """
    covariance, first, second = moments_3
    product = first * second
    return covariance / np.sqrt(np.where(product > 0, product, np.nan))
