"""Recognition of rows that are turns of one rollout, and not independent samples for a question.

The log of an agent may have one row per turn, each with the reward of the whole rollout. Such rows
must count as one rollout. (The score of a rollout, the gradient of its log-probability, is the sum
of the scores of its turns.) The prompt of a later turn contains the earlier turns, so without this
module each turn would count as another question.

The contents of the rows show which kind of log it is. In a log of independent samples, a question
has several completions, so its prompt occurs in several rows. The turns of one rollout have
different prompts: each prompt extends the previous one, or it occurs under only one rollout id.
"""

from __future__ import annotations

import json
import math
import re
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from grpo_ustat.config.schema import ConfigError

# Names of columns that identify a rollout in verl-agent, rLLM, SkyRL, AReaL and ROLL.
ROLLOUT_NAME = re.compile(
    r"(traj|trajector(y|ies)|episodes?|rollouts?|sessions?|conversations?|dialogs?|dialogues?|"
    r"interactions?|requests?|eids?|uids?)(_?(id|ids|uid|uuid|idx|index|key|no|num|number))?"
)
# Those of these names that always mean a rollout; the other names may also mean a question or a
# request.
SINGLE_ROLLOUT_NAME = re.compile(
    r"(traj|trajector(y|ies)|episodes?|rollouts?)(_?(id|ids|uid|uuid|key))?"
)
TRAJECTORY_NAME = re.compile(r"traj(ector(y|ies))?(_?(id|ids|uid|uuid|key))?")
TURN_NAME = re.compile(
    r"(turn|round|(env|episode|traj|trajectory|rollout|agent)_step)s?"
    r"(_?(id|idx|index|no|num|number))?"
    r"|step_(id|idx|index|no|num|number|in_(episode|trajectory|rollout))|(is_)?last_(step|turn)"
)
# Names of columns that certainly number the turns of a rollout. Plural names such as `turns` are
# excluded, because such a column may contain the number of turns in a rollout. `step_id` is
# excluded, because it may count training steps.
SINGLE_TURN_NAME = re.compile(r"(?!.*s$|step_(?!in_))" + f"(?:{TURN_NAME.pattern})")
# Names of columns with an index, which may restart from 0 in each group.
INDEX_NAME = re.compile(r".*(idx|index|no|num|number)")
# Names of columns that identify the question. Together with the question, an index that restarts in
# each group identifies a rollout.
QUESTION_NAME = re.compile(
    r"(prompt|group|question|task|instance|data|example|problem)(_?(id|uid|uuid|idx|index))?|uid"
)
LAST_TURN_NAME = re.compile(r"(is_)?last_(step|turn)")
ADVANTAGE_NAME = re.compile(r"advantages?|baselines?")
# Two advantages count as equal if their relative difference is at most this value.
ADVANTAGE_ROUNDING = 1e-5
# If no column shows turns, rows count as turns if the prompts of at least this share of rows
# continue other rows.
MIN_LATER_TURNS = 0.25
ID_NAME = re.compile(r"(.*_)?(id|idx|index|uid|uuid)|(n|num)_(turns|steps|rounds)")
# Fields that never contain ids of rollouts.
CONTENT = frozenset(
    {"prompt", "prompt_id", "prompt_ids", "completion", "completion_ids", "reward", "step"}
    | {"input", "output", "gts", "question", "answer", "text", "content"}
)
# Columns that identify the question of a row, if prompts are not logged.
QUESTION_COLUMNS = ("prompt_id", "prompt", "group_id", "group", "question")


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
    # Name of each row's rollout; None for a row that is a rollout itself.
    rollouts: Sequence[str | None]
    # Turn number of each row; None if turns are not numbered.
    numbers: Sequence[int] | None

    def rows(self) -> dict[str, list[int]]:
        """Return the row indices of each rollout that has several rows, in the order of turns."""
        rows: dict[str, list[int]] = {}
        for row, name in enumerate(self.rollouts):
            if name is not None:
                rows.setdefault(name, []).append(row)
        numbers = self.numbers
        if numbers is not None:
            rows = {name: sorted(places, key=numbers.__getitem__) for name, places in rows.items()}
        return {name: places for name, places in rows.items() if len(places) > 1}


