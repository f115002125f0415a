"""The applied gradient, and the run folder as the trainer uses it."""

from __future__ import annotations

import dataclasses
import html
import json

import numpy as np
import pytest
import torch
from golden import naming
from reference import one_flat_score, plain_advantages
from slow_cases import slow_after
from training_runs import config_of, first_batch, fit

from grpo_ustat.config.load import build_config
from grpo_ustat.config.schema import ConfigError
from grpo_ustat.estimators.row_weights import row_weights
from grpo_ustat.records import BaselineContext
from grpo_ustat.runs.folder import RunFolder
from grpo_ustat.train import trainer
from grpo_ustat.train.setup import join_ranks
from grpo_ustat.train.update import (
    FixedLogprobs,
    UpdateStats,
    accumulate_gradient,
    minibatches,
    update,
)


def whole(run, rollouts):
    """The step's one minibatch."""
    (found,) = minibatches(run, rollouts.lengths_PG, 0)
    return found


def gradient(run, rollouts, advantage_PG, constants=None):
    constants = constants or FixedLogprobs()
    accumulate_gradient(run, rollouts, advantage_PG, whole(run, rollouts), constants, UpdateStats())


def step(run, batch, advantage_PG):
    return update(run, batch, advantage_PG, FixedLogprobs(), 0)[0]


@pytest.mark.parametrize(
    "baseline",
    [
        "leave_one_out",
        *(pytest.param(name, marks=pytest.mark.slow) for name in ("oracle", "none", "group_mean")),
    ],
)
@pytest.mark.parametrize(
    "micro_batch_tokens", [*(pytest.param(n, marks=pytest.mark.slow) for n in (1, 300)), 16384]
)
def test_applied_gradient_is_the_formula(tmp_path, baseline, micro_batch_tokens):
    """-grad of the accumulated parameters = 1/(PG) sum_p sum_i A_i s_i, one at a time, float64."""
    run, batch = first_batch(
        tmp_path, f"baseline={baseline}", f"micro_batch_tokens={micro_batch_tokens}",
        "model.dtype=float64", "budget.value_completions=5",
    )  # fmt: skip
    rollouts, z = batch.rollouts, batch.rewards_PG
    context, _ = trainer.baseline_context(run, batch, 0)
    gradient(run, rollouts, trainer.advantages(baseline, z, context))
    named = dict(run.policy.model.named_parameters())
    applied = -torch.cat([named[name].grad.flatten() for name in sorted(named)])
    slow = torch.zeros_like(applied)
    for p, prompt in enumerate(rollouts.prompt_tokens):
        value = 0.0 if context.value_P is None else context.value_P[p]
        for i, advantage in enumerate(plain_advantages(baseline, z[p].tolist(), value)):
            tokens = rollouts.tokens_PGT[p, i][rollouts.mask_PGT[p, i]]
            slow += advantage * one_flat_score(run.policy.model, prompt, tokens) / 16
    assert z.std() > 0
    torch.testing.assert_close(
        applied, slow, rtol=1e-9, atol=1e-12 * slow.abs().max().item() + 1e-12
    )


def test_a_silent_step_moves_nothing(tmp_path):
    run, batch = first_batch(tmp_path, "optimizer=sgd")
    before = [p.clone() for p in run.policy.model.parameters()]
    assert step(run, batch, np.zeros((4, 4))) == 0.0
    for old, new in zip(before, run.policy.model.parameters(), strict=True):
        assert torch.equal(old, new)


def test_sgd_is_the_update_of_algorithm_1(tmp_path):
    """theta' = theta + eta ghat, to float64 rounding."""
    run, batch = first_batch(tmp_path, "optimizer=sgd", "model.dtype=float64", "learning_rate=0.01")
    before = {n: p.detach().clone() for n, p in run.policy.model.named_parameters()}
    gradient(run, batch.rollouts, batch.rewards_PG)
    descent = {n: p.grad.clone() for n, p in run.policy.model.named_parameters()}
    step(run, batch, batch.rewards_PG)
    for name, parameter in run.policy.model.named_parameters():
        torch.testing.assert_close(parameter.detach(), before[name] - 0.01 * descent[name])


