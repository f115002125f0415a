"""List of the runs of a sweep, stored in the sweep's folder, and their progress.

`sweep-<hash>.json` lists every run with its folder and the fingerprint of its configuration. The
hash depends only on the runs, so the same sweep always uses the same file.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from rich.box import SIMPLE_HEAD
from rich.table import Table
from rich.text import Text

from grpo_ustat.config.schema import ConfigError
from grpo_ustat.records import MIN_QUESTIONS, joint_quantity
from grpo_ustat.runs import history
from grpo_ustat.runs.contents import DAMAGE, read_mapping
from grpo_ustat.runs.files import write_whole
from grpo_ustat.runs.folder import RunFolder, create_folder
from grpo_ustat.runs.record import (
    COUNT_WORDS,
    DONE,
    FAILED,
    MISSING,
    PAST_MAX_STEPS,
    RUNNING,
    STOPPED,
    RunRecord,
    RunState,
)
from grpo_ustat.terminal.progress import clock_text

COLOURS = {
    DONE: "green", RUNNING: "cyan", FAILED: "red", PAST_MAX_STEPS: "red", STOPPED: "yellow",
    MISSING: "dim",
}  # fmt: skip
# Captions of the status table, by command.
CAPTIONS = {
    "train": "The {} is measured on held-out questions; 95 % intervals are for new questions.",
    "mse": "The 95 % intervals of the policy's {} and of G* are for new questions{}.",
    "gap": "The last columns count the predictions by verdict: each agrees with the measurement, "
    "disagrees, or is not decided.",
}


@dataclass(frozen=True)
class PlannedRun:
    """Run that a command line requests and that has not started."""

    # Overrides that distinguish the run from others in the sweep, such as `group_size=4 seed=0`.
    name: str
    # Checked configuration.
    config: Any
    # Run folder; None if it can be determined only within the job.
    folder: RunFolder | None
    # Folder of the sweep; None for a single run.
    sweep: Path | None


@dataclass(frozen=True)
class Entry:
    """Run that is listed in the file of a sweep."""

    # Overrides that distinguish the run from other runs in the sweep.
    label: str
    folder: Path
    # Fingerprint of the run's configuration; None accepts any fingerprint.
    config_hash: str | None
    # Number of training steps; None for a study.
    max_steps: int | None

    def record(self) -> RunRecord:
        """Return a record of the current content of the run's folder."""
        return RunRecord(self.folder, self.label, self.config_hash, self.max_steps)

    def state(self) -> RunState:
        """Return the current progress of the run."""
        return self.record().state


@dataclass(frozen=True)
class Sweep:
    """Sweep: its file, the command of its runs, and the runs."""

    file: Path
    command: str
    entries: list[Entry]


def note_sweep(command: str, planned_runs: Sequence[PlannedRun]) -> Sweep:
    """Write the list of a sweep's runs.

    Args:
        planned_runs: runs whose folders are below the sweep's folder.
    """
    place = planned_runs[0].sweep
    assert place is not None
    entries = [
        Entry(
            label=run.name or "the only one",
            folder=run.folder.path,
            config_hash=run.folder.config_hash,
            max_steps=getattr(run.config, "max_steps", None),
        )
        for run in planned_runs
        if run.folder is not None
    ]
    names = sorted(str(entry.folder.relative_to(place)) for entry in entries)
    digest = hashlib.sha256("\n".join(names).encode()).hexdigest()[:8]
    sweep = Sweep(place / f"sweep-{digest}.json", command, entries)
    runs = [asdict(entry) | {"folder": str(entry.folder.relative_to(place))} for entry in entries]
    time = datetime.now(UTC).isoformat(timespec="seconds")
    create_folder(place, "hydra.sweep.dir")
    write_whole(sweep.file, json.dumps({"entry": command, "noted": time, "runs": runs}, indent=1))
    return sweep


