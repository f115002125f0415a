"""Submission of jobs with submitit, and end of a process whose run was stopped.

A stopped run ends with exit code 75, or as a job that the scheduler restarts (requeues).
"""

from __future__ import annotations

import os
import signal
import sys
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NoReturn

from grpo_ustat.distributed import slurm
from grpo_ustat.distributed.ranks import is_main
from grpo_ustat.distributed.signals import EXIT_CODE, Stopped
from grpo_ustat.terminal.streams import tell

# Fields of a Hydra launcher that are not parameters of a job.
NO_PARAMETERS = ("_target_", "submitit_folder", "max_num_timeout")
# Parameters of a job that submitit gives the same name for all types of cluster.
SHARED_PARAMETERS = (
    "timeout_min", "cpus_per_task", "gpus_per_node", "tasks_per_node", "mem_gb", "nodes", "name",
    "stderr_to_stdout",
)  # fmt: skip


class EndedForGood(RuntimeError):
    """Error of a sweep's job that was stopped and is not restarted, such as a cancelled job."""


def submit(jobs: Sequence[Callable[[], None]], cluster: str, launcher: Mapping[str, Any]) -> Any:
    """Submit jobs, as one array on SLURM, and return submitit's job objects.

    Args:
        jobs: functions to call, with a method `checkpoint` that submitit calls when a job is
            interrupted; see `resubmission`.
        cluster: `slurm`, or `local` for processes on this machine.
        launcher: fields of a file in `conf/hydra/launcher/`.
    """
    import submitit

    timeouts = {"slurm_max_num_timeout": launcher["max_num_timeout"]} if cluster == "slurm" else {}
    executor = submitit.AutoExecutor(launcher["submitit_folder"], cluster=cluster, **timeouts)
    executor.update_parameters(
        **{
            name if name in SHARED_PARAMETERS else f"{cluster}_{name}": value
            for name, value in launcher.items()
            if name not in NO_PARAMETERS
        }
    )
    with executor.batch():
        return [executor.submit(job) for job in jobs]


def resubmission(job: Callable[[], None]) -> Any:
    """Wrap a job for submitit, as the result of `checkpoint`, so that submitit requeues it."""
    from submitit.helpers import DelayedSubmission

    return DelayedSubmission(job)


def leave(stopped: Stopped, on_existing: str = "resume") -> NoReturn:
    """Print that the work can be continued, and end this process.

    In a job of submitit that was preempted or is near its time limit, this function calls
    submitit's signal handler, which requeues the job. If the job is ending, for example because it
    was cancelled, this function raises an exception. It becomes the job's result, for which the
    submitting process waits.

    Args:
        stopped: exception that ended the run.
        on_existing: setting `on_existing` of the run. Outside SLURM, the same command continues the
            run only if this is `resume`.

    Raises:
        SystemExit: the process ends with code 75. In a job of submitit, the handler raises this
            exception after the requeue.
        EndedForGood, UncompletedJobError: the job of submitit is not restarted.
    """
    if is_main():
        again = on_existing == "resume" or slurm.job_id() is not None
        how = "" if again else " with on_existing=resume"
        tell(f"{stopped}; the same command{how} continues from there", file=sys.stderr)
    if "SUBMITIT_EXECUTOR" not in os.environ:
        raise SystemExit(EXIT_CODE)
    from submitit.core.job_environment import JobEnvironment, SignalHandler

    number = signal.Signals[f"SIG{JobEnvironment.USR_SIG}"]
    handler = signal.getsignal(number)
    if not (callable(handler) and isinstance(getattr(handler, "__self__", None), SignalHandler)):
        # A command that a job of submitit starts inherits submitit's environment variables, but not
        # its signal handler.
        raise SystemExit(EXIT_CODE)
    if os.environ["SUBMITIT_EXECUTOR"] == "slurm" and not slurm.is_running():
        raise EndedForGood(f"{stopped}; the job was cancelled or is ending")
    if is_main():
        handler(number, None)
    raise SystemExit(EXIT_CODE)
