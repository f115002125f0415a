"""Typed schemas of what every run has: a seed, a folder, processes, a tracker."""

from __future__ import annotations

import re
from dataclasses import asdict, dataclass

from grpo_ustat.checks import TRACKERS, ConfigError, check_logger, one_of, positive
from grpo_ustat.meanings import key, part
from grpo_ustat.secrecy import check_no_secrets

ON_EXISTING = ("resume", "error", "overwrite")


@dataclass
class ProcessConfig:
    """Processes; none of it changes results."""

    num_processes: int = key(
        "that this command starts on this machine as ranks, by torchrun; 1: none, it is the run",
        "processes",
    )
    grace_seconds: int = key(
        "that ranks have to save after a signal, before they are killed", "seconds"
    )


@dataclass
class LoggerConfig:
    """A tracker that mirrors the run folder, from a process of its own.

    Keys and addresses come from the tracker's own environment variables.
    """

    name: str = key("of the tracker; choose by logger=NAME", choices=("none", *TRACKERS))
    project: str | None = key("of the runs there; null: the tracker knows none")
    finish_seconds: float = key("that a run which ends waits for its tracker at most", "seconds")


@dataclass
class ReportConfig:
    """What a sweep leaves beside its runs."""

    name: str | None = key("of the folder of its table and figure; null: none")
    steps: list[int] | None = key("at which accuracy is drawn; null: at every evaluation", "steps")


@dataclass
class Shared:
    """Fields of every entrypoint that runs something."""

    launch: ProcessConfig = part(ProcessConfig, "processes; none of it changes results")
    seed: int = key("what every random choice of the run depends on")
    on_existing: str = key(
        "what to do with a folder that this run has already; resume: go on, or show the result",
        choices=ON_EXISTING,
    )
    dry_run: bool = key("print what would run and what it costs, and end")
    report: ReportConfig = part(ReportConfig, "what a sweep leaves beside its runs")
    logger: LoggerConfig = part(LoggerConfig, "a tracker that mirrors the run folder")

    show_prompts, model = 0, None  # no fields here: of entries that have prompts and a model

    @property
    def only_shows(self) -> bool:
        """Whether nothing is to be run."""
        return self.dry_run or bool(self.show_prompts)

    def check(self) -> None:
        """Refuse what cannot be run.

        Raises:
            ConfigError: naming the values and the fix.
        """
        positive(self.launch, "num_processes", "grace_seconds", prefix="launch.")
        one_of("on_existing", self.on_existing, ON_EXISTING)
        if self.report.name is not None:
            check_report_name("report.name", self.report.name)
        check_no_secrets(asdict(self))
        check_logger(self.logger, needed=not self.only_shows)


def check_report_name(key: str, name: str) -> None:
    """The name is one of a folder."""
    if not re.fullmatch(r"[\w.-]+", name) or not name.strip("."):
        raise ConfigError(f"{key}={name!r}: use letters, digits, . _ -")
