"""`tracker/<name>.jsonl` of a run folder: what a tracker was given, in order, and under which id.

A mirror of the same folder, later, goes on from it. Lines are appended; the last may be half
written by a mirror that was killed. Of what such a mirror had handed over it is not known whether
it arrived: it is handed over again, unless the tracker can say how much it has.
"""

from __future__ import annotations

import fcntl
import json
import os
from pathlib import Path
from typing import Any
from uuid import uuid4

from grpo_ustat.runs.rowfiles import read_rows
from grpo_ustat.runs.sources import Item

FOLDER = "tracker"


class InUse(RuntimeError):
    """Another mirror is at work on the same folder for the same tracker."""


class Journal:
    """What one tracker was given.

    Args:
        folder: the run folder.
        name: of the tracker.

    Attributes:
        run_id: of the run there, the same for as long as the folder lives.
        entries: what was given, in order; an entry's place is its index there.
        settled: so many of them have arrived.
    """

    def __init__(self, folder: Path, name: str):
        (folder / FOLDER).mkdir(exist_ok=True)
        self.file = folder / FOLDER / f"{name}.jsonl"
        self._descriptor = None
        self._load()

    def take(self) -> None:
        """Become its only writer, until `release` or the end of this process.

        Raises:
            InUse: there is another one.
        """
        self._descriptor = os.open(self.file, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o666)
        try:
            fcntl.flock(self._descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError as error:
            self.release()
            raise InUse(f"another mirror is at work on {self.file.parent}") from error
        self._load()
        if self._half_written():
            os.write(self._descriptor, b"\n")
        if self.run_id is None:
            self.run_id = uuid4().hex[:8]
            self._append({"run_id": self.run_id})

    def release(self) -> None:
        """Let others write."""
        if self._descriptor is not None:
            os.close(self._descriptor)
            self._descriptor = None

    def pending(self, items: list[Item]) -> list[Item]:
        """Those not given yet, or given with another content."""
        given = dict(self.entries)
        return [item for item in items if given.get(item.key) != item.digest]

    def unsure(self, items: list[Item]) -> list[Item]:
        """Those of which it is not known that they arrived."""
        arrived = dict(self.entries[: self.settled])
        return [item for item in items if arrived.get(item.key) != item.digest]

    def note(self, items: list[Item]) -> None:
        """They were handed over, in this order."""
        self.entries += [(item.key, item.digest) for item in items]
        self._append(*({"key": item.key, "digest": item.digest} for item in items))

    def settle(self) -> None:
        """All that was handed over has arrived."""
        if self.settled < len(self.entries):
            self.settled = len(self.entries)
            self._append({"settled": self.settled})

    def forget(self, kept: int) -> None:
        """Only the first so many arrived: the others are to be handed over again."""
        if kept < len(self.entries):
            del self.entries[kept:]
            self.settled = min(self.settled, kept)
            self._append({"kept": kept})

    def _load(self) -> None:
        rows, _ = read_rows(self.file)
        self.run_id = next((row["run_id"] for row in rows if "run_id" in row), None)
        self.entries, self.settled = _replayed(rows)

    def _half_written(self) -> bool:
        return self.file.read_bytes()[-1:] not in (b"", b"\n")

    def _append(self, *rows: dict[str, Any]) -> None:
        os.write(self._descriptor, "".join(json.dumps(row) + "\n" for row in rows).encode())


def _replayed(rows: list[dict[str, Any]]) -> tuple[list[tuple[str, str]], int]:
    """Entries and how many of them arrived, after all that is noted."""
    entries, settled = [], 0
    for row in rows:
        if "key" in row:
            entries.append((row["key"], row["digest"]))
        elif "settled" in row:
            settled = row["settled"]
        elif "kept" in row:
            del entries[row["kept"] :]
            settled = min(settled, row["kept"])
    return entries, settled
