from __future__ import annotations

import math

import numpy as np
import pytest
from scipy.stats import t

from grpo_ustat.estimators.intervals import (
    clustered_mean,
    clustered_wilson,
    decide,
    jackknife_variance,
    mean_reward,
    paired_difference,
    pool_mean_reward,
    pooled_dof,
    t_interval,
    wilson,
)


def test_jackknife_of_a_mean_is_its_textbook_variance(rng):
    x = rng.normal(size=9)
    deleted = (x.sum() - x) / 8
    assert jackknife_variance(deleted) == pytest.approx(x.var(ddof=1) / 9)


def test_t_interval_by_hand():
    """t at 0.975 with 4 degrees of freedom is 2.7764."""
    interval = t_interval(1.0, 4.0, 4)
    assert interval.low == pytest.approx(1 - 2 * 2.776445, abs=1e-5)


def test_clustering_is_wider_than_pretending_independence():
    """Ten questions, each always right or always wrong: the width is that of ten values."""
    values = np.repeat(np.array([[0.0], [1.0]] * 5), 100, axis=1)
    interval = clustered_mean(values)
    assert interval.high - interval.estimate == pytest.approx(
        2.262157 * np.sqrt(0.25 / 9), abs=1e-5
    )


def test_pairing_removes_what_both_share():
    before = np.array([0.0, 1.0, 0.0, 1.0])
    assert paired_difference(before + 0.5, before).low == pytest.approx(0.5)


def test_wilson_at_the_edge_stays_inside():
    assert wilson(0, 10).low == pytest.approx(0.0, abs=1e-12)
    assert wilson(0, 10).high == pytest.approx(0.2775, abs=1e-4)


@pytest.mark.parametrize("prompts", [4, 12, 60])
def test_an_accuracy_over_a_few_prompts_is_covered(prompts, rng):
    """Chances of Beta(1, 2), 32 completions: 95 % nominal, 800 draws, standard error .008."""
    chances = rng.beta(1, 2, (800, prompts))
    values = rng.binomial(32, chances) / 32
    intervals = [clustered_wilson(own, most=32) for own in values]
    covered = np.mean([interval.low <= 1 / 3 <= interval.high for interval in intervals])
    assert covered > 0.92


def test_a_mean_reward_has_the_interval_of_its_kind(rng):
    """0/1 rewards Wilson's, others that of a mean, without bounds that nobody has told."""
    right = (rng.random((9, 4)) < 0.3).astype(float)
    assert mean_reward(right) == clustered_wilson(right.mean(axis=1), most=4)
    assert mean_reward(right[:1]) == wilson(right[0].sum(), 4)
    shares = 0.5 + 0.02 * rng.normal(size=(12, 8))
    assert mean_reward(shares) == clustered_mean(shares)
    assert mean_reward(np.array([[0.0, 0.1], [0.9, 1.0]])).low < 0
    assert mean_reward(2 * right - 1) == clustered_mean(2 * right - 1)


@pytest.mark.parametrize("graded", [False, True])
def test_the_mean_reward_of_a_few_prompts_is_covered_given_these(graded, rng):
    """Chances .1, .6 and .8, 16 completions each: the mean .5 of these prompts, 95 % nominal."""
    draws = rng.random((800, 3, 16)) < np.array([0.1, 0.6, 0.8])[:, None]
    rewards = draws.astype(float) if not graded else 0.8 * draws + 0.2 * rng.random(draws.shape)
    truth = 0.8 * 0.5 + 0.1 if graded else 0.5
    intervals = [pool_mean_reward(own) for own in rewards]
    assert np.mean([one.low <= truth <= one.high for one in intervals]) > 0.93
    assert pool_mean_reward(np.repeat(rewards[0], 2, axis=0)) == mean_reward(
        np.repeat(rewards[0], 2, axis=0)
    )


def test_pooled_dof_of_equal_variances_adds_up():
    assert pooled_dof(np.ones(5), 7) == pytest.approx(35)


@pytest.mark.parametrize("estimate", [-3.0, 0.4, 2.5])
def test_a_decision_against_one_bound_is_student_s_test(estimate):
    found = decide(lambda level: t_interval(estimate, 1.0, 7, level), least=0.0)
    assert found.inside == (estimate > 0)
    assert found.p_value == pytest.approx(2 * t.sf(abs(estimate), 7), rel=1e-4)


def test_a_decision_for_the_inside_has_to_exclude_both_bounds():
    found = decide(lambda level: t_interval(0.2, 1.0, 7, level), -2.0, 2.0)
    assert found.inside
    assert found.p_value == pytest.approx(2 * t.sf(1.8, 7), rel=1e-4)
    outside = decide(lambda level: t_interval(3.0, 1.0, 7, level), -2.0, 2.0)
    assert (outside.inside, round(outside.p_value, 4)) == (False, round(2 * t.sf(1.0, 7), 4))


def test_nothing_known_decides_nothing():
    found = decide(lambda level: t_interval(math.nan, 1.0, 7, level))
    assert (found.inside, found.p_value) == (None, 1.0)
