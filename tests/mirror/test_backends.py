"""Real trackers store what metrics.jsonl holds, exactly, and nothing about them changes a run."""

from __future__ import annotations

import importlib.util
import json
import os
import signal
import subprocess
import sys
import time
from types import SimpleNamespace

import psutil
import pytest
from launching import Command, finished, lines, until
from mirrored import PNG, STUBS, Folder, row, timeless, wandb_history, wandb_records
from resuming import SHORT, differences
from wandb_server import WandbServer

from grpo_ustat.config.identity import identity
from grpo_ustat.config.run import LoggerConfig
from grpo_ustat.config.schema import ConfigError
from grpo_ustat.mirror import follow
from grpo_ustat.mirror.follow import End, Mirroring, MirrorJob

ROWS = (1, 2, 3)


def send(path, name, outcome="done"):
    job = MirrorJob(str(path), {"name": name, "project": "p"}, outcome=outcome)
    return follow.follow(job, End(job), lambda text: None)


def whole(path):
    folder = Folder(path, group_size=4)
    folder.rows(*ROWS)
    folder.evals(0, 2)
    folder.completions(1, 2)
    curve = dict(method="closed_form", setting="all_questions_once", num_prompts=8, baseline="none")
    curves = [curve | {"group_size": size, "mse": 1 / size} for size in (2, 4)]
    folder.finish(steps=3, curves=curves, scaling={"c1": 1 / 3})
    return folder


# TensorBoard


def events(path):
    """What TensorBoard shows: values by tag, [(step, value)], and texts likewise."""
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
    from tensorboard.util.tensor_util import make_ndarray

    read = EventAccumulator(str(path), size_guidance={"tensors": 0})
    read.Reload()
    kinds = {
        tag: read.summary_metadata[tag].plugin_data.plugin_name for tag in read.Tags()["tensors"]
    }
    return {
        kind: {
            tag: [(e.step, make_ndarray(e.tensor_proto)) for e in read.Tensors(tag)]
            for tag in kinds
            if kinds[tag] == kind
        }
        for kind in ("scalars", "text", "images")
    }


def test_tensorboard_holds_every_number_exactly(tmp_path):
    send(whole(tmp_path / "run").path, "tensorboard")
    found = events(tmp_path / "run" / "tracker")
    stored = [json.loads(line) for line in (tmp_path / "run" / "metrics.jsonl").open()]
    for key in ("reward", "tokens", "step_time"):
        values = [(step, value.item()) for step, value in found["scalars"][key]]
        assert values == [(r["step"], r[key]) for r in stored]
    assert [v.item() for _, v in found["text"]["monitor/c1_reason"]] == [b"silent"] * 3
    assert found["scalars"]["eval/sampled/mean_reward"] == [(0, 0.0), (2, 0.25)]
    assert found["scalars"]["mse/closed_form/all_questions_once/8/none"] == [(2, 0.5), (4, 0.25)]
    assert found["scalars"]["result/scaling/c1"] == [(3, 1 / 3)]
    assert found["images"]["figure"][0][1].tolist() == [b"1", b"1", PNG]
    assert [step for step, _ in found["text"]["completions"]] == [1, 2]
    assert set(found["scalars"]) & set(stored[0]) == {"reward", "tokens", "step", "step_time"}


def test_tensorboard_holds_claims_notes_and_verdict_of_a_theorem(tmp_path):
    """Nothing is refused of a result whose claims are nested and whose notes are lines."""
    folder = proved(tmp_path / "run")
    assert send(folder.path, "tensorboard") == (3, 0)
    found = events(tmp_path / "run" / "tracker")
    said = {tag: values[0][1].item().decode() for tag, values in found["text"].items()}
    assert said["result/verdict"] == "not decided" and said["result/bed/order"] == "1/G"
    assert said["result/notes"] == "all is enumerated\nbut for one"
    assert '"predicted": "<= 1"' in said["claims"] and '"measured": 0.75' in said["claims"]
    assert found["scalars"]["result/bed/mu"] == [(0, 0.5)]
    assert set(found["images"]) == {"figure"}


def proved(path):
    """A study of a theorem, see `theorems.finding`."""
    folder = Folder(path, study={"kind": "lemma11"}, bed={"name": "coins"})
    claims = [
        {"what": "share", "predicted": x, "measured": 0.75, "low": None, "high": None,
         "verdict": "not decided", "how": "exact"} for x in ("<= 1", 0.8)
    ]  # fmt: skip
    bed, cost = {"mu": 0.5, "order": "1/G"}, {"rollouts": 0, "seconds": 1.5}
    notes = ["all is enumerated", "but for one"]
    told = {"study": "lemma11", "answer": "It holds.", "verdict": "not decided", "empty": []}
    folder.finish(claims=claims, notes=notes, bed=bed, cost=cost, **told)
    return folder


