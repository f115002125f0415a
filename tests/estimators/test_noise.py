"""Averages over training steps against pooled arrays, slow deletions and the truth."""

from __future__ import annotations

import numpy as np
import pytest
from reference import minibatch_mse
from tabular import TabularPolicy

from grpo_ustat.estimators.intervals import Interval, ratio_interval
from grpo_ustat.estimators.moments import pool_gradient_weights
from grpo_ustat.estimators.noise import (
    group_terms,
    noise_estimate,
    noise_of_steps,
    noise_scale,
    noise_share,
    prompt_share,
)
from grpo_ustat.estimators.scaling import prompt_scaling, scaling_estimate, scaling_law, widening

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
    expected = scaling_estimate(whole, replicates, widening(10, 4))
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


def test_the_least_noise_scale_is_at_the_best_group_size():
    """By search over G: `(C1 + C2 + 2 sqrt(C1 C3)) / ||grad J||^2` at 1 + sqrt(C3/C1)."""
    whole = {"c1": 0.7, "c2": 2.0, "c3": 5.0, "grad_sq": 0.1}
    exact = {name: np.full((1, 4), value) for name, value in whole.items()}
    sizes = np.linspace(1.5, 10, 2000)
    scales = [noise_scale(whole, exact, size).estimate for size in sizes]
    best = 1 + np.sqrt(5.0 / 0.7)
    assert sizes[np.argmin(scales)] == pytest.approx(best, abs=0.01)
    assert min(scales) == pytest.approx((0.7 + 2.0 + 2 * np.sqrt(0.7 * 5.0)) / 0.1, rel=1e-5)


def test_the_noise_scale_is_that_of_enumerated_minibatches():
    """E||ghat||^2 / ||grad J||^2 - 1 = n_c / n over every minibatch of two prompts, G = 2 and 3."""
    shared = [([0.3, -0.8, 0.5], [1.0, 0.0, 0.25]), ([0.3, -0.8, 0.5], [0.0, 1.0, 0.7])]
    policy = TabularPolicy(
        np.tile(np.eye(3), (2, 1, 1)), np.array(shared[0][0]), np.array([r for _, r in shared])
    )
    grad_sq = float(np.square(policy.gradient_PD.mean(axis=0)).sum())
    law = scaling_law(policy.moments(), grad_sq)
    whole = {"c1": law.c1, "c2": law.c2, "c3": law.c3, "grad_sq": grad_sq}
    exact = {name: np.full((1, 4), value) for name, value in whole.items()}
    for prompts, size in ((1, 2), (2, 2), (1, 3)):
        error = minibatch_mse(shared, "leave_one_out", size, prompts)
        scale = noise_scale(whole, exact, size)
        rollouts = prompts * size
        assert error / grad_sq == pytest.approx(scale.estimate / rollouts, rel=1e-10)
        share = noise_share(scale, rollouts).estimate
        assert share == pytest.approx(error / (error + grad_sq), rel=1e-10)
        between = law.c1 / prompts / error
        assert prompt_share(whole, exact, size).estimate == pytest.approx(between, rel=1e-10)


def test_doubling_the_rollouts_gains_the_noise_share_of_the_doubled_step():
    scale = Interval(300.0, 200.0, 500.0)
    for n in (50, 300, 2000):
        gains = [n / (n + x) for x in scale]
        doubled = [2 * n / (2 * n + x) for x in scale]
        np.testing.assert_allclose(np.divide(doubled, gains) - 1, noise_share(scale, 2 * n))


def test_steps_of_a_run_are_averaged_before_they_are_divided(rng):
    values_4S = np.array([1.0, 2.0, 9.0, 0.5])[:, None] + 0.1 * rng.standard_normal((4, 12))
    scale, prompts = noise_of_steps(values_4S, 4)
    c1, c2, c3, grad_sq = values_4S.mean(axis=1)
    error = 4 * c1 + c2 + c3 / 3
    assert scale.estimate == pytest.approx(error / grad_sq)
    assert prompts.estimate == pytest.approx(4 * c1 / error)
    assert scale.low < scale.estimate < scale.high


def test_without_a_gradient_the_noise_scale_has_a_lower_end_alone():
    steps = np.array([[1.0], [2.0], [9.0], [0.0]]) + 0.1 * np.array([-1.0, 1.0, -1.0, 1.0])
    scale, _ = noise_of_steps(steps, 4)
    assert np.isnan(scale.estimate) and scale.low > 0 and scale.high == np.inf
    assert noise_share(scale, 100).high == 1.0
