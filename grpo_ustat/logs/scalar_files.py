"""Readers of the files in which trainers and trackers store scalars.

Each reader returns rows `(step, values)` in the order in which they were written. A value can be of
any type that the file contains, such as a text or a list; `scalars` checks the values that it uses.

Event files of TensorBoard and run files of W&B are read without the packages of these trackers,
which the extra `[logs]` does not install. Both files are sequences of protocol buffers, and only a
few fields of them are needed for scalars. W&B 0.31 has no Python function that reads its run files.
"""

from __future__ import annotations

import csv
import io
import json
import struct
import zlib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from typing import Any

from grpo_ustat.config.schema import ConfigError
from grpo_ustat.terminal.streams import single_line

Row = tuple[Any, Mapping[str, Any]]
# Columns and keys that contain the step, in order of preference. TRL logs `train/global_step` to
# W&B, which is preferred to W&B's own `_step`, a count of logging calls.
STEP_NAMES = ("train/global_step", "step", "Step", "global_step", "_step")
WANDB_BLOCK, WANDB_HEADER = 32_768, 7
# Layouts for `struct` of the tensor types that may hold a scalar, float and double, by type number.
TENSOR_TYPES = {1: "<f", 2: "<d"}
# The checksum of a larger record is not checked, to save time: it holds an image or a histogram.
MAX_CHECKED_RECORD = 4096
# A scalar event has about 60 bytes. A record longer than this limit shows that a file is damaged.
MAX_RECORD = 2**30


@dataclass
class RawScalars:
    """Rows of one run as they were written, with its name and settings."""

    rows: list[Row]
    # Name that the tracker gave to the run; empty if the file has none.
    name: str = ""
    # Settings of the run, with names joined by dots.
    settings: dict[str, Any] = field(default_factory=dict)
    # Sentences about parts that could not be read.
    notes: list[str] = field(default_factory=list)


def trainer_state(path: Path, content: Mapping[str, Any]) -> RawScalars:
    """Read the `log_history` of a `trainer_state.json`, which transformers writes."""
    history = content["log_history"]
    if not isinstance(history, list) or not all(isinstance(row, dict) for row in history):
        raise ConfigError(f"{path}: log_history is not a list of logged steps")
    settings = {
        name: content[name] for name in ("logging_steps",) if isinstance(content.get(name), int)
    }
    # The last row has totals of the run and no scalars of a step. It is left out.
    rows = [(row.get("step"), row) for row in history if "train_runtime" not in row]
    return RawScalars(rows, settings=settings)


def json_line_scalars(path: Path, rows: Sequence[Mapping[str, Any]]) -> RawScalars:
    """Read JSON lines: verl's `{"step": 1, "data": {...}}`, or objects with step and values."""
    result: list[Row] = []
    for place, row in enumerate(rows):
        name = next((name for name in STEP_NAMES if name in row), None)
        if name is None:
            raise ConfigError(f"{path} row {place} (from 0) has no step: add the key step")
        data = row.get("data")
        result.append((row[name], data if isinstance(data, dict) else row))
    return RawScalars(result)


def json_rows(path: Path, text: str) -> tuple[list[dict[str, Any]], list[str]]:
    """Parse JSON lines; an unfinished last line is left out, with a note for the user.

    Returns:
        The rows, and the notes.
    """
    rows: list[dict[str, Any]] = []
    lines = text.splitlines(keepends=True)
    for number, line in enumerate(lines):
        if not line.strip():
            continue
        try:
            row = json.loads(line)
        except (ValueError, RecursionError) as error:
            if rows and number == len(lines) - 1 and not line.endswith("\n"):
                return rows, ["The last line is unfinished and was left out."]
            message = single_line(error, 100)
            raise ConfigError(f"{path} line {number + 1} is not JSON: {message}") from error
        if not isinstance(row, dict):
            raise ConfigError(f"{path} line {number + 1} is not a JSON object")
        rows.append(row)
    return rows, []


