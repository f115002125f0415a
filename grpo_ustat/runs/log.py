"""What a run writes while it runs: metrics.jsonl, and warnings."""

from __future__ import annotations

import errno
import json
import math
import os
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

from rich.console import Console

from grpo_ustat.runs.completions import CompletionLog


def warn(text: str) -> None:
    """A line in red on standard error, above bars that are drawn there."""
    console = Console(stderr=True, soft_wrap=True, highlight=False, markup=False)
    with console.capture() as capture:
        console.print(f"warning: {text}", style="bold red")
    print(capture.get(), end="", file=sys.stderr)  # which a console of its own would go round


def attempt(what: str, write: Callable[[], object]) -> bool:
    """Write something that a run can go on without; a failure of the disk is said, not raised."""
    try:
        write()
    except Exception as error:  # tokenizers raises Exception itself
        if not _of_disk(error):
            raise
        reason = " ".join(str(error).split())
        warn(f"{what} could not be written, the run goes on without it: {reason}")
        return False
    return True


def _of_disk(error: Exception) -> bool:
    """Whether an error is the operating system's, also where Rust libraries wrap it."""
    wrapped = "os error" in str(error) or "Os { code" in str(error)
    return isinstance(error, OSError) or wrapped


class MetricsLog:
    """`metrics.jsonl`, one row a step, written at once; rows that cannot be written wait.

    Args:
        folder: the run folder.
        keep_up_to: rows of later steps are dropped: a resumed run writes them again.
    """

    def __init__(self, folder: Path, keep_up_to: int):
        self._file = folder / "metrics.jsonl"
        lines = self._file.read_bytes().splitlines() if self._file.is_file() else []
        steps = [_step_of(line) for line in lines]
        kept = [line + b"\n" for line, n in zip(lines, steps, strict=True) if n <= keep_up_to]
        missing = keep_up_to - len({n for n in steps if n <= keep_up_to})
        if missing:
            warn(f"{self._file} has no rows of {missing} of the {keep_up_to} steps done")
        staged = self._file.with_name(".metrics.jsonl.tmp")
        staged.write_bytes(b"".join(kept))
        os.replace(staged, self._file)
        self._size, self._waiting = self._file.stat().st_size, b""

    def write(self, row: dict[str, Any]) -> None:
        """Append one row, or keep it until the disk takes it."""
        text = json.dumps({"step": row["step"], **row}, allow_nan=False) + "\n"
        self._waiting += text.encode()
        attempt(f"step {row['step']} of {self._file}", self.sync)

    def sync(self) -> None:
        """See to it that every row is on the disk.

        Raises:
            OSError: it is not; nothing is lost, the next call tries again.
        """
        with self._file.open("r+b", buffering=0) as file:
            file.truncate(self._size)  # what an attempt that failed may have left
            file.seek(self._size)
            written = file.write(self._waiting)
            if written < len(self._waiting):
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
            os.fsync(file.fileno())
        self._size, self._waiting = self._size + written, b""


def _step_of(line: bytes) -> float:
    """A row's step; infinite for a line that a killed run left half written."""
    try:
        return json.loads(line)["step"]
    except (ValueError, KeyError, TypeError):
        return math.inf


class RunLog:
    """What rank 0 writes as training goes: metrics.jsonl and completions.parquet.

    Args:
        folder: the run folder.
        keep_up_to: rows of later steps are dropped: a resumed run writes them again.
    """

    def __init__(self, folder: Path, keep_up_to: int):
        self._metrics = MetricsLog(folder, keep_up_to)
        self._completions = CompletionLog(folder, keep_up_to)

    def write(self, row: dict[str, Any], completions: list[dict[str, Any]]) -> None:
        """A step's metrics, at once, and its completions, until they are kept."""
        self._metrics.write(row)
        self._completions.add(completions)

    def sync(self) -> None:
        """Put what waits on the disk; before each checkpoint, which then has all rows up to it.

        Raises:
            OSError: it is not; nothing is lost, the next call tries again.
        """
        self._metrics.sync()
        self._completions.sync()
