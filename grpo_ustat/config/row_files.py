"""Rows of JSON Lines, JSON, CSV or Parquet files, optionally compressed as fsspec supports.

The error for an invalid value gives the file, the row (from 1, counting blank lines) and the field.
"""

from __future__ import annotations

import csv
import io
import json
import logging
import math
from collections.abc import Generator, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import lru_cache
from importlib import import_module
from pathlib import Path
from typing import Any, cast

from grpo_ustat.config.command_line import is_installed
from grpo_ustat.config.schema import ConfigError
from grpo_ustat.terminal.streams import SURROGATE, single_line

# Key of the extra cells of a CSV row that has more cells than the header.
TOO_MANY = "more fields than the header"


@dataclass(frozen=True)
class Row:
    """Row of a data set."""

    fields: dict[str, Any]
    # Source of the row: the file, or the hub id and split, with the row number.
    where: str

    def has(self, name: str) -> bool:
        """Return True if the field exists and is not null."""
        return self.fields.get(name) is not None

    def value(self, *names: str) -> Any:
        """Return the value of the first of the named fields that exists in the row."""
        for name in names:
            if self.has(name):
                value = self.fields[name]
                if isinstance(value, str) and SURROGATE.search(value):
                    raise self.refused(name, value, "valid Unicode text")
                return value
        present = ", ".join(name for name in self.fields if self.has(name)) or "none"
        raise ConfigError(
            f"{self.where}: field {' or '.join(names)} is missing, the row has {present}"
        )

    def text(self, *names: str) -> str:
        """Return the value as non-blank text, including leading and trailing white space."""
        value = self.value(*names)
        if not isinstance(value, str) or not value.strip():
            raise self.refused(" or ".join(names), value, "non-empty text")
        return value

    def refused(self, name: str, value: Any, requirement: str) -> ConfigError:
        """Return the error for a field that does not meet a requirement.

        Args:
            name: name of the field.
            value: value of the field.
            requirement: what the value must be, such as `non-empty text`.
        """
        return ConfigError(
            f"{self.where}: field {name} is {_short(value)}, it must be {requirement}"
        )


def read_rows(file: Path, key: str = "") -> list[Row]:
    """Return the rows of a file; they are cached until the file is modified.

    Numbers have the types that Python's json module returns. A single-precision number in a Parquet
    file becomes the shortest decimal that rounds to it. All values of CSV files are strings.

    Args:
        file: CSV file with a header, Parquet file, or file with JSON Lines or a JSON array. CSV and
            Parquet files are recognised by their suffixes.
        key: configuration key with the file, for error messages.
    """
    place = f"{key}={file}" if key else str(file)
    try:
        return _rows(file, file.stat().st_mtime_ns)
    except ConfigError:
        raise
    except Exception as error:
        raise ConfigError(f"{place} cannot be read: {single_line(error, 200)}") from error


@lru_cache(maxsize=8)
def _rows(file: Path, modified_ns: int) -> list[Row]:
    """Read the rows of a file; `modified_ns` is part of the cache key."""
    if file.suffix == ".zst" and not is_installed("zstandard"):
        raise ValueError("pip install zstandard, or use .gz")
    fsspec: Any = import_module("fsspec")
    with fsspec.open(str(file), "rb", compression="infer") as opened:
        content: bytes = opened.read()
    kind = next((x for x in reversed(file.suffixes) if x in (".parquet", ".csv")), ".jsonl")
    if kind == ".parquet":
        return _checked(file, enumerate(_parquet(content), start=1))
    text = content.decode("utf-8-sig")
    if kind == ".csv":
        rows = csv.DictReader(io.StringIO(text, newline=""), strict=True, restkey=TOO_MANY)
        return _checked(file, enumerate(rows, start=1))
    return _checked(file, _json(file, text))


def _json(file: Path, text: str) -> Iterator[tuple[int, Any]]:
    """Yield the entries of a JSON array, or of non-blank JSON lines, with their row numbers."""
    if text.lstrip().startswith("["):
        try:
            yield from enumerate(json.loads(text), start=1)
            return
        except (ValueError, RecursionError) as error:
            if text.lstrip()[1:].lstrip()[:1] in ("{", "]", ""):
                raise ValueError(f"invalid JSON ({error})") from error
    for number, line in enumerate(text.split("\n"), start=1):
        if line.strip():
            try:
                yield number, json.loads(line)
            except (ValueError, RecursionError) as error:
                raise ConfigError(f"{file} row {number} is not valid JSON: {error}") from error