def find_turns(
    place: object, prompts: Sequence[Any] | None, columns: Mapping[str, Sequence[Any]]
) -> Turns | None:
    """Identify the rollout of each row if the rows are turns of rollouts; return None if not.

    If the rows are turns, but no column identifies their rollouts, an error is raised.

    Args:
        place: source of the rows, for messages.
        prompts: prompt of each row as text, token ids or messages; None if they are not logged.
        columns: values of all rows by column name; only texts and whole numbers are used.
    """
    ids = {
        name: [_id_of(x, is_id(name)) for x in values]
        for name, values in columns.items()
        if name not in CONTENT
    }
    questions = next((columns[name] for name in QUESTION_COLUMNS if name in columns), None)
    keys = None if prompts is None else _comparable(prompts)
    column, evidence = _evidence_of_ids(ids, keys, questions)
    evidence = evidence or _evidence_of_numbers(ids, keys)
    if not evidence and prompts is not None and not _have_unique_ids(ids):
        completions = columns.get("completion_ids", columns.get("completion"))
        evidence = _evidence_of_contents(prompts, completions)
    if not evidence:
        return None
    partners = [
        ids.get(name, columns[name]) for name in columns if QUESTION_NAME.fullmatch(name.lower())
    ]
    named = [name for name in ids if ROLLOUT_NAME.fullmatch(name.lower())]
    numbers = [
        values for name, values in ids.items()
        if TURN_NAME.fullmatch(name.lower()) and not LAST_TURN_NAME.fullmatch(name.lower())
    ]  # fmt: skip
    for name in dict.fromkeys([column] * bool(column) + named):
        joint = [_joint_ids(partner, ids[name]) for partner in partners if partner != ids[name]]
        alone = [None if x is None else str(x) for x in ids[name]]
        finer = [x for x in joint if _divides(alone, x)]
        is_index = INDEX_NAME.fullmatch(name.lower()) is not None
        candidates = joint if is_index else [*finer, alone, *joint]
        if finer and not is_index and _turn_numbers(alone, keys, numbers) == []:
            candidates = finer
        for rollouts in candidates:
            counted = _turn_numbers(rollouts, keys, numbers)
            if counted is not None:
                return Turns(name, rollouts, counted or None)
    raise ConfigError(
        f"{place}: several rows are turns of one rollout ({evidence}), but no column identifies "
        "the rollout of a row: add a column rollout_id with the same value in all rows of a "
        "rollout, and a column turn that numbers them; or, if every row is a rollout, drop the "
        "columns of ids"
    )


def _id_of(value: Any, is_named: bool) -> str | int | None:
    """Return a text or a whole number, or None for other values.

    In a table with missing values, whole numbers are stored as floats. They are accepted if the
    column has the name of an id.
    """
    if isinstance(value, float) and is_named and value.is_integer():
        return int(value)
    return value if isinstance(value, str | int) and not isinstance(value, bool) else None


def _joint_ids(questions: Sequence[Any], ids: Sequence[Any]) -> list[str | None]:
    """Join the question and the id of each row; None if one of them is missing."""
    return [
        None if question is None or value is None else f"{question}/{value}"
        for question, value in zip(questions, ids, strict=True)
    ]


def _places(ids: Sequence[Any]) -> list[list[int]]:
    """Return the row indices of each id that has several rows."""
    rows: dict[Any, list[int]] = {}
    for row, value in enumerate(ids):
        if value is not None:
            rows.setdefault(value, []).append(row)
    return [places for places in rows.values() if len(places) > 1]


def _divides(ids: Sequence[Any], finer: Sequence[Any]) -> bool:
    """Return True if ids restart with each question, so that only both together are unique.

    This is so if an id occurs with several questions, and some rows with an id have the same
    question. If all rows with an id have different questions, the column of questions contains the
    prompts of turns.

    Args:
        ids: id of each row.
        finer: id of each row, joined with its question.
    """
    is_divided = any(len({finer[row] for row in rows}) > 1 for rows in _places(ids))
    return is_divided and bool(_places(finer))


