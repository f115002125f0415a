"""Paths of Algorithm 2: draws, steps, and what is read from many."""

from __future__ import annotations

import numpy as np
import pytest
from offpolicy_bed import small_setting

from grpo_ustat.config.schema import ConfigError
from grpo_ustat.gap.offpolicy import estimate
from grpo_ustat.gap.offpolicy_paths import draw, exact_path, path_errors, random_path

RATES = np.array([1e-3, 1e-2, 1e-1])


@pytest.fixture
def setting(rng):
    return small_setting(rng)


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
    with pytest.raises(ConfigError, match="learning_rate=10000.0 takes a parameter .* away"):
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
