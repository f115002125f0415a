"""From configuration to task."""

from __future__ import annotations

from grpo_ustat.config import Common, ConfigError
from grpo_ustat.tasks.arithmetic import ArithmeticTask, Ranges
from grpo_ustat.tasks.base import Task


def make_task(config: Common) -> Task:
    """The configured task."""
    dataset = config.dataset
    if dataset.name != "arithmetic":
        raise ConfigError(f"unknown dataset {dataset.name!r}: choose from arithmetic")
    ranges = Ranges(
        dataset.min_term, dataset.max_term, dataset.min_factor, dataset.max_factor,
        dataset.min_digit, dataset.max_digit,
    )  # fmt: skip
    sizes = {"train": dataset.train_size, "test": dataset.test_size, "study": dataset.study_size}
    return ArithmeticTask(ranges, sizes, config.prompt.template, dataset.seed)
