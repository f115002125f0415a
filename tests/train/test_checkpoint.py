"""Checkpoints: what they hold, and that nothing of it can be left out."""

from __future__ import annotations

import shutil

import pytest
import torch
from resuming import config_of, differences, fit, left, rewind, rows

from grpo_ustat.config.schema import ConfigError
from grpo_ustat.policy.loading import load_policy
from grpo_ustat.runs.folder import RunFolder
from grpo_ustat.train import checkpoint, trainer
from grpo_ustat.train.setup import set_up
from grpo_ustat.train.snapshots import prune, publish

MORE = ("optimizer=sgd", "baseline=critic", "lora=r16", "model.dtype=float64",
        "objective=grpo", "baseline=gdpo")  # fmt: skip
NO_SCHEDULE = ("schedule=constant", "schedule.warmup_steps=0")  # so that max_steps may grow


def broken(through, tmp_path, *steps):
    """The same run killed after checkpoint-2, or with other checkpoints missing."""
    path = tmp_path / "run"
    shutil.copytree(through, path)
    return rewind(path, *(steps or (3, 4)))


@pytest.mark.slow
@pytest.mark.parametrize(
    "override",
    ["optimizer=adamw", *(pytest.param(override, marks=pytest.mark.slow) for override in MORE)],
)
def test_resuming_equals_running_through(trained, tmp_path, override):
    """Every file bit by bit: weights, moments, schedule, memory, counters, rows, tables."""
    overrides = (override, "budget.value_completions=3")
    if override == "objective=grpo":
        overrides += (
            "baseline=group_std",
            "objective.num_iterations=2",
            "objective.num_minibatches=2",
        )
    if override == "baseline=gdpo":
        overrides += ("reward_funcs=[task,brevity]", "reward_weights=[1,0.3]")
    through = trained(*overrides)
    parts = broken(through, tmp_path)
    fit(parts, *overrides)
    assert differences(parts, through) == []


@pytest.mark.slow
def test_the_run_is_one_in_which_every_step_moves(through):
    found = rows(through)
    assert [row["step"] for row in found] == [1, 2, 3, 4]
    assert all(row["grad_norm"] > 0 and row["learning_rate"] > 0 for row in found[1:])
    assert len({row["learning_rate"] for row in found}) == 3  # 0, 1/2, 1, 1/2 of the rate
    weights = [left(through)[f"checkpoint-{n}/model.safetensors"] for n in (1, 2, 3, 4)]
    assert len(set(weights[1:])) == 3


@pytest.mark.slow
def test_rows_after_the_checkpoint_are_written_again(through, tmp_path):
    parts = broken(through, tmp_path)
    with (parts / "metrics.jsonl").open("a") as file:
        file.write('{"step": 5, "rew')  # a killed run may leave half a line
    assert differences(fit(parts), through) == []


@pytest.mark.slow
def test_missing_rows_of_metrics_give_a_warning(through, tmp_path, capsys):
    parts = broken(through, tmp_path)
    (parts / "metrics.jsonl").unlink()
    fit(parts)
    assert "metrics.jsonl" in unwrapped(capsys)


def unwrapped(capsys):
    return " ".join(capsys.readouterr().err.split())


def test_a_checkpoint_loads_as_any_model(through):
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(through / "checkpoint-4")
    assert model.lm_head.weight is model.model.embed_tokens.weight


@pytest.mark.slow
def test_a_checkpoint_of_adapters_loads_as_any_adapter(tmp_path):
    from peft import AutoPeftModelForCausalLM
    from safetensors.torch import load_file

    path = fit(tmp_path / "run", "lora=r16", "max_steps=2")
    stored = load_file(path / "checkpoint-2" / checkpoint.ADAPTERS_FILE)
    model = AutoPeftModelForCausalLM.from_pretrained(path / "checkpoint-2")
    loaded = dict(model.named_parameters())
    for name, value in stored.items():
        assert torch.equal(loaded[name.replace(".weight", ".default.weight")], value)
    assert any("lora_B" in name and value.abs().max() > 0 for name, value in stored.items())


@pytest.mark.slow
@pytest.mark.parametrize("limit, kept", [(1, [4]), (2, [3, 4]), ("null", [1, 2, 3, 4])])
def test_as_many_checkpoints_stay_as_asked(trained, limit, kept):
    path = trained(f"save_total_limit={limit}")
    assert sorted(path.glob("*checkpoint*")) == [path / f"checkpoint-{n}" for n in kept]


