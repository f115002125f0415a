"""What a run folder holds that a tracker shows, as items in the order in which they came to be.

Files are only read, as they grow; a row that is not whole yet waits. A run that went on from a
checkpoint writes later rows again: as draws are keyed they are the same rows, but for the clock,
and have the same digest.
"""

from __future__ import annotations

import hashlib
import json
import math
import os
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

from grpo_ustat.nested import flat
from grpo_ustat.runs.rowfiles import csv_rows
from grpo_ustat.secrecy import redacted


@dataclass(frozen=True)
class Item:
    """One thing to send.

    Attributes:
        kind: row (of metrics.jsonl), eval, completions, table, figure or result.
        name: which of its kind; with `kind` it is unique in a folder.
        digest: of its content without the clock; another one is another content.
        step: of training; None for what a run ends with.
        content: values by key (row, eval, result), a list of rows (completions, table) or a path.
    """

    kind: str
    name: str
    digest: str
    step: int | None
    content: Any

    @property
    def key(self) -> str:
        """Its name in the journal."""
        return f"{self.kind} {self.name}"


class Source:
    """A run folder, read again and again.

    Args:
        folder: with `.hydra/config.yaml`.
    """

    def __init__(self, folder: Path):
        self.folder = folder
        self._rows = _Growing(folder / "metrics.jsonl")
        self._seen: dict[str, tuple[int, int]] = {}

    def config(self) -> dict[str, Any]:
        """What was run, without secrets: the configuration, its hash if known, the commit."""
        config = yaml.safe_load((self.folder / ".hydra" / "config.yaml").read_text())
        code = json.loads((self.folder / "code.json").read_text())
        about = {name: code.get(name) for name in ("commit", "weights", "versions")}
        return redacted({**config, "code": about})

    def items(self) -> list[Item]:
        """What has come since the last call; at the first one, everything."""
        found = [*map(_row, self._rows.new()), *self._evals(), *self._completions()]
        return found + [*self._result()]

    def _evals(self) -> Iterator[Item]:
        for row in self._table("eval.csv"):
            name = f"{row['step']}/{row['decoding']}/{row['split']}"
            yield Item("eval", name, _digest(row), row["step"], row)

    def _completions(self) -> Iterator[Item]:
        if not self._changed("completions.parquet"):
            return
        from pyarrow import parquet

        rows = parquet.read_table(self.folder / "completions.parquet").to_pylist()
        for step in sorted({row["step"] for row in rows}):
            of_step = [row for row in rows if row["step"] == step]
            yield Item("completions", str(step), _digest(of_step), step, of_step)

    def _result(self) -> Iterator[Item]:
        """Written last of all, after the figures and tables that come first here."""
        if not self._changed("result.json"):
            return
        result = json.loads((self.folder / "result.json").read_text())
        for file in sorted(self.folder.glob("*.png")):
            yield Item("figure", file.stem, _digest(file.read_bytes()), result.get("steps"), file)
        for name, value in result.items():
            if _is_table(value) and name != "evals":  # which are items already
                yield Item("table", name, _digest(value), result.get("steps"), value)
        values = {
            k: _plain(v) for k, v in flat(result, "/").items() if v != [] and not _is_table(v)
        }
        yield Item("result", "result", _digest(values), result.get("steps"), values)

    def _table(self, name: str) -> list[dict[str, Any]]:
        return csv_rows((self.folder / name).read_text()) if self._changed(name) else []

    def _changed(self, name: str) -> bool:
        """Whether a file that is always replaced as a whole is there and another one than before.

        Files are replaced, so the inode changes; its number may be used again, the time then not.
        """
        try:
            stat = (self.folder / name).stat()
        except FileNotFoundError:
            return False
        now = (stat.st_ino, stat.st_mtime_ns)
        changed, self._seen[name] = self._seen.get(name) != now, now
        return changed


class _Growing:
    """The whole lines of a file that grows, and that a resumed run replaces by a shorter one."""

    def __init__(self, file: Path):
        self._file, self._inode, self._at = file, None, 0

    def new(self) -> list[dict[str, Any]]:
        """Lines that have come since the last call."""
        try:
            with self._file.open("rb") as file:
                self._begin_anew(file.fileno())
                file.seek(self._at)
                text = file.read()
        except FileNotFoundError:
            return []
        whole = text[: text.rfind(b"\n") + 1]
        self._at += len(whole)
        return [json.loads(line) for line in whole.splitlines()]

    def _begin_anew(self, descriptor: int) -> None:
        stat = os.fstat(descriptor)
        if stat.st_ino != self._inode or stat.st_size < self._at:
            self._inode, self._at = stat.st_ino, 0


def _row(values: dict[str, Any]) -> Item:
    return Item("row", str(values["step"]), _digest(values), values["step"], values)


def _is_table(value: Any) -> bool:
    """Whether it is a list of rows, such as curves or claims."""
    return isinstance(value, list) and value != [] and all(isinstance(x, dict) for x in value)


def _plain(value: Any) -> Any:
    """A number or a text; of a list, such as notes, a line each."""
    return "\n".join(map(str, value)) if isinstance(value, list) else value


def _digest(content: Any) -> str:
    if not isinstance(content, bytes):
        content = json.dumps(_timeless(content), sort_keys=True, default=str).encode()
    return hashlib.sha256(content).hexdigest()[:12]


def _timeless(content: Any) -> Any:
    """A row without what the clock says."""
    if isinstance(content, dict):
        return {k: v for k, v in content.items() if "seconds" not in k and k != "step_time"}
    return content


def is_number(value: Any) -> bool:
    """Whether a tracker can draw it."""
    return isinstance(value, int | float) and math.isfinite(value)
