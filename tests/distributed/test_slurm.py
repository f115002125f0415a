"""SLURM's tasks and its word on this job, spoken by fakes of its commands."""

from __future__ import annotations

import os
from types import SimpleNamespace

import pytest
from golden import naming

from grpo_ustat.cli import multirun
from grpo_ustat.config.schema import ConfigError
from grpo_ustat.distributed import slurm
from grpo_ustat.distributed.slurm import join_tasks
from grpo_ustat.runs import history
from grpo_ustat.runs.status import PlannedRun

OF_RANKS = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "MASTER_ADDR", "MASTER_PORT")
TASK = dict(
    SLURM_JOB_ID="41", SLURM_STEP_ID="2", SLURM_PROCID="3", SLURM_LOCALID="1",
    SLURM_NTASKS="4", SLURM_STEP_NUM_TASKS="4", SLURM_STEP_NODELIST="node[7-8]",
)  # fmt: skip


@pytest.fixture
def scontrol(tmp_path, monkeypatch):
    """One of srun's four tasks on two hosts; `scontrol` is a script that notes its arguments."""
    before = dict(os.environ)
    for name in list(os.environ):
        if name in OF_RANKS or name.startswith(("SLURM_", "SUBMITIT_")):
            monkeypatch.delenv(name)
    for name, value in TASK.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setenv("PATH", f"{tmp_path}:/usr/bin:/bin")

    def answer(script):
        program = tmp_path / "scontrol"
        program.write_text(f'#!/bin/sh\necho "$@" >> {tmp_path}/asked\n{script}\n')
        program.chmod(0o755)
        return tmp_path / "asked"

    yield answer
    os.environ.clear()
    os.environ.update(before)


def told():
    return {name: os.environ[name] for name in OF_RANKS if name in os.environ}


def test_a_task_of_srun_becomes_a_rank(scontrol):
    """20000 + (7919 x 41 + 2) mod 12000 = 20681; the rendezvous is on the first host."""
    asked = scontrol('printf "node7\\nnode8\\n"')
    join_tasks()
    expected = ("3", "4", "1", "node7", "20681")
    assert told() == dict(zip(OF_RANKS, expected, strict=True))
    assert asked.read_text() == "show hostnames node[7-8]\n"


@pytest.mark.parametrize(
    "other",
    [
        {"SLURM_STEP_NUM_TASKS": None},  # the batch script itself
        {"SLURM_STEP_NUM_TASKS": "1", "SLURM_NTASKS": "1"},
        {"SLURM_NTASKS": "8"},  # a batch script submitted from within a task
        {"RANK": "0", "WORLD_SIZE": "2"},  # a rank of a launcher inside a task
    ],
)
def test_what_is_no_task_of_several_stays_what_it_is(scontrol, monkeypatch, other):
    asked = scontrol("exit 1")
    for name, value in other.items():
        monkeypatch.setenv(name, value) if value else monkeypatch.delenv(name)
    join_tasks()
    assert told() == {name: x for name, x in other.items() if name in OF_RANKS}
    assert not asked.exists()


@pytest.mark.parametrize("script", ["exit 1", None])
def test_a_first_host_that_nobody_knows_is_refused(scontrol, monkeypatch, script):
    scontrol(script) if script else monkeypatch.setenv("PATH", "/nowhere")
    with pytest.raises(ConfigError, match=naming("node[7-8]", "--master_addr")):
        join_tasks()
    assert told() == {}


@pytest.mark.parametrize(
    "script, running, error",
    [
        ("echo JobId=41; echo '   JobState=RUNNING Reason=None'", True, ""),
        ("echo JobId=41; echo '   JobState=COMPLETING Reason=None'", False, ""),
        ("echo Unable to contact >&2; exit 1", False, "Unable to contact"),
        ("sleep 60", False, "no answer in 0.5 s"),
        (None, False, "scontrol is not installed"),
    ],
)
def test_a_cancelled_job_is_not_running(scontrol, monkeypatch, capsys, script, running, error):
    monkeypatch.setattr(slurm, "SCONTROL_SECONDS", 0.5)
    scontrol(script) if script else monkeypatch.setenv("PATH", "/nowhere")
    assert slurm.is_running() is running
    assert error in capsys.readouterr().err


