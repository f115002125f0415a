"""What SLURM says about the job that this process runs in, and what becomes of it.

Which signal reaches whom, and how `scontrol show job` then shows the job (measured on SLURM 22.05,
preemption by partition with PreemptMode=REQUEUE and a GraceTime):

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

Tasks are signalled with all that they have started, in whatever session; TERM may come twice, and
is followed by KILL after KillWait, but for preemption's first. A job that ends by itself while
preempted, with whatever code, does not come back unless it asks.
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

Ending = Literal["requeue", "comes_back", "for_good"]
AT_WORK = ("RUNNING", "SIGNALING", "SUSPENDED", "STOPPED")
PATIENCE = 20.0  # seconds that scontrol has; it answers within 0.03 on an idle controller
DEAF = 'trap "" TERM USR1 USR2; exec "$@"'  # a second signal reaches all that a task has started
OF_A_JOB = ("SLURM_", "SLURMD_", "SRUN_", "SUBMITIT_")  # SBATCH_ is what the user prefers
OF_THE_CLUSTER = ("SLURM_CONF", "SLURM_CLUSTERS", "SUBMITIT_PREEMPT_SIGNAL")
_first_told: dict[str, dict[str, str]] = {}  # of each job


class Grace(NamedTuple):
    """Seconds that this cluster grants, None where it does not say.

    Attributes:
        preempted: between the TERM that a preemption sends to srun's tasks and the next one, the
            partition's GraceTime (a QOS may have one of its own); a batch script has none of it.
        killed: between any other TERM and KILL, the cluster's KillWait.
    """

    preempted: float | None
    killed: float | None


def job_id() -> str | None:
    """The job's own number, which is not that of its array; None outside SLURM.

    The last job of an array to start bears the array's number: `scontrol requeue` with it requeues
    the whole array. What is to be done to this job alone goes by `address`.
    """
    return os.environ.get("SLURM_JOB_ID")


def address() -> str | None:
    """What SLURM's commands call this job and no other, such as 17 or 17_3; None outside SLURM.

    The array may be that of a job from within which this one was submitted: SLURM knows.
    """
    array, task = (os.environ.get(f"SLURM_ARRAY_{name}_ID") for name in ("JOB", "TASK"))
    if not (job_id() and array and task):
        return job_id()
    told = _known() or {"ArrayJobId": array, "ArrayTaskId": task}
    inherited = "ArrayJobId" not in told
    return job_id() if inherited else f"{told['ArrayJobId']}_{told['ArrayTaskId']}"


def restart_count() -> int:
    """How often SLURM has started this job again.

    SLURM tells a job so only from the first time on; until then the number may be that of a job
    from within which this one was submitted, and SLURM's own count, which grows by one as soon as
    the job is to start again, is below it.
    """
    told = int(os.environ.get("SLURM_RESTART_COUNT", 0))
    return min(told, int(_known().get("Restarts", told))) if told and job_id() else told


@contextmanager
def outside() -> Iterator[None]:
    """Without what SLURM told this process of its own job: jobs submitted here would inherit it."""
    told = [x for x in os.environ if x.startswith(OF_A_JOB) and x not in OF_THE_CLUSTER]
    kept = {name: os.environ.pop(name) for name in told}
    try:
        yield
    finally:
        os.environ.update(kept)


def is_task_of_several() -> bool:
    """Whether `srun` started this process as one of several tasks; its rank is SLURM_PROCID.

    A batch script has SLURM_PROCID and SLURM_NTASKS too, but SLURM_STEP_NUM_TASKS only where it was
    submitted from within a task, and then it is that task's.
    """
    of_step = os.environ.get("SLURM_STEP_NUM_TASKS", "1")
    return int(of_step) > 1 and of_step == os.environ.get("SLURM_NTASKS")


def ends() -> Ending:
    """What becomes of this job when this process ends now, after a signal to stop.

    A job that still runs was preempted or warned: it must ask, by `requeue`. So must one that met
    its time limit. One that is being taken away comes back if SLURM counts one more restart than
    this process was told at its start; else somebody cancelled it, and a request would undo that.

    Returns:
        `requeue`: it ends for good unless it asks to be started again. `comes_back`: SLURM starts
        it again by itself. `for_good`: it is not to start again, or it cannot: SLURM does not tell,
        or the job was submitted with `--no-requeue` or by `srun` and `salloc`.
    """
    job = _job()
    if int(job.get("Restarts", 0)) > restart_count():
        return "comes_back"
    asks = job.get("JobState") in AT_WORK or job.get("Reason") == "TimeLimit"
    able = job.get("Requeue") == "1" and job.get("BatchFlag") == "1"
    return "requeue" if able and asks else "for_good"


def requeue() -> bool:
    """Ask SLURM to start this job again; False, said in one line, where it refuses.

    SLURM then ends what is left of the job: CONT and TERM to all of it, KILL after KillWait.
    """
    return _asked("scontrol", "requeue", address() or "") is not None


def submissions(folder: str) -> set[str]:
    """Jobs that submitit, told to keep its files in `folder`/JOB, has submitted."""
    return {path.name for path in Path(folder).parent.glob("[0-9]*")}


def await_end(jobs: set[str], interval: float = 30) -> None:
    """Wait while any of these jobs is in the queue, at work or not.

    Args:
        jobs: as `address` names them.
        interval: seconds between two looks; a sweep is waited for over days.
    """
    while jobs & queue():
        time.sleep(interval)


def queue() -> set[str]:
    """The user's other jobs, waiting or at work, as `address` names them; none if not told."""
    told = _asked("squeue", "--me", "--array", "-h", "-o", "%i") or ""
    return set(told.split()) - {address()}


