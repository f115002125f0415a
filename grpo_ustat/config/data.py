"""Typed schemas of data sets, one per kind, with what can be checked of them.

A data set's node is typed by its `kind`, see `DATASETS`. Values live in `conf/`.
"""

from __future__ import annotations

import importlib.metadata
import importlib.util
import re
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from grpo_ustat.checks import ConfigError, one_of, positive
from grpo_ustat.meanings import key

KINDS = ("arithmetic", "one_step", "gsm8k", "math", "own")
TABLES = ("one_digit_product", "one_digit_sum", "plus_one")
TASKS, REWARDS = "grpo_ustat.tasks", "grpo_ustat.rewards"  # groups of entry points
FILES = (".jsonl", ".json", ".parquet", ".gz", ".xz", ".zst", ".bz2")


@dataclass
class DatasetConfig:
    """Fields of all kinds."""

    name: str = key("in the run folder's name; of dataset=own, the entry point of the task")
    kind: str = key("what makes or reads it; choose by dataset=NAME", choices=KINDS)
    seed: int = key("which questions go where, whatever the run's own seed")
    train_size: int | None = key("to train on; null: all that are left", "questions")
    test_size: int | None = key("held out for evaluation; null: all", "questions")
    study_size: int = key("of studies, never trained on", "questions")
    reward: str | None = key(
        "a reward of your own, by its entry point's name; null: the data set's"
    )

    def check(self) -> None:
        """Refuse what cannot be made.

        Raises:
            ConfigError: naming the values and the fix.
        """
        positive(self, "study_size", prefix="dataset.")
        for name in ("train_size", "test_size"):
            if getattr(self, name) is not None:
                positive(self, name, prefix="dataset.")
        if self.reward is not None:
            check_entry_point(REWARDS, self.reward, "dataset.reward")


@dataclass
class GeneratedConfig(DatasetConfig):
    """Questions made by the program, of which there is no `all`."""

    def check(self) -> None:
        """See `DatasetConfig.check`."""
        for name in ("train_size", "test_size"):
            if getattr(self, name) is None:
                raise ConfigError(f"dataset.{name}=null: dataset.kind={self.kind} needs a number")
        super().check()


@dataclass
class ArithmeticConfig(GeneratedConfig):
    """Several steps; operand ranges include both ends."""

    min_term: int = key("smallest term of sums and differences")
    max_term: int = key("largest of them")
    min_factor: int = key(
        "smallest of the larger factors of products and of quotients; no multiples of ten"
    )
    max_factor: int = key("largest of them")
    min_digit: int = key("smallest of the smaller factors and of divisors")
    max_digit: int = key("largest of them")

    def check(self) -> None:
        """See `DatasetConfig.check`."""
        super().check()
        for name in ("term", "factor", "digit"):
            low, high = getattr(self, f"min_{name}"), getattr(self, f"max_{name}")
            if not 1 <= low <= high:
                raise ConfigError(
                    f"dataset.min_{name}={low} max_{name}={high}: use 1 <= min <= max"
                )
        low, high = self.min_factor, self.max_factor
        if all(factor % 10 == 0 for factor in range(low, min(high, low + 1) + 1)):
            raise ConfigError(
                f"dataset.min_factor={low} max_factor={high} holds only multiples of ten"
            )


@dataclass
class OneStepConfig(GeneratedConfig):
    """One step."""

    tables: list[str] = key("kinds of questions", choices=TABLES)

    def check(self) -> None:
        """See `DatasetConfig.check`."""
        super().check()
        if not self.tables:
            raise ConfigError(f"dataset.tables=[] holds no question: use any of {TABLES}")
        for name in self.tables:
            one_of("dataset.tables", name, TABLES)


