"""Command `grpo-ustat gap`, which tests the paper's theorems."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from grpo_ustat.cli.app import main as run_command
from grpo_ustat.launch.command import Command, Run

if TYPE_CHECKING:
    from grpo_ustat.runs.status import PlannedRun


def load_run() -> Run:
    """Import torch and return the function that executes a run."""
    from grpo_ustat.gap.run import run

    return run


def show_costs(points: Sequence[PlannedRun]) -> None:
    """Print the number of completions of planned runs."""
    from grpo_ustat.gap.run import show_plan

    show_plan(points)


COMMAND = Command("gap", load_run, show_costs)


def main() -> None:
    """Run the command."""
    run_command(COMMAND)


if __name__ == "__main__":
    main()
