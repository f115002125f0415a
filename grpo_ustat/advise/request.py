"""Command line of `advise`: paths and options."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from grpo_ustat.config.command_line import command_line
from grpo_ustat.config.schema import ConfigError, did_you_mean

OPTION_NAMES = (
    "num_generations", "rollouts", "reward", "cluster", "model", "objective", "output_root",
)  # fmt: skip
# Start of an address of a run of W&B, which is not a path.
ONLINE = "wandb://"


@dataclass(frozen=True)
class Request:
    """Parsed command line of `advise`."""

    # Run folder, pool folder, log of rollouts or scalars, file of rewards, or folder of logs.
    source: Path
    # Group size to assess; None for the group size of the run.
    num_generations: int | None = None
    # Number of rollouts per step, n; None for the n of the run, or of the run that wrote the log.
    rollouts: int | None = None
    # Column of a log that contains the rewards.
    reward: str | None = None
    # Checkpoint or model name that scores the rollouts of a log.
    model: str | None = None
    # Overrides for the loss to assess: preset, fields and baseline.
    objective: Sequence[str] = ()
    # Further overrides for `mse`.
    overrides: Sequence[str] = ()
    # Root folder for a study that this command starts.
    output_root: str = "outputs"
    # Column whose values mark correlated prompts.
    cluster: str | None = None
    # Further sources, which are compared with the first.
    others: Sequence[Path] = ()

    @property
    def address(self) -> str:
        """The source as it was typed; a path would lose a slash of wandb://."""
        return address_of(self.source)


def address_of(source: Path) -> str:
    """Return a source as the user typed it.

    >>> address_of(Path("wandb://entity/project/run")), address_of(Path("a/b"))
    ('wandb://entity/project/run', 'a/b')
    """
    text = str(source)
    short = ONLINE.replace("//", "/")
    return text.replace(short, ONLINE, 1) if text.startswith(short) else text


def parse_request(words: Sequence[str]) -> Request:
    """Parse the words of the command line.

    The words are sources and options: `num_generations=`, `rollouts=`, `reward=`, `cluster=`,
    `model=`, `output_root=`, and `objective=` and `baseline=` with their fields. If `model=` is
    given, overrides of `mse` are also allowed.
    """
    values: dict[str, Any] = {}
    sources, overrides, objective = [], [], []
    for word in words:
        key, equals, value = word.partition("=")
        if Path(word).exists() or not equals or word.startswith(ONLINE):
            sources.append(word)
        elif key in ("num_generations", "rollouts", "group_size", "budget.rollouts"):
            name = {"group_size": "num_generations", "budget.rollouts": "rollouts"}.get(key, key)
            if not value.isdecimal() or int(value) < 2:
                raise ConfigError(
                    f"{word}: the value must be a whole number of at least 2, e.g. {key}=8"
                )
            values[name] = int(value)
        elif key in ("objective", "baseline") or key.startswith(("objective.", "baseline.")):
            objective.append(word)
        elif key in OPTION_NAMES:
            values[key] = value
        elif key.startswith(("model.", "study.", "prompt", "budget.", "launch.")):
            overrides.append(word)
        elif "/" in word:
            # A path may contain "=" and may not exist.
            sources.append(word)
        else:
            hint = did_you_mean(key, OPTION_NAMES)
            raise ConfigError(f"unknown {word}: {hint}choose from {', '.join(OPTION_NAMES)}")
    if not sources:
        raise ConfigError(
            "no source: name a run folder, a pool or a log, e.g. "
            f"{command_line('advise', 'outputs/mse/NAME/seed-0')}"
        )
    if repeated := next((x for x in sources if sources.count(x) > 1), None):
        raise ConfigError(f"{repeated} is named twice: name each run once")
    if overrides and "model" not in values:
        raise ConfigError(f"{overrides[0]} applies only to scoring a log: add model=CHECKPOINT")
    if "model" in values and len(sources) > 1:
        raise ConfigError(
            f"model={values['model']} scores one log, but {len(sources)} are named: name one"
        )
    source, *others = map(Path, sources)
    return Request(source, **values, objective=objective, overrides=overrides, others=others)
