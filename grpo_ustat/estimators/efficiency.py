r"""Efficiency of a loss relative to the unbiased gradient estimate.

The update of a loss is a random vector ghat with mean `mu = E ghat`. The true gradient is grad J,
where J is the expected reward. The length of ghat does not matter, because the learning rate
rescales it. The error is therefore defined for ghat / kappa. The factor kappa is chosen such that
the mean of ghat / kappa, projected onto the true gradient, is grad J:

    kappa = <mu, grad J> / ||grad J||^2
    error = E|| ghat / kappa - grad J ||^2 = ( ||mu - kappa grad J||^2 + tr Cov ghat ) / kappa^2

For an unbiased estimate, this error is the mean squared error. If the curvature of J is the same in
all directions, the best step along ghat raises J by the fraction
`e = ||grad J||^2 / (||grad J||^2 + error)` of the increase from the best step along the true
gradient. Under this condition, losses with equal errors are equally good. With n rollouts, the
unbiased estimate with the leave-one-out baseline has the error
`MSE(n, G) = ( G C1 + C2 + C3/(G-1) ) / n`. Therefore

    relative efficiency = MSE(n, G) / error

is the number of rollouts that the unbiased estimate needs, at the same G, to match one rollout of
the loss. A second ratio has the smallest measured MSE over all G as its numerator. It compares the
loss with the unbiased estimate at its best G. Two properties of the update are reported separately:

    direction     cos^2(mu, grad J) = 1 - ||mu - kappa grad J||^2 / ||mu||^2, the same for any n
    noise         tr Cov ghat / E||ghat||^2, the share of an update that is noise

For some losses the mean is `c grad J` for any policy, with a known factor c (`Loss.scale`). Then
kappa = c is known, and the efficiency is a ratio of variances that needs no estimate of grad J.

The update is a mean of one term per prompt, and terms of different prompts are independent. Inner
products of means are therefore estimated by averages over pairs of different prompts. Second
moments need only products within a prompt. All results are functions of such averages. Their
intervals come from a jackknife that leaves out one prompt at a time. All losses are recomputed
without the same prompt, so comparisons between them are paired.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from grpo_ustat.estimators.intervals import (
    CONFIDENCE,
    Interval,
    jackknife_interval,
    jackknife_variance,
    ratio_interval,
    t_interval,
    tails,
)
from grpo_ustat.records import Array

# `GroupTerms` is needed only for annotations.
if TYPE_CHECKING:
    from grpo_ustat.estimators.group_terms import GroupTerms

# Arrays with suffix D have length 1 + P: first a statistic computed from all P prompts, then the
# same statistic without each prompt in turn.

# Number of prompts whose products are computed at once.
BLOCK = 256
UNKNOWN = Interval(math.nan, 0.0, math.inf)
UNKNOWN_DIRECTION = Interval(math.nan, 0.0, 1.0)
# Value of `undrawn` in `ratio_interval` for the direction. It increases the variance of ||mu||^2
# to allow for prompts that were not drawn. Without it, a sample of few prompts gives a short
# interval mostly if it lacks the prompts that would change the direction. The value was chosen with
# the populations in `scripts/benchmarks/error_rates.py turned`.
UNDRAWN_VARIANCE = 0.5


@dataclass(frozen=True)
class UpdateMoments:
    """Moments of a loss's update from n rollouts in groups of G."""

    # E||ghat||^2.
    energy_D: Array
    # ||mu||^2.
    mean_sq_D: Array
    # <mu, grad J>.
    cross_D: Array
    # Factor c of a loss with mu = c grad J for any policy; None for other losses. If zero-variance
    # groups are replaced, the value is c divided by the share of groups that are kept, [D].
    scale: float | Array | None


@dataclass(frozen=True)
class LossError:
    """Error of a loss's update and the parts of this error; see the module's docstring."""

    # E||ghat / kappa - grad J||^2.
    error_D: Array
    # ||mu - kappa grad J||^2; 0 for losses with a known scale.
    off_direction_sq_D: Array
    # ||mu||^2.
    mean_sq_D: Array
    # E||ghat||^2.
    energy_D: Array
    # True if kappa is known or significantly above 0.
    kappa_known: bool
    # Numerator <mu, grad J> and denominator ||grad J||^2 of kappa if kappa is estimated; None if
    # kappa is known.
    cross_D: Array | None = None
    signal_D: Array | None = None


