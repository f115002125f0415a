"""How a stopped run leaves: what submitit's handler is asked for, and by which rank."""

from __future__ import annotations

import signal
from types import SimpleNamespace

import pytest
from submitit.core.job_environment import JobEnvironment, SignalHandler

from grpo_ustat.distributed import slurm
from grpo_ustat.distributed.signals import Stopped, StopRequest
from grpo_ustat.launch import submitit


@pytest.fixture
def job(monkeypatch):
    """A job under submitit as this process sees it: `endings` to come, what was `done`."""
    seen = SimpleNamespace(endings=[], done=[], main=True)

    class Handler(SignalHandler):
        def __init__(self):
            pass

        def checkpoint_and_try_requeue(self, number, frame=None):
            seen.done.append("requeue")
            raise SystemExit(-1)

    def next_action():
        seen.done.append("asked")
        return seen.endings.pop(0)

    monkeypatch.setenv("SUBMITIT_EXECUTOR", "slurm")
    monkeypatch.setattr(slurm, "next_action", next_action)
    monkeypatch.setattr(submitit, "is_main", lambda: seen.main)
    monkeypatch.setattr(submitit.time, "sleep", lambda s: seen.done.append(f"slept {s} s"))
    seen.number = signal.Signals[f"SIG{JobEnvironment.USR_SIG}"]
    before = signal.signal(seen.number, Handler().checkpoint_and_try_requeue)
    yield seen
    signal.signal(seen.number, before)


def left():
    """The exit code."""
    with pytest.raises(SystemExit) as left:
        submitit.leave(Stopped("stopped by SIGTERM"))
    return left.value.code


def test_the_first_rank_requeues(job):
    job.endings = ["requeue"]
    assert left() == -1 and job.done == ["asked", "requeue"]


def test_the_others_wait_for_it(job):
    job.endings, job.main = ["requeue", "requeue", "requeue", "comes_back"], False
    assert left() == 75
    assert job.done == ["asked", "asked", "slept 5 s", "asked", "slept 5 s", "asked"]


def test_the_others_do_not_wait_for_ever(job, monkeypatch):
    clock = iter(range(0, 1000, 30))
    monkeypatch.setattr(submitit.time, "monotonic", lambda: next(clock))
    job.endings, job.main = ["requeue"] * 9, False
    with pytest.raises(submitit.EndedForGood, match="SIGTERM; the job was not requeued"):
        submitit.leave(Stopped("stopped by SIGTERM"))
    assert len(job.endings) == 9 - 4  # at 0 (before the first look), 30, 60 and 90 s


@pytest.mark.parametrize("main", [True, False])
def test_a_job_that_comes_back_is_not_asked_for(job, main):
    job.endings, job.main = ["comes_back"], main
    assert left() == 75 and job.done == ["asked"]


@pytest.mark.parametrize("main", [True, False])
def test_a_cancelled_job_leaves_a_result(job, main):
    job.endings, job.main = ["for_good"], main
    with pytest.raises(submitit.EndedForGood, match="cancelled"):
        submitit.leave(Stopped("stopped by SIGTERM"))
    assert job.done == ["asked"]


def test_without_slurm_submitits_handler_alone_decides(job, monkeypatch):
    """Not even within a job of SLURM, as its number in the environment says."""
    monkeypatch.setenv("SUBMITIT_EXECUTOR", "local")
    monkeypatch.setenv("SLURM_JOB_ID", "7")
    assert left() == -1 and job.done == ["requeue"]
    job.main = False
    assert left() == 75 and job.done == ["requeue"]


@pytest.mark.parametrize("handler", [signal.SIG_DFL, signal.SIG_IGN, StopRequest()._note])
def test_a_command_within_such_a_job_just_ends(job, handler):
    """It inherits the environment, not submitit's handler; its own notes signals."""
    signal.signal(job.number, handler)
    assert left() == 75 and job.done == []


@pytest.mark.parametrize(
    ("on_existing", "within", "said"),
    [
        ("resume", None, "the same command continues"),
        ("overwrite", None, "the same command with on_existing=resume continues"),
        ("error", None, "the same command with on_existing=resume continues"),
        ("overwrite", "7", "the same command continues"),  # started again by SLURM it does
    ],
)
def test_what_to_type_is_told(monkeypatch, capsys, on_existing, within, said):
    for name in ("SUBMITIT_EXECUTOR", "SLURM_JOB_ID"):
        monkeypatch.delenv(name, raising=False)
    if within:
        monkeypatch.setenv("SLURM_JOB_ID", within)
    with pytest.raises(SystemExit):
        submitit.leave(Stopped("stopped by SIGTERM"), on_existing)
    assert capsys.readouterr().err == f"stopped by SIGTERM; {said} from there\n"
