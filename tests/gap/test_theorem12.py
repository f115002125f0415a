"""The study of Theorem 12: verdicts, and the size of the bias at learning rate 0."""

from __future__ import annotations

import json

import numpy as np
import pytest

from grpo_ustat.config.gap import Theorem12Config
from grpo_ustat.gap import theorem12 as twelve
from grpo_ustat.gap.algorithm2 import Setting, on_policy
from grpo_ustat.gap.sequences import SequencePolicy
from grpo_ustat.runs.contents import content_of
from grpo_ustat.runs.result import AGREES, DISAGREES

LENGTH, PROMPTS = 3, 2
SMALL = {
    "learning_rates": [1e-3, 1e-2, 0.1, 1.0], "minibatches": 3, "group_size": 4,
    "group_sizes": [2, 4, 8], "limit_sizes": [64, 128, 256], "num_prompts": 6,
}  # fmt: skip


@pytest.fixture
def study(rng):
    policy = SequencePolicy(rng.normal(size=(LENGTH, 2, 2)), rng.normal(size=(PROMPTS, 2)) / 2)
    reference = policy.at(policy.theta_D + rng.normal(size=12) / 3)
    reward_PY = (rng.random((PROMPTS, 2**LENGTH)) < 0.5).astype(float)

    def run(**changed):
        design = Theorem12Config(**SMALL | changed)
        return twelve.theorem12(policy, reference, reward_PY, design)

    return run


def test_as_the_paper_states_it_it_disagrees_and_without_normalisation_it_agrees(study):
    """Normalised, the bias at learning rate 0 is none of the theorem's; what updates add is."""
    found = study()
    wrong = [claim.what for claim in found.claims if claim.verdict == DISAGREES]
    assert len(wrong) == 6 and not any(what.startswith("without") for what in wrong)
    for size in (2, 4, 8):
        assert f"bias^2 / ||target||^2 at learning rate 0, with normalisation, G = {size}" in wrong
    plain = [claim for claim in found.claims if claim.what.startswith("without")]
    assert {claim.verdict for claim in plain} == {AGREES} and len(plain) == 10
    drift = [claim for claim in found.claims if claim.what.startswith("with normalisation")]
    assert {claim.verdict for claim in drift} == {AGREES}
    assert found.verdict == DISAGREES and found.rollouts == 0
    assert len({tuple(row) for row in found.rows}) == 1
    json.dumps([content_of(found.claims), list(found.rows)], allow_nan=False)


def test_without_the_penalty_its_claims_are_gone(study):
    found = study(beta=0.0)
    assert not any("KL term only" in claim.what for claim in found.claims)


def test_a_target_that_the_estimate_does_not_have_disagrees(study, monkeypatch):
    """Were the penalty's target twice as long."""
    target = Setting.target

    def doubled(self, current):
        policy_D, penalty_D = target(self, current)
        return policy_D, 2 * penalty_D

    monkeypatch.setattr(Setting, "target", doubled)
    found = {claim.what: claim.verdict for claim in study().claims}
    plain = "without normalisation: "
    assert found[f"{plain}bias^2 / variance at theta_old"] == DISAGREES
    assert found[f"{plain}slope of log(bias^2) on log(learning rate), exact steps"] == DISAGREES


def test_normalisation_has_a_bias_at_learning_rate_0_that_no_batch_averages_out():
    """A fifth of ||target||^2 at G = 2, above the variance from some 100 prompts on."""
    rng = np.random.default_rng(1)
    old = SequencePolicy(rng.normal(size=(2, 2, 2)) / 2, rng.normal(size=(4, 2)) / 4)
    reward_PY = np.array([[1, 0, 0, 1], [0, 0, 1, 0], [0, 1, 0, 0], [1, 0, 0, 0]], dtype=float)
    setting = Setting(old, old.at(np.zeros(8)), reward_PY, 0.1, 1, 2, floor=0.3)
    sizes = [2, 4, 8, 16]
    found = {divisor: on_policy(setting, divisor, sizes) for divisor in twelve.DIVISORS}
    own = found["group_std"]
    np.testing.assert_allclose(100 * own["bias2_share"], [20.4, 7.4, 1.64, 0.17], rtol=0.05)
    exceeded = own["variance"] / own["bias"] ** 2
    np.testing.assert_allclose(exceeded, [106, 230, 889, 7663], rtol=0.005)
    for divisor in ("none", "sigma"):
        assert found[divisor]["bias2_share"].max() < 1e-28
    # Of 0/1 rewards no std of a group of 8 of unequal rewards is below 0.35.
    guarded = found["group_std_floor"]["bias2_share"][2]
    assert guarded == pytest.approx(own["bias2_share"][2], rel=1e-12)
    assert found["group_std_redrawn"]["bias2_share"][2] > 1e-3
