"""Moments of estimates, normalised or not: walks over all groups, closed forms, limits by hand."""

from __future__ import annotations

import itertools
import math

import numpy as np
import pytest
from reference import mean_of, plain_advantages, variance_of

from grpo_ustat.estimators.moments import exact_moments
from grpo_ustat.gap.estimate_moments import (
    Normalisation,
    advantage_moments,
    estimate_moments,
    group_moments,
    large_groups,
)
from grpo_ustat.gap.normalised import normalised_moments, right_and_wrong

PROMPTS, OUTCOMES, WIDTH = 2, 4, 3
LAWS = {"binary": [0.0, 1.0, 1.0, 0.0], "graded": [0.0, 0.25, 0.5, 1.0]}
EVERY_RULE = {
    "group_std": Normalisation("group_std"),
    "epsilon": Normalisation("group_std", epsilon=0.1),
    "floor": Normalisation("group_std_floor", floor=0.4),
    "redrawn": Normalisation("group_std_redrawn", floor=0.3),
}


@pytest.fixture
def scene(rng):
    """Chances, vectors w of mean zero and vectors a of any."""
    chance_PY = rng.dirichlet(np.ones(OUTCOMES), size=PROMPTS)
    weight_PYD = rng.normal(size=(PROMPTS, OUTCOMES, WIDTH))
    weight_PYD -= np.einsum("py,pyd->pd", chance_PY, weight_PYD)[:, None]
    return chance_PY, weight_PYD, rng.normal(size=weight_PYD.shape)


def plain_normalised(baseline, rewards):
    """Advantages of one group, written out; None where it is drawn again."""
    std = math.sqrt(variance_of(rewards)) if len(set(rewards)) > 1 else 0.0
    if baseline.kind == "group_std_redrawn" and std < baseline.floor:
        return None
    if std == 0:
        return [0.0] * len(rewards)
    divisor = (
        max(std, baseline.floor) if baseline.kind == "group_std_floor" else std + baseline.epsilon
    )
    return [a / divisor for a in plain_advantages("leave_one_out", rewards, mean_of(rewards))]


def walk(baseline, chance_Y, weight_YD, reward_Y, beside_YD, size):
    """Mean and variance of one prompt's estimate over all groups."""
    chances, estimates = [], []
    for group in itertools.product(range(OUTCOMES), repeat=size):
        advantages = plain_normalised(baseline, [reward_Y[y] for y in group])
        if advantages is None:
            continue
        pairs = list(zip(advantages, group, strict=True))
        estimates.append(sum(a * weight_YD[y] + beside_YD[y] for a, y in pairs) / size)
        chances.append(math.prod(chance_Y[list(group)]))
    kept, estimates = sum(chances), np.array(estimates)
    law = np.array(chances) / kept
    mean = law @ estimates
    return kept, mean, law @ np.square(estimates - mean).sum(axis=1)


@pytest.mark.parametrize("size", [2, 3, 5])
@pytest.mark.parametrize("law", LAWS)
@pytest.mark.parametrize("name", EVERY_RULE)
def test_equals_a_walk_over_all_groups(scene, name, law, size):
    (chance_PY, weight_PYD, beside_PYD), baseline = scene, EVERY_RULE[name]
    reward_Y = np.array(LAWS[law])
    moments = [advantage_moments(p, reward_Y, size, baseline) for p in chance_PY]
    found = estimate_moments(moments, chance_PY, weight_PYD, size, beside_PYD)
    for p in range(PROMPTS):
        kept, mean, variance = walk(
            baseline, chance_PY[p], weight_PYD[p], reward_Y, beside_PYD[p], size
        )
        assert moments[p].acceptance == pytest.approx(kept, rel=1e-12)
        np.testing.assert_allclose(found.mean_PD[p], mean, rtol=1e-10, atol=1e-13)
        assert found.within_P[p] == pytest.approx(variance, rel=1e-10)


def test_a_huge_epsilon_leaves_the_leave_one_out_estimate(scene):
    """Divided by std + epsilon and multiplied by epsilon it is the one without normalisation."""
    chance_PY, weight_PYD, _ = scene
    reward_PY = np.tile(LAWS["graded"], (PROMPTS, 1))
    baseline, size = Normalisation("group_std", epsilon=1e9), 7
    moments = [
        advantage_moments(p, z, size, baseline) for p, z in zip(chance_PY, reward_PY, strict=True)
    ]
    found = estimate_moments(moments, chance_PY, weight_PYD * 1e9, size)
    plain = group_moments(chance_PY, weight_PYD, reward_PY)
    np.testing.assert_allclose(found.mean_PD, plain.mean_PD, rtol=1e-6)
    assert found.variance(3) == pytest.approx(plain.at(size).variance(3), rel=1e-6)


