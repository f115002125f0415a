"""How long a dry run says that runs take, which it learns from earlier ones alone."""

from __future__ import annotations

import json
import re
import socket
from copy import deepcopy
from dataclasses import asdict
from functools import cache, reduce

import pytest
import yaml
from commands import compose, plan_of
from folders import completed

from grpo_ustat.costs.duration import Span, duration, span_text
from grpo_ustat.costs.table import batch_lines, show_costs
from grpo_ustat.runs.folder import RunFolder
from grpo_ustat.runs.result import StudyResult
from grpo_ustat.runs.status import PlannedRun

TRAIN = ("max_steps=10", "eval_steps=5", "budget.rollouts=16", "group_size=4",
         "dataset.test_size=20", "dataset.train_size=100")  # fmt: skip
STUDY = ("study.questions=10", "budget.pool_completions=20", "launch.workers=2")


@pytest.fixture(autouse=True)
def elsewhere(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)


@cache
def composed_config(entry, *overrides):
    return compose(entry, *{"train": TRAIN, "mse": STUDY}[entry], *overrides)


def planned(entry="train", *overrides, path=None, **changes):
    """A run; `a__b` stands for a.b."""
    config = deepcopy(composed_config(entry, *overrides))
    for key, value in changes.items():
        *groups, name = key.split("__")
        setattr(reduce(getattr, groups, config), name, value)
    return PlannedRun("", config, path and RunFolder(path, config), None)


def of(planned_run):
    return duration(plan_of(planned_run))


def left(path, planned_run, host=None, **changes):
    """What a run of this configuration leaves, without anything measured."""
    (path / ".hydra").mkdir(parents=True)
    config = asdict(planned_run.config) | changes
    (path / ".hydra/config.yaml").write_text(yaml.safe_dump(config))
    (path / "code.json").write_text("{}")
    start = {"event": "start", "host": host or socket.gethostname()}
    (path / "launches.jsonl").write_text(json.dumps(start) + "\n")
    return path


def stepped(path, times, tokens=400, generate=0.5, mean=25.0):
    """Rows of steps; the last line is half written, as a killed run leaves it."""
    rows = [
        {"step": i, "step_time": t, "tokens": tokens, "seconds_generate": generate,
         "completions/mean_length": mean}
        for i, t in enumerate(times, start=1)
    ]  # fmt: skip
    (path / "metrics.jsonl").write_text("\n".join(map(json.dumps, rows)) + '\n{"step": 9, "tok')


def test_steps_of_the_same_shape_are_read_off(tmp_path):
    """11 steps of 1.0 to 2.0 s: percentiles 1.1 and 1.9, times 10 steps; three evaluations of 20
    questions at 25 tokens and 0.5/400 s a token are 1.875 s more; 1.3 from one time to another.
    """
    planned_run = planned()
    stepped(
        left(tmp_path / "outputs/train/x/seed-3", planned_run, seed=3),
        [1 + i / 10 for i in range(11)],
    )
    found = of(planned_run)
    assert found.seconds == pytest.approx(((11 + 1.875) / 1.3, (19 + 1.875) * 1.3))
    assert found.basis == (
        "measured: 11 steps of 1 earlier run of tiny_base on cpu here, of this shape; "
        "on a machine as busy as then"
    )
    assert found.gpus == 0


def test_what_a_run_took_beside_its_steps_counts(tmp_path):
    """One launch of 59.5 s, 16.5 of them in steps, leaves 43 s for all else."""
    path = left(tmp_path / "outputs/train/x/seed-3", planned())
    stepped(path, [1 + i / 10 for i in range(11)])
    start = {"event": "start", "host": socket.gethostname(), "time": "2026-03-01T00:00:00+00:00"}
    end = {"event": "end", "outcome": "done", "time": "2026-03-01T00:00:59+00:00"}
    (path / "launches.jsonl").write_text(f"{json.dumps(start)}\n{json.dumps(end)}\n")
    assert of(planned()).seconds == pytest.approx(((11 + 1.875) / 1.3, (19 + 43) * 1.3))


