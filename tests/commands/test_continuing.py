"""A sweep that is typed again does what is left of it, and refuses what could not go on.

The work of a run is a stand-in that takes no time; tests/commands/test_sweep_kill.py trains.
"""

from __future__ import annotations

import json
import re
import sys
from pathlib import Path

import pytest
from folders import completed
from golden import naming
from slow_cases import slow_but

from grpo_ustat.cli import app
from grpo_ustat.cli import sweep as status
from grpo_ustat.cli.compose import parse
from grpo_ustat.config.schema import ConfigError
from grpo_ustat.distributed.lock import Lock
from grpo_ustat.launch import run as job
from grpo_ustat.launch.command import load_command
from grpo_ustat.runs import history
from grpo_ustat.runs.result import TrainResult

SWEEP = ("-m", "model=tiny_direct", "max_steps=4", "eval_steps=2")


def work(entry, config, folder):
    """What a run leaves that matters here."""
    result = folder.result()
    if result is None or result["steps"] < config.max_steps:
        with folder.lock():
            folder.open()
            result = {"steps": config.max_steps, "final_mean_reward": 0.5}
            result |= {"mean_reward_low": 0.25, "mean_reward_high": 0.75}
            folder.finish(completed(TrainResult, result))
    return 0.5


@pytest.fixture
def typed(tmp_path, monkeypatch, capsys):
    """Type a sweep: exit code, what it printed to the output and to the error stream, there but for
    the line with which each run begins.
    """
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(job, "make_run", work)

    def command(*words):
        monkeypatch.setattr(sys, "argv", ["train", *SWEEP, *words])
        with pytest.raises(SystemExit) as ended:
            app.main(load_command("train"))
        out, err = capsys.readouterr()
        lines = [line for line in err.splitlines(True) if not re.match("train: .* steps of ", line)]
        return ended.value.code, out, "".join(lines)

    return command


def starts(place):
    """How often each run was started, by its seed."""
    return {
        int(file.parent.name.partition("-")[2]): sum(
            row["event"] == "start" for row in history.launches(file.parent)
        )
        for file in sorted(place.glob(f"outputs/train/*/seed-*/{history.NAME}"))
    }


def run_of(place, seed):
    (found,) = place.glob(f"outputs/train/*/seed-{seed}")
    return found


REFUSED = {
    "a key that is not in the name": (["save_steps=1,2"], "two runs of the sweep share the folder"),
    "launch": (["launch.num_processes=1,2"], "share the folder .*launch.num_processes=1 and"),
    "max_steps": (["max_steps=4,6"], "share the folder .*max_steps=4 and max_steps=6"),
    "the same twice": (["seed=0,0"], "share the folder .*: they differ at most in settings"),
    "job.num": (["seed=0,1", "hydra.sweep.subdir=${hydra.job.num}"],
                "hydra.sweep.subdir has a value only in a running job"),
    "job.id": (["seed=0,1", "hydra.sweep.subdir=${hydra.job.id}"],
               "hydra.sweep.subdir has a value only in a running job"),
    "one folder for all": (["seed=0,1", "hydra.sweep.subdir=x"], "share the folder .*/x"),
    "a folder elsewhere": (["seed=0,1", "hydra.sweep.subdir=/elsewhere/${seed}"],
                           "gives /elsewhere/0, outside hydra.sweep.dir=outputs/train"),
    "a folder above": (["seed=0,1", "hydra.sweep.subdir=../${seed}"],
                       "gives outputs/train/../0, outside hydra.sweep.dir=outputs/train"),
}  # fmt: skip


@pytest.mark.parametrize("words, match", slow_but(REFUSED, "max_steps"))
def test_what_could_not_go_on_is_refused_in_one_line(typed, tmp_path, words, match):
    code, out, err = typed(*words)
    assert (code, out, len(err.splitlines())) == (2, "", 1), err
    assert err.startswith("error: ") and re.search(match, err)
    assert not (tmp_path / "outputs").exists()


