"""Shared entry point of the commands: compose, check and run, with one-line errors."""

from __future__ import annotations

import os
import sys
from pathlib import Path
from typing import TYPE_CHECKING, NoReturn

from grpo_ustat.config.command_line import note_typed
from grpo_ustat.config.schema import ConfigError
from grpo_ustat.distributed.ranks import RefusedByRank, barrier, check_environment, is_main
from grpo_ustat.distributed.slurm import join_tasks
from grpo_ustat.launch.command import Command, without_garbage_collection
from grpo_ustat.runs.faults import NotSaved, fault_line
from grpo_ustat.terminal.streams import tell

# Imports that are not needed for the help or for refused command lines are local.
if TYPE_CHECKING:
    from grpo_ustat.cli.compose import Invocation
    from grpo_ustat.runs.status import PlannedRun


def main(command: Command) -> None:
    """Compose `conf/<name>.yaml`, check it, and start the run or the runs of a sweep.

    All runs are checked before the first run starts. A refused command line gives a one-line error
    and exit code 2. If a run of a sweep fails later, the sweep continues.
    """
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
    try:
        join_tasks()
        check_environment()
        with without_garbage_collection():
            if print_help(command.name):
                return
            from grpo_ustat.cli.compose import check_cuda, parse

            note_typed(command.name, sys.argv[1:])
            invocation = parse(command.name, sys.argv[1:])
        if print_preview(command, invocation.planned_runs):
            return
        for planned in invocation.planned_runs:
            launcher = invocation.node.hydra.launcher
            check_cuda(planned.config, is_submitted="SlurmLauncher" in launcher["_target_"])
        from hydra.core.utils import configure_log

        configure_log(invocation.node.hydra.job_logging, invocation.node.hydra.verbose)
        if invocation.sweep:
            from grpo_ustat.cli.multirun import run_sweep

            raise SystemExit(run_sweep(command.name, invocation))
        _make(command, invocation)
    except Exception as error:
        _exit(error)
    except KeyboardInterrupt:
        if is_main():
            tell("interrupted; the same command resumes the run", file=sys.stderr)
        raise SystemExit(130) from None


def _make(command: Command, invocation: Invocation) -> None:
    """Execute the run or write the report that a command line requests."""
    from grpo_ustat.distributed.signals import Stopped
    from grpo_ustat.launch.run import ONE_LINE_ERRORS, run
    from grpo_ustat.launch.submitit import leave
    from grpo_ustat.runs.folder import RunFolder, create_folder, remove_empty

    folder = Path(os.path.abspath(invocation.node.hydra.run.dir))
    create_folder(folder, "hydra.run.dir")
    try:
        if not invocation.planned_runs:
            command.load_run()(invocation.config, folder)
            return
        config = invocation.planned_runs[0].config
        try:
            run(command, config, RunFolder(folder, config))
        except Stopped as stopped:
            leave(stopped, config.on_existing)
    except ONE_LINE_ERRORS:
        remove_empty(folder)
        raise


def print_help(entry: str) -> bool:
    """Print the help or the configuration, if requested.

    Returns:
        True if the command line requests such output.
    """
    if sys.argv[1:] in (["--help"], ["-h"]):
        if is_main():
            from grpo_ustat.cli.help import show_default_help

            show_default_help(entry)
        return True
    from grpo_ustat.cli.hydra_api import parse_arguments

    words = parse_arguments(sys.argv[1:])
    if not (words.help or words.cfg):
        return False
    if is_main() and words.help:
        from grpo_ustat.cli.help import show_help

        show_help(entry, words)
    elif is_main():
        from grpo_ustat.cli.show_config import show_config

        show_config(entry, words)
    return True


def print_preview(command: Command, planned_runs: list[PlannedRun]) -> bool:
    """Print prompts or estimated costs if requested; return False if neither is requested."""
    with_prompts = [planned.config for planned in planned_runs if planned.config.show_prompts]
    costs = any(planned.config.dry_run for planned in planned_runs)
    if with_prompts and is_main():
        from grpo_ustat.cli.show_prompts import show_prompts

        assert command.split is not None, f"{command.name} asks no questions"
        for config in with_prompts:
            show_prompts(config, command.split)
    elif costs and is_main():
        assert command.show_costs is not None, f"{command.name} makes no runs"
        command.show_costs(planned_runs)
    return bool(with_prompts) or costs


def _exit(error: Exception) -> NoReturn:
    """Print an error in one line and exit; an error of all ranks is printed only once.

    Raises:
        Exception: The error itself, if it is neither invalid input nor a system error.
    """
    if not isinstance(error, ConfigError):
        from grpo_ustat.launch.run import ONE_LINE_ERRORS

        if not isinstance(error, ONE_LINE_ERRORS):
            line = fault_line(error)
            if line is None:
                raise error
            error = NotSaved(line)
    on_all_ranks = isinstance(error, RefusedByRank)
    if not on_all_ranks or is_main():
        from grpo_ustat.config.secrets import redact_code

        tell(f"error: {redact_code(str(error))}", file=sys.stderr)
    if on_all_ranks:
        # If another rank exited first, the launcher would end rank 0 before rank 0 prints the
        # error.
        barrier()
    raise SystemExit(2)
