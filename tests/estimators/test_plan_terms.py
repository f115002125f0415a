"""Terms of plans: all stopping paths, all orders of a pool and all pools, against the formulas."""

from __future__ import annotations

import itertools
import math
from collections import Counter

import numpy as np
import pytest
from prompt_pools import whole_pool

from grpo_ustat.estimators.group_terms import LevelSums
from grpo_ustat.estimators.plan_terms import (
    ALL_ORDERS,
    TooManyPaths,
    chances,
    constant_weight,
    drawn_plan_terms,
    estimates_of,
    paths_of,
    plan_terms,
    pool_chances,
    prompt_weight,
    weights_of,
)
from grpo_ustat.estimators.plans import PLANS, Setting

# Three outcomes; both kinds of rewards have outcomes that share a level or none.
CHANCE_Y = np.array([0.2, 0.5, 0.3])
FEATURES_YD = np.array([[1.0, 0.3], [-0.4, 1.1], [0.2, -2.0]])
SCORES_YD = FEATURES_YD - CHANCE_Y @ FEATURES_YD
REWARDS = {"0 and 1": np.array([1.0, 0.0, 1.0]), "three levels": np.array([0.0, 0.4, 1.0])}
SETTING = Setting(size=3, most=3, history=2, price=0.02, prior=(0.6, 0.9))


def stopped(plan, setting, outcomes, z_Y):
    """Stages of indices into a sequence of outcomes, as the plan draws them."""
    stages, start = [], 0
    while True:
        seen = tuple(tuple(sorted(z_Y[outcomes[i]] for i in stage)) for stage in stages)
        size = plan.more(seen, setting)
        if not size:
            return stages
        stages.append(list(range(start, start + size)))
        start += size


def weights(name, plan, setting, outcomes, z_Y):
    """The weight of every completion of a sequence, from the definitions, and those trained."""
    stages = stopped(plan, setting, outcomes, z_Y)
    if name == ALL_ORDERS:
        return over_orders(plan, setting, outcomes, z_Y, stages)
    drawn = stages[plan.has_history :]
    trained = kept_places(plan, drawn, outcomes, z_Y)
    place = [i for stage in trained for i in stage]
    z = z_Y[outcomes]
    weight = np.zeros(len(outcomes))
    stage_of = {i: k for k, stage in enumerate(trained) for i in stage}
    for i in place:
        if name == "earlier":
            others = [j for j in place if j != i and stage_of[j] <= stage_of[i]]
        elif name == "without_last" and len(drawn) > 1:
            others = [j for j in place if j != i and stage_of[j] < len(drawn) - 1]
        else:
            others = [j for j in place if j != i]
        if plan.baseline_of_generated:
            others = [j for stage in drawn for j in stage]
        if others:
            weight[i] = z[i] - np.mean(z[others])
    if name == "per_prompt":
        weight /= max(1, len(place))
    return weight, len(place)


def kept_places(plan, stages, outcomes, z_Y):
    """Completions that are trained: the first ones of each level in a stage, by symmetry."""
    rewards = tuple(tuple(sorted(z_Y[outcomes[i]] for i in stage)) for stage in stages)
    result = []
    for stage, kept in zip(stages, plan.trains(rewards), strict=True):
        left = Counter(kept)
        result.append([])
        for i in stage:
            if left[z_Y[outcomes[i]]] > 0:
                left[z_Y[outcomes[i]]] -= 1
                result[-1].append(i)
    return result


def over_orders(plan, setting, outcomes, z_Y, stages):
    """The first stage's leave-one-out weights over every order that would have stopped here."""
    place = [i for stage in stages for i in stage]
    total, count = np.zeros(len(outcomes)), 0
    for order in itertools.permutations(place):
        again = stopped(plan, setting, [outcomes[i] for i in order] + [outcomes[0]] * 9, z_Y)
        if sum(map(len, again)) != len(place):
            continue
        first = [order[k] for k in again[0]]
        z = z_Y[[outcomes[i] for i in first]]
        total[first] += (len(z) * z - z.sum()) / (len(z) - 1) / len(z)
        count += 1
    return total / count, len(place)


def term(name, plan, setting, outcomes, z_Y):
    """h of a sequence of outcomes."""
    return weights(name, plan, setting, outcomes, z_Y)[0] @ SCORES_YD[list(outcomes)]


