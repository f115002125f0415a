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
# Beginning of the address of a Weights & Biases run. Such an address is not a path.
ONLINE = "wandb://"


@dataclass(frozen=True)
class Request:
    """Parsed command line of `advise`."""

    # Path to read: a run folder, a pool folder (stored completions of `mse`), a log of rollouts or
    # scalars, a file of rewards, or a folder of logs.
    source: Path
    # Group size to assess; None for the group size of the run.
    num_generations: int | None = None
    # Number of rollouts per step, n; None for the n of the run, or of the run that wrote the log.
    rollouts: int | None = None
    # Column of a log that contains the rewards.
    reward: str | None = None
    # Checkpoint or model name with which the gradients of a log's rollouts are computed.
    model: str | None = None
    # Configuration overrides of the loss to assess: its preset, its fields and its baseline.
    objective: Sequence[str] = ()
    # Other configuration overrides of the `mse` study that this command starts.
    overrides: Sequence[str] = ()
    # Root folder for a study that this command starts.
    output_root: str = "outputs"
    # Column that marks correlated prompts: prompts with equal values in it are correlated.
    cluster: str | None = None
    # Paths of further runs, which are compared with the first.
    others: Sequence[Path] = ()

    @property
    def address(self) -> str:
        """The source as it was typed; as a `Path`, wandb:// would have only one slash."""
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

    A word is a source or an option. The options are those of `OPTION_NAMES`, `baseline=`, and
    fields such as `objective.epsilon=`. If `model=` is given, configuration overrides of `mse` are
    also allowed.
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
            # This is a path with "=" in it. If it does not exist, a later error says so.
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
        raise ConfigError(
            f"{overrides[0]} has an effect only if a model computes the gradients of a log: add "
            "model=CHECKPOINT"
        )
    if "model" in values and len(sources) > 1:
        raise ConfigError(
            f"model={values['model']} can compute the gradients of only one log, but "
            f"{len(sources)} logs are named: name one"
        )
    source, *others = map(Path, sources)
    return Request(source, **values, objective=objective, overrides=overrides, others=others)
