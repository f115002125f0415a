"""How far the runs of a sweep are, read from their folders alone, and the table of it."""

from __future__ import annotations

import json
import re
import sys
from contextlib import suppress
from pathlib import Path
from types import SimpleNamespace

import golden
import pytest
from folders import completed

from grpo_ustat.cli import sweep as command
from grpo_ustat.distributed.lock import Lock
from grpo_ustat.runs import history
from grpo_ustat.runs.result import StudyResult, TheoremResult, TrainResult
from grpo_ustat.runs.status import Entry, PlannedRun, note_sweep, sweeps_in

TRAIN = completed(TrainResult, {
    "config_hash": "abc", "steps": 4, "seconds": 83.4, "quantity": "accuracy",
    "final_mean_reward": 0.625, "mean_reward_low": 0.5, "mean_reward_high": 0.75,
})  # fmt: skip
STUDY = completed(StudyResult, {
    "config_hash": "abc", "cost": {"seconds_generate": 3000.0, "seconds_score": 723.0},
    "policy": {"quantity": "accuracy", "mean_reward": 0.25, "mean_reward_low": 0.125,
               "mean_reward_high": 0.5},
    "questions": 100,
    "scaling": {"gstar": 8.41, "gstar_low": 7.42, "gstar_high": 10.1, "best_divisor": {"64": 8}},
})  # fmt: skip
THEOREM = completed(TheoremResult, {
    "config_hash": "abc", "cost": {"rollouts": 0, "seconds": 7.25}, "verdict": "disagrees",
    "claims": [{"verdict": "agrees"}] * 12 + [{"verdict": "disagrees"}],
})  # fmt: skip
UNKNOWN = {"gstar": 8.41, "gstar_low": None, "gstar_high": None, "best_divisor": {"64": 8}}
CONFIGS = {
    "gap": {"theorem": {}}, "train": {"max_steps": 4},
    "mse": {"group_sizes": [2], "study": {"rollouts": 64}}, "lost": None,
}  # fmt: skip
START = {"event": "start", "time": "2026-03-01T00:00:00+00:00"}
END = {"event": "end", "outcome": "done", "time": "2026-03-01T00:01:23+00:00"}
FAILED = END | {"outcome": "failed", "error": "OutOfMemoryError: tried to allocate 2 GiB"}
STOPPED = END | {"outcome": "stopped", "reason": "stopped by SIGTERM after step 2; saved"}
RESUMED = {"event": "resumed", "step": 2}


def folder(path, *rows, result=None, steps=0, config=None):
    path.mkdir(parents=True)
    for row in rows:
        history.append(path, row)
    for name, content in (("result.json", result), (".hydra/config.yaml", config)):
        if content is not None:
            (path / name).parent.mkdir(exist_ok=True)
            (path / name).write_text(json.dumps(content))
    if steps:
        metrics = "".join(json.dumps({"step": step + 1}) + "\n" for step in range(steps))
        (path / "metrics.jsonl").write_text(metrics + '{"step": 9')  # a kill tore the last one
    return path


def state(path, config_hash="abc", max_steps=4):
    return Entry("a=1", path, config_hash, max_steps).state()


PAST = "6 steps are done, max_steps=4: use max_steps=6 or more"
OTHER = "its result belongs to another configuration"


@pytest.mark.parametrize("rows, result, steps, expected", [  # name, detail, starts, step
    ([], None, 0, ("missing", "", 0, 0)),
    ([START, END], TRAIN, 4, ("done", "", 1, 4)),
    ([START, END, START], TRAIN, 4, ("done", "", 2, 4)),
    ([START, FAILED], None, 2, ("failed", FAILED["error"], 1, 2)),
    ([FAILED], None, 0, ("failed", FAILED["error"], 0, 0)),
    ([START, FAILED, START], None, 2, ("stopped", "killed", 2, 2)),
    ([START, FAILED, START, END], TRAIN, 4, ("done", "", 2, 4)),
    ([START, STOPPED], None, 2, ("stopped", STOPPED["reason"], 1, 2)),
    ([START], None, 3, ("stopped", "killed", 1, 3)),
    ([START, STOPPED, START, RESUMED], None, 3, ("stopped", "killed", 2, 3)),
    ([START, END], TRAIN | {"steps": 2}, 2, ("stopped", "max_steps is now 4", 1, 2)),
    ([START, END, FAILED], TRAIN, 4, ("failed", FAILED["error"], 1, 4)),
    ([START, END, FAILED, END], TRAIN, 4, ("done", "", 1, 4)),
    ([START, END, FAILED | {"config_hash": "xyz"}], TRAIN, 4, ("done", "", 1, 4)),
    ([START, END, {"event": "end", "outcome": "failed"}], TRAIN, 4, ("failed", "", 1, 4)),
    ([START, END], TRAIN | {"steps": 6}, 6, ("already past max_steps", PAST, 1, 6)),
    ([START, END], TRAIN | {"config_hash": "xyz"}, 4, ("stopped", OTHER, 1, 4)),
])  # fmt: skip
def test_every_state_is_read_from_the_folder(tmp_path, rows, result, steps, expected):
    found = state(folder(tmp_path / "run", *rows, result=result, steps=steps))
    assert (found.name, found.detail, found.launches, found.step) == expected
    assert found.steps == 4
    assert (found.mean_reward is not None) == (found.name in ("done", "already past max_steps"))