def _turn_numbers(
    rollouts: Sequence[str | None], keys: Sequence[Any] | None, columns: Sequence[Sequence[Any]]
) -> list[int] | None:
    """Check whether ids can be those of rollouts, and number the turns.

    If there are turn numbers, they must be different within a rollout. Without them, the prompts of
    a rollout must be different. In addition, each prompt must extend the previous one, or at most
    one of the prompts may occur in several rollouts.

    Args:
        rollouts: possible rollout id of each row.
        keys: comparable prompt of each row; None if prompts are not logged.
        columns: columns that may number the turns.

    Returns:
        The turn number of each row, [] if turns are not numbered, or None if the check fails.
    """
    several = _places(rollouts)
    if not several:
        return None
    for values in columns:
        is_number = all(isinstance(values[row], int) for rows in several for row in rows)
        if is_number and all(_are_distinct(values, rows) for rows in several):
            return [value if isinstance(value, int) else 0 for value in values]
    if columns:
        return None
    if keys is None:
        return []
    rollouts_of: dict[Any, set[Any]] = {}
    for key, name in zip(keys, rollouts, strict=True):
        rollouts_of.setdefault(key, set()).add(name)
    for rows in several:
        prompts = [keys[row] for row in rows]
        shared = sum(len(rollouts_of[prompt]) > 1 for prompt in prompts)
        if not _are_distinct(keys, rows) or (shared > 1 and not _is_chain(prompts)):
            return None
    return []


def _is_chain(prompts: Sequence[Any]) -> bool:
    """Return True if each prompt extends the next shorter prompt."""
    ordered = sorted(prompts, key=len)
    return all(_extends(b, a) for a, b in zip(ordered[:-1], ordered[1:], strict=True))


def one_row_per_rollout(
    place: object, columns: Mapping[str, list[Any]], rewards: Sequence[str]
) -> dict[str, list[Any]]:
    """Reduce a table of rewards to one row per rollout: its first row, with the rollout's rewards.

    Args:
        place: source of the table, for messages.
        columns: values by column name.
        rewards: names of the columns of rewards.
    """
    turns = find_turns(place, columns.get("prompt_ids", columns.get("prompt")), columns)
    if turns is None:
        return dict(columns)
    shared = {name: shared_rewards(place, turns, columns[name], columns) for name in rewards}
    columns = {**columns, **shared}
    later = {row for rows in turns.rows().values() for row in rows[1:]}
    dropped = [name for name in columns if SINGLE_TURN_NAME.fullmatch(name.lower())]
    return {
        name: [value for row, value in enumerate(values) if row not in later]
        for name, values in columns.items() if name not in dropped
    }  # fmt: skip


def shared_rewards(
    place: object,
    turns: Turns,
    rewards: Sequence[Any],
    columns: Mapping[str, Sequence[Any]],
    places: Sequence[str] | None = None,
) -> list[Any]:
    """Return, for each row, the reward of its rollout.

    A log may repeat the reward in all rows of a rollout, or have it in only one of them. If a
    column marks the last turn, as in SkyRL, the other turns may also have the reward 0.

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
    last = next(
        (values for name, values in columns.items() if LAST_TURN_NAME.fullmatch(name.lower())), None
    )
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
        if last is not None and [bool(last[row]) for row in rows].count(True) == 1:
            (final,) = [row for row in rows if last[row]]
            if final in logged:
                logged = [row for row in logged if row == final or rewards[row] != 0]
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


def check_turn_numbers(
    place: object, name: str, groups: Sequence[object], columns: Mapping[str, Sequence[object]]
) -> None:
    """Raise an error if rows of a group have different turn numbers.

    Some logs contain only rewards, or repeat the question as the prompt of every turn. Only turn
    numbers then show that several rows are turns of one rollout, and not several rollouts.

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
                    "they are turns, and each turn would count as a completion: keep one row per "
                    f"completion, such as its last turn, and drop the column {column}"
                )


