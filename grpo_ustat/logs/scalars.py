"""Reader of the scalars of a training run, such as the mean reward of each step.

The format of a log is recognised by its content: `trainer_state.json` of transformers, JSON lines
(verl's `file` logger, prime-rl, ours), TensorBoard event files, a run folder of W&B, a CSV table,
or an address `wandb://entity/project/run`. Trainers give the same scalar different names;
`scalar_names` maps them to common fields.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np

from grpo_ustat.config.schema import ConfigError
from grpo_ustat.logs.scalar_files import (
    RawScalars,
    Row,
    csv_scalars,
    event_scalars,
    is_event_file,
    json_line_scalars,
    json_rows,
    online_scalars,
    trainer_state,
    wandb_scalars,
)
from grpo_ustat.logs.scalar_names import (
    GROUP_SIZE_SETTINGS,
    LEAVE_ONE_OUT_SETTING,
    NAMES,
    NEMO_RL,
    NONNEGATIVE,
    OURS,
    PRIME_RL,
    PROMPT_SETTINGS,
    SHARES,
    TRL,
    Name,
    match,
    trainer_of,
)
from grpo_ustat.records import MAX_REWARD, Array, is_number
from grpo_ustat.runs.files import natural_order
from grpo_ustat.terminal.streams import excerpt, single_line

ONLINE = "wandb://"
READABLE = (
    "trainer_state.json, JSON lines with a step, TensorBoard event files, a folder wandb/run-*, or "
    "a CSV table with a column of steps"
)
# Texts that W&B and JSON writers use for numbers that are not finite. Such values count as missing.
NOT_FINITE = ("NaN", "nan", "Infinity", "-Infinity", "inf", "-inf")
# Keys that only rows with completions have; such a file is not a log of scalars.
ROLLOUT_KEYS = {"prompt", "completion", "completions", "input", "output", "prompt_ids", "rewards"}
# Rounding to float32 can put a share outside of [0, 1] by at most this value.
ROUNDING = 1e-5


@dataclass(frozen=True)
class ScalarRun:
    """Scalars of one run, by step."""

    # File, folder or address that was read.
    source: str
    # Name of the run for tables.
    name: str
    # Trainer that wrote the log; empty if the names fit several trainers.
    trainer: str
    # Steps in increasing order, [T].
    steps: Array
    # Values of the common fields of `scalar_names`, each [T]; NaN at a step without a value.
    fields: Mapping[str, Array]
    # Name of each common field in the log.
    logged_names: Mapping[str, str]
    # All numeric scalars, keyed by their name in the log, each [T].
    raw: Mapping[str, Array]
    # Settings of the run, from the log or from a file next to it.
    settings: Mapping[str, Any] = field(default_factory=dict)
    # Group size G, and number of rollouts per step n; None if the log does not show them.
    num_generations: int | None = None
    rollouts: int | None = None
    # Number of training steps over which a row averages; None if unknown.
    steps_per_row: int | None = 1
    # Number of rewards that must be equal for a group to count in the zero-variance share. This is
    # G, or G - 1 if the trainer logs leave-one-out baselines instead. None if G is unknown.
    share_size: int | None = None
    # Sentences about parts that could not be read.
    notes: Sequence[str] = ()

    def values(self, name: str) -> Array:
        """Return the values of a field at the steps that have one; empty if no step has."""
        values = self.fields.get(name, np.zeros(0))
        return values[np.isfinite(values)]


def is_scalar_log(path: str | Path) -> bool:
    """Return True if the content of a path is a log of scalars."""
    if str(path).startswith(ONLINE):
        return True
    try:
        return bool(read_scalars(path))
    except ConfigError:
        return False


def read_scalars(path: str | Path) -> list[ScalarRun]:
    """Read the runs in a log of scalars; most logs hold one run.

    Raises:
        ConfigError: The path is not a log of scalars, it is damaged, or all its scalars are
            unknown.
    """
    if str(path).startswith(ONLINE):
        address = str(path).removeprefix(ONLINE)
        if len(address.split("/")) != 3 or not all(address.split("/")):
            raise ConfigError(f"{path}: name a run as wandb://entity/project/run")
        return [_scalar_run(str(path), online_scalars(address))]
    path = Path(path)
    try:
        raws = _raw_scalars(path)
    except OSError as error:
        raise ConfigError(f"{path} cannot be read: {single_line(error, 100)}") from error
    return [_scalar_run(str(path), raw) for raw in raws]


def read_all_scalars(paths: Sequence[str | Path]) -> list[ScalarRun]:
    """Read several logs, and merge tables that have different metrics of the same run.

    W&B exports one such table for each chart.
    """
    runs: list[ScalarRun] = []
    for run in (run for path in paths for run in read_scalars(path)):
        same = next((i for i, other in enumerate(runs) if _is_complement(other, run)), None)
        if same is None:
            runs.append(run)
        else:
            runs[same] = _merged(runs[same], run)
    return runs


def _is_complement(run: ScalarRun, other: ScalarRun) -> bool:
    """Return True if two CSV tables have the same run name and different metrics."""
    tables = all(part.source.lower().endswith(".csv") for part in (run, other))
    return tables and run.name == other.name and not set(run.raw) & set(other.raw)


def _merged(run: ScalarRun, other: ScalarRun) -> ScalarRun:
    """Join the metrics of two tables of a run by step."""
    rows: list[Row] = [
        (float(step), {name: float(values[i]) for name, values in part.raw.items()})
        for part in (run, other)
        for i, step in enumerate(part.steps)
    ]
    notes = [*run.notes, *(note for note in other.notes if note not in run.notes)]
    merged = _scalar_run(run.source, RawScalars(rows, run.name, notes=notes))
    return replace(merged, source=f"{run.source}, {other.source}")


def _raw_scalars(path: Path) -> list[RawScalars]:
    """Read a file or a folder; the format is recognised by content."""
    if path.is_dir():
        return _folder_scalars(path)
    if not path.is_file():
        raise ConfigError(f"{path} does not exist: name {READABLE}")
    with path.open("rb") as file:
        head = file.read(64)
    if not head:
        raise ConfigError(f"{path} is empty")
    if is_event_file(head):
        return [event_scalars(path)]
    if head.startswith(b":W&B"):
        return [wandb_scalars(path)]
    text = _text(path)
    if not text.strip():
        raise ConfigError(f"{path} is empty")
    if text.lstrip()[0] == "{":
        return [_json_scalars(path, text)]
    first = text.lstrip().splitlines()[0]
    if "," in first:
        return csv_scalars(path, text)
    raise ConfigError(f"{path} is not a log of scalars: name {READABLE}")


def _text(path: Path) -> str:
    """Return the text of a file in UTF-8, or in UTF-16 with a byte-order mark."""
    data = path.read_bytes()
    encoding = "utf-16" if data[:2] in (b"\xff\xfe", b"\xfe\xff") else "utf-8-sig"
    try:
        text = data.decode(encoding)
    except UnicodeDecodeError as error:
        raise ConfigError(
            f"{path} is not text in UTF-8 and not an event file: name {READABLE}"
        ) from error
    if "\0" in text:
        raise ConfigError(f"{path} contains null characters, so it is no text: name {READABLE}")
    return text


def _json_scalars(path: Path, text: str) -> RawScalars:
    """Read a trainer state or JSON lines."""
    try:
        content = json.loads(text)
    except (ValueError, RecursionError) as error:
        if '"log_history"' in text:
            message = single_line(error, 100)
            raise ConfigError(f"{path} is not complete JSON: {message}") from error
        content = None
    if isinstance(content, dict) and "log_history" in content:
        return trainer_state(path, content)
    rows, notes = json_rows(path, text)
    if any(ROLLOUT_KEYS & set(row) for row in rows):
        raise ConfigError(f"{path} holds rollouts, not scalars of steps")
    raw = json_line_scalars(path, rows)
    raw.notes += notes
    raw.settings |= _settings_beside(path)
    return raw


def _settings_beside(path: Path) -> dict[str, Any]:
    """Return whole-number settings from the Hydra files of verl and of our runs next to a log."""
    settings: dict[str, Any] = {}
    for file, pattern in (
        (path.parent / ".hydra/overrides.yaml", r"^- *'?\+*([\w.]+)=(\d+)'?\s*$"),
        (path.parent / ".hydra/config.yaml", r"^(group_size): (\d+)\s*$"),
    ):
        if file.is_file():
            numbers = re.findall(pattern, file.read_text(errors="replace"), re.MULTILINE)
            settings |= {name: int(number) for name, number in numbers}
    return settings


def _noted(logs: list[RawScalars], file: Path) -> list[RawScalars]:
    """Add a note that names the file that was read, because a folder may have several logs."""
    return [replace(raw, notes=[*raw.notes, f"The file {file} was read."]) for raw in logs]


def _folder_scalars(path: Path) -> list[RawScalars]:
    """Read the log in a folder of W&B, of a transformers run, of our run, or of TensorBoard."""
    run_files = sorted(path.glob("*.wandb")) or sorted(path.glob("latest-run/*.wandb"))
    if len(run_files) == 1:
        raw = wandb_scalars(run_files[0])
        return _noted([raw if raw.rows else _wandb_summary(path, raw)], run_files[0])
    states = [path / "trainer_state.json"]
    states += sorted(path.glob("checkpoint-*/trainer_state.json"), key=natural_order, reverse=True)
    for file in (*states, path / "metrics.jsonl"):
        if file.is_file():
            return _noted(_raw_scalars(file), file)
    event_files = sorted(path.glob("*.tfevents.*")) or sorted(path.glob("*/*.tfevents.*"))
    folders = sorted({file.parent for file in event_files}, key=natural_order)
    if len(folders) > 1:
        raise ConfigError(
            f"{path} has event files of {len(folders)} runs: name one folder, e.g. {folders[0]}"
        )
    if event_files:
        parts = [event_scalars(file) for file in event_files if file.stat().st_size]
        rows = [row for part in parts for row in part.rows]
        notes = [note for part in parts for note in part.notes]
        return _noted([RawScalars(rows, notes=notes)], event_files[0])
    runs = sorted(str(file.parent) for file in path.glob("**/*.wandb"))
    if runs:
        raise ConfigError(f"{path} contains {len(runs)} runs of W&B: name one, e.g. {runs[0]}")
    raise ConfigError(f"{path} contains no log of scalars: name {READABLE}")


def _wandb_summary(path: Path, raw: RawScalars) -> RawScalars:
    """Return the last values of a W&B run whose run file has no history of values."""
    file = path / "files/wandb-summary.json"
    if not file.is_file():
        return raw
    try:
        values = json.loads(file.read_text())
    except (ValueError, RecursionError) as error:
        raise ConfigError(f"{file} is not JSON: {single_line(error, 100)}") from error
    note = f"The run file has no history; only the last values were read, from {file.name}."
    return replace(raw, rows=[(values.get("_step", 0), values)], notes=[*raw.notes, note])


def _scalar_run(source: str, raw: RawScalars) -> ScalarRun:
    """Check the rows of a run, and compute the common fields from the logged names."""
    series, replaced = _series(source, raw.rows)
    notes: list[str] = []
    if not series:
        raise ConfigError(f"{source} has no scalars with a step: name {READABLE}")
    trainer = trainer_of(series)
    chosen: dict[str, tuple[str, Name]] = {}
    ambiguous: dict[str, list[str]] = {}
    for entry in NAMES:
        if trainer in (entry.trainer, "") or (trainer == OURS and entry.trainer == TRL):
            for logged in series:
                name = match(logged, entry)
                if name is None:
                    continue
                if name not in chosen:
                    chosen[name] = (logged, entry)
                elif chosen[name][1] is entry:
                    ambiguous.setdefault(name, [chosen[name][0]]).append(logged)
    for name, names in ambiguous.items():
        del chosen[name]
        notes.append(
            f"{name} was left out, because it is logged for {len(names)} agents: "
            f"{', '.join(names)}."
        )
    if not {"reward", "grad_norm", "zero_variance", "all_zero"} & set(chosen):
        listed = ", ".join(excerpt(name, 40) for name in list(series)[:6])
        raise ConfigError(
            f"{source} has none of the scalars that TRL, verl, prime-rl, NeMo-RL or grpo-ustat log "
            f"for the reward or the gradient; it has {listed}"
        )
    # Only steps of the common fields are used, because trackers also log other values, such as the
    # load of the machine, at steps of their own.
    steps = np.array(sorted({step for logged, _ in chosen.values() for step in series[logged]}))
    place = {step: i for i, step in enumerate(steps)}
    again = set().union(*(replaced.get(logged, set()) for logged, _ in chosen.values()))
    if again:
        notes.append(f"{len(again)} steps were logged more than once; their last values were used.")
    fields: dict[str, Array] = {}
    for name, (logged, entry) in chosen.items():
        fields[name] = np.full(len(steps), np.nan)
        for step, value in series[logged].items():
            number = _checked(source, step, logged, name, value, entry.factor)
            fields[name][place[step]] = number
    table = {}
    for logged, values in series.items():
        numbers = {step: value for step, value in values.items() if step in place}
        if numbers and all(is_number(value) for value in numbers.values()):
            table[logged] = np.full(len(steps), np.nan)
            table[logged][[place[step] for step in numbers]] = list(numbers.values())
    _add_shares(fields, chosen)
    return _with_sizes(
        ScalarRun(
            source=source,
            name=raw.name or _run_name(source),
            trainer=trainer,
            steps=steps,
            fields=fields,
            logged_names={name: logged for name, (logged, _) in chosen.items()},
            raw=table,
            settings=raw.settings,
            notes=[*raw.notes, *notes],
        )
    )


def _run_name(source: str) -> str:
    """Return the name of the file or folder that the user chose.

    Names that a trainer chose, such as `checkpoint-100/trainer_state.json`, are skipped.
    """
    path = Path(source)
    generic = ("trainer_state.json", "metrics.jsonl")
    while path.name in generic or re.fullmatch(r"checkpoint-\d+", path.name):
        path = path.parent
    if re.fullmatch(r"seed-\d+", path.name) and path.parent.name:
        return f"{path.parent.name}/{path.name}"
    return path.name or source


def _series(
    source: str, rows: Sequence[tuple[Any, Mapping[str, Any]]]
) -> tuple[dict[str, dict[float, Any]], dict[str, set[float]]]:
    """Sort the values of the rows by logged name, and then by step.

    If the steps of a name return to an earlier step, the run was resumed there. The values that
    were logged before for this step and later steps are dropped.

    Returns:
        For each name, its values keyed by step, and the set of steps whose first value was dropped.
    """
    series: dict[str, dict[float, Any]] = {}
    replaced: dict[str, set[float]] = {}
    for place, (step, values) in enumerate(rows):
        if step is None:
            continue
        if isinstance(step, bool) or not is_number(step) or step < 0 or step != int(step):
            raise ConfigError(
                f"{source} row {place} (from 0): step is {excerpt(repr(step), 40)}, not a whole "
                "number"
            )
        for logged, value in values.items():
            # Only numbers and texts are kept; booleans are not numbers here.
            if isinstance(value, bool | dict | list) or value is None:
                continue
            if value in NOT_FINITE or (isinstance(value, float) and not math.isfinite(value)):
                continue
            known = series.setdefault(logged, {})
            if known and step <= next(reversed(known)):
                for later in [earlier for earlier in known if earlier >= step]:
                    if known[later] != value or later != step:
                        replaced.setdefault(logged, set()).add(later)
                    del known[later]
            known[step] = value
    return {name: values for name, values in series.items() if values}, replaced


def _checked(source: str, step: float, logged: str, name: str, value: Any, factor: float) -> float:
    """Return the value of a common field; refuse a text or a number out of range."""
    place = f"{source} step {step:g}: {logged}"
    if not is_number(value, MAX_REWARD):
        raise ConfigError(
            f"{place} is {excerpt(repr(value), 40)}, not a number between -{MAX_REWARD:g} and "
            f"{MAX_REWARD:g}"
        )
    number = float(value) * factor
    if name in SHARES and not -ROUNDING <= number <= 1 + ROUNDING:
        raise ConfigError(f"{place} is {value}, but a share is between 0 and {1 / factor:g}")
    if name in NONNEGATIVE and number < 0:
        raise ConfigError(f"{place} is {value}, but it cannot be negative")
    return number


def _add_shares(fields: dict[str, Array], chosen: Mapping[str, tuple[str, Name]]) -> None:
    """Add the share of groups with equal rewards as the sum of the all-0 and the all-1 groups."""
    if "zero_variance" not in fields and {"all_zero", "all_one"} <= set(chosen):
        fields["zero_variance"] = fields["all_zero"] + fields["all_one"]


def _with_sizes(run: ScalarRun) -> ScalarRun:
    """Add G, n and the number of steps per row, as far as the log or its settings show them."""
    settings = run.settings
    size = next((settings[name] for name in GROUP_SIZE_SETTINGS if _is_size(settings.get(name))), 0)
    if run.trainer == PRIME_RL and {"rollouts", "groups"} <= set(run.fields):
        ratios = run.fields["rollouts"] / np.where(
            run.fields["groups"] > 0, run.fields["groups"], 1
        )
        ratios = ratios[np.isfinite(ratios)]
        # Groups with failed rollouts are smaller, so a few steps may have a smaller quotient. The
        # median ignores these steps.
        typical = float(np.median(ratios)) if len(ratios) else 0.0
        if not size and typical >= 2 and typical == int(typical):
            size = int(typical)
    shared = size or None
    if shared and run.trainer == NEMO_RL and settings.get(LEAVE_ONE_OUT_SETTING, True):
        shared -= 1
    per_row = 1
    if run.trainer in (TRL, ""):
        rows = run.steps[np.isfinite(run.fields.get("reward", np.full(len(run.steps), np.nan)))]
        per_row = int(np.median(np.diff(rows))) if len(rows) > 1 else None
        if _is_size(settings.get("logging_steps"), 1):
            per_row = max(per_row or 1, int(settings["logging_steps"]))
    run = replace(run, num_generations=size or None, share_size=shared, steps_per_row=per_row)
    return replace(run, rollouts=_rollouts(run))


def with_num_generations(run: ScalarRun, num_generations: int | None) -> ScalarRun:
    """Add the group size that the user typed, if the log does not show one."""
    if num_generations is None or run.num_generations is not None:
        return run
    leaves_one_out = run.trainer == NEMO_RL and run.settings.get(LEAVE_ONE_OUT_SETTING, True)
    return replace(
        run, num_generations=num_generations, share_size=num_generations - bool(leaves_one_out)
    )


def _is_size(value: Any, least: int = 2) -> bool:
    """Return True for a whole number of at least `least`."""
    is_whole = is_number(value) and not isinstance(value, bool) and value == int(value)
    return is_whole and value >= least


def _rollouts(run: ScalarRun) -> int | None:
    """Return the number of rollouts per training step; None if nothing shows it."""
    settings = run.settings
    for prompts, size in PROMPT_SETTINGS.items():
        if _is_size(settings.get(prompts), 1) and _is_size(settings.get(size)):
            return int(settings[prompts] * settings[size])
    # In TRL, a generation batch is divided into `steps_per_generation` micro-batches on each
    # device, and a training step uses `gradient_accumulation_steps` of them.
    batch, parts, used = (
        settings.get(name)
        for name in (
            "generation_batch_size",
            "steps_per_generation",
            "gradient_accumulation_steps",
        )  # fmt: skip
    )
    if _is_size(batch, 1) and _is_size(parts, 1) and _is_size(used, 1):
        return int(float(batch or 0) * float(used or 0) / float(parts or 1))
    if run.trainer == OURS and len(totals := run.values("total_rollouts")) > 1:
        per_step = int(np.median(np.diff(totals)))
        return per_step if per_step >= 2 else None
    return None
