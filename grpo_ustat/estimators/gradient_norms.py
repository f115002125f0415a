r"""Noise scale from squared norms of gradients only, for any loss and engine.

With b groups of g completions, drawn independently, the leave-one-out gradient has

    E||ghat_b||^2 = ||grad J||^2 + V/b        V = C1 + C2/g + C3/(g (g-1))

(Proposition 3), so squared norms at two or more b identify ||grad J||^2 and V; McCandlish et al.
(2018, appendix A.1) use a batch and its parts. The noise scale in rollouts is

    n_c(g) = g V / ||grad J||^2

which `ScalingLaw.noise_scale` computes from scores. Here no scores are needed, but the number is
for the present g: G*, and the noise at another g, need scores. For another loss that is a mean over
groups, the two terms are the squared length of its mean gradient and its noise.
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

    They are the coefficients of a straight line in 1/b through the mean squared norms at each b:
    with two b the line through both, with more the line of least squares, with weight b^2, because
    a norm varies by 1/b if noise prevails. Both coefficients are unbiased for any weights. Over
    several steps' policies they are means, and the noise scale is the ratio of such means.

    Intervals leave out one step at a time, with its norms at every b. This is right if the norms
    are of the same rollouts (a batch and its micro-batches), and also if they are of others. The
    interval of the noise scale is Fieller's, see `ratio_interval`, without an upper end if
    ||grad J||^2 may be 0.

    Args:
        sq_norms: by b, the number of groups in a gradient: its squared norm before clipping at each
            of S >= 4 steps, [S], or of K parts of each step with b groups each, [S, K].
        group_size: g, completions of a group.
        level: coverage.

    Returns:
        `grad_sq`, `group_mse` (V) and `noise_scale` (in rollouts), whose estimate is NaN if
        `grad_sq` is not positive.

    Raises:
        ValueError: fewer than two b, fewer than 4 steps, or different numbers of steps.

    >>> norms = {1: np.array([10.0, 14, 12, 12]), 4: np.array([6.0, 6, 5, 7])}
    >>> found = noise_scale_from_norms(norms, group_size=8)
    >>> [round(found[name].estimate, 3) for name in ("grad_sq", "group_mse", "noise_scale")]
    [4.0, 8.0, 16.0]
    """
    if len(sq_norms) < 2:
        raise ValueError(f"norms at groups {[*sq_norms]}: use those at two numbers of groups")
    steps = {b: len(norms) for b, norms in sq_norms.items()}
    count = min(steps.values())
    if count < MIN_UNITS or count != max(steps.values()):
        raise ValueError(f"steps by groups {steps}: use as many at each, {MIN_UNITS} or more")
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
