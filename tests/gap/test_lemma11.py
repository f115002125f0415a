"""The study of Lemma 11: its numbers against the package's closed forms, and its verdicts."""

from __future__ import annotations

import itertools
import math

import numpy as np
import pytest
from tabular import TabularPolicy
from ustatistics import estimate, pairwise

from grpo_ustat.config.schema import ConfigError
from grpo_ustat.estimators.baselines import group_std
from grpo_ustat.gap.lemma11 import lemma11
from grpo_ustat.records import BaselineContext
from grpo_ustat.runs.record import AGREES, DISAGREES, OPEN

SIZES = [4, 16, 64, 256]
REWARDS = np.array([[1.0, 0.0, 1.0], [0.0, 1.0, 0.0], [0.0, 0.0, 1.0]])


@pytest.fixture
def policy(rng):
    return TabularPolicy(rng.normal(size=(3, 3, 2)), rng.normal(size=2), REWARDS)


def study(policy, sizes=SIZES, epsilon=1e-4):
    return lemma11(policy.probabilities_PY, policy.scores_PYD, policy.rewards_PY, sizes, epsilon)


def test_differences_are_those_of_the_package_rule_over_all_groups(policy):
    """`group_std` has the group's own mean, so its estimate is (G-1)/G of the lemma's."""
    size, epsilon, expected = 3, 0.2, np.zeros(3)
    for prompt, group in itertools.product(range(3), itertools.product(range(3), repeat=size)):
        outcome = list(group)
        scores, rewards = policy.scores_PYD[prompt, outcome], REWARDS[prompt, outcome]
        baseline = group_std(rewards[None], BaselineContext(), epsilon=epsilon)[0]
        own = estimate(scores, baseline) * size / (size - 1)
        value = policy.value_P[prompt]
        plain = pairwise(scores, rewards) / math.sqrt(value * (1 - value))
        chance = policy.probabilities_PY[prompt, outcome].prod()
        expected[prompt] += chance * np.square(own - plain).sum()
    rows = study(policy, [size, 4, 5], epsilon).rows
    found = [row["difference"] for row in rows if row["group_size"] == size]
    np.testing.assert_allclose(found, expected, rtol=1e-12)


def test_variance_of_the_u_statistic_is_the_closed_form(policy):
    mse = policy.moments().mse("leave_one_out", 16) / policy.moments().var_z
    rows = [row for row in study(policy).rows if row["group_size"] == 16]
    np.testing.assert_allclose([row["u_statistic_variance"] for row in rows], mse, rtol=1e-12)


def test_everything_agrees_on_an_ordinary_policy(policy):
    found = study(policy, [256, 1024, 4096])
    assert [claim.verdict for claim in found.claims] == [AGREES] * 7
    assert found.rollouts == 0 and "consistency" in found.answer
    assert len({tuple(row) for row in found.rows}) == 1
    json_safe = [x for claim in found.claims for x in (claim.predicted, claim.measured)]
    assert {type(x) for x in json_safe} <= {float, str}


def test_small_groups_decide_no_rate(policy):
    assert study(policy, [2, 3, 4]).claims[0].verdict == OPEN


def test_a_rate_that_goes_elsewhere_disagrees(policy, monkeypatch):
    """Were an epsilon as large as the standard deviation taken for none."""
    from grpo_ustat.gap import lemma11 as module

    normalised_moments = module.normalised_moments
    monkeypatch.setattr(
        module,
        "normalised_moments",
        lambda moments, size, epsilon: normalised_moments(moments, size, 0.5),
    )
    found = study(policy, epsilon=0.0)
    assert found.claims[0].verdict == found.verdict == DISAGREES


def test_slope_and_verdict_for_half_right_answers(rng):
    scores = rng.normal(size=(1, 2, 3, 2))
    scores -= scores.mean(axis=(1, 2), keepdims=True)
    rewards = np.array([[1.0] * 3 + [0.0] * 3])
    found = lemma11(np.full((1, 6), 1 / 6), scores.reshape(1, 6, 2), rewards, SIZES, 0.0)
    assert found.claims[0].predicted == -2.0 and found.verdict == AGREES


def test_other_rewards_are_refused_in_one_line(policy):
    with pytest.raises(ConfigError, match="0/1 rewards, got 0.5") as caught:
        lemma11(policy.probabilities_PY, policy.scores_PYD, REWARDS / 2, SIZES, 0.0)
    assert "\n" not in str(caught.value)