@dataclass(frozen=True)
class RelativeEfficiency:
    """Relative efficiency of a loss at one group size."""

    # Number of rollouts that the unbiased estimate needs, at the same G, to match one rollout of
    # the loss.
    efficiency_same_g: Interval
    # The same number, but with the unbiased estimate at its best G instead of the same G.
    efficiency_best_g: Interval
    # cos^2 of the angle between the mean of the update and the gradient.
    direction: Interval
    # Share of the expected squared norm of an update that is noise.
    noise: Interval


def mean_over_prompts(values_P: Array) -> Array:
    """Return the mean over prompts, then the mean without each prompt in turn, [D].

    >>> mean_over_prompts(np.array([0.0, 3.0, 6.0])).tolist()
    [3.0, 4.5, 3.0, 1.5]
    """
    mean = values_P.mean()
    return np.concatenate([[mean], mean + (mean - values_P) / (len(values_P) - 1)])


def product_of_means(left_PR: Array, right_PR: Array) -> Array:
    """Estimate <E left, E right> from pairs of different prompts, [D].

    The first value is computed from all prompts, the others without each prompt in turn.

    Args:
        left_PR, right_PR: sketches of the prompts' vectors.

    >>> product_of_means(np.array([[1.0], [2.0], [3.0]]), np.array([[1.0], [1.0], [2.0]])).round(3)
    array([2.5, 3.5, 2.5, 1.5])
    """
    left_R, right_R = left_PR.sum(axis=0), right_PR.sum(axis=0)
    blocks: list[Array] = []
    for first in range(0, len(left_PR), BLOCK):
        left, right = left_PR[first : first + BLOCK], right_PR[first : first + BLOCK]
        both = (right_R - right) * left + (left_R - left) * right
        blocks.append(both.sum(axis=1) / 2)
    with_others_P = np.concatenate(blocks)
    count, total = len(with_others_P), with_others_P.sum()
    without_P = (total - 2 * with_others_P) / ((count - 1) * (count - 2))
    return np.concatenate([[total / (count * (count - 1))], without_P])


def update_moments(
    terms: GroupTerms,
    gradient_PR: Array,
    prompts: float | Array,
    scale: float | None,
) -> UpdateMoments:
    """Compute the moments of an update that is a mean of independent terms, one per prompt.

    Args:
        terms: moments of the term of every prompt, at one G.
        gradient_PR: unbiased sketches of the prompts' gradients.
        prompts: number of prompts in the update, B = n / G, which need not be an integer. An array
            [D] if B is itself estimated from the prompts.
        scale: factor c; see `Loss.scale`.
    """
    mean_sq_D = product_of_means(terms.mean_PR, terms.mean_PR)
    cross_D = product_of_means(terms.mean_PR, gradient_PR)
    energy_D = mean_over_prompts(terms.energy_P)
    update_scale: float | Array | None = scale
    if terms.kept_P is not None:
        kept_D = mean_over_prompts(terms.kept_P)
        mean_sq_D, cross_D, energy_D = mean_sq_D / kept_D**2, cross_D / kept_D, energy_D / kept_D
        update_scale = None if scale is None else scale / kept_D
    if update_scale is not None:
        signal_D = product_of_means(gradient_PR, gradient_PR)
        mean_sq_D, cross_D = update_scale**2 * signal_D, update_scale * signal_D
    energy_D = mean_sq_D + (energy_D - mean_sq_D) / prompts
    return UpdateMoments(energy_D, mean_sq_D, cross_D, update_scale)


