"""One run, by the way in that its surroundings show.

1. `RANK` is set, by torchrun or `accelerate launch`: this process is that rank.
2. SLURM or submitit started several tasks: this process is one rank of as many.
3. `launch.num_processes` is above 1: this process starts that many ranks and waits for them.
4. Otherwise this process is the run.
"""

from __future__ import annotations

import os
import socket
import sys
from typing import Any

from grpo_ustat import slurm
from grpo_ustat.checks import ConfigError
from grpo_ustat.launch.parent import RanksFailed, run_ranks
from grpo_ustat.launch.sharing import check_sharing, export_sharing
from grpo_ustat.launch.tasks import join_tasks
from grpo_ustat.launch.work import work
from grpo_ustat.ranks import RefusedByRank, is_main, world
from grpo_ustat.runs import history
from grpo_ustat.runs.folder import NotSaved, RunFolder
from grpo_ustat.signals import StopRequest, stop_if_asked

REFUSALS = (ConfigError, FloatingPointError, NotSaved, RanksFailed)  # told in one line


def run(entry: str, config: Any, folder: RunFolder) -> float | None:
    """Do the work of an entry, or show what the folder already holds of it.

    Raises:
        ConfigError, FloatingPointError, NotSaved, RanksFailed: whose message is all there is to
            say.
        Stopped: a signal asked for it; what is done is saved.
    """
    with StopRequest():
        stop_if_asked()  # while it was composed, or between two runs of a sweep
        join_tasks()
        check_ranks(config)
        if world() > 1 or config.launch.num_processes == 1:
            return run_here(entry, config, folder)
        try:
            return run_ranks(entry, config, folder)
        except RanksFailed as error:
            _tell_of(folder, error)
            raise


def run_here(entry: str, config: Any, folder: RunFolder) -> float | None:
    """See `run`; in this process."""
    if world() > 1 and getattr(config.launch, "accelerate", None) is not None:
        export_sharing(config.launch.accelerate)
    if is_main() and slurm.job_id() is not None:
        where = f"SLURM job {slurm.address()} on {socket.gethostname()}"
        print(f"{where}, restart {slurm.restart_count()}", file=sys.stderr)
    value = work(entry, config, folder)
    if is_main():
        history.note_done(folder.path)
    return value


def check_ranks(config: Any, tasks: int = 1) -> None:
    """Refuse numbers of processes that contradict each other, or that have nothing to share.

    Args:
        config: of the run.
        tasks: processes that a scheduler will start of it.

    Raises:
        ConfigError: naming both.
    """
    asked, there = config.launch.num_processes, max(world(), tasks)
    if asked > 1 and (tasks > 1 or ("RANK" in os.environ and asked != there)):
        raise RefusedByRank(
            f"launch.num_processes={asked} in each of {there} processes that a launcher starts: "
            "use one or the other"
        )
    ranks = max(asked, there)
    if getattr(config.launch, "accelerate", None) is not None:
        check_sharing(config.launch.accelerate, ranks)
    prompts = getattr(config, "prompts_per_step", ranks)
    if prompts < ranks:
        raise RefusedByRank(
            f"{prompts} prompts a step (budget.rollouts / group_size) for {ranks} processes: raise "
            "budget.rollouts, or lower group_size or the number of processes"
        )


def _tell_of(folder: RunFolder, error: RanksFailed) -> None:
    """Note why ranks failed: the first one knows at best that it has lost another."""
    if folder.path.is_dir():
        history.append(folder.path, history.ending(error) | {"config_hash": folder.config_hash})
