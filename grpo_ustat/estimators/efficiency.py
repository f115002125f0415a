r"""Relative efficiency of a loss: error of its gradient against that of the unbiased estimate.

The update of a loss is a random vector ghat with mean `mu = E ghat`. The learning rate determines
its length. The error is therefore defined for the multiple of ghat whose mean has the component
grad J along the true gradient,

    kappa = <mu, grad J> / ||grad J||^2
    error = E|| ghat / kappa - grad J ||^2 = ( ||mu - kappa grad J||^2 + tr Cov ghat ) / kappa^2

For an unbiased estimate this is the mean squared error. If the curvature of J is the same in all
directions, the best step along ghat achieves the share `e = ||grad J||^2 / (||grad J||^2 + error)`
of the gain of the best step along the true gradient. Losses with equal errors are then equally
good. The unbiased estimate, leave-one-out, has the error `MSE(n, G) = ( G C1 + C2 + C3/(G-1) ) / n`
with n rollouts, and

    relative efficiency = MSE(n, G) / error

is the number of rollouts of the unbiased estimate, at the same G, that are as good as one rollout
of the loss. With the smallest measured `MSE(n, G)` it is the efficiency at the best G of the
unbiased estimate. Two parts of the error are reported separately:

    direction     cos^2(mu, grad J) = 1 - ||mu - kappa grad J||^2 / ||mu||^2, which no n corrects
    noise         tr Cov ghat / E||ghat||^2, the share of an update that is noise

If the mean of a loss is `c grad J` for any policy (`Loss.scale`), kappa = c is known. The
efficiency is then a ratio of variances that needs no estimate of grad J. Inner products of means
are averages over pairs of different prompts, whose terms are independent. Second moments are exact
within a prompt. Every number is a function of such means and has a delete-one-prompt jackknife,
which is paired across losses.
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
    positive_interval,
    ratio_interval,
    t_interval,
    tails,
)
from grpo_ustat.records import Array

# Needed only for annotations.
if TYPE_CHECKING:
    from grpo_ustat.estimators.group_terms import GroupTerms

# Axis D: a statistic of all prompts, followed by the statistic without each prompt, [1 + P].
# Axis h: the P / K prompts of one metric.

# Number of prompts whose products are computed at once.
BLOCK = 256
UNKNOWN = Interval(math.nan, 0.0, math.inf)
UNKNOWN_DIRECTION = Interval(math.nan, 0.0, 1.0)
# Variance of ||mu||^2 that undrawn prompts may add, as a share, see `ratio_interval`. With few
# prompts, a short interval of the direction mostly means that the prompts that would change the
# direction were not drawn. The value was chosen on the populations of
# `scripts/benchmarks/error_rates.py turned`.
UNDRAWN_VARIANCE = 0.5


@dataclass(frozen=True)
class UpdateMoments:
    """Moments of the update of a loss, with n rollouts in groups of G."""

    # E||ghat||^2.
    energy_D: Array
    # ||mu||^2.
    mean_sq_D: Array
    # <mu, grad J>.
    cross_D: Array
    # Factor c with mu = c grad J for any policy. If groups are replaced, c divided by the share of
    # kept groups, [D]. None for losses without such a factor.
    scale: float | Array | None


@dataclass(frozen=True)
class LossError:
    """Error of a loss's update and the parts of this error, see the module's docstring."""

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
    # Numerator and denominator of kappa if kappa is estimated; None if kappa is known.
    cross_D: Array | None = None
    signal_D: Array | None = None


@dataclass(frozen=True)
class RelativeEfficiency:
    """Relative efficiency of a loss at one group size."""

    # Number of rollouts of the unbiased estimate, at the same G, that are as good as one rollout of
    # the loss.
    efficiency_same_g: Interval
    # The same number at the best G of the unbiased estimate.
    efficiency_best_g: Interval
    # cos^2 of the angle between the mean of the update and the gradient.
    direction: Interval
    # Share of the squared norm of an update that is noise.
    noise: Interval


def mean_over_prompts(values_P: Array, metrics: int = 1) -> Array:
    """Return the mean of the prompts' values, then the mean without each prompt, [D].

    >>> mean_over_prompts(np.array([0.0, 3.0, 6.0])).tolist()
    [3.0, 4.5, 3.0, 1.5]
    """
    values_hK = values_P.reshape(-1, metrics)
    mean, count = values_P.mean(), len(values_hK)
    without_hK = mean + (values_hK.mean(axis=0) - values_hK) / (count - 1) / metrics
    return np.concatenate([[mean], without_hK.ravel()])


def product_of_means(left_PR: Array, right_PR: Array, metrics: int = 1) -> Array:
    """Estimate <E left, E right> from pairs of different prompts, then without each prompt, [D].

    Args:
        left_PR, right_PR: sketches of the prompts' vectors.
        metrics: number of metrics, K, see `ScorePool.metrics`.

    >>> product_of_means(np.array([[1.0], [2.0], [3.0]]), np.array([[1.0], [1.0], [2.0]])).round(3)
    array([2.5, 3.5, 2.5, 1.5])
    """
    by_metric: list[Array] = []
    for metric in range(metrics):
        left_hR, right_hR = left_PR[metric::metrics], right_PR[metric::metrics]
        left_R, right_R = left_hR.sum(axis=0), right_hR.sum(axis=0)
        with_others: list[Array] = []
        for first in range(0, len(left_hR), BLOCK):
            left, right = left_hR[first : first + BLOCK], right_hR[first : first + BLOCK]
            both = (right_R - right) * left + (left_R - left) * right
            with_others.append(both.sum(axis=1) / 2)
        by_metric.append(np.concatenate(with_others))
    with_others_hK = np.stack(by_metric, axis=1)
    count, sums_K = len(with_others_hK), with_others_hK.sum(axis=0)
    of_metric_K = sums_K / (count * (count - 1))
    without_hK = (sums_K - 2 * with_others_hK) / ((count - 1) * (count - 2))
    mean = of_metric_K.mean()
    return np.concatenate([[mean], (mean + (without_hK - of_metric_K) / metrics).ravel()])


def update_moments(
    terms: GroupTerms,
    gradient_PR: Array,
    prompts: float,
    scale: float | None,
    metrics: int = 1,
) -> UpdateMoments:
    """Compute the moments of an update that is a mean of independent terms, one per prompt.

    Args:
        terms: terms of every prompt, at one G.
        gradient_PR: unbiased sketches of the prompts' gradients.
        prompts: number of prompts, B = n / G, which may be a fraction.
        scale: factor c, see `Loss.scale`.
        metrics: number of metrics, K, see `ScorePool.metrics`.
    """
    mean_sq_D = product_of_means(terms.mean_PR, terms.mean_PR, metrics)
    cross_D = product_of_means(terms.mean_PR, gradient_PR, metrics)
    energy_D = mean_over_prompts(terms.energy_P, metrics)
    update_scale: float | Array | None = scale
    if terms.kept_P is not None:
        kept_D = mean_over_prompts(terms.kept_P, metrics)
        mean_sq_D, cross_D, energy_D = mean_sq_D / kept_D**2, cross_D / kept_D, energy_D / kept_D
        update_scale = None if scale is None else scale / kept_D
    if update_scale is not None:
        signal_D = product_of_means(gradient_PR, gradient_PR, metrics)
        mean_sq_D, cross_D = update_scale**2 * signal_D, update_scale * signal_D
    energy_D = mean_sq_D + (energy_D - mean_sq_D) / prompts
    return UpdateMoments(energy_D, mean_sq_D, cross_D, update_scale)


def loss_error(moments: UpdateMoments, signal_D: Array, metrics: int = 1) -> LossError:
    """Compute the error of a loss's update.

    Args:
        signal_D: ||grad J||^2.
        metrics: number of metrics, K, see `ScorePool.metrics`.
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
    kappa = ratio(moments.cross_D, signal_D, metrics)
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
    metrics: int = 1,
    level: float = CONFIDENCE,
) -> RelativeEfficiency:
    """Estimate the relative efficiency of a loss.

    The same data select the best G of the unbiased estimate and measure the error at this G, which
    overestimates the efficiency at that G. Therefore the lower end is the lowest of the lower ends
    for all G that may be the best.

    Args:
        loss: error of the loss at n rollouts in groups of G.
        group_size: group size of the loss, G.
        unbiased: errors of the unbiased estimate at n rollouts, by group size. `group_size` must be
            among the keys.
        metrics: number of metrics, K, see `ScorePool.metrics`.
        level: coverage of each interval.
    """
    efficiencies = {
        size: relative(error_D, loss, metrics, level) for size, error_D in unbiased.items()
    }
    best, others = best_sizes(unbiased, metrics)
    at_best = efficiencies[best]._replace(low=min(efficiencies[size].low for size in others))
    noise = ratio(loss.energy_D - loss.mean_sq_D, loss.energy_D, metrics, level)
    return RelativeEfficiency(
        efficiency_same_g=efficiencies[group_size] if loss.kappa_known else UNKNOWN,
        efficiency_best_g=at_best if loss.kappa_known else UNKNOWN,
        direction=direction(loss, metrics, level),
        noise=Interval(*(min(x, 1.0) for x in noise)),
    )