def test_tensorboard_holds_what_a_rewound_run_made_anew(tmp_path):
    folder = Folder(tmp_path / "run")
    folder.rows(1, 2, 3)
    send(folder.path, "tensorboard", "stopped")
    folder.rewind(1)
    folder.rows(2, 3)
    folder.rows(4, shift=1.0)
    send(folder.path, "tensorboard")
    found = events(tmp_path / "run" / "tracker")["scalars"]["reward"]
    assert found == [(1, 1 / 7), (2, 2 / 7), (3, 3 / 7), (4, 4 / 7 + 1)]


# Configuration


def asked(**given):
    return LoggerConfig(**({"name": "wandb", "project": "p", "finish_seconds": 1} | given))


@pytest.mark.parametrize(
    "given, message",
    [
        ({"name": "tensorbord"}, "unknown logger.name 'tensorbord': did you mean tensorboard"),
        ({"finish_seconds": -1}, "logger.finish_seconds=-1 must be 0 or more"),
        ({"project": ""}, "logger=wandb needs logger.project=NAME"),
    ],
)
def test_a_wrong_logger_is_refused(given, message):
    with pytest.raises(ConfigError, match=message):
        asked(**given).check()


def test_a_package_that_is_missing_is_refused_before_any_work(monkeypatch, tmp_path):
    """Also where a tracker left a folder of its name, which Python takes for a package."""
    (tmp_path / "trackio").mkdir()
    monkeypatch.setattr(sys, "path", [str(tmp_path)])
    sys.modules.pop("trackio", None)
    importlib.invalidate_caches()
    with pytest.raises(ConfigError, match=r"needs the package trackio: pip install -e '.\["):
        asked(name="trackio").check()
    asked(name="trackio").check(needed=False)


def test_a_logger_is_no_part_of_what_a_run_is(monkeypatch):
    from commands import compose

    monkeypatch.setenv("WANDB_PROJECT", "mine")
    with_wandb = compose("train", "logger=wandb")
    assert with_wandb.logger.project == "mine"
    assert identity(with_wandb) == identity(compose("train"))


def test_a_key_in_a_configuration_is_refused_unseen():
    from commands import compose

    key = "hf_" + "a1" * 15
    with pytest.raises(ConfigError, match="prompt.template looks like a key") as caught:
        compose("train", f"prompt.template='{{question}} {key}'")
    assert key not in str(caught.value)


# wandb off line and on line: real packages in processes of their own


def tracked(path, folder, *arguments, **options):
    given = (*SHORT, f"hydra.run.dir={path / folder}", *arguments)
    return Command("train", *given, cwd=path, **options)


def stored(path):
    return [json.loads(line) for line in (path / "metrics.jsonl").open()]


@pytest.mark.slow
def test_a_run_that_is_stopped_and_killed_is_one_run_off_line(tmp_path, monkeypatch):
    """No row twice, none missing, and the same results as without a tracker."""
    monkeypatch.setenv("WANDB_MODE", "offline")
    asked = ("max_steps=8", "logger=wandb", "logger.finish_seconds=60")
    run = tmp_path / "with"
    with tracked(tmp_path, "with", *asked) as first:
        until(lambda: lines(run / "metrics.jsonl") >= 2)
        os.kill(first.pid, signal.SIGTERM)
        assert first.end()[0] == 75
    with tracked(tmp_path, "with", *asked) as second:
        until(lambda: lines(run / "metrics.jsonl") >= 6)
        os.kill(second.pid, signal.SIGKILL)
        second.end()
    with tracked(tmp_path, "with", *asked) as third:
        code, said = third.end(120)
    assert code == 0, said
    with tracked(tmp_path, "without", "max_steps=8") as alone:
        assert alone.end()[0] == 0
    others = [n for n in differences(run, tmp_path / "without") if "tracker" not in n]
    # a stop saves before it evaluates, so the checkpoint of its step is another one
    ends = [n for n in others if not n.startswith("checkpoint-") or n.startswith("checkpoint-8/")]
    assert [n for n in ends if n != ".hydra/config.yaml"] == []
    rows = [r for r in wandb_history(run) if "reward" in r]
    assert [r["step"] for r in rows] == list(range(1, 9))
    for kept, sent in zip(stored(run), rows, strict=True):
        known = {k: v for k, v in timeless(kept).items() if "seconds" not in k}
        assert len(known) > 15 and known.items() <= sent.items()
    records = [r for r in wandb_records(run) if r.WhichOneof("record_type") == "run"]
    assert len({r.run.run_id for r in records}) == 1 and len(records) >= 3
    assert {i.key for i in records[0].run.config.update} >= {"group_size", "model", "logger"}


