"""Algorithm 2 off-policy: against loops over groups, finite differences, and training."""

from __future__ import annotations

import itertools
import math
from dataclasses import replace

import numpy as np
import pytest
import torch
from offpolicy_problem import BETA, GROUP, LENGTH, small_setting, token_kl_P
from reference import plain_advantages, variance_of

from grpo_ustat.config.objective import ObjectiveConfig
from grpo_ustat.gap.algorithm2 import (
    DIVISORS,
    Setting,
    exact_path,
    on_policy,
    path_errors,
)
from grpo_ustat.gap.lemma11 import by_prompt, moments
from grpo_ustat.gap.sequences import SequencePolicy
from grpo_ustat.train.objective import Part, surrogate

STEP, RATES = 1e-5, np.array([1e-3, 1e-2, 1e-1])
PROMPTS, OUTCOMES = np.array([1, 0]), np.array([[0, 3, 1], [2, 0, 1]])


@pytest.fixture
def setting(rng):
    """Of groups of three unequal 0/1 rewards the std is 0.577."""
    return replace(small_setting(rng), epsilon=0.1, floor=0.7)


@pytest.fixture
def current(setting, rng):
    return setting.old.at(setting.old.theta_D + rng.normal(size=8) / 3)


def written_out(setting, current, prompt, y, level):
    """w and k of one completion, token by token."""
    old, reference = (x.logprob_PYL[prompt, y] for x in (setting.old, setting.reference))
    own, scores = current.logprob_PYL[prompt, y], current.token_scores_PYLD[prompt, y]
    whole = math.exp(sum(own) - sum(old))
    weight, penalty = np.zeros(8), np.zeros(8)
    for t in range(LENGTH):
        ratio = math.exp(own[t] - old[t]) if level == "token" else whole
        weight += ratio * scores[t]
        lost = math.exp(reference[t] - own[t]) - 1
        penalty += lost * scores[t] * (1 if level == "token" else whole)
    return weight, penalty


def advantages_of(setting, prompt, rewards):
    """Written out; None where the group is drawn again."""
    value = setting.old.probabilities_PY[prompt] @ setting.reward_PY[prompt]
    std = math.sqrt(variance_of(rewards)) if len(set(rewards)) > 1 else 0.0
    if setting.divisor == "group_std_redrawn" and std < setting.floor:
        return None
    divisor = {
        "none": 1.0, "sigma": math.sqrt(value * (1 - value)), "group_std": std + setting.epsilon,
        "group_std_floor": max(std, setting.floor), "group_std_redrawn": std,
    }[setting.divisor]  # fmt: skip
    return [a / divisor if std else 0.0 for a in plain_advantages("leave_one_out", rewards, None)]


def walked(setting, current, level, beta, prompt):
    """Mean and variance of the estimate of one prompt over all its groups."""
    tables = [written_out(setting, current, prompt, y, level) for y in range(4)]
    chances, estimates = [], []
    for group in itertools.product(range(4), repeat=setting.group_size):
        advantages = advantages_of(setting, prompt, [setting.reward_PY[prompt, y] for y in group])
        if advantages is not None:
            pairs = zip(advantages, group, strict=True)
            estimates.append(sum(a * tables[y][0] + beta * tables[y][1] for a, y in pairs))
            chances.append(math.prod(setting.old.probabilities_PY[prompt, list(group)]))
    law, estimates = np.array(chances) / sum(chances), np.array(estimates) / setting.group_size
    mean = law @ estimates
    return mean, law @ np.square(estimates - mean).sum(axis=1)


@pytest.mark.parametrize("level", ["token", "sequence"])
@pytest.mark.parametrize("divisor", DIVISORS)
@pytest.mark.parametrize("size", [2, GROUP, 4])
def test_moments_equal_a_walk_over_all_groups(setting, current, level, divisor, size):
    """A floor of 0.55 redraws the groups of four with one right or wrong answer, std 0.5."""
    if divisor == "group_std_redrawn":
        setting = replace(setting, floor=0.55)
    setting = replace(setting, divisor=divisor, group_size=size)
    for beta, parts in ((BETA, slice(0, 2)), (0.0, slice(0, 1))):
        found = setting.moments(*setting.tables(current, level)[parts])
        for p in range(2):
            mean, variance = walked(setting, current, level, beta, p)
            np.testing.assert_allclose(found.mean_PD[p], mean, rtol=1e-11, atol=1e-14)
            assert found.within_P[p] == pytest.approx(variance, rel=1e-11)


