"""`tracker/<name>.jsonl` of a run folder: what was sent to a tracker, in order, and the run's id.

A mirror of the same folder, later, goes on from it. Lines are appended; the last may be half
written by a mirror that was killed. Of what such a mirror had sent it is not known whether it
arrived: it is sent again, unless the tracker can say how much it has.
"""

from __future__ import annotations

import fcntl
import json
import os
from pathlib import Path
from typing import Any
from uuid import uuid4

from grpo_ustat.mirror.source import Event
from grpo_ustat.runs.files import read_rows
from grpo_ustat.runs.folder import TRACKER


class InUse(RuntimeError):
    """Another mirror is at work on the same folder for the same tracker."""


class Journal:
    """What was sent to one tracker.

    Args:
        folder: the run folder.
        name: of the tracker.

    Attributes:
        run_id: of the run there, the same for as long as the folder lives.
        entries: key and digest of every event sent, in order; its place is its index there.
        settled: so many of them have arrived.
    """

    def __init__(self, folder: Path, name: str):
        (folder / TRACKER).mkdir(exist_ok=True)
        self.file = folder / TRACKER / f"{name}.jsonl"
        self._descriptor: int | None = None
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
        if self.file.read_bytes()[-1:] not in (b"", b"\n"):  # a line that was half written
            os.write(self._descriptor, b"\n")
        if self.run_id is None:
            self.run_id = uuid4().hex[:8]
            self._append({"run_id": self.run_id})

    def release(self) -> None:
        """Let others write."""
        if self._descriptor is not None:
            os.close(self._descriptor)
            self._descriptor = None

    def pending(self, events: list[Event]) -> list[Event]:
        """Events not sent yet, or sent with another content."""
        sent = dict(self.entries)
        return [event for event in events if sent.get(event.key) != event.digest]

    def unsure(self, events: list[Event]) -> list[Event]:
        """Events of which it is not known that they arrived."""
        arrived = dict(self.entries[: self.settled])
        return [event for event in events if arrived.get(event.key) != event.digest]

    def note(self, events: list[Event]) -> None:
        """Note that these events were sent, in this order."""
        self.entries += [(event.key, event.digest) for event in events]
        self._append(*({"key": event.key, "digest": event.digest} for event in events))

    def settle(self) -> None:
        """Note that all that was sent has arrived."""
        if self.settled < len(self.entries):
            self.settled = len(self.entries)
            self._append({"settled": self.settled})

    def forget(self, arrived: int) -> None:
        """Note that only the first so many arrived: the others are to be sent again."""
        if arrived < len(self.entries):
            del self.entries[arrived:]
            self.settled = min(self.settled, arrived)
            self._append({"kept": arrived})

    def _load(self) -> None:
        """Read the file again."""
        rows, _ = read_rows(self.file)
        self.run_id: str | None = next((row["run_id"] for row in rows if "run_id" in row), None)
        self.entries: list[tuple[str, str]] = []
        self.settled = 0
        for row in rows:
            if "key" in row:
                self.entries.append((row["key"], row["digest"]))
            elif "settled" in row:
                self.settled = row["settled"]
            elif "kept" in row:
                del self.entries[row["kept"] :]
                self.settled = min(self.settled, row["kept"])

    def _append(self, *rows: dict[str, Any]) -> None:
        assert self._descriptor is not None, "take the journal first"
        os.write(self._descriptor, "".join(json.dumps(row) + "\n" for row in rows).encode())
