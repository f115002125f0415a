"""The ways in, their order, and what signals and deaths do to a parent and its ranks."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from functools import partial
from pathlib import Path
from types import SimpleNamespace

import psutil
import pytest
from golden import naming

sys.path.insert(0, str(Path(__file__).parents[1] / "helpers"))
from launching import Command, alive, finished, lines, until, without_figures  # noqa: E402
from precision import compute_in_double  # noqa: E402
from resuming import SHORT, differences, fit, rows  # noqa: E402

from grpo_ustat.config.schema import ConfigError  # noqa: E402
from grpo_ustat.distributed.slurm import join_tasks  # noqa: E402
from grpo_ustat.launch import rank as worker
from grpo_ustat.launch import run as job  # noqa: E402
from grpo_ustat.launch import sharding
from grpo_ustat.launch.sharding import check_sharing, export_sharing  # noqa: E402
from grpo_ustat.mse import study  # noqa: E402
from grpo_ustat.runs import history  # noqa: E402
from grpo_ustat.runs.status import Entry  # noqa: E402
from grpo_ustat.train import trainer  # noqa: E402
from grpo_ustat.train.snapshots import newest_whole  # noqa: E402

ROOT = Path(__file__).parents[2]
OF_RANKS = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "MASTER_ADDR", "MASTER_PORT")


@pytest.fixture(autouse=True)
def alone(monkeypatch):
    """Neither a rank nor a task of anything."""
    for name in list(os.environ):
        if name in OF_RANKS or name.startswith(("SLURM_", "SUBMITIT_", "ACCELERATE_", "FSDP_")):
            monkeypatch.delenv(name)
    before = dict(os.environ)
    yield
    os.environ.clear()
    os.environ.update(before)


def asking(num_processes=1, accelerate=None):
    return SimpleNamespace(
        launch=SimpleNamespace(num_processes=num_processes, accelerate=accelerate)
    )


def as_rank(monkeypatch, world):
    monkeypatch.setenv("RANK", "0")
    monkeypatch.setenv("WORLD_SIZE", str(world))


@pytest.mark.parametrize("there", [1, 3])
def test_numbers_of_processes_that_contradict_each_other_are_refused(monkeypatch, there):
    as_rank(monkeypatch, there)
    match = f"launch.num_processes=2, but a launcher sets the number of processes to {there}"
    with pytest.raises(ConfigError, match=match):
        sharding.check_ranks(asking(2))
    sharding.check_ranks(asking(1))
    sharding.check_ranks(asking(there))


def test_sharing_is_for_several_processes(monkeypatch):
    match = "launch.accelerate=fsdp2 needs several processes: set launch.num_processes=2 or more"
    with pytest.raises(ConfigError, match=match):
        sharding.check_ranks(asking(1, "fsdp2"))
    sharding.check_ranks(asking(2, "fsdp2"))
    as_rank(monkeypatch, 2)
    sharding.check_ranks(asking(1, "fsdp2"))
    as_rank(monkeypatch, 1)
    with pytest.raises(ConfigError, match=match):
        sharding.check_ranks(asking(1, "fsdp2"))


TASK = dict(
    SLURM_JOB_ID="41", SLURM_STEP_ID="2", SLURM_PROCID="3", SLURM_LOCALID="1",
    SLURM_NTASKS="4", SLURM_STEP_NUM_TASKS="4", SLURM_STEP_NODELIST="node[7-8]",
)  # fmt: skip


@pytest.fixture
def task(tmp_path, monkeypatch):
    """One of srun's four tasks on two hosts; `scontrol` notes what it was asked."""
    for name, value in TASK.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setenv("PATH", f"{tmp_path}:/usr/bin:/bin")
    program, asked = tmp_path / "scontrol", tmp_path / "asked"
    program.write_text(f'#!/bin/sh\necho "$@" >> {asked}\nprintf "node7\\nnode8\\n"\n')
    program.chmod(0o755)
    return asked


def told():
    return {name: os.environ[name] for name in OF_RANKS if name in os.environ}


