"""Schemas of data sets, one per kind, with checks of their fields.

The `kind` of a data set's node determines its schema; see `DATASETS`. Values are in `conf/`.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from grpo_ustat.config.own_functions import TASKS, check_entry_point, check_reward
from grpo_ustat.config.row_files import Row, read_rows, split_files
from grpo_ustat.config.schema import ConfigError, field

KINDS = ("arithmetic", "one_step", "gsm8k", "math", "jsonl", "own")
TABLES = ("one_digit_product", "one_digit_sum", "plus_one", "plus_digit")
# Number of questions of each kind that are set aside for studies.
STUDY_QUESTIONS = {
    "one_digit_product": 29, "one_digit_sum": 24, "plus_one": 31, "plus_digit": 272,
}  # fmt: skip
# Default upper limit on the number of test questions from a user's file, and on the number of study
# questions.
MAX_HELD_OUT_QUESTIONS = 500
# Published numbers of test questions by hub id and subset. Sources: data set cards, Cobbe et al.
# 2021, Hendrycks et al. 2021, Lightman et al. 2023.
PUBLISHED_TESTS: dict[tuple[str, str | None], int] = {
    ("openai/gsm8k", "main"): 1319,
    ("DigitalLearningGmbH/MATH-lighteval", "default"): 5000,
    ("HuggingFaceH4/MATH-500", None): 500,
}
# Common names of columns with questions or answers.
OTHER_COLUMNS = {
    "question": ("question", "problem", "prompt", "query", "instruction", "input", "text"),
    "answer": ("answer", "ground_truth", "solution", "expected_answer", "final_answer", "gold",
               "target", "label", "response", "completion", "output"),
}  # fmt: skip
# Marker before the answer at the end of a solution.
MARK = "####"
# Floats below this limit represent every integer exactly. pandas can write 3 as 3.0.
MAX_EXACT_FLOAT = 2**53
FILE_SUFFIXES = (".jsonl", ".json", ".csv", ".parquet", ".gz", ".xz", ".zst", ".bz2")


@dataclass
class DatasetConfig:
    """Fields of every kind of data set."""

    name: str = field(
        "name of the data set, part of the run folder's name; with dataset=own, the entry point "
        "of the task"
    )
    kind: str = field("code that makes or reads the questions; set by dataset=NAME", choices=KINDS)
    seed: int = field(
        "random seed of the split into train, test and study questions; the run's seed does not "
        "change this split"
    )
    train_size: int | None = field(
        "to train on; null: all that are left after test, study and example questions",
        "questions",
        positive=True,
    )
    test_size: int | None = field("held out for evaluation; null: all", "questions", positive=True)
    study_size: int = field(
        "set aside for mse, never used for training", "questions", positive=True
    )
    reward: str | None = field(
        "a reward function of your own, FILE.py:FUNCTION or the name of an entry point; null: "
        "the data set's reward"
    )
    max_completion_length: int | None = field(
        "allowed in a completion if max_completion_length is not set; null: max_completion_length "
        "must be set",
        "tokens",
        positive=True,
        default=None,
    )

    def check(self) -> None:
        """Refuse a data set that cannot be built."""
        if self.reward is not None:
            check_reward(self.reward, "dataset.reward")

    @property
    def published_test_size(self) -> int | None:
        """Published number of test questions; None if no number was published."""
        return None


@dataclass
class GeneratedConfig(DatasetConfig):
    """Generated questions; the sizes of the train and test splits must be set."""

    def check(self) -> None:
        """Refuse null as the size of the train or test split."""
        for name in ("train_size", "test_size"):
            if getattr(self, name) is None:
                raise ConfigError(f"dataset.{name}=null: dataset.kind={self.kind} needs a number")
        super().check()


@dataclass
class ArithmeticConfig(GeneratedConfig):
    """Arithmetic questions with several steps; ranges of operands include both end points."""

    min_term: int = field("smallest term of sums and differences")
    max_term: int = field("largest term of sums and differences")
    min_factor: int = field(
        "smallest value of a product's larger factor and of a quotient; multiples of ten are "
        "excluded"
    )
    max_factor: int = field("largest value of a product's larger factor and of a quotient")
    min_digit: int = field("smallest value of a product's smaller factor and of a divisor")
    max_digit: int = field("largest value of a product's smaller factor and of a divisor")

    def check(self) -> None:
        """Refuse empty ranges of operands."""
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
                f"dataset.min_factor={low} max_factor={high}: this range contains only multiples "
                "of ten, which are excluded: use a wider range"
            )


@dataclass
class OneStepConfig(GeneratedConfig):
    """Arithmetic questions with one step."""

    tables: list[str] = field("kinds of questions to include", choices=TABLES)

    def check(self) -> None:
        """Refuse a data set without kinds of questions."""
        super().check()
        if not self.tables:
            raise ConfigError(f"dataset.tables=[] has no questions: use any of {', '.join(TABLES)}")


@dataclass
class Gsm8kConfig(DatasetConfig):
    """Rows with a question and an answer that ends with `#### number` (Cobbe et al. 2021)."""

    path: str = field(
        "a file or folder of your own (jsonl, json, CSV or Parquet, optionally compressed) or a "
        "hub id"
    )
    subset: str | None = field(
        "subset of the data set on the hub; null: the data set has no subsets"
    )
    revision: str | None = field("branch, tag or commit of path on the hub; null: the main branch")
    test_path: str | None = field(
        "file, folder or hub id with the test rows; null: path contains the test rows"
    )
    test_revision: str | None = field(
        "branch, tag or commit of test_path on the hub; null: the main branch"
    )
    train_split: str = field("split with the train rows; its first rows are the study questions")
    test_split: str = field("split with the test rows")

    def check(self) -> None:
        """Refuse paths that do not exist, and the same path for train and test rows."""
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
            if not re.fullmatch(r"[\w.-]+/[\w.-]+", value) or value.endswith(FILE_SUFFIXES):
                raise ConfigError(f"dataset.{name}={value}: no such file or folder")

    @property
    def sources(self) -> list[str]:
        """All paths from which questions are read."""
        return [path for path in (self.path, self.test_path) if path is not None]

    @property
    def published_test_size(self) -> int | None:
        """Number of test questions listed in `PUBLISHED_TESTS`; None if it is not listed."""
        if self.test_split != "test":
            return None
        if self.test_path is not None:
            return PUBLISHED_TESTS.get((self.test_path, None))
        return PUBLISHED_TESTS.get((self.path, self.subset))


@dataclass
class MathConfig(Gsm8kConfig):
    """Rows with problem, solution, answer, level and subject (Hendrycks et al. 2021)."""

    subjects: list[str] | None = field(
        "subjects of the train rows to keep, such as [Algebra,Number Theory]; null: all seven"
    )
    levels: list[int] | None = field("levels of the train rows to keep, from 1 to 5; null: all")
    filter_test: bool = field(
        "apply subjects and levels to the test rows, too; false: keep all test rows"
    )
    test_ids: str | None = field(
        "a file that lists the unique_id of each test row to keep, one per line; null: all test "
        "rows"
    )
    max_answer_length: int = field(
        "allowed in an answer; longer answers get no reward", "characters", positive=True
    )
    judge_seconds: float = field(
        "allowed for judging an answer; if judging takes longer, the answer counts as timed out "
        "and gets no reward",
        "seconds",
        positive=True,
    )
    judge_memory_gb: float = field(
        "allowed for judging an answer; if judging needs more, the answer counts as failed and "
        "gets no reward",
        "GiB",
        positive=True,
    )

    def check(self) -> None:
        """Refuse filters that are invalid or keep no row."""
        super().check()
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
        """Paths of the files with questions or test ids."""
        return [*super().sources, *([self.test_ids] if self.test_ids else [])]

    @property
    def published_test_size(self) -> int | None:
        """Published number of test questions; None if unpublished or if test rows are filtered."""
        keeps_all_rows = not self.filter_test and self.test_ids is None
        return super().published_test_size if keeps_all_rows else None


@dataclass
class JsonlConfig(DatasetConfig):
    """Rows of a user's files, with column names that the user gives."""

    path: str = field(
        "a file or folder of your own (jsonl, json, CSV or Parquet, optionally compressed)"
    )
    test_path: str | None = field(
        "file or folder with the test rows; null: the test files in path if it is a folder with "
        "test files, otherwise some of the rows in path"
    )
    question: str = field("column with the question")
    answer: str = field("column with the expected answer, a text or a number")
    study_size: int | None = field(  # pyright: ignore[reportIncompatibleVariableOverride]
        "set aside for mse, never used for training; null: a quarter of the rows, at most 500",
        "questions",
        positive=True,
    )

    def check(self) -> None:
        """Refuse missing files, invalid rows and excessive sizes; fill in null sizes."""
        super().check()
        for name in ("path", "test_path"):
            place = getattr(self, name)
            if place is not None and not Path(place).expanduser().exists():
                raise ConfigError(f"dataset.{name}={place}: there is no such file or folder")
        rows, test_rows = self.row_counts()
        for file in (*self.train_files, *self.test_files):
            for row in read_rows(file):
                self.question_and_answer(row)
        if not rows:
            raise ConfigError(f"dataset.path={self.path} contains no rows")
        quarter = min(MAX_HELD_OUT_QUESTIONS, max(1, rows // 4))
        if self.study_size is None:
            self.study_size = quarter  # pyright: ignore[reportIncompatibleVariableOverride]
        if test_rows is None and self.test_size is None:
            self.test_size = min(quarter, max(0, rows - self.study_size) // 2) or None
        tests = self.test_size or 0 if test_rows is None else 0
        if self.study_size + tests > rows:
            sizes = f"dataset.study_size={self.study_size}"
            sizes += f" and dataset.test_size={tests}" * bool(tests)
            raise ConfigError(f"{sizes} of {rows} rows in {self.path}: use at most {rows} in total")

    def check_training(self, prompts: int) -> None:
        """Refuse a file with too few rows for a training step and an evaluation.

        Args:
            prompts: number of prompts per step.
        """
        rows, test_rows = self.row_counts()
        study = self.study_size or 0
        tests, least_tests = (self.test_size or 0, 2) if test_rows is None else (0, 0)
        train = rows - study - tests
        if train >= prompts and tests >= least_tests:
            return
        least = 1 + least_tests + prompts
        lower = ", or lower budget.rollouts" * (rows > 1 + least_tests and prompts > 1)
        if rows < least:
            fix = f"use {least} rows or more"
        else:
            tests_left = min(max(tests, least_tests), rows - prompts - 1)
            fix = f"use dataset.study_size={min(study, rows - prompts - tests_left)}"
            fix += f" dataset.test_size={tests_left}" * (test_rows is None)
        of_tests = f", {tests} for tests (dataset.test_size)" * (test_rows is None)
        needs = "2 for tests and " * (test_rows is None)
        raise ConfigError(
            f"{self.path} has {rows} rows: {study} for studies (dataset.study_size){of_tests} "
            f"and {train} to train on, but training needs {needs}{prompts} per step "
            f"(budget.rollouts / group_size): {fix}{lower}"
        )

    def question_and_answer(self, row: Row) -> tuple[str, str]:
        """Return the question and answer of a row as text, with leading and trailing white space.

        A row without a question or an answer is refused. If the answer contains `MARK`, the
        expected answer is the text after the last `MARK`.
        """
        text, answer = row.text(self.question), row.value(self.answer)
        if isinstance(answer, bool) or not isinstance(answer, str | int | float):
            raise row.refused(self.answer, answer, "a text or a number")
        if isinstance(answer, float) and answer.is_integer() and abs(answer) < MAX_EXACT_FLOAT:
            answer = int(answer)
        if not str(answer).rpartition(MARK)[2].strip():
            raise row.refused(self.answer, answer, "non-empty text")
        return text, str(answer)

    def row_counts(self) -> tuple[int, int | None]:
        """Return the numbers of rows in the train files and in the test files.

        The second number is None if there is no test file. Test rows are then taken from the train
        files.
        """
        rows = sum(self._count("path", file) for file in self.train_files)
        tests = [self._count("test_path", file) for file in self.test_files]
        return rows, sum(tests) if tests else None

    def _count(self, name: str, file: Path) -> int:
        rows = read_rows(file, f"dataset.{name}")
        count, columns = len(rows), [*rows[0].fields] if rows else []
        missing = [key for key in ("question", "answer") if getattr(self, key) not in columns]
        if not columns or not missing:
            return count
        taken = {getattr(self, key) for key in ("question", "answer") if key not in missing}
        fixes: list[str] = []
        for key in missing:
            names = [name for name in OTHER_COLUMNS[key] if name in columns and name not in taken]
            fixes.append(f"dataset.{key}={names[0] if names else 'COLUMN'}")
        raise ConfigError(
            f"{file} row 1: field {getattr(self, missing[0])} is missing, the row has "
            f"{', '.join(columns)}: set {' '.join(fixes)}"
        )

    @property
    def train_files(self) -> list[Path]:
        """Files with the rows for training and studies."""
        return self._files("path", self.path, "train")

    @property
    def test_files(self) -> list[Path]:
        """Files with the test rows; empty if test rows are taken from the train files."""
        if self.test_path is not None:
            return self._files("test_path", self.test_path, "test")
        folder = Path(self.path).expanduser().is_dir()
        return split_files("dataset.path", self.path).get("test", []) if folder else []

    def _files(self, name: str, place: str, split: str) -> list[Path]:
        if not Path(place).expanduser().is_dir():
            return [Path(place).expanduser()]
        splits = split_files(f"dataset.{name}", place)
        if split not in splits:
            raise ConfigError(
                f"dataset.{name}={place} has no split {split!r}, only {', '.join(splits)}: put "
                f"{split} in the names of its files, or use dataset.{name}=FILE"
            )
        return splits[split]

    @property
    def sources(self) -> list[str]:
        """All paths from which questions are read."""
        return [path for path in (self.path, self.test_path) if path is not None]


@dataclass
class OwnConfig(DatasetConfig):
    """Task of an installed package."""

    options: dict[str, Any] = field(
        "options of the task; add an option by +dataset.options.NAME=VALUE"
    )

    def check(self) -> None:
        """Refuse a task that no installed package provides."""
        super().check()
        check_entry_point(TASKS, self.name, "dataset.name")


_SCHEMAS = (
    ArithmeticConfig, OneStepConfig, Gsm8kConfig, MathConfig, JsonlConfig, OwnConfig,
)  # fmt: skip
DATASETS: dict[str, type[DatasetConfig]] = dict(zip(KINDS, _SCHEMAS, strict=True))
