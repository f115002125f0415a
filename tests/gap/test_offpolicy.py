"""Algorithm 2 off-policy: against loops over groups and tokens, and against finite differences."""

from __future__ import annotations

import itertools
import math

import numpy as np
import pytest
from offpolicy_problem import BETA, GROUP, LENGTH, small_setting, token_kl_P
from reference import plain_advantages

from grpo_ustat.config.schema import ConfigError
from grpo_ustat.gap.offpolicy import (
    Setting,
    draw,
    estimate,
    exact_path,
    path_errors,
    random_path,
)
from grpo_ustat.gap.sequences import SequencePolicy

STEP = 1e-5
RATES = np.array([1e-3, 1e-2, 1e-1])


@pytest.fixture
def setting(rng):
    return small_setting(rng)


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


def every_group(setting, current, level, beta):
    """All (chance, estimate) of one prompt drawn evenly and its group."""
    for p in range(2):
        tables = [written_out(setting, current, p, y, level) for y in range(4)]
        for group in itertools.product(range(4), repeat=GROUP):
            rewards = [setting.reward_PY[p, y] for y in group]
            found = sum(
                a * tables[y][0] + beta * tables[y][1]
                for a, y in zip(
                    plain_advantages("leave_one_out", rewards, None), group, strict=True
                )
            )
            yield math.prod(setting.old.probabilities_PY[p, list(group)]) / 2, found / GROUP


def plain_target(setting, current, beta, prefixes):
    """Central differences of J - beta sum_t E KL, the law of the prefixes fixed."""

    def worth(theta_D):
        at = current.at(theta_D)
        lost_P = token_kl_P(at, setting.reference, prefixes.probabilities_PY)
        return (at.value_P(setting.reward_PY) - beta * lost_P).mean()

    units = np.eye(8) * STEP
    return np.array(
        [(worth(current.theta_D + u) - worth(current.theta_D - u)) / (2 * STEP) for u in units]
    )


@pytest.mark.parametrize("level", ["token", "sequence"])
@pytest.mark.parametrize("part", ["", "_policy"])
def test_equals_a_walk_over_all_groups(setting, current, level, part):
    beta = 0.0 if part else BETA
    walk = zip(*every_group(setting, current, level, beta), strict=True)
    chance, estimates = (np.array(x) for x in walk)
    mean = chance @ estimates
    variance = chance @ np.square(estimates - mean).sum(axis=1)
    found = setting.quality(current)
    assert found[f"{level}_variance{part}"] == pytest.approx(variance, rel=1e-12)
    bias = mean - plain_target(setting, current, beta, current)
    assert found[f"{level}_bias2{part}"] == pytest.approx(bias @ bias, rel=1e-6, abs=1e-18)


def test_the_penalty_alone_and_with_the_prefixes_of_those_who_wrote(setting, current):
    walks = [every_group(setting, current, "token", beta) for beta in (BETA, 0.0)]
    mean = sum(a[0] * (a[1] - b[1]) for a, b in zip(*walks, strict=True))
    found = setting.quality(current)
    for name, prefixes in (("", current), ("_old_prefixes", setting.old)):
        parts = [plain_target(setting, current, beta, prefixes) for beta in (BETA, 0.0)]
        bias = mean - (parts[0] - parts[1])
        assert found[f"token_bias2_kl{name}"] == pytest.approx(bias @ bias, rel=1e-6)


def test_on_policy_nothing_is_biased_and_levels_are_one(setting):
    found = setting.quality(setting.old)
    assert max(v for k, v in found.items() if "bias2" in k) < 1e-30
    assert found["token_variance"] == pytest.approx(found["sequence_variance"], rel=1e-14)
    assert found["ratio_second_moment"] == pytest.approx(1, rel=1e-14)


def test_one_token_has_no_other_tokens_ratio_to_miss(rng):
    """Of completions of one token the policy's part is unbiased at every theta."""
    old = SequencePolicy(rng.normal(size=(1, 3, 3)), rng.normal(size=(2, 3)))
    setting = Setting(old, old.at(np.zeros(9)), rng.random((2, 3)), BETA, 1, GROUP)
    found = setting.quality(old.at(rng.normal(size=9)))
    assert found["token_bias2_policy"] < 1e-30 < 1e-6 < found["token_bias2_kl"]


def test_first_order_bias_is_the_derivative(setting, rng):
    direction = rng.normal(size=8)

    def bias(step):
        at = setting.old.at(setting.old.theta_D + step * direction)
        weight, penalty = setting.tables(at, "token")
        summed = setting.reward_PY[..., None] * weight + penalty
        mean = np.einsum("py,pyd->d", setting.old.probabilities_PY, summed) / 2
        return mean - sum(setting.target(at))

    slope = (bias(STEP) - bias(-STEP)) / (2 * STEP)
    np.testing.assert_allclose(setting.first_order_bias(direction), slope, atol=1e-9)