def loss_error(moments: UpdateMoments, signal_D: Array) -> LossError:
    """Compute the error of a loss's update.

    Args:
        moments: moments of the update.
        signal_D: ||grad J||^2.
    """
    if moments.scale is not None:
        variance_D = moments.energy_D - moments.mean_sq_D
        return LossError(
            error_D=variance_D / moments.scale**2,
            off_direction_sq_D=np.zeros_like(signal_D),
            mean_sq_D=moments.mean_sq_D,
            energy_D=moments.energy_D,
            kappa_known=True,
        )
    kappa = ratio(moments.cross_D, signal_D)
    with np.errstate(divide="ignore", invalid="ignore"):
        kappa_D = moments.cross_D / signal_D
        error_D = moments.energy_D / kappa_D**2 - signal_D
        off_direction_sq_D = moments.mean_sq_D - kappa_D * moments.cross_D
    kappa_known = kappa.low > 0 and math.isfinite(kappa.high)
    return LossError(
        error_D,
        off_direction_sq_D,
        moments.mean_sq_D,
        moments.energy_D,
        kappa_known,
        moments.cross_D,
        signal_D,
    )


def relative_efficiency(
    loss: LossError,
    group_size: int,
    unbiased: Mapping[int, Array],
    level: float = CONFIDENCE,
) -> RelativeEfficiency:
    """Estimate the relative efficiency of a loss.

    Args:
        loss: error of the loss at n rollouts in groups of G.
        group_size: group size of the loss, G.
        unbiased: errors of the unbiased estimate at n rollouts, [D] each, by group size.
            `group_size` must be among the keys.
        level: confidence level of each interval.
    """
    at_same = relative(unbiased[group_size], loss, level)
    noise = ratio(loss.energy_D - loss.mean_sq_D, loss.energy_D, level)
    return RelativeEfficiency(
        efficiency_same_g=at_same if loss.kappa_known else UNKNOWN,
        efficiency_best_g=at_best_size(loss, unbiased, level),
        direction=direction(loss, level),
        noise=Interval(*(min(x, 1.0) for x in noise)),
    )


def at_best_size(
    loss: LossError, unbiased: Mapping[int, Array], level: float = CONFIDENCE
) -> Interval:
    """Estimate the relative efficiency against the unbiased estimate at its best G.

    The best G of the unbiased estimate is selected with the same data. If the selected G is not the
    true best G, the efficiency at the best G is overestimated. To compensate, the function computes
    an interval for every G that may be the best, and uses the smallest lower end.

    Args:
        loss, unbiased, level: see `relative_efficiency`.
    """
    if not loss.kappa_known:
        return UNKNOWN
    best, others = best_sizes(unbiased)
    lows = [relative(unbiased[size], loss, level).low for size in others]
    return relative(unbiased[best], loss, level)._replace(low=min(lows))


def relative(unbiased_D: Array, loss: LossError, level: float = CONFIDENCE) -> Interval:
    """Estimate the error of the unbiased estimate divided by the error of a loss.

    If kappa is estimated, the jackknife interval misses the true ratio in up to one of five cases.
    The cause is a selection: the ratio is reported only if kappa is significantly above 0, which
    happens more often if kappa is overestimated. The interval is therefore extended. It contains
    the two ratios that result if kappa is replaced by its lower or its upper one-sided confidence
    limit and all other numbers keep their estimates. The result is `UNKNOWN` if the error at the
    upper limit of kappa is not positive. `scripts/benchmarks/error_rates.py turned` checks the
    coverage.

    Args:
        unbiased_D: error of the unbiased estimate.
        loss: error of the loss.
        level: confidence level of the interval, and of each one-sided interval of kappa.
    """
    with np.errstate(divide="ignore", invalid="ignore"):
        efficiency = positive(unbiased_D / loss.error_D, level)
    if loss.cross_D is None or loss.signal_D is None:
        return efficiency
    kappa = ratio(loss.cross_D, loss.signal_D, max(0.0, 2 * level - 1))
    with np.errstate(divide="ignore", invalid="ignore"):
        most, least = loss.energy_D[0] / np.square(kappa[1:]) - loss.signal_D[0]
    if not least > 0:
        return UNKNOWN
    low, high = float(unbiased_D[0] / most), float(unbiased_D[0] / least)
    return Interval(efficiency.estimate, min(efficiency.low, low), max(efficiency.high, high))


