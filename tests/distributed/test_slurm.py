"""SLURM's word on this job, spoken by a fake `scontrol`; test_slurm_cluster.py asks a real one."""

from __future__ import annotations

import os
from types import SimpleNamespace

import pytest

from grpo_ustat.cli import multirun
from grpo_ustat.distributed import slurm
from grpo_ustat.runs import history
from grpo_ustat.runs.status import PlannedRun

SHOWN = """\
JobId=11 {array}JobName=a JobState=FAILED Requeue=0 Restarts=7
   UserId=root(0) GroupId=root(0) MCS_label=N/A
   JobState={state} Reason={reason} Dependency=(null)
   Requeue={requeue} Restarts={restarts} BatchFlag={batch} Reboot=0 ExitCode=0:0
   Comment=JobState=COMPLETING Restarts=9
   PreemptEligibleTime=2026-11-22T00:21:11 PreemptTime=2026-11-22T00:21:14
"""
PARTITION = "PartitionName=main\n   DisableRootJobs=NO ExclusiveUser=NO GraceTime={} Hidden=NO\n"
CONFIG = "JobRequeue              = 1\nKillWait                = {}\nPreemptMode = REQUEUE\n"


@pytest.fixture
def scontrol(tmp_path, monkeypatch):
    """Make `scontrol` a script of this text; it notes what it was asked in `asked`."""
    monkeypatch.setenv("PATH", f"{tmp_path}:/usr/bin:/bin")
    monkeypatch.setenv("SLURM_JOB_ID", "11")
    monkeypatch.setenv("SLURM_JOB_PARTITION", "main")
    monkeypatch.setattr(slurm, "_first_record", {})
    for name in ("ARRAY_JOB_ID", "ARRAY_TASK_ID", "RESTART_COUNT", "STEP_NUM_TASKS", "NTASKS"):
        monkeypatch.delenv(f"SLURM_{name}", raising=False)

    def answer(text="", code=0, script=None):
        (tmp_path / "answer").write_text(text)
        program = tmp_path / "scontrol"
        program.write_text(
            f'#!/bin/sh\necho "$@" >> {tmp_path}/asked\n'
            + (script or f"cat {tmp_path}/answer; exit {code}")
        )
        program.chmod(0o755)
        return tmp_path / "asked"

    return answer


def shown(state="RUNNING", reason="None", requeue=1, restarts=0, batch=1, array=""):
    return SHOWN.format(**locals())


def of_array(number):
    return f"ArrayJobId={number} ArrayTaskId=3 "


@pytest.mark.parametrize(
    ("job", "restart_count", "ending"),
    [
        (shown(), None, "requeue"),  # preempted or warned
        (shown(restarts=2), 2, "requeue"),  # the third time
        (shown(requeue=0), None, "for_good"),  # --no-requeue: SLURM would refuse
        (shown(batch=0), None, "for_good"),  # salloc: likewise
        (shown("COMPLETING"), None, "for_good"),  # scancel
        (shown("COMPLETING", restarts=2), 2, "for_good"),
        (shown("COMPLETING", restarts=1), None, "comes_back"),  # scontrol requeue
        (shown("COMPLETING", restarts=3), 2, "comes_back"),
        (shown("PENDING", "BeginTime", restarts=1), None, "comes_back"),
        (shown("COMPLETING", "TimeLimit"), None, "requeue"),
        (shown("COMPLETING", "TimeLimit", requeue=0), None, "for_good"),
        (shown("COMPLETING", "TimeLimit", restarts=1), None, "comes_back"),  # asked already
        (shown("SIGNALING"), None, "requeue"),
        (shown("SUSPENDED"), None, "requeue"),
        (shown("STOPPED"), None, "requeue"),
        (shown("CANCELLED"), None, "for_good"),  # seen before it is COMPLETING
        (shown("FAILED", "NonZeroExitCode"), None, "for_good"),
        (shown("NODE_FAIL"), None, "for_good"),
    ],
)
def test_what_becomes_of_a_job(scontrol, monkeypatch, job, restart_count, ending):
    asked = scontrol(job)
    if restart_count is not None:
        monkeypatch.setenv("SLURM_RESTART_COUNT", str(restart_count))
    assert slurm.next_action() == ending
    assert set(asked.read_text().splitlines()) == {"show job 11"}


def test_a_job_of_an_array_is_acted_on_alone(scontrol, monkeypatch):
    """The array's own number, here also that of its last job, would requeue all of its jobs."""
    others = shown("PENDING", restarts=5).replace("JobId=11 ", "JobId=12 ArrayJobId=11 ")
    asked = scontrol(others + shown(array=of_array(11)) + others)
    monkeypatch.setenv("SLURM_ARRAY_JOB_ID", "11")
    monkeypatch.setenv("SLURM_ARRAY_TASK_ID", "3")
    assert slurm.next_action() == "requeue" and slurm.requeue()
    assert asked.read_text() == "show job 11\nrequeue 11_3\n"