@pytest.mark.slow
@pytest.mark.parametrize("logger", ["wandb", "tensorboard"])
def test_a_study_of_a_theorem_is_mirrored(tmp_path, monkeypatch, logger):
    """Figure, claims and result, none of them refused, and stored when the command ends."""
    monkeypatch.setenv("WANDB_MODE", "offline")
    asked = ("study=lemma11", f"logger={logger}", "logger.finish_seconds=60")
    code, said = finished("gap", *asked, f"hydra.run.dir={tmp_path / 'run'}", cwd=tmp_path)
    assert code == 0 and "warning" not in said, said
    if logger == "tensorboard":
        found = events(tmp_path / "run" / "tracker")
        assert {"claims", "result/notes", "result/verdict"} <= set(found["text"])
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


@pytest.mark.slow
@pytest.mark.parametrize("fault", [401, "hang"])
def test_what_a_server_refused_arrives_later(tmp_path, server, fault, capfd):
    """Each row once, also where a mirror was killed after it had sent some."""
    folder = whole(tmp_path / "run")
    server.fault = fault
    logger = SimpleNamespace(name="wandb", project="p", finish_seconds=4)
    start = time.monotonic()
    Mirroring(folder.path, logger).finish("done", grace_seconds=60)
    assert time.monotonic() - start < 12 and not any(server.history.values())
    assert "was not told 10 of 10" in capfd.readouterr().err
    server.fault = None
    for _ in range(2):
        command = [sys.executable, "-m", "grpo_ustat.mirror", str(folder.path), "logger=wandb"]
        done = subprocess.run(command, capture_output=True, text=True, timeout=90)
        assert done.returncode == 0, done.stderr
    (rows,) = server.history.values()
    expected = [timeless(row(step)) for step in ROWS]
    assert [timeless(r) | {"_step": 0} for r in rows if "reward" in r] == [
        r | {"_step": 0} for r in expected
    ]
    assert sum("completions" in r for r in rows) == 1


# Every fault: the run is the run


@pytest.mark.slow
@pytest.mark.parametrize("fault", ["raises in import", "exits in init", "fills memory in log"])
def test_a_tracker_that_fails_changes_nothing(tmp_path, fault, monkeypatch):
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join([str(STUBS), *filter(None, sys.path)]))
    monkeypatch.setenv("SEEN", str(tmp_path / "seen"))
    monkeypatch.setenv("FAULT", fault)
    asked = ("logger=wandb", "logger.finish_seconds=8")
    for name, arguments in (("with", asked), ("without", ())):
        given = (*SHORT, f"hydra.run.dir={tmp_path / name}", *arguments)
        code, said = finished("train", *given, cwd=tmp_path)
        assert code == 0, said
    found = differences(tmp_path / "with", tmp_path / "without")
    assert [n for n in found if "tracker" not in n and n != ".hydra/config.yaml"] == []
    assert "warning: logger=wandb: was not told" in said
    assert not [p for p in psutil.process_iter() if str(tmp_path) in " ".join(_words(p))]


def _words(process):
    try:
        return process.cmdline()
    except psutil.Error:
        return []


@pytest.mark.slow
def test_trackio_holds_every_number_exactly(tmp_path, monkeypatch):
    pytest.importorskip("trackio")
    monkeypatch.setenv("TRACKIO_DIR", str(tmp_path / "trackio"))
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join(filter(None, sys.path)))
    folder = whole(tmp_path / "run")
    command = [sys.executable, "-m", "grpo_ustat.mirror", str(folder.path), "logger=trackio"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=90)
    assert done.returncode == 0, done.stderr
    from trackio.sqlite_storage import SQLiteStorage

    (name,) = SQLiteStorage.get_runs("grpo_ustat")
    found = SQLiteStorage.get_logs("grpo_ustat", name)
    sent = [r for r in found if "reward" in r]
    assert [timeless(r) for r in stored(folder.path)] == [
        {k: r[k] for k in timeless(stored(folder.path)[0])} for r in sent
    ]