def test_only_our_own_whole_folders_are_counted_and_removed(tmp_path):
    for step in (2, 4, 9):
        publish(tmp_path, step, lambda staged: (staged / checkpoint.STATE_FILE).write_text("a"))
    (tmp_path / "checkpoint-3").mkdir()  # without a state: not ours to remove, no place taken
    (tmp_path / "checkpoint-best").mkdir()
    (tmp_path / ".checkpoint-5.tmp").mkdir()
    (tmp_path / "elsewhere").symlink_to(tmp_path / "checkpoint-4")
    (tmp_path / "checkpoint-1").symlink_to(tmp_path / "checkpoint-4")
    prune(tmp_path, 4, 1)
    names = {path.name for path in tmp_path.iterdir()}
    assert names == {"checkpoint-1", "checkpoint-3", "checkpoint-4", "checkpoint-best", "elsewhere"}


@pytest.mark.parametrize("tensor", ["model.norm.weight", "model.norm.weight/exp_avg"])
@pytest.mark.parametrize("change", ["shape", "absent"])
def test_tensors_that_do_not_fit_are_refused_by_name(through, tmp_path, tensor, change):
    from safetensors.torch import load_file, save_file

    found = tmp_path / "checkpoint-4"
    shutil.copytree(through / "checkpoint-4", found)
    run = set_up(config_of(), RunFolder(tmp_path, config_of()))
    file = found / (checkpoint.OPTIMIZER_FILE if "/" in tensor else "model.safetensors")
    stored = load_file(file)
    value = stored.pop(tensor)
    if change == "shape":
        stored[tensor] = value[:3].clone()
    save_file(stored, file, metadata={"format": "pt"})
    with pytest.raises(ConfigError, match="norm.weight|optimizer"):
        checkpoint.load(found, run)


@pytest.mark.slow
@pytest.mark.parametrize("override", ["model.dtype=float64", "model=hub"])
def test_another_model_is_refused_before_it_is_loaded(through, tmp_path, override):
    overrides = [override]
    if override == "model=hub":  # another architecture of the same class
        overrides.append(f"model.model_name_or_path={wider(tmp_path / 'wider')}")
    run = set_up(config_of(*overrides), RunFolder(tmp_path, config_of()))
    before = [p.detach().clone() for p in run.policy.model.parameters()]
    with pytest.raises(ConfigError, match="float32|another shape"):
        checkpoint.load(through / "checkpoint-4", run)
    assert all(
        torch.equal(a, b) for a, b in zip(before, run.policy.model.parameters(), strict=True)
    )


def wider(path):
    policy = load_policy("embedded:tiny_direct")
    config = policy.model.config
    config.intermediate_size += 8
    type(policy.model)(config).save_pretrained(path)
    policy.tokenizer.save_pretrained(path)
    return path


@pytest.mark.slow
def test_a_finished_run_goes_on_to_more_steps(trained, tmp_path, capsys):
    shutil.copytree(trained(*NO_SCHEDULE, "max_steps=2"), tmp_path / "run")
    capsys.readouterr()
    parts = fit(tmp_path / "run", *NO_SCHEDULE)
    assert "checkpoint-2" in capsys.readouterr().err
    assert differences(parts, trained(*NO_SCHEDULE)) == []


@pytest.mark.slow
def test_a_longer_run_that_was_killed_goes_on(trained, tmp_path, monkeypatch):
    """Two steps were finished, the run to four was killed in the fourth: its table has grown."""
    shutil.copytree(trained(*NO_SCHEDULE, "max_steps=2"), tmp_path / "run")
    steps, step = [], trainer.train_step

    def killed(*arguments, **options):
        steps.append(1)
        if len(steps) == 2:
            raise KeyboardInterrupt
        return step(*arguments, **options)

    monkeypatch.setattr(trainer, "train_step", killed)
    with pytest.raises(KeyboardInterrupt):
        fit(tmp_path / "run", *NO_SCHEDULE, "max_steps=4")
    assert len(rows(tmp_path / "run")) == 3
    monkeypatch.undo()
    fit(tmp_path / "run", *NO_SCHEDULE, "max_steps=4")
    assert rows(tmp_path / "run") == rows(trained(*NO_SCHEDULE))
