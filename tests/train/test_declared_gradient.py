"""Our own `train` applies the gradient that its objective declares."""

from __future__ import annotations

import numpy as np
import pytest
from training_runs import first_batch

import grpo_ustat as gu
from grpo_ustat.estimators.baselines import advantages
from grpo_ustat.policy.logprobs import pack
from grpo_ustat.records import BaselineContext
from grpo_ustat.train import update as update_module
from grpo_ustat.train.update import fixed_logprobs, update

pytestmark = pytest.mark.slow


class Captured(Exception):
    """The gradient is there, before clipping and before the optimizer's step."""


def audited(tmp_path, monkeypatch, objective):
    """The audit of a first update."""
    run, batch = first_batch(tmp_path, f"objective={objective}")
    baseline, rewards = run.config.baseline, np.random.default_rng(0).random(batch.rewards_PG.shape)
    loss = run.config.objective.loss(baseline, run.config.max_completion_length)
    context = BaselineContext(lengths_PG=batch.lengths_PG)
    advantage = advantages(baseline.name, rewards, context, baseline.options)
    sum_gradients = update_module.sum_gradients

    def captured(run):
        sum_gradients(run)
        raise Captured

    monkeypatch.setattr(update_module, "sum_gradients", captured)
    rollouts, model = batch.own_rollouts, run.policy.model
    with pytest.raises(Captured):
        update(run, batch, advantage, fixed_logprobs(run, rollouts), 0)
    packed = pack(rollouts, np.arange(rewards.size), run.policy.pad_token, model.device)
    rows = gu.UpdateRows.of_loss(
        loss, rewards, packed.input_ids_BT, packed.attention_mask_BT, packed.completion_mask_BT,
        rollouts.ended_PG,
    )  # fmt: skip
    gradients = {name: p.grad for name, p in model.named_parameters()}
    return gu.audit(model, gradients, rows, temperature=run.config.temperature)


@pytest.mark.parametrize(
    "objective",
    ["algorithm1", "trl_dapo", "trl_grpo", "trl_dr_grpo", "trl_luspo", "trl_cispo", "trl_vespo"],
)
def test_the_applied_gradient_is_the_declared_one(tmp_path, monkeypatch, objective):
    found = audited(tmp_path, monkeypatch, objective)
    assert found.agrees and found.difference < 1e-4