def test_a_task_of_srun_becomes_a_rank(task):
    """20000 + (7919 x 41 + 2) mod 12000 = 20681; the rendezvous is on the first host."""
    join_tasks()
    expected = ("3", "4", "1", "node7", "20681")
    assert told() == dict(zip(OF_RANKS, expected, strict=True))
    assert task.read_text() == "show hostnames node[7-8]\n"


@pytest.mark.parametrize(
    "other",
    [
        {"SLURM_STEP_NUM_TASKS": None},  # the batch script itself
        {"SLURM_STEP_NUM_TASKS": "1", "SLURM_NTASKS": "1"},
        {"SLURM_NTASKS": "8"},  # a batch script submitted from within a task
    ],
)
def test_what_is_no_task_of_several_stays_alone(task, monkeypatch, other):
    for name, value in other.items():
        monkeypatch.setenv(name, value) if value else monkeypatch.delenv(name)
    join_tasks()
    assert told() == {} and not task.exists()


def test_a_rank_of_a_launcher_inside_a_task_stays_that_rank(task, monkeypatch):
    as_rank(monkeypatch, 2)
    join_tasks()
    assert told() == {"RANK": "0", "WORLD_SIZE": "2"} and not task.exists()


@pytest.mark.parametrize("script", ["exit 1", None])
def test_a_first_host_that_nobody_knows_is_refused(task, tmp_path, monkeypatch, script):
    if script:
        (tmp_path / "scontrol").write_text(f"#!/bin/sh\n{script}\n")
    else:
        monkeypatch.setenv("PATH", "/nowhere")
    with pytest.raises(ConfigError, match=naming("node[7-8]", "--master_addr")):
        join_tasks()
    assert told() == {}


def test_the_order_of_the_ways(task, monkeypatch):
    """Each wins over the next; what each starts is noted instead."""
    ways = []
    monkeypatch.setattr(job, "run_here", lambda *_: ways.append(told().get("RANK", "alone")))
    monkeypatch.setattr(job, "run_ranks", lambda *_: ways.append("parent"))

    def way(config):
        job.run(SimpleNamespace(name="train"), config, SimpleNamespace(path=Path("nowhere")))
        return ways[-1]

    as_rank(monkeypatch, 2)  # and a task of four
    assert way(asking(1)) == way(asking(2)) == "0"
    monkeypatch.delenv("RANK"), monkeypatch.delenv("WORLD_SIZE")
    assert way(asking(1)) == "3"
    for name in (*OF_RANKS, "SLURM_STEP_NUM_TASKS"):
        monkeypatch.delenv(name)
    assert way(asking(2)) == "parent"
    assert way(asking(1)) == "alone"


def test_an_unknown_sharing_is_refused_with_those_there_are(monkeypatch):
    with pytest.raises(ConfigError, match=r"launch.accelerate.*zero3.*ddp.*fsdp2"):
        check_sharing("zero3", 2)
    monkeypatch.setenv("ACCELERATE_MIXED_PRECISION", "no")
    with pytest.raises(ConfigError, match="launch.accelerate=ddp"):
        export_sharing("ddp")


@pytest.mark.slow
@pytest.mark.parametrize("name", ["ddp", "fsdp2"])
def test_sharing_is_what_accelerate_launch_exports(tmp_path, name):
    script = tmp_path / "show.py"
    script.write_text(
        "import json, os\n"
        "if os.environ['RANK'] == '0':\n"
        f"    json.dump(dict(os.environ), open({str(tmp_path / 'there.json')!r}, 'w'))\n"
    )
    file = str(sharding.ACCELERATE_FOLDER / f"{name}.yaml")
    command = [sys.executable, "-m", "accelerate.commands.launch", "--config_file", file]
    subprocess.run([*command, str(script)], check=True, capture_output=True, timeout=120)
    there = json.loads((tmp_path / "there.json").read_text())
    before = dict(os.environ)
    export_sharing(name)
    here = {key: value for key, value in os.environ.items() if before.get(key) != value}
    of_torchrun = ("TORCHELASTIC_", "TORCH_", "GROUP_", "ROLE_", "LOCAL_WORLD_SIZE", "NCCL_")
    of_terminal = ("COLUMNS", "LINES")
    new = {
        key: value
        for key, value in there.items()
        if before.get(key) != value
        and key not in (*OF_RANKS, *of_terminal)
        and not key.startswith(of_torchrun)
    }
    assert here == new and here["ACCELERATE_MIXED_PRECISION"] == "no"
    assert ("FSDP_VERSION" in here) is (name == "fsdp2")


