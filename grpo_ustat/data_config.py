"""Typed schemas of models, data sets (one per kind) and prompts, with what can be checked of them.

A data set's node is typed by its `kind`, see `DATASETS`. Values live in `conf/`.
"""

from __future__ import annotations

import importlib.metadata
import importlib.util
import re
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from omegaconf import MISSING

from grpo_ustat.checks import ConfigError, check_model, one_of, positive

DTYPES = ("float32", "float64", "bfloat16", "float16")
ATTENTION = ("eager", "sdpa", "flex_attention", "flash_attention_2", "flash_attention_3")
TABLES = ("one_digit_product", "one_digit_sum", "plus_one")
TASKS, REWARDS = "grpo_ustat.tasks", "grpo_ustat.rewards"  # groups of entry points
FILES = (".jsonl", ".json", ".parquet", ".gz", ".xz", ".zst", ".bz2")


@dataclass
class ModelSize:
    """What costs depend on; read from config.json where the model is a folder, else null: unknown.

    parameters; layers; kv_width: numbers that a token leaves in one layer's keys, key-value heads x
    their width; vocabulary.
    """

    parameters: int | None = MISSING
    layers: int | None = MISSING
    kv_width: int | None = MISSING
    vocabulary: int | None = MISSING


@dataclass
class ModelConfig:
    """Which policy: `embedded:NAME`, `cached:NAME` (made by a script), a folder, or `org/name`.

    attn_implementation: a name of transformers, null: its own choice. trust_remote_code: run code
    that comes with the model; only ever on the command line.
    """

    name: str = MISSING
    model_name_or_path: str = MISSING
    revision: str | None = MISSING
    dtype: str = MISSING
    attn_implementation: str | None = MISSING
    trust_remote_code: bool = MISSING
    size: ModelSize = field(default_factory=ModelSize)

    def check(self, *, cached: bool = True) -> None:
        """Refuse what cannot be loaded.

        Raises:
            ConfigError: naming the values and the fix.
        """
        one_of("model.dtype", self.dtype, DTYPES)
        if self.attn_implementation is not None:
            one_of("model.attn_implementation", self.attn_implementation, ATTENTION)
        for name, value in vars(self.size).items():
            if value is not None:
                positive(self.size, name, prefix="model.size.")
        check_model(self.model_name_or_path, cached=cached)


@dataclass
class DatasetConfig:
    """Fields of all kinds. seed: of the questions, not of the run. Sizes count questions; null: all
    that there are. reward: a reward of your own, by its entry-point name; null: the data set's.
    """

    name: str = MISSING
    kind: str = MISSING
    seed: int = MISSING
    train_size: int | None = MISSING
    test_size: int | None = MISSING
    study_size: int = MISSING
    reward: str | None = MISSING

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

    min_term: int = MISSING
    max_term: int = MISSING
    min_factor: int = MISSING
    max_factor: int = MISSING
    min_digit: int = MISSING
    max_digit: int = MISSING

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
    """One step. tables: any of one_digit_product, one_digit_sum, plus_one."""

    tables: list[str] = MISSING

    def check(self) -> None:
        """See `DatasetConfig.check`."""
        super().check()
        if not self.tables:
            raise ConfigError(f"dataset.tables=[] holds no question: use any of {TABLES}")
        for name in self.tables:
            one_of("dataset.tables", name, TABLES)


@dataclass
class Gsm8kConfig(DatasetConfig):
    """Rows with question and answer, the answer ending in `#### number` (Cobbe et al. 2021).

    path: a file or folder (jsonl, json, Parquet, perhaps compressed) or a hub id; subset: of a hub
    id that has several; revision: its branch, tag or commit. test_path, test_revision: the same for
    test rows, test_path null: they are in path. train_split, test_split: their names there. Of the
    train rows study_size are kept for studies and never trained on.
    """

    path: str = MISSING
    subset: str | None = MISSING
    revision: str | None = MISSING
    test_path: str | None = MISSING
    test_revision: str | None = MISSING
    train_split: str = MISSING
    test_split: str = MISSING

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
    """Rows with problem, solution, answer, level, subject (Hendrycks et al. 2021).

    subjects, levels: which train rows to keep, null: all; filter_test: test rows too. test_ids: a
    file with the `unique_id` of a test row on each line, null: all rows. max_answer_length:
    characters of an answer, longer ones earn nothing. judge_seconds, judge_memory_gb: limits of
    judging one answer, past which it is counted as a time-out or failure and earns nothing.
    """

    subjects: list[str] | None = MISSING
    levels: list[int] | None = MISSING
    filter_test: bool = MISSING
    test_ids: str | None = MISSING
    max_answer_length: int = MISSING
    judge_seconds: float = MISSING
    judge_memory_gb: float = MISSING

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
    """A task of your own: name is that of its entry point; options are passed on to it."""

    options: dict[str, Any] = MISSING

    def check(self) -> None:
        """See `DatasetConfig.check`."""
        super().check()
        check_entry_point(TASKS, self.name, "dataset.name")


DATASETS = {
    "arithmetic": ArithmeticConfig,
    "one_step": OneStepConfig,
    "gsm8k": Gsm8kConfig,
    "math": MathConfig,
    "own": OwnConfig,
}


@dataclass
class PromptConfig:
    """How a question is put to the model.

    template: of a question, with {question}. shots: solved examples before it, the same for all
    questions, drawn by seed from outside train, test and study; each is the template and the reply,
    with {answer} or {solution}. chat: whether to write turns in the model's own chat format;
    system: the system turn, null: the format's own. stop: every token that contains it ends a
    completion, as its last. max_length: tokens of a prompt, examples included; questions with a
    longer one are left out of train, test and study, null: no limit.
    """

    name: str = MISSING
    template: str = MISSING
    reply: str | None = MISSING
    shots: int = MISSING
    seed: int = MISSING
    chat: bool = MISSING
    system: str | None = MISSING
    stop: str | None = MISSING
    max_length: int | None = MISSING

    def check(self) -> None:
        """Refuse what shows no question or no answer.

        Raises:
            ConfigError: naming the values and the fix.
        """
        if "{question}" not in self.template:
            raise ConfigError(
                f"prompt.template={self.template!r} never shows the question: "
                "put {question} into it"
            )
        if self.shots < 0:
            raise ConfigError(f"prompt.shots={self.shots}: use 0 or more")
        if self.shots and not any(f in (self.reply or "") for f in ("{answer}", "{solution}")):
            raise ConfigError(
                f"prompt.shots={self.shots} with prompt.reply={self.reply!r}: examples need a "
                "reply that shows {answer} or {solution}"
            )
        if self.system is not None and not self.chat:
            raise ConfigError(
                f"prompt.system={self.system!r} is a turn of a chat: use prompt.chat=true, or null"
            )
        if self.stop == "":
            raise ConfigError("prompt.stop='' is in every token: use null to stop at end tokens")
        if self.max_length is not None:
            positive(self, "max_length", prefix="prompt.")


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
