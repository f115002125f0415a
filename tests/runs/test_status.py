"""How far the runs of a sweep are, read from their folders alone, and the table of it."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from pathlib import Path
from types import SimpleNamespace

import pytest

sys.path.insert(0, str(Path(__file__).parents[1] / "helpers"))

from folders import completed  # noqa: E402

from grpo_ustat.cli import sweep as command  # noqa: E402
from grpo_ustat.distributed.lock import Lock  # noqa: E402
from grpo_ustat.runs import history  # noqa: E402
from grpo_ustat.runs.result import StudyResult, TheoremResult, TrainResult  # noqa: E402
from grpo_ustat.runs.status import (  # noqa: E402
    Entry,
    PlannedRun,  # noqa: E402
    note_sweep,
    sweeps_in,
)

RESULT = {
    "config_hash": "abc", "steps": 4, "seconds": 83.4, "quantity": "accuracy",
    "final_mean_reward": 0.625, "mean_reward_low": 0.5, "mean_reward_high": 0.75,
}  # fmt: skip
OF_STUDY = {
    "config_hash": "abc", "cost": {"seconds_generate": 3000.0, "seconds_score": 723.0},
    "policy": {
        "quantity": "accuracy", "mean_reward": 0.25, "mean_reward_low": 0.125,
        "mean_reward_high": 0.5,
    },
    "questions": 100,
    "scaling": {"gstar": 8.41, "gstar_low": 7.42, "gstar_high": 10.1, "best_divisor": {"64": 8}},
}  # fmt: skip
OF_THEOREM = {
    "config_hash": "abc", "cost": {"rollouts": 0, "seconds": 7.25}, "verdict": "disagrees",
    "claims": [{"verdict": "agrees"}] * 12 + [{"verdict": "disagrees"}],
}  # fmt: skip
START = {"event": "start", "time": "2026-03-01T00:00:00+00:00"}
END = {"event": "end", "outcome": "done", "time": "2026-03-01T00:01:23+00:00"}
FAILED = END | {"outcome": "failed", "error": "OutOfMemoryError: tried to allocate 2 GiB"}
STOPPED = END | {"outcome": "stopped", "reason": "stopped by SIGTERM after step 2; saved"}


def folder(path, *rows, result=None, steps=0):
    path.mkdir(parents=True)
    for row in rows:
        history.append(path, row)
    if result is not None:
        record = TheoremResult if "claims" in result else TrainResult
        record = StudyResult if "policy" in result else record
        (path / "result.json").write_text(json.dumps(completed(record, result)))
    if steps:
        metrics = "".join(json.dumps({"step": step + 1}) + "\n" for step in range(steps))
        (path / "metrics.jsonl").write_text(metrics + '{"step": 9')  # a kill tore the last one
    return path


def state(path, config_hash="abc", max_steps=4):
    return Entry("a=1", path, config_hash, max_steps).state()


CASES = {  # name, detail, starts, step
    "missing": ([], None, 0, ("missing", "", 0, 0)),
    "done": ([START, END], RESULT, 4, ("done", "", 1, 4)),
    "done, and started again for nothing": ([START, END, START], RESULT, 4, ("done", "", 2, 4)),
    "failed": ([START, FAILED], None, 2, ("failed", FAILED["error"], 1, 2)),
    "failed before it began": ([FAILED], None, 0, ("failed", FAILED["error"], 0, 0)),
    "failed, then killed": ([START, FAILED, START], None, 2, ("stopped", "killed", 2, 2)),
    "failed, then done": ([START, FAILED, START, END], RESULT, 4, ("done", "", 2, 4)),
    "stopped": ([START, STOPPED], None, 2, ("stopped", STOPPED["reason"], 1, 2)),
    "killed": ([START], None, 3, ("stopped", "killed", 1, 3)),
    "killed after it went on": (
        [START, STOPPED, START, {"event": "resumed", "step": 2}], None, 3,
        ("stopped", "killed", 2, 3),
    ),
    "more steps asked": (
        [START, END], RESULT | {"steps": 2}, 2, ("stopped", "max_steps is now 4", 1, 2)
    ),
    "failed to overwrite": ([START, END, FAILED], RESULT, 4, ("failed", FAILED["error"], 1, 4)),
    "failed to overwrite, then shown": ([START, END, FAILED, END], RESULT, 4, ("done", "", 1, 4)),
    "refused what another asked": (
        [START, END, FAILED | {"config_hash": "xyz"}], RESULT, 4, ("done", "", 1, 4)
    ),
    "failed without a word": (
        [START, END, {"event": "end", "outcome": "failed"}], RESULT, 4, ("failed", "", 1, 4)
    ),
    "fewer steps asked": (
        [START, END], RESULT | {"steps": 6}, 6,
        ("already past max_steps", "6 steps are done, max_steps=4: use max_steps=6 or more", 1, 6),
    ),
    "another configuration": (
        [START, END], RESULT | {"config_hash": "xyz"}, 4,
        ("stopped", "its result belongs to another configuration", 1, 4),
    ),
}  # fmt: skip


@pytest.mark.parametrize("rows, result, steps, expected", CASES.values(), ids=CASES)
def test_every_state_is_read_from_the_folder(tmp_path, rows, result, steps, expected):
    found = state(folder(tmp_path / "run", *rows, result=result, steps=steps))
    assert (found.name, found.detail, found.launches, found.step) == expected
    known = found.name in ("done", "already past max_steps")
    assert found.steps == 4 and (found.mean_reward is not None) is known


def test_a_run_is_running_while_a_process_holds_its_folder(tmp_path):
    path = folder(tmp_path / "run", START, FAILED, START, steps=2)
    lock = Lock(path)
    lock.take()
    found = state(path)
    assert (found.name, found.step) == ("running", 2)
    assert f"process {os.getpid()} on" in found.detail
    lock.release()
    assert state(path).name == "stopped"


def at(clock, row):
    return row | {"time": f"2026-03-01T{clock}+00:00"}


def test_wall_time_is_that_of_all_launches_and_never_of_workers(tmp_path):
    """Of the launch that was killed nobody knows the end; worker time is in `OF_STUDY`."""
    rows = [
        at("00:00:00", START), at("00:10:00", STOPPED), at("01:00:00", START),
        at("02:00:00", START), at("02:00:30", END),
    ]  # fmt: skip
    found = state(folder(tmp_path / "mse", *rows, result=OF_STUDY), max_steps=None)
    assert (found.name, found.seconds) == ("done", 630.0)
    found = state(folder(tmp_path / "train", *rows, result=RESULT))
    assert found.seconds == 630.0


def test_times_and_accuracies_are_those_of_the_results(tmp_path):
    found = state(folder(tmp_path / "train", START, END, result=RESULT))
    assert (found.mean_reward, found.low, found.high, found.seconds) == (0.625, 0.5, 0.75, 83.0)
    found = state(folder(tmp_path / "mse", START, END, result=OF_STUDY), max_steps=None)
    assert (found.mean_reward, found.low, found.high, found.seconds) == (0.25, 0.125, 0.5, 83.0)
    found = state(folder(tmp_path / "gap", START, END, result=OF_THEOREM), max_steps=None)
    assert (found.name, found.mean_reward, found.seconds) == ("done", None, 83.0)
    assert found.verdicts == {"agrees": 12, "disagrees": 1, "not decided": 0}


@pytest.mark.parametrize("content", ["", "{", "null", "[]", "3", '{"config_hash": "abc"}',
                                     '{"config_hash": "abc", "steps": null}',
                                     '{"config_hash": "abc", "claims": {"verdict": "agrees"}}',
                                     '{"config_hash": "abc", "steps": 4}', "\0\0\0\0"])  # fmt: skip
@pytest.mark.parametrize("config_hash", ["abc", None])
def test_a_damaged_result_is_none(tmp_path, content, config_hash):
    path = folder(tmp_path / "run", START, END, steps=4)
    (path / "result.json").write_text(content)
    assert state(path, config_hash).name == "stopped"


@pytest.mark.parametrize(
    "damage", [b"\0\0\0", b'{"event": "sta', b"\xff\xfe", b"7\n", b"null", b"{}\n"]
)
@pytest.mark.parametrize("result", [None, RESULT])
def test_a_damaged_history_is_read_as_far_as_it_can_be(tmp_path, damage, result):
    path = folder(tmp_path / "run", START, FAILED, result=result)
    with (path / history.NAME).open("ab") as file:
        file.write(damage)
    assert state(path).name == "failed" and state(path).launches == 1


def shown(capsys, monkeypatch, place):
    """Exit code, lines printed on 80 columns, lines of errors."""
    monkeypatch.setenv("COLUMNS", "80")
    monkeypatch.setattr(sys, "argv", ["sweep", "status", str(place)])
    code = 0
    try:
        command.main()
    except SystemExit as ended:
        code = ended.code
    out, err = capsys.readouterr()
    return code, out.splitlines(), err.splitlines()


def noted(place, entry="train"):
    """A sweep of six runs, one in each state."""
    rows = {
        "done": [START, END], "running": [START], "failed": [START, FAILED],
        "stopped": [START, STOPPED], "killed": [START], "missing": [],
    }  # fmt: skip
    points = []
    for seed, (name, history_of) in enumerate(rows.items()):
        path = place / f"tiny-{name}" / f"seed-{seed}"
        if history_of:
            folder(path, *history_of, result=RESULT if name == "done" else None, steps=2)
        of = SimpleNamespace(path=path, config_hash="abc")
        config = SimpleNamespace(max_steps=4)
        points.append(PlannedRun(f"group_size={2**seed} seed={seed}", config, of, place))
    return note_sweep(entry, points)


def test_the_table_of_a_sweep(tmp_path, capsys, monkeypatch):
    """Looked at: one line a run, the numbers aligned right, nothing cut at 80 columns."""
    place = tmp_path / "outputs"
    noted(place)
    lock = Lock(place / "tiny-running" / "seed-1")
    lock.take()
    code, out, err = shown(capsys, monkeypatch, place)
    lock.release()
    assert code == 0 and not err and all(len(line) <= 80 for line in out)
    rows = {line.split()[0]: line.split()[1:] for line in out if line.startswith(" group_size=")}
    assert {key: words[:4] for key, words in rows.items()} == {
        "group_size=1": ["seed=0", "done", "4/4", "1"],
        "group_size=2": ["seed=1", "running", "2/4", "1"],
        "group_size=4": ["seed=2", "failed", "2/4", "1"],
        "group_size=8": ["seed=3", "stopped", "2/4", "1"],
        "group_size=16": ["seed=4", "stopped", "2/4", "1"],
        "group_size=32": ["seed=5", "missing", "0/4"],
    }
    assert rows["group_size=1"][4:] == ["1:23", "0.625", "[0.500,", "0.750]"]
    text = " ".join(" ".join(out).split())
    assert "6 runs: 1 done, 1 running, 1 failed, 2 stopped, 1 missing" in text
    assert f"group_size=4 seed=2: {FAILED['error']}" in text
    assert f"group_size=2 seed=1: process {os.getpid()} on " in text


@pytest.mark.parametrize("quantity", ["accuracy", "mean reward"])
def test_the_table_names_what_the_runs_have(quantity, tmp_path, capsys, monkeypatch):
    noted(tmp_path)
    result = RESULT | {"quantity": quantity, "final_mean_reward": -0.625, "mean_reward_low": -0.75}
    file = tmp_path / "tiny-done/seed-0/result.json"
    file.write_text(json.dumps(completed(TrainResult, result)))
    text = " ".join(" ".join(shown(capsys, monkeypatch, tmp_path)[1]).split())
    assert (
        f"{quantity} is measured on held-out questions; 95 %" in text and "-0.625 [-0.750," in text
    )
    (other,) = {"accuracy", "mean reward"} - {quantity}
    assert other not in text


def of_theorems(place):
    """A sweep of three theorems, one of them finished."""
    rows = {"lemma6": [START, END], "theorem7": [START], "theorem8": []}
    points = []
    for name, history_of in rows.items():
        path = place / f"{name}-coins" / "seed-0"
        if history_of:
            folder(path, *history_of, result=OF_THEOREM if name == "lemma6" else None)
        of = SimpleNamespace(path=path, config_hash="abc")
        points.append(PlannedRun(f"theorem={name}", SimpleNamespace(), of, place))
    return note_sweep("gap", points)


def test_the_table_of_a_sweep_of_theorems_counts_verdicts(tmp_path, capsys, monkeypatch):
    of_theorems(tmp_path)
    code, out, err = shown(capsys, monkeypatch, tmp_path)
    assert code == 0 and not err and all(len(line) <= 80 for line in out)
    (header,) = (line.split() for line in out if line.split()[:1] == ["run"])
    assert header == ["run", "state", "starts", "time", "agree", "disagree", "not", "decided"]
    assert any(line.split() == ["wall"] for line in out)
    rows = [line.split() for line in out if line.startswith(" theorem=")]
    assert rows == [
        ["theorem=lemma6", "done", "1", "1:23", "12", "1", "0"],
        ["theorem=theorem7", "stopped", "1"],
        ["theorem=theorem8", "missing"],
    ]
    text = " ".join(" ".join(out).split())
    assert "3 runs: 1 done, 1 stopped, 1 missing" in text


def test_runs_of_several_entries_have_a_table_each(tmp_path, capsys, monkeypatch):
    """One whose configuration is lost is shown beside those that come first."""
    for name, config, result in (
        ("gap/x", {"theorem": {}}, OF_THEOREM),
        ("mse/x", {"group_sizes": [2], "study": {"rollouts": 64}}, OF_STUDY),
        ("other/x", None, None),
        ("train/x", {"max_steps": 4}, RESULT),
    ):
        path = folder(tmp_path / name, START, END, result=result, steps=4)
        if config:
            (path / ".hydra").mkdir()
            (path / ".hydra/config.yaml").write_text(json.dumps(config))
    found = {s.command: [one.label for one in s.entries] for s in sweeps_in(tmp_path)}
    assert found == {"gap": ["gap/x", "other/x"], "mse": ["mse/x"], "train": ["train/x"]}
    code, out, err = shown(capsys, monkeypatch, tmp_path)
    rows = {words[0]: words[1:] for line in out if "/x" in line and (words := line.split())}
    assert code == 0 and not err
    assert rows["gap/x"] == ["done", "1", "1:23", "12", "1", "0"]
    assert rows["mse/x"] == ["done", "1", "1:23", "0.250", "8.4", "8"]
    assert next(line.split() for line in out if "[7.4" in line) == [
        "[0.125,", "0.500]", "[7.4,", "10.1]"
    ]  # fmt: skip
    assert rows["train/x"] == ["done", "4/4", "1", "1:23", "0.625", "[0.500,", "0.750]"]
    assert rows["other/x"][0] == "stopped"


def test_row_of_a_study_without_best_size(tmp_path, capsys, monkeypatch):
    scaling = {"gstar": 8.41, "gstar_low": None, "gstar_high": None, "best_divisor": {"64": 8}}
    path = folder(
        tmp_path / "x", START, END, result=OF_STUDY | {"questions": 3, "scaling": scaling}
    )
    (path / ".hydra").mkdir()
    config = {"group_sizes": [2], "study": {"rollouts": 64}}
    (path / ".hydra/config.yaml").write_text(json.dumps(config))
    code, out, err = shown(capsys, monkeypatch, tmp_path)
    text = " ".join(" ".join(out).split())
    assert code == 0 and not err and "0.250 not enough [0.125, 0.500] data" in text
    assert "fewer than 4" in text


def test_runs_that_no_sweep_names_are_shown_too(tmp_path, capsys, monkeypatch):
    folder(tmp_path / "x" / "seed-0", START, END, result=RESULT)
    folder(tmp_path / "x" / "seed-1", START, FAILED)
    code, out, err = shown(capsys, monkeypatch, tmp_path)
    assert code == 0 and not err
    states = [line.split()[:2] for line in out if "x/seed-" in line and ":" not in line[:10]]
    assert states == [["x/seed-0", "done"], ["x/seed-1", "failed"]]


def test_runs_that_no_sweep_names_have_a_table_of_their_own_after_the_sweeps(
    tmp_path, capsys, monkeypatch
):
    sweep = noted(tmp_path)
    names = [str(one.folder) for one in sweep.entries]
    folder(tmp_path / "by_hand" / "seed-7", START, FAILED)
    found = sweeps_in(tmp_path)
    assert [[str(one.folder) for one in each.entries] for each in found] == [
        names,
        [str(tmp_path / "by_hand" / "seed-7")],
    ]
    assert [one.label for one in found[1].entries] == ["by_hand/seed-7"]
    assert len(sweeps_in(sweep.file)) == 1
    code, out, err = shown(capsys, monkeypatch, tmp_path)
    text = " ".join(" ".join(out).split())
    assert code == 0 and not err and text.index("6 runs: ") < text.index("by_hand/seed-7 failed")
    assert "(notpartofanysweep)" in text.replace(" ", "") and "1 run: 1 failed" in text


@pytest.mark.parametrize("damage", ["", "{", "[]", "null", '{"entry": "train", "runs": [3]}',
                                    '{"entry": "later", "runs": []}',
                                    '{"entry": "train", "runs": [{"folder": "x"}]}'])  # fmt: skip
def test_a_damaged_sweep_file_is_one_line(tmp_path, capsys, monkeypatch, damage):
    sweep = noted(tmp_path)
    sweep.file.write_text(damage)
    code, out, err = shown(capsys, monkeypatch, tmp_path)
    assert code == 2 and len(err) == 1
    assert str(sweep.file) in err[0]


@pytest.mark.parametrize("name", ["empty", "nowhere"])
def test_a_folder_with_nothing_of_ours_is_one_line(tmp_path, capsys, monkeypatch, name):
    (tmp_path / "empty").mkdir()
    code, out, err = shown(capsys, monkeypatch, tmp_path / name)
    assert code == 2 and not out and len(err) == 1 and name in err[0]


@pytest.mark.slow(minutes=0.02)
def test_the_command_needs_neither_torch_nor_hydra(tmp_path):
    noted(tmp_path)
    script = (
        "import sys\n"
        f"sys.argv = ['sweep', 'status', {str(tmp_path)!r}]\n"
        "from grpo_ustat.cli.sweep import main\n"
        "main()\n"
        "print({'torch', 'hydra', 'transformers', 'datasets'} & set(sys.modules))\n"
    )
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True)
    assert done.returncode == 0 and done.stdout.splitlines()[-1] == "set()", done.stderr


@pytest.mark.slow
def test_a_launch_says_how_long_its_process_took_before_it():
    """Of 3 seconds of sleep and the imports, the same for each run of the process. The system tells
    a process's start to a second.
    """
    program = (
        "import time; time.sleep(3); from grpo_ustat.runs.history import start_row; "
        "first = start_row(); time.sleep(0.2); "
        "print(first['seconds_before'], start_row()['seconds_before'])"
    )
    start = time.monotonic()
    command = [sys.executable, "-c", program]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    first, second = map(float, done.stdout.split())
    assert 2 <= first == second <= time.monotonic() - start + 1