def csv_scalars(path: Path, text: str) -> list[RawScalars]:
    """Read a CSV table with a column of steps.

    The name of a column is a metric. In a chart that was exported from W&B it is `RUN - METRIC`,
    and the chart may have several runs. W&B adds columns `RUN - METRIC__MIN` and `__MAX`. They
    differ from each other if each row of the export averages several steps.
    """
    # A last line without a line end is left out, because its last number may be cut off.
    whole, end, rest = text.rpartition("\n")
    unfinished = ["The last line has no line end and was left out."] * bool(rest.strip())
    try:
        table = [row for row in csv.reader(io.StringIO(whole + end), strict=True) if any(row)]
    except csv.Error as error:
        raise ConfigError(f"{path} is not a CSV table: {single_line(error, 100)}") from error
    if not table:
        raise ConfigError(f"{path} has no complete line")
    names, body = [name.strip() for name in table[0]], table[1:]
    if len(set(names)) < len(names):
        twice = next(name for name in names if names.count(name) > 1)
        raise ConfigError(f"{path} has two columns {twice!r:.60}: keep one of them")
    if set(names) == {"Wall time", "Step", "Value"}:
        raise ConfigError(
            f"{path} was downloaded from TensorBoard, and its column Value does not say which "
            "metric it is: name the folder of event files instead, or rename the column Value to "
            "the metric's name"
        )
    steps = [name for name in names if name in STEP_NAMES] or [
        name for name in names if name.endswith("global_step") and " - " not in name
    ]
    if not steps:
        raise ConfigError(
            f"{path} has no column of steps (Step or step): in W&B, export a chart over Step"
        )
    for number, row in enumerate(body):
        if len(row) != len(names):
            raise ConfigError(
                f"{path} row {number + 1} has {len(row)} cells, but the header has {len(names)}: "
                "export the table again"
            )
    step_index = names.index(steps[0])
    step_values = [_cell(row[step_index]) for row in body]
    runs: dict[str, dict[int, str]] = {}
    for index, name in enumerate(names):
        if name in steps or name == "Wall time" or name.endswith(("__MIN", "__MAX")):
            continue
        run, separator, metric = name.rpartition(" - ")
        runs.setdefault(run if separator else "", {})[index] = metric
    result = []
    for run, columns in runs.items():
        rows = [
            (step, {metric: _cell(row[index]) for index, metric in columns.items() if row[index]})
            for step, row in zip(step_values, body, strict=True)
        ]
        result.append(RawScalars([row for row in rows if row[1]], run, notes=[*unfinished]))
        prefix = f"{run} - " if run else ""
        if any(_is_averaged(names, body, prefix + metric) for metric in columns.values()):
            result[-1].notes.append(
                "Each row is an average of several steps in W&B's export (__MIN and __MAX differ)."
            )
    return result


def _is_averaged(names: list[str], body: list[list[str]], name: str) -> bool:
    """Return True if the minimum and the maximum of a metric differ in a row of W&B's export."""
    ends = [f"{name}__MIN", f"{name}__MAX"]
    if not set(ends) <= set(names):
        return False
    low, high = (names.index(end) for end in ends)
    return any(_cell(row[low]) != _cell(row[high]) for row in body)


def _cell(text: str) -> Any:
    """Return a cell as a number, or as text if it is not a number."""
    try:
        return float(text) if "_" not in text else text
    except ValueError:
        return text


def is_event_file(head: bytes) -> bool:
    """Return True if a file begins with a TensorBoard record."""
    return len(head) >= 12 and struct.unpack("<I", head[8:12])[0] == _masked_crc(head[:8])


def event_scalars(path: Path) -> RawScalars:
    """Read the scalars of a TensorBoard event file: TFRecords with a protobuf `Event` each."""
    data, position, rows = path.read_bytes(), 0, []
    notes = []
    while position < len(data):
        if position + 12 > len(data):
            notes.append(f"The last record of {path.name} is unfinished and was left out.")
            break
        length, checksum = struct.unpack_from("<QI", data, position)
        if checksum != _masked_crc(data[position : position + 8]) or length > MAX_RECORD:
            raise ConfigError(f"{path} is damaged at byte {position}: copy the event file again")
        begin, end = position + 12, position + 12 + length
        if end + 4 > len(data):
            notes.append(f"The last record of {path.name} is unfinished and was left out.")
            break
        record = data[begin:end]
        (checksum,) = struct.unpack_from("<I", data, end)
        if length <= MAX_CHECKED_RECORD and checksum != _masked_crc(record):
            raise ConfigError(f"{path} is damaged at byte {begin}: copy the event file again")
        try:
            rows += _event_rows(record)
        except (ValueError, struct.error, IndexError) as error:
            raise ConfigError(f"{path} is damaged at byte {begin}: {error}") from error
        position = end + 4
    return RawScalars(rows, notes=notes)