@pytest.mark.parametrize("kind", REWARDS)
@pytest.mark.parametrize("plan", PLANS.values(), ids=lambda plan: plan.name)
def test_the_mean_over_all_pools_is_that_of_all_stopping_paths(plan, kind):
    """All 3^5 pools of 5, against all sequences of 5 drawn from the population."""
    z_Y, size = REWARDS[kind], 5
    pools = np.array(list(itertools.product(range(3), repeat=size)))
    chance_P = CHANCE_Y[pools].prod(axis=1)
    pool = whole_pool(SCORES_YD[pools], z_Y[pools], np.ones_like(pools))
    sums, paths = LevelSums(pool, np.ones(pools.shape)), paths_of(plan, SETTING, sorted(set(z_Y)))
    for name in estimates_of(plan):
        terms = plan_terms(sums, paths, weights_of(paths, name)).terms
        h_PD = np.array([term(name, plan, SETTING, list(outcomes), z_Y) for outcomes in pools])
        expected = chance_P @ np.square(h_PD).sum(axis=1), chance_P @ h_PD
        assert chance_P @ terms.energy_P == pytest.approx(expected[0], abs=1e-10), name
        assert chance_P @ terms.mean_PR == pytest.approx(expected[1], abs=1e-10), name
    p_UL = np.array([[CHANCE_Y[z_Y == level].sum() for level in sorted(set(z_Y))]])
    counts_UL, which_P = sums.distinct_counts
    in_pools = chance_P @ pool_chances(paths, counts_UL)[which_P]
    assert in_pools == pytest.approx(chances(paths, p_UL)[0], abs=1e-10)
    assert in_pools.sum() == pytest.approx(1, abs=1e-10)


@pytest.mark.parametrize("kind", REWARDS)
@pytest.mark.parametrize("plan", PLANS.values(), ids=lambda plan: plan.name)
def test_the_terms_of_a_pool_are_the_mean_over_all_its_orders(plan, kind):
    """All 720 orders of a pool of 6."""
    z_Y, setting = REWARDS[kind], Setting(size=3, most=4, history=2, price=0.02, prior=(0.6, 0.9))
    outcomes = np.array([[0, 1, 1, 2, 2, 1]])
    pool = whole_pool(SCORES_YD[outcomes], z_Y[outcomes], np.ones_like(outcomes))
    sums, paths = LevelSums(pool, np.ones((1, 6))), paths_of(plan, setting, sorted(set(z_Y)))
    for name in estimates_of(plan):
        terms = plan_terms(sums, paths, weights_of(paths, name)).terms
        orders = set(itertools.permutations(outcomes[0]))
        h_QD = np.array([term(name, plan, setting, list(order), z_Y) for order in orders])
        assert terms.energy_P[0] == pytest.approx(np.square(h_QD).sum(1).mean(), abs=1e-10), name
        assert terms.mean_PR[0] == pytest.approx(h_QD.mean(axis=0), abs=1e-10), name


@pytest.mark.parametrize("kind", REWARDS)
@pytest.mark.parametrize("plan", PLANS.values(), ids=lambda plan: plan.name)
def test_drawn_orders_give_the_same_terms(plan, kind):
    """All 720 orders of a pool of 6, as if they had been drawn."""
    z_Y, setting = REWARDS[kind], Setting(size=3, most=4, history=2, price=0.02, prior=(0.6, 0.9))
    outcomes = np.array([[0, 1, 1, 2, 2, 1], [1, 1, 1, 1, 2, 1]])
    pool = whole_pool(SCORES_YD[outcomes], z_Y[outcomes], np.ones_like(outcomes))
    sums, paths = LevelSums(pool, np.ones((2, 6))), paths_of(plan, setting, sorted(set(z_Y)))
    orders = np.array([list(itertools.permutations(range(6)))] * 2)
    names = [name for name in estimates_of(plan) if name != ALL_ORDERS]
    drawn = drawn_plan_terms(pool, plan, [setting] * 2, names, orders, 1)
    for name, (found,) in drawn.items():
        exact = plan_terms(sums, paths, weights_of(paths, name))
        assert found.terms.energy_P == pytest.approx(exact.terms.energy_P, abs=1e-10)
        assert found.terms.mean_PR == pytest.approx(exact.terms.mean_PR, abs=1e-10)
        assert found.generated_P == pytest.approx(exact.generated_P, abs=1e-10)
        assert found.trained_P == pytest.approx(exact.trained_P, abs=1e-10)
        if plan.replaces:
            assert found.terms.kept_P == pytest.approx(exact.terms.kept_P, abs=1e-10)


