"""Description of a command, such as `train`, in the form in which `launch` starts it."""

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
    # Function that imports the command's dependencies and returns a second function, which makes
    # one run. The second function takes a checked configuration and its `RunFolder`, and returns
    # the number that a sweep shows for the run. For a command without runs, it takes a
    # configuration and a folder and returns None.
    load_run: Callable[[], Run]
    # Function that prints the costs of planned runs; None for a command without costs.
    show_costs: Callable[[Sequence[Any]], None] | None = None
    # Split of the data set (train, test or study) from which `show_prompts` takes questions. None
    # if a run has no questions.
    split: str | None = None
    # Function that takes a configuration and returns the names of the modules that the run's local
    # workers import. It returns no names if the run starts no workers.
    preload: Callable[[Any], Sequence[str]] = lambda _: ()


def load_command(name: str) -> Command:
    """Return the command with this name.

    Ranks and SLURM jobs call this function, because they receive only the name of the command.
    """
    return importlib.import_module(f"grpo_ustat.{name}.__main__").COMMAND


def load_sweep_report() -> Callable[[Sequence[Any], Path, Sequence[int] | None], None]:
    """Import and return the function that writes the report on the runs of a sweep."""
    return importlib.import_module("grpo_ustat.report.aggregate").report_sweep


@contextmanager
def without_garbage_collection() -> Iterator[None]:
    """Disable garbage collection in the block.

    It saves time while modules are imported and configurations are composed: these create no
    garbage, but the collector would take a sixth of their time.
    """
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_enabled:
            gc.enable()
