"""A sweep's list of runs, kept beside their folders, and how far each of them is.

`sweep-<hash>.json` in the sweep's folder names every run with its folder and the fingerprint of its
configuration; the same sweep finds the same file again. Whether a run is done is read from its own
folder, never from a scheduler: its `result.json` has that fingerprint and as many steps as asked.
"""

from __future__ import annotations

import hashlib
import json
from dataclasses import asdict, dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import yaml
from rich.box import SIMPLE_HEAD
from rich.markup import escape
from rich.table import Table

from grpo_ustat.checks import ConfigError
from grpo_ustat.runs import history
from grpo_ustat.runs.entries import entry_of
from grpo_ustat.runs.folder import write_whole
from grpo_ustat.runs.lock import peek
from grpo_ustat.runs.points import Point
from grpo_ustat.runs.verdicts import COUNTED, verdict_counts

DONE, RUNNING, FAILED, STOPPED, MISSING = "done", "running", "failed", "stopped", "missing"
BEYOND = "beyond"


@dataclass(frozen=True)
class State:
    """How far a run is.

    Attributes:
        name: done, running, failed, stopped (or killed: it goes on when asked again), missing, or
            beyond: it has done more steps than are asked, so it is not what was asked.
        detail: of a failed one the last line of its error, of a running one who runs it.
        launches: how often it was started.
        step, steps: training steps done and asked for; None of a study.
        seconds: that the work took, restarts included; None until it is done.
        accuracy, low, high: held-out, or of a study's policy; None until it is done.
        verdicts: of a study of a theorem, how many claims have each; None until it is done.
    """

    name: str
    detail: str = ""
    launches: int = 0
    step: int | None = None
    steps: int | None = None
    seconds: float | None = None
    accuracy: float | None = None
    low: float | None = None
    high: float | None = None
    verdicts: dict[str, int] | None = None


@dataclass(frozen=True)
class Entry:
    """One run of a sweep.

    Attributes:
        label: the overrides in which it differs from the others.
        folder: of the run.
        config_hash: fingerprint of its configuration; None: whatever the folder holds.
        max_steps: of training, None of a study.
    """

    label: str
    folder: Path
    config_hash: str | None
    max_steps: int | None

    def state(self) -> State:
        """How far it is now, from its folder alone.

        A launch that failed after the result was found, such as one that was to overwrite it, left
        what was there: the run is what its last launch is.
        """
        rows = history.launches(self.folder)
        known = dict(
            launches=sum(row.get("event") == "start" for row in rows),
            step=_last_step(self.folder) if self.max_steps else None,
            steps=self.max_steps,
        )
        found, lacking = self._result()
        last = next((row for row in reversed(rows) if "event" in row), {})
        failed = last.get("outcome") == "failed"
        if found is not None and not (failed and self._is_own(last)):
            return self._ended(known | found)
        owner = peek(self.folder)
        if owner is not None:
            return State(RUNNING, f"{owner.host}, process {owner.pid}", **known)
        if failed:
            return State(FAILED, str(last.get("error", "")), **known)
        if not rows:
            return State(MISSING, **known)
        reason = str(last.get("reason", lacking)) if "outcome" in last else "killed"
        return State(STOPPED, reason, **known)

    def _is_own(self, row: dict[str, Any]) -> bool:
        """Whether a row is of this configuration; one that names none is."""
        return None in (self.config_hash, own := row.get("config_hash")) or own == self.config_hash

    def _ended(self, known: dict[str, Any]) -> State:
        done, asked = known.get("step") or 0, self.max_steps
        if asked is None or done == asked:
            return State(DONE, **known)
        text = f"{done} steps are done, {asked} asked: use max_steps={done} or more"
        return State(BEYOND, text, **known)

    def _result(self) -> tuple[dict[str, Any] | None, str]:
        """What the finished run found; else None, and what its result lacks."""
        try:
            result = json.loads((self.folder / "result.json").read_text())
            found = _found(result)
        except (OSError, ValueError, LookupError, TypeError):
            return None, "its result is missing or damaged"
        if self.config_hash not in (None, result.get("config_hash")):
            return None, "its result is another configuration's"
        if found.get("step", 0) < (self.max_steps or 0):
            return None, f"{self.max_steps} steps are asked now"
        return found, ""