def _event_rows(record: bytes) -> list[Row]:
    """Return the scalars of an event; the list is empty if the event has no scalars."""
    step, values = 0, {}
    for number, value in _fields(record):
        if number == 2 and isinstance(value, int):
            step = value
        elif number == 5 and isinstance(value, bytes):
            for inner, content in _fields(value):
                if inner == 1 and isinstance(content, bytes):
                    values |= _summary_value(content)
    return [(step, values)] if values else []


def _summary_value(content: bytes) -> dict[str, float]:
    """Return the scalar of a `Summary.Value`, keyed by its tag; empty if it is not a scalar."""
    tag, scalar = "", None
    for number, value in _fields(content):
        if number == 1 and isinstance(value, bytes):
            tag = value.decode()
        elif number == 2 and isinstance(value, bytes):
            (scalar,) = struct.unpack("<f", value)
        elif number == 8 and isinstance(value, bytes):
            scalar = _tensor_scalar(value)
    return {} if scalar is None else {tag: scalar}


def _tensor_scalar(content: bytes) -> float | None:
    """Return the number in a `TensorProto`; None if it is not a single float or double."""
    kind, data = 0, b""
    for number, value in _fields(content):
        if number == 1 and isinstance(value, int):
            kind = value
        elif number in (4, 5, 6) and isinstance(value, bytes):
            data = value
    layout = TENSOR_TYPES.get(kind)
    if layout is None or len(data) != struct.calcsize(layout):
        return None
    return float(struct.unpack(layout, data)[0])


def _fields(data: bytes) -> Iterator[tuple[int, int | bytes]]:
    """Yield number and content of each field of a protocol buffer.

    A fixed-width number is yielded as its bytes.
    """
    position = 0
    while position < len(data):
        key, position = _varint(data, position)
        number, kind = key >> 3, key & 7
        if kind == 0:
            value, position = _varint(data, position)
            yield number, value
            continue
        if kind == 2:
            length, position = _varint(data, position)
        elif kind in (1, 5):
            length = 8 if kind == 1 else 4
        else:
            raise ValueError(f"a field has the unknown wire type {kind}")
        if position + length > len(data):
            raise ValueError("a field is longer than its record")
        yield number, data[position : position + length]
        position += length


def _varint(data: bytes, position: int) -> tuple[int, int]:
    """Return the varint (integer of variable length) at a position, and the position after it."""
    result = shift = 0
    while True:
        if position >= len(data) or shift > 63:
            raise ValueError("an integer does not end")
        byte = data[position]
        position += 1
        result |= (byte & 0x7F) << shift
        shift += 7
        if byte < 0x80:
            return result, position


@cache
def _crc_table() -> tuple[int, ...]:
    """Compute the lookup table of CRC-32C (Castagnoli), with the reflected polynomial."""
    table = []
    for byte in range(256):
        crc = byte
        for _ in range(8):
            crc = (crc >> 1) ^ (0x82F63B78 if crc & 1 else 0)
        table.append(crc)
    return tuple(table)


def _masked_crc(data: bytes) -> int:
    """Compute the checksum of TFRecord: CRC-32C, rotated by 15 bits, plus a constant."""
    table, crc = _crc_table(), 0xFFFFFFFF
    for byte in data:
        crc = table[(crc ^ byte) & 0xFF] ^ (crc >> 8)
    crc ^= 0xFFFFFFFF
    return ((crc >> 15 | crc << 17) + 0xA282EAD8) & 0xFFFFFFFF