@pytest.mark.parametrize(
    "objective, rows, counted",
    slow_after(1, [
        ("trl_dapo", ("zero_variance_groups=drop",), 12),
        ("dr_grpo", ("reward_variance_share=0.7",), 8),
        ("trl_gspo", ("zero_variance_groups=drop", "reward_variance_share=0.3"), 4),
    ]),
)  # fmt: skip
def test_the_first_update_is_of_the_rows_that_count(tmp_path, objective, rows, counted):
    """theta' = theta + eta sum W s, with the weights that `mse` measures, one row at a time."""
    run, batch = first_batch(
        tmp_path, f"objective={objective}", "objective.num_minibatches=1", "objective.beta=0",
        "baseline=group_std", *(f"objective.{word}" for word in rows), "optimizer=sgd",
        "model.dtype=float64", "learning_rate=0.01", "max_grad_norm=null",
    )  # fmt: skip
    rewards = np.array([[1.0, 1, 1, 1], [0, 0, 0, 1], [0, 1, 0, 1], [1, 0, 1, 1]])
    batch = dataclasses.replace(batch, rewards_PGF=rewards[..., None])
    config, rollouts = run.config, batch.rollouts
    loss = config.objective.loss(config.baseline, config.max_completion_length)
    context = BaselineContext(lengths_PG=batch.lengths_PG)
    weights = row_weights(loss, rewards, context)[0]
    assert (weights != 0).sum() == counted
    named = dict(run.policy.model.named_parameters())
    before = torch.cat([named[name].detach().flatten() for name in sorted(named)])
    expected = torch.zeros_like(before)
    for p, prompt in enumerate(rollouts.prompt_tokens):
        for i in np.flatnonzero(weights[p]):
            tokens = rollouts.tokens_PGT[p, i][rollouts.mask_PGT[p, i]]
            expected += weights[p, i] * one_flat_score(run.policy.model, prompt, tokens)
    advantage = trainer.advantages(config.baseline.name, rewards, context, config.baseline.options)
    norm = step(run, batch, advantage)
    after = torch.cat([named[name].detach().flatten() for name in sorted(named)])
    torch.testing.assert_close(
        (after - before) / 0.01, expected, rtol=1e-9, atol=1e-9 * expected.abs().max().item()
    )
    assert norm == pytest.approx(expected.norm().item())


def test_an_unfinite_gradient_stops_before_the_step(tmp_path):
    run, batch = first_batch(tmp_path)
    before = run.policy.model.lm_head.weight.detach().clone()
    with pytest.raises(FloatingPointError, match="lower learning_rate"):
        step(run, batch, np.full((4, 4), np.inf))
    assert torch.equal(before, run.policy.model.lm_head.weight)


@pytest.mark.slow
def test_a_run_leaves_what_it_promises(tmp_path):
    from transformers import AutoTokenizer

    path = fit(tmp_path / "run")
    names = {p.name for p in path.iterdir()}
    assert {".hydra", "metrics.jsonl", "code.json", "result.json", "eval.csv"} <= names
    assert {"checkpoint-2", "checkpoint-4", "report.html"} <= names
    assert "4 steps of 16 rollouts" in html.unescape((path / "report.html").read_text())
    tokenizer = AutoTokenizer.from_pretrained(path / "checkpoint-4")
    assert tokenizer.decode(tokenizer("1 + 2 =\n")["input_ids"]) == "1 + 2 =\n"
    result = json.loads((path / "result.json").read_text())
    assert result["steps"] == 4 and result["rollouts"] == 64
    assert [row["step"] for row in result["evals"]] == [0, 2, 4]
    assert [json.loads(line)["step"] for line in (path / "metrics.jsonl").open()] == [1, 2, 3, 4]


@pytest.mark.slow
def test_a_complete_folder_is_shown_not_run_again(tmp_path, capsys):
    path = fit(tmp_path / "run")
    before = (path / "result.json").stat().st_mtime_ns
    fit(path)
    assert str(path) in capsys.readouterr().out
    assert (path / "result.json").stat().st_mtime_ns == before


@pytest.mark.slow
def test_another_configuration_in_the_folder_is_refused(tmp_path):
    path = fit(tmp_path / "run")
    with pytest.raises(ConfigError, match=naming("learning_rate", 0.001, 0.002)):
        fit(path, "learning_rate=0.002")
    with pytest.raises(ConfigError, match="on_existing=error"):
        config = config_of("on_existing=error")
        RunFolder(path, config).check()
    fit(path, "learning_rate=0.002", "on_existing=overwrite")
    assert "0.002" in (path / ".hydra" / "config.yaml").read_text()


@pytest.mark.slow
def test_the_stored_configuration_is_the_run(tmp_path):
    import yaml

    from grpo_ustat.config.train import TrainConfig

    path = fit(tmp_path / "run")
    stored = yaml.safe_load((path / ".hydra" / "config.yaml").read_text())
    assert build_config(stored, TrainConfig) == config_of()


@pytest.mark.slow
def test_fewer_steps_than_are_done_are_refused(tmp_path):
    path = fit(tmp_path / "run")
    (path / "result.json").unlink()
    with pytest.raises(ConfigError, match=naming("step 4", "max_steps=3")):
        fit(path, "max_steps=3")


def test_ranks_that_are_configured_for_deepspeed_are_refused(monkeypatch):
    """`accelerate launch` with a configuration of one's own; unrefused, it would shard nothing."""
    monkeypatch.setenv("ACCELERATE_USE_DEEPSPEED", "true")
    with pytest.raises(ConfigError, match=naming("DeepSpeed", "launch.fsdp2=true")):
        join_ranks(config_of())