def test_another_shape_is_scaled_by_tokens_and_wider(tmp_path):
    """0.005 s a token; twice the completions: 320 of 25 tokens are 40 s, evaluations 1.875 s."""
    stepped(left(tmp_path / "outputs/train/x/seed-0", planned()), [2.0] * 4)
    found = of(planned(budget__rollouts=32))
    assert found.seconds == pytest.approx(((40 + 1.875) / 2, (40 + 1.875) * 2))
    assert "here, of another shape, so 2 times either way;" in found.basis


def test_a_study_on_several_gpus_is_timed_as_several(tmp_path):
    """800 s of work on 200 completions by 8 ranks: 0.5 s each; two workers use two GPUs."""
    study = planned("mse", launch__num_processes=8, launch__device="cuda")
    path = left(tmp_path / "outputs/mse/x/seed-0", study)
    spent = {"rollouts": 200, "seconds_generate": 600.0, "seconds_score": 200.0}
    (path / "result.json").write_text(json.dumps(completed(StudyResult, {"cost": spent})))
    found = of(study)
    assert found.seconds == pytest.approx((0.5 * 200 / 1.3, 0.5 * 200 * 1.3)) and found.gpus == 8
    assert of(planned("mse", launch__device="cuda")).gpus == 2
    assert of(planned("mse", launch__device="cuda:1")).gpus == 1


def test_a_study_of_equal_rewards_says_nothing_of_what_scoring_takes(tmp_path):
    study = planned("mse")
    path = left(tmp_path / "outputs/mse/x/seed-0", study)
    spent = {"rollouts": 200, "seconds_generate": 60.0, "seconds_score": 0.0}
    (path / "result.json").write_text(json.dumps(completed(StudyResult, {"cost": spent})))
    assert of(study).seconds is None


def test_runs_of_the_same_shape_are_preferred(tmp_path):
    stepped(left(tmp_path / "outputs/train/x/seed-0", planned()), [2.0] * 4)
    other = planned(group_size=8)
    stepped(left(tmp_path / "outputs/train/y/seed-0", other), [50.0] * 4)
    assert of(planned()).seconds == pytest.approx((21.875 / 1.3, 21.875 * 1.3))
    assert "of 1 earlier run " in of(planned()).basis


@pytest.mark.parametrize(
    "spoilt",
    [
        lambda path: left(path, planned(), host="another"),
        lambda path: left(path, planned(model__model_name_or_path="embedded:tiny")),
        lambda path: left(path, planned(launch__num_threads=2)),
        lambda path: left(path, planned(bf16=True)),
        lambda path: left(path, planned(lora__r=16)),
        lambda path: (left(path, planned()) / ".hydra/config.yaml").write_text("[damaged"),
        lambda path: (left(path, planned()) / ".hydra/config.yaml").write_text("- 1"),
        lambda path: (left(path, planned()) / "launches.jsonl").unlink(),
        lambda path: (left(path, planned()) / "code.json").unlink(),
    ],
)
def test_nothing_is_learnt_from_other_models_devices_machines_or_damage(tmp_path, spoilt):
    path = tmp_path / "outputs/train/x/seed-0"
    spoilt(path)
    stepped(path, [1.0] * 4)
    assert of(planned()).seconds is None and of(planned()).basis.startswith("left out, for no run")


def test_runs_beside_a_folder_of_ones_own_count(tmp_path):
    stepped(left(tmp_path / "mine/one", planned()), [1.0] * 4)
    assert of(planned()).basis.startswith("left out")
    assert of(planned(path=tmp_path / "mine/two")).basis.startswith("measured")


