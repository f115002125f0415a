"""Covariance matrices against a walk over every batch that there is."""

from __future__ import annotations

from itertools import product

import numpy as np
import pytest
from problems import coins, softmax, unequal

from grpo_ustat.config.gap import SIMULATED_BASELINES
from grpo_ustat.estimators.baselines import BASELINES
from grpo_ustat.estimators.moments import exact_moments
from grpo_ustat.gap.covariance import baseline_values, covariance_parts
from grpo_ustat.records import BaselineContext


def law_at(problem):
    probability_PYR, score_PYKR = problem.law(problem.start_K[:, None])
    return probability_PYR[..., 0], score_PYKR[..., 0]


def walked(problem, baseline, group_size):
    """Mean and covariance of one group's estimate, over every prompt and every group."""
    probability_PY, score_PYK = law_at(problem)
    value_P = baseline_values(*problem.law(problem.start_K[:, None]), problem.rewards_PY, baseline)[
        :, 0
    ]
    first, second, total = 0.0, 0.0, 0.0
    for x, (probability_Y, score_YK) in enumerate(zip(probability_PY, score_PYK, strict=True)):
        for group in product(range(len(probability_Y)), repeat=group_size):
            rewards = problem.rewards_PY[x, list(group)]
            advantage = rewards - value_P[x]
            if baseline == "leave_one_out":
                advantage = BASELINES[baseline].advantage(rewards[None], BaselineContext())[0]
            estimate = advantage @ score_YK[list(group)] / group_size
            weight = probability_Y[list(group)].prod() / len(probability_PY)
            first, total = first + weight * estimate, total + weight
            second = second + weight * np.outer(estimate, estimate)
    assert total == pytest.approx(1, abs=1e-12)
    return first, second - np.outer(first, first)


@pytest.mark.parametrize("baseline", SIMULATED_BASELINES)
@pytest.mark.parametrize("make", [unequal, softmax])
def test_it_is_that_of_every_batch_there_is(make, baseline):
    problem = make()
    mean_K, covariance = walked(problem, baseline, 3)
    np.testing.assert_allclose(mean_K, problem.gradient(problem.start_K[:, None])[:, 0], atol=1e-14)
    found = covariance_parts(*problem.law(problem.start_K[:, None]), problem.rewards_PY, baseline)
    np.testing.assert_allclose(found.covariance(1, 3)[..., 0], covariance, atol=1e-14)
    np.testing.assert_allclose(found.covariance(5, 3)[..., 0], covariance / 5, atol=1e-14)


def test_traces_are_the_closed_forms_of_the_moments():
    problem = coins()
    probability_PY, score_PYK = law_at(problem)
    g_PK = np.einsum("py,pyk->pk", probability_PY * problem.rewards_PY, score_PYK)
    q_PY, g_sq_P = np.square(score_PYK).sum(axis=2), np.square(g_PK).sum(axis=1)
    moments = exact_moments(q_PY, problem.rewards_PY, probability_PY, g_sq_P)
    found = covariance_parts(
        *problem.law(problem.start_K[:, None]), problem.rewards_PY, "leave_one_out"
    )
    traces = [np.trace(x[..., 0]) for x in (found.prompts, found.completions, found.pairs)]
    grad_sq = np.square(g_PK.mean(axis=0)).sum()
    expected = [
        moments.g_sq.mean() - grad_sq,
        (moments.a_v - moments.g_sq).mean(),
        (moments.d + moments.g_sq).mean(),
    ]
    np.testing.assert_allclose(traces, expected, rtol=1e-12)


def test_without_style_a_fair_coin_is_worked_by_hand():
    """s = +-2a, z in {0, 1}, V = 1/2: E[s^2 (z - V)^2] = a^2, g = a, E[s^2] sigma^2 = a^2."""
    problem = unequal(value_P=np.array([0.5, 0.5]))
    found = covariance_parts(*problem.law(np.zeros((1, 1))), problem.rewards_PY, "leave_one_out")
    a = 0.15
    numbers = [float(x[0, 0, 0]) for x in (found.prompts, found.completions, found.pairs)]
    np.testing.assert_allclose(numbers, [a**2, 0.0, 2 * a**2], atol=1e-15)


def test_a_rule_that_is_biased_has_none():
    problem = unequal()
    with pytest.raises(ValueError, match="'group_mean' has no exact covariance: use none, oracle"):
        covariance_parts(*problem.law(np.zeros((1, 1))), problem.rewards_PY, "group_mean")
