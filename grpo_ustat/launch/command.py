"""Description of a command for `launch`, which treats all commands alike."""

from __future__ import annotations

import gc
import importlib
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

Run = Callable[[Any, Any], float | None]


@dataclass(frozen=True)
class Command:
    """Command `grpo-ustat NAME`: it composes `conf/NAME.yaml` and makes runs or a report."""

    # Name of the command, of its schema in `SCHEMAS`, its main file in `conf/` and its room.
    name: str
    # Imports what the command needs and returns the function that makes one run. That function maps
    # a checked configuration and its `RunFolder` to the number that a sweep shows. For a command
    # that makes no runs, it maps a configuration and a folder to None.
    load_run: Callable[[], Run]
    # Prints the costs of planned runs; None for a command without costs.
    show_costs: Callable[[Sequence[Any]], None] | None = None
    # Split whose questions `show_prompts` shows; None if a run asks no questions.
    split: str | None = None
    # Returns the names of the modules that a run's local workers import; empty if it starts no
    # workers.
    preload: Callable[[Any], Sequence[str]] = lambda _: ()


def load_command(name: str) -> Command:
    """Return the command of this name; ranks and jobs get only the name."""
    return importlib.import_module(f"grpo_ustat.{name}.__main__").COMMAND


def load_sweep_report() -> Callable[[Sequence[Any], Path, Sequence[int] | None], None]:
    """Return the function that reports a sweep's entries into a folder, at given training steps."""
    return importlib.import_module("grpo_ustat.report.aggregate").report_sweep


@contextmanager
def without_garbage_collection() -> Iterator[None]:
    """Switch off garbage collection while modules are imported and configurations composed.

    There is no garbage, and looking for it takes a sixth of the time.
    """
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_enabled:
            gc.enable()
