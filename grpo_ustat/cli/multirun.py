"""A sweep: the runs that are not done yet, through Hydra's launcher, and what they left."""

from __future__ import annotations

import os
import sys
import traceback
from contextlib import nullcontext
from dataclasses import dataclass
from pathlib import Path

from hydra._internal.callbacks import Callbacks
from hydra.core.global_hydra import GlobalHydra
from hydra.core.hydra_config import HydraConfig
from hydra.core.plugins import Plugins
from hydra.plugins.launcher import Launcher
from hydra.types import HydraContext
from omegaconf import DictConfig
from rich.console import Console

from grpo_ustat import slurm
from grpo_ustat.composing import Asked, check_trust, hydra_node, initialized, register
from grpo_ustat.config import SCHEMAS, typed
from grpo_ustat.launch.job import REFUSALS, run
from grpo_ustat.launch.requeue import leave
from grpo_ustat.ranks import RefusedByRank, is_main
from grpo_ustat.runs import history
from grpo_ustat.runs.folder import RunFolder
from grpo_ustat.runs.lock import peek
from grpo_ustat.runs.points import Point
from grpo_ustat.runs.sweeps import (
    BEYOND,
    DONE,
    RUNNING,
    Entry,
    State,
    Sweep,
    note_sweep,
    status_table,
)
from grpo_ustat.signals import Stopped, StopRequest


def run_sweep(entry: str, asked: Asked) -> int:
    """Run the points that are neither done nor at work elsewhere; show all.

    Returns:
        The exit code: 0 if every point is done, else 1.
    """
    sweep = note_sweep(entry, asked.points)
    anew = asked.points[0].config.on_existing == "overwrite"
    left_out = (RUNNING,) if anew else (DONE, BEYOND, RUNNING)
    found = [one.state() for one in sweep.entries]
    todo = [p for p, s in zip(asked.points, found, strict=True) if s.name not in left_out]
    _tell(sweep.entries, found, anew)
    if todo:
        _launch(entry, asked, todo)
    asked_report = asked.points[0].config.report
    if asked_report.name:
        from grpo_ustat.reports.report import report_sweep

        folder = asked.points[0].sweep / asked_report.name
        report_sweep(sweep.entries, folder, asked_report.steps)
    return _end(sweep)


@dataclass(frozen=True)
class Job:
    """One run of a sweep, as Hydra's task; it may run in another process, on another machine.

    Attributes:
        entry: `train`, `mse` or `gap`.
        given: overrides of the command line, by which a model's own code is allowed.
    """

    entry: str
    given: tuple[str, ...]

    def __call__(self, node: DictConfig) -> float | None:
        """Run it; what went wrong is printed here and noted in its folder.

        Raises:
            Exception: it failed; the sweep goes on to the next.
            SystemExit: it was asked to stop, and the sweep with it.
        """
        os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
        register(self.entry)
        config = typed(node, SCHEMAS[self.entry])
        folder = RunFolder(Path(HydraConfig.get().runtime.output_dir), config)
        before = history.launches(folder.path)[-1:]
        try:
            check_trust(config, list(self.given))
            return run(self.entry, config, folder)
        except Stopped as stopped:
            leave(stopped, config.on_existing)
        except Exception as error:
            _tell_failure(folder, error, before)
            raise
        except SystemExit as error:
            if not isinstance(error.code, str):
                raise
            _tell_failure(folder, error, before)  # a rank that lost another
            raise RuntimeError(error.code) from None


def _tell_failure(folder: RunFolder, error: BaseException, before: list[dict]) -> None:
    """Print it on the rank that it is of, and note it once."""
    if isinstance(error, (*REFUSALS, SystemExit)):
        if is_main() or not isinstance(error, RefusedByRank):
            text = str(error).removeprefix("error: ")
            print(f"error: {folder.path}: {text}", file=sys.stderr)
    else:
        traceback.print_exc()
    if is_main() and peek(folder.path) is None:
        history.note_failure(folder.path, error, folder.config_hash, before)