def test_what_the_job_outside_left_is_not_ours(scontrol, monkeypatch):
    """A job submitted from within the third job of array 7, which SLURM had started twice."""
    for name, told in {"ARRAY_JOB_ID": "7", "ARRAY_TASK_ID": "3", "RESTART_COUNT": "2"}.items():
        monkeypatch.setenv(f"SLURM_{name}", told)
    asked = scontrol(shown())
    assert (slurm.address(), slurm.restart_count(), slurm.next_action()) == ("11", 0, "requeue")
    assert slurm.requeue() and asked.read_text().endswith("requeue 11\n")
    scontrol(shown("COMPLETING", restarts=1))  # what it was at first counts
    assert slurm.next_action() == "comes_back" and slurm.restart_count() == 0


def test_a_restart_under_way_is_not_counted(scontrol, monkeypatch):
    monkeypatch.setenv("SLURM_RESTART_COUNT", "2")
    asked = scontrol(shown("COMPLETING", restarts=3))
    assert slurm.restart_count() == 2 and slurm.restart_count() == 2
    assert asked.read_text() == "show job 11\n"  # it is looked at for every run folder


def test_jobs_submitted_here_inherit_nothing_of_this_one(monkeypatch):
    ours = {"SLURM_ARRAY_JOB_ID": "7", "SLURM_RESTART_COUNT": "2", "SUBMITIT_EXECUTOR": "slurm"}
    kept = {"SLURM_CONF": "/there/slurm.conf", "SBATCH_ACCOUNT": "mine"}
    for name, value in (ours | kept).items():
        monkeypatch.setenv(name, value)
    before = dict(os.environ)
    with slurm.without_job_env():
        assert not set(ours) & set(os.environ) and kept.items() <= os.environ.items()
    assert dict(os.environ) == before


def test_one_failure_and_a_second_signal_are_borne(scontrol, tmp_path):
    """TERM comes again after KillWait, to all that a task has started."""
    once = f"if mkdir {tmp_path}/once; then exit 1; fi; kill -TERM $$; cat {tmp_path}/answer"
    asked = scontrol(shown(), script=once)
    assert slurm.next_action() == "requeue"
    assert asked.read_text() == "show job 11\n" * 2


def test_a_refused_requeue_is_told(scontrol, capsys):
    scontrol(script="echo Requested operation is presently disabled for job 11 >&2; exit 1")
    assert not slurm.requeue()
    told = "SLURM: scontrol requeue 11: Requested operation is presently disabled for job 11\n"
    assert capsys.readouterr().err == told


@pytest.mark.parametrize(
    ("job", "said", "asks"),
    [
        (shown(), "requeued, so SLURM restarts it", True),
        (shown("COMPLETING"), "ends for good, because SLURM does not restart it", False),
        (
            shown("COMPLETING", restarts=1),
            "comes back, because SLURM restarts it by itself",
            False,
        ),
    ],
)
def test_a_batch_script_asks_again_exactly_when_it_should(scontrol, capsys, job, said, asks):
    asked = scontrol(job)
    slurm.main()
    assert capsys.readouterr().out == f"SLURM job 11: {said}\n"
    assert ("requeue 11" in asked.read_text()) is asks


@pytest.mark.parametrize(
    ("script", "why"),
    [
        ("sleep 60", "no answer in 0.2 s"),
        ("exit 3", "code 3"),
        ("echo slurm_load_jobs error: Unable to contact >&2; exit 1", "slurm_load_jobs error"),
        (None, "scontrol is not installed"),
    ],
)
def test_where_slurm_does_not_tell_a_job_ends_for_good(scontrol, monkeypatch, capsys, script, why):
    monkeypatch.setattr(slurm, "SCONTROL_SECONDS", 0.2)
    if script:
        scontrol(script=script)
    else:
        monkeypatch.setenv("PATH", "/nowhere")
    assert slurm.next_action() == "for_good"
    (said,) = capsys.readouterr().err.splitlines()
    assert said.startswith("SLURM: scontrol show job 11: ") and why in said


def test_outside_slurm_nothing_is_asked(scontrol, monkeypatch, capsys):
    asked = scontrol(shown())
    for name in ("SLURM_JOB_ID", "SLURM_JOB_PARTITION"):
        monkeypatch.delenv(name)
    assert (slurm.next_action(), slurm.grace()) == ("for_good", (None, None))
    assert not asked.exists() and capsys.readouterr().err == ""


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
    ("time", "seconds"), [("15", 15), ("01:30", 90), ("02:00:05", 7205), ("1-00:00:01", 86401)]
)
def test_grace_is_read_as_slurm_writes_it(scontrol, time, seconds):
    script = f"""case "$2" in
partition) cat <<'END'\n{PARTITION.format(time)}END\n;;
config) cat <<'END'\n{CONFIG.format("30 sec")}END\n;; esac"""
    asked = scontrol(script=script)
    assert slurm.grace() == (seconds, 30)
    assert asked.read_text() == "show partition main\nshow config\n"


@pytest.mark.parametrize(
    ("of_step", "of_job", "several"),
    [
        ("2", "2", True),
        ("1", "1", False),
        (None, "2", False),  # a batch script of two tasks
        ("2", "1", False),  # a batch script submitted from within a task
    ],
)
def test_a_batch_script_is_no_task_of_several(scontrol, monkeypatch, of_step, of_job, several):
    if of_step:
        monkeypatch.setenv("SLURM_STEP_NUM_TASKS", of_step)
    monkeypatch.setenv("SLURM_NTASKS", of_job)
    assert slurm.is_task_of_several() is several


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