def sweeps_in(place: Path) -> list[Sweep]:
    """Return a folder's sweeps in order of time.

    Runs that belong to no sweep are returned as one more sweep per command. If `place` is the file
    of a sweep, only this sweep is returned.
    """
    if place.is_file():
        return [_read_sweep(place)]
    sweeps = [_read_sweep(file) for file in place.glob("sweep-*.json")]
    sweeps.sort(key=lambda sweep: sweep.file.stat().st_mtime)
    listed = {entry.folder for sweep in sweeps for entry in sweep.entries}
    folders = [file.parent for file in sorted(place.rglob(history.NAME))]
    records = [RunRecord(folder) for folder in folders if folder not in listed]
    fallback = next((record.command for record in records if record.config), "mse")
    entries: dict[str, list[Entry]] = {}
    for record in records:
        label = str(record.folder.relative_to(place))
        entry = Entry(label, record.folder, None, record.config.get("max_steps"))
        # A run without a readable configuration is listed with the other runs.
        entries.setdefault(record.command if record.config else fallback, []).append(entry)
    file = place / "(not part of any sweep)" if listed else place
    sweeps += [Sweep(file, command, runs) for command, runs in entries.items()]
    if not sweeps:
        raise ConfigError(
            f"{place} contains no sweep and no run: use a folder such as outputs/train"
        )
    return sweeps


def _read_sweep(file: Path) -> Sweep:
    """Read the file of a sweep; refuse a damaged file or another kind of file."""
    try:
        content = read_mapping(file)
        runs = [Entry(**run | {"folder": file.parent / run["folder"]}) for run in content["runs"]]
        if content["entry"] not in CAPTIONS:
            raise ValueError(f"its entry is {content['entry']!r}")
        return Sweep(file, content["entry"], runs)
    except DAMAGE as error:
        raise ConfigError(
            f"{file} is not the file of a sweep, or it is damaged ({error})"
        ) from error


def status_table(sweep: Sweep, states: Sequence[RunState]) -> Table:
    """Return a table for a terminal, with one row per run and a caption that counts the states."""
    counts = {name: sum(state.name == name for state in states) for name in COLOURS}
    summary = ", ".join(f"{count} {name}" for name, count in counts.items() if count)
    runs = f"{len(states)} run{'s' * (len(states) != 1)}"
    name = joint_quantity(state.quantity for state in states if state.quantity is not None)
    counted = [state.questions for state in states if state.questions is not None]
    scope = ""
    if min(counted, default=MIN_QUESTIONS) < MIN_QUESTIONS:
        scope = f", or for the given questions if fewer than {MIN_QUESTIONS}"
    table = Table(
        title=str(sweep.file),
        caption=f"{runs}: {summary}. {CAPTIONS[sweep.command].format(name, scope)}",
        box=SIMPLE_HEAD,
        pad_edge=False,
        caption_justify="left",
    )
    table.add_column("run", overflow="fold")
    table.add_column("state")
    steps = ["step"] if sweep.command == "train" else []
    results = {"gap": list(COUNT_WORDS.values()), "mse": [name, "G*", "use\nG"]}
    results = results.get(sweep.command, [name])
    for column in (*steps, "starts", "wall\ntime", *results):
        table.add_column(column, justify="right", no_wrap=True)
    for entry, state in zip(sweep.entries, states, strict=True):
        cells: list[Any] = [entry.label, Text(state.name, COLOURS[state.name])]
        if sweep.command == "train":
            cells.append("" if state.steps is None else f"{state.step}/{state.steps}")
        cells += [
            str(state.launches or ""), "" if state.seconds is None else duration_text(state.seconds)
        ]  # fmt: skip
        if sweep.command == "gap":
            cells += ["" if state.verdicts is None else str(state.verdicts[v]) for v in COUNT_WORDS]
        elif state.name != DONE or state.mean_reward is None:
            cells.append("")
        else:
            cells.append(f"{state.mean_reward:.3f} [{state.low:.3f}, {state.high:.3f}]")
        if sweep.command == "mse":
            gstar = state.gstar or "not enough\ndata" * (state.name == DONE)
            # Break lines in the cells so that the table fits into 80 columns.
            cells[-1] = cells[-1].replace(" [", "\n[")
            cells += [gstar.replace(" [", "\n["), str(state.best_divisor or "")]
        table.add_row(*cells)
    return table


def details(sweep: Sweep, states: Sequence[RunState]) -> list[str]:
    """Return one line for each run that has an error or a process to report."""
    pairs = zip(sweep.entries, states, strict=True)
    return [f"{state.name}: {run.label}: {state.detail}" for run, state in pairs if state.detail]


def duration_text(seconds: float) -> str:
    """Format a duration in seconds if it is below a minute, and otherwise as `M:SS` or `H:MM:SS`.

    >>> duration_text(4.3), duration_text(83), duration_text(7384)
    ('4 s', '1:23', '2:03:04')
    """
    return f"{seconds:.0f} s" if round(seconds) < 60 else clock_text(seconds)
