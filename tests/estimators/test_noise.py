"""Averages over training steps against pooled arrays, slow deletions and the truth."""

from __future__ import annotations

import numpy as np
import pytest

from grpo_ustat.estimators.intervals import ratio_interval
from grpo_ustat.estimators.moments import pool_gradient_weights
from grpo_ustat.estimators.noise import group_terms, noise_estimate
from grpo_ustat.estimators.scaling import prompt_scaling, scaling_estimate

DIMENSIONS = 3


def groups(rng, prompts, size, shift=1.0):
    """Rewards, squared score norms and gradient Gram matrix; scores with mean 0 given the prompt.

    The prompt's gradient is `shift (1, 1, 1)` and noise of variance 0.25 a dimension between
    prompts: reward = score . gradient + noise, scores of the identity as covariance.
    """
    gradient_PD = shift + 0.5 * rng.standard_normal((prompts, DIMENSIONS))
    scores_PGD = rng.standard_normal((prompts, size, DIMENSIONS))
    rewards_PG = np.einsum("pgd,pd->pg", scores_PGD, gradient_PD) + rng.standard_normal(
        (prompts, size)
    )
    ghat_PD = np.einsum("pg,pgd->pd", pool_gradient_weights(rewards_PG), scores_PGD)
    return rewards_PG, np.square(scores_PGD).sum(axis=2), ghat_PD @ ghat_PD.T


def without(arrays, p):
    rewards_PG, norms_PG, gram_PP = arrays
    keep = np.arange(len(rewards_PG)) != p
    return rewards_PG[keep], norms_PG[keep], gram_PP[np.ix_(keep, keep)]


def test_one_step_is_the_scaling_law_of_its_groups(rng):
    arrays = groups(rng, 12, 5)
    expected, _ = prompt_scaling(*arrays)
    estimate = noise_estimate([group_terms(*arrays)], 5)
    for name in ("c1", "c2", "c3", "gstar"):
        np.testing.assert_allclose(estimate.intervals[name], expected[name], rtol=1e-9)


def test_ratios_are_of_means_over_the_steps(rng):
    steps = [group_terms(*groups(rng, 6, 4)) for _ in range(3)]
    each = [noise_estimate([step], 4).intervals for step in steps]
    whole = noise_estimate(steps, 4).intervals
    mean = {k: np.mean([one[k].estimate for one in each]) for k in ("c1", "c2", "c3", "grad_sq")}
    for name, value in mean.items():
        assert whole[name].estimate == pytest.approx(value)
    error = 4 * mean["c1"] + mean["c2"] + mean["c3"] / 3
    assert whole["noise_scale"].estimate == pytest.approx(error / mean["grad_sq"])
    best = 1 + np.sqrt(mean["c3"] / mean["c1"])
    error = best * mean["c1"] + mean["c2"] + mean["c3"] / (best - 1)
    assert whole["noise_scale_best"].estimate == pytest.approx(error / mean["grad_sq"])


def test_intervals_leave_out_one_group_of_a_step(rng):
    arrays = [groups(rng, 5, 4) for _ in range(2)]
    steps = [group_terms(*one) for one in arrays]
    names = ("c1", "c2", "c3", "grad_sq")

    def averages(of):
        found = noise_estimate(of, 4).intervals
        return [found[name].estimate for name in names]

    replicates = {name: np.empty((2, 5)) for name in names}
    for k in range(2):
        for p in range(5):
            changed = [*steps]
            changed[k] = group_terms(*without(arrays[k], p))
            for name, value in zip(names, averages(changed), strict=True):
                replicates[name][k, p] = value
    estimate = noise_estimate(steps, 4)
    whole = dict(zip(names, averages(steps), strict=True))
    expected = scaling_estimate(whole, replicates)
    np.testing.assert_allclose(estimate.scaling.covariance_33, expected.covariance_33, rtol=1e-8)
    error = [4 * x["c1"] + x["c2"] + x["c3"] / 3 for x in (whole, replicates)]
    interval = ratio_interval(error[0], whole["grad_sq"], error[1], replicates["grad_sq"])
    np.testing.assert_allclose(estimate.intervals["noise_scale"], interval, rtol=1e-8)


def test_equal_rewards_add_nothing_whatever_the_scores(rng):
    rewards_PG, norms_PG, gram_PP = groups(rng, 4, 4)
    rewards_PG[1] = 1.0
    gram_PP[1], gram_PP[:, 1] = 0, 0
    full = group_terms(rewards_PG, norms_PG, gram_PP)
    norms_PG[1] = 0
    bare = group_terms(rewards_PG, norms_PG, gram_PP)
    for one, other in zip(full, bare, strict=True):
        np.testing.assert_array_equal(one, other)
    assert [x[1] for x in full[:4]] == [0, 0, 0, 0]
    assert noise_estimate([full], 4).intervals["zero_variance"].estimate == 0.25


def test_steps_of_few_groups_are_the_units(rng):
    """Two groups a step: no interval from three steps, the steps' own from four."""
    steps = [group_terms(*groups(rng, 2, 4)) for _ in range(4)]
    assert np.isnan(noise_estimate(steps[:3], 4).intervals["c2"].low)
    assert np.isnan(noise_estimate(steps[:3], 4).scaling.covariance_33).all()
    interval = noise_estimate(steps, 4).intervals["c2"]
    values = [noise_estimate([step], 4).intervals["c2"].estimate for step in steps]
    half = 3.18244631 * np.std(values, ddof=1) / 2
    np.testing.assert_allclose(
        interval, [np.mean(values), *(np.mean(values) + half * np.array([-1, 1]))]
    )


def test_nothing_but_equal_rewards_is_no_estimate():
    silent = group_terms(np.ones((6, 4)), np.zeros((6, 4)), np.zeros((6, 6)))
    estimate = noise_estimate([silent] * 4, 4)
    assert np.isnan(estimate.intervals["gstar"].estimate)
    assert estimate.as_result()["gstar"] is None
    assert estimate.intervals["zero_variance"].estimate == 1


def test_the_truth_is_in_the_intervals(rng):
    """||g||^2 = 3 |shift|^2 + 0.75 between prompts; 100 runs of 3 steps of 20 groups of 8.

    Given the prompt E q = 3, Var Z = |g|^2 + 1, and E[q (Z-V)^2] = (D + 2)|g|^2 + D: so
    C1 = 0.75, ||grad J||^2 = 3, C2 = 4 E|g|^2 + 3, C3 = 4 E|g|^2 + 3, E|g|^2 = 3.75.
    """
    truth = {"c1": 0.75, "grad_sq": 3.0, "c2": 18.0, "c3": 18.0}
    truth["noise_scale"] = (8 * 0.75 + 18 + 18 / 7) / 3
    truth["gstar"] = 1 + np.sqrt(18 / 0.75)
    inside, sums = dict.fromkeys(truth, 0), dict.fromkeys(("c1", "c2", "c3", "grad_sq"), 0.0)
    for _ in range(100):
        steps = [group_terms(*groups(rng, 20, 8)) for _ in range(3)]
        intervals = noise_estimate(steps, 8).intervals
        for name, value in truth.items():
            inside[name] += intervals[name].low <= value <= intervals[name].high
        for name in sums:
            sums[name] += intervals[name].estimate / 100
    assert all(count >= 90 for count in inside.values()), inside
    for name, value in sums.items():
        assert value == pytest.approx(truth[name], rel=0.08), name


def test_a_step_of_one_group_is_refused(rng):
    with pytest.raises(ValueError, match="at least 2 groups, got 1"):
        group_terms(*groups(rng, 1, 4))