@dataclass
class Gsm8kConfig(DatasetConfig):
    """Rows with question and answer, the answer ending in `#### number` (Cobbe et al. 2021)."""

    path: str = key(
        "a file or folder (jsonl, json, Parquet, perhaps compressed) of your own, or a hub id"
    )
    subset: str | None = key("of a hub id that has several; null: it has none")
    revision: str | None = key("branch, tag or commit of the hub id; null: its main branch")
    test_path: str | None = key("as path, of the test rows; null: they are in path")
    test_revision: str | None = key("as revision, of test_path; null: its main branch")
    train_split: str = key("name of the train rows there, of which the first are the study's")
    test_split: str = key("name of the test rows there")

    def check(self) -> None:
        """See `DatasetConfig.check`."""
        super().check()
        if self.test_path == self.path:
            raise ConfigError(
                f"dataset.path={self.path} is also dataset.test_path: train on one file and test "
                "on another"
            )
        for name in ("path", "test_path"):
            value = getattr(self, name)
            if value is None or Path(value).expanduser().exists():
                continue
            if not re.fullmatch(r"[\w.-]+/[\w.-]+", value) or value.endswith(FILES):
                raise ConfigError(f"dataset.{name}={value}: no such file or folder")

    @property
    def sources(self) -> list[str]:
        """Every path that questions come from."""
        return [path for path in (self.path, self.test_path) if path is not None]


@dataclass
class MathConfig(Gsm8kConfig):
    """Rows with problem, solution, answer, level, subject (Hendrycks et al. 2021)."""

    subjects: list[str] | None = key(
        "of train rows to keep, such as [Algebra,Number Theory]; null: all seven"
    )
    levels: list[int] | None = key("of train rows to keep, 1 to 5; null: all")
    filter_test: bool = key("keep only those subjects and levels of the test rows too")
    test_ids: str | None = key(
        "a file with the unique_id of a test row on each line; null: all test rows"
    )
    max_answer_length: int = key("of an answer; longer ones earn nothing", "characters")
    judge_seconds: float = key(
        "for judging one answer, past which it is counted as a time-out and earns nothing",
        "seconds",
    )
    judge_memory_gb: float = key(
        "for judging one answer, past which it is counted as a failure and earns nothing", "GiB"
    )

    def check(self) -> None:
        """See `DatasetConfig.check`."""
        super().check()
        positive(self, "max_answer_length", "judge_seconds", "judge_memory_gb", prefix="dataset.")
        for name in ("subjects", "levels"):
            if getattr(self, name) == []:
                raise ConfigError(f"dataset.{name}=[] keeps no row: use null to keep all")
        for level in self.levels or ():
            if not 1 <= level <= 5:
                raise ConfigError(f"dataset.levels={self.levels}: MATH has levels 1 to 5")
        if self.test_ids is not None and not Path(self.test_ids).expanduser().is_file():
            raise ConfigError(f"dataset.test_ids={self.test_ids}: no such file")

    @property
    def sources(self) -> list[str]:
        """See `Gsm8kConfig.sources`."""
        return [*super().sources, *([self.test_ids] if self.test_ids else [])]


@dataclass
class OwnConfig(DatasetConfig):
    """A task of your own."""

    options: dict[str, Any] = key("handed to the task, each by +dataset.options.NAME=VALUE")

    def check(self) -> None:
        """See `DatasetConfig.check`."""
        super().check()
        check_entry_point(TASKS, self.name, "dataset.name")


_SCHEMAS = (ArithmeticConfig, OneStepConfig, Gsm8kConfig, MathConfig, OwnConfig)
DATASETS = dict(zip(KINDS, _SCHEMAS, strict=True))


def check_entry_point(group: str, name: str, key: str) -> None:
    """An installed package offers it.

    Raises:
        ConfigError: none does, and then names those that are there, or its module is not to be
            found.
    """
    known = sorted(importlib.metadata.entry_points(group=group).names)
    if name not in known:
        found = ", ".join(known) or "none is installed"
        raise ConfigError(f"unknown {key} {name!r}: entry points of {group} are: {found}")
    module = importlib.metadata.entry_points(group=group)[name].module
    if module_file(group, name) is None:
        raise ConfigError(f"{key}={name}: there is no module {module!r}, which {group} names")


def module_file(group: str, name: str) -> Path | None:
    """The file of the module that an entry point is in, without importing that module."""
    try:
        found = importlib.util.find_spec(importlib.metadata.entry_points(group=group)[name].module)
    except ImportError:
        return None
    return Path(found.origin) if found and found.origin else None