def _comparable(prompts: Sequence[Any]) -> list[Any] | None:
    """Convert prompts to comparable and hashable values; return None if their types differ."""
    if len({type(prompt) for prompt in prompts}) != 1:
        return None
    if isinstance(prompts[0], str):
        return list(prompts)
    if not isinstance(prompts[0], list):
        return None
    if all({*map(type, prompt)} <= {int} for prompt in prompts):
        return [tuple(prompt) for prompt in prompts]
    return [tuple(json.dumps(x, sort_keys=True, default=str) for x in prompt) for prompt in prompts]


def _extends(later: Any, earlier: Any) -> bool:
    """Return True if a prompt is longer than another prompt and begins with it."""
    return len(later) > len(earlier) and later[: len(earlier)] == earlier


def _evidence_of_ids(
    ids: Mapping[str, Sequence[Any]], keys: Sequence[Any] | None, questions: Sequence[Any] | None
) -> tuple[str, str]:
    """Return the id column that shows turns of rollouts and an example, or two empty texts.

    Only ids that occur in several rows are considered. If the column has a name of rollout ids, it
    shows turns if the rows of at least half of these ids are turns of a rollout. In any other
    column, the rows of all these ids must be turns, and there must be at least two such ids.
    """
    numbers = [values for name, values in ids.items() if TURN_NAME.fullmatch(name.lower())]
    for name, column in ids.items():
        if TURN_NAME.fullmatch(name.lower()):
            continue
        values = column
        if keys is None and questions is not None and _begin_anew(column, questions):
            values = _joint_ids(questions, column)
        rows: dict[Any, list[int]] = {}
        for row, value in enumerate(values):
            rows.setdefault(value, []).append(row)
        rows.pop(None, None)
        several = {value: places for value, places in rows.items() if len(places) > 1}
        is_named = ROLLOUT_NAME.fullmatch(name.lower()) is not None
        ids_of = Counter(
            key for places in rows.values() for key in {keys[row] for row in places if keys}
        )
        # This skips an index of the completions of a prompt: every prompt has a row with each value
        # of the index.
        is_counted = any(_are_distinct(x, y) for x in numbers for y in several.values())
        is_index = INDEX_NAME.fullmatch(name.lower()) or not is_counted
        if is_index and set(ids_of.values()) == {len(rows)}:
            continue
        is_single = SINGLE_ROLLOUT_NAME.fullmatch(name.lower()) is not None
        is_trajectory = TRAJECTORY_NAME.fullmatch(name.lower()) is not None
        within = is_single and _are_within(rows.values(), questions if keys is None else keys)
        rollouts = []
        for value, places in several.items():
            prompts = None if keys is None else [keys[row] for row in places]
            is_counted = is_named and any(_are_distinct(x, places) for x in numbers)
            is_certain = is_trajectory or (is_single and is_counted)
            if is_certain or _are_turns(prompts, ids_of, is_named, is_counted, within):
                rollouts.append(value)
        if len(rollouts) >= (max(1, len(several) / 2) if is_named else max(2, len(several))):
            different = "" if keys is None or within else " of different prompts"
            count = len(several[rollouts[0]])
            return name, f"{name}={rollouts[0]!r:.40} has {count} rows{different}"
    return "", ""


def _begin_anew(ids: Sequence[Any], questions: Sequence[Any]) -> bool:
    """Return True if some id occurs with several questions, and each question has several ids."""
    ids_of: dict[Any, set[Any]] = {}
    for question, value in zip(questions, ids, strict=True):
        ids_of.setdefault(repr(question), set()).add(value)
    is_unique = sum(map(len, ids_of.values())) == len(set(ids))
    return not is_unique and all(len(values) > 1 for values in ids_of.values())


def _are_within(rollouts: Iterable[Sequence[int]], questions: Sequence[Any] | None) -> bool:
    """Return True if each rollout has one question, and some question has several rollouts.

    Args:
        rollouts: row indices of each rollout.
        questions: question of each row; None if questions are not logged.
    """
    if questions is None:
        return False
    of_rollouts = [{repr(questions[row]) for row in places} for places in rollouts]
    counts = Counter(next(iter(names)) for names in of_rollouts if len(names) == 1)
    return sum(counts.values()) == len(of_rollouts) and max(counts.values(), default=0) > 1