def test_a_study_by_its_workers_seconds(tmp_path):
    """200 completions; 60 and 100 s of 200 before: 0.3 to 0.5 s each, shared by two, and 1.3.

    Where one launch did it all, what that took counts, 59.5 s, with all that workers do not do.
    """
    planned_run = planned("mse")
    for name, seconds in (("x", 60.0), ("y", 100.0)):
        path = left(tmp_path / f"outputs/mse/{name}/seed-0", planned_run)
        spent = {"rollouts": 200, "seconds_generate": seconds / 4, "seconds_score": seconds * 3 / 4}
        (path / "result.json").write_text(json.dumps(completed(StudyResult, {"cost": spent})))
    assert of(planned_run).seconds == pytest.approx((30 / 1.3, 50 * 1.3))
    assert "2 earlier runs of tiny_base on cpu here, of this shape" in of(planned_run).basis
    wider = of(planned("mse", study__questions=20))
    assert wider.seconds == pytest.approx((60 / 2, 100 * 2))
    start = {"event": "start", "host": socket.gethostname(), "time": "2026-03-01T00:00:00+00:00"}
    end = {"event": "end", "outcome": "done", "time": "2026-03-01T00:00:59+00:00"}
    (path / "launches.jsonl").write_text(f"{json.dumps(start)}\n{json.dumps(end)}\n")
    assert of(planned_run).seconds == pytest.approx((30 / 1.3, 59.5 * 1.3))
    wider = of(planned("mse", study__questions=20))  # the 9.5 s beside stay what they are
    assert wider.seconds == pytest.approx((60 / 2, (100 + 9.5) * 2))
    start["seconds_before"] = 3.5  # imports and configurations, before the run began
    (path / "launches.jsonl").write_text(f"{json.dumps(start)}\n{json.dumps(end)}\n")
    assert of(planned_run).seconds == pytest.approx((30 / 1.3, 63 * 1.3))


LARGE = ("model=qwen2_5_math_7b", "dataset=math", "prompt=qwen_math_cot", "launch.device=cuda",
         "bf16=true", "max_completion_length=1000", "rollout_batch_size=64", "max_steps=1",
         "eval_steps=1", "dataset.test_size=64", "budget.rollouts=128", "group_size=8",
         "baseline=leave_one_out", "dataset.train_size=null")  # fmt: skip


@pytest.mark.parametrize("entry, debug", [("train", "debug=train"), ("mse", "debug=mse")])
def test_without_an_earlier_run_the_time_is_left_out_and_said_how_to_know_it(entry, debug, capsys):
    """Also for a model of known size on a known device: nothing is assumed."""
    planned_run = planned(entry)
    assert of(planned_run).seconds is None and of(planned_run).gpu_hours is None
    show_costs([plan_of(planned_run)])
    text = " ".join(capsys.readouterr().out.split())
    name = planned_run.config.model.name
    assert (
        f"Wall time: left out, for no run of {name} on cpu is known on this machine; run {debug} "
        "with this model and device first." in text
    )
    assert "Wall time leaves out" not in text


def test_a_sweep_of_which_only_some_runs_are_known_has_no_sum(tmp_path, capsys):
    stepped(left(tmp_path / "outputs/train/x/seed-0", planned()), [360.0] * 4, generate=0)
    other = planned("train", model__name="another", model__model_name_or_path="embedded:tiny")
    show_costs([plan_of(one) for one in (planned(seed=4), other)])
    text = capsys.readouterr().out
    rows = [re.split(r" {2,}", line.strip()) for line in text.splitlines()]
    assert ["model tiny_base, seed 4", "46 to 78 min"] in rows
    assert ["model another, seed 0", "unknown"] in rows
    assert ["one after the other", "unknown"] in rows
    assert text.count("(1 of 2 runs)") == 2


def test_a_sweep_adds_up_its_runs(tmp_path, capsys):
    for seed in (0, 1):
        stepped(left(tmp_path / f"outputs/train/x/seed-{seed}", planned()), [360.0] * 4, generate=0)
    show_costs([plan_of(one) for one in (planned(seed=4), planned(seed=5))])
    text = capsys.readouterr().out
    lines = [re.split(r" {2,}", line.strip()) for line in text.splitlines()]
    assert ["seed 4", "46 to 78 min"] in lines
    assert ["one after the other", "1.5 to 2.6 h"] in lines
    assert "GPU hours" not in text and text.count("measured: 8 steps of 2 earlier runs") == 1


