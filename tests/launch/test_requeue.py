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
    """A job under submitit as this process sees it: whether it is `running`, what was `done`."""
    seen = SimpleNamespace(running=True, done=[], main=True)

    class Handler(SignalHandler):
        def __init__(self):
            pass

        def checkpoint_and_try_requeue(self, number, frame=None):
            seen.done.append("requeue")
            raise SystemExit(-1)

    monkeypatch.setenv("SUBMITIT_EXECUTOR", "slurm")
    monkeypatch.setattr(slurm, "is_running", lambda: seen.running)
    monkeypatch.setattr(submitit, "is_main", lambda: seen.main)
    seen.number = signal.Signals[f"SIG{JobEnvironment.USR_SIG}"]
    before = signal.signal(seen.number, Handler().checkpoint_and_try_requeue)
    yield seen
    signal.signal(seen.number, before)


def left():
    """The exit code."""
    with pytest.raises(SystemExit) as left:
        submitit.leave(Stopped("stopped by SIGTERM"))
    return left.value.code


@pytest.mark.parametrize("main, code, done", [(True, -1, ["requeue"]), (False, 75, [])])
def test_the_first_rank_requeues(job, main, code, done):
    job.main = main
    assert left() == code and job.done == done


def test_a_cancelled_job_leaves_a_result(job):
    job.running = False
    with pytest.raises(submitit.EndedForGood, match="cancelled"):
        submitit.leave(Stopped("stopped by SIGTERM"))
    assert job.done == []


def test_without_slurm_submitits_handler_alone_decides(job, monkeypatch):
    """Not even within a job of SLURM, as its number in the environment says."""
    job.running = False
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
