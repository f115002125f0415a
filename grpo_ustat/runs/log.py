"""Files that a run writes while it runs: metrics.jsonl and completions.parquet."""

from __future__ import annotations

import errno
import io
import json
import math
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pyarrow
from pyarrow import compute, parquet
from pyarrow import json as arrow_json

from grpo_ustat.config.schema import ConfigError
from grpo_ustat.runs.files import atomic_write
from grpo_ustat.terminal.console import warn
from grpo_ustat.terminal.streams import single_line

NAME = "completions.parquet"
COLUMNS = pyarrow.schema(
    {
        "step": pyarrow.int64(),
        "prompt": pyarrow.string(),
        "completion": pyarrow.string(),
        "reward": pyarrow.float64(),
        "advantage": pyarrow.float64(),
        "prompt_id": pyarrow.string(),
        "completion_index": pyarrow.int64(),
        "length": pyarrow.int64(),
        "ended": pyarrow.bool_(),
        # The expected answer.
        "answer": pyarrow.string(),
        # The answer extracted from the completion; null if there is none.
        "extracted": pyarrow.string(),
    }
)


def attempt(what: str, write: Callable[[], object]) -> bool:
    """Write optional data; after a disk error, print a warning and return False."""
    try:
        write()
    except Exception as error:
        # The tokenizers library raises a plain Exception, and Rust libraries quote the system error
        # in the message.
        wrapped = "os error" in str(error) or "Os { code" in str(error)
        if not (isinstance(error, OSError) or wrapped):
            raise
        reason = single_line(error)
        warn(f"{what} could not be written ({reason}); the run continues without it")
        return False
    return True


class MetricsLog:
    """`metrics.jsonl`: one row per step, written at once or, after a disk error, with a later row.

    Args:
        keep_up_to: last step whose rows are kept; a resumed run writes later rows again.
    """

    def __init__(self, folder: Path, keep_up_to: int):
        self._file = folder / "metrics.jsonl"
        lines = self._file.read_bytes().splitlines() if self._file.is_file() else []
        steps = [_step_of(line) for line in lines]
        earlier = [line + b"\n" for line, n in zip(lines, steps, strict=True) if n <= keep_up_to]
        missing = keep_up_to - len({n for n in steps if n <= keep_up_to})
        if missing:
            warn(f"{self._file} lacks rows for {missing} of the {keep_up_to} completed steps")
        with atomic_write(self._file) as staged:
            staged.write_bytes(b"".join(earlier))
        self._size, self._waiting = self._file.stat().st_size, b""

    def write(self, row: dict[str, Any]) -> None:
        """Append one row, or keep it for the next attempt if the disk reports an error."""
        text = json.dumps({"step": row["step"], **row}, allow_nan=False) + "\n"
        self._waiting += text.encode()
        attempt(f"step {row['step']} of {self._file}", self.sync)

    def sync(self) -> None:
        """Append the waiting rows and flush them to the disk.

        Raises:
            OSError: the write failed; the rows are kept, and the next call tries again.
        """
        with self._file.open("r+b", buffering=0) as file:
            # Remove any partial line from an earlier failed attempt.
            file.truncate(self._size)
            file.seek(self._size)
            count = file.write(self._waiting)
            if count < len(self._waiting):
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
            os.fsync(file.fileno())
        self._size, self._waiting = self._size + count, b""


def _step_of(line: bytes) -> float:
    """Return the step of a row; infinity for a line that is incomplete or has no step."""
    try:
        step = json.loads(line)["step"]
    except (ValueError, KeyError, TypeError, RecursionError):
        return math.inf
    return step if isinstance(step, int) else math.inf


class RunLog:
    """Files that rank 0 writes during training: metrics.jsonl and completions.parquet.

    Args:
        keep_up_to: last step whose rows are kept; a resumed run writes later rows again.
    """

    def __init__(self, folder: Path, keep_up_to: int):
        self._metrics = MetricsLog(folder, keep_up_to)
        self._completions = CompletionLog(folder, keep_up_to)

    def write(self, row: dict[str, Any], completions: list[dict[str, Any]]) -> None:
        """Write the metrics of a step immediately; keep its completions until `sync`."""
        self._metrics.write(row)
        self._completions.add(completions)

    def sync(self) -> None:
        """Write all waiting rows, so that the files contain every step up to a checkpoint.

        Raises:
            OSError: the write failed; the rows are kept, and the next call tries again.
        """
        self._metrics.sync()
        self._completions.sync()


class CompletionLog:
    """`completions.parquet`: rows stay in memory until `sync` replaces the file.

    `sync` is called before every checkpoint, so the file has all steps up to the last checkpoint,
    however the run ends. A resumed run drops later rows, so that no step occurs twice.

    Args:
        keep_up_to: last step whose rows are kept.
    """

    def __init__(self, folder: Path, keep_up_to: int):
        self._file = folder / NAME
        self._table = arrow_table([], COLUMNS)
        self._waiting: list[dict[str, Any]] = []
        if self._file.is_file():
            try:
                table = parquet.read_table(self._file, schema=COLUMNS)
            except (OSError, ValueError) as error:
                reason = single_line(error, 200)
                raise ConfigError(f"{self._file} is damaged ({reason}): move it away") from error
            self._table = table.filter(compute.field("step") <= keep_up_to)
            if len(self._table) < len(table):
                _replace(self._file, self._table)

    def add(self, rows: list[dict[str, Any]]) -> None:
        """Keep rows with the keys of `COLUMNS` until `sync`."""
        self._waiting += rows

    def sync(self) -> None:
        """Write the waiting rows.

        Raises:
            OSError: the write failed; the rows are kept, and the next call tries again.
        """
        if not self._waiting:
            return
        added = arrow_table(self._waiting, COLUMNS)
        table = pyarrow.concat_tables([self._table, added]).combine_chunks()
        _replace(self._file, table)
        self._table, self._waiting = table, []


def write_rows(folder: Path, rows: list[dict[str, Any]]) -> None:
    """Replace the content of the file with rows that have the keys of `COLUMNS`."""
    _replace(folder / NAME, arrow_table(rows, COLUMNS))


def arrow_table(rows: list[dict[str, Any]], schema: pyarrow.Schema) -> pyarrow.Table:
    """Convert rows into a table, like `pyarrow.Table.from_pylist`, but without importing pandas.

    Importing pandas takes about a twentieth of a short run's time.

    Raises:
        ValueError: a row has an unknown column or a value of the wrong type.
    """
    if not rows:
        return pyarrow.Table.from_batches([], schema)
    lines = "\n".join(json.dumps(row) for row in rows).encode()
    options = arrow_json.ParseOptions(schema, unexpected_field_behavior="error")
    single_block = arrow_json.ReadOptions(use_threads=False, block_size=len(lines) + 1)
    return arrow_json.read_json(io.BytesIO(lines), single_block, options)


def _replace(file: Path, table: pyarrow.Table) -> None:
    with atomic_write(file) as staged:
        parquet.write_table(table, staged, compression="zstd")
