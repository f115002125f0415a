"""The interval of the best group size against Fieller's quadratic, and its corrected estimate."""

from __future__ import annotations

import math

import numpy as np
import pytest
from scipy import stats

from grpo_ustat.estimators.intervals import Tails, tails
from grpo_ustat.estimators.scaling import (
    ScalingEstimate,
    best_group_size,
    group_size_interval,
    scaling_estimate,
    widening,
)

MIDDLE = np.array([1.2, 3.0, 9.0])


def sample(rng, noise, count=20):
    """C1, C2, C3 of a mean of `count` units, whole and with each left out, and the units."""
    units = MIDDLE + noise * rng.normal(size=(count, 3)) @ np.array(
        [[1, 0.3, 0.5], [0, 1, 0.2], [0, 0, 1]]
    )
    deleted = (units.sum(axis=0) - units) / (count - 1)
    names = ("c1", "c2", "c3")
    whole = dict(zip(names, units.mean(axis=0), strict=True))
    return whole, {name: deleted[:, i][None] for i, name in enumerate(names)}, units


def fieller(units):
    """The ends of {C3/C1} by the quadratic (Fieller 1954) and whether the set is bounded."""
    count = len(units)
    (a, _, b), t = units.mean(axis=0), stats.t.ppf(0.975, count - 1)
    covariance = np.cov(units.T) / count
    square = a * a - t * t * covariance[0, 0]
    linear = -2 * (a * b - t * t * covariance[0, 2])
    roots = np.roots([square, linear, b * b - t * t * covariance[2, 2]])
    return np.sort(roots), square > 0


def test_it_is_fiellers_interval_of_the_ratio(rng):
    for _ in range(20):
        whole, deleted, units = sample(rng, 0.8)
        found = group_size_interval(whole, deleted, 1.0)
        roots, bounded = fieller(units)
        assert bounded
        assert found.low == pytest.approx(1 + roots[0] ** 0.5, rel=1e-6)
        assert found.high == pytest.approx(1 + roots[1] ** 0.5, rel=1e-6)
        assert found.low < found.estimate < found.high


def test_where_c1_may_be_0_there_is_no_upper_end():
    rng, found_any = np.random.default_rng(1), 0
    for _ in range(50):
        whole, deleted, units = sample(rng, 2.5)
        roots, bounded = fieller(units)
        found = group_size_interval(whole, deleted, 1.0)
        if not bounded and np.isreal(roots).all() and roots[1] > 0:
            found_any += 1
            assert found.low == pytest.approx(1 + roots[roots > 0].min() ** 0.5, rel=1e-6)
            assert math.isinf(found.high)
    assert found_any >= 3


def test_with_a_prompt_cost_the_set_is_where_the_slope_may_be_0(rng):
    """At both ends the derivative of the cost's error is one critical value from 0."""
    whole, deleted, units = sample(rng, 0.5)
    found = group_size_interval(whole, deleted, 1.0, 5.0, 2.0)
    for end in (found.low, found.high):

        def error(g, c):
            return (5 + 2 * g) * (c[..., 0] + c[..., 1] / g + c[..., 2] / (g * (g - 1)))

        step = 1e-5
        slope_n = (error(end + step, units) - error(end - step, units)) / (2 * step)
        score = slope_n.mean() / (slope_n.std(ddof=1) / len(units) ** 0.5)
        assert abs(score) == pytest.approx(stats.t.ppf(0.975, len(units) - 1), rel=1e-4)
    assert found.low < best_group_size(*MIDDLE, 5.0, 2.0) < found.high


def test_widening_is_a_larger_critical_value_by_hand(rng):
    """16 prompts of 16: t is 2.1314, and 16/64 + 3500/4096 are added; 1 where there are many."""
    assert widening(16, 16) == pytest.approx((2.13145 + 0.25 + 0.854492) / 2.13145, rel=1e-5)
    assert widening(500, 32) == pytest.approx(1.0042, abs=1e-4)
    whole, deleted, units = sample(rng, 0.5)
    factor = widening(20, 8)
    wide = group_size_interval(whole, deleted, factor)
    spread = units.mean(axis=0) + factor * (units - units.mean(axis=0))
    roots, bounded = fieller(spread)
    assert bounded == math.isfinite(wide.high)
    assert wide.low == pytest.approx(1 + roots[roots > 0].min() ** 0.5, rel=1e-6)
    covariance_33 = scaling_estimate(whole, deleted, factor).covariance_33
    np.testing.assert_allclose(covariance_33, np.cov(spread.T) / 20, rtol=1e-10)


def test_tails_by_hand():
    """Means 2 and 4, squared standard errors 1/3 and 4/3 of 3 values each: 36 / (5/3)."""
    values = np.array([[1.0, 2.0, 3.0], [2.0, 4.0, 6.0]])
    deleted = np.array([[0.0, 3.0, 3.0]])  # deviations -2, 1, 1: (4 + 1 + 1)^2 / (16 + 1 + 1) = 2
    found = tails(values, [deleted, np.array([[1.0, -1.0, 0.0, 0.0]])])
    assert found.effective_size == pytest.approx(36 / (5 / 3))
    assert found.carriers == pytest.approx(2.0)
    assert tails(np.ones((2, 3)), [np.zeros((2, 3))]) == (math.inf, math.inf)
    assert Tails(79, 50).heavy and Tails(500, 2.9).heavy and not Tails(81, 3.1).heavy


