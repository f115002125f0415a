"""Real trackers store what metrics.jsonl holds, exactly, also where a run was stopped or killed."""

from __future__ import annotations

import io
import json
import os
import signal
import subprocess
import sys
from types import SimpleNamespace

import numpy as np
import psutil
import pytest
from launching import Command, alive, finished, lines, until
from PIL import Image
from resuming import SHORT, differences
from tracked import Folder, row, timeless, wandb_history, wandb_records
from wandb_server import WandbServer

from grpo_ustat.runs.trackers import Tracking


def logger(name, finish_seconds=60.0):
    return SimpleNamespace(name=name, project="p", finish_seconds=finish_seconds)


def send(path, name, *rows):
    """Track a run whose folder is complete but for these rows, which it makes now."""
    tracking = Tracking(path, logger(name), {"group_size": 4})
    for one in rows:
        tracking.put(one, [{"completion": f"={one['step']}"}])
    tracking.finish("done", grace_seconds=60)


SENDING = """
import sys
from types import SimpleNamespace
from pathlib import Path
from grpo_ustat.runs.trackers import Tracking
logger = SimpleNamespace(name=sys.argv[2], project=sys.argv[3], finish_seconds=60)
Tracking(Path(sys.argv[1]), logger, {}).finish("done", grace_seconds=60)
"""


def whole(path):
    folder = Folder(path)
    folder.rows(1, 2, 3)
    folder.evals(0, 2)
    curve = dict(method="closed_form", setting="all_questions_once", num_prompts=8, baseline="none")
    curves = [curve | {"group_size": size, "mse": 1 / size} for size in (2, 4)]
    folder.finish(steps=3, curves=curves, scaling={"c1": 1 / 3})
    return folder


def stored(path):
    return [json.loads(line) for line in (path / "metrics.jsonl").open()]


# TensorBoard


def events(path):
    """What TensorBoard shows: values by kind and tag, [(step, value)]."""
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
    from tensorboard.util.tensor_util import make_ndarray

    read = EventAccumulator(str(path), size_guidance={"tensors": 0, "images": 0})
    read.Reload()
    found = {"scalars": {}, "text": {}}
    for tag in read.Tags()["tensors"]:
        kind = read.summary_metadata[tag].plugin_data.plugin_name
        values = [(e.step, make_ndarray(e.tensor_proto)) for e in read.Tensors(tag)]
        found[kind][tag.removesuffix("/text_summary")] = values
    images = {tag: read.Images(tag) for tag in read.Tags()["images"]}
    return found | {"images": images}


def said(found, tag):
    return [value.item().decode() for _, value in found["text"][tag]]


def test_tensorboard_holds_every_number_exactly(tmp_path, capsys):
    folder = whole(tmp_path / "run")
    rows = stored(folder.path)
    (folder.path / "metrics.jsonl").write_text(json.dumps(rows[0]) + "\n")
    send(folder.path, "tensorboard", *rows[1:])
    expected = f"logger=tensorboard: tensorboard --logdir {tmp_path}/run/tracker\n"
    assert capsys.readouterr().err == expected
    found = events(tmp_path / "run" / "tracker")
    for key in ("reward", "tokens", "step_time"):
        values = [(step, value.item()) for step, value in found["scalars"][key]]
        assert values == [(r["step"], r[key]) for r in rows]
    assert said(found, "monitor/c1_reason") == ["silent"] * 3
    assert found["scalars"]["eval/sampled/mean_reward"] == [(0, 0.0), (2, 0.25)]
    assert found["scalars"]["mse/closed_form/all_questions_once/none"] == [(2, 0.5), (4, 0.25)]
    assert found["scalars"]["result/scaling/c1"] == [(3, 1 / 3)]
    (image,) = found["images"]["figure"]
    pixels = [np.asarray(Image.open(file).convert("RGB")) for file in (
        io.BytesIO(image.encoded_image_string), tmp_path / "run" / "figure.png")]  # fmt: skip
    assert np.array_equal(*pixels) and image.step == 3
    assert [step for step, _ in found["text"]["completions"]] == [2, 3]
    assert '"group_size": 4' in said(found, "config")[0]
    assert set(found["scalars"]) & set(rows[0]) == {"reward", "tokens", "step", "step_time"}


def test_tensorboard_holds_claims_notes_and_verdict_of_a_theorem(tmp_path):
    folder = Folder(tmp_path / "run")
    claims = [
        {"what": "share", "predicted": x, "measured": 0.75, "low": None, "high": None,
         "verdict": "not decided", "how": "exact"} for x in ("<= 1", 0.8)
    ]  # fmt: skip
    problem, cost = {"mu": 0.5, "order": "1/G"}, {"rollouts": 0, "seconds": 1.5}
    notes = ["all is enumerated", "but for one"]
    told = {"theorem": "lemma11", "answer": "It holds.", "verdict": "not decided", "empty": []}
    folder.finish(claims=claims, notes=notes, problem=problem, cost=cost, **told)
    send(folder.path, "tensorboard")
    found = events(tmp_path / "run" / "tracker")
    assert said(found, "result/verdict") == ["not decided"]
    assert said(found, "result/problem/order") == ["1/G"]
    assert said(found, "result/notes") == ["all is enumerated\nbut for one"]
    (text,) = said(found, "claims")
    assert '"predicted": "<= 1"' in text and '"measured": 0.75' in text
    assert found["scalars"]["result/problem/mu"] == [(0, 0.5)] and set(found["images"]) == {
        "figure"
    }


