"""Tasks of SLURM as ranks, and the jobs of a sweep in SLURM's queue."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from grpo_ustat.config.schema import ConfigError
from grpo_ustat.terminal.streams import tell

# Time limit in seconds for a SLURM command. SLURM answers within 0.03 s if it is idle.
SCONTROL_SECONDS = 20.0
# Beginnings of the names of variables that belong to this job. SBATCH_ is not among them, because
# such variables are the user's preferences.
JOB_PREFIXES = ("SLURM_", "SLURMD_", "SRUN_", "SUBMITIT_")
CLUSTER_VARIABLES = ("SLURM_CONF", "SLURM_CLUSTERS", "SUBMITIT_PREEMPT_SIGNAL")


def job_id() -> str | None:
    """Return the name of this job for SLURM commands, such as 17 or 17_3; None outside SLURM."""
    array, task = (os.environ.get(f"SLURM_ARRAY_{name}_ID") for name in ("JOB", "TASK"))
    return f"{array}_{task}" if array and task else os.environ.get("SLURM_JOB_ID")


def was_restarted() -> bool:
    """Return True if SLURM has restarted this job."""
    return int(os.environ.get("SLURM_RESTART_COUNT", 0)) > 0


def is_running() -> bool:
    """Return True if this job is not ending.

    After a stop signal, a job that is preempted or near its time limit is still running. It can be
    requeued. A job that somebody cancelled is completing.
    """
    return "JobState=RUNNING" in (_query("scontrol", "show", "job", job_id() or "") or "")


@contextmanager
def without_job_env() -> Iterator[None]:
    """Remove this job's SLURM variables from the environment within the block.

    Jobs submitted within the block would otherwise inherit them.
    """
    names = [x for x in os.environ if x.startswith(JOB_PREFIXES) and x not in CLUSTER_VARIABLES]
    removed = {name: os.environ.pop(name) for name in names}
    try:
        yield
    finally:
        os.environ.update(removed)


def is_task_of_several() -> bool:
    """Return True if `srun` started this process as one of several tasks.

    The variable SLURM_PROCID is then its rank. The test uses SLURM_STEP_NUM_TASKS, because a batch
    script has SLURM_PROCID and SLURM_NTASKS too. A batch script that was submitted from a task
    inherits SLURM_STEP_NUM_TASKS, but with the value of that task.
    """
    of_step = os.environ.get("SLURM_STEP_NUM_TASKS", "1")
    return int(of_step) > 1 and of_step == os.environ.get("SLURM_NTASKS")


def submissions(folder: str) -> set[str]:
    """Return the ids of the jobs that submitit has submitted, from the names of their folders.

    Args:
        folder: submitit's folder for one of the jobs, next to the folders of the others.
    """
    return {path.name for path in Path(folder).parent.glob("[0-9]*")}


def await_end(jobs: set[str], interval: float = 30) -> None:
    """Wait until none of the given jobs is pending or running.

    Args:
        jobs: names of the jobs in the form of `job_id`.
        interval: seconds between two checks. They are rare, because a sweep can take days.
    """
    while jobs & queue():
        time.sleep(interval)


def queue() -> set[str]:
    """Return the user's other pending or running jobs, as names like those of `job_id`.

    The result is empty if SLURM does not answer.
    """
    jobs = _query("squeue", "--me", "--array", "-h", "-o", "%i") or ""
    return set(jobs.split()) - {job_id()}


def _query(*words: str) -> str | None:
    """Return the output of a SLURM command; if it fails, print the reason and return None."""
    why = f"{words[0]} is not installed here"
    if shutil.which(words[0]):
        try:
            process = subprocess.run(
                words, capture_output=True, text=True, timeout=SCONTROL_SECONDS
            )
            if process.returncode == 0:
                return process.stdout
            why = " ".join(process.stderr.split()) or f"code {process.returncode}"
        except subprocess.TimeoutExpired:
            why = f"no answer in {SCONTROL_SECONDS:g} s"
    tell(f"SLURM: {' '.join(words)}: {why}", file=sys.stderr)
    return None


def join_tasks() -> None:
    """Make this process a rank if SLURM or submitit started it as one of several tasks.

    Raises:
        ConfigError: If SLURM does not list the hosts of the tasks.
    """
    if "RANK" in os.environ or _join_submitit() or not is_task_of_several():
        return
    job, step = int(os.environ["SLURM_JOB_ID"]), int(os.environ["SLURM_STEP_ID"])
    nodes = os.environ["SLURM_STEP_NODELIST"]
    command = ["scontrol", "show", "hostnames", nodes]
    try:
        process = subprocess.run(command, capture_output=True, text=True, timeout=60, check=True)
    except (OSError, subprocess.SubprocessError) as error:
        raise ConfigError(
            f"scontrol could not list the hosts {nodes} ({error}): start the ranks with torchrun "
            "and --master_addr"
        ) from error
    os.environ.update(
        RANK=os.environ["SLURM_PROCID"],
        WORLD_SIZE=os.environ["SLURM_STEP_NUM_TASKS"],
        LOCAL_RANK=os.environ["SLURM_LOCALID"],
        MASTER_ADDR=process.stdout.split()[0],
        # These ports are below the range that systems use for outgoing connections.
        MASTER_PORT=str(20000 + (7919 * job + step) % 12000),
    )


def _join_submitit() -> bool:
    """Return True if submitit started this task; make it a rank if it is one of several tasks."""
    if "SUBMITIT_EXECUTOR" not in os.environ:
        return False
    import submitit

    if submitit.JobEnvironment().num_tasks > 1:
        # All devices stay visible, because Accelerate chooses one by the local rank.
        submitit.helpers.TorchDistributedEnvironment().export(set_cuda_visible_devices=False)
    return True
