"""A row of any framework's rollouts, its reward, and what becomes of a row that is not as it should
be: it is counted, and the others are read.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from grpo_ustat.config.schema import ConfigError
from grpo_ustat.runs.files import parsed_row
from grpo_ustat.terminal.streams import single_line

EVALUATION = "of an evaluation"
UNLIKE = "its row is not as the framework writes it"  # and the error, in parentheses


class DamagedFile(ConfigError):
    """A file that cannot be read at all, where others may."""


@dataclass
class Rollout:
    """One completion as a framework logged it.

    Attributes:
        path: its file.
        place: in it, for messages.
        group: the framework's name of the group, unique in a run and policy.
        reward: nan where there is none.
        run: of training that it belongs to: a folder, and what else tells runs in it apart.
        step: of training that it was written for; None: not logged.
        sample: the framework's own name of the row in its run; None: it has none.
        batch: what is appended to a file at once, such as a step: where a name comes twice in one,
            a resumed run has written it again. None: files are written anew, or names differ.
        arrived: whether its file holds all that arrived, beside one of what was trained on.
        untrained: why the framework did not train on it; empty: it did.
        fault: why it cannot be used; empty: it can.
        note: what is to be said of it where it is used.
        prompt_ids, completion_ids: token ids, end token included; None: only texts were logged.
        loss_mask: 1 on tokens of the completion that the policy wrote; None: all.
        logprobs: of the completion's tokens, by the sampler; None: not logged.
        ended: whether the policy wrote its end token; None: not logged.
        policy_version: of the weights that wrote it; None: not logged.
        prompt, completion: texts, or lists of messages; None: not logged.
    """

    path: Path
    place: str
    group: str = ""
    reward: float = math.nan
    run: str = ""
    step: str | None = None
    sample: str | None = None
    batch: str | None = None
    arrived: bool = False
    untrained: str = ""
    fault: str = ""
    note: str = ""
    prompt_ids: list[int] | None = None
    completion_ids: list[int] | None = None
    loss_mask: list[int] | None = None
    logprobs: list[float] | None = None
    ended: bool | None = None
    policy_version: str | None = None
    prompt: Any = None
    completion: Any = None


@dataclass(frozen=True)
class Options:
    """What a framework's files do not say.

    Attributes:
        group_size: completions of a prompt, where rows have no group.
        reward: the column or key of rewards where there are several, or several with weights, as in
            `right=1,form=0.5`.
        version: of the policy whose rollouts are kept; None: the last one.
        source: the file or folder that is read; `convert` sets it.
    """

    group_size: int | None = None
    reward: str | None = None
    version: str | None = None
    source: Path | None = None

    def weights(self, names: Iterable[str]) -> dict[str, float]:
        """The weight of each reward that is asked for; a name of `names` is never taken apart.

        Raises:
            ConfigError: a weight is no finite number, a name is empty or comes twice.

        >>> Options(reward="right,form=0.5").weights(["right", "form"])
        {'right': 1.0, 'form': 0.5}
        """
        if self.reward is None or self.reward in names:
            return {} if self.reward is None else {self.reward: 1.0}
        terms = [term.strip().partition("=") for term in self.reward.split(",")]
        fault = ""
        for name, equals, weight in terms:
            if not name.strip():
                fault = fault or f"{name + equals + weight!r} names no reward"
            elif equals and not math.isfinite(_weight(weight)):
                fault = fault or f"{weight!r} is no number that can weigh {name}"
        counts = Counter(name for name, _, _ in terms)
        if twice := [name for name, count in counts.items() if count > 1]:
            fault = fault or f"{twice[0]} is named {counts[twice[0]]} times"
        if fault:
            raise ConfigError(
                f"--reward {self.reward or repr('')}: {fault}: write --reward NAME, or "
                "NAME=WEIGHT,NAME=WEIGHT"
            )
        return {name: _weight(weight) if equals else 1.0 for name, equals, weight in terms}


def _weight(text: str) -> float:
    """A weight as typed; nan where it is no number."""
    try:
        return float(text)
    except ValueError:
        return math.nan


def reward_of(
    values: Mapping[str, Any],
    options: Options,
    usual: Mapping[str, float],
    skips_null: bool = False,
) -> dict[str, Any]:
    """A row's reward: the sum by weight of what `--reward` names, else of `usual`.

    Args:
        values: rewards by name.
        options: of the command line.
        usual: weights by name, where `--reward` is not typed.
        skips_null: whether the framework adds what is there and leaves a null out.

    Returns:
        `reward`, and where it has none or not all `fault` or `note`, as in `Rollout`.
    """
    found = dict(values)
    if options.reward is not None:  # a key of a dictionary too, but for one that is a column itself
        for keys in [one for one in values.values() if isinstance(one, dict)]:
            found |= {key: x for key, x in keys.items() if isinstance(found.get(key, {}), dict)}
    weights = options.weights(found) or usual
    if absent := [name for name in weights if name not in found]:
        names = ", ".join(name for name, x in found.items() if isinstance(x, int | float | None))
        asked = f"--reward {absent[0]}: " if options.reward else f"{absent[0]}: "
        return {"fault": f"{asked}its row has no such reward (numbers are {names or 'nowhere'})"}
    if parts := [one for name in weights if isinstance(one := found[name], dict)]:
        return {"fault": f"its reward is of {', '.join(parts[0])}: name one with --reward"}
    null = [name for name in weights if found[name] is None]
    note = ""
    if skips_null and 0 < len(null) < len(weights):
        weights = {name: weight for name, weight in weights.items() if name not in null}
        note = f"reward {', '.join(null)} is null and counts nothing, as the framework adds them up"
    total = sum(weight * as_float(found[name]) for name, weight in weights.items() if weight)
    return {"reward": total if weights else math.nan, "note": note}


def as_float(value: Any) -> float:
    """A reward as logged; nan where it is none, infinite where no float holds it."""
    try:
        return float(value) if isinstance(value, int | float) else math.nan
    except OverflowError:
        return math.inf


def rows_of(
    path: Path,
    rows: Iterable[tuple[str, Any]],
    build: Callable[[str, Any], Iterable[Rollout]],
) -> Iterator[Rollout]:
    """What `build` makes of each row, with its place; a row that is not as the framework writes it
    becomes a rollout with that fault, so that it is counted and the others are read.
    """
    for where, row in rows:
        place = f"{path} {where}"
        try:
            if row is None:
                raise ValueError("no JSON object, cut off perhaps")
            made = list(build(place, row))
        except (LookupError, TypeError, ValueError, ArithmeticError, AttributeError) as error:
            if isinstance(error, ConfigError):
                raise
            reason = f"{type(error).__name__}: {single_line(error, 80)}"
            made = [Rollout(path, place, run=str(path.parent), fault=f"{UNLIKE} ({reason})")]
        for one in made:
            if found := _unlike(one):
                one.fault = f"{UNLIKE} ({found})"
            yield one


TYPES = {
    "group": str, "step": str | None, "sample": str | None, "ended": bool | None,
    "policy_version": str | None, "reward": float, "prompt_ids": list | None,
    "completion_ids": list | None, "loss_mask": list | None, "logprobs": list | None,
    "prompt": str | list | None, "completion": str | list | None,
}  # fmt: skip


def _unlike(rollout: Rollout) -> str:
    """The first field that is of another type than it must be; empty: none is."""
    for name, kind in TYPES.items():
        if not isinstance(value := getattr(rollout, name), kind):
            return f"{name} is {type(value).__name__} {single_line(value, 40)}"
    return ""


def whole(value: Any, name: str, largest: int) -> int:
    """A length as logged.

    Raises:
        ValueError: it is no whole number from 0 to `largest`.
    """
    if not isinstance(value, int | float) or value not in range(largest + 1):
        raise ValueError(f"{name} is no whole number from 0 to {largest}")
    return int(value)


def lines_of(path: Path) -> Iterator[tuple[str, dict[str, Any] | None]]:
    """Each line that is not blank; None for one that is no JSON object."""
    with path.open(encoding="utf-8-sig", errors="replace") as file:
        for place, line in enumerate(file):
            if line.strip():
                yield f"line {place}", parsed_row(line)


def reward_columns(
    columns: Mapping[str, list[Any]], known: set[str]
) -> tuple[list[str], list[str]]:
    """Columns most of whose values are numbers, nulls aside, and those of nulls alone or without a
    value; beside those that are known.
    """
    own = {
        name: [one for one in values if one is not None]
        for name, values in columns.items() if name not in known
    }  # fmt: skip
    numbers = {name: sum(isinstance(one, int | float) for one in x) for name, x in own.items()}
    names = [name for name, values in own.items() if 2 * numbers[name] > len(values)]
    return names, [name for name, values in own.items() if not values]


def usual_reward(
    place: object, names: list[str], nulls: list[str], options: Options
) -> dict[str, float]:
    """The only column of rewards; none where `--reward` is typed, or all rewards are null.

    Raises:
        ConfigError: there are several, and `--reward` is not typed.
        ValueError: no column is of rewards.
    """
    if options.reward is not None or (nulls and not names):
        return {}
    if not names:
        raise ValueError("no column of numbers, as rewards are")
    if len(names) > 1:
        raise ConfigError(
            f"{place} has columns of numbers {', '.join(names)}: say which one holds the rewards "
            "with --reward COLUMN, or add them up with --reward "
            f"{','.join(f'{name}=1' for name in names)} (their weights are not logged)"
        )
    return {names[0]: 1.0}
