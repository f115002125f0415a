"""How long a dry run says that runs take, which it learns from an earlier one alone."""

from __future__ import annotations

import json
import os
import re
import socket
from copy import deepcopy
from dataclasses import asdict
from functools import cache, reduce

import pytest
import yaml
from commands import compose, plan_of
from folders import completed

from grpo_ustat.costs.duration import duration, time_text
from grpo_ustat.costs.table import batch_lines, show_costs
from grpo_ustat.runs.folder import RunFolder
from grpo_ustat.runs.result import StudyResult, TrainResult
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


EVALUATION = {"n": 20, "num_generations": 1}
TRAINED = {"tokens": 2000, "rollouts": 64, "value_rollouts": 16, "evals": [EVALUATION]}
TRAINED["seconds"] = 40.0
STUDIED = {"tokens": 20_000, "rollouts": 400, "seconds_generate": 60.0, "seconds_score": 100.0}


def left(path, planned_run, wall=50, start=4.0, host=None, ends=1, **changes):
    """What a finished run of this configuration leaves; `changes` are of its result."""
    (path / ".hydra").mkdir(parents=True)
    (path / ".hydra/config.yaml").write_text(yaml.safe_dump(asdict(planned_run.config)))
    end = f"2026-03-01T00:{wall // 60:02}:{wall % 60:02}+00:00"
    rows = [
        {"event": "start", "host": host or socket.gethostname(), "seconds_before": start,
         "time": "2026-03-01T00:00:00+00:00"},
        {"event": "end", "outcome": "done", "time": end},
    ] * ends  # fmt: skip
    (path / "launches.jsonl").write_text("\n".join(map(json.dumps, rows)) + "\n")
    if hasattr(planned_run.config, "max_steps"):
        content = completed(TrainResult, TRAINED | changes)
    else:
        content = completed(StudyResult, {"cost": STUDIED | changes})
    (path / "result.json").write_text(json.dumps(content))
    return path


def aged(path, seconds):
    """The same folder, finished so many seconds ago."""
    file = path / "result.json"
    moment = file.stat().st_mtime - seconds
    os.utime(file, (moment, moment))


def test_training_takes_its_tokens_by_the_rate_of_an_earlier_run(tmp_path):
    """2000 tokens of 80 completions in 40 s: 50 tokens/s; 20 of an evaluation are 10 s more, so
    6 of 56 s are rest. 160 + 3 x 20 completions of 25 tokens are 5500, so 110 s, and 6, and 4 of
    start.
    """
    left(tmp_path / "outputs/train/x/seed-3", planned(seed=3), wall=56)
    found = of(planned())
    assert (found.seconds, found.start, found.gpus) == (pytest.approx(120), 4, 0)
    for words in ("50 tokens/s", "outputs/train/x/seed-3", "25 tokens per completion"):
        assert words in found.basis


def test_evaluations_take_what_sampling_takes(tmp_path):
    """1000 tokens in 5 s: 20 x 25 of an evaluation are 2.5 s, so 7.5 of 50 s are rest. 60 take 7.5
    s; steps, rest and start are 80, 7.5 and 4.
    """
    path = left(tmp_path / "outputs/train/x/seed-3", planned())
    rows = [{"step": i, "tokens": 500, "seconds_generate": 2.5} for i in (1, 2)]
    rows.append({"step": 3, "tokens": 500, "seconds_generate": "damaged"})
    (path / "metrics.jsonl").write_text("\n".join(map(json.dumps, rows)) + '\n{"step": 9, "tok')
    assert of(planned()).seconds == pytest.approx(99)


def test_completions_are_no_longer_than_they_may_be(tmp_path):
    """220 of 20 tokens: 88 s, and 4."""
    left(tmp_path / "outputs/train/x/seed-3", planned())
    assert of(planned(max_completion_length=20)).seconds == pytest.approx(92)


def test_another_size_has_the_same_rate(tmp_path):
    """320 + 60 completions: 190 s, and 4."""
    left(tmp_path / "outputs/train/x/seed-0", planned())
    assert of(planned(budget__rollouts=32)).seconds == pytest.approx(194)


def test_a_study_takes_its_tokens_by_the_wall_time_of_an_earlier_one(tmp_path):
    """20 000 tokens in 160 s of two workers: 250 tokens/s, and 20 of 100 s are rest; 10 x 20
    completions of 50 tokens are 40 s.
    """
    left(tmp_path / "outputs/mse/x/seed-0", planned("mse"), wall=100, start=0.0)
    assert of(planned("mse")).seconds == pytest.approx(60)
    assert of(planned("mse", study__questions=30)).seconds == pytest.approx(140)