def grace() -> Grace:
    """What this cluster grants between a signal and the end, see `Grace`."""
    partition = os.environ.get("SLURM_JOB_PARTITION")
    if not partition:
        return Grace(None, None)
    of_partition = _asked("scontrol", "show", "partition", partition) or ""
    of_cluster = _asked("scontrol", "show", "config") or ""
    return Grace(
        _seconds(re.search(r"\bGraceTime=([\d:-]+)", of_partition)),
        _seconds(re.search(r"(?m)^KillWait\s*=\s*([\d:-]+)", of_cluster)),
    )


def _job() -> dict[str, str]:
    """JobId, JobState, Reason, Restarts ... of this job now; empty where SLURM does not tell."""
    job = job_id()
    if not job:
        return {}
    text = _asked("scontrol", "show", "job", job) or ""  # of all, where an array has this number
    records = re.split(r"(?m)^(?=JobId=)", text)
    told = _words(next((one for one in records if re.match(rf"JobId={job}\b", one)), ""))
    _first_told[job] = _first_told.get(job) or told
    return told


def _known() -> dict[str, str]:
    """What SLURM first told of this job; empty if it did not."""
    if job_id() not in _first_told:
        _job()
    return _first_told.get(job_id() or "", {})


def _words(record: str) -> dict[str, str]:
    """Of the lines in which nothing is a name or a comment, and of the first up to the name."""
    first = re.match(r".*?(?= JobName=|$)", record, re.M)[0]
    lines = re.findall(r"(?m)^\s+((?:JobState|Requeue)=.*)$", record)[:2]
    words = " ".join([first, *lines]).split()
    return dict(word.split("=", 1) for word in words if "=" in word)


def _asked(*words: str) -> str | None:
    """What one of SLURM's commands prints; None, said in one line, where it fails twice."""
    why = f"no {words[0]} here"
    for _ in range(2 if shutil.which(words[0]) else 0):
        try:
            done = subprocess.run(
                ["sh", "-c", DEAF, "sh", *words], capture_output=True, text=True, timeout=PATIENCE
            )
        except subprocess.TimeoutExpired:
            why = f"no answer in {PATIENCE:g} s"
            break
        if done.returncode == 0:
            return done.stdout
        why = " ".join(done.stderr.split()) or f"code {done.returncode}"
    print(f"SLURM: {' '.join(words)}: {why}", file=sys.stderr)
    return None


def _seconds(found: re.Match[str] | None) -> float | None:
    """Of `15`, `01:30`, `02:00:00` or `1-00:00:00`."""
    if not found:
        return None
    days, clock = ("0-" + found.group(1)).split("-")[-2:]
    total = 0
    for part in clock.split(":"):
        total = 60 * total + int(part)
    return float(86400 * int(days) + total)


def main() -> None:
    """For a batch script whose program was stopped and has saved: start the job again if it should.

    Prints what becomes of the job.
    """
    ending = ends()
    if ending == "requeue" and not requeue():
        ending = "for_good"
    said = {"requeue": "requeued", "comes_back": "comes back", "for_good": "ends for good"}
    print(f"SLURM job {address()}: {said[ending]}")


if __name__ == "__main__":
    main()
