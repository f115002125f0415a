"""Tests of claims: enumerated claims without error, and claims on replicates."""

from __future__ import annotations

import numpy as np
from scipy import stats

from grpo_ustat.estimators.intervals import CONFIDENCE, Interval, t_interval
from grpo_ustat.runs.claims import verdict_of
from grpo_ustat.runs.result import Claim

# Distances that shrink at least like T^-RATE_EXPONENT are on their way to 0.
RATE_EXPONENT = 0.25
# Largest share of the distance before, if distances fall towards 0.
MAX_REMAINING_SHARE = 0.9


# Convergence to a limit: of numbers without error, and of replicates


def enumeration_converges(
    last: float, before: float, tolerance: float, closer: float = MAX_REMAINING_SHARE
) -> bool | None:
    """Return True if an enumerated quantity, which has no error, tends to its limit.

    True within the tolerance, None if it is further off and comes closer, else False.

    Args:
        last: distance from the limit at the last point.
        before: distance at the point before.
        tolerance: of `last`.
        closer: the share of `before` that `last` may be at most: towards a wrong limit the distance
            does not fall.

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
    """Make a claim on an enumerated quantity: it has no interval, and its verdict is certain."""
    return Claim(what, predicted, float(measured), None, None, verdict_of(agrees), how)


def nearing_claim(
    what: str, predicted: float, values: np.ndarray, tolerance: float, how: str
) -> Claim:
    """Make a claim on an enumerated quantity that tends to the prediction.

    See `enumeration_converges`.

    Args:
        what, predicted, how: see `Claim`.
        values: at the point nearest to the limit, and at the one before.
        tolerance: distance at which the prediction is reached.
    """
    last, before = np.abs(values - predicted).tolist()
    agrees = enumeration_converges(last, before, tolerance)
    return enumerated_claim(what, predicted, values[0], agrees, how)


def limit_claim(
    what: str, predicted: float, values: np.ndarray, tolerance: float, how: str
) -> Claim:
    """Make a claim on the limit in G of a quantity that is enumerated at G, 2G and 4G.

    See `at_infinity`. The claim is not decided if the limit is further off than the tolerance but
    the values come closer.
    """
    limit, (_, before, last) = float(at_infinity(values)), np.abs(values - predicted).tolist()
    near = abs(limit - predicted) <= tolerance
    agrees = near or enumeration_converges(last, before, 0.0)
    return enumerated_claim(what, predicted, limit, agrees, how)


def at_infinity(values: np.ndarray) -> np.ndarray:
    """Return the limit in G of a quantity at G, 2G and 4G: terms in 1/G and 1/G^2 cancel.

    Richardson's extrapolation; values along the first axis.

    >>> at_infinity(np.array([1 + 1 / g + 3 / g**2 for g in (2, 4, 8)])).item()
    1.0
    """
    return (8 * values[2] - 6 * values[1] + values[0]) / 3


def replicates_converge(
    last_R: np.ndarray, before_R: np.ndarray, last_step: int, before_step: int
) -> bool:
    """Return True if the replicates' mean tends to 0 with T, at least like T^(-1/4).

    The test is one-sided at 5 %: a mean that does not move is taken to shrink at most that often.
    It is paired, since the replicates are the same at both steps.

    Args:
        last_R: values whose mean tends to 0, at the last step.
        before_R: the values at an earlier step.
    """
    share = (before_step / last_step) ** RATE_EXPONENT
    excess_R = np.sign(last_R.mean()) * (last_R - share * before_R)
    return mean_p_value(-excess_R, above=True) <= 0.05


# Intervals and p-values of Student's t: from replicates, and from an interval


def mean_interval(values_R: np.ndarray, among: int = 1) -> Interval:
    """Return the mean over replicates, one of `among` simultaneous intervals (Bonferroni)."""
    count = len(values_R)
    variance = float(values_R.var(ddof=1)) / count
    return t_interval(float(values_R.mean()), variance, count - 1, 1 - (1 - CONFIDENCE) / among)


def mean_p_value(values_R: np.ndarray, above: bool = False) -> float:
    """Return the p-value of replicates for a mean of 0, or with `above` for a mean of 0 or less.

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
    """Return the two-sided p-value, from an interval, for the predicted value.

    It is below 0.05 exactly if the prediction is further than the tolerance from the interval; with
    a tolerance above 0 it errs towards large values.

    Args:
        interval: of `t_interval`, at `CONFIDENCE`.
        dof: its degrees of freedom.
        tolerance: the distance up to which a value counts as the predicted one.

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