def relative(
    unbiased_D: Array, loss: LossError, metrics: int = 1, level: float = CONFIDENCE
) -> Interval:
    """Estimate the error of the unbiased estimate divided by the error of a loss.

    The ratio is shown only if an estimated kappa is above 0, which happens more often if kappa is
    overestimated. The jackknife interval then misses the true ratio in up to one of five cases.
    Therefore the interval also contains the ratios at both ends of kappa's one-sided intervals,
    with the other numbers as estimated. If kappa's interval has no lower end, the result is
    `UNKNOWN`. `scripts/benchmarks/error_rates.py turned` checks the coverage.

    Args:
        unbiased_D: error of the unbiased estimate.
        loss: error of the loss.
        metrics: number of metrics, K, see `ScorePool.metrics`.
        level: coverage of the interval, and of each one-sided interval of kappa.
    """
    with np.errstate(divide="ignore", invalid="ignore"):
        efficiency = positive(unbiased_D / loss.error_D, metrics, level)
    if loss.cross_D is None or loss.signal_D is None:
        return efficiency
    kappa = ratio(loss.cross_D, loss.signal_D, metrics, max(0.0, 2 * level - 1))
    with np.errstate(divide="ignore", invalid="ignore"):
        most, least = loss.energy_D[0] / np.square(kappa[1:]) - loss.signal_D[0]
    if not least > 0:
        return UNKNOWN
    low, high = float(unbiased_D[0] / most), float(unbiased_D[0] / least)
    return Interval(efficiency.estimate, min(efficiency.low, low), max(efficiency.high, high))


