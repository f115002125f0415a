"""Bounds on the zero-variance share from logged averages."""

import itertools

import numpy as np
import pytest

from grpo_ustat.estimators.intervals import Interval
from grpo_ustat.estimators.zero_variance_bounds import zero_variance_bounds


def exact(value):
    return Interval(value, value, value)


def share(p, size):
    return float(np.mean(p**size + (1 - p) ** size))


def mixture(generator, kind):
    """Draw success probabilities of prompts: beta, few points, or points with exact 0 and 1."""
    if kind == 0:
        return generator.beta(*generator.uniform(0.05, 4, 2), size=200)
    points = generator.uniform(size=generator.integers(1, 5))
    if kind == 2:
        points = np.concatenate([points, [0.0, 1.0]])
    return generator.choice(points, size=200)


@pytest.mark.parametrize("kind", range(3))
def test_share_of_a_mixture_lies_inside(kind):
    generator = np.random.default_rng(kind)
    for _ in range(8):
        p = mixture(generator, kind)
        for size in (2, 4, 16, 64):
            bounds = zero_variance_bounds(size, {8: exact(share(p, 8))}, exact(p.mean()))
            assert bounds is not None
            assert bounds[0] <= share(p, size) <= bounds[1]


def test_bounds_are_attained_by_mixtures_of_three_points():
    """Two constraints leave an extreme mixture at most three points; here all triples are tried."""
    p = np.array([0.2, 0.9])
    bounds = zero_variance_bounds(4, {8: exact(share(p, 8))}, exact(p.mean()))
    attained = []
    for points in itertools.combinations(np.linspace(0, 1, 41), 3):
        x = np.array(points)
        equations = np.stack([np.ones(3), x, x**8 + (1 - x) ** 8])
        weights = np.linalg.solve(equations, [1.0, p.mean(), share(p, 8)])
        if weights.min() >= 0:
            attained.append(float(weights @ (x**4 + (1 - x) ** 4)))
    assert (min(attained), max(attained)) == pytest.approx(bounds, abs=2e-3)
    assert bounds[0] <= min(attained) < max(attained) <= bounds[1]


def test_rewards_of_several_values_use_the_powers_of_the_share():
    low, high = zero_variance_bounds(16, {4: exact(0.3)})
    assert low == pytest.approx(0.3 ** (15 / 3), abs=1e-4)
    assert high == pytest.approx(0.3, abs=1e-4)
    low, high = zero_variance_bounds(2, {4: exact(0.3)})
    assert low == pytest.approx(0.3, abs=1e-4)
    assert high == pytest.approx(0.3 ** (1 / 3), abs=1e-4)


def test_plug_in_of_the_mean_reward_is_below_the_bounds():
    """The mean reward is 0.5 and prompts have 0.1 and 0.9."""
    p = np.array([0.1, 0.9])
    low, high = zero_variance_bounds(16, {8: exact(share(p, 8))}, exact(0.5))
    assert low <= share(p, 16) <= high
    assert low > 2 * 0.5**16


def test_no_mixture_has_fewer_zero_variance_groups_than_equal_prompts():
    assert zero_variance_bounds(4, {8: exact(0.001)}, exact(0.5)) is None


def test_wider_intervals_give_wider_bounds():
    narrow = zero_variance_bounds(16, {8: Interval(0.4, 0.39, 0.41)}, exact(0.6))
    wide = zero_variance_bounds(16, {8: Interval(0.4, 0.3, 0.5)}, exact(0.6))
    assert wide[0] < narrow[0] < narrow[1] < wide[1]
