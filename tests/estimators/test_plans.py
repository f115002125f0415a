"""Rules of plans: caps, prices, and efficiencies of problems that are known."""

from __future__ import annotations

import numpy as np
import pytest
from prompt_pools import pool_of, prompts
from tabular import TabularPolicy

from grpo_ustat.estimators.plan_efficiencies import plan_efficiencies
from grpo_ustat.estimators.plan_terms import chances, paths_of
from grpo_ustat.estimators.plans import (
    PLANS,
    Setting,
    fitted_prior,
    price_of,
    trained_stages,
)
from grpo_ustat.records import ScorePool


@pytest.mark.parametrize("plan", PLANS.values(), ids=lambda plan: plan.name)
def test_plans_stop_at_the_cap_and_train_what_was_drawn(plan):
    rng = np.random.default_rng(0)
    setting = Setting(size=6, most=11, history=4, price=1e-3)
    for p in (0.0, 0.1, 0.5, 0.9, 1.0):
        stages = ()
        while size := plan.more(stages, setting):
            stages = (*stages, tuple(np.sort(rng.random(size) < p).astype(float)))
        drawn = stages[plan.has_history :]
        assert 2 <= sum(map(len, drawn)) <= 11
        for kept, stage in zip(trained_stages(plan, stages), drawn, strict=True):
            assert sum(kept) <= sum(stage) and len(kept) - sum(kept) <= len(stage) - sum(stage)


@pytest.mark.parametrize("name", [x for x, plan in PLANS.items() if plan.saving])
def test_a_price_gives_the_sizes_of_an_allocation(name):
    """Histories of 3: sizes at the price are those of the greedy allocation, up to equal savings,
    and their mean is at most the requested mean.
    """
    plan, setting = PLANS[name], Setting(size=6, history=3, most=24, prior=(0.7, 1.1))
    histories = [tuple([0.0] * (3 - right) + [1.0] * right) for right in range(4)]
    least = plan.least_size(setting)
    sizes_K = np.arange(least, plan.most_size(setting), dtype=float)
    saving_SK = np.array([plan.saving(history, sizes_K, setting) for history in histories])
    chance_S = np.array([0.4, 0.3, 0.2, 0.1])
    price = price_of(saving_SK, chance_S, 6 - least)
    priced = Setting(size=6, history=3, most=24, prior=(0.7, 1.1), price=price)
    first = 0 if plan.has_history else 3
    sizes_S = np.array([first + plan.more((history,), priced) for history in histories])
    assert chance_S @ sizes_S <= 6 + 1e-9
    assert (np.diff(saving_SK, axis=1) <= 0).all()
    more = np.array([(saving_SK[s] > price).sum() for s in range(4)])
    assert (sizes_S == least + more).all()


def test_shrunken_chances_are_those_of_the_law():
    """p (1-p) of Beta(2, 3) over 4000 prompts: without bias, nearer to it than counts."""
    rng = np.random.default_rng(4)
    p = rng.beta(2, 3, 4000)
    rewards = (rng.random((4000, 8)) < p[:, None]).astype(float)
    a, b = fitted_prior(rewards)
    assert (a, b) == pytest.approx((2, 3), rel=0.15)


def rows_of(pool, plans, sizes, rollouts=128):
    rows = plan_efficiencies(pool, plans, sizes, [2, 4, 8, 16], rollouts, seed=0)
    return {(row.plan.name, row.estimate, row.setting.size): row for row in rows}


def test_fixed_groups_at_the_best_size_have_efficiency_1():
    pool = pool_of(prompts(40, np.random.default_rng(1)), 24, np.random.default_rng(2))
    rows = rows_of(pool, ["fixed", "refill"], [2, 4, 8])
    best = max(rows[x].at_generated.estimate for x in rows if x[0] == "fixed")
    assert best == pytest.approx(1)
    for (name, _, size), row in rows.items():
        assert row.unbiased and row.direction == (1, 1, 1)
        assert row.weights == pytest.approx([1] * len(row.weights))
        # Replaced groups cost generated rollouts, but no trained rollouts.
        assert (row.generated.estimate > size + 1e-9) == (name == "refill")
        assert row.trained.estimate == pytest.approx(size)


def test_unequal_noise_is_saved_by_sizes():
    """Half of the prompts are solved for sure, so groups of the others can be larger."""
    rng = np.random.default_rng(3)
    features = rng.normal(size=(60, 40, 6))
    rewards = (rng.random((60, 40)) < 0.5).astype(float)
    rewards[::4] = 1.0
    rewards[1::4] = 1.0
    pool = pool_of(TabularPolicy(features, np.zeros(6), rewards), 40, rng)
    rows = rows_of(pool, ["fixed", "vip", "knapsack", "pilot_then_size"], [8])
    fixed = rows["fixed", "per_rollout", 8].at_generated.estimate
    sizes = [rows[name, "per_rollout", 8].generated.estimate for name in ("vip", "knapsack")]
    assert sizes == pytest.approx([8, 8], abs=0.8)
    assert rows["vip", "per_prompt", 8].at_generated.estimate > 1.2 * fixed


def test_graded_rewards_use_drawn_orders_with_their_error():
    """60 reward levels: efficiencies of fixed groups from drawn orders agree with the formula."""
    rng = np.random.default_rng(5)
    problem = prompts(12, rng)
    rewards = problem.rewards_PY + 0.3 * rng.random(problem.rewards_PY.shape).round(2)
    pool = pool_of(TabularPolicy(problem.features_PYD, problem.theta_D, rewards), 20, rng)
    rows = rows_of(pool, ["fixed", "until_mixed", "p_one_minus_p"], [4, 8])
    row = rows["fixed", "per_prompt", 8]
    assert row.unbiased and row.weights is None and row.monte_carlo_error > 0
    best = max(x.at_generated.estimate for key, x in rows.items() if key[0] == "fixed")
    assert best == pytest.approx(1, abs=5 * row.monte_carlo_error)
    assert ("until_mixed", "per_rollout", 4) in rows
    assert ("until_mixed", "all_orders", 4) not in rows
    assert rows["p_one_minus_p", "per_prompt", 4].unbiased
    assert "completions" in rows["p_one_minus_p", "", 8].reason


def test_small_pools_are_refused_with_the_fix():
    pool = pool_of(prompts(12, np.random.default_rng(6)), 20, np.random.default_rng(7))
    row = rows_of(pool, ["vip"], [8])["vip", "", 8]
    assert row.reason == naming_of(24, 20)
    few = ScorePool(*(x[:6] for x in (pool.rewards_PN, pool.gram_PNN, pool.lengths_PN,
                                      pool.features_PNR, pool.centred_sums_PR)))  # fmt: skip
    assert "study.questions=8" in rows_of(few, ["fixed"], [4])["fixed", "", 4].reason


def naming_of(needed, available):
    return (
        f"a mean of 8 completions per prompt needs {needed} stored completions per question, but "
        f"the pool has {available}: use budget.pool_completions={needed}"
    )


def test_paths_of_a_plan_have_chance_1():
    for plan in PLANS.values():
        paths = paths_of(plan, Setting(size=8, most=32, price=1e-3), [0.0, 1.0])
        total = chances(paths, np.array([[0.3, 0.7], [0.99, 0.01]])).sum(axis=1)
        assert total == pytest.approx([1, 1], abs=1e-9), plan.name
