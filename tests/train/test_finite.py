"""A number that is not finite stops the run by name and never reaches a checkpoint."""

from __future__ import annotations

import math
import re

import pytest
import torch
from resuming import config_of, differences, fit
from safetensors.torch import load_file

from grpo_ustat.policy.configured import configured_task
from grpo_ustat.train import trainer, update
from grpo_ustat.train.snapshots import checkpoints

pytestmark = pytest.mark.slow

BAD = [math.nan, math.inf]


def stopped_in(path, step, match):
    """The run stops there for that reason, keeps the checkpoint before and goes on from it."""
    with pytest.raises(FloatingPointError, match=rf"{path.name} stopped in step {step}: {match}"):
        fit(path)
    assert not (path / "result.json").exists()
    assert checkpoints(path)[0].name == f"checkpoint-{step - 1}"
    assert len((path / "metrics.jsonl").read_text().splitlines()) == step - 1
    assert all(v.isfinite().all() for v in tensors(path, step - 1))


def tensors(path, step):
    for file in (path / f"checkpoint-{step}").glob("*.safetensors"):
        yield from load_file(file).values()


def in_step(number, monkeypatch, owner, name, then):
    """Once the `number`-th call of a function has returned, `then` happens to what it was given."""
    function, calls = getattr(owner, name), []

    def called(*arguments, **options):
        result = function(*arguments, **options)
        calls.append(1)
        return then(result, *arguments) if len(calls) == number else result

    monkeypatch.setattr(owner, name, called)


@pytest.mark.parametrize("bad", BAD)
def test_a_reward(tmp_path, monkeypatch, through, bad):
    """It names the prompt."""
    config = config_of()
    prompts = configured_task(config.task_options, config.model).prompts("train")
    victim = trainer.choose_prompts(config, prompts, 2)[1].id
    kind = type(configured_task(config.task_options, config.model))
    rewards, step = kind.rewards, trainer.train_step
    now = []

    def stepping(run, progress):
        now[:] = [progress.step]
        return step(run, progress)

    def unfinite(self, prompts, completions):
        found = rewards(self, prompts, completions)
        hit = [now == [2] and prompt.id == victim for prompt in prompts]
        return [bad if h else r for h, r in zip(hit, found, strict=True)]

    monkeypatch.setattr(trainer, "train_step", stepping)
    monkeypatch.setattr(kind, "rewards", unfinite)
    stopped_in(
        tmp_path / "run", 3, rf"the reward of completion 0 of prompt {re.escape(victim)} is {bad}"
    )
    monkeypatch.undo()
    assert differences(fit(tmp_path / "run"), through) == []


@pytest.mark.parametrize("bad", BAD)
def test_a_gradient(tmp_path, monkeypatch, through, bad):
    def spoilt(result, run, *_):
        next(iter(update.trainable(run.policy))).grad.view(-1)[0] = bad
        return result

    in_step(2, monkeypatch, update, "sum_gradients", spoilt)
    stopped_in(tmp_path / "run", 2, "the gradient's norm is (nan|inf)")
    monkeypatch.undo()
    assert differences(fit(tmp_path / "run"), through) == []


@pytest.mark.parametrize("bad", BAD)
def test_a_weight_after_the_step(tmp_path, monkeypatch, through, bad):
    def spoilt(result, run, *_):
        with torch.no_grad():
            run.policy.model.model.norm.weight[3] = bad
        return result

    in_step(3, monkeypatch, trainer, "update", spoilt)
    stopped_in(tmp_path / "run", 3, "weight model.norm.weight is not finite")
    monkeypatch.undo()
    assert differences(fit(tmp_path / "run"), through) == []


@pytest.mark.parametrize("bad", BAD)
def test_a_moment_of_the_optimizer(tmp_path, monkeypatch, through, bad):
    """The weights stay finite, a checkpoint would not be."""

    def spoilt(result, run, *_):
        norm = run.policy.model.model.norm.weight
        run.optimizer.state[norm]["exp_avg_sq"][3] = bad
        return result

    in_step(3, monkeypatch, trainer, "update", spoilt)
    name = "optimizer state model.norm.weight/exp_avg_sq"
    with pytest.raises(FloatingPointError, match=f"step 3: {name}"):
        fit(tmp_path / "run")
    assert checkpoints(tmp_path / "run")[0].name == "checkpoint-2"
    monkeypatch.undo()
    assert differences(fit(tmp_path / "run"), through) == []


def test_a_reward_of_the_evaluation(tmp_path, monkeypatch):
    config = config_of()
    kind = type(configured_task(config.task_options, config.model))
    monkeypatch.setattr(kind, "rewards", lambda self, prompts, texts: [math.nan] * len(texts))
    with pytest.raises(FloatingPointError, match="step 0: the reward"):
        fit(tmp_path / "run")
