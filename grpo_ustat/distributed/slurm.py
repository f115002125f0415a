"""SLURM's information about this process's job, and prediction of the job's next state.

The table shows which signals the processes receive at each event, and what `scontrol show job` then
prints. It was measured on SLURM 22.05 with preemption by partition, PreemptMode=REQUEUE and a
GraceTime.

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
can receive TERM twice. After KillWait, KILL follows every TERM except the first one of a
preemption. If a preempted job ends by itself, with any exit code, SLURM restarts it only on
request.
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
WORKING_STATES = ("RUNNING", "SIGNALING", "SUSPENDED", "STOPPED")
# Time limit in seconds for a SLURM command; an idle controller answers within 0.03 s.
SCONTROL_SECONDS = 20.0
# Shell command that runs a program and ignores the signals TERM, USR1 and USR2. Otherwise a second
# signal would end the program, because it reaches every process that a task has started.
IGNORE_SIGNALS = 'trap "" TERM USR1 USR2; exec "$@"'
# SBATCH_ variables are kept, because they are the user's preferences.
JOB_PREFIXES = ("SLURM_", "SLURMD_", "SRUN_", "SUBMITIT_")
CLUSTER_VARIABLES = ("SLURM_CONF", "SLURM_CLUSTERS", "SUBMITIT_PREEMPT_SIGNAL")
# First record that SLURM returned for each job.
_first_record: dict[str, dict[str, str]] = {}


class Grace(NamedTuple):
    """Grace periods of this cluster in seconds; None if SLURM does not report them."""

    # Time between the TERM that a preemption sends to srun's tasks and the next TERM. This is the
    # partition's GraceTime (a QOS can have a different one). A batch script has no such grace
    # period.
    preempted: float | None
    # Time between any other TERM and the KILL that follows. This is the cluster's KillWait.
    killed: float | None


def job_id() -> str | None:
    """Return the number of this job, not the number of its array; None outside SLURM.

    The number of the job that starts last in an array is also the number of the array, so `scontrol
    requeue` with this number requeues the whole array. Use `address` for commands that concern only
    this job.
    """
    return os.environ.get("SLURM_JOB_ID")


def address() -> str | None:
    """Return the unique name of this job for SLURM commands, such as 17 or 17_3.

    The result is None outside SLURM. The array is read from SLURM's record, because the environment
    can name the array of another job from which this job was submitted.
    """
    array, task = (os.environ.get(f"SLURM_ARRAY_{name}_ID") for name in ("JOB", "TASK"))
    if not (job_id() and array and task):
        return job_id()
    record = _first() or {"ArrayJobId": array, "ArrayTaskId": task}
    inherited = "ArrayJobId" not in record
    return job_id() if inherited else f"{record['ArrayJobId']}_{record['ArrayTaskId']}"


def restart_count() -> int:
    """Return the number of times that SLURM has restarted this job.

    SLURM sets the environment variable only at the first restart. Before that, the variable can
    come from another job from which this job was submitted. In that case the count in SLURM's
    record is smaller. The count in the record increases by one as soon as a restart is due.
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
    """Return True if `srun` started this process as one of several tasks; SLURM_PROCID is its rank.

    A batch script also has SLURM_PROCID and SLURM_NTASKS. It has SLURM_STEP_NUM_TASKS only if it
    was submitted from a task, and the value then belongs to that task.
    """
    of_step = os.environ.get("SLURM_STEP_NUM_TASKS", "1")
    return int(of_step) > 1 and of_step == os.environ.get("SLURM_NTASKS")


def next_action() -> Ending:
    """Predict what happens to this job if this process ends now, after a signal to stop.

    A job that is still running was preempted or warned, and must call `requeue`. A job that reached
    its time limit must do the same. SLURM restarts a job that is ending if it counts one more
    restart than at the start of this process. Otherwise somebody cancelled the job, and a requeue
    would undo the cancellation.

    Returns:
        `requeue` if SLURM restarts the job only on request. `comes_back` if SLURM restarts the job
        without a request. `for_good` if the job must not or cannot be restarted, because it was
        cancelled, SLURM returns no record, or the job was submitted with `--no-requeue`, by `srun`
        or by `salloc`.
    """
    job = _job()
    if int(job.get("Restarts", 0)) > restart_count():
        return "comes_back"
    asks = job.get("JobState") in WORKING_STATES or job.get("Reason") == "TimeLimit"
    able = job.get("Requeue") == "1" and job.get("BatchFlag") == "1"
    return "requeue" if able and asks else "for_good"


def requeue() -> bool:
    """Ask SLURM to restart this job; if SLURM refuses, print the reason and return False.

    SLURM then ends the rest of the job by sending CONT and TERM to all processes, and KILL after
    KillWait.
    """
    return _query("scontrol", "requeue", address() or "") is not None


def submissions(folder: str) -> set[str]:
    """Return the ids of jobs that have a folder beside `folder`, submitit's folder for one job."""
    return {path.name for path in Path(folder).parent.glob("[0-9]*")}


def await_end(jobs: set[str], interval: float = 30) -> None:
    """Wait until none of the given jobs is pending or running.

    Args:
        jobs: names of the jobs in the form of `address`.
        interval: time between checks in seconds; it is long because a sweep can take days.
    """
    while jobs & queue():
        time.sleep(interval)


def queue() -> set[str]:
    """Return the user's other pending or running jobs, named as by `address`; empty if unknown."""
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
    # If the number is also that of an array, SLURM prints all jobs of the array.
    text = _query("scontrol", "show", "job", job) or ""
    records = re.split(r"(?m)^(?=JobId=)", text)
    record_text = next((x for x in records if re.match(rf"JobId={job}\b", x)), "")
    # Skip names and comments, which can contain any text.
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
    """Return the output of a SLURM command; after two failures, print a line and return None."""
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
    """Set the environment of a rank if this process is one of several tasks."""
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
        # The resulting ports are below the range of ephemeral ports.
        MASTER_PORT=str(20000 + (7919 * job + step) % 12000),
    )


def _join_submitit() -> bool:
    """Return True if submitit started this task; make it a rank if it is one of several tasks."""
    if "SUBMITIT_EXECUTOR" not in os.environ:
        return False
    import submitit

    if submitit.JobEnvironment().num_tasks > 1:
        # Leave all devices visible, because Accelerate chooses among them by local rank.
        submitit.helpers.TorchDistributedEnvironment().export(set_cuda_visible_devices=False)
    return True


def main() -> None:
    """Requeue a batch job if necessary, after its program was stopped and has saved its work.

    The job's next state is printed.
    """
    ending = next_action()
    if ending == "requeue" and not requeue():
        ending = "for_good"
    texts = {"requeue": "requeued", "comes_back": "comes back", "for_good": "ends for good"}
    tell(f"SLURM job {address()}: {texts[ending]}")


if __name__ == "__main__":
    main()