def between_sizes(
    loss: LossError, smaller: LossError, metrics: int = 1, level: float = CONFIDENCE
) -> Interval:
    """Estimate the error of a loss divided by its error in smaller groups.

    The ratio is the efficiency of the smaller groups. The interval is computed on the log scale
    with Student's t, whose degrees of freedom follow from the effective number of prompts behind
    the standard error. If few prompts carry the signal, the standard error is too short. With the
    degrees of freedom of all prompts, the interval missed the true ratio in 9 % of cases
    (`scripts/benchmarks/error_rates.py smaller`, 64 groups). The result is `UNKNOWN` if either
    kappa may be 0, or if the ratio is not positive with all prompts or without one.

    Args:
        loss: error of the loss at n rollouts in groups of G.
        smaller: error of the same loss at n rollouts in groups of g.
        metrics: number of metrics, K, see `ScorePool.metrics`.
        level: coverage of the interval.
    """
    if not (loss.kappa_known and smaller.kappa_known):
        return UNKNOWN
    with np.errstate(divide="ignore", invalid="ignore"):
        ratio_D = loss.error_D / smaller.error_D
    if not (np.isfinite(ratio_D).all() and (ratio_D > 0).all()):
        return UNKNOWN
    variance, dof = effective_variance(ratio_D, metrics)
    return positive_interval(ratio_D[0], variance, dof, level)


