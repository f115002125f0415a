"""Unequal group sizes: every allocation of a few, the error enumerated, held-out savings."""

from __future__ import annotations

import itertools

import numpy as np
import pytest
from golden import naming
from prompt_pools import pool_with_lengths, prompts
from tabular import TabularPolicy
from ustatistics import pairwise

from grpo_ustat.estimators.allocation import (
    MEAN_SIZES,
    MEASURED_NOISE,
    allocate,
    allocation_savings,
    plans_of,
    shrunken_variance,
)
from grpo_ustat.estimators.halves import group_error, halves_of
from grpo_ustat.records import ScorePool


def half_of(first, second, value=0.5):
    """What `halves_of` gives, from true A and B."""
    values = np.full(len(first), value)
    return {
        "first": np.array(first, float), "second": np.array(second, float), "value": values,
        "variance": values * (1 - values), "score": values,
    }  # fmt: skip


def test_the_plan_is_the_least_of_all_allocations():
    """3 prompts and 14 completions, a prompt without noise among them."""
    first, second = np.array([9.0, 1.0, 0.0]), np.array([1.0, 8.0, 0.0])
    found = allocate(plans_of(half_of(first, second), 8, True)[MEASURED_NOISE], 3, 14)
    errors = {
        sizes: group_error(first, second, np.array(sizes)).sum()
        for sizes in itertools.product(range(2, 11), repeat=3)
        if sum(sizes) == 14
    }
    assert tuple(found) == min(errors, key=lambda sizes: errors[sizes])
    with pytest.raises(ValueError, match=naming("5 completions", "3 prompts", 6)):
        allocate(lambda sizes: sizes, 3, 5)


def test_plans_of_equal_prompts_are_equal_groups():
    """Also where nothing is to be saved: the rest is spread, not given to the first."""
    for value in (0.3, 0.0):
        for name, savings in plans_of(half_of([2.0] * 5, [1.0] * 5, value), 8, True).items():
            assert allocate(savings, 5, 40).tolist() == [8] * 5, name


def test_knapsack_takes_the_largest_gains_of_its_value():
    half = half_of([1.0] * 4, [1.0] * 4)
    half["value"] = np.array([0.05, 0.3, 0.8, 1.0])

    def value(sizes):
        p = half["value"]
        return (p * (1 - p) ** 2 * (1 - p**sizes - (1 - p) ** sizes)).sum()

    found = allocate(plans_of(half, 8, True)["Knapsack RL"], 4, 20)
    options = (s for s in itertools.product(range(2, 15), repeat=4) if sum(s) == 20)
    best = max(value(np.array(sizes)) for sizes in options)
    assert value(found) == pytest.approx(best, rel=1e-12)


def test_the_error_of_unequal_groups_is_that_of_every_outcome():
    """Groups of 2 and 3 at two prompts of two outcomes each, all 32 of them."""
    rng = np.random.default_rng(0)
    problem = TabularPolicy(rng.normal(size=(2, 2, 3)), rng.normal(size=3), np.eye(2))
    sizes, error = (2, 3), 0.0
    groups = [list(itertools.product(range(2), repeat=size)) for size in sizes]
    for outcome in itertools.product(*groups):
        chance = np.prod([
            problem.probabilities_PY[x, list(group)].prod() for x, group in enumerate(outcome)
        ])  # fmt: skip
        estimates = [
            pairwise(problem.scores_PYD[x, list(group)], problem.rewards_PY[x, list(group)])
            for x, group in enumerate(outcome)
        ]
        error += (
            chance * np.square((np.sum(estimates, axis=0) - problem.gradient_PD.sum(0)) / 2).sum()
        )
    moments = problem.moments()
    first, second = moments.a_v - moments.g_sq, moments.d + moments.g_sq
    assert error == pytest.approx(group_error(first, second, np.array(sizes)).sum() / 4, rel=1e-12)


