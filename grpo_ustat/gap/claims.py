"""Claims: a prediction beside its measurement, how each is tested, and when a study disagrees."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import replace

import numpy as np
from scipy import stats

from grpo_ustat.estimators.intervals import LEVEL, Interval, t_interval
from grpo_ustat.runs.result import AGREES, DISAGREES, OPEN, Claim

FAMILY = 0.05  # studies without an error in theory that disagree, at most

RATE_EXPONENT = 0.25  # distances that shrink at least like T^-RATE_EXPONENT are on their way to 0
CLOSER = 0.9


def correct_family(claims: Sequence[Claim]) -> list[Claim]:
    """Claims with the verdicts that they have as a family (Holm 1979).

    A claim with a p-value disagrees only where Holm's step-down correction over all such claims of
    the study rejects it at 5 %. So of studies whose predictions all hold at most 5 % disagree,
    however their claims depend on each other. An alternative disagrees where its p-value is at most
    5 % of the family's first step. Correcting twice changes nothing.
    """
    p_values = [claim.p_value for claim in claims if claim.p_value is not None]
    holm = iter(holm_adjust(p_values))
    family = []
    for claim in claims:
        if claim.p_value is not None:
            holm_p, verdict, severity = next(holm), claim.verdict, claim.severity
            if holm_p <= FAMILY:
                verdict = claim.when_rejected or (OPEN if verdict == OPEN else DISAGREES)
            elif verdict == DISAGREES:
                verdict = AGREES
            if claim.alternatives:
                p_of = claim.alternatives.items()
                agreeing = [name for name, p in p_of if p * len(p_values) > FAMILY]
                severity = f"{len(agreeing)} of {len(p_of)} alternatives would also have agreed"
                severity += f": {', '.join(agreeing)}" if agreeing else ""
            claim = replace(claim, verdict=verdict, holm_p=holm_p, severity=severity)
        family.append(claim)
    return family


def holm_adjust(p_values: Sequence[float]) -> list[float]:
    """Holm's adjusted p-values: reject those at most 5 % for a family-wise error of 5 %.

    >>> holm_adjust([0.04, 0.01, 0.03])
    [0.06, 0.03, 0.06]
    """
    order, count = np.argsort(p_values, kind="stable"), len(p_values)
    steps = [min(1.0, (count - i) * p_values[j]) for i, j in enumerate(order)]
    adjusted = np.empty(count)
    adjusted[order] = np.maximum.accumulate(steps) if count else steps
    return adjusted.tolist()


def verdict_of(agrees: bool | None) -> str:
    """The verdict's word; None is not decided.

    >>> verdict_of(True), verdict_of(False), verdict_of(None)
    ('agrees', 'disagrees', 'not decided')
    """
    return OPEN if agrees is None else AGREES if agrees else DISAGREES


def worst_verdict(claims: Sequence[Claim]) -> str:
    """`disagrees` where any claim does, else `not decided` where any is not, else `agrees`."""
    verdicts = {claim.verdict for claim in claims}
    return next((verdict for verdict in (DISAGREES, OPEN) if verdict in verdicts), AGREES)


def comma_list(values: Iterable[int]) -> str:
    """Numbers in a sentence.

    >>> comma_list([2, 4, 8])
    '2, 4, 8'
    """
    return ", ".join(map(str, values))


# Whether something tends to its limit: of numbers without error, and of replicates


def enumeration_converges(
    last: float, before: float, tolerance: float, closer: float = CLOSER
) -> bool | None:
    """Whether an enumerated quantity, which has no error, tends to its limit.

    True within the tolerance, None where further off and coming closer, else False.

    Args:
        last: distance from the limit at the last point.
        before: at the one before.
        tolerance: of the last.
        closer: the share of `before` that `last` may be at most: towards a wrong limit the distance
            stays.

    >>> enumeration_converges(0.01, 0.02, 0.05)
    True
    >>> enumeration_converges(0.1, 0.2, 0.05), enumeration_converges(0.199, 0.2, 0.05)
    (None, False)
    """
    if last <= tolerance:
        return True
    return None if last <= closer * before else False


def replicates_converge(
    last_R: np.ndarray, before_R: np.ndarray, last_step: int, before_step: int
) -> bool:
    """Whether replicates show their mean to tend to 0 with T, at least like T^(-1/4).

    One-sided, 5 %: a mean that stays where it is is taken to shrink at most that often. The same
    replicates at both steps, so that the test is paired.

    Args:
        last_R: whose mean tends to 0, at the last step.
        before_R: at an earlier one.
        last_step, before_step: the steps.
    """
    share = (before_step / last_step) ** RATE_EXPONENT
    excess_R = np.sign(last_R.mean()) * (last_R - share * before_R)
    return mean_p_value(-excess_R, above=True) <= 0.05


# Intervals and p-values of Student's t: from replicates, and from an interval alone


def mean_interval(values_R: np.ndarray, among: int = 1) -> Interval:
    """The mean over replicates; one of so many intervals that hold together (Bonferroni)."""
    count = len(values_R)
    variance = float(values_R.var(ddof=1)) / count
    return t_interval(float(values_R.mean()), variance, count - 1, 1 - (1 - LEVEL) / among)


def mean_p_value(values_R: np.ndarray, above: bool = False) -> float:
    """From replicates: that their mean is 0; with `above` that it is 0 or less.

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
    """From an interval alone, a jackknife's too: that the true value is as predicted, two-sided.

    Below 0.05 exactly where the prediction is further than the tolerance from the interval; with a
    tolerance above 0 it errs towards large values.

    Args:
        interval: of `t_interval`, at `LEVEL`.
        dof: its degrees of freedom.
        predicted: the value.
        tolerance: how far off is still the predicted value.

    >>> around = Interval(1.0, 0.0, 2.0)  # its half-width is t_4's quantile of 97.5 %
    >>> [round(interval_p_value(around, 4, x), 3) for x in (1.0, 2.0, 3.0)]
    [1.0, 0.05, 0.005]
    >>> round(interval_p_value(around, 4, 3.0, tolerance=1.0), 3)
    0.05
    """
    error = (interval.high - interval.estimate) / stats.t.ppf((1 + LEVEL) / 2, dof)
    distance = max(abs(interval.estimate - predicted) - tolerance, 0.0)
    if error == 0:
        return float(distance == 0)
    return float(2 * stats.t.sf(distance / error, dof))
