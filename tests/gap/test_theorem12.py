"""The study of Theorem 12: numbers by hand, verdicts, refusals."""

from __future__ import annotations

import itertools
import json
import math
from dataclasses import replace

import numpy as np
import pytest
from reference import plain_advantages, variance_of

from grpo_ustat.config.gap import Theorem12Config
from grpo_ustat.config.schema import ConfigError
from grpo_ustat.gap.estimate_moments import Normalisation, large_groups
from grpo_ustat.gap.offpolicy import Setting, by_length, estimate, on_policy
from grpo_ustat.gap.sequences import SequencePolicy
from grpo_ustat.gap.theorem12 import theorem12
from grpo_ustat.runs.contents import content_of
from grpo_ustat.runs.result import AGREES, DISAGREES

LENGTH, PROMPTS = 3, 2
PLAIN = {
    "normalisations": ["none", "group_std"],
    "epsilon": 1e-4,
    "floor": 0.1,
    "learning_rates": [1e-3, 1e-2, 0.1, 1.0],
    "minibatches": 3,
    "group_size": 4,
    "group_sizes": [2, 4, 8],
    "limit_sizes": [64, 128, 256],
    "num_prompts": 6,
    "beta": 0.1,
    "replicates": 8,
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
        seed = changed.pop("seed", 0)
        design = Theorem12Config(kind="theorem12", **PLAIN | changed)
        return theorem12(policy, reference, rewards, design, seed)

    return run


def test_without_normalisation_everything_agrees(study):
    found = study(normalisations=["none"])
    assert [claim.verdict for claim in found.claims] == [AGREES] * len(found.claims)
    assert found.rollouts == 8 * 2 * 2 * 4
    assert all(claim.p_value > 0.05 for claim in found.claims if claim.low is not None)


def test_as_the_paper_states_it_it_disagrees(study):
    """Normalised, the bias at learning rate 0 is none of the theorem's; what updates add is."""
    found = study()
    by_verdict = {claim.what: claim.verdict for claim in found.claims}
    for size in (2, 4, 8):
        what = f"bias^2 / ||target||^2 at learning rate 0, with normalisation, G = {size}"
        assert by_verdict[what] == DISAGREES
    wrong = [what for what, verdict in by_verdict.items() if verdict == DISAGREES]
    assert len(wrong) == 6 and not any(what.startswith("without") for what in wrong)
    assert all("normalisation, G" in x or "floor" in x or "C1" in x for x in wrong)
    assert found.verdict == DISAGREES
    slope = next(claim for claim in found.claims if "slope of log bias^2 on log G" in claim.what)
    assert ("like 1/G^2." in found.answer) == (slope.verdict == AGREES)
    of_updates = (
        "with normalisation: slope of log(||bias - bias at learning rate 0||^2) on log(learning "
        "rate), exact steps"
    )
    assert by_verdict[of_updates] == AGREES
    assert found.rollouts == 2 * 8 * 2 * 2 * 4
    assert len({tuple(row) for row in found.rows}) == 1
    json.dumps([content_of(found.claims), list(found.rows)], allow_nan=False)


def test_without_the_penalty_its_claims_and_curves_are_gone(study):
    found = study(beta=0.0, normalisations=["none"])
    assert found.verdict == AGREES
    assert not any("KL term only" in claim.what for claim in found.claims)
    assert not any("KL" in curve.label for curve in found.panels[2].curves)


def test_curves_and_rows_are_one(study):
    found = study()
    curve = found.panels[2].curves[0]
    own = [
        row["value"]
        for row in found.rows
        if row["quantity"] == "token_bias2"
        and row["path"] == "minibatch"
        and row["normalisation"] == "none"
    ]
    assert curve.label == "minibatch steps" and list(curve.y) == own
    assert all(np.less_equal(curve.low, curve.y)) and all(np.less_equal(curve.y, curve.high))


@pytest.mark.slow
def test_the_same_seed_is_the_same_study_and_another_is_not(study):
    assert study().rows == study().rows != study(seed=1).rows


def test_a_target_that_the_estimate_does_not_have_disagrees(study, monkeypatch):
    """Were the penalty's target twice as long."""
    target = Setting.target

    def doubled(self, current, prefixes=None, spread=None):
        policy_D, penalty_D = target(self, current, prefixes, spread)
        return policy_D, 2 * penalty_D

    monkeypatch.setattr(Setting, "target", doubled)
    found = {claim.what: claim.verdict for claim in study().claims}
    plain = "without normalisation: "
    assert found[f"{plain}bias^2 / variance at theta_old"] == DISAGREES
    assert found[f"{plain}slope of log(bias^2) on log(learning rate), exact steps"] == DISAGREES


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
        ({"learning_rates": [1.0, 2.0, 1e6]}, "learning_rate=1000000.0 changes a parameter"),
        (
            {"reward_PY": np.ones((PROMPTS, 2**LENGTH)), "beta": 0.0},
            "all rewards are 1.0, so every group",
        ),
        ({"floor": 0.9}, "no group of 2 has a std of at least 0.9: lower the floor"),
    ],
)
def test_what_has_no_answer_is_refused(study, changed, message):
    with pytest.raises(ConfigError, match=message) as caught:
        study(**changed)
    assert "\n" not in str(caught.value)