def test_held_out_errors_are_the_true_ones_of_the_plans():
    """The same 12 prompts, 60 pools of 12: the mean judged error is that of the exact moments, the
    error in sample far below it.
    """
    rng = np.random.default_rng(1)
    problem = prompts(12, rng)
    moments = problem.moments()
    first, second = moments.a_v - moments.g_sq, moments.d + moments.g_sq
    judged, true, own = [], [], []
    for _ in range(60):
        halves, _ = halves_of(pool_with_lengths(problem, 12, rng))
        half, other = ({name: x[k, 0] for name, x in halves.items()} for k in (0, 1))
        sizes = allocate(plans_of(half, 6, True)[MEASURED_NOISE], 12, 96)
        judged.append(group_error(other["first"], other["second"], sizes).sum())
        own.append(group_error(half["first"], half["second"], sizes).sum())
        true.append(group_error(first, second, sizes).sum())
    error = np.std(np.subtract(judged, true), ddof=1) / 60**0.5
    assert abs(np.mean(judged) - np.mean(true)) < 3 * error
    assert np.mean(own) < np.mean(true) - 3 * error


def test_known_differences_are_saved():
    """Half of 40 prompts have scores 6 times as long: equal groups waste completions on the rest.

    With G ~ 6 and 1 the first order falls to (6 + 1)^2 / (2 (36 + 1)) = .66 of it.
    """
    rng = np.random.default_rng(2)
    problem = prompts(40, rng, beta=(20.0, 20.0), spread=0.0, slope=0.0)
    features = problem.features_PYD * np.where(np.arange(40) % 2, 6.0, 1.0)[:, None, None]
    problem = TabularPolicy(features, 0.0 * problem.theta_D, problem.rewards_PY)
    rows = {
        (row.plan, row.group_size): row
        for row in allocation_savings(pool_with_lengths(problem, 64, rng))
    }
    best = rows["shrunken p(1-p) x score norm", 8].change
    assert -0.36 < best.estimate < -0.25 and best.low < -0.24 and best.high < -0.2
    assert rows[MEASURED_NOISE, 8].in_sample < rows[MEASURED_NOISE, 8].change.estimate < -0.2
    assert abs(rows["shrunken p(1-p)", 8].change.estimate) < 0.03
    assert len(rows) == 6 * len(MEAN_SIZES)


def test_other_rewards_and_small_pools():
    rng = np.random.default_rng(3)
    pool = pool_with_lengths(prompts(12, rng), 8, rng)
    partial = ScorePool(
        pool.rewards_PN / 2 + 0.1, pool.gram_PNN, pool.lengths_PN, pool.features_PNR,
        pool.centred_sums_PR,
    )  # fmt: skip
    plans = {row.plan for row in allocation_savings(partial)}
    assert plans == {MEASURED_NOISE, "variance of rewards", "G = 2 for zero-variance prompts"}
    assert allocation_savings(pool_with_lengths(prompts(9, rng), 8, rng)) == []
    silent = ScorePool(
        0 * pool.rewards_PN, pool.gram_PNN, pool.lengths_PN, pool.features_PNR,
        pool.centred_sums_PR,
    )  # fmt: skip
    assert all(np.isnan(row.change).all() for row in allocation_savings(silent))


def test_shrunken_chances_are_those_of_the_law():
    """p (1-p) of Beta(2, 3) over 4000 prompts: without bias, nearer to it than counts."""
    rng = np.random.default_rng(4)
    p = rng.beta(2, 3, 4000)
    counts = rng.binomial(8, p).astype(float)
    found, raw = shrunken_variance(counts, 8), counts / 8 * (1 - counts / 8) * 8 / 7
    assert found.mean() == pytest.approx((p * (1 - p)).mean(), abs=0.003)
    assert np.square(found - p * (1 - p)).mean() < 0.5 * np.square(raw - p * (1 - p)).mean()