def direction(loss: LossError, metrics: int = 1, level: float = CONFIDENCE) -> Interval:
    """Estimate cos^2 of the angle between the mean of a loss's update and the gradient.

    The interval is the union of two intervals. The first is Fieller's set for the share of ||mu||^2
    off the direction of the gradient. This set is accurate if cos^2 is near 1, where the estimate
    of cos^2 is skewed. If the mean has another direction, the upper end of the set for cos^2 is too
    low, because a sample with a small ||mu||^2 has a short standard error. The second is the
    jackknife interval of cos^2 itself, with Student's t for the effective number of prompts. If the
    mean has another direction, the upper end of this interval is accurate, but the lower end is too
    high. The result is `UNKNOWN_DIRECTION` if the two intervals allow every direction.

    Args:
        loss: moments of the loss.
        metrics: number of metrics, K, see `ScorePool.metrics`.
        level: coverage of the interval.
    """
    if not loss.off_direction_sq_D.any():
        return Interval(1.0, 1.0, 1.0)
    off_share = ratio(loss.off_direction_sq_D, loss.mean_sq_D, metrics, level, UNDRAWN_VARIANCE)
    with np.errstate(divide="ignore", invalid="ignore"):
        square_D = 1 - loss.off_direction_sq_D / loss.mean_sq_D
    if not (math.isfinite(off_share.estimate) and np.isfinite(square_D).all()):
        return UNKNOWN_DIRECTION
    variance, dof = effective_variance(square_D, metrics)
    jackknifed = t_interval(square_D[0], variance, dof, level)
    low = max(0.0, min(1 - off_share.high, jackknifed.low))
    high = min(1.0, max(1 - off_share.low, jackknifed.high))
    if low <= 0 and high >= 1:
        return UNKNOWN_DIRECTION
    return Interval(min(1.0, max(0.0, 1 - off_share.estimate)), low, high)


def effective_variance(values_D: Array, metrics: int = 1) -> tuple[float, float]:
    """Return the jackknife variance of a statistic and its degrees of freedom.

    The degrees of freedom follow from the effective number of prompts that carry the variance and
    are at least 1.
    """
    values_Kh = without(values_D, metrics)
    variance = float(jackknife_variance(values_Kh, axis=1).sum())
    dof = min(values_Kh.size, tails(values_Kh, [values_Kh]).carriers) - 1
    return variance, max(1.0, dof)


def best_sizes(errors: Mapping[int, Array], metrics: int = 1) -> tuple[int, list[int]]:
    """Return the G with the smallest error, and all G that are not significantly worse.

    A G is significantly worse if the paired interval of its error minus the smallest error is above
    0. The confidence level is Bonferroni-corrected for the number of sizes. The same data select
    the best G.

    Args:
        errors: error_D by group size.
        metrics: number of metrics, K, see `ScorePool.metrics`.
    """
    best = min(errors, key=lambda size: errors[size][0])
    level = 1 - 0.05 / max(1, len(errors) - 1)
    sizes = [best]
    for size, error_D in errors.items():
        if size != best:
            more_D = error_D - errors[best]
            if not jackknife_interval(more_D[0], without(more_D, metrics), level).low > 0:
                sizes.append(size)
    return best, sorted(sizes)


def positive(values_D: Array, metrics: int = 1, level: float = CONFIDENCE) -> Interval:
    """Return a positive statistic with its jackknife interval on the log scale.

    The result is `UNKNOWN` if the statistic is not positive with all prompts or without one of
    them.
    """
    if not (np.isfinite(values_D).all() and (values_D > 0).all()):
        return UNKNOWN
    return jackknife_interval(values_D[0], without(values_D, metrics), level, positive=True)


def ratio(
    above_D: Array,
    below_D: Array,
    metrics: int = 1,
    level: float = CONFIDENCE,
    undrawn: float = 0.0,
) -> Interval:
    """Return the ratio of two statistics whose true values are at least 0, see `ratio_interval`.

    The result is `UNKNOWN` if either statistic is not finite with all prompts or without one of
    them.
    """
    if not (np.isfinite(above_D).all() and np.isfinite(below_D).all()):
        return UNKNOWN
    return ratio_interval(
        above_D[0], below_D[0], without(above_D, metrics), without(below_D, metrics), level,
        undrawn=undrawn,
    )  # fmt: skip


def without(values_D: Array, metrics: int = 1) -> Array:
    """Return the statistic without each prompt, by metric, [K, h]."""
    return values_D[1:].reshape(-1, metrics).T