@pytest.mark.slow(minutes=0.02)
def test_a_schedule_that_ends_makes_the_number_of_steps_part_of_the_run():
    found = parse("train", [*SWEEP, "schedule=linear", "max_steps=4,6"]).planned_runs
    assert len({point.folder.path for point in found}) == 2


def test_launcher_without_sweep_is_refused():
    pytest.importorskip("hydra_plugins.hydra_submitit_launcher")
    with pytest.raises(ConfigError, match=naming("hydra/launcher=submitit_local", "-m")):
        parse("train", ["hydra/launcher=submitit_local"])


@pytest.mark.slow
def test_typing_it_again_runs_nothing_and_touches_no_run(typed, tmp_path):
    code, _, err = typed("seed=0,1,2")
    assert code == 0 and not err and starts(tmp_path) == {0: 1, 1: 1, 2: 1}
    files = [file for file in tmp_path.glob("outputs/train/*/**/*") if file.is_file()]
    before = {file: file.stat().st_mtime_ns for file in files}
    code, out, err = typed("seed=0,1,2")
    assert code == 0 and not err and out.count("done already") == 3 and "3 runs: 3 done" in out
    assert {file: file.stat().st_mtime_ns for file in files} == before
    assert files == [f for f in tmp_path.glob("outputs/train/*/**/*") if f.is_file()]
    code, _, _ = typed("seed=0,1,2,3")
    assert code == 0 and starts(tmp_path) == {0: 1, 1: 1, 2: 1, 3: 1}


@pytest.mark.slow
def test_more_steps_continue_every_point(typed, tmp_path):
    assert typed("seed=0,1")[0] == 0
    code, out, _ = typed("seed=0,1", "max_steps=6")
    assert code == 0 and "done already" not in out and starts(tmp_path) == {0: 2, 1: 2}
    assert out.count("max_steps is now 6") == 2
    results = [json.loads((run_of(tmp_path, seed) / "result.json").read_text()) for seed in (0, 1)]
    assert [result["steps"] for result in results] == [6, 6]
    assert typed("seed=0,1", "max_steps=6")[0] == 0 and starts(tmp_path) == {0: 2, 1: 2}


@pytest.mark.slow
def test_overwriting_runs_every_point_once_a_command(typed, tmp_path):
    for _ in range(2):
        assert typed("seed=0,1", "on_existing=overwrite")[0] == 0
        assert starts(tmp_path) == {0: 1, 1: 1}  # the history too begins again
        for seed in (0, 1):
            (run_of(tmp_path, seed) / "figure.old").touch()
    assert typed("seed=0,1", "on_existing=overwrite")[0] == 0
    assert not list(tmp_path.glob("outputs/train/*/seed-*/figure.old"))


@pytest.mark.slow
def test_a_point_that_another_process_runs_is_left_to_it(typed, tmp_path):
    assert typed("seed=0,1,2")[0] == 0
    path = run_of(tmp_path, 1)
    (path / "result.json").unlink()
    (run_of(tmp_path, 2) / "result.json").unlink()
    lock = Lock(path)
    lock.take()
    code, out, err = typed("seed=0,1,2")
    lock.release()
    assert code == 1 and starts(tmp_path) == {0: 1, 1: 1, 2: 2}
    assert "seed=1, process " in out
    assert len(err.splitlines()) == 1 and "seed=1" in err
    assert typed("seed=0,1,2")[0] == 0 and starts(tmp_path) == {0: 1, 1: 2, 2: 2}


