"""A tracker is given every step once, and whatever it does, the run is the run without it."""

from __future__ import annotations

import json
import os
import threading
import time
from pathlib import Path
from types import SimpleNamespace

import hostile
import pytest
from resuming import config_of, differences
from slow_cases import slow_after
from tracked import Folder, row

from grpo_ustat.launch.command import load_command
from grpo_ustat.launch.run import run_here
from grpo_ustat.runs import trackers
from grpo_ustat.runs.folder import RunFolder
from grpo_ustat.runs.trackers import Tracking
from grpo_ustat.terminal.streams import visible


class Kept:
    """A tracker that keeps what it is given; `act` is called with the place it is at."""

    act = staticmethod(lambda place: None)

    def __init__(self, about, opened):
        self.about, self.given, self.closed = about, [], None
        opened.append(self)
        self.act("open")

    def _keep(self, index, name, content, step):
        self.act("send")
        self.given.append((index, f"{name} {step}", content))

    def log(self, index, values, step):
        kind = "row" if "reward" in values else "eval"
        self._keep(index, kind, values, step)

    def summary(self, index, values, step):
        self._keep(index, "result", values, step)

    def table(self, index, name, rows, step):
        self._keep(index, name, rows, step)

    def figure(self, index, name, file, step):
        self._keep(index, name, file, step)

    def finish(self, outcome):
        self.act("close")
        self.closed = outcome
        return "here"

    @property
    def keys(self):
        return [key for _, key, _ in self.given]


@pytest.fixture
def opened(monkeypatch):
    """The trackers that were opened under the name of TensorBoard, last one last."""
    found = []
    monkeypatch.setitem(trackers.TRACKERS, "tensorboard", lambda about: Kept(about, found))
    return found


def logger(finish_seconds=20.0):
    return SimpleNamespace(name="tensorboard", project="p", finish_seconds=finish_seconds)


def track(path, *steps, outcome="done", finish_seconds=20.0):
    """Track a run that makes rows of these steps."""
    tracking = Tracking(path, logger(finish_seconds), {})
    for step in steps:
        tracking.put(row(step), [])
    tracking.finish(outcome, grace_seconds=60)


def test_all_that_a_run_makes_in_order_once(tmp_path, opened, capsys):
    folder = Folder(tmp_path / "run")
    folder.evals(0)
    tracking = Tracking(folder.path, logger(), {})
    tracking.put(row(1), [{"completion": "=1"}])
    tracking.put(row(2), [])
    folder.evals(0, 2)
    folder.finish(steps=2, curves=[{"mse": 1.0}], evals=[{"step": 0}], notes=["a", "b"], digest="d")
    tracking.finish("done", grace_seconds=60)
    keys = ["eval 0", "row 1", "completions 1", "row 2", "eval 2"]
    assert opened[0].keys == [*keys, "figure 2", "curves 2", "result 2"]
    assert [index for index, _, _ in opened[0].given] == list(range(8))
    assert opened[0].given[-1][2] == {"result/steps": 2, "result/notes": "a\nb"}
    assert opened[0].closed == "done"
    assert capsys.readouterr().err == "logger=tensorboard: here\n"


def test_completions_of_a_study_are_sent_with_its_result(tmp_path, opened):
    folder = Folder(tmp_path / "run")
    folder.completions(None)
    folder.finish(c1=1.0)
    track(folder.path)
    assert opened[0].keys == ["completions None", "figure None", "result None"]


def test_a_resumed_run_sends_no_step_twice_and_misses_none(tmp_path, opened):
    """Rows that a killed run wrote and never sent come first; those it makes again do not count."""
    folder = Folder(tmp_path / "run")
    folder.rows(1, 2, 3, 4)
    folder.evals(0, 4)
    track(folder.path, outcome="stopped")
    folder.rows(5)
    folder.evals(0, 4, 5)
    track(folder.path, 3, 4, 5, 6, outcome="stopped")
    assert opened[0].keys == ["eval 0", "eval 4", "row 1", "row 2", "row 3", "row 4"]
    assert opened[1].keys == ["eval 5", "row 5", "row 6"]
    assert [index for index, _, _ in opened[1].given] == [6, 7, 8]
    assert opened[1].about.run_id == opened[0].about.run_id


