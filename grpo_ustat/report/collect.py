"""The runs of a report: every folder that the patterns match, shown or named as damaged."""

from __future__ import annotations

import glob
import json
import os
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from grpo_ustat.config.schema import ConfigError
from grpo_ustat.runs import history
from grpo_ustat.runs.files import natural_order
from grpo_ustat.runs.record import CONFIG, DONE, PAST_MAX_STEPS, RunRecord
from grpo_ustat.runs.status import Entry
from grpo_ustat.terminal.streams import single_line

# Keys that the configuration of a command has.
CONFIG_KEYS = {
    "train": ("model.name", "prompt.name", "dataset.name", "group_size", "budget.rollouts",
              "eval.decoding", "max_steps", "seed"),
    "mse": ("model.name", "prompt.name", "dataset.name", "group_sizes", "seed"),
    "gap": ("theorem.kind", "problem.name", "seed"),
}  # fmt: skip


@dataclass(frozen=True)
class RunSet:
    """The runs of a report, and lines on all that is not among them."""

    # Runs that can be shown completely or in part.
    runs: list[RunRecord]
    # A line for every folder that cannot be read, with the reason.
    damaged: list[str]
    # A line for every run of a sweep that has not begun.
    absent: list[str]
    # A line for every folder that holds the same run as another one.
    twins: list[str]


def entries_in(patterns: Sequence[str]) -> list[Entry]:
    """Find each run folder at or below the matches of the patterns once, G=4 before G=16."""
    # By resolved path.
    folders: dict[Path, Path] = {}
    for pattern in patterns:
        matches = [Path(place) for place in glob.glob(os.path.expanduser(pattern), recursive=True)]
        if not matches:
            several = f"runs=[{pattern}] if these are several, or " if "," in pattern else ""
            raise ConfigError(
                f"runs={pattern} matches nothing in {Path.cwd()}: use {several}folders such as "
                "outputs/train"
            )
        places = [place for place in matches if place.is_dir()]
        if not places:
            raise ConfigError(
                f"runs={pattern} matches a file ({matches[0]}), no folder: name run folders, or "
                "one that they are in"
            )
        run_folders = []
        # A run is recognised by its history, too, if its configuration is lost.
        for place in places:
            run_folders += [file.parent.parent for file in place.rglob(CONFIG)]
            run_folders += [file.parent for file in place.rglob(history.NAME)]
        if not run_folders:
            raise ConfigError(f"runs={pattern} holds no run: name folders such as outputs/train")
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
    """Read every run that the folders hold, each once.

    Of folders with the same run, the one that is further is taken.
    """
    runs, damaged, absent = [], [], []
    for entry in entries:
        if not entry.folder.is_dir():
            absent.append(f"{entry.label}: not begun")
            continue
        try:
            run = entry.record()
            _check(run)
            # A damaged configuration may have no keys.
            _ = run.keys
            runs.append(run)
        except (OSError, ValueError, LookupError, TypeError, AttributeError) as error:
            damaged.append(f"{entry.label}: {single_line(error)}")
    furthest: dict[str, RunRecord] = {}
    twins = []
    for run in sorted(runs, key=lambda r: (r.result is not None, r.state.step or 0), reverse=True):
        identity = json.dumps([run.command, run.keys], sort_keys=True, default=str)
        if identity in furthest:
            twins.append(f"{run.label}: the same run as {furthest[identity].label}, left out")
        furthest.setdefault(identity, run)
    single = {id(run) for run in furthest.values()}
    return RunSet([run for run in runs if id(run) in single], damaged, absent, twins)


def _check(run: RunRecord) -> None:
    """Refuse a run that cannot be shown, and forget a result that does not belong to this run.

    Raises:
        ValueError: its configuration is lost, damaged, or of another program.
    """
    if not run.config:
        raise ValueError("; ".join(run.notes) or f"{CONFIG} is missing")
    if any(run.value(key) is None for key in CONFIG_KEYS[run.command]):
        raise ValueError(f"{CONFIG} is of none of {', '.join(CONFIG_KEYS)}")
    if run.state.name not in (DONE, PAST_MAX_STEPS):
        run.result = None
    if run.command == "train":
        # Reading them notes damage.
        _ = run.evals
    if not run.code:
        run.add_note("code.json is lost or damaged: its commit and weights are not known")
