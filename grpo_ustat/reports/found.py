"""Run folders as a report finds them: finished, unfinished, or damaged and named.

A run is told from others by its configuration's identity keys, flat, and by what its weights and
local data were; operational keys differ freely (see `identity.OPERATIONAL`).
"""

from __future__ import annotations

import csv
import glob
import io
import json
import os
import re
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

from grpo_ustat.checks import ConfigError
from grpo_ustat.reports.series import flat, identity_keys
from grpo_ustat.runs import history
from grpo_ustat.runs.sweeps import BEYOND, DONE, FAILED, STOPPED, Entry, State

CONFIG = ".hydra/config.yaml"
NUMBERS = (("step", int), ("accuracy", float), ("low", float), ("high", float), ("n", int))


@dataclass(frozen=True)
class Run:
    """A run as its folder tells.

    Attributes:
        entry: `train` or `mse`.
        label: its folder, or the overrides in which it differs from the others of its sweep.
        folder: of the run.
        config: as it was composed.
        keys: what makes it this run, by dotted key.
        state: how far it is.
        result: None while it is unfinished.
        evals: rows of held-out accuracy by its first decoding, so far; none of a study.
        metrics: rows of its steps, so far; none of a study.
        commit: of the code that it ran with, None where unknown.
        notes: what is damaged in it.
    """

    entry: str
    label: str
    folder: Path
    config: dict[str, Any]
    keys: dict[str, Any]
    state: State
    result: dict[str, Any] | None
    evals: list[dict[str, Any]]
    metrics: list[dict[str, Any]]
    commit: str | None
    notes: tuple[str, ...] = ()

    @property
    def policy(self) -> str:
        """Model and prompt: one model asked in two ways is two policies."""
        prompt = self.config["prompt"]
        shots = f" x {prompt['shots']}" if prompt.get("shots") else ""
        return f"{self.config['model']['name']}, {prompt['name']}{shots}"

    @property
    def lacking(self) -> str:
        """Why it is not whole, for a line of its own; empty where it is."""
        if self.result is not None:
            return ""
        steps = (
            "" if self.state.steps is None else f", step {self.state.step} of {self.state.steps}"
        )
        detail = f" ({self.state.detail})" if self.state.detail else ""
        return f"{self.label}: {self.state.name}{steps}{detail}"


@dataclass(frozen=True)
class Found:
    """What a report is made of.

    Attributes:
        runs: that can be shown in part or whole.
        damaged: a line for every folder that cannot be read, with the reason.
        absent: a line for every run asked for that has not begun.
        twins: a line for every folder that holds a run that another one holds as well.
    """

    runs: list[Run]
    damaged: list[str]
    absent: list[str]
    twins: list[str]


def read(entries: list[Entry]) -> Found:
    """Every run that the folders hold, each once."""
    begun = [one for one in entries if one.folder.is_dir()]
    absent = [f"{one.label}: not begun" for one in entries if one not in begun]
    runs, damaged = [], []
    for one in begun:
        try:
            runs.append(_run(one))
        except (OSError, ValueError, LookupError, TypeError, yaml.YAMLError) as error:
            damaged.append(f"{one.label}: {_reason(error)}")
    runs, twins = _once(runs)
    return Found(runs, damaged, absent, twins)


def entries_in(patterns: list[str]) -> list[Entry]:
    """The run folders in whatever the patterns match, each once.

    Raises:
        ConfigError: a pattern matches nothing, or no run.
    """
    found: dict[Path, Path] = {}
    for pattern in patterns:
        mine = [folder for place in _places(pattern) for folder in _folders(place)]
        if not mine:
            raise ConfigError(f"runs={pattern} holds no run: name folders such as outputs/train")
        found |= {folder.resolve(): folder for folder in mine}
    folders = [found[place] for place in sorted(found, key=_natural)]
    shared = os.path.commonpath([folder.absolute().parent for folder in folders])
    return [
        Entry(os.path.relpath(folder.absolute(), shared), folder, None, _asked_steps(folder))
        for folder in folders
    ]


def _natural(place: Path) -> list[tuple[int, str]]:
    """Sorts G=4 before G=16."""
    parts = re.split(r"(\d+)", str(place))
    return [(int(part), "") if part.isdigit() else (-1, part) for part in parts]


def _places(pattern: str) -> list[Path]:
    """The folders that a pattern matches."""
    matches = [Path(place) for place in glob.glob(os.path.expanduser(pattern), recursive=True)]
    if not matches:
        raise ConfigError(
            f"runs={pattern} matches nothing in {Path.cwd()}: name folders such as outputs/train"
        )
    places = [place for place in matches if place.is_dir()]
    if not places:
        raise ConfigError(
            f"runs={pattern} matches a file ({matches[0]}), no folder: name run folders, or one "
            "that they are in"
        )
    return places


def _folders(place: Path) -> list[Path]:
    """Run folders at or below a place, also those whose configuration is lost."""
    told = [file.parent.parent for file in place.rglob(CONFIG)]
    return list(dict.fromkeys([*told, *(file.parent for file in place.rglob(history.NAME))]))


