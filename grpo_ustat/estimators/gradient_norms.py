r"""Noise scale estimated from squared gradient norms only, for any loss and training engine.

Let ghat_b be the leave-one-out gradient from b independently drawn groups of g completions. By
Proposition 3 of the paper,

    E||ghat_b||^2 = ||grad J||^2 + V/b        V = C1 + C2/g + C3/(g (g-1))

where `scaling` defines C1, C2 and C3. Squared norms at two or more values of b therefore identify
||grad J||^2 and V. For example, McCandlish et al. (2018, appendix A.1) use the norms of a batch and
of its parts. The noise scale in rollouts is

    n_c(g) = g V / ||grad J||^2

The result applies only to the g of the measured gradients. To estimate G* or the noise scale at
another g, scores are needed; see `ScalingLaw.noise_scale`. For any other loss that is a mean over
groups, the first equation is true with other meanings: the squared norm of the loss's expected
gradient replaces ||grad J||^2, and the variance of one group's gradient replaces V.
"""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np

from grpo_ustat.estimators.intervals import (
    CONFIDENCE,
    MIN_UNITS,
    Interval,
    jackknife_interval,
    ratio_interval,
)
from grpo_ustat.records import Array


def noise_scale_from_norms(
    sq_norms: Mapping[int, Array], group_size: int, level: float = CONFIDENCE
) -> dict[str, Interval]:
    """Estimate ||grad J||^2, the squared error of one group's gradient, and the noise scale.

    The mean squared norm at b groups is fitted by a straight line in 1/b. The intercept of the line
    is ||grad J||^2, and its slope is the squared error V. With two values of b, the line passes
    through both means. With more values, it is fitted by least squares with weight b^2, because the
    standard deviation of a squared norm is proportional to 1/b if noise dominates. Intercept and
    slope are unbiased for any weights. If the policy changes between steps, they estimate means
    over the steps, and the noise scale is computed from the ratio of these means.

    The jackknife leaves out one step at a time, with its norms at every b. It is therefore valid
    for norms at different b from the same rollouts (a batch and its micro-batches) and for norms
    from different rollouts. The interval of the noise scale is a Fieller interval; see
    `ratio_interval`. It has no upper end if the data do not exclude ||grad J||^2 = 0.

    Args:
        sq_norms: squared gradient norms before clipping. The keys are the numbers of groups b
            behind a norm. The values have shape [S] for one gradient at each of S >= 4 steps, or
            [S, K] for K parts of each step with b groups each.
        group_size: completions per group, g.
        level: coverage of the intervals.

    Returns:
        `grad_sq`, `group_mse` (V) and `noise_scale` (in rollouts). The estimate of `noise_scale` is
        NaN if `grad_sq` is not positive.

    Raises:
        ValueError: there are fewer than two values of b or fewer than 4 steps, or the numbers of
            steps differ.

    >>> norms = {1: np.array([10.0, 14, 12, 12]), 4: np.array([6.0, 6, 5, 7])}
    >>> found = noise_scale_from_norms(norms, group_size=8)
    >>> [round(found[name].estimate, 3) for name in ("grad_sq", "group_mse", "noise_scale")]
    [4.0, 8.0, 16.0]
    """
    if len(sq_norms) < 2:
        raise ValueError(
            f"the keys of the norms are {[*sq_norms]}: give norms for at least two numbers of "
            "groups"
        )
    steps = {b: len(norms) for b, norms in sq_norms.items()}
    count = min(steps.values())
    if count < MIN_UNITS or count != max(steps.values()):
        raise ValueError(
            f"the numbers of steps, by number of groups, are {steps}: they must be equal and at "
            f"least {MIN_UNITS}"
        )
    norms_BSK = [np.reshape(norms, (count, -1)).astype(float) for norms in sq_norms.values()]
    groups_B = np.array([*sq_norms], dtype=float)
    design_B2 = np.stack([np.ones_like(groups_B), 1 / groups_B], axis=1)
    weight_B = groups_B**2 * [norms_SK.shape[1] for norms_SK in norms_BSK]
    normal_22 = (weight_B * design_B2.T) @ design_B2
    fit_2B = np.linalg.solve(normal_22, weight_B * design_B2.T)
    grad_sq_S, mse_S = fit_2B @ np.stack([norms_SK.mean(axis=1) for norms_SK in norms_BSK])
    grad_sq, mse = float(grad_sq_S.mean()), float(mse_S.mean())
    grad_sq_1S, mse_1S = (
        (each_S.sum() - each_S)[None] / (count - 1) for each_S in (grad_sq_S, mse_S)
    )
    return {
        "grad_sq": jackknife_interval(grad_sq, grad_sq_1S, level),
        "group_mse": jackknife_interval(mse, mse_1S, level),
        "noise_scale": ratio_interval(
            group_size * mse, grad_sq, group_size * mse_1S, grad_sq_1S, level
        ),
    }