def wandb_scalars(path: Path) -> RawScalars:
    """Read history, name and settings from a run file of W&B, of an online or an offline run.

    The file is a sequence of blocks with checksums, in the format of LevelDB's log. Each record is
    a protobuf `wandb_internal.Record`.
    """
    raw = RawScalars([])
    for record in _wandb_records(path, raw.notes):
        try:
            for number, content in _fields(record):
                if not isinstance(content, bytes):
                    continue
                if number == 2:
                    values = _wandb_items(content)
                    step = next((values[name] for name in STEP_NAMES if name in values), None)
                    raw.rows.append((step, values))
                elif number == 5:
                    raw.settings |= flat_settings(_wandb_items(content))
                elif number == 17:
                    _read_wandb_run(content, raw)
        except (ValueError, RecursionError) as error:
            raise ConfigError(f"{path} is damaged: {single_line(error, 100)}") from error
    return raw


def _read_wandb_run(content: bytes, raw: RawScalars) -> None:
    """Add the name and the settings of a `RunRecord` to `raw`."""
    for number, value in _fields(content):
        if number == 4 and isinstance(value, bytes):
            raw.settings |= flat_settings(_wandb_items(value))
        elif number == 8 and isinstance(value, bytes):
            raw.name = value.decode()


def _wandb_items(content: bytes) -> dict[str, Any]:
    """Return the items of a history or of settings; nested names are joined by dots."""
    items: dict[str, Any] = {}
    for number, item in _fields(content):
        if number != 1 or not isinstance(item, bytes):
            continue
        names: list[str] = []
        text = b"null"
        for inner, value in _fields(item):
            if inner in (1, 2) and isinstance(value, bytes):
                names.append(value.decode())
            elif inner == 16 and isinstance(value, bytes):
                text = value
        items[".".join(names)] = json.loads(text)
    return items


def _wandb_records(path: Path, notes: list[str]) -> Iterator[bytes]:
    """Yield the records of a W&B run file; add a note if the end of the file is missing."""
    data = path.read_bytes()
    unfinished = f"The end of {path.name} is missing: the run still writes to it, or was killed."
    position, record = WANDB_HEADER, b""
    while position < len(data):
        rest = WANDB_BLOCK - position % WANDB_BLOCK
        if rest < WANDB_HEADER:
            position += rest
            continue
        if position + WANDB_HEADER > len(data):
            notes.append(unfinished)
            return
        checksum, length, kind = struct.unpack_from("<IHB", data, position)
        begin = position + WANDB_HEADER
        part = data[begin : begin + length]
        if len(part) < length:
            notes.append(unfinished)
            return
        if kind not in (1, 2, 3, 4) or zlib.crc32(part, zlib.crc32(bytes([kind]))) != checksum:
            raise ConfigError(f"{path} is damaged at byte {position}: copy the run folder again")
        record = part if kind in (1, 2) else record + part
        if kind in (1, 4):
            yield record
        position = begin + length


def flat_settings(settings: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    """Join the names of nested settings by dots."""
    flat: dict[str, Any] = {}
    for name, value in settings.items():
        if isinstance(value, dict):
            flat |= flat_settings(value, f"{prefix}{name}.")
        else:
            flat[f"{prefix}{name}"] = value
    return flat


def online_scalars(path: str) -> RawScalars:
    """Read a run from the W&B server by `entity/project/run`, with the installed package."""
    try:
        import wandb  # pyright: ignore[reportMissingImports]
    except ImportError as error:
        raise ConfigError(
            f"wandb://{path} needs the package wandb: pip install wandb, or name the folder "
            "wandb/run-* or a CSV file exported from W&B"
        ) from error
    try:
        run = wandb.Api().run(path)
        rows = [dict(row) for row in run.scan_history()]
        name, settings = str(run.name), flat_settings(dict(run.config))
    except Exception as error:
        # The package raises errors of several unrelated types, for example from `requests`.
        raise ConfigError(f"wandb://{path} cannot be read: {single_line(error, 200)}") from error
    steps = [next((row[key] for key in STEP_NAMES if key in row), None) for row in rows]
    return RawScalars(list(zip(steps, rows, strict=True)), name, settings)