def _asked_steps(folder: Path) -> int | None:
    try:
        return yaml.safe_load((folder / CONFIG).read_text()).get("max_steps")
    except (OSError, yaml.YAMLError, AttributeError, UnicodeDecodeError):
        return None


def _run(one: Entry) -> Run:
    """A run from its folder.

    Raises:
        OSError, ValueError, LookupError, TypeError, yaml.YAMLError: it is damaged or none of ours.
    """
    config = _config(one.folder)
    entry = "mse" if "group_sizes" in config else "train"
    code, notes = _code(one.folder)
    state, evals, metrics = one.state(), [], []
    result = _result(one.folder) if state.name in (DONE, BEYOND) else None
    if (one.folder / "result.json").is_file() and state.name in (STOPPED, FAILED):
        notes.append("result.json is damaged, or of another configuration")
    if entry == "train":
        evals, lost = _evals(one.folder, config, result)
        metrics, torn = metrics_rows(one.folder)
        notes += [lost] * bool(lost) + [f"{torn} damaged lines in metrics.jsonl"] * bool(torn)
    return Run(
        entry=entry,
        label=one.label,
        folder=one.folder,
        config=config,
        keys=identity_keys(config) | {key: code.get(key) for key in ("weights", "data")},
        state=state,
        result=result,
        evals=evals,
        metrics=metrics,
        commit=code.get("commit"),
        notes=tuple(f"{one.label}: {note}" for note in notes),
    )


def _config(folder: Path) -> dict[str, Any]:
    """A run's configuration, if it is one of `train` or `mse`.

    Raises:
        ValueError, OSError: it is lost, damaged, or of another program.
    """
    config = yaml.safe_load((folder / CONFIG).read_text())
    if not isinstance(config, dict):
        raise ValueError(f"{CONFIG} is damaged")
    either = [("group_sizes",), ("group_size", "budget.rollouts", "eval.decoding", "max_steps")]
    keys = flat(config).keys()
    known = ("seed", "model.name", "prompt.name", "dataset.name")
    if not all(key in keys for key in known) or not any(
        all(key in keys for key in one) for one in either
    ):
        raise ValueError(f"{CONFIG} is of neither train nor mse")
    return config


def _code(folder: Path) -> tuple[dict[str, Any], list[str]]:
    """What code.json says, and what is wrong with it."""
    try:
        return dict(json.loads((folder / "code.json").read_text())), []
    except (OSError, ValueError, TypeError):
        return {}, ["code.json is lost or damaged: its commit and weights are not known"]


def _result(folder: Path) -> dict[str, Any]:
    return json.loads((folder / "result.json").read_text())


def _evals(folder: Path, config: dict, result: dict | None) -> tuple[list[dict[str, Any]], str]:
    """Held-out accuracies by the first decoding, of an unfinished run those of its eval.csv; and
    what is wrong with that.
    """
    first = config["eval"]["decoding"][0]
    if result is not None:
        return [row for row in result["evals"] if row["decoding"] == first], ""
    try:
        text = (folder / "eval.csv").read_text()
    except OSError:
        return [], ""
    try:
        rows = [row for row in csv.DictReader(io.StringIO(text)) if row["decoding"] == first]
        return [
            {"decoding": first} | {key: kind(row[key]) for key, kind in NUMBERS} for row in rows
        ], ""
    except (ValueError, TypeError, LookupError):
        return [], "eval.csv is damaged"


def metrics_rows(folder: Path) -> tuple[list[dict[str, Any]], int]:
    """The rows of metrics.jsonl, each step once, and the number of damaged lines; of a run at work
    the last line may be half written, which is none.
    """
    try:
        lines = (folder / "metrics.jsonl").read_bytes().split(b"\n")
    except OSError:
        return [], 0
    rows, torn = {}, 0
    for line in filter(None, lines[:-1]):
        try:
            row = json.loads(line)
            rows[int(row["step"])] = row
        except (ValueError, LookupError, TypeError):
            torn += 1
    return [rows[step] for step in sorted(rows)], torn


def _once(runs: list[Run]) -> tuple[list[Run], list[str]]:
    """Each run once, the one that is further, and a line for every other folder of the same."""
    best: dict[str, Run] = {}
    twins = []
    for run in sorted(runs, key=_further, reverse=True):
        same = json.dumps([run.entry, run.keys], sort_keys=True, default=str)
        if same in best:
            twins.append(f"{run.label}: the same run as {best[same].label}, left out")
        best.setdefault(same, run)
    kept = {id(run) for run in best.values()}
    return [run for run in runs if id(run) in kept], twins


def _further(run: Run) -> tuple[bool, int]:
    return run.result is not None, run.state.step or 0


def _reason(error: Exception) -> str:
    """In one line."""
    if isinstance(error, FileNotFoundError):
        return f"{Path(error.filename).name} is missing"
    if isinstance(error, yaml.YAMLError):
        return f"{CONFIG} is damaged"
    return " ".join(str(error).split()) or type(error).__name__
