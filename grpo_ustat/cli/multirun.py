"""Sweeps: start unfinished runs, locally or through submitit, and show the states of all runs."""

from __future__ import annotations

import os
import sys
import traceback
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from omegaconf import DictConfig, OmegaConf

from grpo_ustat.cli.compose import Invocation
from grpo_ustat.distributed import slurm
from grpo_ustat.distributed.lock import owner
from grpo_ustat.distributed.ranks import RefusedByRank, is_main
from grpo_ustat.distributed.signals import Stopped, StopRequest
from grpo_ustat.launch.command import load_command, load_sweep_report
from grpo_ustat.launch.run import ONE_LINE_ERRORS, run
from grpo_ustat.launch.submitit import leave, resubmission, submit
from grpo_ustat.runs import history
from grpo_ustat.runs.faults import fault_line
from grpo_ustat.runs.folder import RunFolder, create_folder
from grpo_ustat.runs.status import (
    DONE,
    PAST_MAX_STEPS,
    RUNNING,
    PlannedRun,
    Sweep,
    note_sweep,
    status_table,
)
from grpo_ustat.terminal.console import Console
from grpo_ustat.terminal.streams import tell


def run_sweep(entry: str, invocation: Invocation) -> int:
    """Start the runs that are neither done nor running elsewhere, and show all runs.

    Returns:
        Exit code, 0 if every run is done and 1 otherwise.
    """
    planned_runs = invocation.planned_runs
    config, sweep = planned_runs[0].config, note_sweep(entry, planned_runs)
    overwrite = config.on_existing == "overwrite"
    states = [point.state() for point in sweep.entries]
    todo = []
    for planned, point, state in zip(planned_runs, sweep.entries, states, strict=True):
        if state.name == RUNNING:
            tell(f"skipped, another process is running it: {point.label}, {state.detail}")
        elif state.name == DONE:
            tell(
                f"{'done before' if overwrite else 'done already'}: {point.label} ({point.folder})"
            )
        elif state.name == PAST_MAX_STEPS:
            tell(f"skipped: {point.label}: {state.detail}")
        elif state.detail:
            tell(f"{state.name} before, restarted now: {point.label}: {state.detail}")
        if state.name not in ((RUNNING,) if overwrite else (DONE, PAST_MAX_STEPS, RUNNING)):
            todo.append(planned)
    if todo:
        _start(entry, todo, invocation.node.hydra)
    if config.report.name:
        folder = planned_runs[0].sweep / config.report.name
        load_sweep_report()(sweep.entries, folder, config.report.steps)
    return _print_outcome(sweep)


@dataclass(frozen=True)
class Job:
    """Callable that executes one run of a sweep, possibly in another process or machine."""

    # `train`, `mse` or `gap`.
    entry: str
    # Checked configuration.
    config: Any
    # Absolute path of the run folder.
    path: Path

    def __call__(self) -> None:
        """Execute the run; if it fails, print the error and record it in the run folder.

        Raises:
            Exception: If the run failed; the sweep continues with the next run.
            SystemExit: After a request to stop, which also ends the sweep.
        """
        os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
        folder = RunFolder(self.path, self.config)
        before = history.launches(folder.path)[-1:]
        try:
            create_folder(folder.path, "hydra.sweep.dir")
            run(load_command(self.entry), self.config, folder)
        except Stopped as stopped:
            leave(stopped, self.config.on_existing)
        except Exception as error:
            _report_failure(folder, error, before)
            raise
        except SystemExit as error:
            if not isinstance(error.code, str):
                raise
            # This rank exits because another rank was lost.
            _report_failure(folder, error, before)
            raise RuntimeError(error.code) from None

    def checkpoint(self) -> Any:
        """Return the job that submitit requeues."""
        return resubmission(self)


def _report_failure(folder: RunFolder, error: BaseException, before: list[dict]) -> None:
    """Print a run's failure on the rank where it happened, and record it once in the run folder."""
    line = fault_line(error)
    if line or isinstance(error, (*ONE_LINE_ERRORS, SystemExit)):
        if is_main() or not isinstance(error, RefusedByRank):
            text = line or str(error).removeprefix("error: ")
            tell(f"error: {folder.path}: {text}", file=sys.stderr)
    else:
        traceback.print_exc()
    if is_main() and owner(folder.path) is None:
        history.note_failure(folder.path, error, folder.config_hash, before)


def _start(entry: str, todo: Sequence[PlannedRun], node: DictConfig) -> None:
    """Start the runs, either locally one after the other or as submitit jobs.

    Args:
        entry: `train`, `mse` or `gap`.
        todo: runs to start.
        node: Hydra's node.
    """
    if node.runtime.choices["hydra/launcher"] == "basic":
        with StopRequest():
            for i, job in enumerate(_jobs(entry, todo)):
                tell(f"run {i + 1} of {len(todo)}: {todo[i].name}")
                # The job prints errors itself and records them in the run folder.
                with suppress(Exception):
                    job()
        return
    launcher: Any = OmegaConf.to_container(node.launcher, resolve=True)
    if "SlurmLauncher" in launcher["_target_"]:
        _start_on_slurm(entry, todo, launcher)
    else:
        _submit_and_wait(_jobs(entry, todo), "local", launcher)


def _start_on_slurm(entry: str, todo: Sequence[PlannedRun], launcher: Mapping[str, Any]) -> None:
    """Submit the runs that are not in SLURM's queue, and wait until all jobs have ended."""
    before = slurm.submissions(launcher["submitit_folder"])
    with slurm.without_job_env():
        rest = _not_queued(todo)
        if rest and not _submit_and_wait(_jobs(entry, rest), "slurm", launcher):
            slurm.await_end(slurm.submissions(launcher["submitit_folder"]) - before)


def _jobs(entry: str, todo: Sequence[PlannedRun]) -> list[Job]:
    places = [planned.folder.path for planned in todo if planned.folder is not None]
    return [
        Job(entry, planned.config, Path(os.path.abspath(place)))
        for planned, place in zip(todo, places, strict=True)
    ]


def _not_queued(todo: Sequence[PlannedRun]) -> list[PlannedRun]:
    """Return the runs that are not in SLURM's queue and that SLURM will therefore not restart."""
    queue, rest = slurm.queue(), []
    for planned in todo:
        assert planned.folder is not None
        rows = history.launches(planned.folder.path)
        starts = [row for row in rows if row.get("event") == "start"]
        unfinished = starts and rows[-1].get("outcome") in (None, "stopped")
        job = starts[-1].get("slurm_job_id") if unfinished else None
        if job in queue:
            tell(f"skipped, SLURM job {job} is in the queue: {planned.name}")
        else:
            rest.append(planned)
    return rest


def _submit_and_wait(jobs: Sequence[Job], cluster: str, launcher: Mapping[str, Any]) -> bool:
    """Submit jobs and wait for them; return False if a job ended without a result."""
    try:
        for job in submit(jobs, cluster, launcher):
            job.results()
    # There is no scheduler, or a job has failed or will not be restarted.
    except Exception as error:
        tell(f"error: {history.last_line(error)}", file=sys.stderr)
        return False
    return True


def _print_outcome(sweep: Sweep) -> int:
    """Show the states of all runs, and return exit code 1 if a run is unfinished, else 0."""
    states = [point.state() for point in sweep.entries]
    Console().print(status_table(sweep, states))
    for point, state in zip(sweep.entries, states, strict=True):
        if state.name != DONE:
            reason = f": {state.detail}" if state.detail else ""
            tell(f"error: did not finish: {point.label} ({point.folder}){reason}", file=sys.stderr)
    return 0 if all(state.name == DONE for state in states) else 1