TWO = (  # one evaluation at each end, so a stop in between leaves nothing else than no stop
    *SHORT, "model.dtype=float64", "eval_steps=4", "launch.num_processes=2",
)  # fmt: skip


@pytest.fixture(scope="module")
def one(tmp_path_factory):
    with pytest.MonkeyPatch.context() as patch:
        compute_in_double(patch)
        return fit(tmp_path_factory.mktemp("one") / "run", *TWO, "launch.num_processes=1")


@pytest.fixture(scope="module")
def through(one, tmp_path_factory):
    """Two ranks that nobody stops."""
    place = tmp_path_factory.mktemp("two")
    with pytest.MonkeyPatch.context() as patch:
        compute_in_double(patch)
        code, said = finished("train", *TWO, "hydra.run.dir=run", cwd=place)
    assert code == 0, said
    return place / "run"


def slowly():
    """A step takes a third of a second, so that a signal meets it."""
    sample_batch = trainer.sample_batch
    trainer.sample_batch = lambda *given: time.sleep(0.3) or sample_batch(*given)


def command(place, *overrides, before=slowly):
    return Command("train", *TWO, *overrides, "hydra.run.dir=run", cwd=place, before=before)


def ends_as_undisturbed(place, through):
    """The same command once more."""
    code, said = finished("train", *TWO, "hydra.run.dir=run", cwd=place)
    assert code == 0, said
    assert differences(place / "run", through) == []
    return said


def assert_same(one, two):
    for row, other in zip(rows(one), rows(two), strict=True):
        assert row.keys() == other.keys()
        for name, value in row.items():
            expected = pytest.approx(value, rel=1e-9) if isinstance(value, float) else value
            assert other[name] == expected, name
    assert (one / "eval.csv").read_text() == (two / "eval.csv").read_text()


@pytest.mark.slow
def test_two_ranks_of_a_parent_end_as_one_process_does(one, through, tmp_path):
    assert_same(one, through)
    assert history.launches(through)[0]["processes"] == 2
    arguments = (*TWO, "launch.accelerate=fsdp2", "hydra.run.dir=run")
    code, said = finished("train", *arguments, cwd=tmp_path)
    assert code == 0, said
    assert_same(one, tmp_path / "run")
    code, said = finished("train", *arguments, cwd=tmp_path)
    assert code == 0 and said.count("is complete") == 1


@pytest.mark.slow
def test_a_study_on_two_ranks_of_a_parent_finds_what_one_finds(one, tmp_path):
    small = (
        "debug=mse", "model=tiny_base", "model.dtype=float64", "study.questions=4",
        "max_completion_length=64",
    )  # fmt: skip

    for count in (1, 2):
        ranks = (f"launch.num_processes={count}", f"hydra.run.dir=run{count}")
        code, said = finished(
            "mse", *small, *ranks, cwd=tmp_path, before=partial(without_figures, study)
        )
        assert code == 0, said
    found = [(tmp_path / f"run{count}" / "curves.csv").read_text() for count in (1, 2)]
    assert found[0] == found[1]


TO = {
    "the parent": lambda parent: [parent.pid],
    "its process group": lambda parent: [-os.getpgid(parent.pid)],
    "every process": lambda parent: [p.pid for p in (parent, *parent.family())],
}


