"""Sweep: start the runs that are not done yet through Hydra's launcher, and show all states."""

from __future__ import annotations

import os
import sys
import traceback
from contextlib import nullcontext
from dataclasses import dataclass

from hydra.plugins.launcher import Launcher
from omegaconf import DictConfig

from grpo_ustat.cli.compose import Invocation, check_trust, register
from grpo_ustat.cli.hydra_api import hydra_session, output_folder, sweep_launcher, sweep_node
from grpo_ustat.config.load import SCHEMAS, build_config
from grpo_ustat.distributed import slurm
from grpo_ustat.distributed.lock import peek
from grpo_ustat.distributed.ranks import RefusedByRank, is_main
from grpo_ustat.distributed.signals import Stopped, StopRequest
from grpo_ustat.launch.command import load_command, load_sweep_report
from grpo_ustat.launch.run import ONE_LINE_ERRORS, run
from grpo_ustat.launch.submitit import leave
from grpo_ustat.runs import history
from grpo_ustat.runs.faults import fault_line
from grpo_ustat.runs.folder import RunFolder
from grpo_ustat.runs.status import (
    DONE,
    PAST_MAX_STEPS,
    RUNNING,
    PlannedRun,
    Sweep,
    note_sweep,
    status_table,
)
from grpo_ustat.terminal.console import Console, tell


def run_sweep(entry: str, invocation: Invocation) -> int:
    """Run what is neither done nor at work elsewhere; show all runs.

    Returns:
        The exit code: 0 if every run is done, else 1.
    """
    planned_runs = invocation.planned_runs
    config, sweep = planned_runs[0].config, note_sweep(entry, planned_runs)
    overwrite = config.on_existing == "overwrite"
    states = [one.state() for one in sweep.entries]
    todo = []
    for planned, one, state in zip(planned_runs, sweep.entries, states, strict=True):
        if state.name == RUNNING:
            tell(f"left to the process that runs it: {one.label}, {state.detail}")
        elif state.name == DONE:
            tell(f"{'done before' if overwrite else 'done already'}: {one.label} ({one.folder})")
        elif state.name == PAST_MAX_STEPS:
            tell(f"left as it is: {one.label}: {state.detail}")
        elif state.detail:
            tell(f"{state.name} before, again now: {one.label}: {state.detail}")
        if state.name not in ((RUNNING,) if overwrite else (DONE, PAST_MAX_STEPS, RUNNING)):
            todo.append(planned)
    if todo:
        _launch(entry, invocation, todo)
    if config.report.name:
        folder = planned_runs[0].sweep / config.report.name
        load_sweep_report()(sweep.entries, folder, config.report.steps)
    return _print_outcome(sweep)


@dataclass(frozen=True)
class Job:
    """One run of a sweep, as Hydra's task; it may run in another process, on another machine."""

    # `train`, `mse` or `gap`.
    entry: str
    # Of the command line, which can allow a model's own code.
    overrides: tuple[str, ...]

    def __call__(self, node: DictConfig) -> float | None:
        """Run it; an error is printed here and noted in its folder.

        Raises:
            Exception: it failed; the sweep goes on to the next.
            SystemExit: a request to stop, which ends the sweep too.
        """
        os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
        register(self.entry)
        config = build_config(node, SCHEMAS[self.entry])
        folder = RunFolder(output_folder(), config)
        before = history.launches(folder.path)[-1:]
        try:
            check_trust(config, list(self.overrides))
            return run(load_command(self.entry), config, folder)
        except Stopped as stopped:
            leave(stopped, config.on_existing)
        except Exception as error:
            _report_failure(folder, error, before)
            raise
        except SystemExit as error:
            if not isinstance(error.code, str):
                raise
            _report_failure(folder, error, before)  # a rank that lost another
            raise RuntimeError(error.code) from None


def _report_failure(folder: RunFolder, error: BaseException, before: list[dict]) -> None:
    """Print a run's failure on the rank where it happened, and note it in the folder once."""
    line = fault_line(error)
    if line or isinstance(error, (*ONE_LINE_ERRORS, SystemExit)):
        if is_main() or not isinstance(error, RefusedByRank):
            text = line or str(error).removeprefix("error: ")
            tell(f"error: {folder.path}: {text}", file=sys.stderr)
    else:
        traceback.print_exc()
    if is_main() and peek(folder.path) is None:
        history.note_failure(folder.path, error, folder.config_hash, before)


def _launch(entry: str, invocation: Invocation, todo: list[PlannedRun]) -> None:
    """Start the runs, here one after the other or where the launcher brings them."""
    job = Job(entry, tuple(invocation.overrides))
    with hydra_session(entry, invocation.config_dir):
        node = sweep_node(invocation.name, invocation.overrides)
        with sweep_launcher(invocation.name, node, job) as launcher:
            if "SlurmLauncher" in node.hydra.launcher._target_:
                _submit(launcher, todo, node.hydra.launcher.submitit_folder)
                return
            here = node.hydra.runtime.choices["hydra/launcher"] == "basic"
            with StopRequest() if here else nullcontext():  # who only waits ends at once
                _start(launcher, todo)


def _submit(launcher: Launcher, todo: list[PlannedRun], files: str) -> None:
    """Submit the runs to SLURM, except those that it is about to restart, and wait for all."""
    queue, before = slurm.queue(), slurm.submissions(files)
    rest = []
    for planned in todo:
        assert planned.folder is not None  # `parse` refuses a sweep of runs without one
        rows = history.launches(planned.folder.path)
        starts = [row for row in rows if row.get("event") == "start"]
        unfinished = starts and rows[-1].get("outcome") in (None, "stopped")
        job = starts[-1].get("slurm_job_id") if unfinished else None
        if job in queue:
            tell(f"left to SLURM job {job}, which is in the queue: {planned.name}")
        else:
            rest.append(planned)
    with slurm.without_job_env():
        if rest and not _start(launcher, rest):
            slurm.await_end(slurm.submissions(files) - before)  # the launcher waits no more


def _start(launcher: Launcher, todo: list[PlannedRun]) -> bool:
    """Start the runs and wait; True if every job reported its end, even a failure."""
    overrides = [  # without Hydra's own, which the launcher adds
        [x for x in planned.overrides if not x.lstrip("+~").startswith(("hydra.", "hydra/"))]
        for planned in todo
    ]
    try:
        launcher.launch(overrides, initial_job_idx=0)
    except Exception as error:  # a job that ended without a result, no scheduler
        tell(f"error: {history.last_line(error)}", file=sys.stderr)
        return False
    return True


def _print_outcome(sweep: Sweep) -> int:
    """Show every run and name those that did not finish; 0 if all did, else 1."""
    states = [one.state() for one in sweep.entries]
    Console().print(status_table(sweep, states))
    for one, state in zip(sweep.entries, states, strict=True):
        if state.name != DONE:
            reason = f": {state.detail}" if state.detail else ""
            tell(f"error: did not finish: {one.label} ({one.folder}){reason}", file=sys.stderr)
    return 0 if all(state.name == DONE for state in states) else 1
