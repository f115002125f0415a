"""Refuse rows that are turns of one rollout rather than independent samples for a question.

An agent's log may have one row per turn, each with the reward of the whole rollout. The prompt of a
later turn contains the earlier turns, so each row would count as a separate question. The content
of the rows reveals this. In a usable log a prompt has several completions, so the prompt occurs in
several rows with the same id or with different ids. The turns of one rollout have different
prompts. Each of these prompts extends the previous prompt or occurs under only one id.
"""

from __future__ import annotations

import json
import re
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from grpo_ustat.config.schema import ConfigError

# Names of rollout-id columns in verl-agent, rLLM, SkyRL, AReaL and ROLL.
ROLLOUT_NAME = re.compile(
    r"(traj|trajector(y|ies)|episodes?|rollouts?|sessions?|conversations?|dialogs?|dialogues?|"
    r"interactions?|requests?|eids?|uids?)(_?(id|ids|uid|uuid|idx|index|key|no|num|number))?"
)
TURN_NAME = re.compile(
    r"(turn|round|(env|episode|traj|trajectory|rollout|agent)_step)s?(_?(id|idx|index|no|num|number))?"
    r"|step_(id|idx|index|no|num|number|in_(episode|trajectory|rollout))|(is_)?last_(step|turn)"
)
# Names of columns that number the turns of a rollout. Plural names such as `turns` are excluded,
# because such a column may contain the number of turns in a rollout. `step_id` is excluded because
# it may count training steps.
SINGLE_TURN_NAME = re.compile(r"(?!.*s$|step_(?!in_))" + f"(?:{TURN_NAME.pattern})")
# Names of index columns; an index may restart from 0 in each group.
INDEX_NAME = re.compile(r".*(idx|index|no|num|number)")
ID_NAME = re.compile(r"(.*_)?(id|idx|index|uid|uuid)|(n|num)_(turns|steps|rounds)")
# Fields that never contain ids of rollouts.
CONTENT = frozenset(
    {"prompt", "prompt_id", "prompt_ids", "completion", "completion_ids", "reward", "step"}
    | {"input", "output", "gts", "question", "answer", "text", "content"}
)


def is_id(name: str) -> bool:
    """Return True if a column's name marks it as an id or a turn number and not as a reward.

    >>> [is_id(name) for name in ("trajectory_id", "turn", "sample_idx", "accuracy", "turn_reward")]
    [True, True, True, False, False]
    """
    return any(pattern.fullmatch(name.lower()) for pattern in (ROLLOUT_NAME, TURN_NAME, ID_NAME))


def check_rollouts(
    place: object, prompts: Sequence[Any] | None, columns: Mapping[str, Sequence[Any]]
) -> None:
    """Raise an error if the rows are turns of one rollout.

    Args:
        place: source of the rows, for messages.
        prompts: prompt of each row as text, token ids or messages; None: not logged.
        columns: values of all rows by column name; only texts and whole numbers are used.
    """
    ids = {
        name: [x if isinstance(x, str | int) and not isinstance(x, bool) else None for x in values]
        for name, values in columns.items()
        if name not in CONTENT
    }
    keys = None if prompts is None else _comparable(prompts)
    evidence = _evidence_of_ids(ids, keys) or _evidence_of_numbers(ids, keys)
    if evidence:
        raise ConfigError(
            f"{place}: the rows are turns of one rollout ({evidence}), and each would count as a "
            "separate question: write one row per rollout, with all turns in completion_ids "
            "(loss_mask 0 on tokens that the policy did not write) and the final reward"
        )


def check_turn_numbers(
    place: object, name: str, groups: Sequence[object], columns: Mapping[str, Sequence[object]]
) -> None:
    """Raise an error if rows of a group have different turn numbers.

    Some logs contain only rewards, or repeat the question as the prompt of every turn. In these
    logs only the turn number distinguishes turns from rollouts.

    Args:
        place: source of the rows, for messages.
        name: name of the column that identifies the group.
        groups: group of each row.
        columns: values of all rows by column name.
    """
    for column, values in columns.items():
        if not SINGLE_TURN_NAME.fullmatch(column.lower()):
            continue
        first: dict[str, object] = {}
        for group, value in zip(map(repr, groups), values, strict=True):
            if value is not None and first.setdefault(group, value) != value:
                raise ConfigError(
                    f"{place}: rows of one {name} have {column} {first[group]} and {value}, so "
                    "each turn would count as a completion: keep one row per completion, such as "
                    f"its last turn, without {column}"
                )


def _comparable(prompts: Sequence[Any]) -> list[Any] | None:
    """Convert prompts to comparable and hashable values; return None if their types differ."""
    if len({type(prompt) for prompt in prompts}) != 1:
        return None
    if isinstance(prompts[0], str):
        return list(prompts)
    if not isinstance(prompts[0], list):
        return None
    if all(isinstance(prompt[0], int) for prompt in prompts if prompt):
        return [tuple(prompt) for prompt in prompts]
    return [tuple(json.dumps(x, sort_keys=True, default=str) for x in prompt) for prompt in prompts]


