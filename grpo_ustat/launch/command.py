"""What a command hands to the machinery below it: one object, so that nothing asks which it is."""

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
    """`grpo-ustat NAME`, which composes `conf/NAME.yaml` and makes runs, or a report of them.

    Attributes:
        name: of the command, its schema in `SCHEMAS`, its main file in `conf/` and its room.
        load_run: imports what it needs and gives the function that makes one run, from a checked
            configuration and its `RunFolder` to the number that a sweep shows; of a command that
            makes no runs, from a configuration and a folder to None.
        show_costs: prints what planned runs would cost; None of a command that makes none.
        split: the questions that `show_prompts` shows; None where a run asks no questions.
        preload: names the modules that a run's local workers import, none where it starts none.
    """

    name: str
    load_run: Callable[[], Run]
    show_costs: Callable[[Sequence[Any]], None] | None = None
    split: str | None = None
    preload: Callable[[Any], Sequence[str]] = lambda _: ()


def load_command(name: str) -> Command:
    """The command of this name; ranks and jobs, which are started with the name alone, call it."""
    return importlib.import_module(f"grpo_ustat.{name}.__main__").COMMAND


def load_sweep_report() -> Callable[[Sequence[Any], Path, Sequence[int] | None], None]:
    """The function that reports a sweep: from its entries into a folder, at steps of training."""
    return importlib.import_module("grpo_ustat.report.aggregate").report_sweep


@contextmanager
def without_garbage_collection() -> Iterator[None]:
    """Switch off garbage collection while modules are imported: there is no garbage, and looking
    for it takes a sixth of the time.
    """
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_enabled:
            gc.enable()
