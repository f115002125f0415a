"""What an entry does with a checked configuration and its run folder."""

from __future__ import annotations

from typing import Any

from grpo_ustat.ranks import is_main
from grpo_ustat.runs.folder import RunFolder
from grpo_ustat.runs.meter import waiting


def work(entry: str, config: Any, folder: RunFolder) -> float | None:
    """Train, or study, in this process: alone, or as one rank of several.

    Returns:
        The final held-out accuracy, the study's first mean squared error, or how many of a
        theorem's predictions do not agree.
    """
    with waiting("starting", shown=is_main()):
        if entry == "train":
            from grpo_ustat.training.trainer import fit as do
        elif entry == "gap":
            from grpo_ustat.theorems.run import run as do
        else:
            from grpo_ustat.study.run import run as do
    return do(config, folder)
