"""The law from groups of several steps, against slow deletions and the truth."""

from __future__ import annotations

import itertools

import numpy as np
import pytest
from tabular import TabularPolicy

from grpo_ustat.estimators.groups import (
    group_terms,
    law_of_prompts,
    noise_estimate,
)
from grpo_ustat.estimators.intervals import ratio_interval
from grpo_ustat.estimators.moments import exact_moments, pool_gradient_weights
from grpo_ustat.estimators.scaling import ScalingLaw

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
    law, _ = law_of_prompts(*arrays)
    found = noise_estimate([group_terms(*arrays)], 5).intervals
    for name, interval in law.intervals(5).items():
        np.testing.assert_allclose(found[name], interval, rtol=1e-9)


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

    replicates_4KP = np.empty((4, 2, 5))
    for k in range(2):
        for p in range(5):
            changed = [*steps]
            changed[k] = group_terms(*without(arrays[k], p))
            replicates_4KP[:, k, p] = averages(changed)
    estimate, whole_4 = noise_estimate(steps, 4), np.array(averages(steps))
    expected = ScalingLaw.jackknifed(whole_4, replicates_4KP, 10)
    np.testing.assert_allclose(estimate.law.covariance_K44, expected.covariance_K44, rtol=1e-7)
    error = [4 * c1 + c2 + c3 / 3 for c1, c2, c3, _ in (whole_4, replicates_4KP)]
    arrays = error[0], whole_4[3], error[1], replicates_4KP[3]
    low, high = ratio_interval(*arrays).low, ratio_interval(*arrays, 0.995).high
    if np.isinf(high):
        low = ratio_interval(*arrays, factor=2.0).low
    np.testing.assert_allclose(estimate.intervals["noise_scale"][1:], (low, high), rtol=1e-8)


@pytest.mark.parametrize("size", [2, 4])
def test_equal_rewards_add_nothing_whatever_the_scores(rng, size):
    rewards_PG, norms_PG, gram_PP = groups(rng, 4, size)
    rewards_PG[1] = 1.0
    gram_PP[1], gram_PP[:, 1] = 0, 0
    full = group_terms(rewards_PG, norms_PG, gram_PP)
    norms_PG[1] = 0
    bare = group_terms(rewards_PG, norms_PG, gram_PP)
    for one, other in zip(full, bare, strict=True):
        np.testing.assert_array_equal(one, other)
    assert [x[1] for x in full[:4]] == [0, 0, 0, 0]
    assert noise_estimate([full], size).intervals["zero_variance"].estimate == 0.25


def test_steps_of_few_groups_are_the_units(rng):
    """Two groups per step: no interval from three steps, the steps' own from four."""
    steps = [group_terms(*groups(rng, 2, 4)) for _ in range(4)]
    assert np.isnan(noise_estimate(steps[:3], 4).intervals["c2"].low)
    assert np.isnan(noise_estimate(steps[:3], 4).law.covariance_33).all()
    interval = noise_estimate(steps, 4).intervals["c2"]
    values = [noise_estimate([step], 4).intervals["c2"].estimate for step in steps]
    half = 3.18244631 * np.std(values, ddof=1) / 2
    np.testing.assert_allclose(
        interval, [np.mean(values), *(np.mean(values) + half * np.array([-1, 1]))]
    )


@pytest.mark.parametrize("prompts", [2, 6])
@pytest.mark.parametrize("size", [2, 4])
@pytest.mark.parametrize("steps", [1, 4])
def test_nothing_but_equal_rewards_is_no_estimate(prompts, size, steps):
    zeros = np.zeros((prompts, size)), np.zeros((prompts, prompts))
    estimate = noise_estimate([group_terms(np.ones((prompts, size)), *zeros)] * steps, size)
    for name in ("gstar", "noise_scale", "prompt_share"):
        assert np.isnan(estimate.intervals[name].estimate)
    assert estimate.intervals["zero_variance"].estimate == 1


def hold(truth, rng, *, count, size, unbiased, rel):
    """Assert that intervals hold the truth in 90 of 100 runs of 3 steps, and that means are near.

    Args:
        truth: by name.
        count, size: number of groups of a step, and their G.
        unbiased: names whose mean over the runs is compared, within `rel`.
    """
    inside, sums = dict.fromkeys(truth, 0), dict.fromkeys(unbiased, 0.0)
    for _ in range(100):
        steps = [group_terms(*groups(rng, count, size)) for _ in range(3)]
        intervals = noise_estimate(steps, size).intervals
        for name, value in truth.items():
            inside[name] += intervals[name].low <= value <= intervals[name].high
        for name in sums:
            sums[name] += intervals[name].estimate / 100
    assert all(covered >= 90 for covered in inside.values()), inside
    for name, value in sums.items():
        assert value == pytest.approx(truth[name], rel=rel), name