@pytest.mark.parametrize("size", [2, 8, 64])
def test_with_0_1_rewards_it_is_the_binomial_sum(scene, size):
    """A route of its own, `normalised`: scores given the number of right answers."""
    chance_PY, weight_PYD, _ = scene
    reward_PY = np.tile(LAWS["binary"], (PROMPTS, 1))
    other = normalised_moments(right_and_wrong(chance_PY, weight_PYD, reward_PY), size, 0.01)
    baseline = Normalisation("group_std", epsilon=0.01)
    moments = [
        advantage_moments(p, z, size, baseline) for p, z in zip(chance_PY, reward_PY, strict=True)
    ]
    found = estimate_moments(moments, chance_PY, weight_PYD, size)
    np.testing.assert_allclose(found.within_P, other.variance, rtol=1e-9)
    value_P = (chance_PY * reward_PY).sum(axis=1)
    mu_PD = np.einsum("py,pyd->pd", chance_PY * reward_PY, weight_PYD)
    sigma_P = np.sqrt(value_P * (1 - value_P))
    bias_P = np.linalg.norm(found.mean_PD - mu_PD / sigma_P[:, None], axis=1)
    np.testing.assert_allclose(bias_P, np.abs(other.bias), rtol=1e-9)


@pytest.mark.parametrize("law", LAWS)
def test_limits_are_what_large_groups_tend_to(scene, law):
    chance_PY, weight_PYD, beside_PYD = scene
    chance_PY = (chance_PY + 1) / (1 + OUTCOMES)  # no reward is rare
    weight_PYD = weight_PYD - np.einsum("py,pyd->pd", chance_PY, weight_PYD)[:, None]
    reward_PY = np.tile(LAWS[law], (PROMPTS, 1))
    limits = large_groups(chance_PY, weight_PYD, reward_PY, beside_PYD)
    mean_z_P = (chance_PY * reward_PY).sum(axis=1)
    sigma_P = np.sqrt((chance_PY * np.square(reward_PY - mean_z_P[:, None])).sum(axis=1))
    mu_PD = np.einsum("py,pyd->pd", chance_PY * reward_PY, weight_PYD) / sigma_P[:, None]
    target_PD = mu_PD + np.einsum("py,pyd->pd", chance_PY, beside_PYD)
    scaled = []
    for size in (32, 64):
        moments = [
            advantage_moments(p, z, size, Normalisation("group_std"))
            for p, z in zip(chance_PY, reward_PY, strict=True)
        ]
        found = estimate_moments(moments, chance_PY, weight_PYD, size, beside_PYD)
        scaled.append((size * (found.mean_PD - target_PD), size * found.within_P))
    (bias, variance), (bias_2, variance_2) = scaled
    np.testing.assert_allclose(2 * bias_2 - bias, limits.bias_PD, rtol=0.03, atol=0.03)
    np.testing.assert_allclose(2 * variance_2 - variance, limits.variance_P, rtol=0.03)


def test_the_limits_of_0_1_rewards_are_those_known(scene):
    chance_PY, weight_PYD, _ = scene
    reward_PY = np.tile(LAWS["binary"], (PROMPTS, 1))
    known = right_and_wrong(chance_PY, weight_PYD, reward_PY)
    found = large_groups(chance_PY, weight_PYD, reward_PY)
    np.testing.assert_allclose(np.linalg.norm(found.bias_PD, axis=1), known.bias)
    np.testing.assert_allclose(found.variance_P, known.within + known.shift)
    np.testing.assert_allclose(found.sigma_variance_P, known.within + 4 * known.shift)


@pytest.mark.parametrize(
    ("rewards", "baseline", "message"),
    [
        ([1.0, 1.0], Normalisation("group_std"), "all rewards are 1.0"),
        ([0.0, 1.0], Normalisation("group_std_redrawn", floor=0.8), "has a std of at least 0.8"),
        ([0.0, 0.1, np.pi], Normalisation("group_std"), "are not evenly spaced"),
    ],
)
def test_what_has_no_moments_is_refused(rewards, baseline, message):
    law = np.full(len(rewards), 1 / len(rewards))
    with pytest.raises(ValueError, match=message):
        advantage_moments(law, np.array(rewards), 2, baseline)


# Without normalisation


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
def test_without_normalisation_it_is_a_walk_over_all_groups(outcomes, group_size):
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
