"""What the commands share: compose, check, run; errors in one line."""

from __future__ import annotations

import gc
import os
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import NoReturn

from omegaconf import DictConfig

from grpo_ustat.cli.compose import check_trust, compose_single, parse
from grpo_ustat.cli.hydra_api import output_folder, parse_arguments, run_composed, run_task
from grpo_ustat.config.command_line import note_typed
from grpo_ustat.config.load import SCHEMAS, build_config
from grpo_ustat.config.schema import ConfigError
from grpo_ustat.config.secrets import redact_code
from grpo_ustat.distributed.ranks import RefusedByRank, barrier, check_environment, is_main
from grpo_ustat.distributed.signals import Stopped, StopRequest
from grpo_ustat.distributed.slurm import join_tasks
from grpo_ustat.launch.command import Command
from grpo_ustat.launch.run import REFUSALS, run
from grpo_ustat.launch.submitit import leave
from grpo_ustat.launch.torchrun import RanksFailed
from grpo_ustat.runs.faults import NotSaved, fault_line
from grpo_ustat.runs.folder import RunFolder, create_folder, remove_empty
from grpo_ustat.runs.status import PlannedRun
from grpo_ustat.terminal.console import tell


def main(command: Command) -> None:
    """Compose `conf/<name>.yaml`, check it, and run it, or the runs of a sweep.

    Everything that can be refused is refused before the first job starts, in one line and with
    exit code 2; in a sweep, for all of its runs. A run that fails later does not end its sweep.
    """
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
    sys.argv[1:] = sorted(sys.argv[1:], key=lambda word: word not in ("-m", "--multirun"))
    try:
        join_tasks()
        check_environment()
        if print_help(command.name):
            return
        note_typed(command.name, sys.argv[1:])
        invocation = parse(command.name, sys.argv[1:])
        if print_preview(command, invocation.planned_runs):
            return
        if invocation.sweep:
            from grpo_ustat.cli.multirun import run_sweep

            raise SystemExit(run_sweep(command.name, invocation))
        with StopRequest():
            for planned in invocation.planned_runs:  # one, none where Hydra only shows something
                if planned.folder:  # which Hydra would create, with a traceback where it cannot
                    create_folder(planned.folder.path, "hydra.run.dir")
            _start(command.name, invocation.node, SingleRun(command), invocation.config_dir)
    except ConfigError as error:
        _exit(error)
    except Exception as error:
        _exit_by_fault(error)
    except KeyboardInterrupt:
        if is_main():
            tell("interrupted; the same command goes on from there", file=sys.stderr)
        raise SystemExit(130) from None


def report() -> None:
    """Compose `conf/report.yaml`, check it, and report the runs that it names."""
    note_typed("report", sys.argv[1:])
    sys.argv[1:] = map(quote_folders, sys.argv[1:])
    try:
        if print_help("report"):
            return
        node = compose_single("report", sys.argv[1:])
        if node is not None:
            create_folder(Path(node.hydra.run.dir), "hydra.run.dir")
        _start("report", node, write_report)
    except ConfigError as error:
        _exit(error)
    except Exception as error:
        _exit_by_fault(error)


def _start(
    entry: str,
    node: DictConfig | None,
    task: Callable[[DictConfig], object],
    config_dir: str | None = None,
) -> None:
    """Have Hydra call a task with a configuration that is composed, or read the command line."""
    if node is None:
        run_task(entry, task)
    else:
        run_composed(entry, node, task, config_dir)


def write_report(node: DictConfig) -> None:
    """Hydra's task of `report`; a folder that stays empty is removed again."""
    folder = output_folder()
    try:
        config = build_config(node, SCHEMAS["report"])
        from grpo_ustat.report.aggregate import report_runs

        report_runs(config.patterns, folder, config.steps)
    except ConfigError as error:
        remove_empty(folder)  # Hydra has created it
        _exit(error)
    except Exception as error:
        _exit_by_fault(error)


def quote_folders(word: str) -> str:
    """`runs=` with its folders in quotes: their names and patterns may hold commas and brackets.

    >>> quote_folders("runs=a/seed=0"), quote_folders("runs=[a/seed=0,b]")
    ("runs='a/seed=0'", "runs=['a/seed=0','b']")
    >>> quote_folders("name=x")
    'name=x'
    """
    key, _, value = word.partition("=")
    if key != "runs" or not value or "'" in value or '"' in value:
        return word
    if value[0] == "[" and value[-1] == "]":
        inside = [f"'{x.strip()}'" for x in value[1:-1].split(",") if x.strip()]
        return f"runs=[{','.join(inside)}]"
    return f"runs='{value}'"


@dataclass(frozen=True)
class SingleRun:
    """Hydra's task where a command line names one run, no sweep."""

    command: Command

    def __call__(self, node: DictConfig) -> float | None:
        """Run the configuration; the run's end is this process's end."""
        config = build_config(node, SCHEMAS[self.command.name])
        folder = RunFolder(output_folder(), config)
        try:
            check_trust(config, parse_arguments(sys.argv[1:]).overrides)
            return run(self.command, config, folder)
        except Stopped as stopped:
            leave(stopped, config.on_existing)
        except REFUSALS as error:
            folder.leave()
            _exit(error, code=1 if isinstance(error, RanksFailed) else 2)
        except Exception as error:
            _exit_by_fault(error)


def print_help(entry: str) -> bool:
    """Print help, a configuration or shell completion; False where none of them is asked for."""
    words = parse_arguments(sys.argv[1:])
    requested = bool(words.help or words.cfg or words.shell_completion)
    if requested or words.info:
        gc.disable()  # a tenth of the time, and the process ends before it matters
    if requested and is_main():
        if words.help:
            from grpo_ustat.cli.help import show_help

            show_help(entry, words)
        elif words.cfg:
            from grpo_ustat.cli.show_config import show_config

            show_config(entry, words)
        else:
            from grpo_ustat.cli.completion import complete

            complete(entry, words)
    return requested


def print_preview(command: Command, planned_runs: list[PlannedRun]) -> bool:
    """Print prompts or costs; False where the command line asks for neither."""
    with_prompts = [planned.config for planned in planned_runs if planned.config.show_prompts]
    costs = any(planned.config.dry_run for planned in planned_runs)
    if with_prompts and is_main():
        from grpo_ustat.cli.show_prompts import show_prompts

        assert command.split is not None, f"{command.name} asks no questions"
        for config in with_prompts:
            show_prompts(config, command.split)
    elif costs and is_main():
        command.show_costs(planned_runs)
    return bool(with_prompts) or costs


def _exit_by_fault(error: Exception) -> NoReturn:
    """Print what the system refused and end.

    Raises:
        Exception: the error, where it is not the system's.
    """
    line = fault_line(error)
    if line is None:
        raise error
    _exit(NotSaved(line))


def _exit(error: Exception, code: int = 2) -> NoReturn:
    """Print the error, once where all ranks have it, and end with the exit code."""
    on_all_ranks = isinstance(error, RefusedByRank)
    if not on_all_ranks or is_main():
        tell(f"error: {redact_code(str(error))}", file=sys.stderr)
    if on_all_ranks:
        barrier()  # a rank that ends earlier makes the launcher end rank 0 before it has printed
    raise SystemExit(code)