@pytest.mark.slow
@pytest.mark.parametrize(
    "number, to",
    [("TERM", "the parent"), ("USR1", "its process group"), ("USR2", "every process")],
)
def test_a_signal_saves_ends_all_and_the_same_command_goes_on(tmp_path, through, number, to):
    with command(tmp_path) as run:
        until(lambda: lines(tmp_path / "run/metrics.jsonl") >= 1)
        family = run.family()
        for pid in TO[to](run):
            os.kill(pid, signal.Signals[f"SIG{number}"])
        code, said = run.end()
        assert code == 75, said
        assert len(family) == 3 and not any(map(alive, family))
    assert f"stopped by SIG{number} after step " in said and "Traceback" not in said
    assert said.count("the same command continues from there") == 1
    last = history.launches(tmp_path / "run")[-1]
    assert last["outcome"] == "stopped"
    said = ends_as_undisturbed(tmp_path, through)
    assert f"going on from checkpoint-{steps_of(last)}" in said


def steps_of(row):
    return row["reason"].split("after step ")[1].split(";")[0]


@pytest.mark.slow
def test_ctrl_c_ends_all_with_130(tmp_path, one):
    with command(tmp_path) as run:
        until(lambda: lines(tmp_path / "run/metrics.jsonl") >= 1)
        family = run.family()
        os.kill(run.pid, signal.SIGINT)
        code, said = run.end()
        assert code == 130, said
        assert not any(map(alive, family)) and "Traceback" not in said
    assert said.count("interrupted") == 1


@pytest.mark.slow
def test_ranks_end_with_a_parent_that_is_killed(tmp_path, through):
    with command(tmp_path, "max_steps=4") as run:
        until(lambda: lines(tmp_path / "run/metrics.jsonl") >= 1)
        family = run.family()
        os.kill(run.pid, signal.SIGKILL)
        until(lambda: not any(map(alive, family)))
    assert not (tmp_path / "run/result.json").exists()
    ends_as_undisturbed(tmp_path, through)


@pytest.mark.slow
@pytest.mark.parametrize("which", [0, 1])
def test_a_rank_that_is_killed_is_a_failure_that_is_told_and_made_good(tmp_path, through, which):
    with command(tmp_path) as run:
        until(lambda: lines(tmp_path / "run/metrics.jsonl") >= 1)
        family, ranks = run.family(), sorted(run.ranks(), key=lambda rank: rank.pid)
        ranks[which].kill()
        code, said = run.end()
        assert code not in (0, 75) and not any(map(alive, family))
    assert said.count("error: the ranks ended with code 1") == 1 and "Traceback" not in said
    state = Entry("run", tmp_path / "run", None, 4).state()
    assert state.name == "failed" and "the ranks ended with code 1" in state.detail
    ends_as_undisturbed(tmp_path, through)


@pytest.mark.slow
def test_a_signal_to_ranks_that_are_still_importing_is_not_lost(tmp_path, through):
    """Until they listen, ranks ignore what the parent repeats."""

    def before():
        slowly()
        start = worker.main
        worker.main = lambda: time.sleep(3) or start()

    with command(tmp_path, before=before) as run:
        until(lambda: len(run.ranks()) == 2)
        family = run.family()
        for process in (run, *family):
            os.kill(process.pid, signal.SIGTERM)
        code, said = run.end()
        assert code == 75, said
        assert not any(map(alive, family)) and "Traceback" not in said
    assert "stopped by SIGTERM" in said
    ends_as_undisturbed(tmp_path, through)


@pytest.mark.slow
def test_ranks_that_do_not_end_are_killed_after_the_grace(tmp_path, through):
    def before():
        sample_batch = trainer.sample_batch

        def stuck(*given):
            if os.environ["RANK"] == "1" and lines(tmp_path / "run/metrics.jsonl"):
                (tmp_path / "stuck").touch()
                time.sleep(600)
            return sample_batch(*given)

        trainer.sample_batch = stuck

    with command(tmp_path, "launch.grace_seconds=2", before=before) as run:
        until((tmp_path / "stuck").exists)
        family, start = run.family(), time.monotonic()
        os.kill(run.pid, signal.SIGUSR1)
        code, said = run.end()
        assert code == 75 and 2 <= time.monotonic() - start < 60
        assert not any(map(alive, family))
    assert "ranks still running 2 s after SIGUSR1 are killed" in said
    assert "2 s from the parent process (launch.grace_seconds)" in said
    ends_as_undisturbed(tmp_path, through)


