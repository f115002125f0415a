"""Correlation of reward functions within prompts: against deleting one by one, and by hand."""

from __future__ import annotations

import math

import numpy as np
import pytest

from grpo_ustat.estimators.intervals import jackknife_interval
from grpo_ustat.estimators.reward_correlation import reward_correlation


def written_out(prompts):
    """Of lists of (first, second): the mean covariance over the root of the mean variances."""
    moments = [np.cov(np.array(rows).T) for rows in prompts]
    mean = sum(moments) / len(moments)
    return mean[0, 1] / math.sqrt(mean[0, 0] * mean[1, 1])


def test_it_is_the_one_written_out(rng):
    z = rng.random((4, 5, 3))
    rows = [[list(row[[0, 2]]) for row in prompt] for prompt in z]
    left_out = [[written_out(rows[:x] + rows[x + 1 :]) for x in range(4)]]
    slow = jackknife_interval(written_out(rows), np.array(left_out))
    np.testing.assert_allclose(reward_correlation(z, 0, 2), slow, rtol=1e-10)


def test_opposite_functions_and_one_that_never_varies(rng):
    z = rng.random((3, 4, 1))
    both = np.concatenate([z, 2 - 3 * z, np.full((3, 4, 1), 0.5)], axis=-1)
    assert reward_correlation(both, 0, 1).estimate == pytest.approx(-1)
    assert math.isnan(reward_correlation(both, 0, 2).estimate)