def law(c1, c2, c3, covariance=None, dof=1e9):
    return ScalingEstimate(
        np.array([c1, c2, c3]), np.zeros((3, 3)) if covariance is None else covariance, dof
    )


def test_extra_errors_by_hand():
    """n MSE = G + 2 + 9/(G-1): 13, 9 and 8 + 2 + 9/7 at G = 2, 4 and 8."""
    estimate = law(1.0, 2.0, 9.0)
    assert estimate.best_of([2, 4, 8, 16]) == 4
    assert estimate.extra_error(2, 4) == pytest.approx((4 / 9,) * 3)
    assert estimate.extra_error(8, 4).estimate == pytest.approx((10 + 9 / 7) / 9 - 1)
    assert estimate.extra_error(4, 4) == (0.0, 0.0, 0.0)
    assert np.isnan(law(-3.0, 2.0, 9.0).extra_error(16, 2)).all()


def test_an_error_estimated_near_0_has_no_upper_end():
    """C1 of 1e-5 with a standard error of 1: neither error is known to be above 0."""
    estimate = ScalingEstimate(np.array([1e-5, 0.0, 1e-5]), np.eye(3), 10.0)
    extra, low, high = estimate.extra_error(16, 2)
    assert extra > 0 and low == -1 and high == math.inf


def test_the_ends_of_an_extra_error_are_where_a_t_test_of_the_units_is_at_scheffes_value(rng):
    """f(16) - r f(4) of each unit, over its standard error, at both ends r of the interval."""
    whole, delete_one, units = sample(rng, 1.0)
    estimate = scaling_estimate(whole, delete_one, 1.0)
    assert estimate.dof == pytest.approx(len(units) - 1)
    np.testing.assert_allclose(estimate.covariance_33, np.cov(units.T) / len(units), rtol=1e-10)
    errors_2N = [units @ [g, 1, 1 / (g - 1)] for g in (16, 4)]
    extra = estimate.extra_error(16, 4)
    critical = math.sqrt(2 * stats.f.ppf(0.95, 2, len(units) - 1))
    for end in extra[1:]:
        difference_N = errors_2N[0] - (1 + end) * errors_2N[1]
        score = difference_N.mean() / (difference_N.std(ddof=1) / len(units) ** 0.5)
        assert abs(score) == pytest.approx(critical, rel=1e-6)
    assert extra.low < extra.estimate < extra.high


@pytest.mark.slow
def test_extra_errors_hold_together_against_a_reference_that_the_data_chose():
    """2000 Gaussian studies: every interval at once, and what plain intervals would do."""
    rng, sizes, exact = np.random.default_rng(2), (2, 4, 8, 16, 32), law(*MIDDLE)
    joint = plain = 0
    factor = 1.96**2 / (2 * stats.f.ppf(0.95, 2, 59))
    for _ in range(2000):
        whole, delete_one, _ = sample(rng, 2.0, count=60)
        estimate = scaling_estimate(whole, delete_one, 1.0)
        narrow = estimate._replace(covariance_33=factor * estimate.covariance_33)
        best = estimate.best_of(sizes)

        def holds(one, best=best):
            truths = [exact.extra_error(size, best).estimate for size in sizes]
            ends = [one.extra_error(size, best)[1:] for size in sizes]
            return all(
                low - 1e-12 <= truth <= high + 1e-12
                for truth, (low, high) in zip(truths, ends, strict=True)
            )

        joint, plain = joint + holds(estimate), plain + holds(narrow)
    assert 0.945 < joint / 2000 < 0.995
    assert plain < joint  # a control: intervals of each by itself hold together less often


def test_prompts_for_a_bounded_interval_solve_their_own_equation():
    """C1 of 1.2 with a standard error of .5 at 16 prompts of 8, C3 known better: at the number of
    the lower end (1.2 + 2 x .5) / .5 standard errors, grown by the root of the prompts, are the
    critical value; at that of the upper end 1.2 / .5 less .4 of it are 1.64 beyond it.
    """

    def critical(count):
        return stats.t.ppf(0.975, count - 1) * widening(count, 8)

    covariance = widening(16, 8) ** 2 * np.diag([0.25, 1.0, 0.01])
    low, high = law(1.2, 2.0, 9.0, covariance).prompts_for_best_size(16, 8)
    for count, ratio, margin, rounding in (
        (low, 4.4, 0.0, 0.5), (high, 2.4 - 0.4 * critical(16), 1.64, 0.02)
    ):  # fmt: skip
        reached = ratio * (count / 16) ** 0.5 - critical(round(count))
        assert reached == pytest.approx(margin, abs=rounding)
    assert 16 < low < high < math.inf
    assert law(9.0, 2.0, 9.0, covariance).prompts_for_best_size(16, 8)[0] == 16
    assert law(0.3, 2.0, 9.0, covariance).prompts_for_best_size(16, 8)[1] == math.inf
    worse = law(1.2, 2.0, 0.02, covariance)
    assert worse.prompts_for_best_size(16, 8)[0] > low
