"""The runs that a command line asks for: one, or the points of a sweep."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from grpo_ustat.checks import ConfigError
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

    @property
    def policy(self) -> str:
        """Model and prompt: one model asked in two ways is two policies."""
        prompt = self.config.prompt
        shots = f" x {prompt.shots}" if prompt.shots else ""
        return f"{self.config.model.name}, {prompt.name}{shots}"

    def result(self) -> dict[str, Any] | None:
        """What the finished run found; None where it has not finished, or not all of its steps."""
        try:
            found = self.folder.kept() if self.folder else None
        except ConfigError:
            return None
        steps = getattr(self.config, "max_steps", 0)
        return found if found and found.get("steps", 0) >= steps else None
