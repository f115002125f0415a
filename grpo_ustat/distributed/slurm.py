"""SLURM's information about the job in which this process runs, and the next state of the job.

Recipients of each signal, and the output of `scontrol show job` afterwards (measured on SLURM
22.05, preemption by partition with PreemptMode=REQUEUE and a GraceTime):

| event | batch script and its children | tasks of srun | JobState, what else |
|---|---|---|---|
| `scancel ID` | CONT, TERM | CONT, TERM | COMPLETING, Restarts as before |
| `scontrol requeue ID` | CONT, TERM | CONT, TERM | COMPLETING, Restarts one more |
| preemption | nothing | TERM, CONT | RUNNING, PreemptTime |
| end of its GraceTime | CONT, TERM | CONT, TERM | COMPLETING, Restarts one more |
| `--signal=USR2@SECONDS` before the limit | nothing | USR2 | RUNNING |
| `--signal=B:USR1@SECONDS` | USR1 to the script alone | nothing | RUNNING |
| `scancel --signal=USR2 ID` | nothing | USR2 | RUNNING |
| time limit | CONT, TERM | CONT, TERM | COMPLETING, Reason=TimeLimit |

Tasks are signalled with all that they have started, in whatever session. TERM may come twice, and
is followed by KILL after KillWait, except the first TERM of a preemption. A job that ends by itself
while preempted, with any exit code, does not come back unless it asks.
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
# Seconds for scontrol to answer; on an idle controller it takes at most 0.03.
SCONTROL_SECONDS = 20.0
# A shell that ignores signals, as what it runs then does: a second signal reaches every process
# that a task has started.
IGNORE_SIGNALS = 'trap "" TERM USR1 USR2; exec "$@"'
# Variables of SBATCH_ stay: they are the user's preferences.
JOB_PREFIXES = ("SLURM_", "SLURMD_", "SRUN_", "SUBMITIT_")
CLUSTER_VARIABLES = ("SLURM_CONF", "SLURM_CLUSTERS", "SUBMITIT_PREEMPT_SIGNAL")
# SLURM's first record of each job.
_first_record: dict[str, dict[str, str]] = {}


class Grace(NamedTuple):
    """Seconds that this cluster grants; None if SLURM does not report them."""

    # Time between the TERM that a preemption sends to srun's tasks and the next TERM: the
    # partition's GraceTime (a QOS may have its own). A batch script gets no such time.
    preempted: float | None
    # Time between any other TERM and KILL, the cluster's KillWait.
    killed: float | None


def job_id() -> str | None:
    """Return the job's number, not the number of its array; None outside SLURM.

    The last job of an array to start has the array's number, so `scontrol requeue` with this number
    requeues the whole array. Use `address` for commands that concern only this job.
    """
    return os.environ.get("SLURM_JOB_ID")


def address() -> str | None:
    """Return the unique name of this job in SLURM's commands, such as 17 or 17_3.

    None outside SLURM. The environment may name the array of another job, from which this one was
    submitted, so SLURM's record decides.
    """
    array, task = (os.environ.get(f"SLURM_ARRAY_{name}_ID") for name in ("JOB", "TASK"))
    if not (job_id() and array and task):
        return job_id()
    record = _first() or {"ArrayJobId": array, "ArrayTaskId": task}
    inherited = "ArrayJobId" not in record
    return job_id() if inherited else f"{record['ArrayJobId']}_{record['ArrayTaskId']}"


def restart_count() -> int:
    """Return the number of times that SLURM has started this job again.

    SLURM sets the variable only from the first restart on. Until then it may come from another job,
    from which this one was submitted. In that case SLURM's own count, which grows by one as soon as
    a restart is due, is smaller.
    """
    count = int(os.environ.get("SLURM_RESTART_COUNT", 0))
    return min(count, int(_first().get("Restarts", count))) if count and job_id() else count


@contextmanager
def without_job_env() -> Iterator[None]:
    """Remove SLURM's variables of this job from the environment, and restore them at the end.

    Jobs submitted within would inherit them.
    """
    names = [x for x in os.environ if x.startswith(JOB_PREFIXES) and x not in CLUSTER_VARIABLES]
    removed = {name: os.environ.pop(name) for name in names}
    try:
        yield
    finally:
        os.environ.update(removed)


def is_task_of_several() -> bool:
    """Return True if `srun` started this process as one of several tasks; its rank is SLURM_PROCID.

    A batch script also has SLURM_PROCID and SLURM_NTASKS. It has SLURM_STEP_NUM_TASKS only if it
    was submitted from a task, and then the value belongs to that task.
    """
    of_step = os.environ.get("SLURM_STEP_NUM_TASKS", "1")
    return int(of_step) > 1 and of_step == os.environ.get("SLURM_NTASKS")


def next_action() -> Ending:
    """Predict what happens to this job if this process ends now, after a signal to stop.

    A job that still runs was preempted or warned: it must ask, by `requeue`. So must a job that
    reached its time limit. A job that is being removed comes back if SLURM counts one more restart
    than at the start of this process; otherwise somebody cancelled it, and a request would undo
    that.

    Returns:
        `requeue`: the job ends for good unless it asks for a restart. `comes_back`: SLURM restarts
        it by itself. `for_good`: it must not or cannot restart, because SLURM gives no record, or
        because it was submitted with `--no-requeue` or by `srun` and `salloc`.
    """
    job = _job()
    if int(job.get("Restarts", 0)) > restart_count():
        return "comes_back"
    asks = job.get("JobState") in WORKING_STATES or job.get("Reason") == "TimeLimit"
    able = job.get("Requeue") == "1" and job.get("BatchFlag") == "1"
    return "requeue" if able and asks else "for_good"


def requeue() -> bool:
    """Ask SLURM to start this job again; return False, and print the reason, if it refuses.

    SLURM then ends the rest of the job: CONT and TERM to all processes, KILL after KillWait.
    """
    return _query("scontrol", "requeue", address() or "") is not None


def submissions(folder: str) -> set[str]:
    """Return the jobs that submitit has submitted with `folder`/JOB as the place of its files."""
    return {path.name for path in Path(folder).parent.glob("[0-9]*")}


def await_end(jobs: set[str], interval: float = 30) -> None:
    """Wait while any of these jobs waits or runs.

    Args:
        jobs: as `address` names them.
        interval: seconds between two looks; waiting for a sweep takes days.
    """
    while jobs & queue():
        time.sleep(interval)


def queue() -> set[str]:
    """Return the user's other jobs that wait or run, named as by `address`; empty if unknown."""
    jobs = _query("squeue", "--me", "--array", "-h", "-o", "%i") or ""
    return set(jobs.split()) - {address()}


