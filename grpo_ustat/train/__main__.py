"""Command `grpo-ustat train`, GRPO fine-tuning."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from grpo_ustat.cli.app import main as run_command
from grpo_ustat.launch.command import Command, Run

if TYPE_CHECKING:
    from grpo_ustat.runs.status import PlannedRun


def load_run() -> Run:
    """Return the function that executes one run; it is imported late because it needs torch."""
    from grpo_ustat.train.trainer import fit

    return fit


def show_costs(planned_runs: Sequence[PlannedRun]) -> None:
    """Print the estimated costs of planned runs."""
    from grpo_ustat.costs import table
    from grpo_ustat.train.plan import plan

    table.show_costs([plan(planned) for planned in planned_runs])


COMMAND = Command("train", load_run, show_costs, "train")


def main() -> None:
    """Run the command."""
    run_command(COMMAND)


if __name__ == "__main__":
    main()
