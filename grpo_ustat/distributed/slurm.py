"""State of this process's SLURM job, and prediction of what follows a signal.

The table shows which signals the processes of a job receive at each event, and what
`scontrol show job` then prints. It was measured on SLURM 22.05 with preemption by partition,
PreemptMode=REQUEUE and a GraceTime.

| event | batch script and its children | tasks of srun | JobState and other fields |
|---|---|---|---|
| `scancel ID` | CONT, TERM | CONT, TERM | COMPLETING, Restarts unchanged |
| `scontrol requeue ID` | CONT, TERM | CONT, TERM | COMPLETING, Restarts increased by one |
| preemption | nothing | TERM, CONT | RUNNING, PreemptTime |
| end of its GraceTime | CONT, TERM | CONT, TERM | COMPLETING, Restarts increased by one |
| `--signal=USR2@SECONDS` before the limit | nothing | USR2 | RUNNING |
| `--signal=B:USR1@SECONDS` | USR1, only the script | nothing | RUNNING |
| `scancel --signal=USR2 ID` | nothing | USR2 | RUNNING |
| time limit | CONT, TERM | CONT, TERM | COMPLETING, Reason=TimeLimit |

A signal to a task also reaches all processes that the task has started, in any session. A process
can receive TERM twice. KILL follows a TERM after the time KillWait; only the first TERM of a
preemption is not followed by KILL. If a preempted job ends by itself, with any exit code, SLURM
restarts it only on request.
"""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Literal, NamedTuple

from grpo_ustat.config.schema import ConfigError
from grpo_ustat.terminal.streams import tell

Ending = Literal["requeue", "comes_back", "for_good"]
# States of a job that is not ending.
WORKING_STATES = ("RUNNING", "SIGNALING", "SUSPENDED", "STOPPED")
# Time limit in seconds for a SLURM command. SLURM answers within 0.03 s if it is idle.
SCONTROL_SECONDS = 20.0
# Shell command that runs a SLURM command so that it ignores the signals TERM, USR1 and USR2. A stop
# signal reaches every process that a task has started and would otherwise end the SLURM command.
IGNORE_SIGNALS = 'trap "" TERM USR1 USR2; exec "$@"'
# Beginnings of the names of variables that belong to this job. SBATCH_ is not among them, because
# such variables are the user's preferences.
JOB_PREFIXES = ("SLURM_", "SLURMD_", "SRUN_", "SUBMITIT_")
CLUSTER_VARIABLES = ("SLURM_CONF", "SLURM_CLUSTERS", "SUBMITIT_PREEMPT_SIGNAL")
# First record that SLURM returned for each job.
_first_record: dict[str, dict[str, str]] = {}


class Grace(NamedTuple):
    """Grace periods of this cluster in seconds; None if SLURM does not report them."""

    # Time between the first TERM of a preemption, which only srun's tasks receive, and the next
    # TERM. It is the GraceTime of the partition; a QOS can have a different one.
    preempted: float | None
    # Time between any other TERM and the KILL that follows it. It is the cluster's KillWait.
    killed: float | None


def job_id() -> str | None:
    """Return the number of this job, not the number of its array; None outside SLURM.

    Use `address` instead for SLURM commands that concern only this job. The job that starts last in
    an array has the same number as the array, so that `scontrol requeue` with this number requeues
    the whole array.
    """
    return os.environ.get("SLURM_JOB_ID")


def address() -> str | None:
    """Return the unique name of this job for SLURM commands, such as 17 or 17_3.

    The result is None outside SLURM. The number of the array is read from SLURM's record of the
    job. If this job was submitted from another job, the environment variables may be those of the
    other job.
    """
    array, task = (os.environ.get(f"SLURM_ARRAY_{name}_ID") for name in ("JOB", "TASK"))
    if not (job_id() and array and task):
        return job_id()
    record = _first() or {"ArrayJobId": array, "ArrayTaskId": task}
    inherited = "ArrayJobId" not in record
    return job_id() if inherited else f"{record['ArrayJobId']}_{record['ArrayTaskId']}"


def restart_count() -> int:
    """Return the number of times that SLURM has restarted this job.

    The number is in an environment variable, which SLURM sets at the first restart. If this job was
    submitted from another job, the variable may be that of the other job. The result is therefore
    at most the first count in SLURM's record of this job. The current count would be wrong, because
    it increases as soon as the next restart is due.
    """
    count = int(os.environ.get("SLURM_RESTART_COUNT", 0))
    return min(count, int(_first().get("Restarts", count))) if count and job_id() else count


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


def next_action() -> Ending:
    """Predict what happens to this job if this process ends now, after a stop signal.

    Returns:
        One of three words:

        - `requeue`: SLURM restarts the job only on request. This is so for a job that is still
          running, because it was preempted or warned, and for a job that reached its time limit.
        - `comes_back`: SLURM restarts the job by itself. It then counts one more restart than at
          the start of this process.
        - `for_good`: the job is not restarted. Somebody cancelled it (a requeue would undo this),
          SLURM returns no record of it, or it cannot be restarted because it was submitted with
          `--no-requeue`, by `srun` or by `salloc`.
    """
    job = _job()
    if int(job.get("Restarts", 0)) > restart_count():
        return "comes_back"
    asks = job.get("JobState") in WORKING_STATES or job.get("Reason") == "TimeLimit"
    able = job.get("Requeue") == "1" and job.get("BatchFlag") == "1"
    return "requeue" if able and asks else "for_good"