def test_a_study_on_several_gpus_is_timed_as_several(tmp_path):
    """160 s of 8 ranks are 20 s, so 1000 tokens/s; two workers use two GPUs."""
    study = planned("mse", launch__num_processes=8, launch__device="cuda")
    left(tmp_path / "outputs/mse/x/seed-0", study, wall=20, start=0.0)
    found = of(study)
    assert (found.seconds, found.gpus) == (pytest.approx(10), 8)
    assert found.gpu_hours == pytest.approx(80 / 3600)
    assert of(planned("mse", launch__device="cuda")).gpus == 2
    assert of(planned("mse", launch__device="cuda:1")).gpus == 1


@pytest.mark.parametrize(
    "changes",
    [
        {"seconds_score": 0.0},  # rewards were equal: nothing was scored
        {"seconds_generate": 0.0},  # rollouts of a file: nothing was sampled
        {"wall": 60},  # 160 s of two workers do not fit: its pool was there before
        {"rollouts": 0}, {"tokens": 0},
    ],
)  # fmt: skip
def test_a_study_that_did_not_do_all_of_it_says_nothing(tmp_path, changes):
    left(tmp_path / "outputs/mse/x/seed-0", planned("mse"), **{"wall": 100} | changes)
    assert of(planned("mse")).seconds is None


def test_a_study_of_a_file_samples_nothing_whose_time_is_known():
    study = planned("mse", pool="rollouts.parquet")
    assert of(study).basis == "the run samples no completions"


def test_the_newest_run_counts(tmp_path):
    """At 25 tokens/s and then at 50; one that cannot say it, newer than both, is passed over."""
    aged(left(tmp_path / "outputs/train/x/seed-0", planned(), wall=100, seconds=80.0), 60)
    assert of(planned()).seconds == pytest.approx(220 + 4)
    aged(left(tmp_path / "outputs/train/y/seed-0", planned(group_size=8)), 30)
    left(tmp_path / "outputs/train/z/seed-0", planned(), ends=2)
    assert of(planned()).seconds == pytest.approx(114)


@pytest.mark.parametrize(
    "spoil",
    [
        lambda path: left(path, planned(), host="another"),
        lambda path: left(path, planned(model__model_name_or_path="embedded:tiny")),
        lambda path: left(path, planned(launch__num_threads=2)),
        lambda path: left(path, planned(bf16=True)),
        lambda path: left(path, planned(lora__r=16)),
        lambda path: left(path, planned("mse")),
        lambda path: left(path, planned(), ends=2),
        lambda path: left(path, planned(), start="x"),
        lambda path: left(path, planned(), tokens="2000"),
        lambda path: left(path, planned(), seconds=0.0),
        lambda path: left(path, planned(), wall=38),
        lambda path: left(path, planned(), evals=[EVALUATION | {"n": "20"}]),
        lambda path: (left(path, planned()) / ".hydra/config.yaml").write_text("[damaged"),
        lambda path: (left(path, planned()) / ".hydra/config.yaml").write_text("- a list"),
        lambda path: (left(path, planned()) / ".hydra/config.yaml").write_text("a: &a [*a, *a]"),
        lambda path: (left(path, planned()) / "launches.jsonl").write_text('{"event": 3}\n'),
        lambda path: (left(path, planned()) / "launches.jsonl").unlink(),
        lambda path: (left(path, planned()) / "result.json").write_text("[" * 100_000),
        lambda path: (left(path, planned()) / "result.json").unlink(),
    ],
)
def test_nothing_is_learnt_from_other_models_devices_machines_or_damage(tmp_path, spoil):
    spoil(tmp_path / "outputs/train/x/seed-0")
    assert of(planned()).seconds is None
    assert "tiny_base on cpu" in of(planned()).basis


@pytest.mark.parametrize("cost", [{"rollouts": "200"}, {"seconds_score": None}, [], "x", -1])
def test_an_earlier_study_whose_cost_was_damaged_says_nothing(tmp_path, cost):
    path = left(tmp_path / "outputs/mse/x/seed-0", planned("mse"), wall=100)
    assert of(planned("mse")).seconds is not None
    damaged = STUDIED | cost if isinstance(cost, dict) else cost
    (path / "result.json").write_text(json.dumps(completed(StudyResult, {"cost": damaged})))
    assert of(planned("mse")).seconds is None


