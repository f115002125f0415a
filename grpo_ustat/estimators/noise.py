r"""C1, C2, C3, G* and the noise scale from the groups of several training steps.

A step's groups give unbiased estimates of C1, C2, C3 and ||grad J||^2 of the policy of that step,
from few prompts: one step's ||grad J||^2 may be negative. So the estimates are averaged over steps,
and everything that is a ratio is a ratio of such means:

    G* = 1 + sqrt(C3 / C1)        n_c(G) = ( G C1 + C2 + C3/(G-1) ) / ||grad J||^2

n_c is the number of rollouts of a step at which the gradient's squared error equals its squared
length: the simple noise scale of McCandlish et al. (2018), counted in rollouts of groups of G. Far
below it noise dominates the gradient, far above it more rollouts change the gradient little.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np

from grpo_ustat.estimators.intervals import (
    Interval,
    jackknife_interval,
    ratio_interval,
    tails,
    wilson,
)
from grpo_ustat.estimators.moments import norm_moments
from grpo_ustat.estimators.scaling import (
    CONSTANTS,
    ScalingEstimate,
    best_group_size,
    group_size_interval,
    scaling_estimate,
)
from grpo_ustat.records import Array

LEAST_UNITS = 4  # of which a jackknife leaves one out
NOTHING = Interval(math.nan, math.nan, math.nan)
CONSTANTS_AND_GRADIENT = (*CONSTANTS, "grad_sq")


class GroupTerms(NamedTuple):
    """What the P groups of one step add to the constants, arrays of shape [P].

    Attributes:
        g_sq_P: ||g||^2.
        first_order_P: A_V - ||g||^2, whose mean is C2.
        second_order_P: D + ||g||^2, whose mean is C3.
        others_P: sum of <ghat_x, ghat_y> over the other groups y.
        norm_P: mean of the squared score norms, NaN where the group has zero variance.
    """

    g_sq_P: Array
    first_order_P: Array
    second_order_P: Array
    others_P: Array
    norm_P: Array


def group_terms(rewards_PG: Array, sq_norm_PG: Array, gradient_gram_PP: Array) -> GroupTerms:
    """The terms of P >= 2 groups of G >= 3 completions.

    A group of equal rewards adds 0 to every term whatever its scores are, so it needs none.

    Args:
        rewards_PG: rewards.
        sq_norm_PG: squared score norms; any number in groups of equal rewards.
        gradient_gram_PP: <ghat_x, ghat_y> of the groups' leave-one-out gradients.

    Raises:
        ValueError: fewer than 2 groups, or of 3 completions.
    """
    if len(rewards_PG) < 2:
        raise ValueError(f"||grad J||^2 needs at least 2 groups, got {len(rewards_PG)}")
    own_P = np.diagonal(gradient_gram_PP)
    moments = norm_moments(sq_norm_PG, rewards_PG, own_P)
    varied_P = (rewards_PG != rewards_PG[:, :1]).any(axis=1)
    return GroupTerms(
        np.where(varied_P, moments.g_sq, 0.0),
        np.where(varied_P, moments.a_v - moments.g_sq, 0.0),
        np.where(varied_P, moments.d + moments.g_sq, 0.0),
        np.where(varied_P, gradient_gram_PP.sum(axis=1) - own_P, 0.0),
        np.where(varied_P, moments.m0, np.nan),
    )


@dataclass(frozen=True)
class NoiseEstimate:
    """Averages over K steps of P groups each, with intervals.

    Attributes:
        intervals: c1, c2, c3, grad_sq, gstar, noise_scale (at the group size in use),
            noise_scale_best (at G*) and zero_variance, each with its 95 % interval; the ends are
            NaN where there are fewer than 4 groups a step and fewer than 4 steps.
        scaling: C1, C2, C3 with the covariance of their errors.
        heavy: whether intervals are likely to cover less than 90 %, see `intervals.Tails`.
    """

    intervals: Mapping[str, Interval]
    scaling: ScalingEstimate
    heavy: bool

    def as_result(self) -> dict[str, Any]:
        """C1, C2, C3, their covariance and G* as `result.json` of a study has them."""
        ends = ("", "_low", "_high")
        values = zip(ends, self.intervals["gstar"], strict=True)
        return {
            **dict(zip(CONSTANTS, map(float, self.scaling.constants_3), strict=True)),
            "covariance": self.scaling.covariance_33,
            "dof": self.scaling.dof,
            **{f"gstar{end}": float(x) if math.isfinite(x) else None for end, x in values},
        }


def noise_estimate(steps: Sequence[GroupTerms], group_size: int) -> NoiseEstimate:
    """C1, C2, C3, ||grad J||^2, G* and the noise scale of the policies of some steps together.

    Steps count equally. Intervals leave out one group at a time, each step an independent part;
    where steps have fewer than 4 groups, or not equally many, one step at a time.

    Args:
        steps: of each step its groups' terms.
        group_size: G >= 2, in use.
    """
    each_K = [_estimates(step) for step in steps]
    whole = {
        name: float(np.mean([estimates[name] for estimates in each_K]))
        for name in CONSTANTS_AND_GRADIENT
    }
    delete_one = _delete_one(steps, each_K, whole)
    best = float(best_group_size(whole["c1"], whole["c2"], whole["c3"]))
    zero_variance = float(np.mean([np.isnan(step.norm_P).mean() for step in steps]))
    intervals = {name: NOTHING._replace(estimate=whole[name]) for name in CONSTANTS_AND_GRADIENT}
    intervals["gstar"] = NOTHING._replace(estimate=best)
    groups = sum(len(step.norm_P) for step in steps)
    intervals["zero_variance"] = wilson(zero_variance * groups, groups)
    sizes = {"noise_scale": float(group_size), "noise_scale_best": best}
    constants_3 = np.array([whole[name] for name in CONSTANTS])
    if delete_one is None:
        for name, size in sizes.items():
            error, length = _n_mse(whole, size), whole["grad_sq"]
            ratio = float(error / length) if length > 0 else math.nan
            intervals[name] = NOTHING._replace(estimate=ratio)
        unknown = ScalingEstimate(constants_3, np.full((3, 3), np.nan), 1.0)
        return NoiseEstimate(intervals, unknown, heavy=True)
    for name in CONSTANTS_AND_GRADIENT:
        intervals[name] = jackknife_interval(whole[name], delete_one[name])
    if not all((delete_one[name] == whole[name]).all() for name in CONSTANTS):
        intervals["gstar"] = group_size_interval(whole, delete_one)
    for name, size in sizes.items():
        intervals[name] = (
            ratio_interval(
                float(_n_mse(whole, size)), whole["grad_sq"],
                np.asarray(_n_mse(delete_one, size)), delete_one["grad_sq"],
            )
            if math.isfinite(size)
            else NOTHING
        )  # fmt: skip
    norms = np.concatenate([step.norm_P[~np.isnan(step.norm_P)] for step in steps])
    leading = [delete_one["c2"], delete_one["c3"]]
    heavy = len(norms) < LEAST_UNITS or tails(norms[None], leading).heavy
    return NoiseEstimate(intervals, scaling_estimate(whole, delete_one), heavy)


def _n_mse(constants: Mapping[str, Any], size: float) -> Any:
    """G C1 + C2 + C3/(G-1): n times the error of a step of n rollouts."""
    return size * constants["c1"] + constants["c2"] + constants["c3"] / (size - 1)


def _estimates(step: GroupTerms) -> dict[str, float]:
    """Of one step's groups."""
    count = len(step.g_sq_P)
    grad_sq = float(step.others_P.sum()) / (count * (count - 1))
    return {
        "c1": float(step.g_sq_P.mean()) - grad_sq,
        "c2": float(step.first_order_P.mean()),
        "c3": float(step.second_order_P.mean()),
        "grad_sq": grad_sq,
    }