def test_the_truth_is_in_the_intervals(rng):
    """||g||^2 = 3 |shift|^2 + 0.75 between prompts; 100 runs of 3 steps of 20 groups of 8.

    Given the prompt E q = 3, Var Z = |g|^2 + 1, and E[q (Z-V)^2] = (D + 2)|g|^2 + D: so
    C1 = 0.75, ||grad J||^2 = 3, C2 = 4 E|g|^2 + 3, C3 = 4 E|g|^2 + 3, E|g|^2 = 3.75.
    """
    truth = {"c1": 0.75, "grad_sq": 3.0, "c2": 18.0, "c3": 18.0}
    truth["noise_scale"] = (8 * 0.75 + 18 + 18 / 7) / 3
    truth["gstar"] = 1 + np.sqrt(18 / 0.75)
    hold(truth, rng, count=20, size=8, unbiased=("c1", "c2", "c3", "grad_sq"), rel=0.08)


def test_a_step_of_one_group_is_refused(rng):
    with pytest.raises(ValueError, match="at least 2 groups, got 1"):
        group_terms(*groups(rng, 1, 4))


def test_a_pair_by_hand():
    """Rewards 1 and 0, scores (1, 2) and (-1, 0), so ghat = (1, 1); the other pair's is (3, 0)."""
    rewards, norms = np.array([[1.0, 0.0], [0.0, 2.0]]), np.array([[5.0, 1.0], [4.0, 1.0]])
    terms = group_terms(rewards, norms, np.array([[2.0, 3.0], [3.0, 9.0]]))
    # <s, s'> is -1, and of scores (-2, 0) and (1, 0) with rewards 2 apart -2
    np.testing.assert_allclose(terms.g_sq_P, [0.5, 4.0])
    np.testing.assert_allclose(terms.first_order_P + terms.second_order_P, [3.0, 10.0])
    found = noise_estimate([terms], 2).intervals
    assert found["grad_sq"].estimate == 3.0 and found["c1"].estimate == -0.75
    assert found["c2_plus_c3"].estimate == 6.5
    assert found["noise_scale"].estimate == pytest.approx((2 * -0.75 + 6.5) / 3)


def pairs_of(prompts):
    """All pairs of completions: chance, rewards, squared score norms and gradient of each.

    `prompts` has each prompt's chance, its outcomes' chances, scores and rewards.
    """
    for weight, p_Y, scores_YD, rewards_Y in prompts:
        for i, j in itertools.product(range(len(p_Y)), repeat=2):
            scores, rewards = scores_YD[[i, j]], rewards_Y[[i, j]]
            ghat_D = pool_gradient_weights(rewards[None])[0] @ scores
            yield weight * p_Y[i] * p_Y[j], rewards, np.square(scores).sum(axis=1), ghat_D


def expected_of_pairs(prompts, later=None):
    """C1, C2 + C3 and ||grad J||^2 as estimated from two pairs, averaged over all such; the second
    of the prompts under a `later` policy, if there is one.
    """
    first = list(pairs_of(prompts))
    second = list(pairs_of(later)) if later else first
    names, total = ("c1", "c2_plus_c3", "grad_sq"), np.zeros(3)
    for one, other in itertools.product(first, second):
        rewards, norms, ghat = (np.stack(pair) for pair in zip(one[1:], other[1:], strict=True))
        found = noise_estimate([group_terms(rewards, norms, ghat @ ghat.T)], 2).intervals
        total += one[0] * other[0] * np.array([found[name].estimate for name in names])
    return total


def two_prompts(logits):
    """A policy on two prompts with shared logits, its law, and what `pairs_of` takes."""
    rewards_PY = np.array([[1.0, 0.0, 0.25], [0.0, 1.0, 0.7]])
    policy = TabularPolicy(np.tile(np.eye(3), (2, 1, 1)), np.array(logits), rewards_PY)
    grad_sq = float(np.square(policy.gradient_PD.mean(axis=0)).sum())
    law, weights_P = ScalingLaw.of_moments(policy.moments(), grad_sq), np.full(2, 0.5)
    columns = weights_P, policy.probabilities_PY, policy.scores_PYD, rewards_PY
    return policy, law, list(zip(*columns, strict=True))


def test_pairs_are_unbiased_by_enumeration():
    policy, law, prompts = two_prompts([0.3, -0.8, 0.5])
    grad_sq = np.square(policy.gradient_PD.mean(axis=0)).sum()
    np.testing.assert_allclose(
        expected_of_pairs(prompts), [law.c1, law.c2 + law.c3, grad_sq], rtol=1e-10
    )


