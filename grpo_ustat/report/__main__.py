"""`grpo-ustat report`: a joint report on any set of runs."""

from __future__ import annotations

from grpo_ustat.cli.app import main as run_command
from grpo_ustat.launch.command import Command, Run


def load_run() -> Run:
    """Return the function that writes a report on the configured runs to a folder."""
    from grpo_ustat.report.aggregate import report_runs

    return lambda config, folder: report_runs(config.patterns, folder, config.steps)


COMMAND = Command("report", load_run)


def main() -> None:
    """Run the console script."""
    run_command(COMMAND)


if __name__ == "__main__":
    main()