def plain_target(setting, current, beta):
    """Central differences of J - beta sum_t E KL, the law of the prefixes fixed."""

    def worth(theta_D):
        at = current.at(theta_D)
        lost_P = token_kl_P(at, setting.reference, current.probabilities_PY)
        return (setting.scale_P * at.value_P(setting.reward_PY) - beta * lost_P).mean()

    units = np.eye(8) * STEP
    return np.array(
        [(worth(current.theta_D + u) - worth(current.theta_D - u)) / (2 * STEP) for u in units]
    )


@pytest.mark.parametrize("level", ["token", "sequence"])
@pytest.mark.parametrize("divisor", ["none", "group_std"])
def test_biases_are_those_against_finite_differences(setting, current, level, divisor):
    setting = replace(setting, divisor=divisor)
    found, bias = setting.quality(current), {}
    for part, beta in (("", BETA), ("_policy", 0.0)):
        mean = sum(walked(setting, current, level, beta, p)[0] for p in range(2)) / 2
        bias[part] = mean - plain_target(setting, current, beta)
    bias["_kl"] = bias[""] - bias["_policy"]
    for part, vector in bias.items():
        expected = pytest.approx(vector @ vector, rel=1e-6, abs=1e-18)
        assert found[f"{level}_bias2{part}"] == expected
    drift_D = setting.bias(current) - setting.bias(setting.old)
    assert found["token_drift2"] == pytest.approx(drift_D @ drift_D, rel=1e-9, abs=1e-25)


def test_one_token_has_no_other_tokens_ratio_to_miss(rng):
    """Of completions of one token the policy's part is unbiased at every theta."""
    old = SequencePolicy(rng.normal(size=(1, 3, 3)), rng.normal(size=(2, 3)))
    reward_PY = np.array([[0.0, 1, 1], [1, 0, 0]])
    setting = Setting(old, old.at(np.zeros(9)), reward_PY, BETA, 1, GROUP)
    found = setting.quality(old.at(rng.normal(size=9)))
    assert found["token_bias2_policy"] < 1e-30 < 1e-6 < found["token_bias2_kl"]


def test_first_order_bias_is_the_derivative(setting, rng):
    direction = rng.normal(size=8)

    def bias(step):
        return setting.bias(setting.old.at(setting.old.theta_D + step * direction))

    slope = (bias(STEP) - bias(-STEP)) / (2 * STEP)
    np.testing.assert_allclose(setting.first_order_bias(direction), slope, atol=1e-9)


def test_the_path_ascends_the_target_and_its_errors_are_those_of_its_policies(setting):
    target = setting.old.theta_D
    for _ in range(2):
        target = target + 0.1 * sum(setting.target(setting.old.at(target)))
    np.testing.assert_array_equal(exact_path(setting, 2, 0.1)[-1].theta_D, target)
    found = path_errors(setting, RATES, updates=2)
    each = [setting.quality(exact_path(setting, 2, rate)[-1])["token_bias2"] for rate in RATES]
    np.testing.assert_array_equal(found.end["token_bias2"], each)
    assert found.by_place.shape == (3, 3)
    np.testing.assert_allclose(found.by_place[:, 2], each)
    assert each[0] / RATES[0] ** 2 == pytest.approx(found.leading, rel=0.05)


# Without updates: another route to the same numbers


@pytest.mark.parametrize("size", [2, 8, 64])
def test_at_learning_rate_0_it_is_lemma_11(setting, size):
    old, reward_PY = setting.old, setting.reward_PY
    of_lemma = by_prompt(old.probabilities_PY, old.scores_PYD, reward_PY)
    exact = moments(of_lemma, size, 0.1)
    found = replace(setting, divisor="group_std", group_size=size).moments(old.scores_PYD)
    np.testing.assert_allclose(found.within_P, exact["variance"], rtol=1e-9)
    bias_PD = found.mean_PD - old.gradient_PD(reward_PY) / setting.sigma_P[:, None]
    np.testing.assert_allclose(np.linalg.norm(bias_PD, axis=1), abs(exact["bias"]), rtol=1e-9)
    plain = replace(setting, divisor="sigma", group_size=size).moments(old.scores_PYD)
    np.testing.assert_allclose(plain.within_P, exact["u_statistic_variance"], rtol=1e-9)