@dataclass(frozen=True)
class Sweep:
    """A sweep's file and its runs."""

    file: Path
    entry: str
    entries: list[Entry]


def note_sweep(entry: str, points: list[Point]) -> Sweep:
    """Keep the list of a sweep's runs."""
    place = points[0].sweep
    entries = [
        Entry(
            label=point.name or "the only one",
            folder=point.folder.path,
            config_hash=point.folder.config_hash,
            max_steps=getattr(point.config, "max_steps", None),
        )
        for point in points
    ]
    names = sorted(str(one.folder.relative_to(place)) for one in entries)
    digest = hashlib.sha256("\n".join(names).encode()).hexdigest()[:8]
    sweep = Sweep(place / f"sweep-{digest}.json", entry, entries)
    runs = [asdict(one) | {"folder": str(one.folder.relative_to(place))} for one in entries]
    place.mkdir(parents=True, exist_ok=True)
    noted = {"entry": entry, "noted": datetime.now(UTC).isoformat(timespec="seconds"), "runs": runs}
    write_whole(sweep.file, json.dumps(noted, indent=1))
    return sweep


def sweeps_in(place: Path) -> list[Sweep]:
    """The sweeps that a folder holds, the latest last, then the runs that none of them names; or
    that of a sweep's file alone.

    Raises:
        ConfigError: there is nothing of ours, or a sweep's file is damaged.
    """
    if place.is_file():
        return [_read(place)]
    sweeps = [_read(file) for file in place.glob("sweep-*.json")]
    sweeps.sort(key=lambda sweep: sweep.file.stat().st_mtime)
    found = sweeps + _unnamed(place, {one.folder for sweep in sweeps for one in sweep.entries})
    if not found:
        raise ConfigError(f"{place} holds no sweep and no run: name a folder such as outputs/train")
    return found


def _unnamed(place: Path, named: set[Path]) -> list[Sweep]:
    """The runs that no sweep names, as one for each entry."""
    folders = [file.parent for file in sorted(place.rglob(history.NAME))]
    configs = {folder: _config(folder) for folder in folders if folder not in named}
    of = {folder: entry_of(config) for folder, config in configs.items() if config}
    lost = next(iter(of.values()), "mse")  # shown beside others
    file = place / "(named by no sweep)" if named else place
    found: dict[str, list[Entry]] = {}
    for folder, config in configs.items():
        run = Entry(str(folder.relative_to(place)), folder, None, config.get("max_steps"))
        found.setdefault(of.get(folder, lost), []).append(run)
    return [Sweep(file, entry, runs) for entry, runs in found.items()]


def _config(folder: Path) -> dict[str, Any]:
    """A run's configuration, empty where it is lost or damaged."""
    try:
        config = yaml.safe_load((folder / ".hydra" / "config.yaml").read_text())
    except (OSError, ValueError, yaml.YAMLError):
        return {}
    return config if isinstance(config, dict) else {}


def _read(file: Path) -> Sweep:
    try:
        noted = json.loads(file.read_text())
        runs = [Entry(**run | {"folder": file.parent / run["folder"]}) for run in noted["runs"]]
        if noted["entry"] not in SHOWN:
            raise ValueError(f"of entry {noted['entry']!r}")
        return Sweep(file, noted["entry"], runs)
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise ConfigError(f"{file} is not a sweep's file, or damaged ({error})") from error