def test_a_dry_run_of_gpus_shows_their_hours(tmp_path, capsys):
    """4 GPUs for 46 to 78 min, 10 steps of 360 s and 1.3 either way: 3.1 to 5.2 GPU hours."""
    four = planned("train", *LARGE, launch__num_processes=4, max_steps=10)
    stepped(left(tmp_path / "outputs/train/x/seed-0", four), [360.0] * 4, generate=0)
    show_costs([plan_of(four)])
    assert (
        "Wall time 46 to 78 min, 3.1 to 5.2 GPU hours: measured: 4 steps" in capsys.readouterr().out
    )


def test_batches_are_said_in_words():
    """16 384 // 96 padded tokens: 256 of 96 are two passes; PPO's minibatches are updates."""
    (text,) = batch_lines([plan_of(planned(budget__rollouts=256, group_size=8))])
    assert text == (
        "Batch: n = 256 completions a step = 32 prompts x G = 8; 1 update a step, each of 256 "
        "completions in at most about 2 backward passes of 16384 padded tokens, prompts left out."
    )
    several = planned(
        objective__num_iterations=2, objective__minibatch_size=8, launch__num_processes=3
    )
    (text,) = batch_lines([plan_of(several)])
    assert "= 4 prompts x G = 4; up to 2 prompts on each of 3 processes; 4 updates a step" in text
    assert "each of 8 completions in at most about 1 backward pass of" in text
    many = [plan_of(planned(budget__rollouts=4 * n)) for n in range(2, 10)]
    assert batch_lines(many)[-1] == "and 2 other batches" and len(batch_lines(many)) == 7


@pytest.mark.parametrize(
    "seconds, text",
    [((0.2, 0.3), "0.2 to 0.3 s"), ((80, 100), "80 s to 1.7 min"), ((120, 240), "2 to 4 min"),
     ((4000, 400_000), "67 min to 4.6 days"), ((86400 * 200, 86400 * 2000), "200 to 2 000 days")],
)  # fmt: skip
def test_durations_are_said_in_units_that_suit(seconds, text):
    assert span_text(Span(*seconds)) == text


@pytest.mark.parametrize(
    "name, content",
    [
        ("metrics.jsonl", '{"step": 1, "step_time": "x", "tokens": 400, "seconds_generate": 0.5,'
                          ' "completions/mean_length": 25}\n'),
        ("metrics.jsonl", '{"step": 1, "step_time": -1e308, "tokens": 400, "seconds_generate": 1,'
                          ' "completions/mean_length": 25}\n'),
        ("metrics.jsonl", "[" * 100_000 + "\n"),
        (".hydra/config.yaml", "- a list"),
        (".hydra/config.yaml", "a: &a [*a, *a]"),
        ("launches.jsonl", '{"event": 3}\n'),
    ],
)  # fmt: skip
def test_an_earlier_run_that_was_damaged_says_nothing(tmp_path, name, content):
    path = left(tmp_path / "outputs/train/x/seed-3", planned(seed=3))
    stepped(path, [1.0, 2.0])
    assert of(planned()).seconds is not None
    (path / name).write_text(content)
    assert of(planned()).seconds is None


@pytest.mark.parametrize("cost", [{"rollouts": "200"}, {"seconds_score": None}, [], "x", -1])
def test_an_earlier_study_whose_cost_was_damaged_says_nothing(tmp_path, cost):
    study = planned("mse")
    path = left(tmp_path / "outputs/mse/x/seed-0", study)
    whole = {"rollouts": 200, "seconds_generate": 60.0, "seconds_score": 20.0}
    (path / "result.json").write_text(json.dumps(completed(StudyResult, {"cost": whole})))
    assert of(study).seconds is not None
    damaged = whole | cost if isinstance(cost, dict) else cost
    (path / "result.json").write_text(json.dumps(completed(StudyResult, {"cost": damaged})))
    assert of(study).seconds is None
