"""Files of rows: which a folder holds of each split, and how many rows are in one."""

from __future__ import annotations

import bz2
import gzip
import json
import logging
import lzma
import tempfile
from collections.abc import Callable, Generator
from contextlib import contextmanager, suppress
from importlib import import_module
from pathlib import Path
from typing import Any, cast

from grpo_ustat.config.schema import ConfigError
from grpo_ustat.terminal.streams import single_line

KINDS = {".jsonl": "json", ".json": "json", ".parquet": "parquet"}  # as `datasets` calls them
UNPACKERS: dict[str, Callable[[bytes], bytes]] = {
    ".gz": gzip.decompress, ".bz2": bz2.decompress, ".xz": lzma.decompress,
    ".zst": lambda content: import_module("zstandard").decompress(content),
}  # fmt: skip


def kind_of(file: Path) -> str | None:
    """What `datasets` calls a file of this name, perhaps compressed; None where it knows none."""
    return next((KINDS[suffix] for suffix in reversed(file.suffixes) if suffix in KINDS), None)


def split_files(key: str, folder: str, subset: str | None = None) -> dict[str, list[Path]]:
    """The files of each split of a folder, known by their names or by the folder's card.

    Args:
        key: of the configuration, which names the folder.
        folder: with jsonl, json or Parquet files, perhaps compressed.
        subset: of a folder that has several, as its card names them.

    Raises:
        ConfigError: it holds none.
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
            "jsonl, json or Parquet files with train and test in their names"
        ) from error
    if builder.name not in KINDS.values():
        raise ConfigError(
            f"{key}={folder} holds no jsonl, json or Parquet file: put train.jsonl and "
            "test.jsonl there, or use another folder"
        )
    data_files = cast(dict[Any, list[Any]], builder.config.data_files)
    return {str(name): [Path(path) for path in paths] for name, paths in data_files.items()}


def text_of(file: Path) -> str:
    """A file's text, without the mark at its beginning that some programs write.

    Raises:
        OSError, ValueError, EOFError: it cannot be read; of a `.zst` file, also ImportError.
    """
    content = file.read_bytes()
    unpack = UNPACKERS.get(file.suffix)
    try:
        return (unpack(content) if unpack else content).decode("utf-8-sig")
    except lzma.LZMAError as error:
        raise ValueError(str(error)) from error


def json_rows(text: str) -> list[tuple[int, str | Any]]:
    """Number and content of each row: the entries of one array, or the lines that are not blank,
    still as texts.
    """
    if text.lstrip().startswith("["):
        try:
            entries = json.loads(text)
        except (ValueError, RecursionError):
            entries = None  # perhaps an array on each line, which the reader refuses by its number
        if isinstance(entries, list):
            return list(enumerate(cast(list[Any], entries), start=1))
    lines = enumerate(text.split("\n"), start=1)
    return [(number, line) for number, line in lines if line.strip()]


def count_and_columns(key: str, file: Path) -> tuple[int, list[str]]:
    """How many rows a file has, and the names in the first one; none where that is no object.

    Raises:
        ConfigError: it cannot be read.
    """
    try:
        if kind_of(file) == "parquet" and file.suffix == ".parquet":
            parquet: Any = import_module("pyarrow.parquet")
            return parquet.read_metadata(file).num_rows, parquet.read_schema(file).names
        rows = json_rows(text_of(file))
    except Exception as error:
        raise unreadable(key, file, error) from error
    first = rows[0][1] if rows else None
    with suppress(ValueError, RecursionError):  # the reader refuses it by its number
        first = json.loads(first) if isinstance(first, str) else first
    return len(rows), [*first] if isinstance(first, dict) else []


def unreadable(key: str, file: Path, error: Exception) -> ConfigError:
    """The error for a file of rows that cannot be read."""
    missing = isinstance(error, ImportError) and file.suffix == ".zst"
    reason = "pip install zstandard, or use .gz" if missing else reason_of(error)
    return ConfigError(f"{key}={file} cannot be read: {reason}")


@contextmanager
def quiet_datasets() -> Generator[str]:
    """Within, the library prints no bars and logs; yields a temporary folder for its cache."""
    datasets: Any = import_module("datasets")
    huggingface_hub: Any = import_module("huggingface_hub")
    datasets.disable_progress_bars()
    huggingface_hub.utils.disable_progress_bars()
    for library in (datasets, huggingface_hub):
        library.utils.logging.set_verbosity(logging.CRITICAL)
    with tempfile.TemporaryDirectory() as folder:
        yield folder


def reason_of(error: Exception) -> str:
    """What an error of reading says, in a line."""
    root = error.__cause__ or error
    return single_line(root, 200) or "no row was found"
