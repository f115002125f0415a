"""Atomic writing of files, and reading of JSON lines and CSV tables."""

from __future__ import annotations

import csv
import io
import json
import math
import os
import re
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from datetime import datetime
from pathlib import Path
from typing import Any
from uuid import uuid4

from grpo_ustat.config.schema import ConfigError

# Files of a run folder: configuration, code and versions, result.
CONFIG, CODE, RESULT = ".hydra/config.yaml", "code.json", "result.json"
# File with the time of the run's first start, whose date chat templates write into prompts.
PROMPT_DATE = "prompt_date.txt"
# Folder for a tracker's files within a run folder.
TRACKER_FOLDER = "tracker"
# Beginning of a CSV cell that a spreadsheet would interpret as a formula. Such a cell is stored
# with a single quote in front, so the pattern allows quotes.
FORMULA = re.compile(r"'*[=+\-@\t\r]")


def natural_order(place: object) -> list[str | int]:
    """Return a sort key that compares numbers within names as numbers.

    >>> sorted(["step_10", "step_9"], key=natural_order)
    ['step_9', 'step_10']
    """
    # Parts at odd positions are numbers.
    parts = re.split(r"([0-9]+)", str(place))
    return [int(part) if i % 2 else part for i, part in enumerate(parts)]


@contextmanager
def atomic_write(file: Path, shared: bool = False) -> Iterator[Path]:
    """Yield the path of a temporary file, which replaces `file` at the end of the block.

    Thus `file` has either its old content or its complete new content. If an error occurs, the
    temporary file is removed. The permissions follow the umask, even if the library that writes the
    file sets others.

    Args:
        shared: True if several processes can write the file at the same time; each process then
            uses a separate temporary file.
    """
    staged = hidden_path(file, f".{uuid4().hex}" if shared else "")
    try:
        staged.touch()
        mode = staged.stat().st_mode
        yield staged
        # Some file systems do not support changing permissions.
        with suppress(PermissionError):
            staged.chmod(mode)
        os.replace(staged, file)
    except BaseException:
        # Free the space, because the disk might be full.
        with suppress(OSError):
            staged.unlink()
        raise


def write_whole(file: Path, text: str) -> None:
    """Write a text atomically: after an error, the file is absent or unchanged."""
    with atomic_write(file) as staged:
        staged.write_text(text)


def hidden_path(path: Path, mark: str = "") -> Path:
    """Return a hidden path in the same folder, for temporary content."""
    return path.with_name(f".{path.name}{mark}.tmp")


def read_rows(file: Path) -> tuple[list[dict[str, Any]], int]:
    """Return the rows of a JSON Lines file, and the number of damaged lines.

    An incomplete last line without a newline does not count as damaged, because a run might still
    be writing it, or might have been killed while writing it. A missing file has no rows.
    """
    try:
        lines = file.read_text(errors="replace").splitlines(keepends=True)
    except FileNotFoundError:
        return [], 0
    rows = [parsed_row(line) for line in lines]
    damaged = sum(
        row is None and line.endswith("\n") for row, line in zip(rows, lines, strict=True)
    )
    return [row for row in rows if row is not None], damaged


def parsed_row(line: str) -> dict[str, Any] | None:
    """Parse a line of a JSON Lines file; return None if it is not a mapping."""
    try:
        row = json.loads(line)
    except (ValueError, RecursionError):
        return None
    return row if isinstance(row, dict) else None


def csv_rows(text: str) -> list[dict[str, Any]]:
    r"""Return the rows of a CSV table; each cell is a finite number, a text, or None if empty.

    Raises:
        ValueError: the text is not a CSV table.

    >>> csv_rows("step,split,low\n4,test,0.25\n8,,\n")
    [{'step': 4, 'split': 'test', 'low': 0.25}, {'step': 8, 'split': None, 'low': None}]
    """
    rows = csv.DictReader(io.StringIO(text))
    try:
        return [{key: _cell(value) for key, value in row.items() if key} for row in rows]
    except csv.Error as error:
        raise ValueError(str(error)) from error


def _cell(text: str | None) -> Any:
    for kind in (int, float):
        try:
            number = kind(text or "")
            if math.isfinite(number):
                return number
        except (ValueError, OverflowError):
            pass
    return (text[1:] if text and text[0] == "'" and FORMULA.match(text) else text) or None


def json_lines(path: Path) -> Iterator[tuple[int, dict[str, Any]]]:
    """Yield the number (from 0) and the content of each non-blank line."""
    # The file can begin with a byte-order mark.
    with path.open(encoding="utf-8-sig") as file:
        for number, line in enumerate(file):
            if not line.strip():
                continue
            try:
                row = json.loads(line)
            except (ValueError, RecursionError) as error:
                raise ConfigError(f"{path} line {number} (from 0) is not JSON: {error}") from error
            if not isinstance(row, dict):
                raise ConfigError(f"{path} line {number} (from 0) is not a JSON object")
            yield number, row


def create_whole(path: Path, text: str) -> None:
    """Create a complete file unless it exists or another process creates it first."""
    staged = hidden_path(path, f".{uuid4().hex}")
    staged.write_text(text)
    try:
        os.link(staged, path)
    except FileExistsError:
        pass
    except OSError:
        # Some file systems do not support hard links.
        os.replace(staged, path)
    staged.unlink(missing_ok=True)


def kept_moment(file: Path, begun: datetime | None = None) -> datetime:
    """Return the time stored in a file; if there is no file, store `begun` or the current time."""
    if not file.is_file():
        create_whole(file, f"{(begun or datetime.now()).isoformat(timespec='seconds')}\n")
    try:
        return datetime.fromisoformat(file.read_text().strip())
    except ValueError as error:
        raise ConfigError(
            f"{file} is damaged: write the date of the run's prompts into it, such as 2026-03-01"
        ) from error