def _parquet(content: bytes) -> list[dict[str, Any]]:
    """Read the rows of a Parquet table; see `read_rows` for single-precision numbers."""
    parquet: Any = import_module("pyarrow.parquet")
    table = parquet.read_table(io.BytesIO(content))
    rows = table.to_pylist()
    for column in table.schema:
        if str(column.type) in ("float", "halffloat"):
            single = column.type.to_pandas_dtype()
            for row in rows:
                row[column.name] = row[column.name] and float(str(single(row[column.name])))
    return rows


def _checked(file: Path, rows: Iterable[tuple[int, Any]]) -> list[Row]:
    """Check that rows are objects with finite numbers and valid Unicode, and return the rows."""
    checked: list[Row] = []
    for number, fields in rows:
        row = Row(fields, f"{file} row {number}")
        if not isinstance(fields, dict):
            raise ConfigError(
                f"{row.where} is {fields!r:.60}, it must be an object with named fields"
            )
        if TOO_MANY in fields:
            raise ConfigError(f"{row.where} has more fields than the header")
        for name, value in row.fields.items():
            for part in (name, *_parts(value)):
                if isinstance(part, float) and not math.isfinite(part):
                    raise row.refused(name, part, "a finite number, or null")
                if isinstance(part, str) and SURROGATE.search(part):
                    raise row.refused(name, part, "valid Unicode text")
        checked.append(row)
    return checked


def _parts(value: Any) -> Iterator[Any]:
    """Yield the value itself or, if it is a container, all keys and values that it contains."""
    if isinstance(value, dict):
        for name, inner in cast(dict[Any, Any], value).items():
            yield name
            yield from _parts(inner)
    elif isinstance(value, list):
        for inner in cast(list[Any], value):
            yield from _parts(inner)
    else:
        yield value


def split_files(key: str, folder: str, subset: str | None = None) -> dict[str, list[Path]]:
    """Return the files of each split, as defined by file names or the folder's data set card.

    Args:
        key: configuration key with the folder, for error messages.
        folder: folder with files of rows.
        subset: subset to use if the folder's data set card defines several.
    """
    datasets: Any = import_module("datasets")
    place = str(Path(folder).expanduser())
    try:
        with quiet_datasets() as cache:
            subsets = datasets.get_dataset_config_names(place)
            chosen = subset if subset in subsets else None
            builder = datasets.load_dataset_builder(place, chosen, cache_dir=cache)
    except Exception as error:
        raise ConfigError(
            f"{key}={folder} contains no readable rows ({reason_of(error)}): use jsonl, json, "
            "CSV or Parquet files whose names contain train or test"
        ) from error
    if builder.name not in ("json", "csv", "parquet"):
        raise ConfigError(
            f"{key}={folder} contains no jsonl, json, CSV or Parquet file: put train.jsonl and "
            "test.jsonl there, or use another folder"
        )
    data_files = cast(dict[Any, list[Any]], builder.config.data_files)
    return {str(name): [Path(path) for path in paths] for name, paths in data_files.items()}


@contextmanager
def quiet_datasets() -> Generator[str]:
    """Suppress progress bars and logs of `datasets`, and yield a temporary cache folder."""
    datasets: Any = import_module("datasets")
    huggingface_hub: Any = import_module("huggingface_hub")
    datasets.disable_progress_bars()
    huggingface_hub.utils.disable_progress_bars()
    for library in (datasets, huggingface_hub):
        library.utils.logging.set_verbosity(logging.CRITICAL)
    # This import is slow and only used here.
    import tempfile

    with tempfile.TemporaryDirectory() as folder:
        yield folder


def reason_of(error: Exception) -> str:
    """Return the message of a reading error in one line."""
    return single_line(error.__cause__ or error, 200) or "no row was found"


def _short(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= 60 else f"{text[:57]}..."
