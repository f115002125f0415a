"""Schemas of the fields that all runs have: seed, folder, processes and tracker."""

from __future__ import annotations

import os
import re
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any, cast

from grpo_ustat.config.command_line import install_line, is_installed
from grpo_ustat.config.schema import ConfigError, check_fields, field, node
from grpo_ustat.config.secrets import find_secret

# Names of trackers, which are also the names of their packages. We have extras for the first three.
TRACKERS = (
    "wandb", "tensorboard", "trackio", "aim", "clearml", "comet_ml", "dvclive", "mlflow", "swanlab",
)  # fmt: skip
EXTRAS = TRACKERS[:3]
# Upper limit of seeds, and of the steps and sizes that are read from a run folder.
MAX_COUNT = 10**12
ON_EXISTING = ("resume", "error", "overwrite")


@dataclass
class ProcessConfig:
    """Processes, which do not affect results."""

    num_processes: int = field(
        "that this command starts on this machine as ranks of torchrun; 1: none, the command "
        "itself is the only process",
        "processes",
        positive=True,
    )


@dataclass
class ReportConfig:
    """Report of a sweep."""

    name: str | None = field(
        "name of the folder, next to the runs, in which a sweep's table and figure are written; "
        "null: no report"
    )
    steps: list[int] | None = field("whose evaluations are shown; null: all evaluations", "steps")


@dataclass
class Shared:
    """Fields of all commands that start runs."""

    launch: ProcessConfig = node(ProcessConfig, "processes, which do not affect results")
    seed: int = field("seed of all random choices in the run", at_least=0, below=MAX_COUNT)
    on_existing: str = field(
        "what to do if this run's folder exists; resume: continue, or show the result if the run "
        "is finished",
        choices=ON_EXISTING,
    )
    output_root: str = field("folder below which outputs are written", default="outputs")
    dry_run: bool = field("print what would run and its estimated cost, and end")
    report: ReportConfig = node(ReportConfig, "the report of a sweep")
    logger: str = field(
        "tracker that displays the metrics of the run, with settings from its own environment "
        "variables",
        choices=("none", *TRACKERS),
        default="none",
    )
    project: str | None = field(
        "project in the tracker to which runs belong; null: the variable WANDB_PROJECT, otherwise "
        "grpo_ustat",
        default=None,
    )

    # These are class attributes, not fields. Commands that use prompts and a model declare fields
    # with these names.
    show_prompts, model = 0, None

    @property
    def only_shows(self) -> bool:
        """True if the command only shows something and starts no run."""
        return self.dry_run or bool(self.show_prompts)

    def check(self) -> None:
        """Refuse a configuration that cannot be run."""
        check_fields(self)
        if self.report.name is not None:
            check_report_name("report.name", self.report.name)
        check_no_secrets(asdict(self))
        if not (self.only_shows or self.logger == "none" or is_installed(self.logger)):
            install = f"pip install {self.logger}"
            if self.logger in EXTRAS:
                install = install_line(self.logger)
            needed = f"logger={self.logger} needs the package {self.logger}"
            raise ConfigError(f"{needed}: {install}, or another logger")


def check_no_secrets(config: Mapping[str, Any], environ: Mapping[str, str] = os.environ) -> None:
    """Refuse a configuration that contains a secret, without showing the secret in the message.

    Configurations are written to run folders and sent to trackers.
    """
    key = find_secret(config, environ)
    if key is not None:
        raise ConfigError(
            f"{key} looks like a key or password, and configurations are written to disk: remove "
            "it and set an environment variable instead, such as HF_TOKEN or WANDB_API_KEY"
        )


def check_report_name(key: str, name: str) -> None:
    """Refuse a report name that is not a valid folder name."""
    if not re.fullmatch(r"[\w.-]+", name) or not name.strip("."):
        raise ConfigError(f"{key}={name!r}: use letters, digits, . _ -")


@dataclass
class ReportEntry:
    """Configuration of `grpo-ustat report`."""

    runs: Any = field(
        "folders of runs or patterns that match such folders, as a single string or a list"
    )
    name: str = field("name of the report's folder")
    output_root: str = field("folder below which outputs are written", default="outputs")
    steps: list[int] | None = field("whose evaluations are shown; null: all evaluations", "steps")

    @property
    def patterns(self) -> list[Any]:
        """`runs` as a list."""
        runs = self.runs
        return cast(list[Any], runs) if isinstance(runs, list) else [runs]

    def check(self) -> None:
        """Refuse a value that is neither a folder nor a list of folders."""
        if not self.patterns or not all(x and isinstance(x, str) for x in self.patterns):
            raise ConfigError(f"runs={self.runs}: name folders, such as runs=outputs/train")
        check_report_name("name", self.name)
