"""Run folders as a report finds them: finished, unfinished, or damaged and named.

A run is told from others by its configuration's identity keys, flat, and by what its weights and
local data were; operational keys differ freely (see `identity.OPERATIONAL`).
"""

from __future__ import annotations

import glob
import json
import os
import re
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

from grpo_ustat.checks import ConfigError
from grpo_ustat.reports.series import identity_keys
from grpo_ustat.runs import history
from grpo_ustat.runs.contents import Contents
from grpo_ustat.runs.entries import entry_of
from grpo_ustat.runs.sweeps import BEYOND, DONE, Entry, State

CONFIG = ".hydra/config.yaml"
ASKED = {  # of a configuration
    "train": ("model.name", "prompt.name", "dataset.name", "group_size", "budget.rollouts",
              "eval.decoding", "max_steps", "seed"),
    "mse": ("model.name", "prompt.name", "dataset.name", "group_sizes", "seed"),
    "gap": ("study.kind", "bed.name", "seed"),
}  # fmt: skip
NEEDED = {  # of a result
    "train": ("evals",),
    "mse": ("curves", "scaling", "assumption2", "policy", "questions", "pool_completions"),
    "gap": ("statement", "claims", "answer", "verdict"),
}
CLAIM = {  # what is needed of a claim
    "what": str, "predicted": (int, float, str), "measured": (int, float),
    "low": (int, float, type(None)), "high": (int, float, type(None)), "how": str,
}  # fmt: skip
NUMBERS = ("step", "accuracy", "low", "high", "n")


@dataclass(frozen=True)
class Run:
    """A run as its folder tells.

    Attributes:
        entry: `train`, `mse` or `gap`.
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
        """Model and prompt, for one model asked in two ways is two policies; or the bed."""
        if self.entry == "gap":
            return self.config["bed"]["name"]
        prompt = self.config["prompt"]
        shots = f" x {prompt['shots']}" if prompt.get("shots") else ""
        return f"{self.config['model']['name']}, {prompt['name']}{shots}"

    @property
    def dataset(self) -> str | None:
        """Name of the questions, of which a bed has none."""
        return None if self.entry == "gap" else self.config["dataset"]["name"]

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
        except (OSError, ValueError, LookupError, TypeError) as error:
            damaged.append(f"{one.label}: {' '.join(str(error).split())}")
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
        ValueError: its configuration is lost, damaged, or of another program.
    """
    held = Contents(one.folder)
    config = _checked(held)
    entry = entry_of(config)
    state, notes = one.state(), list(held.notes)
    result = held.result if state.name in (DONE, BEYOND) else None
    lacking = [key for key in NEEDED[entry] if result is not None and key not in result]
    if lacking:
        raise ValueError(
            f"result.json has no {', '.join(lacking)}: of another version, run it again"
        )
    if entry == "gap" and result is not None:
        _check_claims(result["claims"])
    evals = _evals(held, result, notes) if entry == "train" else []
    if not held.code:
        notes.append("code.json is lost or damaged: its commit and weights are not known")
    return Run(
        entry=entry,
        label=one.label,
        folder=one.folder,
        config=config,
        keys=identity_keys(config) | {key: held.code.get(key) for key in ("weights", "data")},
        state=state,
        result=result,
        evals=evals,
        metrics=[row for row in held.metrics if isinstance(row.get("step"), int)],
        commit=held.code.get("commit"),
        notes=tuple(f"{one.label}: {note}" for note in dict.fromkeys(notes)),
    )


def _checked(held: Contents) -> dict[str, Any]:
    """A run's configuration, if it is one of `train`, `mse` or `gap`."""
    if not held.config:
        raise ValueError("; ".join(held.notes) or f"{CONFIG} is missing")
    if any(held.value(key) is None for key in ASKED[entry_of(held.config)]):
        raise ValueError(f"{CONFIG} is of none of {', '.join(ASKED)}")
    return held.config


def _check_claims(claims: list[dict[str, Any]]) -> None:
    for claim in claims:
        wrong = [key for key, kind in CLAIM.items() if not isinstance(claim.get(key, ...), kind)]
        if wrong:
            raise ValueError(
                f"result.json has a claim without a {' and '.join(wrong)} that can be shown: "
                "run it again"
            )


def _evals(held: Contents, result: dict | None, notes: list[str]) -> list[dict[str, Any]]:
    """Held-out accuracies by the first decoding; of an unfinished run, so far."""
    first = held.config["eval"]["decoding"][0]
    every = held.evals if result is None else result["evals"]
    rows = [row for row in every if row.get("decoding") == first]
    whole = [row for row in rows if all(isinstance(row.get(x), int | float) for x in NUMBERS)]
    if len(whole) < len(rows) or bool(every) > bool(rows):
        notes.append("eval.csv is damaged in part")
    return whole


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
