"""Whether a stop fits into the time that is granted for it: one step and one save."""

from __future__ import annotations

import math
import os
import sys

from grpo_ustat import slurm
from grpo_ustat.ranks import PARENT
from grpo_ustat.runs.log import warn


def tell_grace(seconds_step: float, seconds_save: float, grace_seconds: int) -> None:
    """Print what a stop takes and what is granted; a warning where a stop would lose steps.

    Without SLURM and without a parent of ranks nobody sets a limit, and nothing is printed. What
    follows `scancel` is said and never warned of: a job that was cancelled is not to go on.

    Args:
        seconds_step, seconds_save: of the latest step and of the checkpoint after it.
        grace_seconds: `launch.grace_seconds`.
    """
    of_cluster = slurm.grace()
    limits = _limits(grace_seconds, of_cluster.preempted)
    said = [f"{seconds:g} s {to}" for to, seconds in limits.items()]
    if of_cluster.killed is not None:
        said.append(f"{of_cluster.killed:g} s after scancel (KillWait)")
    if not said:
        return
    text = (
        f"a stop takes up to a step ({seconds_step:.1f} s) and a save ({seconds_save:.1f} s); "
        f"granted are {', '.join(said)}"
    )
    if seconds_step + seconds_save <= min(limits.values(), default=math.inf):
        print(text, file=sys.stderr)
    else:
        warn(f"{text}: a kill loses the steps since the last checkpoint, so lower save_steps")


def _limits(grace_seconds: int, preempted: float | None) -> dict[str, float]:
    """Seconds between a signal and the kill of a run that is to go on, by who sends it.

    A GraceTime of 0 is SLURM's default, also where nothing is ever preempted: it says nothing.
    """
    limits = {}
    if PARENT in os.environ:
        limits["to ranks (launch.grace_seconds)"] = float(grace_seconds)
    if preempted:
        limits["after a preemption (GraceTime)"] = preempted
    return limits
