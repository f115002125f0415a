"""`grpo-ustat report`: what any runs found, together."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from grpo_ustat.cli.app import report
from grpo_ustat.config.run import ReportEntry
from grpo_ustat.runs.status import Entry


def write(config: ReportEntry, folder: Path) -> None:
    """Report the runs that a configuration names; importing here keeps `--help` fast."""
    from grpo_ustat.report.aggregate import report_runs

    report_runs(config.patterns, folder, config.steps)


def report_sweep(entries: Sequence[Entry], folder: Path, steps: Sequence[int] | None) -> None:
    """Report a sweep that has ended, for `grpo_ustat.launch.command.load_sweep_report`."""
    from grpo_ustat.report import aggregate

    aggregate.report_sweep(entries, folder, steps)


def main() -> None:
    """Console entry."""
    report(write)


if __name__ == "__main__":
    main()
