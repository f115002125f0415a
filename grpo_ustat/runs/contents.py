"""What a run folder holds, read as it is: finished or not, whole or in part.

A file that is not there is empty; one that is damaged is too, and is named in `notes`.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pyarrow
import yaml
from pyarrow import parquet

from grpo_ustat.runs import completions, history
from grpo_ustat.runs.rowfiles import csv_rows, read_rows

MOST_COMPLETIONS, MOST_BYTES = 3000, 8_000_000  # that a page holds


class Contents:
    """A run folder's files.

    Args:
        path: of the folder.
        result: what the run found, where that is not written yet.

    Attributes:
        config: as nested dictionaries.
        code: commit, uncommitted changes and versions.
        result: None while the run is unfinished.
        launches: rows of the run's history.
        metrics: rows of metrics.jsonl.
        evals: rows of eval.csv, numbers where all of a column are.
        notes: which files are damaged, a line each.
    """

    def __init__(self, path: Path, result: dict[str, Any] | None = None):
        self.path, self.notes = path, []
        self.config = self._read(".hydra/config.yaml", yaml.safe_load) or {}
        self.code = self._read("code.json", json.loads) or {}
        self.result = result or self._read("result.json", json.loads)
        self.launches = history.launches(path)
        self.metrics = self._rows("metrics.jsonl")
        self.evals: list[dict[str, Any]] = self._read("eval.csv", csv_rows, list) or []

    def value(self, key: str) -> Any:
        """What the configuration says under `a.b`, None where it has no such key."""
        found: Any = self.config
        for part in key.split("."):
            found = found.get(part) if isinstance(found, dict) else None
        return found

    def rows(self, name: str) -> list[dict[str, Any]]:
        """Of a table in CSV, none where there is no such file."""
        return self._read(name, csv_rows, list) or []

    def completions(self) -> tuple[list[dict[str, Any]], str]:
        """Rows of completions.parquet, of evenly spaced steps where all would be too many, and
        which they are; columns without any value are left out.
        """
        file = self.path / completions.NAME
        if not file.is_file():
            return [], ""
        try:
            steps = parquet.read_table(file, columns=["step"])["step"].to_pylist()
            table = _thinned(parquet.read_table(file), steps)
        except (OSError, ValueError, LookupError) as error:
            self.notes.append(f"{completions.NAME} is damaged and not shown: {_line(error)}")
            return [], ""
        kept = [name for name in table.column_names if table[name].null_count < len(table)]
        kept += [name for name in ("prompt", "completion", "reward") if name not in kept]
        return table.select(kept).to_pylist(), _which(len(table), steps)

    def _rows(self, name: str) -> list[dict[str, Any]]:
        try:
            rows, damaged = read_rows(self.path / name)
        except OSError as error:
            self.notes.append(f"{name} is damaged and not shown: {_line(error)}")
            return []
        if damaged:
            self.notes.append(f"{name} is damaged in {damaged} lines, which are left out")
        return rows

    def _read(self, name: str, parse: Callable[[str], Any], kind: type = dict) -> Any:
        file = self.path / name
        if not file.is_file():
            return None
        try:
            content = parse(file.read_text(errors="replace"))
        except (OSError, ValueError, yaml.YAMLError) as error:
            self.notes.append(f"{name} is damaged and not shown: {_line(error)}")
            return None
        if not isinstance(content, kind):
            self.notes.append(f"{name} is damaged and not shown: it holds no {kind.__name__}")
            return None
        return content


def _thinned(table: pyarrow.Table, steps: Sequence[int | None]) -> pyarrow.Table:
    """Whole steps, evenly spaced, as many as a page can hold."""
    share = max(len(table) / MOST_COMPLETIONS, table.nbytes / MOST_BYTES, 1)
    every = sorted(set(steps) - {None})
    if share == 1 or len(every) < 2:
        return table.slice(0, int(len(table) / share))
    count = max(2, int(len(every) / share))
    chosen = {every[round(i * (len(every) - 1) / (count - 1))] for i in range(count)}
    return table.filter(pyarrow.array([step in chosen for step in steps]))


def _which(shown: int, steps: Sequence[int | None]) -> str:
    total = len(steps)
    text = f"{completions.NAME} holds {total} completions"
    if shown == total:
        return f"{text}, all of them here."
    spaced = "the first of them" if None in steps else "those of evenly spaced steps"
    return f"{text}; here are {shown}, {spaced}."


def _line(error: Exception) -> str:
    return " ".join(str(error).split())[:200]
