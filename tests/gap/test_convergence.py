"""Bounds, recursions and the limit law: closed forms, worked numbers, simulated mixtures."""

from __future__ import annotations

import numpy as np
import pytest
from scipy.stats import chi2

from grpo_ustat.gap.convergence import (
    decaying_bound,
    limit_weights,
    mixture_cdf,
    mixture_quantiles,
    quadratic_recursion,
    recursion,
)


def test_a_constant_rate_has_the_closed_form():
    mu, smoothness, error, eta, steps = 0.3, 2.0, 0.7, 0.25, 40
    r = 1 - 2 * mu * eta + mu * smoothness * eta**2
    powers = r ** np.arange(steps + 1)
    expected = powers * 1.5 + smoothness * eta**2 * error / 2 * (1 - powers) / (1 - r)
    found = recursion(1.5, mu, smoothness, error, np.full(steps, eta))
    np.testing.assert_allclose(found, expected, rtol=1e-12)


def test_a_falling_rate_approaches_its_bound():
    mu, smoothness, error, c, steps = 0.4, 1.0, 0.5, 4.0, 200_000
    found = recursion(1.0, mu, smoothness, error, c / (np.arange(1, steps + 1) + 10))
    bound = decaying_bound(mu, smoothness, error, c, np.array([steps + 10]))
    assert found[-1] == pytest.approx(bound[0], rel=1e-3)
    with pytest.raises(ValueError, match="c=1.0 with mu=0.4: .* use c > 1.25"):
        decaying_bound(mu, smoothness, error, 1.0, np.array([1]))


def test_isotropic_quadratics_meet_the_bound_with_equality():
    """With mu = L the recursion of the bound is that of the quadratic."""
    rates = np.array([0.5, 0.3, 0.2, 0.7])
    model = quadratic_recursion(np.array([2.0, 1.0]), 0.8 * np.eye(2), 0.3 * np.eye(2), rates)
    bound = recursion(0.8 * 5 / 2, 0.8, 0.8, 0.6, rates)
    np.testing.assert_allclose(model, bound, rtol=1e-14)


@pytest.mark.slow
def test_the_limit_is_that_of_the_recursion():
    """T times the mean gap of the quadratic tends to the sum of the weights."""
    basis = np.linalg.qr(np.array([[1.0, 2.0], [0.5, -1.0]]))[0]
    curvature = basis @ np.diag([0.5, 1.5]) @ basis.T
    sigma = np.array([[0.4, 0.1], [0.1, 0.2]])
    weights = limit_weights(curvature, sigma, 2.0)
    steps = 100_000
    rates = 2.0 / np.arange(1, steps + 1)
    model = quadratic_recursion(np.zeros(2), curvature, sigma, rates)
    assert steps * model[-1] == pytest.approx(weights.sum(), rel=2e-4)
    with pytest.raises(ValueError, match="c=0.9 with smallest curvature 0.5: .* use c > 1"):
        limit_weights(curvature, sigma, 0.9)


def test_mixtures_of_equal_weights_are_chi_squares():
    x = np.linspace(0.0, 8.0, 300)
    for count in (1, 2, 4):
        found = mixture_cdf(np.full(count, 0.3), x)
        np.testing.assert_allclose(found, chi2.cdf(x / 0.3, count), atol=2e-6)
        quantiles = mixture_quantiles(np.full(count, 0.3), [0.05, 0.5, 0.99])
        np.testing.assert_allclose(quantiles, 0.3 * chi2.ppf([0.05, 0.5, 0.99], count), rtol=1e-6)


def test_unequal_mixtures_are_as_simulated(rng):
    """2 000 000 draws: a frequency is within 5 standard errors, 0.0018."""
    weights = np.array([0.5, 0.2, 0.05])
    drawn = np.square(rng.standard_normal((2_000_000, 3))) @ weights
    points = np.array([0.01, 0.1, 0.4, 1.0, 3.0])
    frequencies = [(drawn <= x).mean() for x in points]
    np.testing.assert_allclose(mixture_cdf(weights, points), frequencies, atol=0.0018)
    levels = [0.1, 0.5, 0.9]
    found = mixture_cdf(weights, mixture_quantiles(weights, levels))
    np.testing.assert_allclose(found, levels, atol=1e-5)