@pytest.mark.parametrize("plan", PLANS.values(), ids=lambda plan: plan.name)
def test_binary_plans_reweight_prompts(plan):
    """E h = kappa(p) g for 0/1 rewards, from the mean over all sequences of 5."""
    z_Y = REWARDS["0 and 1"]
    p = float(CHANCE_Y @ z_Y)
    gradient_D = (CHANCE_Y * z_Y) @ SCORES_YD
    sequences = np.array(list(itertools.product(range(3), repeat=5)))
    chance_Q = CHANCE_Y[sequences].prod(axis=1)
    paths = paths_of(plan, SETTING, [0.0, 1.0])
    for name in estimates_of(plan):
        h_QD = np.array([term(name, plan, SETTING, list(x), z_Y) for x in sequences])
        kappa = prompt_weight(paths, weights_of(paths, name), np.array([p]))[0]
        assert chance_Q @ h_QD == pytest.approx(kappa * gradient_D, abs=1e-10), name


@pytest.mark.parametrize("levels", [[0.0, 1.0], [0.0, 0.4, 1.0]])
def test_remedies_have_the_weights_of_their_theorems(levels):
    """All orders: 1 for every plan. Earlier stages: the mean number of trained completions."""
    for plan in PLANS.values():
        paths = paths_of(plan, SETTING, levels)
        if not plan.has_history:
            kappa = constant_weight(paths, weights_of(paths, ALL_ORDERS))
            assert kappa == pytest.approx(1, abs=1e-9), plan.name
        if plan.has_history:
            assert constant_weight(paths, weights_of(paths, "per_prompt")) == pytest.approx(1)
        if len(levels) == 2 and "earlier" in estimates_of(plan):
            p_U, weights = np.array([0.1, 0.4, 0.9]), weights_of(paths, "earlier")
            trained_U = chances(paths, np.stack([1 - p_U, p_U], axis=1)) @ weights.trained_C
            assert prompt_weight(paths, weights, p_U) == pytest.approx(trained_U)


def test_stopping_by_rewards_is_biased():
    """Leave-one-out sums weigh prompts as they should not; equal groups do not."""
    p_U = np.array([0.1, 0.5, 0.9])
    for name, biased in {"fixed": False, "until_mixed": True, "until_success": True}.items():
        paths = paths_of(PLANS[name], Setting(size=8, most=32), [0.0, 1.0])
        for estimate in ("per_rollout", "per_prompt"):
            kappa_U = prompt_weight(paths, weights_of(paths, estimate), p_U)
            assert (np.ptp(kappa_U) > 0.05 * kappa_U.mean()) == biased, (name, estimate)


def test_inverse_sampling_has_the_weights_of_girshick_mosteller_and_savage():
    """All orders at the second success: (k-1)(T-k)/((T-1)(T-2)) of the difference of the means."""
    paths = paths_of(PLANS["second_success"], Setting(size=4, most=40), [0.0, 1.0])
    weights = weights_of(paths, ALL_ORDERS)
    for counts_L, sum_L in zip(paths.counts_CL, weights.sum_CL, strict=True):
        right, total = counts_L[1], counts_L.sum()
        if right == 2 and total > 2:
            expected = (total - 2) / ((total - 1) * (total - 2))
            assert sum_L == pytest.approx([-expected, expected], rel=1e-9)


def test_too_many_paths_are_refused():
    with pytest.raises(TooManyPaths, match="fixed"):
        paths_of(PLANS["fixed"], Setting(size=64), [k / 10 for k in range(11)])
    assert math.comb(64 + 10, 10) > 5000


RATES = np.array([0.02, 0.1, 0.3, 0.5, 0.7, 0.9, 0.98])


@pytest.mark.parametrize(
    ("name", "size", "most", "weights", "generated"),
    [
        ("until_mixed", 8, 32, [2.38, 1.66, 1.19, 1.1, 1.19, 1.66, 2.38],
         [24.5, 11.2, 5.3, 4.5, 5.3, 11.2, 24.5]),
        ("until_success", 16, 128, [2.23, 1.33, 1.04, 1, 1, 1, 1], [49.6, 14, 8.5, 8, 8, 8, 8]),
        ("reinforce_ada", 8, 32, [7.17, 3.95, 1.35, 1, 1.35, 3.95, 7.17],
         [30.9, 21, 10.3, 8.6, 10.3, 21, 30.9]),
        ("pilot_commit", 32, 64, [0.09, 0.55, 0.98, 0.99, 0.77, 0.09, 0],
         [17.9, 39.3, 62.7, 63.5, 52.2, 19.3, 16]),
    ],
)  # fmt: skip
def test_weights_of_published_rules(name, size, most, weights, generated):
    """A second computation of these weights, by sums over binary rewards, rounded."""
    paths = paths_of(PLANS[name], Setting(size=size, most=most), [0.0, 1.0])
    found = weights_of(paths, "per_prompt")
    assert prompt_weight(paths, found, RATES) == pytest.approx(weights, abs=0.0051)
    drawn = chances(paths, np.stack([1 - RATES, RATES], axis=1)) @ paths.generated_C
    assert drawn == pytest.approx(generated, abs=0.051)
