"""Problems: every formula against finite differences of the law, every promise at random places."""

from __future__ import annotations

from itertools import product

import numpy as np
import pytest
from problems import coins, softmax

from grpo_ustat.gap.problems import PROBLEMS

SMALL = 1e-6


@pytest.fixture(params=[coins, softmax], ids=["coins", "softmax"])
def problem(request):
    return request.param()


def inside(problem, rng, count=20):
    grid_KR = problem.sublevel_grid()
    return grid_KR[:, rng.integers(grid_KR.shape[1], size=count)]


def shifted(u_KR, k, by):
    step = np.zeros_like(u_KR)
    step[k] = by
    return u_KR + step


def test_probabilities_are_a_law_and_scores_have_mean_zero(problem, rng):
    probability_PYR, score_PYKR = problem.law(inside(problem, rng))
    assert probability_PYR.min() > 0
    np.testing.assert_allclose(probability_PYR.sum(axis=1), 1, atol=1e-14)
    mean = np.einsum("pyr,pykr->pkr", probability_PYR, score_PYKR)
    np.testing.assert_allclose(mean, 0, atol=1e-14)


def test_scores_are_derivatives_of_log_probabilities(problem, rng):
    u_KR = inside(problem, rng)
    for k in range(2):
        up, down = (np.log(problem.law(shifted(u_KR, k, s * SMALL))[0]) for s in (1, -1))
        np.testing.assert_allclose(problem.law(u_KR)[1][:, :, k], (up - down) / 2e-6, atol=1e-8)


def test_gradient_and_curvature_are_derivatives_of_the_objective(problem, rng):
    u_KR = inside(problem, rng, 4)
    for k in range(2):
        up, down = (shifted(u_KR, k, s * SMALL) for s in (1, -1))
        slope_R = (problem.objective(up) - problem.objective(down)) / 2e-6
        np.testing.assert_allclose(problem.gradient(u_KR)[k], slope_R, atol=1e-9)
        bend_KR = -(problem.gradient(up) - problem.gradient(down)) / 2e-6
        curvature = np.stack([problem.curvature_at(u)[k] for u in u_KR.T], axis=1)
        np.testing.assert_allclose(curvature, bend_KR, atol=1e-8)


def test_the_maximiser_is_one(problem, rng):
    assert np.abs(problem.gradient(problem.best_K[:, None])).max() < 1e-12
    assert (np.linalg.eigvalsh(problem.curvature_KK) > 0).all()
    assert (problem.gap(inside(problem, rng)) >= -1e-15).all()


def test_constants_hold_between_the_points_of_their_grid(problem, rng):
    mu, smoothness = problem.constants
    u_KR = problem.best_K[:, None] + rng.uniform(-0.2, 0.2, (2, 400))
    u_KR = u_KR[:, problem.gap(u_KR) <= problem.reach]
    assert u_KR.shape[1] > 100
    slope_R = np.square(problem.gradient(u_KR)).sum(axis=0)
    assert (slope_R / 2 >= 0.999 * mu * problem.gap(u_KR)).all()
    largest = max(np.abs(np.linalg.eigvalsh(problem.curvature_at(u))).max() for u in u_KR.T)
    assert largest <= 1.001 * smoothness


def test_coins_are_exactly_quadratic(rng):
    problem = coins()
    u_KR = inside(problem, rng)
    expected = (np.array([[1.0], [0.6]]) * u_KR**2).sum(axis=0) / 2
    np.testing.assert_allclose(problem.gap(u_KR), expected, atol=1e-15)
    assert problem.constants == (0.6, 1.0) and problem.highest == pytest.approx(0.5, abs=1e-15)


@pytest.mark.parametrize("name", PROBLEMS)
def test_every_problem_is_a_policy_in_its_box_and_starts_in_its_sublevel_set(name):
    """Probabilities of coins are concave or linear in u: they are least at a corner of the box."""
    problem = PROBLEMS[name]
    assert 0 <= problem.gap(problem.start_K[:, None])[0] <= problem.reach
    assert problem.least_curvature > 0 and 0 < problem.highest < 1
    if np.isfinite(problem.box_K).all():
        corners = np.array(list(product(*([-b, b] for b in problem.box_K)))).T
        assert problem.law(problem.best_K[:, None] + corners)[0].min() > 4e-4
