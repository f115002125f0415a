"""The study of Theorem 12: numbers by hand, verdicts, refusals."""

from __future__ import annotations

import json

import numpy as np
import pytest

from grpo_ustat.checks import ConfigError
from grpo_ustat.policy.sequences import SequencePolicy
from grpo_ustat.theorems.finding import AGREES, DISAGREES
from grpo_ustat.theorems.offpolicy import Setting
from grpo_ustat.theorems.ratio_lengths import by_length
from grpo_ustat.theorems.theorem12 import theorem12

LENGTH, PROMPTS = 3, 2
PLAIN = {
    "learning_rates": [1e-3, 1e-2, 0.1, 1.0],
    "updates": 2,
    "group_size": 4,
    "num_prompts": 2,
    "beta": 0.1,
    "replicates": 8,
    "seed": 0,
    "lengths": [1, 2, 3, 4],
    "shift": 1.0,
}


@pytest.fixture
def policy(rng):
    return SequencePolicy(rng.normal(size=(LENGTH, 2, 2)), rng.normal(size=(PROMPTS, 2)) / 2)


@pytest.fixture
def study(policy, rng):
    reference = policy.at(policy.theta_D + rng.normal(size=12) / 3)
    reward_PY = (rng.random((PROMPTS, 2**LENGTH)) < 0.5).astype(float)

    def run(**changed):
        rewards = changed.pop("reward_PY", reward_PY)
        return theorem12(policy, rewards, **{"reference": reference} | PLAIN | changed)

    return run


def test_everything_agrees(study):
    found = study()
    assert [claim.verdict for claim in found.claims] == [AGREES] * len(found.claims)
    assert found.rollouts == 8 * 2 * 2 * 4
    assert len({tuple(row) for row in found.rows}) == 1
    json.dumps([found.result(), list(found.rows)], allow_nan=False)


def test_without_the_penalty_its_claims_and_curves_are_gone(study):
    found = study(beta=0.0)
    assert found.verdict == AGREES
    assert not any("KL term alone" in claim.what for claim in found.claims)
    assert not any("KL" in curve.label for curve in found.panels[0].curves)


def test_curves_and_rows_are_one(study):
    found = study()
    curve = found.panels[0].curves[0]
    own = [
        row["value"]
        for row in found.rows
        if row["quantity"] == "token_bias2" and row["path"] == "minibatch"
    ]
    assert curve.label == "minibatch steps" and list(curve.y) == own
    assert all(np.less_equal(curve.low, curve.y)) and all(np.less_equal(curve.y, curve.high))


def test_the_same_seed_is_the_same_study_and_another_is_not(study):
    assert study().rows == study().rows != study(seed=1).rows


def test_a_target_that_the_estimate_does_not_have_disagrees(study, monkeypatch):
    """Were the penalty's target twice as long."""
    target = Setting.target

    def doubled(self, current, prefixes=None):
        policy_D, penalty_D = target(self, current, prefixes)
        return policy_D, 2 * penalty_D

    monkeypatch.setattr(Setting, "target", doubled)
    found = {claim.what: claim.verdict for claim in study().claims}
    assert found["bias^2 / variance at theta_k = theta_old"] == DISAGREES
    assert found["slope of log bias^2 on log learning rate, exact steps"] == DISAGREES


def test_ratios_of_one_and_two_tokens_by_hand():
    """Chances 1/2 become 3/4 and 1/4: E rho^2 = 2 (9 + 1) / 16 a token."""
    found = by_length([2, 1], np.log(3.0), 1, 2)
    assert found.growth == pytest.approx(1.25)
    np.testing.assert_allclose(found.values["ratio_second_moment"], [1.25, 1.25**2])
    # One token: w = rho s; s = (-p, p) or (q, -q), rho = 3/2 or 1/2 with p = 3/4, so |w|^2 = 9/32.
    # V = 1/2, mu = (3/2)(1/4)(1/2) a coordinate; first order 0, second (9/32)/4 + 9/128.
    assert found.values["token_variance"][0] == pytest.approx(9 / 128)
    assert found.values["token_bias2"][0] < 1e-30 and np.isnan(found.tie[0])
    assert found.variance_ratio[0] == pytest.approx(1)


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        ({"learning_rates": [0.1, 0.2]}, r"learning_rates=\[0.1, 0.2\]: use at least three"),
        ({"learning_rates": [0.0, 0.1, 0.2]}, "all above 0"),
        ({"lengths": [3]}, r"lengths=\[3\]: use at least two"),
        ({"lengths": [3, 15]}, "all of 1 to 14"),
        ({"updates": 0}, "updates=0: use at least 1"),
        ({"group_size": 1}, "group_size=1: use at least 2"),
        ({"replicates": 2}, "replicates=2: use at least 3"),
        ({"beta": -0.1}, "beta=-0.1: use at least 0"),
        ({"learning_rates": [1.0, 2.0, 1e6]}, "learning_rate=1000000.0 takes a parameter"),
        ({"reward_PY": np.ones((PROMPTS, 2**LENGTH)), "beta": 0.0}, "leaves a squared bias of"),
    ],
)
def test_what_has_no_answer_is_refused(study, changed, message):
    with pytest.raises(ConfigError, match=message) as caught:
        study(**changed)
    assert "\n" not in str(caught.value)