@pytest.mark.parametrize("text", ["", "[]", '{"run_id": 3}', '{"count": 1'])
def test_a_damaged_state_is_named(tmp_path, opened, capsys, text):
    folder = Folder(tmp_path / "run")
    (folder.path / "tracker").mkdir()
    (folder.path / "tracker" / "tensorboard.json").write_text(text)
    track(folder.path, 1)
    line = capsys.readouterr().err
    assert "tensorboard.json" in line and line.count("\n") == 1


def test_a_configuration_is_shown_without_secrets(tmp_path, opened, monkeypatch):
    monkeypatch.setenv("MY_TOKEN", "correct-horse-battery")
    options = {"url": "https://me:pass@host/x", "note": "correct-horse-battery", "api_key": "k"}
    config = {"dataset": {"options": options}, "model": {"revision": "8f" * 20}}
    Tracking(Folder(tmp_path / "run").path, logger(), config)
    told = opened[0].about.config
    assert set(told["dataset"]["options"].values()) == {"(redacted)"}
    assert told["model"]["revision"] == "8f" * 20


@pytest.mark.parametrize("key", hostile.NAMES)
def test_what_is_sent_are_texts(tmp_path, opened, key):
    """Settings, columns, curves and completions: no escapes, no half letters."""
    name = hostile.NAMES[key]
    folder = Folder(tmp_path / "run")
    tracking = Tracking(folder.path, logger(), {"model": {"name": name}})
    line = {"step": 1, "reward": 0.5, name: 1.0, "monitor/c1_reason": name}
    tracking.put(line, [{"completion": name}])
    curve = {"method": "closed_form", "baseline": name, "mse": 0.5}
    folder.finish(summary=name, curves=[curve], **({name: name} if name else {}))
    tracking.finish("done", grace_seconds=60)
    config, given = opened[0].about.config, [content for _, _, content in opened[0].given]
    texts = texts_in([config, *given])
    assert len(given) == 5 and not set("".join(texts)) & set(hostile.TERMINAL_ACTS)
    assert "".join(texts).encode() and config["model"]["name"] == visible(name)


def texts_in(content):
    """Every text of something nested, keys too."""
    if isinstance(content, str):
        return [content]
    if isinstance(content, dict):
        content = [*content, *content.values()]
    return [text for x in content for text in texts_in(x)] if isinstance(content, list) else []


@pytest.mark.parametrize("key", hostile.NAMES)
def test_names_of_a_run_are_texts(tmp_path, monkeypatch, opened, key):
    folder, name = Folder(tmp_path / "run"), hostile.NAMES[key]
    monkeypatch.setattr(trackers.Path, "absolute", lambda path: Path(f"/x/{name}/{name}"))
    Tracking(folder.path, logger(), {})
    about = opened[0].about
    assert not set(about.name + about.group) & set(hostile.TERMINAL_ACTS)
    assert (about.name + about.group).encode() and max(len(about.name), len(about.group)) <= 120


# Every fault: one line, and the run is the run


def raising(at):
    def act(place):
        if place == at:
            raise RuntimeError(f"\x1b[31mno {place}\nhere")

    return staticmethod(act)


def hanging(at):
    def act(place):
        if place == at:
            threading.Event().wait()

    return staticmethod(act)


@pytest.mark.parametrize("error", [RuntimeError("\x1b[31mno\nentry"), SystemExit(3), MemoryError()])
@pytest.mark.parametrize("place", ["open", "send", "close"])
def test_the_first_error_is_one_warning_and_the_tracker_is_off(
    tmp_path, opened, monkeypatch, capsys, place, error
):
    def act(at):
        if at == place:
            raise error

    monkeypatch.setattr(Kept, "act", staticmethod(act))
    track(Folder(tmp_path / "run").path, 1, 2, 3)
    said = capsys.readouterr().err
    assert said.startswith(f"warning: logger=tensorboard: {type(error).__name__}")
    assert said.count("\n") == 1 and "\x1b[31m" not in said
    assert len(opened[0].given) == (3 if place == "close" else 0)


