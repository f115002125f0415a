"""What an entry does with a checked configuration and its run folder."""

from __future__ import annotations

from typing import Any

from grpo_ustat.runs.folder import RunFolder


def work(entry: str, config: Any, folder: RunFolder) -> float | None:
    """Train, or study, in this process: alone, or as one rank of several.

    Returns:
        The final held-out accuracy, or the study's first mean squared error.
    """
    if entry == "train":
        from grpo_ustat.training.trainer import fit

        return fit(config, folder)
    from grpo_ustat.study.run import run

    return run(config, folder)
