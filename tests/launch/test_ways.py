"""The ways in, their order, and what signals and deaths do to a command and its ranks."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from contextlib import contextmanager, suppress
from pathlib import Path
from types import SimpleNamespace

import psutil
import pytest
from launching import alive, lines, until
from resuming import SHORT, differences

from grpo_ustat.config.schema import ConfigError
from grpo_ustat.distributed.ranks import check_ranks
from grpo_ustat.launch import run as job
from grpo_ustat.runs import history
from grpo_ustat.runs.status import Entry

OF_RANKS = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "MASTER_ADDR", "MASTER_PORT")


@pytest.fixture(autouse=True)
def alone(monkeypatch):
    """Neither a rank nor a task of anything."""
    for name in list(os.environ):
        if name in OF_RANKS or name.startswith(("SLURM_", "SUBMITIT_", "ACCELERATE_", "FSDP_")):
            monkeypatch.delenv(name)


def asking(num_processes=1, fsdp2=False, only_shows=False):
    launch = SimpleNamespace(num_processes=num_processes, fsdp2=fsdp2)
    return SimpleNamespace(launch=launch, only_shows=only_shows)


@pytest.mark.parametrize(
    "config, world, words",
    [
        (asking(2), 1, "launch.num_processes=2, but a launcher sets the number of processes to 1"),
        (asking(2), 3, "launch.num_processes=2, but a launcher sets the number of processes to 3"),
        (asking(1, fsdp2=True), None, "launch.fsdp2=true needs several processes"),
        (asking(1), 3, None),
        (asking(3), 3, None),
        (asking(2, fsdp2=True), None, None),
        (asking(1, fsdp2=True), 2, None),
        (asking(1, fsdp2=True, only_shows=True), None, None),
    ],
)
def test_numbers_of_processes_that_contradict_each_other_are_refused(
    monkeypatch, config, world, words
):
    if world:
        monkeypatch.setenv("RANK", "0")
        monkeypatch.setenv("WORLD_SIZE", str(world))
    if words is None:
        return check_ranks(config)
    with pytest.raises(ConfigError, match=words):
        check_ranks(config)


def test_the_order_of_the_ways(monkeypatch):
    """A rank of a launcher is that rank; else the command starts ranks, or is the only process."""
    ways = []
    monkeypatch.setattr(job, "run_here", lambda *_: ways.append("here"))
    monkeypatch.setattr(job, "run_ranks", lambda *_: ways.append("ranks"))
    command, folder = SimpleNamespace(name="train"), SimpleNamespace(path=Path("nowhere"))
    job.run(command, asking(1), folder)
    job.run(command, asking(2), folder)
    monkeypatch.setenv("RANK", "0")
    monkeypatch.setenv("WORLD_SIZE", "2")
    job.run(command, asking(2), folder)
    assert ways == ["here", "ranks", "here"]


STEPS = 24
TWO = (  # evaluated and saved only at the end, so that a stop in between leaves nothing else
    *SHORT, "model.dtype=float64", f"max_steps={STEPS}", f"eval_steps={STEPS}",
    f"save_steps={STEPS}", "save_total_limit=1",
)  # fmt: skip
TORCHRUN = ("torch.distributed.run", "--standalone", "--nproc_per_node=2", "-m")


def command(*words):
    return [sys.executable, "-m", *words]


def finished(place, *words):
    """Run a command to its end; its exit code and what it printed."""
    done = subprocess.run(command(*words), cwd=place, capture_output=True, text=True, timeout=300)
    return done.returncode, done.stdout + done.stderr


@contextmanager
def begun(place, *words, steps):
    """A command that has taken the first step of `steps`, and all processes that it started."""
    with subprocess.Popen(
        command(*words), cwd=place, stderr=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as run:
        family = []
        try:
            until(lambda: any(lines(file) for file in place.glob(steps)))
            family = psutil.Process(run.pid).children(recursive=True)
            yield run, family
        finally:
            for process in (*family, run):
                with suppress(psutil.NoSuchProcess):
                    process.kill()


@pytest.fixture(scope="module")
def through(tmp_path_factory):
    """Two ranks of torchrun that nobody stops."""
    place = tmp_path_factory.mktemp("two")
    code, told = finished(place, *TORCHRUN, "grpo_ustat", "train", *TWO, "hydra.run.dir=run")
    assert code == 0, told
    assert history.launches(place / "run")[0]["processes"] == 2
    return place / "run"


@pytest.mark.slow
def test_ranks_of_torchrun_save_and_go_on(tmp_path, through):
    """A scheduler tells every process; torchrun passes TERM on as well."""
    words = (*TORCHRUN, "grpo_ustat", "train", *TWO, "hydra.run.dir=run")
    with begun(tmp_path, *words, steps="run/metrics.jsonl") as (run, family):
        for process in (run, *family):
            process.send_signal(signal.SIGTERM)
        _, errors = run.communicate(timeout=120)
        assert not any(map(alive, family))
    assert errors.count("the same command continues from there") == 1
    assert history.launches(tmp_path / "run")[-1]["outcome"] == "stopped"
    code, told = finished(tmp_path, *words)
    assert code == 0, told
    assert differences(tmp_path / "run", through) == []


SWEEP = ("grpo_ustat", "train", "-m", *TWO, "seed=0,1", "launch.num_processes=2",
         "hydra.sweep.dir=sweep")  # fmt: skip
FIRST = "sweep/*/seed-0/metrics.jsonl"


@pytest.mark.slow
def test_a_sweep_with_ranks_stops_saves_and_goes_on(tmp_path, through):
    """The processes are told as SLURM does it, all of them; then the second run loses a rank."""
    with begun(tmp_path, *SWEEP, steps=FIRST) as (run, family):
        for process in (run, *family):
            process.send_signal(signal.SIGUSR2)
        _, errors = run.communicate(timeout=120)
        assert run.returncode == 75, errors
        assert len(family) == 3 and not any(map(alive, family))
    assert "stopped by SIGUSR2 after step " in errors and "Traceback" not in errors
    assert errors.count("the same command continues from there") == 1
    (zero,) = tmp_path.glob("sweep/*/seed-0")
    assert not list(tmp_path.glob("sweep/*/seed-1"))

    with begun(tmp_path, *SWEEP, steps="sweep/*/seed-1/metrics.jsonl") as (run, family):
        family[-1].kill()
        _, errors = run.communicate(timeout=120)
        assert run.returncode == 1 and not any(map(alive, family))
    assert errors.count("error: did not finish: seed=1 ") == 1
    (one,) = tmp_path.glob("sweep/*/seed-1")
    assert Entry("seed=1", one, None, STEPS).state().name == "failed"
    assert differences(zero, through) == [".hydra/config.yaml"]
    told = [row.get("outcome", row["event"]) for row in history.launches(zero)]
    assert told == ["start", "stopped", "start", "resumed", "done"]

    code, told = finished(tmp_path, *SWEEP)
    assert code == 0 and told.count("done already: seed=0 ") == 1, told


@pytest.mark.slow
@pytest.mark.parametrize("dies", ["parent", "torchrun"])
def test_ranks_end_with_what_started_them(tmp_path, dies):
    words = ("grpo_ustat", "train", *TWO, "launch.num_processes=2", "hydra.run.dir=run")
    with begun(tmp_path, *words, steps="run/metrics.jsonl") as (run, family):
        (run if dies == "parent" else family[0]).kill()
        run.communicate(timeout=120)
        until(lambda: not any(map(alive, family)), seconds=30)
    assert not (tmp_path / "run/result.json").exists()


@pytest.mark.slow
def test_ctrl_c_ends_all_and_a_refusal_of_the_ranks_is_printed_once(tmp_path):
    words = ("grpo_ustat", "train", *TWO, "launch.num_processes=2", "hydra.run.dir=run")
    with begun(tmp_path, *words, steps="run/metrics.jsonl") as (run, family):
        run.send_signal(signal.SIGINT)
        _, errors = run.communicate(timeout=120)
        assert run.returncode == 130 and errors.count("interrupted") == 1
        until(lambda: not any(map(alive, family)), seconds=30)
    (tmp_path / "run/checkpoint-1").mkdir()
    (tmp_path / "run/code.json").write_text("{}")
    code, told = finished(tmp_path, *words)
    assert code == 2 and told.count("error: ") == 1, told
