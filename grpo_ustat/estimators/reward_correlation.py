"""Correlation of two reward functions over the completions of a prompt."""

from __future__ import annotations

import numpy as np

from grpo_ustat.estimators.intervals import Interval, jackknife_interval
from grpo_ustat.records import Array


def reward_correlation(rewards_PNF: Array, f: int, g: int) -> Interval:
    """Estimate the correlation of functions f and g within prompts.

    The interval is for new prompts.

    The correlation is `E Cov(Z_f, Z_g | X) / sqrt(E Var(Z_f | X) E Var(Z_g | X))`, where Z_f is the
    reward from function f and X the prompt. Each of the three means is estimated without bias
    (divisor N - 1), and the ratio is consistent. The result is NaN if the rewards of one function
    never vary within a prompt.

    Args:
        rewards_PNF: rewards of N >= 3 completions for each of P prompts, from F reward functions.
        f, g: indices of the two functions.

    >>> z = np.array([[[0.0, 1.0], [1.0, 0.0], [1.0, 0.0]], [[0.0, 0.5], [0.0, 0.5], [1.0, 0.5]]])
    >>> round(reward_correlation(z, 0, 1).estimate, 4)
    -0.7071
    """
    count, size = rewards_PNF.shape[:2]
    d_PN, e_PN = (
        z - z.mean(axis=1, keepdims=True) for z in np.moveaxis(rewards_PNF, -1, 0)[[f, g]]
    )
    products_3PN = np.stack([d_PN * e_PN, d_PN * d_PN, e_PN * e_PN])
    moments_3P = products_3PN.sum(axis=-1) / (size - 1)
    others_31P = (moments_3P.sum(axis=1, keepdims=True) - moments_3P)[:, None] / (count - 1)
    return jackknife_interval(float(_ratio(moments_3P.mean(axis=1))), _ratio(others_31P))


def _ratio(moments_3: Array) -> Array:
    """Divide the covariance by the square root of the product of the variances.

    The result is NaN if this product is 0.
    """
    covariance, first, second = moments_3
    product = first * second
    return covariance / np.sqrt(np.where(product > 0, product, np.nan))