def test_a_window_of_two_policies_has_their_means_and_their_gradients_product():
    """C2 + C3 and E||g||^2 of each policy's own groups, <grad J, grad J'> between them."""
    policies, laws, prompts = zip(
        two_prompts([0.3, -0.8, 0.5]), two_prompts([1.5, 0.2, -0.4]), strict=True
    )  # fmt: skip
    gradients = [policy.gradient_PD.mean(axis=0) for policy in policies]
    own = [law.c1 + np.square(g).sum() for law, g in zip(laws, gradients, strict=True)]
    product = gradients[0] @ gradients[1]
    both = np.mean([law.c2 + law.c3 for law in laws])
    expected = [np.mean(own) - product, both, product]
    np.testing.assert_allclose(expected_of_pairs(*prompts), expected, rtol=1e-10)


@pytest.mark.slow(minutes=0.1)
def test_one_law_of_pairs_has_many_group_sizes():
    """Prompts p + t d whose t have the same two moments: all that pairs know, not C2 and C3."""
    scores_Y = np.array([1.0, -1.0, 2.0, -2.0, 1.0, -1.0])
    rewards_Y = np.array([1.0, 0.0, 1.0, 1.0, 0.0, 0.0])
    change_Y = 0.15 * np.array([1.0, 1.0, -1.0, -1.0, 0.0, 0.0])  # keeps the mean score at 0
    laws, found, expected = [], [], []
    for chances, shifts in (([1 / 6, 2 / 3, 1 / 6], [-1, 0, 1]), ([1 / 4, 3 / 4], [1, -1 / 3])):
        p_PY = 1 / 6 + np.outer(shifts, change_Y)
        laws.append(np.einsum("p,pi,pj->ij", chances, p_PY, p_PY))
        gradient_P = p_PY @ (scores_Y * rewards_Y)
        shape = np.ones_like(p_PY)
        moments = exact_moments(scores_Y**2 * shape, rewards_Y * shape, p_PY, gradient_P**2)
        grad_sq = (chances @ gradient_P) ** 2
        g_sq, a_v, d = (chances @ x for x in (moments.g_sq, moments.a_v, moments.d))
        expected.append([g_sq - grad_sq, a_v - g_sq, d + g_sq])
        prompts = [
            (chance, p_Y, scores_Y[:, None], rewards_Y)
            for chance, p_Y in zip(chances, p_PY, strict=True)
        ]
        found.append(expected_of_pairs(prompts))
        c1, second_moment, grad_sq = found[-1]
        assert second_moment == pytest.approx(a_v + d) and c1 == pytest.approx(g_sq - grad_sq)
        assert 2 * (c1 + grad_sq) < d + g_sq < second_moment
    np.testing.assert_allclose(*laws, atol=1e-16)
    np.testing.assert_allclose(*found, rtol=1e-10)
    (c1, *one), (same_c1, *other) = expected
    assert c1 == pytest.approx(same_c1) and abs(one[1] - other[1]) > 0.002


def test_the_truth_is_in_the_intervals_of_pairs(rng):
    """As above with G = 2: C2 + C3 = 36, and 2 E||g||^2 = 7.5 <= C3 <= 36."""
    truth = {"c1": 0.75, "grad_sq": 3.0, "c2_plus_c3": 36.0, "noise_scale": (2 * 0.75 + 36) / 3}
    third = {"gstar_least": 7.5, "gstar": 18.0, "gstar_assumption2": 21.75, "gstar_most": 36.0}
    truth |= {name: 1 + np.sqrt(c3 / 0.75) for name, c3 in third.items()}
    hold(truth, rng, count=60, size=2, unbiased=("c1", "grad_sq", "c2_plus_c3"), rel=0.15)


def test_pairs_bound_the_best_group_size(rng):
    """From the low end of 1 + sqrt(2 E||g||^2 / C1) to the high end of 1 + sqrt((C2 + C3) / C1)."""
    steps = [group_terms(*groups(rng, 200, 2, shift=0.3)) for _ in range(8)]
    estimate = noise_estimate(steps, 2)
    found = estimate.intervals
    c1, grad_sq, both = (found[x].estimate for x in ("c1", "grad_sq", "c2_plus_c3"))
    assert found["gstar_least"].estimate == pytest.approx(1 + np.sqrt(2 * (c1 + grad_sq) / c1))
    assert found["gstar_most"].estimate == pytest.approx(1 + np.sqrt(both / c1))
    assert found["gstar"][1:] == (found["gstar_least"].low, found["gstar_most"].high)
    assert np.isnan([found[x].estimate for x in ("gstar", "c2", "c3", "noise_scale_best")]).all()
    law = estimate.law
    assert estimate.assumption2 and law.c2 + law.c3 == pytest.approx(both)
    assert law.c3 == pytest.approx(both / 2 + c1 + grad_sq)
    assert found["gstar_assumption2"].estimate == pytest.approx(1 + np.sqrt(law.c3 / c1))
