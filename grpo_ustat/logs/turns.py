"""Recognition of rows that are turns of one rollout, and not independent samples for a question.

The log of an agent may have one row per turn, each with the reward of the whole rollout. Such rows
must count as one rollout. (The score of a rollout, the gradient of its log-probability, is the sum
of the scores of its turns.) Two columns show them: one has the same id in all rows of a rollout,
such as `rollout_id` or `trajectory_id`, and one numbers the turns, such as `turn`.
"""

from __future__ import annotations

import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from grpo_ustat.config.schema import ConfigError

# Names of columns that identify a rollout.
ROLLOUT_NAME = re.compile(
    r"(traj|trajector(y|ies)|episodes?|rollouts?)_?(id|ids|uid|uuid|key)|traj_uid"
)
# Names of columns that number the turns of a rollout. A name such as `turns` may contain the number
# of turns in a rollout, and `step_id` may count training steps.
TURN_NAME = re.compile(
    r"(turn|round|(env|episode|traj|trajectory|rollout|agent)_step)(_?(id|idx|index|no|number))?"
    r"|step_in_(episode|trajectory|rollout)|(is_)?last_(step|turn)"
)
ADVANTAGE_NAME = re.compile(r"advantages?|baselines?")
# Two advantages count as equal if their relative difference is at most this value.
ADVANTAGE_ROUNDING = 1e-5
ID_NAME = re.compile(
    r"(.*_)?(id|ids|idx|index|uid|uuid)|(n|num)_(turns|steps|rounds)|turns|rounds"
    r"|(traj|trajectory|episode|rollout)(_?(no|num|number|key))?"
)


def is_id(name: str) -> bool:
    """Return True if a column's name marks it as an id or a turn number and not as a reward.

    >>> [is_id(name) for name in ("trajectory_id", "turn", "sample_idx", "accuracy", "turn_reward")]
    [True, True, True, False, False]
    """
    return any(pattern.fullmatch(name.lower()) for pattern in (ROLLOUT_NAME, TURN_NAME, ID_NAME))


@dataclass(frozen=True)
class Turns:
    """Assignment of rows to rollouts of several turns."""

    # Name of the column that identifies a rollout, for messages.
    column: str
    # Id of each row's rollout; None for a row that is a rollout itself.
    rollouts: Sequence[str | None]
    # Turn number of each row.
    numbers: Sequence[int]

    def rows(self) -> dict[str, list[int]]:
        """Return the row indices of each rollout that has several rows, in the order of turns."""
        return {
            name: sorted(places, key=self.numbers.__getitem__)
            for name, places in _repeated(self.rollouts).items()
        }


def find_turns(place: object, columns: Mapping[str, Sequence[Any]]) -> Turns | None:
    """Identify the rollout of each row if the rows are turns of rollouts; return None if not.

    An error is raised if several rows have the same id of a rollout but no column numbers them, or
    if a column numbers turns but no column identifies their rollouts.

    Args:
        place: source of the rows, for messages.
        columns: values of all rows by column name.
    """
    numbers = {name: columns[name] for name in columns if TURN_NAME.fullmatch(name.lower())}
    named = [name for name in columns if ROLLOUT_NAME.fullmatch(name.lower())]
    for name in named:
        rollouts = [None if x is None or x != x else str(x) for x in columns[name]]
        repeated = _repeated(rollouts)
        if not repeated:
            continue
        for values in numbers.values():
            turns = [_whole_number(value) for value in values]
            if all(
                len({turns[row] for row in rows} - {None}) == len(rows)
                for rows in repeated.values()
            ):
                return Turns(name, rollouts, [turn or 0 for turn in turns])
        example = next(iter(repeated))
        raise ConfigError(
            f"{place}: {len(repeated[example])} rows have {name}={example:.40}, so they are turns "
            "of one rollout, but no column numbers them: add a column turn; or, if every row is a "
            f"rollout, drop the column {name}"
        )
    for column, values in [] if named else numbers.items():
        different = list(dict.fromkeys(repr(value) for value in values if value is not None))
        if len(different) > 1:
            raise ConfigError(
                f"{place}: rows have {column} {different[0]} and {different[1]}, so they are "
                "turns, and each turn would count as a completion: add a column rollout_id with "
                "the same value in all rows of a rollout, or keep the last turn of each rollout "
                f"and drop the column {column}"
            )
    return None


