"""Reader of Parquet, JSON and CSV tables, which recognises the format by content."""

from __future__ import annotations

import csv
import io
import json
import re
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from grpo_ustat.config.schema import ConfigError
from grpo_ustat.runs.files import FORMULA
from grpo_ustat.terminal.streams import single_line

PARQUET = b"PAR1"
# First bytes of files that cannot be read as tables, with a message: the kind of file, and what to
# do.
OTHER_FILES = {
    b"\x1f\x8b": "compressed: unpack it first, e.g. with gunzip",
    b"BZh": "compressed: unpack it first, e.g. with bunzip2",
    b"(\xb5/\xfd": "compressed: unpack it first, e.g. with unzstd",
    b"\xfd7zXZ\x00": "compressed: unpack it first, e.g. with unxz",
    b"PK\x03\x04": "an archive, such as a spreadsheet of Excel: save its table as CSV",
    b"ARROW1": "an Arrow file: write its table with to_parquet",
    b"FEA1": "a Feather file: write its table with to_parquet",
    b"SQLite format 3": "a database: export its table as CSV",
    b"\x89HDF": "an HDF5 file: write its table as CSV or Parquet",
    b"\x93NUMPY": "an array of NumPy without prompt ids: write a table as CSV or Parquet",
    b"%PDF": "a PDF: export its table as CSV",
}
PICKLE = re.compile(rb"\x80[\x02-\x05]")
UTF_16 = (b"\xff\xfe", b"\xfe\xff")
DELIMITERS = ",;\t|"
# Number in a cell of a CSV file. `float` is not used to recognise numbers, because it accepts 1_0
# as 10, and digits of other scripts.
NUMBER = re.compile(r"\s*[+-]?(\d+\.?\d*|\.\d+)([eE][+-]?\d+)?\s*", re.ASCII)
BOOLEANS = {"true": True, "false": False}


def text_of_file(path: Path) -> str:
    """Return the text of a file in UTF-8, or in UTF-16 with a byte-order mark.

    Raises:
        ConfigError: The file is empty or contains no text; the message says what it contains.
    """
    data = path.read_bytes()
    if not data.strip():
        raise ConfigError(f"{path} is empty")
    for start, meaning in OTHER_FILES.items():
        if data.startswith(start):
            raise ConfigError(f"{path} is {meaning}")
    if PICKLE.match(data):
        raise ConfigError(f"{path} is a pickle, which may run code: write its table as CSV")
    try:
        text = data.decode("utf-16" if data[:2] in UTF_16 else "utf-8-sig")
    except UnicodeDecodeError as error:
        raise ConfigError(f"{path} is neither Parquet nor text in UTF-8") from error
    if "\0" in text:
        raise ConfigError(f"{path} is neither Parquet nor text: it contains null characters")
    return text


def is_parquet(path: Path) -> bool:
    """Return True if a file begins with the bytes of a Parquet file."""
    with path.open("rb") as file:
        return file.read(len(PARQUET)) == PARQUET


def read_table(path: Path, texts: Sequence[str] = ()) -> dict[str, list[Any]]:
    """Read the columns of a Parquet, JSON or CSV file; a missing value is None.

    JSON is one object per line, or one list of objects.

    Args:
        path: file with the table.
        texts: columns of a CSV file whose cells stay texts, so that the ids 1 and 01 differ.

    Raises:
        ConfigError: The file contains no table, it is damaged, or it has no rows.
    """
    try:
        if is_parquet(path):
            from pyarrow import parquet

            columns: dict[str, list[Any]] = parquet.read_table(path).to_pydict()
        elif path.suffix == ".parquet":
            raise ConfigError(f"{path} cannot be read: it does not begin like a Parquet file")
        else:
            text = text_of_file(path)
            is_json = text.lstrip()[:1] in ("{", "[")
            rows = _json_rows(path, text) if is_json else _csv_rows(path, text, texts)
            names = dict.fromkeys(name for row in rows for name in row)
            columns = {name: [row.get(name) for row in rows] for name in names}
    except (OSError, ValueError, RecursionError) as error:
        if isinstance(error, ConfigError):
            raise
        raise ConfigError(f"{path} cannot be read: {single_line(error, 200)}") from error
    if not any(columns.values()):
        raise ConfigError(f"{path} has no rows")
    return columns


def _json_rows(path: Path, text: str) -> list[dict[str, Any]]:
    """Parse JSON with one object per line, a list of objects, or a single object."""
    lines = [(number, line) for number, line in enumerate(text.splitlines()) if line.strip()]
    rows: list[Any] = []
    try:
        document = json.loads(text) if text.lstrip()[0] == "[" or len(lines) == 1 else None
    except ValueError as error:
        raise ConfigError(f"{path} is not complete JSON: {single_line(error, 100)}") from error
    if document is not None:
        rows, place = document if isinstance(document, list) else [document], "entry"
    else:
        place = "line"
        for number, line in lines:
            try:
                rows.append(json.loads(line))
            except (ValueError, RecursionError) as error:
                if not rows and (whole := _single_object(text)) is not None:
                    return [whole]
                reason = single_line(error, 100)
                raise ConfigError(f"{path} line {number} (from 0) is not JSON: {reason}") from error
    for number, row in enumerate(rows):
        if not isinstance(row, dict):
            raise ConfigError(f"{path} {place} {number} (from 0) is not a JSON object")
    return rows


def _single_object(text: str) -> dict[str, Any] | None:
    """Parse an object that is written over several lines; None if the text is something else."""
    try:
        document = json.loads(text)
    except (ValueError, RecursionError):
        return None
    return document if isinstance(document, dict) else None


def _csv_rows(path: Path, text: str, texts: Sequence[str]) -> list[dict[str, Any]]:
    """Parse a table whose first row names the columns, with commas, semicolons, tabs or bars."""
    head = text.lstrip("\r\n").partition("\n")[0]
    delimiter = max(DELIMITERS, key=head.count)
    if not head.count(delimiter):
        raise ConfigError(f"{path} has a single column or is no table: {single_line(head, 40)!r}")
    # newline="" keeps line ends as they are, without which the reader rejects quoted line breaks.
    lines = csv.reader(io.StringIO(text, newline=""), delimiter=delimiter, strict=True)
    try:
        header, *body = [line for line in lines if any(map(str.strip, line))]
    except csv.Error as error:
        raise ConfigError(f"{path} is no CSV table: {error}") from error
    names = [name.strip() for name in header]
    if repeated := [name for name, count in Counter(names).items() if name and count > 1]:
        raise ConfigError(f"{path} has {repeated[0]} as the name of several columns: rename them")
    for number, line in enumerate(body):
        if len(line) > len(names):
            raise ConfigError(
                f"{path} row {number} (from 0) has {len(line)} cells, but there are {len(names)} "
                "columns: correct the row"
            )
    # A column without a name is dropped: it is the index that pandas writes.
    return [
        {
            name: (cell or None) if name in texts else _value(cell)
            for name, cell in zip(names, line, strict=False)
            if name
        }
        for line in body
    ]


def _value(cell: str) -> Any:
    """Return a number, True, False or a text; None for an empty cell.

    >>> [_value(cell) for cell in ("1", " .5", "1_0", "TRUE", "", "q")]
    [1, 0.5, '1_0', True, None, 'q']
    """
    if NUMBER.fullmatch(cell):
        return int(cell) if re.fullmatch(r"\s*[+-]?\d+\s*", cell) else float(cell)
    word = cell.strip().lower()
    if word in BOOLEANS:
        return BOOLEANS[word]
    return (cell[1:] if cell[:1] == "'" and FORMULA.match(cell) else cell) or None