def _are_turns(
    prompts: Sequence[Any] | None,
    ids_of: Mapping[Any, int],
    is_named: bool,
    is_counted: bool,
    is_within: bool,
) -> bool:
    """Return True if the rows that share an id are turns of a rollout.

    Args:
        prompts: prompts of these rows; None if prompts are not logged.
        ids_of: number of different ids under which each prompt occurs.
        is_named: True if the column has a name of rollout ids.
        is_counted: True if another column numbers the turns of the rollout.
        is_within: True if each id belongs to one question, and some question has several ids.
    """
    if is_within and (prompts is None or len(set(prompts)) < len(prompts)):
        return True
    if prompts is None:
        return is_counted
    ordered = sorted(prompts, key=len)
    if len(set(ordered)) < len(ordered):
        return is_counted and len(set(ordered)) > 1
    if _is_chain(prompts):
        return True
    of_one_id = sum(ids_of[prompt] == 1 for prompt in prompts)
    return is_counted or (is_named and 2 * of_one_id >= len(prompts))


def _are_distinct(values: Sequence[Any], places: Sequence[int]) -> bool:
    """Return True if the values in rows `places` are all different and none of them is missing."""
    distinct = {values[row] for row in places}
    return None not in distinct and len(distinct) == len(places)


def _evidence_of_numbers(ids: Mapping[str, Sequence[Any]], keys: Sequence[Any] | None) -> str:
    """Describe the column that numbers turns, or return "" if there is none.

    A column numbers turns if it has a name of turn numbers, and if at least half of the prompts of
    later turns extend the prompt of an earlier turn. If each row has a different rollout id, rows
    are not turns.
    """
    if keys is None or _have_unique_ids(ids):
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
            return f"in the order of {name}, their prompts extend the prompts of earlier rows"
    return ""


def _have_unique_ids(ids: Mapping[str, Sequence[Any]]) -> bool:
    """Return True if each row has its own rollout id, so that rows are not turns."""
    named = [values for name, values in ids.items() if ROLLOUT_NAME.fullmatch(name.lower())]
    return any(_are_distinct(values, range(len(values))) for values in named)


def _evidence_of_contents(prompts: Sequence[Any], completions: Sequence[Any] | None) -> str:
    """Describe the prompts that continue the prompt and completion of another row.

    The result is "" if they are too few to be later turns of rollouts; see MIN_LATER_TURNS. A
    prompt with several completions is a question, even if it contains an earlier conversation.
    """
    if completions is None or any(
        type(x) is not type(y) or not isinstance(x, str | list) or not y
        for x, y in zip(prompts, completions, strict=True)
    ):
        return ""
    keys = _comparable(prompts)
    if keys is None:
        return ""
    least, counts, before = max(2, MIN_LATER_TURNS * len(keys)), Counter(keys), _prefixes(keys)
    later = [row for row, key in enumerate(keys) if counts[key] == 1 and before[key]]
    # In a log of single turns, few prompts extend another one. The slower check is then not needed.
    if len(later) < least:
        return ""
    wholes: dict[Any, list[Any]] = {}
    for key, prompt, completion in zip(keys, prompts, completions, strict=True):
        wholes.setdefault(key, []).append(prompt + completion)
    later = [
        row for row in later
        if any(_extends(prompts[row], x) for prefix in before[keys[row]] for x in wholes[prefix])
    ]  # fmt: skip
    if len(later) < least:
        return ""
    return f"{len(later)} prompts begin with the prompt and the completion of another row"


def _prefixes(keys: Iterable[Any]) -> dict[Any, list[Any]]:
    """Find, for each key, the other keys that are prefixes of it.

    In sorted order, a key comes after its prefixes, and all keys between a prefix and the key also
    begin with this prefix. One pass with a stack is therefore enough.
    """
    prefixes: dict[Any, list[Any]] = {}
    stack: list[Any] = []
    for key in sorted(set(keys)):
        while stack and not _extends(key, stack[-1]):
            stack.pop()
        prefixes[key] = list(stack)
        stack.append(key)
    return prefixes
