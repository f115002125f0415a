"""A tracker is given every step once, and whatever it does, the run is the run without it."""

from __future__ import annotations

import atexit
import json
import os
import threading
import time
from pathlib import Path
from types import SimpleNamespace

import hostile
import pytest
from launching import until
from resuming import config_of, differences
from slow_cases import slow_after
from tracked import Folder, row

from grpo_ustat.launch.command import load_command
from grpo_ustat.launch.run import run_here
from grpo_ustat.runs import trackers
from grpo_ustat.runs.events import Damaged
from grpo_ustat.runs.folder import RunFolder
from grpo_ustat.runs.trackers import Sender, Tracking


class Kept:
    """A tracker that keeps what it is given; `act` is called with the place it is at."""

    act = staticmethod(lambda place: None)

    def __init__(self, about, opened):
        self.about, self.given, self.closed = about, [], None
        opened.append(self)
        self.act("open")

    def send(self, index, events):
        self.act("send")
        self.given.append((index, [f"{x.key} {x.step}" for x in events], events[-1].content))

    def close(self, outcome):
        self.act("close")
        self.closed = outcome
        return "here"

    @property
    def keys(self):
        return [key for _, keys, _ in self.given for key in keys]


@pytest.fixture
def opened(monkeypatch):
    """The trackers that were opened under the name of TensorBoard, last one last."""
    found = []
    monkeypatch.setitem(trackers.OPENERS, "tensorboard", lambda about: Kept(about, found))
    return found


def logger(finish_seconds=20.0):
    return SimpleNamespace(name="tensorboard", project="p", finish_seconds=finish_seconds)


def track(path, *steps, outcome="done", finish_seconds=20.0):
    """Track a run that makes rows of these steps."""
    tracking = Tracking(path, logger(finish_seconds))
    for step in steps:
        tracking.put(row(step))
    tracking.finish(outcome, grace_seconds=60)


def test_all_events_in_order_once(tmp_path, opened, capsys):
    folder = Folder(tmp_path / "run")
    folder.evals(0, 2)
    folder.completions(1, 2)
    folder.finish(steps=2, curves=[{"mse": 1.0}])
    track(folder.path, 1, 2)
    keys = ["eval sampled/test 0", "eval sampled/test 2", "completions 1", "completions 2"]
    keys += ["figure figure 2", "table curves 2", "result 2", "row 1", "row 2"]
    assert opened[0].keys == keys and opened[0].closed == "done"
    assert [index for index, _, _ in opened[0].given] == [0, 1, 3, 4, 5, 6, 7, 8]
    assert capsys.readouterr().err == "logger=tensorboard: here\n"
    track(folder.path)
    assert opened[1].keys == [] and opened[1].about.run_id == opened[0].about.run_id


def test_files_are_sent_when_they_change_and_at_the_end(tmp_path, opened):
    folder = Folder(tmp_path / "run")
    tracking = Tracking(folder.path, logger())
    tracking.put(row(1))
    until(lambda: opened and opened[0].keys == ["row 1"])
    folder.evals(0)
    tracking.put(row(2))
    until(lambda: len(opened[0].given) == 3)
    folder.evals(0, 2)
    folder.finish(steps=2)
    tracking.finish("stopped", grace_seconds=60)
    evals = ["eval sampled/test 0", "eval sampled/test 2"]
    assert opened[0].keys == ["row 1", "row 2", *evals, "figure figure 2", "result 2"]
    assert opened[0].closed == "stopped"


def test_a_resumed_run_sends_no_step_twice_and_misses_none(tmp_path, opened):
    """Rows that a killed run wrote and never sent come first; those it makes again do not count."""
    folder = Folder(tmp_path / "run")
    folder.rows(1, 2, 3, 4)
    track(folder.path, outcome="stopped")
    folder.rows(5)
    track(folder.path, 3, 4, 5, 6)
    assert opened[0].keys == [f"row {n}" for n in (1, 2, 3, 4)]
    assert opened[1].keys == ["row 5", "row 6"]
    assert [index for index, _, _ in opened[1].given] == [4, 5]