def test_a_job_of_an_array_has_its_own_name(scontrol, monkeypatch):
    """The array's number, also that of its last job, would requeue all of its jobs."""
    assert slurm.job_id() == "41" and not slurm.was_restarted()
    for name, value in {"ARRAY_JOB_ID": "41", "ARRAY_TASK_ID": "3", "RESTART_COUNT": "1"}.items():
        monkeypatch.setenv(f"SLURM_{name}", value)
    assert slurm.job_id() == "41_3" and slurm.was_restarted()


def test_jobs_submitted_here_inherit_nothing_of_this_one(monkeypatch):
    ours = {"SLURM_ARRAY_JOB_ID": "7", "SLURM_RESTART_COUNT": "2", "SUBMITIT_EXECUTOR": "slurm"}
    kept = {"SLURM_CONF": "/there/slurm.conf", "SBATCH_ACCOUNT": "mine"}
    for name, value in (ours | kept).items():
        monkeypatch.setenv(name, value)
    before = dict(os.environ)
    with slurm.without_job_env():
        assert not set(ours) & set(os.environ) and kept.items() <= os.environ.items()
    assert dict(os.environ) == before


def test_jobs_are_awaited_by_the_queue(tmp_path, monkeypatch):
    """Other jobs of the user do not matter."""
    for name in ("11_0", "11_1", "12", "other"):
        (tmp_path / "jobs" / name).mkdir(parents=True)
    jobs = slurm.submissions(str(tmp_path / "jobs" / "%j"))
    assert jobs == {"11_0", "11_1", "12"}
    queues, looks = [{"9", "11_1", "12"}, {"9", "12"}, {"9", "11_2"}], []
    monkeypatch.setattr(slurm, "queue", lambda: queues.pop(0))
    monkeypatch.setattr(slurm.time, "sleep", looks.append)
    slurm.await_end(jobs)
    assert looks == [30, 30] and not queues


@pytest.mark.parametrize(
    ("told", "jobs"),
    [("echo 12; echo 11_1; echo 7", {"12", "11_1"}), ("", set()), ("exit 1", set())],
)
def test_the_queue_is_of_other_jobs(tmp_path, monkeypatch, told, jobs):
    monkeypatch.setenv("SLURM_JOB_ID", "7")
    monkeypatch.delenv("SLURM_ARRAY_JOB_ID", raising=False)
    (tmp_path / "squeue").write_text(f'#!/bin/sh\necho "$@" > {tmp_path}/asked\n{told}\n')
    (tmp_path / "squeue").chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:/usr/bin:/bin")
    assert slurm.queue() == jobs
    assert (tmp_path / "asked").read_text() == "--me --array -h -o %i\n"


@pytest.mark.parametrize(
    ("job", "rows", "taken"),
    [
        ("11_0", [], True),  # killed, or about to begin
        ("11_0", [{"event": "end", "outcome": "stopped"}], True),
        ("11_0", [{"event": "end", "outcome": "failed"}], False),  # the job does something else
        ("10_0", [{"event": "end", "outcome": "stopped"}], False),  # a job of old, cancelled
        (None, [], False),  # run by hand
    ],
)
def test_a_run_whose_job_waits_is_left_to_it(tmp_path, monkeypatch, capsys, job, rows, taken):
    """Others are submitted; after a job without a result the rest are waited for."""
    start = {"event": "start"} | ({"slurm_job_id": job} if job else {})
    for name, told in {"seed=0": [start, *rows], "seed=1": []}.items():
        (tmp_path / name).mkdir()
        for row in told:
            history.append(tmp_path / name, row)

    class Job:
        def results(self):
            raise RuntimeError("no result")

    def submit(jobs, cluster, launcher):
        submitted.extend(job.path.name for job in jobs)
        (tmp_path / "jobs" / "12_0").mkdir(parents=True)
        return [Job() for _ in jobs]

    submitted = []
    monkeypatch.setattr(multirun, "submit", submit)
    awaited = []
    monkeypatch.setattr(slurm, "queue", lambda: {"11_0", "9"})
    monkeypatch.setattr(slurm, "await_end", awaited.append)
    todo = [
        PlannedRun(name, None, SimpleNamespace(path=tmp_path / name), tmp_path)
        for name in ("seed=0", "seed=1")
    ]
    multirun._start_on_slurm("train", todo, {"submitit_folder": str(tmp_path / "jobs" / "%j")})
    assert submitted == (["seed=1"] if taken else ["seed=0", "seed=1"])
    assert awaited == [{"12_0"}]
    told = "skipped, SLURM job 11_0 is in the queue: seed=0\n" if taken else ""
    assert capsys.readouterr().out == told