@pytest.mark.slow
def test_a_refusal_in_the_ranks_is_one_line(tmp_path, one):
    """Four prompts per step; then one that only the second rank knows."""
    code, said = finished("train", *TWO, "launch.num_processes=5", cwd=tmp_path)
    assert (code, len(said.splitlines())) == (2, 1), said
    assert said.startswith("error: 4 prompts per step ") and "5 processes" in said

    def before():
        start = trainer.set_up

        def refuse(*given):
            if os.environ["RANK"] == "1":
                raise ConfigError("a fault of the second alone")
            return start(*given)

        trainer.set_up = refuse

    code, said = finished("train", *TWO, cwd=tmp_path / "other", before=before)
    assert code not in (0, 75) and said.count("a fault of the second alone") == 1, said


@pytest.mark.slow
def test_ranks_end_with_a_torchrun_that_is_killed(tmp_path, one):
    """Also while the parent lives on, as in a sweep."""

    def before():
        slowly()
        tell = job.note_failed_ranks
        job.note_failed_ranks = lambda *given: until((tmp_path / "told").exists) or tell(*given)

    with command(tmp_path, "max_steps=99", before=before) as run:
        until(lambda: lines(tmp_path / "run/metrics.jsonl") >= 1)
        ranks = run.ranks()
        psutil.Process(run.pid).children()[0].kill()
        until(lambda: not any(map(alive, ranks)))
        assert len(ranks) == 2 and alive(psutil.Process(run.pid))
        (tmp_path / "told").touch()
        code, said = run.end()
    assert code not in (0, 75) and "error: the ranks ended with code -9" in said


@pytest.mark.slow
def test_a_sweep_starts_the_ranks_of_each_run(tmp_path, through):
    """Then one whose second run loses a rank: named, tried again, and both end as they should."""

    def before():
        sample_batch = trainer.sample_batch

        def die(run, *given):
            if (run.config.seed, os.environ["RANK"]) == (1, "1"):
                os.kill(os.getpid(), signal.SIGKILL)
            return sample_batch(run, *given)

        trainer.sample_batch = die

    sweep = ("-m", *TWO, "seed=1,0", "hydra.sweep.dir=sweep")
    code, said = finished("train", *sweep, cwd=tmp_path, before=before)
    assert code == 1 and said.count("error: did not finish: seed=1 ") == 1, said
    assert "the ranks ended with code 1" in said and "Traceback" not in said
    code, said = finished("train", *sweep, cwd=tmp_path)
    assert code == 0 and said.count("done already: seed=0 ") == 1, said
    zero, first = (next(tmp_path.glob(f"sweep/*/seed-{seed}")) for seed in (0, 1))
    assert differences(zero, through) == []
    assert [row["event"] for row in history.launches(zero)] == ["start", "end"]
    assert json.loads((first / "result.json").read_text())["steps"] == 4


@pytest.mark.slow
def test_torchrun_itself_leaves_stopping_to_the_ranks(tmp_path):
    """Without forks, every process is told at once; the step is saved."""
    words = [*TWO, "max_steps=12", "eval_steps=12", "hydra.run.dir=run"]
    command = [sys.executable, "-m", "grpo_ustat.train", *words]
    with subprocess.Popen(command, cwd=tmp_path, stderr=subprocess.PIPE, text=True) as run:
        until(lambda: lines(tmp_path / "run/metrics.jsonl") >= 1, seconds=120)
        family = psutil.Process(run.pid).children(recursive=True)
        for process in (run, *family):
            os.kill(process.pid, signal.SIGTERM)
        said = run.stderr.read()
    assert run.returncode == 75, said
    assert len(family) == 3 and not any(map(alive, family))
    assert "stopped by SIGTERM after step " in said and "Traceback" not in said
    last = history.launches(tmp_path / "run")[-1]
    assert last["outcome"] == "stopped"
    assert newest_whole(tmp_path / "run").name == f"checkpoint-{steps_of(last)}"