def status_table(sweep: Sweep, states: list[State]) -> Table:
    """A row for every run; how many are done and so on below it."""
    counts = {name: sum(state.name == name for state in states) for name in COLOURS}
    said = ", ".join(f"{count} {name}" for name, count in counts.items() if count)
    table = Table(
        title=escape(str(sweep.file)),
        caption=f"{said} of {len(states)} runs; {SHOWN[sweep.entry]}",
        box=SIMPLE_HEAD,
        pad_edge=False,
    )
    table.add_column("run", overflow="fold")
    table.add_column("state")
    steps = ["step"] if sweep.entry == "train" else []
    found = list(COUNTED.values()) if sweep.entry == "gap" else ["accuracy"]
    for column in (*steps, "starts", "time", *found):
        table.add_column(column, justify="right", no_wrap=True)
    for one, state in zip(sweep.entries, states, strict=True):
        table.add_row(*_cells(sweep.entry, one, state))
    return table


def details(sweep: Sweep, states: list[State]) -> list[str]:
    """A line for every run of which there is more to say: why it failed, who runs it."""
    pairs = zip(sweep.entries, states, strict=True)
    return [f"{state.name}: {one.label}: {state.detail}" for one, state in pairs if state.detail]


COLOURS = {
    DONE: "green", RUNNING: "cyan", FAILED: "red", BEYOND: "red", STOPPED: "yellow",
    MISSING: "dim",
}  # fmt: skip


SHOWN = {  # what a table shows of the finished runs of an entry
    "train": "held-out accuracy, 95 % intervals over questions",
    "mse": "accuracy of the policy, 95 % intervals over questions",
    "gap": "predictions that agree with what is measured, that do not, and that are not decided",
}


def _cells(entry: str, one: Entry, state: State) -> list[str]:
    step = ["" if state.steps is None else f"{state.step}/{state.steps}"]
    return [
        escape(one.label),
        f"[{COLOURS[state.name]}]{state.name}[/]",
        *(step if entry == "train" else []),
        str(state.launches or ""),
        "" if state.seconds is None else _clock(state.seconds),
        *(_verdicts(state) if entry == "gap" else [_accuracy(state)]),
    ]


def _accuracy(state: State) -> str:
    if state.name != DONE or state.accuracy is None:
        return ""
    return escape(f"{state.accuracy:.3f} [{state.low:.3f}, {state.high:.3f}]")


def _verdicts(state: State) -> list[str]:
    if state.verdicts is None:
        return [""] * len(COUNTED)
    return [str(state.verdicts[name]) for name in COUNTED]


def _clock(seconds: float) -> str:
    """What a clock would show, such as 4.3 s, 1:23 or 2:03:04."""
    if seconds < 60:
        return f"{seconds:.1f} s"
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02}:{rest:02}" if hours else f"{minutes}:{rest:02}"


def _found(result: dict[str, Any]) -> dict[str, Any]:
    """Time, and accuracy or verdicts, of a finished run of any entry."""
    if "claims" in result:
        counts = verdict_counts(result["claims"])
        return {"verdicts": counts, "seconds": float(result["cost"]["seconds"])}
    if "final_accuracy" in result:
        accuracy = {"accuracy": result["final_accuracy"]}
        accuracy |= {"low": result["accuracy_low"], "high": result["accuracy_high"]}
        return accuracy | {"step": result["steps"], "seconds": result["seconds"]}
    policy, cost = result["policy"], result["cost"]
    seconds = cost["seconds_generate"] + cost["seconds_score"]
    accuracy = {"accuracy": policy["accuracy"]}
    accuracy |= {"low": policy["accuracy_low"], "high": policy["accuracy_high"]}
    return accuracy | {"seconds": seconds}


def _last_step(folder: Path) -> int:
    """The last step with a whole row."""
    try:
        lines = (folder / "metrics.jsonl").read_bytes().splitlines()
    except OSError:
        return 0
    for line in reversed(lines):
        try:
            return json.loads(line)["step"]
        except (ValueError, KeyError, TypeError):
            continue
    return 0
