"""Covariance matrices against a walk over every batch that there is."""

from __future__ import annotations

from itertools import product

import numpy as np
import pytest
from problems import softmax, unequal

from grpo_ustat.config.gap import SIMULATED_BASELINES
from grpo_ustat.estimators.baselines import BASELINES
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