def _extends(later: Any, earlier: Any) -> bool:
    """Return True if a prompt begins with an earlier prompt and is longer."""
    return len(later) > len(earlier) and later[: len(earlier)] == earlier


def _evidence_of_ids(ids: Mapping[str, Sequence[Any]], keys: Sequence[Any] | None) -> str:
    """Describe an example from the id column that reveals turns of rollouts, or return "".

    A column named like a rollout id reveals turns if at least half of the ids that have several
    rows belong to rollouts of several turns. For any other column, all of these ids must do so, and
    there must be at least two.
    """
    numbers = [values for name, values in ids.items() if TURN_NAME.fullmatch(name.lower())]
    for name, values in ids.items():
        if TURN_NAME.fullmatch(name.lower()):
            continue
        rows: dict[Any, list[int]] = {}
        for row, value in enumerate(values):
            rows.setdefault(value, []).append(row)
        rows.pop(None, None)
        several = {value: places for value, places in rows.items() if len(places) > 1}
        is_named = ROLLOUT_NAME.fullmatch(name.lower()) is not None
        ids_of = Counter(
            key for places in rows.values() for key in {keys[row] for row in places if keys}
        )
        # Skip an index within groups, for which every prompt has a row with each index value.
        if INDEX_NAME.fullmatch(name.lower()) and set(ids_of.values()) == {len(rows)}:
            continue
        rollouts = []
        for value, places in several.items():
            prompts = None if keys is None else [keys[row] for row in places]
            is_counted = is_named and any(_are_distinct(x, places) for x in numbers)
            if _are_turns(prompts, ids_of, is_named, is_counted):
                rollouts.append(value)
        if len(rollouts) >= (max(1, len(several) / 2) if is_named else max(2, len(several))):
            different = "" if keys is None else " of different prompts"
            return f"{name}={rollouts[0]!r:.40} has {len(several[rollouts[0]])} rows{different}"
    return ""


def _are_turns(
    prompts: Sequence[Any] | None, ids_of: Mapping[Any, int], is_named: bool, is_counted: bool
) -> bool:
    """Return True if the rows that share an id are turns of a rollout.

    Args:
        prompts: prompts of these rows; None: not logged.
        ids_of: number of different ids under which each prompt occurs.
        is_named: True if the column's name is that of a rollout id.
        is_counted: True if another column numbers the turns of the rollout.
    """
    if prompts is None:
        return is_counted
    ordered = sorted(prompts, key=len)
    if len(set(ordered)) < len(ordered):
        return is_counted and len(set(ordered)) > 1
    if all(_extends(b, a) for a, b in zip(ordered[:-1], ordered[1:], strict=True)):
        return True
    of_one_id = sum(ids_of[prompt] == 1 for prompt in prompts)
    return is_counted or (is_named and 2 * of_one_id >= len(prompts))


def _are_distinct(values: Sequence[Any], places: Sequence[int]) -> bool:
    """Return True if the values in rows `places` are all different and none of them is missing."""
    distinct = {values[row] for row in places}
    return None not in distinct and len(distinct) == len(places)


def _evidence_of_numbers(ids: Mapping[str, Sequence[Any]], keys: Sequence[Any] | None) -> str:
    """Describe the column that numbers turns, or return "" if there is none.

    In such a column, at least half of the prompts of later turns extend the prompt of an earlier
    turn. Rows are not turns if each row has a different rollout id.
    """
    named = [values for name, values in ids.items() if ROLLOUT_NAME.fullmatch(name.lower())]
    if keys is None or any(_are_distinct(values, range(len(keys))) for values in named):
        return ""
    for name, values in ids.items():
        if not TURN_NAME.fullmatch(name.lower()):
            continue
        turns = [
            (value, key) for value, key in zip(values, keys, strict=True) if isinstance(value, int)
        ]
        first = min((value for value, _ in turns), default=0)
        earliest: dict[Any, int] = {}
        for value, key in turns:
            earliest[key] = min(value, earliest.get(key, value))
        before = _prefixes(earliest)
        later = [
            any(earliest[prefix] < value for prefix in before[key])
            for value, key in turns if value > first
        ]  # fmt: skip
        if later and 2 * sum(later) >= len(later):
            return f"ordered by {name}, their prompts extend prompts of earlier rows"
    return ""


def _prefixes(keys: Iterable[Any]) -> dict[Any, list[Any]]:
    """For each key, find the other keys that are prefixes of it.

    In sorted order a key comes after its prefixes, and all keys between a prefix and the key also
    begin with this prefix.
    """
    prefixes: dict[Any, list[Any]] = {}
    stack: list[Any] = []
    for key in sorted(keys):
        while stack and not _extends(key, stack[-1]):
            stack.pop()
        prefixes[key] = list(stack)
        stack.append(key)
    return prefixes
