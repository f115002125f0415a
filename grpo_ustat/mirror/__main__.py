"""Send run folders to a tracker: `grpo-ustat mirror FOLDER ... logger=wandb`.

For runs that a tracker has not got, or not all of them: it goes on from what was sent before.
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import NoReturn

from omegaconf import OmegaConf
from omegaconf.errors import OmegaConfBaseException

from grpo_ustat.config.command_line import command_line
from grpo_ustat.config.folders import CONF
from grpo_ustat.config.run import TRACKERS, LoggerConfig
from grpo_ustat.config.schema import ConfigError, check_choice
from grpo_ustat.mirror.follow import End, MirrorJob, describe, end_now, follow
from grpo_ustat.mirror.journal import InUse
from grpo_ustat.mirror.source import Damaged
from grpo_ustat.runs import history
from grpo_ustat.runs.record import CONFIG, RESULT
from grpo_ustat.terminal.console import tell
from grpo_ustat.terminal.streams import single_line

HELP = """Send run folders, finished or not, to a tracker; what it has already is not sent again.

  {0} outputs/train/*/seed=* logger=wandb
  {0} FOLDER logger=tensorboard
  {0} FOLDER logger=wandb logger.project=NAME

logger: wandb, tensorboard or trackio; logger.project: as in training. WANDB_MODE=offline and the
tracker's other environment variables count."""


def main() -> NoReturn:
    """Send the folders of the command line; exit code 1 if a tracker failed, 2 if it is wrong."""
    words = sys.argv[1:]
    if not words or {"-h", "--help"} & set(words):
        tell(HELP.format(command_line("mirror")))
        raise SystemExit(0 if words else 2)
    try:
        logger = parse_logger([word for word in words if word.startswith("logger")])
        folders = [Path(word) for word in words if not word.startswith("logger")]
        if not folders:
            raise ConfigError("name a run folder, such as outputs/train/NAME/seed=0")
        for folder in folders:
            if not (folder / CONFIG).is_file():
                raise ConfigError(f"{folder} is no run folder: it has no {CONFIG}")
    except (ConfigError, OmegaConfBaseException) as error:
        tell(f"error: {single_line(error)}", file=sys.stderr)
        raise SystemExit(2) from None
    failures = [folder for folder in folders if not send_folder(folder, logger)]
    end_now(int(bool(failures)))  # some trackers hang at exit


def parse_logger(words: list[str]) -> LoggerConfig:
    """The logger's configuration of `logger=NAME` and `logger.KEY=VALUE`.

    Raises:
        ConfigError: no tracker is named, or the values do not fit.
    """
    names = [word.partition("=")[2] for word in words if word.startswith("logger=")]
    if len(names) != 1 or names == ["none"]:
        raise ConfigError("name one tracker: logger=wandb, logger=tensorboard or logger=trackio")
    check_choice("logger", names[0], TRACKERS)
    file = CONF / "logger" / f"{names[0]}.yaml"
    values = OmegaConf.load(file) if file.is_file() else {"name": names[0], "finish_seconds": 0}
    rest = OmegaConf.from_dotlist([word for word in words if word.startswith("logger.")])
    merged = OmegaConf.merge(OmegaConf.structured(LoggerConfig), values, rest.get("logger", {}))
    logger = OmegaConf.to_object(merged)
    assert isinstance(logger, LoggerConfig)
    logger.check()
    return logger


def send_folder(folder: Path, logger: LoggerConfig) -> bool:
    """Send all of a folder's events and print where they are; whether the tracker took them all."""
    outcomes = [row["outcome"] for row in history.launches(folder) if "outcome" in row]
    outcome = "done" if (folder / RESULT).is_file() else (outcomes or ["interrupted"])[-1]
    names = {"name": logger.name, "project": logger.project}
    job = MirrorJob(str(folder), names, outcome=outcome)
    try:
        count, refused = follow(job, End(job), print)
    except (Exception, SystemExit) as error:
        reason = str(error) if isinstance(error, InUse | Damaged) else describe(error)
        tell(f"error: {folder}: {' '.join(reason.split())}", file=sys.stderr)
        return False
    tell(f"{folder}: {count} items" + (f", {refused} were refused" if refused else ""))
    return not refused


if __name__ == "__main__":
    main()