# At learning rate 0


@pytest.fixture(scope="module")
def four_prompts():
    """Two tokens of two, right or wrong, from even to hard."""
    draw = np.random.default_rng(1)
    old = SequencePolicy(draw.normal(size=(2, 2, 2)) / 2, draw.normal(size=(4, 2)) / 4)
    reward_PY = np.array([[1, 0, 0, 1], [0, 0, 1, 0], [0, 1, 0, 0], [1, 0, 0, 0]], dtype=float)
    return Setting(old, old.at(np.zeros(8)), reward_PY, 0.1, 1, 2)


def walked_bias2_share(setting, size):
    """||bias||^2 / ||target||^2 of the normalised estimate, over all groups of one prompt."""
    bias, target = np.zeros(8), np.zeros(8)
    for p in range(4):
        law, scores = setting.old.probabilities_PY[p], setting.old.scores_PYD[p]
        rewards = setting.reward_PY[p]
        value = law @ rewards
        exact = (law * rewards) @ scores / np.sqrt(value * (1 - value))
        target += exact / 4
        bias -= exact / 4
        for group in itertools.product(range(4), repeat=size):
            own = [float(rewards[y]) for y in group]
            if len(set(own)) > 1:
                std = math.sqrt(variance_of(own))
                pairs = zip(plain_advantages("leave_one_out", own, None), group, strict=True)
                step = sum(a / std * scores[y] for a, y in pairs) / size
                bias += math.prod(law[list(group)]) * step / 4
    return bias @ bias / (target @ target)


def test_normalisation_has_a_bias_at_learning_rate_0_that_no_batch_averages_out(four_prompts):
    """A fifth of ||target||^2 at G = 2, above the variance from some 100 prompts on."""
    found = on_policy(four_prompts, [2, 4, 8, 16], [64, 128, 256], 0.0, 0.1)
    share = found.values["group_std"]["bias2_share"]
    walked = [walked_bias2_share(four_prompts, size) for size in (2, 4)]
    np.testing.assert_allclose(share[:2], walked, rtol=1e-10)
    np.testing.assert_allclose(100 * share, [20.4, 7.4, 1.64, 0.17], rtol=0.05)
    for kind in ("none", "sigma"):
        assert found.values[kind]["bias2_share"].max() < 1e-28
    exceeded = found.values["group_std"]["exceeded"]
    np.testing.assert_allclose(exceeded, [106, 230, 889, 7663], rtol=0.005)
    for size, batch in zip((2, 4, 8, 16), exceeded, strict=True):
        for prompts, above in ((batch * 1.01, True), (batch / 1.01, False)):
            baseline = Normalisation("group_std")
            at = replace(
                four_prompts, group_size=size, normalisation=baseline, num_prompts=prompts, beta=0.0
            ).quality(four_prompts.old)
            assert (at["token_bias2"] > at["token_variance"]) == above


