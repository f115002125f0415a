"""A tracker receives a run's numbers, and whatever it does, the run is the run without it."""

from __future__ import annotations

import json
import os
import struct

import pytest
from launching import finished
from resuming import SHORT, config_of, differences, fit

from grpo_ustat.launch.command import load_command
from grpo_ustat.launch.run import run_here
from grpo_ustat.runs.folder import RunFolder
from grpo_ustat.runs.trackers import Tracking

ROWS = [{"step": step, "reward": step / 7, "note": "text", "kl": None} for step in (1, 2)]


class Kept:
    """A tracker in place of accelerate's, which keeps what it is given."""

    requires_logging_directory = True
    fault, error = None, RuntimeError("\x1b[31mno\nentry")

    def __init__(self, name, logging_dir):
        self.rows, self.tables, self.closed = [], [], False
        Kept.last = self

    def _act(self, place):
        if place == self.fault:
            raise self.error

    def start(self):
        self._act("open")

    def store_init_configuration(self, values):
        self.config = values

    def log(self, values, step=None):
        self._act("send")
        self.rows.append((step, values))

    def log_table(self, name, columns, data, step):
        self.tables.append((step, name, columns, data))

    def finish(self):
        self._act("close")
        self.closed = True


@pytest.fixture
def kept(monkeypatch):
    from accelerate import tracking

    monkeypatch.setitem(tracking.LOGGER_TYPE_TO_CLASS, "tensorboard", Kept)
    monkeypatch.setattr(Kept, "fault", None)
    return Kept


def send(path, config=None, name="tensorboard"):
    path.mkdir(exist_ok=True)
    tracking = Tracking(path, name, None, config or {"sizes": [2, 4], "pool": None, "seed": 0})
    for row in ROWS:
        tracking.put(row, [{"completion": f"={row['step']}"}])
    tracking.finish("done", {"steps": 2, "scaling": {"gstar": 4.0}, "summary": "text"})


def test_numbers_completions_and_results_arrive(tmp_path, kept, monkeypatch):
    monkeypatch.setenv("MY_TOKEN", "correct-horse-battery")
    send(tmp_path / "run", {"sizes": [2, 4], "note": "correct-horse-battery", "api_key": "k"})
    result = {"result/steps": 2, "result/scaling/gstar": 4.0, "step": 2}
    rows = [(step, {"step": step, "reward": step / 7}) for step in (1, 2)]
    assert kept.last.rows == [*rows, (2, result)] and kept.last.closed
    assert kept.last.tables[1] == (2, "completions", ["completion"], [["=2"]])
    assert kept.last.config == {
        "sizes": "[2, 4]", "note": "(redacted)", "api_key": "(redacted)",
    }  # fmt: skip


@pytest.mark.parametrize("error", [RuntimeError("\x1b[31mno\nentry"), SystemExit(3), MemoryError()])
@pytest.mark.parametrize("place", ["open", "send", "close"])
def test_the_first_error_is_one_warning_and_the_tracker_is_off(
    tmp_path, kept, monkeypatch, capsys, place, error
):
    monkeypatch.setattr(kept, "fault", place)
    monkeypatch.setattr(kept, "error", error)
    send(tmp_path / "run")
    text = capsys.readouterr().err
    assert text.startswith(f"warning: logger=tensorboard: {type(error).__name__}")
    assert text.count("\n") == 1 and "\x1b[31m" not in text
    assert len(kept.last.rows) == (3 if place == "close" else 0)


@pytest.fixture(scope="module")
def alone(tmp_path_factory):
    """The run without a tracker."""
    return fit(tmp_path_factory.mktemp("alone") / "run")


@pytest.mark.slow
@pytest.mark.parametrize("fault", [None, "send"])
def test_a_tracker_changes_nothing_and_ends_nothing(tmp_path, kept, monkeypatch, alone, fault):
    """Metrics, evaluations, results and weights are the same, bit by bit."""
    monkeypatch.setattr(kept, "fault", fault)
    config = config_of("logger=tensorboard")
    run_here(load_command("train"), config, RunFolder(tmp_path / "run", config))
    names = differences(tmp_path / "run", alone)
    assert {name for name in names if not name.startswith("tracker")} <= {".hydra/config.yaml"}
    if fault is None:
        rows = [json.loads(line) for line in (tmp_path / "run/metrics.jsonl").open()]
        sent = {step: row for step, row in kept.last.rows if "reward" in row}
        assert [sent[row["step"]]["reward"] for row in rows] == [row["reward"] for row in rows]
        assert {"eval/sampled/mean_reward", "result/failed_saves"} <= {
            name for _, row in kept.last.rows for name in row
        }


def test_tensorboard_has_the_numbers_and_the_settings(tmp_path):
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    send(tmp_path / "run")
    read = EventAccumulator(str(tmp_path / "run/tracker"))
    read.Reload()
    values = [(event.step, event.value) for event in read.Scalars("reward")]
    assert values == [(step, pytest.approx(step / 7)) for step in (1, 2)]
    assert read.Scalars("result/scaling/gstar")[0].value == 4
    (settings,) = (tmp_path / "run/tracker").glob("*/hparams.yml")
    assert "seed: 0" in settings.read_text()


@pytest.mark.slow(minutes=0.5)
def test_wandb_off_line_is_one_run_in_its_project_and_goes_on(tmp_path, monkeypatch):
    monkeypatch.setenv("WANDB_MODE", "offline")
    asked = (*SHORT, "logger=wandb", "project=mine", "schedule=constant", "schedule.warmup_steps=0")
    for steps in (2, 4):
        folder = f"hydra.run.dir={tmp_path / 'run'}"
        code, text = finished("train", *asked, f"max_steps={steps}", folder, cwd=tmp_path)
        assert code == 0 and "warning: logger" not in text, text
    records = wandb_records(tmp_path / "run")
    (run_id,) = {(record.run.run_id, record.run.project) for record in records["run"]}
    assert run_id[1] == "mine"
    assert "group_size" in {item.key for item in records["run"][0].run.config.update} | {
        item.key for record in records["config"] for item in record.config.update
    }
    rows = [
        {"/".join(item.nested_key) or item.key: item.value_json for item in record.history.item}
        for record in records["history"]
    ]
    stored = [json.loads(line) for line in (tmp_path / "run/metrics.jsonl").open()]
    sent = {int(row["step"]): json.loads(row["reward"]) for row in rows if "reward" in row}
    assert sent == {row["step"]: row["reward"] for row in stored}


def wandb_records(folder):
    """Records of all sessions of a run off line, by kind."""
    from wandb.proto import wandb_internal_pb2

    records = {}
    for file in sorted(folder.glob("**/offline-run-*/run-*.wandb"), key=os.path.getmtime):
        for data in leveldb(file.read_bytes()):
            record = wandb_internal_pb2.Record()
            record.ParseFromString(data)
            records.setdefault(record.WhichOneof("record_type"), []).append(record)
    return records


def leveldb(data, block=32768):
    """Yield the entries of a file of wandb: a header of 7 bytes, then a log of LevelDB."""
    at, part = 7, b""
    while at + 7 <= len(data):
        if block - at % block < 7:
            at += block - at % block
            continue
        _, size, kind = struct.unpack("<IHB", data[at : at + 7])
        part += data[at + 7 : at + 7 + size]
        at += 7 + size
        if kind in (1, 4):
            yield part
            part = b""
