"""From configuration to task."""

from __future__ import annotations

from grpo_ustat.config import Common
from grpo_ustat.tasks.arithmetic import ArithmeticTask, Ranges
from grpo_ustat.tasks.base import Task
from grpo_ustat.tasks.few_shot import FewShotTask


def make_task(config: Common) -> Task:
    """The configured task."""
    dataset, template = config.dataset, config.prompt.template
    sizes = {"train": dataset.train_size, "test": dataset.test_size, "study": dataset.study_size}
    if dataset.kind == "few_shot":
        return FewShotTask(dataset.name, dataset.shots, sizes, template, dataset.seed)
    ranges = Ranges(
        dataset.min_term, dataset.max_term, dataset.min_factor, dataset.max_factor,
        dataset.min_digit, dataset.max_digit,
    )  # fmt: skip
    return ArithmeticTask(ranges, sizes, template, dataset.seed)
