"""Files of JSON lines that grow while they are read, and that a kill may leave half a line of."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any


def read_rows(file: Path) -> tuple[list[dict[str, Any]], int]:
    """The rows of a file, and how many of its lines hold none; a last one without an end does not
    count, for it is being written, or was when a run was killed.

    Raises:
        OSError: it is there and cannot be read.
    """
    try:
        lines = file.read_text(errors="replace").splitlines(keepends=True)
    except FileNotFoundError:
        return [], 0
    rows = [_parsed(line) for line in lines]
    damaged = sum(
        row is None and line.endswith("\n") for row, line in zip(rows, lines, strict=True)
    )
    return [row for row in rows if row is not None], damaged


def _parsed(line: str) -> dict[str, Any] | None:
    try:
        row = json.loads(line)
    except ValueError:
        return None
    return row if isinstance(row, dict) else None
