"""`completions.parquet`: a sample of what the policy wrote, in TRL's columns and some of ours."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pyarrow
from pyarrow import parquet

from grpo_ustat.checks import ConfigError

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
        "answer": pyarrow.string(),  # expected
        "extracted": pyarrow.string(),  # null where no answer was found
    }
)


class CompletionLog:
    """Rows wait in memory until `sync`; a Parquet file cannot grow, so it is replaced.

    Synced before every checkpoint, the file holds every step up to it, however the run ends; what
    goes beyond the checkpoint that a run resumes from is dropped, so that no step comes twice.

    Args:
        folder: the run folder.
        keep_up_to: rows of later steps are dropped.

    Raises:
        ConfigError: the file is damaged.
    """

    def __init__(self, folder: Path, keep_up_to: int):
        self._file = folder / NAME
        self._kept, self._waiting = COLUMNS.empty_table(), []
        if self._file.is_file():
            found = self._read()
            self._kept = found.filter(pyarrow.compute.field("step") <= keep_up_to)
            if len(self._kept) < len(found):
                _replace(self._file, self._kept)

    def add(self, rows: list[dict[str, Any]]) -> None:
        """Rows with the keys of `COLUMNS`."""
        self._waiting += rows

    def sync(self) -> None:
        """Write what waits.

        Raises:
            OSError: it is not on the disk; nothing is lost, the next call tries again.
        """
        if not self._waiting:
            return
        added = pyarrow.Table.from_pylist(self._waiting, schema=COLUMNS)
        whole = pyarrow.concat_tables([self._kept, added]).combine_chunks()
        _replace(self._file, whole)
        self._kept, self._waiting = whole, []

    def _read(self) -> pyarrow.Table:
        try:
            return parquet.read_table(self._file, schema=COLUMNS)
        except (OSError, ValueError) as error:
            reason = " ".join(str(error).split())[:200]
            raise ConfigError(f"{self._file} is damaged ({reason}): move it away") from error


def write_rows(folder: Path, rows: list[dict[str, Any]]) -> None:
    """Rows with keys of `COLUMNS`, in place of what the file held."""
    _replace(folder / NAME, pyarrow.Table.from_pylist(rows, schema=COLUMNS))


def _replace(file: Path, table: pyarrow.Table) -> None:
    staged = file.with_name(f".{NAME}.tmp")
    parquet.write_table(table, staged, compression="zstd")
    os.replace(staged, file)
