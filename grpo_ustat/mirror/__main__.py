"""Send run folders to a tracker: `python -m grpo_ustat.mirror FOLDER ... logger=wandb`.

For runs that a tracker was not told of, or not all: it goes on from what was sent before.
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import NoReturn

from omegaconf import OmegaConf
from omegaconf.errors import OmegaConfBaseException

from grpo_ustat.checks import ConfigError, check_logger
from grpo_ustat.composing import CONF
from grpo_ustat.run_config import LoggerConfig
from grpo_ustat.runs import history
from grpo_ustat.runs.journal import InUse
from grpo_ustat.runs.mirror import End, Task, describe, end_now, follow

HELP = """Send run folders, finished or not, to a tracker; what it has already is not sent again.

  python -m grpo_ustat.mirror outputs/train/*/seed=* logger=wandb
  python -m grpo_ustat.mirror FOLDER logger=tensorboard
  python -m grpo_ustat.mirror FOLDER logger=wandb logger.project=NAME

logger: wandb, tensorboard or trackio; logger.project: as in training. WANDB_MODE=offline and the
tracker's other environment variables count."""


def main() -> NoReturn:
    """Send the folders of the command line; exit code 1 if a tracker failed, 2 if it is wrong."""
    words = sys.argv[1:]
    if not words or {"-h", "--help"} & set(words):
        print(HELP)
        raise SystemExit(0 if words else 2)
    try:
        logger = _logger([word for word in words if word.startswith("logger")])
        folders = [Path(word) for word in words if not word.startswith("logger")]
        _check(folders)
    except (ConfigError, OmegaConfBaseException) as error:
        print(f"error: {' '.join(str(error).split())}", file=sys.stderr)
        raise SystemExit(2) from None
    failed = [folder for folder in folders if not _sent(folder, logger)]
    end_now(int(bool(failed)))  # some trackers hang at exit


def _logger(given: list[str]) -> LoggerConfig:
    names = [word.partition("=")[2] for word in given if word.startswith("logger=")]
    if len(names) != 1 or names == ["none"]:
        raise ConfigError("name one tracker: logger=wandb, logger=tensorboard or logger=trackio")
    file = CONF / "logger" / f"{names[0]}.yaml"
    values = OmegaConf.load(file) if file.is_file() else {"name": names[0], "finish_seconds": 0}
    rest = OmegaConf.from_dotlist([word for word in given if word.startswith("logger.")])
    merged = OmegaConf.merge(OmegaConf.structured(LoggerConfig), values, rest.get("logger", {}))
    logger = OmegaConf.to_object(merged)
    check_logger(logger)
    return logger


def _check(folders: list[Path]) -> None:
    if not folders:
        raise ConfigError("name a run folder, such as outputs/train/NAME/seed=0")
    for folder in folders:
        if not (folder / ".hydra" / "config.yaml").is_file():
            raise ConfigError(f"{folder} is no run folder: it has no .hydra/config.yaml")


def _sent(folder: Path, logger: LoggerConfig) -> bool:
    """Whether all of a folder's items have been sent; says where they are."""
    ends = [row["outcome"] for row in history.launches(folder) if "outcome" in row]
    outcome = "done" if (folder / "result.json").is_file() else (ends or ["interrupted"])[-1]
    told = {"name": logger.name, "project": logger.project}
    task = Task(str(folder), told, outcome=outcome)
    try:
        count, refused = follow(task, End(task), print)
    except (Exception, SystemExit) as error:
        reason = str(error) if isinstance(error, InUse) else describe(error)
        print(f"error: {folder}: {' '.join(reason.split())}", file=sys.stderr)
        return False
    print(f"{folder}: {count} items" + (f", {refused} were refused" if refused else ""))
    return not refused


if __name__ == "__main__":
    main()
