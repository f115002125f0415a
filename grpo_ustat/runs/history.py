"""`launches.jsonl` in a run folder, with one row for each start and each end of the run.

Status tables and the history of preemptions come from this file; no result depends on it.
"""

from __future__ import annotations

import json
import os
import socket
import sys
import time
from collections.abc import Sequence
from datetime import UTC, datetime
from functools import cache
from pathlib import Path
from typing import Any

from grpo_ustat.config.command_line import typed_command
from grpo_ustat.config.secrets import redact_code
from grpo_ustat.distributed import slurm
from grpo_ustat.distributed.ranks import world
from grpo_ustat.distributed.signals import Stopped
from grpo_ustat.runs.files import read_rows
from grpo_ustat.terminal.streams import tell

NAME = "launches.jsonl"


def start_row() -> dict[str, Any]:
    """Return the row for the start of a launch.

    The row contains the host, the process id, the number of ranks, the SLURM job, the seconds from
    process start to the first run, and the command if a user typed it.
    """
    row = {"event": "start", "host": socket.gethostname(), "pid": os.getpid(), "processes": world()}
    row["seconds_before"] = seconds_before_the_first_run()
    if slurm.job_id() is not None:
        row["slurm_job_id"] = slurm.job_id()
    command = typed_command()
    return row if command is None else row | {"command": command}


@cache
def seconds_before_the_first_run() -> float:
    """Return the seconds from process start to the first call of this function."""
    import psutil

    # The system reports the start of a process with a resolution of one second.
    return max(0.0, round(time.time() - psutil.Process().create_time(), 1))


def append(folder: Path, row: dict[str, Any]) -> None:
    """Append a row with the current time; a disk error causes only a warning."""
    now = datetime.now(UTC).isoformat(timespec="seconds")
    line = json.dumps({"time": now, **row}) + "\n"
    try:
        with (folder / NAME).open("a") as file:
            file.write(line)
    except OSError as error:
        tell(f"warning: could not add a row to {folder / NAME}: {error}", file=sys.stderr)


def end_row(error: BaseException | None) -> dict[str, Any]:
    """Return the row for the end of a launch; without an error, the work of the launch is done."""
    if error is None:
        return {"event": "end", "outcome": "done"}
    if isinstance(error, Stopped):
        return {"event": "end", "outcome": "stopped", "reason": str(error)}
    lost = isinstance(error, SystemExit) and isinstance(error.code, str)
    if isinstance(error, Exception) or lost:
        return {"event": "end", "outcome": "failed", "error": last_line(error)}
    return {"event": "end", "outcome": "interrupted", "reason": last_line(error)}


def last_line(error: BaseException) -> str:
    """Return an error's last line for a table; errors from other packages include their type."""
    name = type(error).__name__
    lines = redact_code(str(error)).removeprefix("error: ").strip().splitlines()
    ours = type(error).__module__.startswith("grpo_ustat.")
    if lines and (ours or isinstance(error, FloatingPointError | SystemExit)):
        return lines[-1]
    return f"{name}: {lines[-1]}" if lines else name


def note_failure(folder: Path, error: BaseException, config_hash: str, before: list[dict]) -> None:
    """Record the failure of a launch, unless the launch has recorded it itself.

    Args:
        config_hash: hash of the launch's configuration, which can differ from the folder's hash.
        before: list with the last row before the launch, to see if the launch added rows; empty if
            there was no row.
    """
    now = launches(folder)[-1:]
    if not now or now == before or "outcome" not in now[0]:
        append(folder, end_row(error) | {"config_hash": config_hash})


def note_done(folder: Path) -> None:
    """Record that a run is complete, if its last launch failed but did not replace the result."""
    if any(row.get("outcome") == "failed" for row in launches(folder)[-1:]):
        append(folder, end_row(None))


def wall_seconds(rows: Sequence[dict[str, Any]], now: datetime | None = None) -> float | None:
    """Return the total seconds of all launches; None if no launch has both a start and an end.

    A killed launch has no end, so it is not counted.

    Args:
        now: time that counts as the end of the last launch if it is still running.

    >>> wall_seconds([{"event": "start", "time": "2026-03-01T00:00:00+00:00"},
    ...               {"event": "end", "time": "2026-03-01T00:01:23+00:00"}])
    83.0
    """
    spans, start = [], None
    for row in rows:
        if row.get("event") not in ("start", "end") or "time" not in row:
            continue
        moment = datetime.fromisoformat(row["time"])
        if row["event"] == "end" and start is not None:
            spans.append((moment - start).total_seconds())
        start = moment if row["event"] == "start" else None
    if start is not None and now is not None:
        spans.append((now - start).total_seconds())
    return sum(spans) if spans else None


def launches(folder: Path) -> list[dict[str, Any]]:
    """Return all rows in order, without any line that a killed run left incomplete."""
    try:
        return read_rows(folder / NAME)[0]
    except OSError:
        return []