def direction(loss: LossError, level: float = CONFIDENCE) -> Interval:
    """Estimate cos^2 of the angle between the mean of a loss's update and the gradient.

    The result joins two intervals, because neither is accurate for every direction:

    1. Fieller's set for the share of ||mu||^2 that is orthogonal to the gradient, converted to
       cos^2. It is accurate if cos^2 is near 1, where the distribution of the estimate is skewed.
       If mu and the gradient clearly differ in direction, its upper end is too low, because samples
       with a small ||mu||^2 have a standard error that is too small.
    2. The jackknife interval of cos^2, with a Student's t quantile for the effective number of
       prompts. If mu and the gradient clearly differ in direction, its upper end is accurate, but
       its lower end is too high.

    The result is `UNKNOWN_DIRECTION` if the joined interval contains every value from 0 to 1.

    Args:
        loss: moments of the loss.
        level: confidence level of the interval.
    """
    if not loss.off_direction_sq_D.any():
        return Interval(1.0, 1.0, 1.0)
    off_share = ratio(loss.off_direction_sq_D, loss.mean_sq_D, level, UNDRAWN_VARIANCE)
    with np.errstate(divide="ignore", invalid="ignore"):
        square_D = 1 - loss.off_direction_sq_D / loss.mean_sq_D
    if not (math.isfinite(off_share.estimate) and np.isfinite(square_D).all()):
        return UNKNOWN_DIRECTION
    variance, dof = effective_variance(square_D)
    jackknifed = t_interval(square_D[0], variance, dof, level)
    low = max(0.0, min(1 - off_share.high, jackknifed.low))
    high = min(1.0, max(1 - off_share.low, jackknifed.high))
    if low <= 0 and high >= 1:
        return UNKNOWN_DIRECTION
    return Interval(min(1.0, max(0.0, 1 - off_share.estimate)), low, high)


def effective_variance(values_D: Array) -> tuple[float, float]:
    """Return the jackknife variance of a statistic and its degrees of freedom.

    The degrees of freedom are the effective number of prompts that determine the variance, minus 1,
    and at least 1.
    """
    values_Kh = without(values_D)
    variance = float(jackknife_variance(values_Kh, axis=1).sum())
    dof = min(values_Kh.size, tails(values_Kh, [values_Kh]).carriers) - 1
    return variance, max(1.0, dof)


def best_sizes(errors: Mapping[int, Array]) -> tuple[int, list[int]]:
    """Return the G with the smallest error, and all G that are not significantly worse.

    A size G is significantly worse if the interval of the paired difference, its error minus the
    smallest error, lies above 0. The confidence level is Bonferroni-corrected for the number of
    sizes. There is no correction for the selection of the best G with the same data.

    Args:
        errors: error by group size, [D] each.
    """
    best = min(errors, key=lambda size: errors[size][0])
    level = 1 - 0.05 / max(1, len(errors) - 1)
    sizes = [best]
    for size, error_D in errors.items():
        if size != best:
            more_D = error_D - errors[best]
            if not jackknife_interval(more_D[0], without(more_D), level).low > 0:
                sizes.append(size)
    return best, sorted(sizes)


def positive(values_D: Array, level: float = CONFIDENCE) -> Interval:
    """Return a positive statistic with its jackknife interval on the log scale.

    The result is `UNKNOWN` unless the statistic is positive and finite for all prompts together and
    without each prompt in turn.
    """
    if not (np.isfinite(values_D).all() and (values_D > 0).all()):
        return UNKNOWN
    return jackknife_interval(values_D[0], without(values_D), level, positive=True)


def ratio(
    above_D: Array,
    below_D: Array,
    level: float = CONFIDENCE,
    undrawn: float = 0.0,
) -> Interval:
    """Return the ratio of two statistics whose true values are at least 0; see `ratio_interval`.

    The result is `UNKNOWN` unless both statistics are finite for all prompts together and without
    each prompt in turn.
    """
    if not (np.isfinite(above_D).all() and np.isfinite(below_D).all()):
        return UNKNOWN
    return ratio_interval(
        above_D[0], below_D[0], without(above_D), without(below_D), level,
        undrawn=undrawn,
    )  # fmt: skip


def without(values_D: Array) -> Array:
    """Return the values of a statistic without each prompt, as the one row [1, P] of strata."""
    return values_D[None, 1:]
