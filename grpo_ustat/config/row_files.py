"""Rows of files: json lines, json, CSV or Parquet, plain or compressed in a format of fsspec."""

from __future__ import annotations

import csv
import io
import json
import logging
import math
import tempfile
from collections.abc import Generator, Iterable, Iterator
from contextlib import contextmanager
from functools import lru_cache
from importlib import import_module
from pathlib import Path
from typing import Any, cast

from grpo_ustat.config.command_line import is_installed
from grpo_ustat.config.schema import ConfigError
from grpo_ustat.terminal.streams import SURROGATE, single_line

# Each with its number, from 1; blank lines count.
Rows = list[tuple[int, dict[str, Any]]]
# Of the cells of a CSV row that have no column.
TOO_MANY = "more fields than the header"


def read_rows(file: Path, key: str = "") -> Rows:
    """Return the rows of a file, which is read once.

    Numbers are as Python's json reader returns them; those of single precision in a Parquet file
    are the shortest that round to them. Values of CSV are all texts.

    Args:
        file: json lines, or one json array; CSV with a header, or Parquet, by its name.
        key: configuration key that names the file, for errors.
    """
    place = f"{key}={file}" if key else str(file)
    try:
        return _rows(file, file.stat().st_mtime_ns)
    except ConfigError:
        raise
    except Exception as error:
        raise ConfigError(f"{place} cannot be read: {single_line(error, 200)}") from error


@lru_cache(maxsize=8)
def _rows(file: Path, modified_ns: int) -> Rows:
    """Read the rows of a file as it was at `modified_ns`."""
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
    """Yield the entries of one array, or the lines that are not blank."""
    if text.lstrip().startswith("["):
        try:
            yield from enumerate(json.loads(text), start=1)
            return
        except (ValueError, RecursionError) as error:
            if text.lstrip()[1:].lstrip()[:1] in ("{", "]", ""):
                raise ValueError(f"no json ({error})") from error
    for number, line in enumerate(text.split("\n"), start=1):
        if line.strip():
            try:
                yield number, json.loads(line)
            except (ValueError, RecursionError) as error:
                raise ConfigError(f"{file} row {number} is no json: {error}") from error


def _parquet(content: bytes) -> list[dict[str, Any]]:
    """Read the rows of a table; single precision becomes the shortest decimal that rounds to it."""
    parquet: Any = import_module("pyarrow.parquet")
    table = parquet.read_table(io.BytesIO(content))
    rows = table.to_pylist()
    for one in table.schema:
        if str(one.type) in ("float", "halffloat"):
            single = one.type.to_pandas_dtype()
            for row in rows:
                row[one.name] = row[one.name] and float(str(single(row[one.name])))
    return rows


def _checked(file: Path, rows: Iterable[tuple[int, Any]]) -> Rows:
    """Check that each row is an object of finite numbers and whole characters; return the rows."""
    numbered: Rows = list(rows)
    for number, row in numbered:
        if not isinstance(cast(Any, row), dict):
            raise ConfigError(
                f"{file} row {number} is {row!r:.60}, it must be an object with named fields"
            )
        if TOO_MANY in row:
            raise ConfigError(f"{file} row {number} has more fields than the header names")
        for name, value in row.items():
            for part in (name, *_parts(value)):
                if isinstance(part, float) and not math.isfinite(part):
                    raise ConfigError(
                        f"{file} row {number}: field {name} is {part}, it must be a finite "
                        "number, or null"
                    )
                if isinstance(part, str) and SURROGATE.search(part):
                    raise ConfigError(
                        f"{file} row {number}: field {name} is {part!r}, it must be a text of "
                        "whole characters"
                    )
    return numbered


def _parts(value: Any) -> Iterator[Any]:
    """Yield a value, or all that it holds."""
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
    """Find the files of each split of a folder, known by their names or by the folder's card.

    Args:
        key: configuration key that names the folder.
        folder: folder with files of rows.
        subset: subset of a folder that has several, as its card names them.
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
            f"{key}={folder} holds no rows that can be read ({reason_of(error)}): use "
            "jsonl, json, CSV or Parquet files with train and test in their names"
        ) from error
    if builder.name not in ("json", "csv", "parquet"):
        raise ConfigError(
            f"{key}={folder} holds no jsonl, json, CSV or Parquet file: put train.jsonl and "
            "test.jsonl there, or use another folder"
        )
    data_files = cast(dict[Any, list[Any]], builder.config.data_files)
    return {str(name): [Path(path) for path in paths] for name, paths in data_files.items()}


@contextmanager
def quiet_datasets() -> Generator[str]:
    """Suppress the library's bars and logs; yield a temporary folder for its cache."""
    datasets: Any = import_module("datasets")
    huggingface_hub: Any = import_module("huggingface_hub")
    datasets.disable_progress_bars()
    huggingface_hub.utils.disable_progress_bars()
    for library in (datasets, huggingface_hub):
        library.utils.logging.set_verbosity(logging.CRITICAL)
    with tempfile.TemporaryDirectory() as folder:
        yield folder


def reason_of(error: Exception) -> str:
    """Return the message of an error of reading, in one line."""
    return single_line(error.__cause__ or error, 200) or "no row was found"