def test_the_oracle_has_the_variance_of_exact_values(setting):
    """Of the oracle: E||s (z - V) / sigma||^2 - ||g / sigma||^2 of a prompt, over G."""
    found = on_policy(setting, "sigma", [2, 4])
    old, expected, g = setting.old, [], []
    for p in range(2):
        law, z, s = old.probabilities_PY[p], setting.reward_PY[p], old.scores_PYD[p]
        own = s * ((z - law @ z) / setting.sigma_P[p])[:, None]
        g.append(law @ own)
        expected.append(law @ np.square(own).sum(axis=1) - g[-1] @ g[-1])
    between = np.square(np.array(g) - np.mean(g, axis=0)).sum(axis=1).mean()
    np.testing.assert_allclose(found["between"], between, rtol=1e-12)
    np.testing.assert_allclose(found["oracle"], between + np.mean(expected) / np.array([2, 4]))


# What the study calls Algorithm 2 is what training ascends


def trained(setting, current, level, beta, advantages):
    """Gradient in theta of the objective of six completions, by autograd."""
    config = ObjectiveConfig(
        name="test", importance_sampling_level=level, loss_type="sum", num_iterations=1,
        num_minibatches=1, epsilon=None, epsilon_high=None, beta=beta,
        kl_estimator="k3" if beta else None, kl_in="loss" if beta else None, entropy_coef=0.0,
    )  # fmt: skip
    own = np.repeat(PROMPTS, 3), OUTCOMES.ravel()
    theta = torch.tensor(current.theta_LVV, requires_grad=True)
    rows = []
    for prompt, outcome in zip(*own, strict=True):
        previous, logprobs = 0, []
        for t, token in enumerate(setting.old.completions_YL[outcome]):
            logits = theta[t, previous] + torch.tensor(current.offset_PV[prompt])
            logprobs.append(torch.log_softmax(logits, dim=0)[token])
            previous = token
        rows.append(torch.stack(logprobs))
    part = Part(
        advantage_B=torch.tensor(advantages),
        mask_BT=torch.ones(6, LENGTH, dtype=torch.float64),
        old_BT=torch.tensor(setting.old.logprob_PYL[own]),
        reference_BT=torch.tensor(setting.reference.logprob_PYL[own]),
        weight_B=torch.full((6,), 1 / 6, dtype=torch.float64),
        num_rollouts=6,
    )
    surrogate(config, torch.stack(rows), part).backward()
    return theta.grad.numpy().ravel()


def test_both_ratios_and_the_penalty_are_those_of_training(setting, current):
    rewards = [[setting.reward_PY[p, y] for y in g] for p, g in zip(PROMPTS, OUTCOMES, strict=True)]
    advantages = [a for row in rewards for a in plain_advantages("leave_one_out", row, None)]
    own = np.repeat(PROMPTS, 3), OUTCOMES.ravel()
    for level, name, beta in (("token", "token", BETA), ("sequence", "whole_sequence", 0.0)):
        weight, penalty = (x[own] for x in setting.tables(current, level))
        expected = (np.array(advantages) @ weight + bool(beta) * penalty.sum(axis=0)) / 6
        found = trained(setting, current, name, beta, advantages)
        np.testing.assert_allclose(found, expected, rtol=1e-12, atol=1e-14)


def test_normalisation_has_a_bias_at_learning_rate_0_that_no_batch_averages_out():
    """A fifth of ||target||^2 at G = 2, above the variance from some 100 prompts on."""
    rng = np.random.default_rng(1)
    old = SequencePolicy(rng.normal(size=(2, 2, 2)) / 2, rng.normal(size=(4, 2)) / 4)
    reward_PY = np.array([[1, 0, 0, 1], [0, 0, 1, 0], [0, 1, 0, 0], [1, 0, 0, 0]], dtype=float)
    setting = Setting(old, old.at(np.zeros(8)), reward_PY, 0.1, 1, 2, floor=0.3)
    sizes = [2, 4, 8, 16]
    found = {divisor: on_policy(setting, divisor, sizes) for divisor in DIVISORS}
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