def test_an_estimate_is_the_average_over_its_minibatch(setting, current):
    prompts, outcomes = np.array([1, 0]), np.array([[0, 3, 1], [2, 2, 1]])
    expected = np.zeros(8)
    for p, group in zip(prompts, outcomes, strict=True):
        rewards = [setting.reward_PY[p, y] for y in group]
        for a, y in zip(plain_advantages("leave_one_out", rewards, None), group, strict=True):
            weight, penalty = written_out(setting, current, p, y, "token")
            expected += (a * weight + BETA * penalty) / 6
    np.testing.assert_allclose(estimate(setting, current, prompts, outcomes), expected, rtol=1e-12)


# Paths: draws, steps, and what is read from many


def test_draws_follow_the_policy_that_writes(setting):
    found = draw(setting, 30_000, seed=0, replicate=0)
    for prompt in range(2):
        outcomes = found.outcome_UBG[found.prompt_UB == prompt].ravel()
        share = np.bincount(outcomes, minlength=4) / len(outcomes)
        np.testing.assert_allclose(share, setting.old.probabilities_PY[prompt], atol=0.01)
    again, other = (draw(setting, 30_000, seed=0, replicate=r) for r in (0, 1))
    assert (again.outcome_UBG == found.outcome_UBG).all()
    assert (other.outcome_UBG != found.outcome_UBG).any()


def test_paths_are_steps_one_after_the_other(setting):
    draws = draw(setting, 2, seed=3, replicate=5)
    theta, target = setting.old.theta_D, setting.old.theta_D
    for u in range(2):
        theta = theta + 0.1 * estimate(
            setting, setting.old.at(theta), draws.prompt_UB[u], draws.outcome_UBG[u]
        )
        target = target + 0.1 * sum(setting.target(setting.old.at(target)))
    np.testing.assert_array_equal(random_path(setting, draws, 0.1).theta_D, theta)
    np.testing.assert_array_equal(exact_path(setting, 2, 0.1)[-1].theta_D, target)


def test_a_path_that_runs_away_is_refused(setting):
    with pytest.raises(ConfigError, match="learning_rate=10000.0 changes a parameter by"):
        random_path(setting, draw(setting, 2, seed=0, replicate=0), 1e4)
    with pytest.raises(ConfigError, match="learning_rate=100000.0"):
        exact_path(setting, 2, 1e5)


def test_errors_are_those_at_the_ends_of_the_paths(setting):
    found = path_errors(setting, RATES, updates=2, replicates=3, seed=7)
    for replicate in range(3):
        draws = draw(setting, 2, seed=7, replicate=replicate)
        for e, rate in enumerate(RATES):
            expected = setting.quality(random_path(setting, draws, rate))
            own = {name: values[e, replicate] for name, values in found.random.items()}
            assert own == expected
    at_end = setting.quality(exact_path(setting, 2, RATES[2])[-1])
    assert {name: values[2] for name, values in found.exact.items()} == at_end
    assert found.start == setting.quality(setting.old)


def test_leading_terms_are_the_limits_of_bias_squared(setting):
    found = path_errors(setting, np.array([1e-5, 1e-4, 1e-3]), updates=3, replicates=4, seed=1)
    limits = found.random["token_bias2"][0] / 1e-10
    np.testing.assert_allclose(limits, found.leading.random_R, rtol=1e-3)
    assert found.exact["token_bias2"][0] / 1e-10 == pytest.approx(found.leading.exact, rel=1e-3)


def test_slope_and_its_jackknife_are_those_written_out(setting):
    found = path_errors(setting, RATES, updates=1, replicates=4, seed=2)
    low, high = found.random["token_bias2"][:2]

    def slope(kept):
        return np.log(high[kept].mean() / low[kept].mean()) / np.log(10)

    left = [slope(np.delete(np.arange(4), r)) for r in range(4)]
    error = np.sqrt(3 / 4 * np.square(left - np.mean(left)).sum())
    interval = found.slope("token_bias2")
    assert interval.estimate == pytest.approx(slope(np.arange(4)), rel=1e-12)
    assert interval.high - interval.estimate == pytest.approx(3.182446 * error, rel=1e-6)


def test_at_the_tie_both_levels_have_one_error(setting):
    """Variances are those of B prompts divided; biases are not."""
    found = path_errors(setting, RATES, updates=2, replicates=3, seed=7)
    mean = {name: values.mean(axis=1) for name, values in found.random.items()}
    fewer = setting.num_prompts / found.tie()
    token, sequence = (
        mean[f"{k}_bias2"] + mean[f"{k}_variance"] * fewer for k in ("token", "sequence")
    )
    np.testing.assert_allclose(token, sequence, rtol=1e-9)
