"""Execution of a run, in this process alone or in several processes, called ranks.

The first of these cases that applies decides:

1. torchrun or `accelerate launch` has set the variable `RANK`: this process is that rank.
2. SLURM or submitit started several tasks: each task is a rank.
3. `launch.num_processes` is above 1: this process starts that many ranks and waits for them.
4. Otherwise, this process executes the run alone.
"""

from __future__ import annotations

import json
import os
import socket
import sys
import threading
from pathlib import Path
from typing import Any

from grpo_ustat.config.load import SCHEMAS, build_config
from grpo_ustat.config.schema import ConfigError
from grpo_ustat.distributed import slurm
from grpo_ustat.distributed.ranks import RefusedByRank, barrier, check_ranks, is_main, world
from grpo_ustat.distributed.signals import Stopped, StopRequest, stop_if_requested
from grpo_ustat.distributed.slurm import join_tasks
from grpo_ustat.estimators.baselines import UnfitRewards
from grpo_ustat.launch.command import Command, load_command, without_garbage_collection
from grpo_ustat.launch.torchrun import RUN_VARIABLE, run_ranks
from grpo_ustat.runs import history
from grpo_ustat.runs.faults import NotSaved, faults_of
from grpo_ustat.runs.folder import RunFolder
from grpo_ustat.runs.trackers import Tracking
from grpo_ustat.terminal.progress import waiting
from grpo_ustat.terminal.streams import lasting_output, tell

# Errors that are shown by their message alone, without a traceback.
ONE_LINE_ERRORS = (ConfigError, FloatingPointError, NotSaved, UnfitRewards)


def run(command: Command, config: Any, folder: RunFolder) -> None:
    """Execute a run, or continue it if its folder contains a part of it.

    Args:
        command: command that makes the run.
        config: checked configuration of the run.
        folder: folder of the run.

    Raises:
        FloatingPointError, NotSaved, UnfitRewards: the run failed. As for a ConfigError, the
            message explains the failure without a traceback.
        SystemExit: a rank failed or was lost.
        Stopped: a signal requested a stop, and finished work is saved.
    """
    with StopRequest():
        # A signal may have arrived while the configuration was composed, or between two runs of a
        # sweep.
        stop_if_requested()
        join_tasks()
        check_ranks(config)
        if world() > 1 or config.launch.num_processes == 1:
            run_here(command, config, folder)
        else:
            run_ranks(command.name, config, folder)


def run_here(command: Command, config: Any, folder: RunFolder) -> None:
    """Execute a run in this process, which may be one of several ranks; see `run`."""
    if is_main() and slurm.job_id() is not None:
        tell(f"SLURM job {slurm.job_id()} on {socket.gethostname()}", file=sys.stderr)
    folder.start_tracking = Tracking
    make_run(command, config, folder)
    if is_main():
        history.note_done(folder.path)


def make_run(command: Command, config: Any, folder: RunFolder) -> float | None:
    """Import the command's function and call it.

    Raises:
        NotSaved: a file could not be written. The same command then continues from the files on
            disk.
    """
    with faults_of(folder.path):
        modules = command.preload(config) if world() == 1 and folder.result() is None else ()
        if modules:
            # Imported here, because --help does not need this module.
            from grpo_ustat.distributed.workers import preload

            preload(modules, config.launch.device)
        with waiting("starting", visible=is_main()), without_garbage_collection():
            run_command = command.load_run()
        return run_command(config, folder)


def main() -> None:
    """Execute the run of `launch.torchrun` in this process, which is a rank."""
    threading.Thread(target=_end_with_parent, daemon=True).start()
    name, path, values = json.loads(os.environ.pop(RUN_VARIABLE))
    config = build_config(values, SCHEMAS[name])
    with lasting_output(), StopRequest():
        try:
            run_here(load_command(name), config, RunFolder(Path(path), config))
        except Stopped:
            # The parent reads the reason from the history of the folder.
            return
        except ONE_LINE_ERRORS as error:
            if is_main() or not isinstance(error, RefusedByRank):
                tell(f"error: {error}", file=sys.stderr)
            if isinstance(error, RefusedByRank):
                # All ranks raise this error. If one exited first, torchrun could end rank 0 before
                # rank 0 prints the error.
                barrier()
            raise SystemExit(1) from None


def _end_with_parent() -> None:
    """End this process when the pipe from the parent is closed."""
    os.read(0, 1)
    os._exit(1)


if __name__ == "__main__":
    main()