def test_wall_time_is_that_of_all_launches_and_numbers_those_of_the_result(tmp_path):
    """Of the launch that was killed nobody knows the end; worker time is in `STUDY`."""
    clock = {"00:00:00": START, "00:10:00": STOPPED, "01:00:00": START, "02:00:00": START,
             "02:00:30": END}  # fmt: skip
    rows = [row | {"time": f"2026-03-01T{time}+00:00"} for time, row in clock.items()]
    found = state(folder(tmp_path / "mse", *rows, result=STUDY), max_steps=None)
    assert (found.mean_reward, found.low, found.high, found.seconds) == (0.25, 0.125, 0.5, 630.0)
    found = state(folder(tmp_path / "gap", *rows, result=THEOREM), max_steps=None)
    assert (found.name, found.mean_reward, found.seconds) == ("done", None, 630.0)
    assert found.verdicts == {"agrees": 12, "disagrees": 1, "not decided": 0}


@pytest.mark.parametrize("content", [
    "", "{", "null", "[]", "3", '{"config_hash": "abc"}', '{"config_hash": "abc", "steps": null}',
    '{"config_hash": "abc", "steps": 4}',
    '{"config_hash": "abc", "claims": {"verdict": "agrees"}}', "\0\0\0\0"])  # fmt: skip
def test_damaged_files_are_read_as_far_as_they_can_be(tmp_path, content):
    path = folder(tmp_path / "run", START, END, steps=4)
    (path / "result.json").write_text(content)
    assert [state(path, config_hash).name for config_hash in ("abc", None)] == ["stopped"] * 2
    for damage in (b"\0\0\0", b'{"event": "sta', b"\xff\xfe", b"7\n", b"null", b"{}\n"):
        path = folder(tmp_path / f"{damage}".replace("/", ""), START, FAILED)
        with (path / history.NAME).open("ab") as file:
            file.write(damage)
        assert state(path).name == "failed" and state(path).launches == 1


@pytest.fixture
def shown(capsys, monkeypatch):
    """`sweep status PLACE` on 80 columns: what it prints, and lines of errors."""

    def show(place):
        monkeypatch.setenv("COLUMNS", "80")
        monkeypatch.setattr(sys, "argv", ["sweep", "status", str(place)])
        with suppress(SystemExit):
            command.main()
        out, err = capsys.readouterr()
        return out, err.splitlines()

    return show


def noted(place):
    """A sweep of six runs, one in each state; the second is running once it is locked."""
    rows = {"done": [START, END], "running": [START], "failed": [START, FAILED],
            "stopped": [START, STOPPED], "killed": [START], "missing": []}  # fmt: skip
    points = []
    for seed, (name, history_of) in enumerate(rows.items()):
        path = place / f"tiny-{name}" / f"seed-{seed}"
        if history_of:
            folder(path, *history_of, result=TRAIN if name == "done" else None, steps=2)
        run = SimpleNamespace(path=path, config_hash="abc")
        config = SimpleNamespace(max_steps=4)
        points.append(PlannedRun(f"group_size={2**seed} seed={seed}", config, run, place))
    return note_sweep("train", points)


def test_tables_of_a_sweep_and_of_what_no_sweep_names(tmp_path, shown, request, monkeypatch):
    """golden/sweep_states.txt: all states, three commands, a lost configuration, no best size."""
    monkeypatch.chdir(tmp_path)
    place = Path("outputs")
    sweep = noted(place)
    lock = Lock(place / "tiny-running/seed-1")
    lock.take()
    for name, kind, result in (
        ("by_hand", "train", TRAIN | {"quantity": "mean reward", "final_mean_reward": -0.625}),
        ("gap", "gap", THEOREM), ("mse", "mse", STUDY), ("lost", "lost", None),
        ("few", "mse", STUDY | {"questions": 3, "scaling": STUDY["scaling"] | UNKNOWN}),
    ):  # fmt: skip
        folder(place / name, START, END, result=result, steps=4, config=CONFIGS[kind])
    text, errors = shown(place)
    lock.release()
    assert not errors
    text = re.sub(r"process \d+ on \S+", "OWNER", text)
    text = golden.masked(text)
    tables = [line for line in text.splitlines() if "OWNER" not in line]
    assert max(map(len, tables)) <= 80
    assert not golden.difference("sweep_states", text, request.config.getoption("rewrite"))
    assert state(place / "tiny-running/seed-1").name == "stopped"
    assert len(sweeps_in(sweep.file)) == 1 < len(sweeps_in(place))


@pytest.mark.parametrize("damage", ["", "{", "[]", "null", '{"entry": "train", "runs": [3]}',
                                    '{"entry": "later", "runs": []}', None,
                                    '{"entry": "train", "runs": [{"folder": "x"}]}'])  # fmt: skip
def test_what_is_damaged_or_not_ours_is_one_line(tmp_path, shown, damage):
    place = noted(tmp_path).file if damage is not None else tmp_path / "nowhere"
    if damage is not None:
        place.write_text(damage)
    out, errors = shown(tmp_path if damage is not None else place)
    assert not out and len(errors) == 1 and str(place) in errors[0]
