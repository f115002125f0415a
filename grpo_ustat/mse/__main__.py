"""`grpo-ustat mse`: a gradient-MSE study."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from grpo_ustat.cli.app import main as run_command
from grpo_ustat.config.mse import MseConfig
from grpo_ustat.launch.command import Command, Run

if TYPE_CHECKING:
    from grpo_ustat.runs.status import PlannedRun


def load_run() -> Run:
    """Return the function that executes a run; it is imported here to defer the import of torch."""
    from grpo_ustat.mse.study import run

    return run


def show_costs(points: Sequence[PlannedRun]) -> None:
    """Print the costs of planned runs."""
    from grpo_ustat.costs import table
    from grpo_ustat.mse.plan import plan

    table.show_costs([plan(point) for point in points])


def preload(config: MseConfig) -> Sequence[str]:
    """Return the modules that a study's local workers import."""
    samples = config.sampling_workers > 1 and not config.imports_pool
    return ["grpo_ustat.mse.pool"] if samples else []


COMMAND = Command("mse", load_run, show_costs, "study", preload)


def main() -> None:
    """Run the console script."""
    run_command(COMMAND)


if __name__ == "__main__":
    main()
