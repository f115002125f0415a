"""Dynamic sampling against every outcome of a group, and of its own repeated draws."""

from __future__ import annotations

import itertools

import numpy as np
import pytest
from tabular import TabularPolicy

from grpo_ustat.estimators.baselines import advantages
from grpo_ustat.estimators.dynamic_sampling import kept_groups
from grpo_ustat.estimators.intervals import Interval
from grpo_ustat.estimators.ustatistic import zero_variance_share
from grpo_ustat.records import BaselineContext

SIZE = 3


def kept_error(second, grad_sq, kept, groups):
    """MSE of K times the mean of B kept groups, `( K M - ||grad J||^2 ) / B`.

    Args:
        second: M, of a group of any prompt, zero-variance ones included.
        grad_sq: ||grad J||^2.
        kept: K.
        groups: B.
    """
    return (kept * second - grad_sq) / groups


def policy():
    rng = np.random.default_rng(2)
    rewards = np.array([[1.0, 0.0, 0.0], [1.0, 1.0, 0.0], [0.0, 0.0, 1.0]])
    return TabularPolicy(rng.normal(size=(3, 3, 4)), 0.6 * rng.normal(size=4), rewards)


def outcomes(problem):
    """Of one group of a random prompt: chance, estimate and whether it is kept."""
    chances, estimates, kept = [], [], []
    for p in range(3):
        for group in itertools.product(range(3), repeat=SIZE):
            index = list(group)
            z = problem.rewards_PY[p, index][None]
            weights = advantages("leave_one_out", z, BaselineContext())[0]
            estimates.append(weights @ problem.scores_PYD[p, index] / SIZE)
            chances.append(np.prod(problem.probabilities_PY[p, index]) / 3)
            kept.append(len(set(z[0])) > 1)
    return np.array(chances), np.array(estimates), np.array(kept)


def test_kept_groups_have_the_right_direction_and_one_over_k_times_the_length():
    problem = policy()
    chance, estimate, kept = outcomes(problem)
    share = chance[kept].sum()
    right = (problem.probabilities_PY * problem.rewards_PY).sum(axis=1)
    assert share == pytest.approx((1 - right**SIZE - (1 - right) ** SIZE).mean(), rel=1e-12)
    mean = chance[kept] @ estimate[kept] / share
    np.testing.assert_allclose(mean, problem.gradient_PD.mean(axis=0) / share, rtol=1e-10)
    second = chance @ np.square(estimate).sum(axis=1)
    inside = chance[kept] @ np.square(estimate[kept]).sum(axis=1) / share
    assert inside == pytest.approx(second / share, rel=1e-10)


def test_the_error_of_two_kept_groups_is_that_of_every_pair_of_them():
    problem = policy()
    chance, estimate, kept = outcomes(problem)
    share, gradient = chance[kept].sum(), problem.gradient_PD.mean(axis=0)
    law, inside = chance[kept] / share, share * estimate[kept]
    pairs = (inside[:, None] + inside[None]) / 2 - gradient
    error = np.einsum("i,j,ij->", law, law, np.square(pairs).sum(axis=2))
    second, grad_sq = chance @ np.square(estimate).sum(axis=1), gradient @ gradient
    assert kept_error(second, grad_sq, share, 2) == pytest.approx(error, rel=1e-10)
    # the same generated groups, zero-variance ones not replaced: 2 / K of them
    plain = (second - grad_sq) / (2 / share)
    scale = SIZE * (second - grad_sq) / grad_sq  # n_c of groups of 3
    found = kept_groups(1 - np.full(4, share), SIZE, Interval(scale, scale, scale))
    assert error / plain == pytest.approx(1 - found.break_even.estimate, rel=1e-10)


def test_the_interval_of_the_kept_share_covers():
    """40 prompts of 16 completions each, 400 times: chances of Beta(0.6, 1), groups of 8."""
    rng, hits = np.random.default_rng(0), 0
    draws = rng.beta(0.6, 1.0, 200_000)
    truth = 1 - (draws**8 + (1 - draws) ** 8).mean()
    for _ in range(400):
        z = (rng.random((40, 16)) < rng.beta(0.6, 1.0, (40, 1))).astype(float)
        kept = kept_groups(zero_variance_share(z, 8), 8, Interval(1.0, 1.0, 1.0), most=2).kept
        hits += kept.low <= truth <= kept.high
    assert 0.92 <= hits / 400 <= 0.99


def test_what_is_not_known_stays_unknown():
    found = kept_groups(np.full(6, 0.25), 4, Interval(np.nan, 50.0, np.inf))
    assert np.isnan(found.break_even.estimate) and found.break_even.low == 0
    assert found.break_even.high == pytest.approx((found.generated.high - 1) * 4 / 50)