def test_tensorboard_holds_each_step_of_a_run_that_goes_on_once(tmp_path):
    """Killed after step 4, of which 3 and 4 were not sent; it goes on from a checkpoint of 2."""
    folder = Folder(tmp_path / "run")
    rows = [row(step) for step in range(1, 7)]
    tracking = Tracking(folder.path, logger("tensorboard"), {})
    for one in rows[:2]:
        tracking.put(one, [])
    tracking.finish("interrupted", grace_seconds=60)
    folder.evals(0)
    folder.rows(1, 2, 3, 4)
    tracking = Tracking(folder.path, logger("tensorboard"), {})
    folder.evals(0, 4)
    for one in rows[2:]:
        tracking.put(one, [])
    tracking.finish("stopped", grace_seconds=60)
    found = events(tmp_path / "run" / "tracker")["scalars"]
    assert found["reward"] == [(step, step / 7) for step in range(1, 7)]
    assert found["eval/sampled/mean_reward"] == [(0, 0.0), (4, 0.5)]


def test_trackio_holds_every_number_exactly(tmp_path, monkeypatch):
    pytest.importorskip("trackio")
    monkeypatch.setenv("TRACKIO_DIR", str(tmp_path / "trackio"))
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join(filter(None, sys.path)))
    folder = whole(tmp_path / "run")
    for steps in ((), (4,)):
        folder.rows(*steps)
        command = [sys.executable, "-c", SENDING, str(folder.path), "trackio", "grpo_ustat"]
        done = subprocess.run(command, capture_output=True, text=True, timeout=90)
        assert done.returncode == 0, done.stderr
    script = (
        "import json; from trackio.sqlite_storage import SQLiteStorage as S; p = 'grpo_ustat'; "
        "print(json.dumps([S.get_logs(p, name) for name in S.get_runs(p)], default=str))"
    )
    told = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True)
    (found,) = json.loads(told.stdout.splitlines()[-1])
    sent = [r for r in found if "reward" in r]
    rows = [timeless(r) for r in stored(folder.path)]
    assert rows == [{key: r[key] for key in rows[0]} for r in sent]
    assert any("figure" in r for r in found)


# wandb itself, in processes of their own


def tracked(path, folder, *arguments):
    given = (*SHORT, f"hydra.run.dir={path / folder}", *arguments)
    return Command("train", *given, cwd=path)


@pytest.mark.nightly(minutes=1)
def test_a_run_that_is_stopped_and_killed_is_one_run_off_line(tmp_path, monkeypatch):
    """No row is missing, only the last one before the kill may come again, under the same number,
    and the results are those without a tracker.
    """
    monkeypatch.setenv("WANDB_MODE", "offline")
    asked = ("max_steps=60", "logger=wandb", "logger.finish_seconds=60")
    run = tmp_path / "with"
    with tracked(tmp_path, "with", *asked) as first:
        until(lambda: lines(run / "metrics.jsonl") >= 2)
        os.kill(first.pid, signal.SIGTERM)
        assert first.end(300)[0] == 75
    with tracked(tmp_path, "with", *asked) as second:
        until(lambda: len([*run.glob("tracker/wandb/offline-run-*")]) == 2)
        until(lambda: lines(run / "metrics.jsonl") >= 6)
        os.kill(second.pid, signal.SIGKILL)
        left = [process for process in second.family() if alive(process)]
        second.end()
        until(lambda: not any(map(alive, left)), 300)  # wandb's own process ends by itself
    with tracked(tmp_path, "with", *asked) as third:
        code, text = third.end(300)
    assert code == 0 and "warning: logger" not in text, text
    with tracked(tmp_path, "without", "max_steps=60") as alone:
        assert alone.end(300)[0] == 0
    others = [n for n in differences(run, tmp_path / "without") if "tracker" not in n]
    # a stop saves before it evaluates, so the checkpoint of its step is another one
    ends = [n for n in others if not n.startswith("checkpoint-") or n.startswith("checkpoint-60/")]
    assert [n for n in ends if n != ".hydra/config.yaml"] == []
    history = wandb_history(run)
    by_number = {r["_step"]: r for r in history}
    assert list(by_number) == sorted(by_number) and len(history) - len(by_number) <= 1
    rows = [r for r in by_number.values() if "reward" in r]
    assert [r["step"] for r in rows] == list(range(1, 61))
    for kept, sent in zip(stored(run), rows, strict=True):
        known = {k: v for k, v in timeless(kept).items() if "seconds" not in k}
        assert len(known) > 15 and known.items() <= sent.items()
    records = [r for r in wandb_records(run) if r.WhichOneof("record_type") == "run"]
    assert len({r.run.run_id for r in records}) == 1 and len(records) >= 2
    assert {i.key for i in records[0].run.config.update} >= {"group_size", "model", "logger"}


