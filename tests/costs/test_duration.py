"""How long a dry run says that runs take: what it learns from earlier ones, what it assumes."""

from __future__ import annotations

import json
import re
import socket
import stat
from copy import deepcopy
from dataclasses import asdict
from functools import cache, reduce

import pytest
import yaml
from test_config import compose

from grpo_ustat.runs import duration as durations
from grpo_ustat.runs.cost import cost
from grpo_ustat.runs.cost_table import arithmetic, show_costs
from grpo_ustat.runs.duration import Span, duration, said
from grpo_ustat.runs.folder import RunFolder
from grpo_ustat.runs.points import Point

TRAIN = ("max_steps=10", "eval_steps=5", "budget.rollouts=16", "group_size=4",
         "dataset.test_size=20", "dataset.train_size=100")  # fmt: skip
STUDY = ("study.questions=10", "budget.pool_completions=20", "launch.workers=2")


@pytest.fixture(autouse=True)
def elsewhere(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    durations._gpu.cache_clear()
    yield
    durations._gpu.cache_clear()


@cache
def composed_once(entry, *overrides):
    return compose(entry, *{"train": TRAIN, "mse": STUDY}[entry], *overrides)


def planned(entry="train", *overrides, path=None, **changes):
    """A run; `a__b` stands for a.b."""
    config = deepcopy(composed_once(entry, *overrides))
    for key, value in changes.items():
        *groups, name = key.split("__")
        setattr(reduce(getattr, groups, config), name, value)
    return Point("", config, path and RunFolder(path, config), None)


def of(point):
    return duration(point, cost(point.config))


def left(path, point, host=None, **changes):
    """What a run of this configuration leaves, without anything measured."""
    (path / ".hydra").mkdir(parents=True)
    config = asdict(point.config) | changes
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
    point = planned()
    stepped(
        left(tmp_path / "outputs/train/x/seed=3", point, seed=3), [1 + i / 10 for i in range(11)]
    )
    found = of(point)
    assert found.seconds == pytest.approx(((11 + 1.875) / 1.3, (19 + 1.875) * 1.3))
    assert found.basis == (
        "measured: 11 steps of 1 earlier run of tiny_base on cpu here, of this shape; "
        "on a machine as busy as then"
    )
    assert found.gpus == 0


def test_what_a_run_took_beside_its_steps_counts(tmp_path):
    """One launch of 59.5 s, 16.5 of them in steps, leaves 43 s for all else."""
    path = left(tmp_path / "outputs/train/x/seed=3", planned())
    stepped(path, [1 + i / 10 for i in range(11)])
    start = {"event": "start", "host": socket.gethostname(), "time": "2026-03-01T00:00:00+00:00"}
    end = {"event": "end", "outcome": "done", "time": "2026-03-01T00:00:59+00:00"}
    (path / "launches.jsonl").write_text(f"{json.dumps(start)}\n{json.dumps(end)}\n")
    assert of(planned()).seconds == pytest.approx(((11 + 1.875) / 1.3, (19 + 43) * 1.3))


def test_another_shape_is_scaled_by_tokens_and_wider(tmp_path):
    """0.005 s a token; twice the completions: 320 of 25 tokens are 40 s, evaluations 1.875 s."""
    stepped(left(tmp_path / "outputs/train/x/seed=0", planned()), [2.0] * 4)
    found = of(planned(budget__rollouts=32))
    assert found.seconds == pytest.approx(((40 + 1.875) / 2, (40 + 1.875) * 2))
    assert "here, of another shape, so 2 times either way;" in found.basis


def test_runs_of_the_same_shape_are_preferred(tmp_path):
    stepped(left(tmp_path / "outputs/train/x/seed=0", planned()), [2.0] * 4)
    other = planned(group_size=8)
    stepped(left(tmp_path / "outputs/train/y/seed=0", other), [50.0] * 4)
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
    path = tmp_path / "outputs/train/x/seed=0"
    spoilt(path)
    stepped(path, [1.0] * 4)
    assert of(planned()).basis.startswith("assumed, not measured: one idle CPU")


def test_runs_beside_a_folder_of_ones_own_count(tmp_path):
    stepped(left(tmp_path / "mine/one", planned()), [1.0] * 4)
    assert of(planned()).basis.startswith("assumed")
    assert of(planned(path=tmp_path / "mine/two")).basis.startswith("measured")


def test_a_study_by_its_workers_seconds(tmp_path):
    """200 completions; 60 and 100 s of 200 before: 0.3 to 0.5 s each, shared by two, and 1.3.

    Where one launch did it all, what that took counts, 59.5 s, with all that workers do not do.
    """
    point = planned("mse")
    for name, seconds in (("x", 60.0), ("y", 100.0)):
        path = left(tmp_path / f"outputs/mse/{name}/seed=0", point)
        spent = {"rollouts": 200, "seconds_generate": seconds / 4, "seconds_score": seconds * 3 / 4}
        (path / "result.json").write_text(json.dumps({"cost": spent}))
    assert of(point).seconds == pytest.approx((30 / 1.3, 50 * 1.3))
    assert "2 earlier runs of tiny on cpu here, of this shape" in of(point).basis
    wider = of(planned("mse", study__questions=20))
    assert wider.seconds == pytest.approx((60 / 2, 100 * 2))
    start = {"event": "start", "host": socket.gethostname(), "time": "2026-03-01T00:00:00+00:00"}
    end = {"event": "end", "outcome": "done", "time": "2026-03-01T00:00:59+00:00"}
    (path / "launches.jsonl").write_text(f"{json.dumps(start)}\n{json.dumps(end)}\n")
    assert of(point).seconds == pytest.approx((30 / 1.3, 59.5 * 1.3))


def gpu(monkeypatch, folder, name):
    file = folder / "nvidia-smi"
    file.write_text(f"#!/bin/sh\necho {name}\n")
    file.chmod(file.stat().st_mode | stat.S_IXUSR)
    monkeypatch.setenv("PATH", f"{folder}:/usr/bin:/bin")


LARGE = ("model=qwen2_5_math_7b", "dataset=math", "prompt=qwen_math_cot", "launch.device=cuda",
         "bf16=true", "max_completion_length=1000", "rollout_batch_size=64", "max_steps=1",
         "eval_steps=1", "dataset.test_size=64", "budget.rollouts=128", "group_size=8",
         "baseline=leave_one_out", "dataset.train_size=null")  # fmt: skip


def test_what_is_assumed_of_an_h100_by_hand(tmp_path, monkeypatch):
    """P = 7.6156e9, 28 layers, 30.46 GB. 128 completions trained on and 2 x 64 more written:
    P x (2 x 256 + 8 x 128) x tokens; 2 + 2 batches, each token 30.46 GB read and 28 layers.
    """
    gpu(monkeypatch, tmp_path, "NVIDIA H100 80GB HBM3")
    found = of(planned("train", *LARGE))
    weights, size = 4 * 7_615_616_512, 7_615_616_512
    fast = 250 * (size * 1536 / (0.45 * 989e12) + 4 * (weights / (0.8 * 3.35e12) + 28 * 5e-5))
    slow = 1000 * (size * 1536 / (0.1 * 989e12) + 4 * (weights / (0.25 * 3.35e12) + 28 * 5e-4))
    assert found.seconds == pytest.approx((fast, slow))
    assert "H100 at 10% to 45% of its peak" in found.basis and found.gpus == 1
    assert found.gpu_hours == pytest.approx((fast / 3600, slow / 3600))
    four = of(planned("train", *LARGE, launch__num_processes=4))
    assert four.gpus == 4 and four.gpu_hours.high > found.gpu_hours.high / 2
    assert four.seconds.high < found.seconds.high


def test_an_unknown_gpu_lies_between_two_known_ones(tmp_path, monkeypatch):
    gpu(monkeypatch, tmp_path, "Some GPU")
    found = of(planned("train", *LARGE))
    both = []
    for name in ("A100-SXM4-80GB", "H100"):
        durations._gpu.cache_clear()
        gpu(monkeypatch, tmp_path, name)
        both.append(of(planned("train", *LARGE)).seconds)
    assert found.seconds == pytest.approx((both[1].low, both[0].high))


def test_the_worked_example_of_the_readme_lies_inside(monkeypatch, tmp_path):
    """100 steps of n = 4096 take 14.9 h on 8 H100s with rollout=local, by its arithmetic."""
    gpu(monkeypatch, tmp_path, "H100")
    config = compose(
        "train", "experiment=table2_math", "group_size=8", "dataset.test_size=2",
        "budget.rollouts=4096", "launch.num_processes=8",
    )  # fmt: skip
    found = of(Point("", config, None, None))
    assert found.seconds.low < 14.9 * 3600 < found.seconds.high
    assert found.seconds.high / found.seconds.low < 40


def test_a_model_of_unknown_size_is_not_guessed(capsys):
    hub = ("model=hub", "model.model_name_or_path=org/name", "prompt=plain")
    point = planned("train", *hub)
    assert of(point).seconds is None and of(point).gpu_hours is None
    show_costs([point])
    assert "Time: unknown: run debug=train with this model here first." in capsys.readouterr().out


def test_a_sweep_adds_up_its_runs(tmp_path, capsys):
    for seed in (0, 1):
        stepped(left(tmp_path / f"outputs/train/x/seed={seed}", planned()), [360.0] * 4, generate=0)
    show_costs([planned(seed=4), planned(seed=5)])
    text = capsys.readouterr().out
    lines = [re.split(r" {2,}", line.strip()) for line in text.splitlines()]
    assert ["seed 4", "46 to 78 min"] in lines
    assert ["one after the other", "1.5 to 2.6 h"] in lines
    assert "GPU hours" not in text and text.count("measured: 8 steps of 2 earlier runs") == 1


def test_a_dry_run_of_gpus_shows_their_hours(tmp_path, monkeypatch, capsys):
    gpu(monkeypatch, tmp_path, "H100")
    show_costs([planned("train", *LARGE)])
    assert re.search(r"Time .* to .*, .* GPU hours: assumed", capsys.readouterr().out)


def test_batches_in_words():
    """16 384 // 96 padded tokens: 256 of 96 are two passes; PPO's minibatches are updates."""
    (text,) = arithmetic([planned(budget__rollouts=256, group_size=8)])
    assert text == (
        "Batch: n = 256 completions a step = 32 prompts x G = 8; 1 update a step, each of 256 "
        "completions in at most about 2 backward passes of 16384 padded tokens, prompts left out."
    )
    several = planned(
        objective__num_iterations=2, objective__minibatch_size=8, launch__num_processes=3
    )
    (text,) = arithmetic([several])
    assert "= 4 prompts x G = 4; up to 2 prompts on each of 3 processes; 4 updates a step" in text
    assert "each of 8 completions in at most about 1 backward pass of" in text
    many = [planned(budget__rollouts=4 * n) for n in range(2, 10)]
    assert arithmetic(many)[-1] == "and 2 other batches" and len(arithmetic(many)) == 7


@pytest.mark.parametrize(
    "seconds, text",
    [((0.2, 0.3), "0.2 to 0.3 s"), ((80, 100), "80 s to 1.7 min"), ((120, 240), "2 to 4 min"),
     ((4000, 400_000), "67 min to 4.6 days"), ((86400 * 200, 86400 * 2000), "200 to 2 000 days")],
)  # fmt: skip
def test_durations_are_said_in_units_that_suit(seconds, text):
    assert said(Span(*seconds)) == text
