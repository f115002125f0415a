"""Proposition 13: fields and roots by enumeration, ends of runs, verdicts at fixed G."""

from __future__ import annotations

import itertools
import math

import numpy as np
import pytest
from problems import unequal
from reference import plain_advantages, variance_of

from grpo_ustat.gap.lemma11 import mean_weight
from grpo_ustat.gap.proposition13 import field, maximiser, pull_of, root
from grpo_ustat.gap.simulate import Estimator, gradient, reference_law

KL = {"beta": 1.0, "reference": (0.3,)}


def walked_field(problem, one, u, old):
    """Mean of the estimate over all groups of each prompt, pi_old at `old`."""
    own_PYR, score_PYKR = problem.law(np.array([[u]]))
    old_PYR = problem.law(np.array([[old]]))[0]
    reference_PY = problem.law(np.array([[0.3]]))[0][..., 0]
    mean = 0.0
    for p in range(len(problem.rewards_PY)):
        for group in itertools.product(range(4), repeat=one.group_size):
            rewards = [float(problem.rewards_PY[p, y]) for y in group]
            std = math.sqrt(variance_of(rewards))
            advantages = plain_advantages("leave_one_out", rewards, None)
            chance = math.prod(old_PYR[p, list(group), 0])
            for a, y in zip(advantages, group, strict=True):
                ratio = own_PYR[p, y, 0] / old_PYR[p, y, 0]
                pull = ratio * a / std if std > 0 else 0.0
                pull += one.beta * (reference_PY[p, y] / own_PYR[p, y, 0] - 1)
                mean += chance * pull * score_PYKR[p, y, 0, 0] / one.group_size
    return mean / len(problem.rewards_PY)


@pytest.mark.parametrize("changes", [{}, KL])
@pytest.mark.parametrize("size", [2, 3, 4])
def test_the_field_is_the_mean_over_all_groups(size, changes):
    problem, one = unequal(), Estimator("leave_one_out_std", 1, size, **changes)
    for u in (-0.1, 0.05):
        expected = walked_field(problem, one, u, u)
        assert field(problem, pull_of(one), u, one) == pytest.approx(expected, rel=1e-10)


def test_simulated_estimates_have_the_field_for_their_mean(rng):
    """100 000 batches, within 4 standard errors; and the closed forms of G = 2 and G = oo."""
    problem, one = unequal(), Estimator("leave_one_out_std", 2, 4, 0.01, **KL)
    u_KR = np.full((1, 100_000), 0.1)
    uniform = rng.random((10, 100_000), dtype=np.float32)
    law, reference_PY = problem.law(u_KR), reference_law(problem, one)
    drawn = gradient(problem, one, law, uniform, None, reference_PY)[0]
    expected = field(problem, pull_of(one), 0.1, one)
    assert abs(drawn.mean() - expected) < 4 * drawn.std() / np.sqrt(drawn.size)
    of_two, of_many = (mean_weight(np.array(0.3), size, 0.0) for size in (2, 20_000))
    assert of_two == pytest.approx(np.sqrt(2), rel=1e-12)
    assert of_many == pytest.approx(1 / np.sqrt(0.21), rel=1e-3)


@pytest.mark.parametrize("changes", [{}, KL])
def test_maximisers_are_those_of_a_grid(changes):
    problem = unequal()
    u = np.linspace(-0.2, 0.2, 4001)
    law_PYR = problem.law(u[None])[0]
    lost_R = 0.0
    if changes:
        reference_PY1 = problem.law(np.array([[0.3]]))[0]
        lost_R = (reference_PY1 * np.log(reference_PY1 / law_PYR)).sum(axis=1).mean(axis=0)
    value_PR = problem.value(law_PYR)
    arcsin_R = (2 * np.arcsin(np.sqrt(value_PR))).mean(axis=0) - lost_R
    normalised = maximiser(problem, Estimator("leave_one_out_std", 1, 2, **changes))
    assert normalised == pytest.approx(u[arcsin_R.argmax()], abs=1e-4)
    plain = maximiser(problem, Estimator("leave_one_out", 1, 2, **changes))
    assert plain == pytest.approx(u[(value_PR.mean(axis=0) - lost_R).argmax()], abs=1e-4)
    assert normalised < plain - 0.02


def test_roots_at_fixed_group_sizes_are_not_the_arcsin_maximiser():
    problem = unequal()
    sizes = (2, 4, 8, 16, 32)
    ones = [Estimator("leave_one_out_std", 1, size) for size in sizes]
    roots = [root(problem, pull_of(one), one) for one in ones]
    np.testing.assert_allclose(roots, [0, -0.0031, -0.0155, -0.0258, -0.0306], atol=5e-5)
    assert maximiser(problem, ones[0]) == pytest.approx(-0.0330, abs=5e-5)