def test_a_tracker_that_hangs_at_its_end_is_left_when_its_time_is_over(
    tmp_path, opened, monkeypatch, capsys
):
    monkeypatch.setattr(Kept, "act", hanging("close"))
    track(Folder(tmp_path / "run").path, 1, 2, finish_seconds=0.2)
    said = capsys.readouterr().err
    assert said.count("\n") == 1 and said.startswith("warning: logger=tensorboard")


@pytest.mark.parametrize("place, doing", [("open", "open"), ("send", "accept a row")])
def test_a_tracker_that_hangs_is_left_when_its_time_is_over(
    tmp_path, opened, monkeypatch, capsys, place, doing
):
    """At its opening, or at a row: once, for all rows."""
    monkeypatch.setattr(Kept, "act", hanging(place))
    begun = time.monotonic()
    track(Folder(tmp_path / "run").path, *range(1, 9), finish_seconds=0.2)
    assert time.monotonic() - begun < 1
    said = capsys.readouterr().err
    assert said.count("\n") == 1 and f"did not {doing}" in said


def test_a_tracker_that_fails_after_it_was_left_says_nothing_more(
    tmp_path, opened, monkeypatch, capsys
):
    def act(at):
        if at == "close":
            time.sleep(0.4)
            raise RuntimeError("late")

    monkeypatch.setattr(Kept, "act", staticmethod(act))
    track(Folder(tmp_path / "run").path, 1, finish_seconds=0.2)
    time.sleep(0.5)
    assert capsys.readouterr().err.count("warning: logger=tensorboard") == 1


def test_a_stop_leaves_a_tracker_the_rest_of_its_grace(tmp_path, opened, monkeypatch):
    monkeypatch.setattr(Kept, "act", hanging("close"))
    tracking = Tracking(Folder(tmp_path / "run").path, logger(1e6), {})
    tracking.finish("stopped", grace_seconds=trackers.STOP_MARGIN_SECONDS)  # else for ever


def test_a_fork_of_a_run_ends_no_tracker(tmp_path, opened):
    tracking = Tracking(Folder(tmp_path / "run").path, logger(), {})
    pid = os.fork()
    if not pid:
        tracking.finish("failed", grace_seconds=60)
        os._exit(0)
    assert os.waitpid(pid, 0)[1] == 0
    tracking.finish("done", grace_seconds=60)
    assert opened[0].closed == "done"


FAULTS = {
    "fails": raising("send"), "hangs": hanging("close"),
    "is slow": staticmethod(lambda place: time.sleep(0.3)),
    "takes all": staticmethod(lambda place: None),
}  # fmt: skip


@pytest.fixture(scope="module")
def alone(tmp_path_factory):
    """The run without a tracker."""
    return trained(tmp_path_factory.mktemp("alone") / "run")


def trained(path, *overrides):
    config = config_of(*overrides)
    run_here(load_command("train"), config, RunFolder(path, config))
    return path


@pytest.mark.parametrize("fault", slow_after(1, FAULTS))
def test_a_tracker_changes_nothing_and_ends_nothing(
    tmp_path, alone, opened, monkeypatch, capsys, fault
):
    """Metrics, evaluations, results and weights are the same, bit by bit but for the clock."""
    monkeypatch.setattr(Kept, "act", FAULTS[fault])
    patience = 1 if fault == "hangs" else 60
    run = trained(tmp_path / "run", "logger=tensorboard", f"logger.finish_seconds={patience}")
    others = [name for name in differences(run, alone) if not name.startswith("tracker")]
    assert others in ([], [".hydra/config.yaml"]) and (run / "checkpoint-4").is_dir()
    said = capsys.readouterr().err
    assert said.count("warning: logger=tensorboard") == (fault in ("hangs", "fails"))
    if fault in ("is slow", "takes all"):
        rows = [json.loads(line) for line in (run / "metrics.jsonl").open()]
        given = [content for _, key, content in opened[0].given if key.startswith("row")]
        assert given == rows and opened[0].closed == "done"
        assert {"result 4", "eval 4"} <= set(opened[0].keys)
