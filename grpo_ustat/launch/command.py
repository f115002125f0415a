"""Descriptions of commands; `launch` handles all commands in the same way."""

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
    """Command `grpo-ustat NAME`, which composes `conf/NAME.yaml` and makes runs or a report."""

    # Name of the command. Its schema in `SCHEMAS`, its main file in `conf/` and its subpackage have
    # the same name.
    name: str
    # Function that imports the command's dependencies and returns the function that makes one run.
    # The returned function takes a checked configuration and its `RunFolder`. It returns the number
    # that a sweep shows for the run. If the command makes no runs, the returned function takes a
    # configuration and a folder and returns None.
    load_run: Callable[[], Run]
    # Function that prints the costs of planned runs; None for a command without costs.
    show_costs: Callable[[Sequence[Any]], None] | None = None
    # Data split from which `show_prompts` takes questions; None if a run has no questions.
    split: str | None = None
    # Function that returns the names of the modules that a run's local workers import; empty if the
    # run starts no workers.
    preload: Callable[[Any], Sequence[str]] = lambda _: ()


def load_command(name: str) -> Command:
    """Return the command with this name; ranks and jobs receive only the name."""
    return importlib.import_module(f"grpo_ustat.{name}.__main__").COMMAND


def load_sweep_report() -> Callable[[Sequence[Any], Path, Sequence[int] | None], None]:
    """Return the function that writes a report on the runs of a sweep to a folder."""
    return importlib.import_module("grpo_ustat.report.aggregate").report_sweep


@contextmanager
def without_garbage_collection() -> Iterator[None]:
    """Disable garbage collection while modules are imported and configurations are composed.

    Imports and composition create no garbage, but the collector would take a sixth of their time.
    """
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_enabled:
            gc.enable()
