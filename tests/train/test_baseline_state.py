"""Every baseline in training: what it reads, what that costs, and what it remembers."""

from __future__ import annotations

import dataclasses
import json
import math

import numpy as np
import pytest
from reference import one_flat_score
from training_runs import first_batch, fit

from grpo_ustat.estimators.baselines import BASELINES
from grpo_ustat.train import batch as batch_module
from grpo_ustat.train.baseline_state import make_baseline_state
from grpo_ustat.train.batch import gather_by_prompt, optimal_baseline, sample_extra
from grpo_ustat.train.context import SamplingCost

FEW = ("max_steps=2", "dataset.test_size=2", "budget.value_completions=3")
EXTRA = {"oracle": 24, "optimal": 24, "remax": 8}  # 2 steps of 4 prompts, 3 completions each or 1


def test_a_rank_without_prompts_costs_nothing(monkeypatch):
    monkeypatch.setattr(batch_module, "gather_object", lambda mine: [(6, 40), *mine])
    assert sample_extra(None, [], 3, 0) == (None, SamplingCost(6, 40))


READERS = ["leave_one_out", *(name for name, baseline in BASELINES.items() if baseline.needs)]


@pytest.mark.slow
@pytest.mark.parametrize("name", READERS)
def test_two_steps_with_every_rule_that_reads_more_than_rewards(tmp_path, name):
    functions = "reward_funcs=[task,brevity]" if name == "gdpo" else "reward_funcs=[task]"
    path = fit(tmp_path / "run", f"baseline={name}", functions, *FEW)
    rows = [json.loads(line) for line in (path / "metrics.jsonl").read_text().splitlines()]
    assert [row["step"] for row in rows] == [1, 2]
    assert all(math.isfinite(value) for row in rows for value in row.values())
    assert any(row["grad_norm"] > 0 for row in rows)
    assert rows[-1]["value_rollouts"] == EXTRA.get(name, 0)


def test_ranks_restore_the_order_of_the_prompts(monkeypatch):
    """Three ranks with prompts[rank::3] of seven; every rank gathers the same."""
    prompts = list(range(7))
    shares = [prompts[rank::3] for rank in range(3)]
    monkeypatch.setattr(batch_module, "gather_object", lambda mine: shares)
    assert gather_by_prompt(shares[1]) == prompts


@pytest.mark.slow
def test_the_critic_never_sees_the_batch_it_judges(tmp_path):
    """Other rewards of the batch at hand leave its values alone and change those of the next."""
    run, batch = first_batch(tmp_path, "baseline=critic", "model.dtype=float64")
    assert (run.baseline_state.context(run, batch)["critic_P"] == 0).all()
    run.baseline_state.update(run, batch)
    fitted = run.baseline_state.context(run, batch)["critic_P"]
    x, y = run.baseline_state.features_PD, batch.rewards_PG.mean(axis=1)
    dual = np.linalg.solve(x @ x.T + np.eye(4), y)  # the ridge solution, written the other way
    np.testing.assert_allclose(fitted, x @ x.T @ dual, rtol=1e-6, atol=1e-9)
    other = dataclasses.replace(batch, rewards_PGF=1 - batch.rewards_PGF)
    np.testing.assert_array_equal(run.baseline_state.context(run, other)["critic_P"], fitted)


@pytest.mark.slow
def test_the_optimal_baseline_weighs_by_squared_score_norms(tmp_path):
    run, batch = first_batch(tmp_path, "baseline=optimal", "model.dtype=float64")
    found, z = optimal_baseline(run, batch.rollouts), batch.rewards_PG
    for p, prompt in enumerate(batch.rollouts.prompt_tokens):
        q = []
        for i in range(4):
            tokens = batch.rollouts.tokens_PGT[p, i][batch.rollouts.mask_PGT[p, i]]
            score = one_flat_score(run.policy.model, prompt, tokens)
            q.append(float(score @ score))
        assert found[p] == pytest.approx(np.dot(q, z[p]) / sum(q), rel=1e-9)


@pytest.mark.slow
@pytest.mark.parametrize("name", ["running_mean", "critic", "ebpo"])
def test_a_memory_survives_its_state(tmp_path, name):
    run, batch = first_batch(tmp_path, f"baseline={name}")
    run.baseline_state.context(run, batch)
    run.baseline_state.update(run, batch)
    twin = make_baseline_state(run.config.baseline)
    twin.load_state_dict(run.baseline_state.state_dict())
    left, right = run.baseline_state.context(run, batch), twin.context(run, batch)
    for key, value in left.items():
        np.testing.assert_array_equal(value, right[key])