@pytest.mark.nightly
def test_a_point_that_is_taken_meanwhile_is_not_noted_as_a_failure(typed, tmp_path, monkeypatch):
    assert typed("seed=0,1")[0] == 0
    path = run_of(tmp_path, 1)
    for seed in (0, 1):
        (run_of(tmp_path, seed) / "result.json").unlink()
    locks = []

    def taken(entry, config, folder):
        if config.seed == 0:  # while the first runs, another process begins the second
            locks.append(Lock(path))
            locks[0].take()
        return work(entry, config, folder)

    monkeypatch.setattr(job, "make_run", taken)
    before = (path / history.NAME).read_text()
    code, _, err = typed("seed=0,1")
    locks[0].release()
    assert code == 1 and str(path) in err
    assert (path / history.NAME).read_text() == before


@pytest.mark.slow
def test_a_point_that_failed_is_named_and_tried_again(typed, tmp_path, monkeypatch, capsys):
    def failing(entry, config, folder):
        if config.seed == 1:
            with folder.lock():
                folder.open()
                raise RuntimeError("CUDA error: an illegal memory access\nwas encountered [1/2]")
        return work(entry, config, folder)

    monkeypatch.setattr(job, "make_run", failing)
    code, out, err = typed("seed=0,1,2")
    assert code == 1 and starts(tmp_path) == {0: 1, 1: 1, 2: 1}
    assert "3 runs: 2 done, 1 failed" in out and err.count("RuntimeError: CUDA error") == 1
    last = "RuntimeError: was encountered [1/2]"
    assert f"seed=1 ({run_of(Path(), 1)}): {last}" in err
    monkeypatch.setattr(sys, "argv", ["sweep", "status", "outputs/train"])
    status.main()
    assert f"failed: seed=1: {last}" in capsys.readouterr().out
    monkeypatch.setattr(job, "make_run", work)
    code, out, err = typed("seed=0,1,2")
    assert code == 0 and not err and starts(tmp_path) == {0: 1, 1: 2, 2: 1}
    assert f"seed=1: {last}" in out


@pytest.mark.slow
def test_a_point_that_fails_before_its_folder_is_open_is_noted_once(typed, tmp_path, monkeypatch):
    def failing(entry, config, folder):
        raise ValueError("no such device")

    monkeypatch.setattr(job, "make_run", failing)
    for count in (1, 2):
        assert typed("seed=0")[0] == 1
        rows = history.launches(run_of(tmp_path, 0))
        assert [row.get("error") for row in rows] == ["ValueError: no such device"] * count
    monkeypatch.setattr(job, "make_run", work)
    assert typed("seed=0")[0] == 0


@pytest.mark.nightly
def test_a_done_point_that_fails_in_being_overwritten_fails_the_sweep(typed, monkeypatch):
    assert typed("seed=0,1")[0] == 0

    def failing(entry, config, folder):
        if config.seed == 1:
            raise ValueError("no such device")
        return work(entry, config, folder)

    monkeypatch.setattr(job, "make_run", failing)
    code, _, err = typed("seed=0,1", "on_existing=overwrite")
    assert code == 1 and "no such device" in err


@pytest.mark.slow
def test_a_rank_that_lost_another_is_told_and_noted_as_an_error_once(typed, tmp_path, monkeypatch):
    def losing(entry, config, folder):
        with folder.lock():
            folder.open()
            raise SystemExit("error: rank 0 of 2 lost another rank")

    monkeypatch.setattr(job, "make_run", losing)
    code, _, err = typed("seed=0,1")
    assert code == 1 and f"error: {run_of(tmp_path, 1)}: rank 0 of 2 lost another rank" in err
    assert history.launches(run_of(tmp_path, 1))[-1]["error"] == "rank 0 of 2 lost another rank"


@pytest.mark.parametrize("word", [
    "+hydra.callbacks.told._target_=told.Told", "hydra.job.chdir=true", "+hydra.job.env_set.A=1",
])  # fmt: skip
def test_what_hydra_would_do_with_a_job_is_refused(word):
    key = re.match(r"\+?(hydra\.(callbacks|job\.\w+))", word)[1]
    for words in ([word], ["-m", "seed=0,1", word]):
        with pytest.raises(ConfigError, match=f"^{key} "):
            parse("train", words)