def test_a_damaged_state_is_named(tmp_path, opened):
    folder = Folder(tmp_path / "run")
    (folder.path / "tracker").mkdir()
    for text in ("", "[]", '{"run_id": 3}', '{"run_id": "a", "count": 1, "sent": []}'):
        (folder.path / "tracker" / "tensorboard.json").write_text(text)
        with pytest.raises(Damaged, match="tensorboard.json is damaged: delete it"):
            Sender(folder.path, "tensorboard", None)


@pytest.mark.parametrize("key", hostile.NAMES)
def test_names_of_a_run_are_texts(tmp_path, monkeypatch, opened, key):
    folder, name = Folder(tmp_path / "run"), hostile.NAMES[key]
    monkeypatch.setattr(trackers.Path, "absolute", lambda path: Path(f"/x/{name}/{name}"))
    Sender(folder.path, "tensorboard", None)
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


@pytest.mark.parametrize("place", ["open", "send", "close"])
def test_a_tracker_that_hangs_is_left_when_its_time_is_over(
    tmp_path, opened, monkeypatch, capsys, place
):
    monkeypatch.setattr(Kept, "act", hanging(place))
    track(Folder(tmp_path / "run").path, 1, 2, finish_seconds=0.2)
    said = capsys.readouterr().err
    assert said.count("\n") == 1 and "did not end in 0 s and is left to itself; it is off" in said


def test_a_stop_leaves_a_tracker_the_rest_of_its_grace(tmp_path, opened, monkeypatch):
    monkeypatch.setattr(Kept, "act", hanging("open"))
    tracking = Tracking(Folder(tmp_path / "run").path, logger(1e6))
    tracking.finish("stopped", grace_seconds=trackers.STOP_MARGIN_SECONDS)  # else for ever


def test_a_full_queue_drops_rows_and_never_waits(tmp_path, opened, monkeypatch, capsys):
    freed = threading.Event()
    monkeypatch.setattr(trackers, "MOST_WAITING_ROWS", 3)
    monkeypatch.setattr(Kept, "act", staticmethod(lambda place: freed.wait(30)))
    tracking = Tracking(Folder(tmp_path / "run").path, logger())
    for step in range(1, 10):
        tracking.put(row(step))
    freed.set()
    tracking.finish("done", grace_seconds=60)
    assert opened[0].keys == ["row 1", "row 2", "row 3"]
    said = capsys.readouterr().err.splitlines()
    warning, where, count = [line for line in said if not line.startswith("waiting up to")]
    assert warning.startswith("warning: logger=tensorboard: cannot keep up, rows are dropped")
    assert (where, count) == (
        "logger=tensorboard: here",
        "logger=tensorboard: 6 rows were dropped",
    )


def test_a_thread_that_cannot_be_started_is_a_warning(tmp_path, opened, monkeypatch, capsys):
    def refuse(thread):
        raise RuntimeError("can't start new thread")

    monkeypatch.setattr(threading.Thread, "start", refuse)
    track(Folder(tmp_path / "run").path, 1)
    assert "RuntimeError: can't start new thread; it is off" in capsys.readouterr().err


def test_a_fork_of_a_run_ends_no_tracker(tmp_path, opened):
    tracking = Tracking(Folder(tmp_path / "run").path, logger())
    pid = os.fork()
    if not pid:
        tracking.finish("failed", grace_seconds=60)
        os._exit(0)
    assert os.waitpid(pid, 0)[1] == 0
    tracking.finish("done", grace_seconds=60)
    assert opened[0].closed == "done"


def test_what_wandb_has_registered_for_the_exit_is_taken_back(monkeypatch):
    called, found = [], []
    ours, theirs = (lambda: called.append("ours")), (lambda: called.append("theirs"))
    theirs.__module__ = "wandb.sdk"
    monkeypatch.setattr(atexit, "register", lambda function: called.append(function))
    monkeypatch.setattr(atexit, "unregister", called.remove)
    with trackers.noted_exit_hooks(found):
        atexit.register(ours), atexit.register(theirs)
    trackers.leave_alone(found)
    assert called == [ours]


FAULTS = {
    "fails": raising("send"), "hangs": hanging("send"),
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
        given = [content for _, (key, *_), content in opened[0].given if key.startswith("row")]
        assert given == rows and opened[0].closed == "done"
        assert {"result 4", "eval sampled/test 4"} <= set(opened[0].keys)