def _delete_one(
    steps: Sequence[GroupTerms], each_K: Sequence[Mapping[str, float]], whole: Mapping[str, float]
) -> dict[str, Array] | None:
    """The averages with one unit left out, each [K, n]; None where there are too few units."""
    counts, number = {len(step.g_sq_P) for step in steps}, len(steps)
    if len(counts) == 1 and min(counts) >= LEAST_UNITS:
        parts = [_without_each(step) for step in steps]
        return {
            name: np.stack([
                whole[name] + (part[name] - estimates[name]) / number
                for part, estimates in zip(parts, each_K, strict=True)
            ])
            for name in CONSTANTS_AND_GRADIENT
        }  # fmt: skip
    if number < LEAST_UNITS:
        return None
    return {
        name: np.array([[
            (number * whole[name] - estimates[name]) / (number - 1) for estimates in each_K
        ]])
        for name in CONSTANTS_AND_GRADIENT
    }  # fmt: skip


def _without_each(step: GroupTerms) -> dict[str, Array]:
    """Of one step's groups without each of them in turn, [P]."""
    rest = len(step.g_sq_P) - 1
    means = [(x.sum() - x) / rest for x in step[:3]]
    grad_sq_P = (step.others_P.sum() - 2 * step.others_P) / (rest * (rest - 1))
    return {"c1": means[0] - grad_sq_P, "c2": means[1], "c3": means[2], "grad_sq": grad_sq_P}
