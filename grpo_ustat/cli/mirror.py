"""Send run folders to a tracker, once: `grpo-ustat mirror FOLDER ... logger=wandb`.

For runs that a tracker has not got, or not all of them: it goes on from what was sent before.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from dataclasses import fields
from pathlib import Path
from typing import NoReturn

from omegaconf import OmegaConf
from omegaconf.errors import OmegaConfBaseException

from grpo_ustat.cli.verbs import VERBS
from grpo_ustat.config.command_line import command_line
from grpo_ustat.config.folders import CONF
from grpo_ustat.config.run import TRACKERS, LoggerConfig
from grpo_ustat.config.schema import ConfigError, check_choice, did_you_mean
from grpo_ustat.distributed.lock import peek
from grpo_ustat.runs import contents, history
from grpo_ustat.runs.record import CONFIG, RESULT, run_around
from grpo_ustat.runs.trackers import Sender, describe, forget_service, leave_alone, noted_exit_hooks
from grpo_ustat.terminal.console import tell
from grpo_ustat.terminal.streams import single_line

HELP = """Send run folders, finished or not, to a tracker; what it was given already is left out.

  {0} outputs/train/*/seed-* logger=wandb
  {0} FOLDER logger=tensorboard
  {0} FOLDER logger=wandb logger.project=NAME

logger: wandb, tensorboard or trackio; logger.project: as in training. WANDB_MODE=offline and the
tracker's other environment variables count. To send all of a run again, as a new run there, remove
FOLDER/tracker."""


def main() -> NoReturn:
    """Send the folders of the command line; exit code 1 if a tracker failed, 2 if it is wrong."""
    words = sys.argv[1:]
    if {"-h", "--help"} & set(words):
        tell(HELP.format(command_line("mirror")))
        raise SystemExit(0)
    try:
        _check_words(words)
        logger = parse_logger([word for word in words if word.startswith("logger")])
        folders = [Path(word) for word in words if not word.startswith("logger")]
        if not folders:
            raise ConfigError("name a run folder, such as outputs/train/NAME/seed-0")
        for folder in folders:
            if not (folder / CONFIG).is_file():
                run = run_around(folder)
                fix = "" if run is None else f"; name the run that it is in, {run}"
                raise ConfigError(f"{folder} is no run folder: it has no {CONFIG}{fix}")
    except (ConfigError, OmegaConfBaseException) as error:
        tell(f"error: {single_line(error)}", file=sys.stderr)
        raise SystemExit(2) from None
    failures = [folder for folder in folders if not send_folder(folder, logger)]
    raise SystemExit(int(bool(failures)))


def _check_words(words: list[str]) -> None:
    """Refuse a command line without words, and a word that is neither a path nor a known field.

    Raises:
        ConfigError: with what to type.
    """
    if not words:
        example = command_line("mirror", *VERBS["mirror"].example)
        raise ConfigError(f"run folder and logger=NAME are missing, as in {example}")
    names = ["logger", *(f"logger.{one.name}" for one in fields(LoggerConfig))]
    for word in words:
        key, equals, _ = word.partition("=")
        is_path = "/" in key or Path(word).exists()
        if (equals or word.startswith("-")) and key not in names and not is_path:
            hint = did_you_mean(key, names)
            raise ConfigError(f"unknown {word}: {hint}choose from {', '.join(names)}")


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
    """Send what a folder holds and the tracker does not have yet, and print the run's address
    there; True if the tracker accepted everything.
    """
    config, _ = contents.checked(folder, CONFIG, contents.parsed_yaml, contents.CONFIGURATION)
    own = (config or {}).get("logger")
    if peek(folder) and isinstance(own, dict) and own.get("name") == logger.name:
        line = f"error: {folder}: the run at work there sends to {logger.name} itself: wait for it"
        tell(line, file=sys.stderr)
        return False
    outcomes = [row["outcome"] for row in history.launches(folder) if "outcome" in row]
    outcome = "done" if (folder / RESULT).is_file() else (outcomes or ["interrupted"])[-1]
    exit_hooks: list[Callable[..., object]] = []
    try:
        with noted_exit_hooks(exit_hooks):
            sender = Sender(folder, logger.name, logger.project)
            before = sender.count
            sender.send_folder()
            where = sender.close(outcome)
    except BaseException as error:
        leave_alone(exit_hooks)
        forget_service(logger.name)
        if isinstance(error, KeyboardInterrupt):
            raise
        tell(f"error: {folder}: {describe(error)}", file=sys.stderr)
        return False
    if where is not None:
        tell(f"logger={logger.name}: {where}")
    tell(f"{folder}: {sender.count - before} items were sent")
    return True


if __name__ == "__main__":
    main()