def test_guards_do_not_mend_it_and_the_prompts_own_sigma_does(four_prompts):
    """Of 0/1 rewards no std of a group of 8 of unequal rewards is below 0.35."""
    found = on_policy(four_prompts, [8], [64, 128, 256], 0.0, 0.3).values
    same = [found[kind]["bias2_share"][0] for kind in ("group_std", "group_std_floor")]
    assert same[0] == pytest.approx(same[1], rel=1e-12) and same[0] > 1e-3
    assert found["group_std_redrawn"]["bias2_share"][0] > 1e-3
    assert found["sigma"]["bias2_share"][0] < 1e-28
    value_P = four_prompts.old.value_P(four_prompts.reward_PY)
    share = (value_P**8 + (1 - value_P) ** 8).mean()
    assert found["group_std"]["zero_variance"][0] == pytest.approx(share, rel=1e-12)


def test_normalised_estimates_off_policy_are_a_walk_over_all_groups(rng):
    """Mean and variance with ratios and the KL term, each group's advantages written out."""
    old = SequencePolicy(rng.normal(size=(2, 2, 2)), rng.normal(size=(2, 2)) / 2)
    reference, current = (old.at(old.theta_D + rng.normal(size=8) / 3) for _ in range(2))
    rewards = np.array([[0, 1, 1, 2], [2, 0, 1, 0]]) / 2
    setting = Setting(old, reference, rewards, 0.3, 1, 3, Normalisation("group_std", 0.01))
    chances, estimates = [], []
    for p in range(2):
        for group in itertools.product(range(4), repeat=3):
            chances.append(math.prod(old.probabilities_PY[p, list(group)]) / 2)
            pair = np.array([p]), np.array([group])
            estimates.append(estimate(setting, current, *pair))
    mean = np.array(chances) @ estimates
    variance = np.array(chances) @ np.square(np.array(estimates) - mean).sum(axis=1)
    found = setting.quality(current)
    assert found["token_variance"] == pytest.approx(variance, rel=1e-10)
    bias = mean - sum(setting.target(current))
    assert found["token_bias2"] == pytest.approx(bias @ bias, rel=1e-10)
    own = [float(rewards[0, y]) for y in (0, 1, 3)]  # 0, 1/2, 1: std 1/2
    weight, penalty = setting.tables(current, "token")
    by_hand = sum(
        a / 0.51 * weight[0, y] + penalty[0, y]
        for a, y in zip(plain_advantages("leave_one_out", own, None), (0, 1, 3), strict=True)
    )
    pair = np.array([0]), np.array([[0, 1, 3]])
    np.testing.assert_allclose(estimate(setting, current, *pair), by_hand / 3, rtol=1e-12)


@pytest.mark.slow
def test_the_limit_of_the_variance_is_the_delta_methods(four_prompts):
    """Within prompts as Lemma 11 has it; between them biases c_x/G add 2 Cov(g_x/sigma_x, c_x)."""
    old, reward_PY = four_prompts.old, four_prompts.reward_PY
    found = on_policy(four_prompts, [2], [512, 1024, 2048], 0.0, 0.1)
    limits = large_groups(old.probabilities_PY, old.scores_PYD, reward_PY)
    value_P = old.value_P(reward_PY)
    mean_PD = old.gradient_PD(reward_PY) / np.sqrt(value_P * (1 - value_P))[:, None]
    between = 2 * ((mean_PD - mean_PD.mean(axis=0)) * limits.bias_PD).sum(axis=1).mean()
    expected = (limits.variance_P.mean() + between) / limits.sigma_variance_P.mean()
    assert found.variance_ratio("group_std") == pytest.approx(expected, rel=1e-4)
    assert expected < 0.95
    for kind in ("none", "sigma"):
        assert found.variance_ratio(kind) == pytest.approx(1, rel=1e-4)