@pytest.mark.slow(minutes=1)
def test_a_sweep_off_line_is_a_run_for_each_seed(tmp_path, monkeypatch):
    """One process, one after the other; each ends with the command that sends it."""
    monkeypatch.setenv("WANDB_MODE", "offline")
    given = (*SHORT, f"output_root={tmp_path}/out", "logger=wandb", "logger.finish_seconds=60")
    code, text = finished("train", "-m", "seed=0,1", *given, cwd=tmp_path, seconds=120)
    assert code == 0 and "warning: logger" not in text, text
    folders = sorted(path.parent for path in tmp_path.glob("out/train/*/*/result.json"))
    assert len(folders) == 2
    for folder in folders:
        rows = [r for r in wandb_history(folder) if "reward" in r]
        assert [r["reward"] for r in rows] == [r["reward"] for r in stored(folder)]
        kinds = [record.WhichOneof("record_type") for record in wandb_records(folder)]
        assert kinds.count("run") == 1 and "exit" in kinds and "summary" in kinds
    ids = {r.run.run_id for r in wandb_records(tmp_path) if r.WhichOneof("record_type") == "run"}
    assert len(ids) == 2
    for folder in folders:
        assert f"wandb sync {folder}/tracker/wandb/offline-run-*" in text
    assert not [p for p in psutil.process_iter() if str(tmp_path) in " ".join(_words(p))]


def _words(process):
    try:
        return process.cmdline()
    except psutil.Error:
        return []


@pytest.mark.slow
@pytest.mark.parametrize("logger", ["wandb", "tensorboard"])
def test_a_run_of_a_theorem_is_tracked(tmp_path, monkeypatch, every_format, logger):
    """Figure, claims and result, stored when the command ends."""
    monkeypatch.setenv("WANDB_MODE", "offline")
    asked = ("theorem=lemma11", f"logger={logger}", "logger.finish_seconds=60")
    code, text = finished("gap", *asked, f"hydra.run.dir={tmp_path / 'run'}", cwd=tmp_path)
    assert code == 0 and "warning" not in text, text
    if logger == "tensorboard":
        found = events(tmp_path / "run" / "tracker")
        assert {"claims", "result/verdict"} <= set(found["text"])
        return
    rows = wandb_history(tmp_path / "run")
    assert ["figure/sha256" in row for row in rows] == [True, False]
    assert rows[1]["claims/nrows"] == 6 and rows[1]["claims/ncols"] == 12


@pytest.fixture
def server(monkeypatch):
    found = WandbServer()
    for name, value in found.environment.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join(filter(None, sys.path)))
    yield found
    found.close()


TRACKED = """
import sys
from types import SimpleNamespace
from pathlib import Path
from grpo_ustat.runs.trackers import Tracking
# The second is given the time that a busy machine needs.
for folder, seconds in zip(sys.argv[1:], (6, 60)):
    logger = SimpleNamespace(name="wandb", project="p", finish_seconds=seconds)
    Tracking(Path(folder), logger, {}).finish("done", grace_seconds=60)
    print("ended", flush=True)
    input()
sys.exit(7)
"""


@pytest.mark.parametrize(
    "fault",
    [
        pytest.param("hang", marks=pytest.mark.slow(minutes=0.5)),
        pytest.param(401, marks=pytest.mark.nightly(minutes=0.5)),
    ],
)
def test_a_server_that_refuses_or_hangs_holds_up_nothing_and_all_arrives_later(
    tmp_path, server, fault
):
    """One warning, the exit status of the run, the next run of a sweep is sent, and each row of the
    first one once when the server is well again.
    """
    folder, second = whole(tmp_path / "run"), Folder(tmp_path / "second")
    second.rows(1)
    server.fault = fault
    command = [sys.executable, "-c", TRACKED, str(folder.path), str(second.path)]
    pipes = dict.fromkeys(("stdin", "stdout", "stderr"), subprocess.PIPE)
    with subprocess.Popen(command, text=True, **pipes) as process:
        assert process.stdout.readline() == "ended\n" and not any(server.history.values())
        server.fault = None
        _, errors = process.communicate("\n\n", timeout=120)
    assert process.returncode == 7 and "Traceback" not in errors and errors.count("warning") == 1
    assert [r["reward"] for r in max(server.history.values(), key=len)] == [1 / 7]
    server.fault = None
    for _ in range(2):
        command = [sys.executable, "-c", SENDING, str(folder.path), "wandb", "p"]
        done = subprocess.run(command, capture_output=True, text=True, timeout=90)
        assert done.returncode == 0, done.stderr
    rows = max(server.history.values(), key=len)
    expected = [timeless(row(step)) | {"_step": 0} for step in (1, 2, 3)]
    assert [timeless(r) | {"_step": 0} for r in rows if "reward" in r] == expected