def _launch(entry: str, asked: Asked, todo: list[Point]) -> None:
    """Start the runs, here one after the other or where the launcher brings them."""
    with initialized(entry, asked.config_dir):
        node = hydra_node(asked.name, asked.overrides)
        callbacks = Callbacks(node)
        launcher = _launcher(node, Job(entry, tuple(asked.overrides)), callbacks)
        callbacks.on_multirun_start(config=node, config_name=asked.name)
        _through(launcher, node, todo)
        callbacks.on_multirun_end(config=node, config_name=asked.name)


def _through(launcher: Launcher, node: DictConfig, todo: list[Point]) -> None:
    if "SlurmLauncher" in node.hydra.launcher._target_:
        _submit(launcher, todo, node.hydra.launcher.submitit_folder)
        return
    here = node.hydra.runtime.choices["hydra/launcher"] == "basic"
    with StopRequest() if here else nullcontext():  # who only waits ends at once
        _start(launcher, todo)


def _submit(launcher: Launcher, todo: list[Point], files: str) -> None:
    """To SLURM, but for runs that it is about to start again; wait for all that it took."""
    queue, before = slurm.queue(), slurm.submissions(files)
    waiting = {point.name: _unfinished(point) & queue for point in todo}
    for name, jobs in waiting.items():
        for job in jobs:
            print(f"left to SLURM job {job}, which is in the queue: {name}")
    rest = [point for point in todo if not waiting[point.name]]
    with slurm.outside():
        if rest and not _start(launcher, rest):
            slurm.await_end(slurm.submissions(files) - before)  # the launcher waits no more


def _unfinished(point: Point) -> set[str]:
    """The SLURM job that worked on it last, if it may go on with it."""
    rows = history.launches(point.folder.path)
    starts = [row for row in rows if row.get("event") == "start"]
    over = not starts or rows[-1].get("outcome") not in (None, "stopped")
    return set() if over else {starts[-1].get("slurm_job_id")}


def _start(launcher: Launcher, todo: list[Point]) -> bool:
    """Whether all ended with a result, be it a failure."""
    try:
        launcher.launch([_of_task(point) for point in todo], initial_job_idx=0)
    except Exception as error:  # a job that ended without a result, no scheduler
        print(f"error: {history.last_line(error)}", file=sys.stderr)
        return False
    return True


def _launcher(node: DictConfig, job: Job, callbacks: Callbacks) -> Launcher:
    loader = GlobalHydra.instance().config_loader()
    return Plugins.instance().instantiate_launcher(
        hydra_context=HydraContext(config_loader=loader, callbacks=callbacks),
        task_function=job,
        config=node,
    )


def _of_task(point: Point) -> list[str]:
    """Its overrides without Hydra's own, which the launcher adds."""
    return [x for x in point.overrides if not x.lstrip("+~").startswith(("hydra.", "hydra/"))]


def _tell(entries: list[Entry], found: list[State], anew: bool) -> None:
    for one, state in zip(entries, found, strict=True):
        if state.name == DONE:
            print(f"{'done before' if anew else 'done already'}: {one.label} ({one.folder})")
        elif state.name == BEYOND:
            print(f"left as it is: {one.label}: {state.detail}")
        elif state.name == RUNNING:
            print(f"left to the process that runs it: {one.label}, {state.detail}")
        elif state.detail:
            print(f"{state.name} before, again now: {one.label}: {state.detail}")


def _end(sweep: Sweep) -> int:
    """Show every point; name those that did not finish."""
    found = [one.state() for one in sweep.entries]
    Console().print(status_table(sweep, found))
    for one, state in zip(sweep.entries, found, strict=True):
        if state.name != DONE:
            reason = f": {state.detail}" if state.detail else ""
            print(f"error: did not finish: {one.label} ({one.folder}){reason}", file=sys.stderr)
    return 0 if all(state.name == DONE for state in found) else 1