def grace() -> Grace:
    """Return the time that this cluster grants between a signal and the end, see `Grace`."""
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
    """Return JobId, JobState, Reason, Restarts ... of this job now; empty if unknown."""
    job = job_id()
    if not job:
        return {}
    # If an array has this number, SLURM prints all its jobs.
    text = _query("scontrol", "show", "job", job) or ""
    records = re.split(r"(?m)^(?=JobId=)", text)
    record_text = next((x for x in records if re.match(rf"JobId={job}\b", x)), "")
    # Read only lines without names and comments, and the first line up to the name.
    first = re.split(r" JobName=|\n", record_text, maxsplit=1)[0]
    lines = re.findall(r"(?m)^\s+((?:JobState|Requeue)=.*)$", record_text)[:2]
    words = " ".join([first, *lines]).split()
    record = dict(word.split("=", 1) for word in words if "=" in word)
    _first_record[job] = _first_record.get(job) or record
    return record


def _first() -> dict[str, str]:
    """Return SLURM's first record of this job; empty if SLURM gave none."""
    if job_id() not in _first_record:
        _job()
    return _first_record.get(job_id() or "", {})


def _query(*words: str) -> str | None:
    """Return the output of one of SLURM's commands; None, and print a line, if it fails twice."""
    why = f"no {words[0]} here"
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
    """Become a rank if this process is one of several tasks; otherwise do nothing."""
    if "RANK" in os.environ or _join_submitit() or not is_task_of_several():
        return
    job, step = int(os.environ["SLURM_JOB_ID"]), int(os.environ["SLURM_STEP_ID"])
    nodes = os.environ["SLURM_STEP_NODELIST"]
    command = ["scontrol", "show", "hostnames", nodes]
    try:
        process = subprocess.run(command, capture_output=True, text=True, timeout=60, check=True)
    except (OSError, subprocess.SubprocessError) as error:
        raise ConfigError(
            f"scontrol does not name the first of the hosts {nodes} ({error}): start the ranks "
            "with torchrun and --master_addr"
        ) from error
    os.environ.update(
        RANK=os.environ["SLURM_PROCID"],
        WORLD_SIZE=os.environ["SLURM_STEP_NUM_TASKS"],
        LOCAL_RANK=os.environ["SLURM_LOCALID"],
        MASTER_ADDR=process.stdout.split()[0],
        # These ports are below those of connections.
        MASTER_PORT=str(20000 + (7919 * job + step) % 12000),
    )


def _join_submitit() -> bool:
    """Return True if submitit started this task; one of several becomes a rank."""
    if "SUBMITIT_EXECUTOR" not in os.environ:
        return False
    import submitit

    if submitit.JobEnvironment().num_tasks > 1:
        # Accelerate chooses the device by the local rank among the visible ones.
        submitit.helpers.TorchDistributedEnvironment().export(set_cuda_visible_devices=False)
    return True


def main() -> None:
    """Requeue the job if it should run again, after a batch script's program was stopped and saved.

    Prints the job's next state.
    """
    ending = next_action()
    if ending == "requeue" and not requeue():
        ending = "for_good"
    texts = {"requeue": "requeued", "comes_back": "comes back", "for_good": "ends for good"}
    tell(f"SLURM job {address()}: {texts[ending]}")


if __name__ == "__main__":
    main()