def _repeated(ids: Sequence[str | None]) -> dict[str, list[int]]:
    """Return the row indices of each id that has several rows."""
    rows: dict[str, list[int]] = {}
    for row, value in enumerate(ids):
        if value is not None:
            rows.setdefault(value, []).append(row)
    return {value: places for value, places in rows.items() if len(places) > 1}


def _whole_number(value: Any) -> int | None:
    """Return a turn number, or None. With missing values, a table stores numbers as floats."""
    is_number = isinstance(value, int | float) and not isinstance(value, bool)
    return int(value) if is_number and value == value and value == int(value) else None


def one_row_per_rollout(
    place: object, columns: Mapping[str, list[Any]], rewards: Sequence[str]
) -> dict[str, list[Any]]:
    """Reduce a table of rewards to one row per rollout: its first row, with the rollout's rewards.

    Args:
        place: source of the table, for messages.
        columns: values by column name.
        rewards: names of the columns of rewards.
    """
    turns = find_turns(place, columns)
    if turns is None:
        return dict(columns)
    shared = {name: shared_rewards(place, turns, columns[name], columns) for name in rewards}
    later = {row for rows in turns.rows().values() for row in rows[1:]}
    return {
        name: [value for row, value in enumerate(values) if row not in later]
        for name, values in {**columns, **shared}.items()
        if not TURN_NAME.fullmatch(name.lower())
    }


def shared_rewards(
    place: object,
    turns: Turns,
    rewards: Sequence[Any],
    columns: Mapping[str, Sequence[Any]],
    places: Sequence[str] | None = None,
) -> list[Any]:
    """Return, for each row, the reward of its rollout.

    A log may repeat the reward in all rows of a rollout, or have it in only one of them.

    An error is raised if the rows of a rollout have different rewards or different advantages. The
    estimators need one advantage per rollout, which multiplies the scores of all its turns.

    Args:
        place: source of the rows, for messages.
        turns: rollouts of the rows.
        rewards: reward of each row; None or NaN if it is not logged.
        columns: values of all rows by column name.
        places: position of each row, for messages; None to number the rows from 0.
    """
    shared = list(rewards)
    places = places or [f"row {row} (from 0)" for row in range(len(shared))]
    advantages = {
        name: values for name, values in columns.items() if ADVANTAGE_NAME.fullmatch(name.lower())
    }
    for name, rows in turns.rows().items():
        which = f"{place}: rollout {turns.column}={name}"
        for advantage, values in advantages.items():
            if different := differ_by_turn([values[row] for row in rows]):
                low, high = different
                raise ConfigError(
                    f"{which} has {advantage} {low:g} and {high:g} in its rows, but all turns of a "
                    "rollout must share one advantage, because a separate advantage for each turn "
                    "gives another gradient: drop the rollout, or log it with one baseline"
                )
        logged = [row for row in rows if not _is_missing(rewards[row])]
        different = [row for row in logged if rewards[row] != rewards[logged[0]]]
        if different:
            raise ConfigError(
                f"{which} has the rewards {rewards[logged[0]]!r:.20} and "
                f"{rewards[different[0]]!r:.20} in {places[logged[0]]} and {places[different[0]]}, "
                "but all turns of a rollout must share one reward: write the reward of the whole "
                "rollout into each of its rows"
            )
        for row in rows:
            shared[row] = rewards[logged[0]] if logged else rewards[row]
    return shared


def _is_missing(reward: Any) -> bool:
    return reward is None or (isinstance(reward, float) and math.isnan(reward))


def differ_by_turn(values: Sequence[Any]) -> tuple[float, float] | None:
    """Return the smallest and the largest value of the turns, or None if all are equal.

    Args:
        values: value of each turn: a number, a list with a number for each token, or None.
    """
    given = [x for x in map(_single_number, values) if x is not None]
    if not given or max(given) - min(given) <= ADVANTAGE_ROUNDING * max(map(abs, given)):
        return None
    return min(given), max(given)


def _single_number(value: Any) -> float | None:
    """Return an advantage as a number; None if it is a list with several nonzero values.

    The value of a list with one value per token is its only nonzero value, or 0.
    """
    values = value if isinstance(value, list) else [value]
    numbers = {x for x in values if isinstance(x, int | float) and x != 0}
    if not values or any(x is None or isinstance(x, str) for x in values) or len(numbers) > 1:
        return None
    return float(next(iter(numbers), 0.0))
