"""Mean and variance with any weights, against every group there is."""

from __future__ import annotations

import itertools
import math

import numpy as np
import pytest
from reference import plain_advantages

from grpo_ustat.estimators.moments import exact_moments
from grpo_ustat.estimators.weighted import group_moments


@pytest.fixture
def outcomes(rng):
    """Two prompts of three outcomes: chances, weights of mean zero, rewards, vectors beside."""
    chance_PY = rng.dirichlet(np.ones(3), size=2)
    weight_PYD = rng.normal(size=(2, 3, 2))
    weight_PYD -= np.einsum("py,pyd->pd", chance_PY, weight_PYD)[:, None]
    return chance_PY, weight_PYD, rng.random((2, 3)), rng.normal(size=(2, 3, 2))


def every_group(outcomes, group_size):
    """All (chance, estimate) of one prompt drawn evenly and its group."""
    chance_PY, weight_PYD, reward_PY, beside_PYD = outcomes
    for p, group in itertools.product(range(2), itertools.product(range(3), repeat=group_size)):
        advantages = plain_advantages("leave_one_out", [reward_PY[p, y] for y in group], None)
        estimate = sum(
            a * weight_PYD[p, y] + beside_PYD[p, y] for a, y in zip(advantages, group, strict=True)
        )
        yield math.prod(chance_PY[p, y] for y in group) / 2, estimate / group_size


@pytest.mark.parametrize("group_size", [2, 3, 4])
def test_equals_a_walk_over_all_groups(outcomes, group_size):
    chance, estimate = (np.array(x) for x in zip(*every_group(outcomes, group_size), strict=True))
    found = group_moments(*outcomes)
    mean = chance @ estimate
    np.testing.assert_allclose(found.mean_PD.mean(axis=0), mean, atol=1e-14)
    variance = chance @ np.square(estimate - mean).sum(axis=1)
    assert found.at(group_size).variance(1) == pytest.approx(variance, rel=1e-12)
    assert found.at(group_size).variance(5) == pytest.approx(variance / 5, rel=1e-12)


def test_with_scores_it_is_the_closed_form_of_leave_one_out(outcomes):
    chance_PY, weight_PYD, reward_PY, _ = outcomes
    found = group_moments(chance_PY, weight_PYD, reward_PY)
    g_sq = np.square(found.mean_PD).sum(axis=1)
    moments = exact_moments(np.square(weight_PYD).sum(axis=2), reward_PY, chance_PY, g_sq)
    own = found.first_P / 7 + found.second_P / 42
    np.testing.assert_allclose(own, moments.mse("leave_one_out", 7), rtol=1e-12)


def test_weights_with_another_mean_are_refused(outcomes):
    chance_PY, weight_PYD, reward_PY, beside_PYD = outcomes
    with pytest.raises(ValueError, match="mean of the weights has norm .*, which must be 0"):
        group_moments(chance_PY, weight_PYD + 0.1, reward_PY, beside_PYD)
