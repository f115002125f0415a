"""The runs that a command line asks for: one, or the points of a sweep."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from grpo_ustat.runs.folder import RunFolder


@dataclass(frozen=True)
class Point:
    """One run.

    Attributes:
        name: the overrides in which it differs from the sweep's other runs, `group_size=4 seed=0`.
        config: its checked configuration.
        folder: None where only the running job knows it.
        sweep: the sweep's folder, None for a run alone.
        overrides: that compose it.
    """

    name: str
    config: Any
    folder: RunFolder | None
    sweep: Path | None
    overrides: tuple[str, ...] = ()