def test_runs_beside_a_folder_of_ones_own_count(tmp_path):
    left(tmp_path / "mine/one", planned())
    assert of(planned()).seconds is None
    assert of(planned(path=tmp_path / "mine/two")).basis.startswith("50 tokens/s in mine/one")


LARGE = ("model=qwen2_5_math_7b", "dataset=math", "prompt=qwen_math_cot", "launch.device=cuda",
         "bf16=true", "max_completion_length=1000", "rollout_batch_size=64", "max_steps=1",
         "eval_steps=1", "dataset.test_size=64", "budget.rollouts=128", "group_size=8",
         "baseline=leave_one_out", "dataset.train_size=null")  # fmt: skip


@pytest.mark.parametrize("entry, words", [("train", "max_steps=2"), ("mse", "study.questions=8")])
def test_without_an_earlier_run_the_time_is_left_out_and_said_how_to_know_it(entry, words, capsys):
    show_costs([plan_of(planned(entry))])
    text = " ".join(capsys.readouterr().out.split())
    assert "tiny_base on cpu" in text and words in text
    assert "rough estimate" not in text


def test_a_sweep_of_which_only_some_runs_are_known_has_no_sum(tmp_path, capsys):
    left(tmp_path / "outputs/train/x/seed-0", planned(), wall=1000, seconds=800.0)
    other = planned("train", model__name="another", model__model_name_or_path="embedded:tiny")
    show_costs([plan_of(one) for one in (planned(seed=4), other)])
    text = capsys.readouterr().out
    rows = [re.split(r" {2,}", line.strip()) for line in text.splitlines()]
    assert ["model tiny_base, seed 4", "37 min"] in rows  # 5500 tokens by 2.5, and 4 s
    assert ["model another, seed 0", "unknown"] in rows
    assert ["one after the other", "unknown"] in rows
    assert " ".join(text.split()).count("(1 of 2 runs)") == 2


def test_a_sweep_adds_up_its_runs_and_starts_once(tmp_path, capsys):
    """110 s, and 55 s of start: 220 + 55 s in all."""
    left(tmp_path / "outputs/train/x/seed-0", planned(), start=55.0)
    show_costs([plan_of(one) for one in (planned(seed=4), planned(seed=5))])
    text = capsys.readouterr().out
    lines = [re.split(r" {2,}", line.strip()) for line in text.splitlines()]
    assert ["seed 4", "2.8 min"] in lines and ["one after the other", "4.6 min"] in lines
    assert "GPU hours" not in text and text.count("Wall time: 50 tokens/s in outputs/train/x") == 1


def test_a_dry_run_of_gpus_shows_their_hours(tmp_path, capsys):
    """128 completions and two evaluations of 64, of 25 tokens: 6400 by 2.5 tokens/s are 2560 s."""
    four = planned("train", *LARGE, launch__num_processes=4)
    left(tmp_path / "outputs/train/x/seed-0", four, wall=1000, seconds=800.0)
    show_costs([plan_of(four)])
    text = " ".join(capsys.readouterr().out.split())
    for words in ("about 43 min", "2.8 GPU hours", "2.5 tokens/s", "outputs/train/x/seed-0"):
        assert words in text
    assert "rough estimate" in text


def test_batches_are_said_in_words():
    """16 384 // 96 padded tokens: 256 of 96 are two passes; PPO's minibatches are updates."""
    (text,) = batch_lines([plan_of(planned(budget__rollouts=256, group_size=8))])
    numbers = (
        "n = 256",
        "32 prompts x G = 8",
        "1 update",
        "256 completions",
        "2 backward",
        "16384",
    )
    for words in numbers:
        assert words in text
    several = planned(
        objective__num_iterations=2, objective__minibatch_size=8, launch__num_processes=3
    )
    (text,) = batch_lines([plan_of(several)])
    for words in ("4 prompts x G = 4", "2 prompts on each of 3", "4 updates", "1 backward"):
        assert words in text
    many = [plan_of(planned(budget__rollouts=4 * n)) for n in range(2, 10)]
    assert batch_lines(many)[-1] == "and 2 other batches" and len(batch_lines(many)) == 7


@pytest.mark.parametrize(
    "seconds, text",
    [(0.25, "0.25 s"), (89, "89 s"), (100, "1.7 min"), (4000, "67 min"), (6000, "1.7 h"),
     (400_000, "4.6 days"), (86400 * 2000, "2 000 days"), (None, "unknown")],
)  # fmt: skip
def test_durations_are_said_in_units_that_suit(seconds, text):
    assert time_text(seconds) == text
