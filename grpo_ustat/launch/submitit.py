"""Jobs of submitit, and the end of a stopped run: exit code 75, or a requeue under submitit."""

from __future__ import annotations

import os
import signal
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NoReturn

from grpo_ustat.distributed import slurm
from grpo_ustat.distributed.ranks import is_main
from grpo_ustat.distributed.signals import EXIT_CODE, Stopped
from grpo_ustat.terminal.streams import tell

# Seconds that the first rank has to requeue the job.
REQUEUE_SECONDS = 60.0
# Seconds between two looks at the job's state.
REQUEUE_LOOK_SECONDS = 5


# Fields of a launcher that are not parameters of a job.
NO_PARAMETERS = ("_target_", "submitit_folder", "max_num_timeout")
# Parameters with the same name for every cluster of submitit.
SHARED_PARAMETERS = (
    "timeout_min", "cpus_per_task", "gpus_per_node", "tasks_per_node", "mem_gb", "nodes", "name",
    "stderr_to_stdout",
)  # fmt: skip


class EndedForGood(RuntimeError):
    """End of a sweep's job that will not start again, such as a cancelled job."""


def submit(jobs: Sequence[Callable[[], None]], cluster: str, launcher: Mapping[str, Any]) -> Any:
    """Submit jobs, as one array on SLURM; return them as submitit's.

    Args:
        jobs: each with a `checkpoint`, see `resubmission`.
        cluster: `slurm`, or `local` for processes on this machine.
        launcher: fields of `conf/hydra/launcher/`.
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
    """Return a job as submitit requeues it."""
    from submitit.helpers import DelayedSubmission

    return DelayedSubmission(job)


def leave(stopped: Stopped, on_existing: str = "resume") -> NoReturn:
    """Print that the work can go on, and end this process.

    Under submitit, its signal handler requeues the job. This function calls the handler unless
    SLURM requeues the job itself or has ended it for good. In the last case it raises an exception
    as the job's result, because the submitting process waits for one.

    Args:
        on_existing: setting of the run; outside SLURM only `resume` continues it.

    Raises:
        SystemExit: code 75; under submitit its handler raises it after the requeue.
        EndedForGood, UncompletedJobError: under submitit, if the job does not start again.
    """
    if is_main():
        again = on_existing == "resume" or slurm.job_id() is not None
        how = "" if again else " with on_existing=resume"
        tell(f"{stopped}; the same command{how} goes on from there", file=sys.stderr)
    if "SUBMITIT_EXECUTOR" not in os.environ:
        raise SystemExit(EXIT_CODE)
    from submitit.core.job_environment import JobEnvironment, SignalHandler

    number = signal.Signals[f"SIG{JobEnvironment.USR_SIG}"]
    handler = signal.getsignal(number)
    if not (callable(handler) and isinstance(getattr(handler, "__self__", None), SignalHandler)):
        # A command started by such a job inherits only the environment of submitit.
        raise SystemExit(EXIT_CODE)
    of_slurm = os.environ["SUBMITIT_EXECUTOR"] == "slurm"
    action = slurm.next_action() if of_slurm else "requeue"
    if action == "for_good":
        raise EndedForGood(f"{stopped}; the job was cancelled or cannot be requeued")
    if action == "requeue" and is_main():
        handler(number, None)
    if action == "requeue" and of_slurm:
        # The first rank may have reasons not to requeue, so wait for it.
        until = time.monotonic() + REQUEUE_SECONDS
        while slurm.next_action() == "requeue":
            if time.monotonic() > until:
                raise EndedForGood(f"{stopped}; the job was not requeued")
            time.sleep(REQUEUE_LOOK_SECONDS)
    raise SystemExit(EXIT_CODE)
