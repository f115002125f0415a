"""Files of runs: atomic writing, and reading of JSON lines and CSV tables."""

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

# File of the moment whose date a chat template writes into prompts.
PROMPT_DATE = "prompt_date.txt"
# Start of a cell that a spreadsheet would run as a formula, quoted or not.
FORMULA = re.compile(r"'*[=+\-@\t\r]")


def natural_order(place: object) -> list[str | int]:
    """Return a sort key that compares numbers within names as numbers.

    >>> sorted(["step_10", "step_9"], key=natural_order)
    ['step_9', 'step_10']
    """
    # Texts and numbers alternate.
    parts = re.split(r"([0-9]+)", str(place))
    return [int(part) if i % 2 else part for i, part in enumerate(parts)]


@contextmanager
def atomic_write(file: Path, shared: bool = False) -> Iterator[Path]:
    """Yield a temporary path to write to, which replaces the file when the block ends.

    So the file is always the old one or complete; an error removes the temporary file. Its
    permissions follow from the umask, even if a library that writes sets others.

    Args:
        shared: True if several processes may write the file at once; each gets a separate path.
    """
    staged = hidden_path(file, f".{uuid4().hex}" if shared else "")
    try:
        staged.touch()
        mode = staged.stat().st_mode
        yield staged
        # Some file systems have no modes.
        with suppress(PermissionError):
            staged.chmod(mode)
        os.replace(staged, file)
    except BaseException:
        # The file takes room on a disk that may have none.
        with suppress(OSError):
            staged.unlink()
        raise


def write_whole(file: Path, text: str) -> None:
    """Write a text so that the file is either absent, unchanged, or complete."""
    with atomic_write(file) as staged:
        staged.write_text(text)


def hidden_path(path: Path, mark: str = "") -> Path:
    """Return a hidden path beside this one, for content that will replace it or be removed."""
    return path.with_name(f".{path.name}{mark}.tmp")


def read_rows(file: Path) -> tuple[list[dict[str, Any]], int]:
    """Return the rows of a file of JSON lines, and the number of its damaged lines.

    A last line without a newline does not count as damaged, because it is being written, or was
    when a run was killed. A missing file has no rows.
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
    """Parse a line of JSON lines; None if it holds no mapping."""
    try:
        row = json.loads(line)
    except (ValueError, RecursionError):
        return None
    return row if isinstance(row, dict) else None


def csv_rows(text: str) -> list[dict[str, Any]]:
    r"""Return a table's rows; a cell is a finite number, a text, or None if it is empty.

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
    """Yield the number, from 0, and the content of each line that is not blank."""
    # The file may begin with the mark of Windows.
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
    """Write a complete file unless it exists; of several processes at once, only the first does."""
    staged = hidden_path(path, f".{uuid4().hex}")
    staged.write_text(text)
    try:
        os.link(staged, path)
    except FileExistsError:
        pass
    except OSError:
        # Some file systems have no links.
        os.replace(staged, path)
    staged.unlink(missing_ok=True)


def kept_moment(file: Path, begun: datetime | None = None) -> datetime:
    """Return the moment that a file stores; create the file with `begun`, or now, if missing."""
    if not file.is_file():
        create_whole(file, f"{(begun or datetime.now()).isoformat(timespec='seconds')}\n")
    try:
        return datetime.fromisoformat(file.read_text().strip())
    except ValueError as error:
        raise ConfigError(
            f"{file} is damaged: write the date of the run's prompts into it, such as 2026-03-01"
        ) from error
