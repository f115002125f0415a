"""Rows of a data set, read from a file, from a folder, or with `datasets` from the hub."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from grpo_ustat.config.data import Gsm8kConfig
from grpo_ustat.config.row_files import Row, quiet_datasets, read_rows, reason_of, split_files
from grpo_ustat.config.schema import ConfigError
from grpo_ustat.tasks.hub import go_offline_if_unreachable


@dataclass(frozen=True)
class Origin:
    """File, folder or hub id from which rows are read."""

    # Configuration key of the path, for error messages.
    key: str
    # File, folder or hub id.
    path: str
    # Name of a subset, as in the data set's card, if there are several subsets.
    subset: str | None = None
    # Branch, tag or commit on the hub.
    revision: str | None = None

    def rows(self, split: str) -> list[Row]:
        """Read all rows of a split; if the path is a file, all its rows belong to every split."""
        place = Path(self.path).expanduser()
        if place.is_file():
            return rows_of_file(place)
        if place.is_dir():
            return [row for file in self._files(split) for row in rows_of_file(file)]
        from datasets import load_dataset

        unreachable = go_offline_if_unreachable()
        try:
            with quiet_datasets():
                splits = load_dataset(self.path, self.subset, revision=self.revision)
        except Exception as error:
            hint = ", or download it elsewhere and set HF_HUB_OFFLINE=1" if unreachable else ""
            raise ConfigError(
                f"{self.key}={self.path} is not a local file or folder, and it could not be loaded "
                f"from the hub ({reason_of(error)}): use {self.key}=FILE_OR_FOLDER{hint}"
            ) from error
        rows = enumerate(self._chosen(split, splits), start=1)
        return [Row(fields, f"{self.path} split {split} row {n}") for n, fields in rows]

    def _files(self, split: str) -> list[Path]:
        """Return the files of a split; file names or the folder's data set card assign them."""
        files = split_files(self.key, self.path, self.subset)
        return list(self._chosen(split, files))

    def _chosen(self, split: str, splits: Mapping[Any, Iterable]) -> Iterable:
        if split not in splits:
            raise ConfigError(
                f"{self.key}={self.path} has no split {split!r}, only {', '.join(splits)}: "
                "set dataset.train_split and dataset.test_split, or dataset.test_path"
            )
        return splits[split]


def train_and_test(dataset: Gsm8kConfig) -> tuple[list[Row], list[Row]]:
    """Read all training rows and all test rows of a data set."""
    train = Origin("dataset.path", dataset.path, dataset.subset, dataset.revision)
    test = train
    if dataset.test_path is not None:
        test = Origin("dataset.test_path", dataset.test_path, None, dataset.test_revision)
    elif Path(dataset.path).expanduser().is_file():
        raise ConfigError(
            f"dataset.path={dataset.path} is one file, which cannot contain two splits: add "
            "dataset.test_path=FILE, or use a folder with both splits"
        )
    return train.rows(dataset.train_split), test.rows(dataset.test_split)


def rows_of_file(file: Path, key: str = "") -> list[Row]:
    """Read all rows of a file; see `read_rows`."""
    rows = read_rows(file, key)
    if not rows:
        raise ConfigError(f"{file} cannot be read: it is empty")
    return rows