def requeue() -> bool:
    """Ask SLURM to restart this job; if SLURM refuses, print the reason and return False.

    To restart the job, SLURM first ends it: it sends CONT and TERM to all processes, and KILL after
    the time KillWait.
    """
    return _query("scontrol", "requeue", address() or "") is not None


def submissions(folder: str) -> set[str]:
    """Return the ids of the jobs that submitit has submitted, from the names of their folders.

    Args:
        folder: submitit's folder for one of the jobs, next to the folders of the others.
    """
    return {path.name for path in Path(folder).parent.glob("[0-9]*")}


def await_end(jobs: set[str], interval: float = 30) -> None:
    """Wait until none of the given jobs is pending or running.

    Args:
        jobs: names of the jobs in the form of `address`.
        interval: seconds between two checks. They are rare, because a sweep can take days.
    """
    while jobs & queue():
        time.sleep(interval)


def queue() -> set[str]:
    """Return the user's other pending or running jobs, as names like those of `address`.

    The result is empty if SLURM does not answer.
    """
    jobs = _query("squeue", "--me", "--array", "-h", "-o", "%i") or ""
    return set(jobs.split()) - {address()}


def grace() -> Grace:
    """Return the grace periods of this cluster; see `Grace`."""
    partition = os.environ.get("SLURM_JOB_PARTITION")
    if not partition:
        return Grace(None, None)
    of_partition = _query("scontrol", "show", "partition", partition) or ""
    of_cluster = _query("scontrol", "show", "config") or ""
    return Grace(
        _seconds(re.search(r"\bGraceTime=([\d:-]+)", of_partition)),
        _seconds(re.search(r"(?m)^KillWait\s*=\s*([\d:-]+)", of_cluster)),
    )


def _job() -> dict[str, str]:
    """Return the current fields of this job (JobId, JobState, Reason, ...); empty if unknown."""
    job = job_id()
    if not job:
        return {}
    # If an array has the same number, SLURM prints the records of all its jobs.
    text = _query("scontrol", "show", "job", job) or ""
    records = re.split(r"(?m)^(?=JobId=)", text)
    record_text = next((x for x in records if re.match(rf"JobId={job}\b", x)), "")
    # Only parts without names and comments are read, because those can contain any text.
    first = re.split(r" JobName=|\n", record_text, maxsplit=1)[0]
    lines = re.findall(r"(?m)^\s+((?:JobState|Requeue)=.*)$", record_text)[:2]
    words = " ".join([first, *lines]).split()
    record = dict(word.split("=", 1) for word in words if "=" in word)
    _first_record[job] = _first_record.get(job) or record
    return record


def _first() -> dict[str, str]:
    """Return the first record that SLURM returned for this job; empty if there is none."""
    if job_id() not in _first_record:
        _job()
    return _first_record.get(job_id() or "", {})


def _query(*words: str) -> str | None:
    """Return the output of a SLURM command; if it fails twice, print the reason and return None."""
    why = f"{words[0]} is not installed here"
    for _ in range(2 if shutil.which(words[0]) else 0):
        try:
            process = subprocess.run(
                ["sh", "-c", IGNORE_SIGNALS, "sh", *words],
                capture_output=True,
                text=True,
                timeout=SCONTROL_SECONDS,
            )
        except subprocess.TimeoutExpired:
            why = f"no answer in {SCONTROL_SECONDS:g} s"
            break
        if process.returncode == 0:
            return process.stdout
        why = " ".join(process.stderr.split()) or f"code {process.returncode}"
    tell(f"SLURM: {' '.join(words)}: {why}", file=sys.stderr)
    return None


def _seconds(match: re.Match[str] | None) -> float | None:
    """Parse a duration such as `15`, `01:30`, `02:00:00` or `1-00:00:00` into seconds."""
    if not match:
        return None
    days, clock = ("0-" + match.group(1)).split("-")[-2:]
    total = 0
    for part in clock.split(":"):
        total = 60 * total + int(part)
    return float(86400 * int(days) + total)


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


def main() -> None:
    """Restart (requeue) a batch job whose program was stopped and has saved its work.

    The job is requeued only if this is necessary and allowed; see `next_action`. What will happen
    to the job is printed.
    """
    ending = next_action()
    if ending == "requeue" and not requeue():
        ending = "for_good"
    texts = {
        "requeue": "requeued, so SLURM restarts it",
        "comes_back": "comes back, because SLURM restarts it by itself",
        "for_good": "ends for good, because SLURM does not restart it",
    }
    tell(f"SLURM job {address()}: {texts[ending]}")


if __name__ == "__main__":
    main()
