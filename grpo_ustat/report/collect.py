"""Find the runs of a report: all run folders that match the patterns, readable or damaged."""

from __future__ import annotations

import glob
import json
import os
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from grpo_ustat.config.schema import ConfigError
from grpo_ustat.measurements.base import Study
from grpo_ustat.measurements.errors import CURVES
from grpo_ustat.measurements.group_size import SCALING
from grpo_ustat.runs import history
from grpo_ustat.runs.files import natural_order
from grpo_ustat.runs.record import CONFIG, DONE, PAST_MAX_STEPS, RunRecord
from grpo_ustat.runs.status import Entry
from grpo_ustat.terminal.streams import single_line

# Keys that must exist in the configuration of each command.
CONFIG_KEYS = {
    "train": ("model.name", "prompt.name", "dataset.name", "group_size", "budget.rollouts",
              "eval.decoding", "max_steps", "seed"),
    "mse": ("model.name", "prompt.name", "dataset.name", "group_sizes", "seed"),
    "gap": ("theorem.kind", "theorem.problem", "seed"),
}  # fmt: skip


@dataclass(frozen=True)
class RunSet:
    """Runs of a report, and lines on the runs that the report cannot show."""

    # Runs of which at least a part can be shown.
    runs: list[RunRecord]
    # A line for each folder that cannot be read, with the reason.
    damaged: list[str]
    # A line for each run of a sweep that has not started.
    absent: list[str]
    # A line for each folder that contains the same run as another folder.
    twins: list[str]


def entries_in(patterns: Sequence[str]) -> list[Entry]:
    """Return the run folders at or below the matching folders, each once and in natural order.

    In natural order, G=4 comes before G=16.
    """
    # Folders, keyed by resolved path.
    folders: dict[Path, Path] = {}
    for pattern in patterns:
        matches = [Path(place) for place in glob.glob(os.path.expanduser(pattern), recursive=True)]
        if not matches:
            several = f"runs=[{pattern}] for several patterns, or " if "," in pattern else ""
            raise ConfigError(
                f"runs={pattern} matches nothing in {Path.cwd()}: use {several}folders such as "
                "outputs/train"
            )
        places = [place for place in matches if place.is_dir()]
        if not places:
            raise ConfigError(
                f"runs={pattern} matches a file ({matches[0]}), not a folder: name run folders or "
                "a folder that contains them"
            )
        run_folders = []
        # If a run's configuration file is lost, its history file still marks the run folder.
        for place in places:
            run_folders += [file.parent.parent for file in place.rglob(CONFIG)]
            run_folders += [file.parent for file in place.rglob(history.NAME)]
        if not run_folders:
            raise ConfigError(f"runs={pattern} contains no run: name folders such as outputs/train")
        folders |= {folder.resolve(): folder for folder in dict.fromkeys(run_folders)}
    ordered = [folders[place] for place in sorted(folders, key=natural_order)]
    shared = os.path.commonpath([folder.absolute().parent for folder in ordered])
    return [
        Entry(
            label=os.path.relpath(folder.absolute(), shared),
            folder=folder,
            config_hash=None,
            max_steps=RunRecord(folder).config.get("max_steps"),
        )
        for folder in ordered
    ]


def read_runs(entries: Sequence[Entry]) -> RunSet:
    """Read the runs in all folders.

    If several folders contain a run with the same configuration, only the folder with the most
    progress is used.
    """
    runs, damaged, absent = [], [], []
    for entry in entries:
        if not entry.folder.is_dir():
            absent.append(f"{entry.label}: not started")
            continue
        try:
            run = entry.record()
            _check(run)
            # Reading the keys raises an error if the configuration is damaged.
            _ = run.keys
            runs.append(run)
        except (ConfigError, OSError, ValueError, LookupError, TypeError, AttributeError) as error:
            damaged.append(f"{entry.label}: {single_line(error)}")
    furthest: dict[str, RunRecord] = {}
    twins = []
    for run in sorted(runs, key=lambda r: (r.result is not None, r.state.step or 0), reverse=True):
        identity = json.dumps([run.command, run.keys], sort_keys=True, default=str)
        if identity in furthest:
            twins.append(
                f"{run.label}: the same run as {furthest[identity].label}, so it is left out"
            )
        furthest.setdefault(identity, run)
    single = {id(run) for run in furthest.values()}
    return RunSet([run for run in runs if id(run) in single], damaged, absent, twins)


def _check(run: RunRecord) -> None:
    """Raise an error if a run cannot be shown, and discard the result of an unfinished run.

    Raises:
        ConfigError: If a study has no scaling law or no errors.
        ValueError: If the configuration is lost, damaged, or from a different program.
    """
    if not run.config:
        raise ValueError("; ".join(run.notes) or f"{CONFIG} is missing")
    if any(run.value(key) is None for key in CONFIG_KEYS[run.command]):
        raise ValueError(f"{CONFIG} is not a configuration of {', '.join(CONFIG_KEYS)}")
    if run.state.name not in (DONE, PAST_MAX_STEPS):
        run.result = None
    if run.command == "mse" and run.result and "equal_rewards" not in run.result:
        # Raises an error if a number that every report shows is damaged.
        Study(run).need(SCALING)
        Study(run).need(CURVES)
    if run.command == "train":
        # If the evaluations are damaged, reading them adds a note to the run.
        _ = run.evals
    if not run.code:
        run.add_note("code.json is lost or damaged: the run's commit and weights are unknown")
