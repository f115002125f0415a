"""Tests that compare a predicted value with a measured value.

A measured value is either enumerated, and then exact, or a mean over replicates. A replicate is one
repetition of a simulation with its own random numbers.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

import numpy as np
from scipy import stats

from grpo_ustat.estimators.intervals import CONFIDENCE, Interval, t_interval
from grpo_ustat.runs.claims import verdict_of
from grpo_ustat.runs.result import AGREES, DISAGREES, OPEN, Claim

# A distance counts as converging to 0 if it shrinks at least as fast as T^-RATE_EXPONENT, where T
# is the number of training steps.
RATE_EXPONENT = 0.25
# A distance counts as approaching 0 if it is at most this fraction of the previous distance.
MAX_REMAINING_SHARE = 0.9


# Convergence of enumerated quantities and of means over replicates to a limit


def enumeration_converges(
    last: float, before: float, tolerance: float, closer: float = MAX_REMAINING_SHARE
) -> bool | None:
    """Test whether an enumerated quantity tends to its limit, for example as G grows.

    The quantity is exact and known at two points, such as two group sizes. The last point is nearer
    to the limit.

    Args:
        last: distance from the limit at the last point.
        before: distance from the limit at the point before it.
        tolerance: largest `last` that counts as having reached the limit.
        closer: largest `last / before` that counts as approaching the limit. At a wrong limit, this
            ratio tends to 1.

    Returns:
        True if `last` is within the tolerance; None if it exceeds the tolerance, but is clearly
        smaller than `before`; False otherwise.

    >>> enumeration_converges(0.01, 0.02, 0.05)
    True
    >>> enumeration_converges(0.1, 0.2, 0.05), enumeration_converges(0.199, 0.2, 0.05)
    (None, False)
    """
    if last <= tolerance:
        return True
    return None if last <= closer * before else False


def enumerated_claim(
    what: str, predicted: float | str, measured: float, agrees: bool | None, how: str
) -> Claim:
    """Make a claim about an enumerated quantity; it has no interval, because it is exact."""
    return Claim(what, predicted, float(measured), None, None, verdict_of(agrees), how)


def tested_claim(
    what: str,
    predicted: float | str,
    measured: Interval | float,
    how: str,
    p_value: float | None,
    *,
    alternatives: Mapping[str, float] | None = None,
    verdict: str = AGREES,
    nearing: bool = False,
) -> Claim:
    """Make a claim that is tested with replicates.

    Args:
        what, predicted, how, p_value: see `Claim`.
        measured: estimate, with its interval if it has one.
        alternatives: see `Claim`; None if there are none.
        verdict: verdict unless Holm's correction rejects the claim.
        nearing: True if the measurement approaches the prediction as T grows. A rejected claim is
            then undecided; otherwise it disagrees.
    """
    values = measured if isinstance(measured, Interval) else (float(measured), None, None)
    rejected = OPEN if nearing else DISAGREES
    claim = Claim(what, predicted, *values, verdict, how, p_value, when_rejected=rejected)
    return replace(claim, alternatives=alternatives or {})


def nearing_claim(
    what: str, predicted: float, values: np.ndarray, tolerance: float, how: str
) -> Claim:
    """Make a claim that an enumerated quantity tends to the prediction.

    `enumeration_converges` decides the claim.

    Args:
        what, predicted, how: see `Claim`.
        values: two values of the quantity, first at the point nearest to the limit and then at the
            point before it.
        tolerance: largest distance from the prediction that counts as having reached it.
    """
    last, before = np.abs(values - predicted).tolist()
    agrees = enumeration_converges(last, before, tolerance)
    return enumerated_claim(what, predicted, values[0], agrees, how)


def limit_claim(
    what: str, predicted: float, values: np.ndarray, tolerance: float, how: str
) -> Claim:
    """Make a claim about the limit, as G grows, of a quantity enumerated at G, 2G and 4G.

    `at_infinity` computes the limit. The claim agrees if this limit is within the tolerance of the
    prediction. Otherwise it is undecided as long as the values approach the prediction.
    """
    limit, (_, before, last) = float(at_infinity(values)), np.abs(values - predicted).tolist()
    near = abs(limit - predicted) <= tolerance
    agrees = near or enumeration_converges(last, before, 0.0)
    return enumerated_claim(what, predicted, limit, agrees, how)


def at_infinity(values: np.ndarray) -> np.ndarray:
    """Extrapolate a quantity from G, 2G and 4G to infinite G.

    Richardson's method removes the terms in 1/G and 1/G^2. The first axis of `values` runs over the
    three group sizes.

    >>> at_infinity(np.array([1 + 1 / g + 3 / g**2 for g in (2, 4, 8)])).item()
    1.0
    """
    return (8 * values[2] - 6 * values[1] + values[0]) / 3


def replicates_converge(
    last_R: np.ndarray, before_R: np.ndarray, last_step: int, before_step: int
) -> bool:
    """Return True if the mean over replicates falls significantly, at least as fast as T^(-1/4).

    The one-sided test has level 5 %: if the mean does not change with the number of steps T, it
    returns True with probability at most 5 %. It is paired, since both steps have the same
    replicates.

    Args:
        last_R: value of each of the R replicates at the last step. Their mean should tend to 0 as T
            grows.
        before_R: value of each replicate at an earlier step.
        last_step, before_step: numbers of the two steps, used as T.
    """
    share = (before_step / last_step) ** RATE_EXPONENT
    excess_R = np.sign(last_R.mean()) * (last_R - share * before_R)
    return mean_p_value(-excess_R, above=True) <= 0.05


# Student's t intervals and p-values


def mean_interval(values_R: np.ndarray, among: int = 1) -> Interval:
    """Return the mean of the values with a t interval.

    Args:
        values_R: value of each of the R replicates.
        among: number of intervals that must hold together; the level is corrected for it
            (Bonferroni).
    """
    count = len(values_R)
    variance = float(values_R.var(ddof=1)) / count
    return t_interval(float(values_R.mean()), variance, count - 1, 1 - (1 - CONFIDENCE) / among)


def mean_p_value(values_R: np.ndarray, above: bool = False) -> float:
    """Return the p-value of a t test.

    The hypothesis is that the mean is 0, or, if `above` is set, that the mean is at most 0.

    >>> round(mean_p_value(np.array([1.0, 2.0, 3.0])), 4)  # t_2 = 2 sqrt(3)
    0.0742
    """
    mean, error = values_R.mean(), values_R.std(ddof=1) / np.sqrt(len(values_R))
    if error == 0:
        return float(mean <= 0 if above else mean == 0)
    score = mean / error
    dof = len(values_R) - 1
    return float(stats.t.sf(score, dof) if above else 2 * stats.t.sf(abs(score), dof))


def interval_p_value(
    interval: Interval, dof: float, predicted: float, tolerance: float = 0.0
) -> float:
    """Compute the two-sided p-value of a predicted value from a confidence interval.

    The p-value is below 0.05 if and only if the prediction lies outside the interval by more than
    the tolerance. With a tolerance above 0 the p-value is conservative.

    Args:
        interval: interval from `t_interval` at level `CONFIDENCE`.
        dof: degrees of freedom of the interval.
        predicted: value that the theory predicts.
        tolerance: largest distance at which a value counts as equal to the prediction.

    >>> around = Interval(1.0, 0.0, 2.0)  # its half-width is t_4's quantile of 97.5 %
    >>> [round(interval_p_value(around, 4, x), 3) for x in (1.0, 2.0, 3.0)]
    [1.0, 0.05, 0.005]
    >>> round(interval_p_value(around, 4, 3.0, tolerance=1.0), 3)
    0.05
    """
    error = (interval.high - interval.estimate) / stats.t.ppf((1 + CONFIDENCE) / 2, dof)
    distance = max(abs(interval.estimate - predicted) - tolerance, 0.0)
    if error == 0:
        return float(distance == 0)
    return float(2 * stats.t.sf(distance / error, dof))
