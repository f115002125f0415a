"""Three forms in which files contain rewards by prompt.

    {"prompt_id": "q1", "reward": 1.0}             a row per completion
    {"prompt_id": "q1", "rewards": [1.0, 0.0]}     a row per prompt with the list of its rewards
    prompt_id,r0,r1                                a row per prompt with a column per completion

The form is recognised by the column names and the values. A table that fits several forms is
refused.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from grpo_ustat.config.schema import ConfigError
from grpo_ustat.logs.rows import KNOWN_COLUMNS, Options
from grpo_ustat.logs.turns import is_id

Columns = Mapping[str, Sequence[Any]]

# Columns that identify the prompt of a row, in order of preference.
GROUP_COLUMNS = (
    "prompt_id", "prompt", "group_id", "group", "question", "question_id", "problem_id", "task_id",
)  # fmt: skip
# Further columns that identify the prompt, but only in a table with a row per prompt. In a table
# with a row per completion, these columns may number the rows instead.
ROW_COLUMNS = ("problem", "task", "example_id", "instance_id", "uid", "id", "qid", "idx", "index")
# Columns with the training step of a row, or the policy that wrote it; the first one that exists is
# used.
STEP_COLUMNS = (
    "step", "global_step", "global_steps", "training_step", "iteration", "policy_version",
    "policy_step",
)  # fmt: skip
LIST_COLUMNS = ("rewards", "reward", "scores", "score")
# Numbered column names, such as r0, reward_3 or completion 12; each may be a completion.
NUMBERED = re.compile(r"(?P<stem>.*?)[\s_.\-\[(]*(?P<number>\d+)[\])]?")
STEMS = re.compile(
    r"|r|s|g|k|c|a|(mean_)?(rewards?|scores?|completions?|samples?|rollouts?|responses?|attempts?|"
    r"generations?|gens?|answers?|accuracy|acc|correct|success|trials?|runs?)"
)
# Columns that only a table with a row per completion has.
COMPLETION_COLUMNS = ("completion", "completion_ids", "response", "output", "completion_index")
READABLE = (
    "rows with prompt_id and reward, rows with prompt_id and a list of rewards, or a row per "
    "prompt with columns r0, r1, ..."
)


@dataclass(frozen=True)
class Form:
    """Form of a table of rewards."""

    # One of `rows`, `lists` and `wide`.
    kind: str
    # Column that identifies the prompt.
    prompt: str
    # Columns with rewards, and their weights. In the form `rows`, a completion's reward is the
    # weighted sum of the columns.
    weights: Mapping[str, float]

    @property
    def name(self) -> str:
        """Text that names the columns with rewards, for messages."""
        names = list(self.weights)
        if self.kind == "wide" and len(names) > 2:
            return f"{names[0]} to {names[-1]}"
        parts = [x if w == 1 else f"{w:g} {x}" for x, w in self.weights.items()]
        return (" and " if self.kind == "wide" else " + ").join(parts)


def form_of(path: Path, columns: Columns, reward: str | None) -> Form:
    """Identify the form of a table; raise an error if none or several forms fit.

    Args:
        path: file with the table, for messages.
        columns: values by column name.
        reward: text that the user typed, None if there is none: a column, a weighted sum of columns
            such as `right=1,form=.5`, or the columns of the completions such as `a,b,c` or `r*`.
    """
    if reward is not None and reward not in columns:
        return _typed_form(path, columns, reward)
    candidates = [reward] if reward is not None else [x for x in LIST_COLUMNS if x in columns]
    lists = [name for name in candidates if any(isinstance(x, list) for x in columns[name])]
    if lists:
        return Form("lists", _prompt_column(path, columns, of_rows=False), {lists[0]: 1.0})
    if reward is not None:
        return Form("rows", _prompt_column(path, columns), {reward: 1.0})
    numbered = {} if "reward" in columns else _numbered(columns)
    if numbered:
        return _wide_form(path, columns, numbered)
    prompt = _prompt_column(path, columns)
    numeric = [
        name for name, values in columns.items()
        if name not in (*KNOWN_COLUMNS, *GROUP_COLUMNS, *STEP_COLUMNS) and not is_id(name)
        and any(isinstance(x, int | float) for x in values)
    ]  # fmt: skip
    if "reward" not in numeric and len(numeric) != 1:
        several = ""
        if len(numeric) > 1 and _has_a_row_per_prompt(columns, prompt):
            several = f"; if each is a completion, reward={','.join(numeric)}"
        raise ConfigError(
            f"{path} has {len(numeric)} columns that may be rewards "
            f"({', '.join(numeric) or 'no other column is numeric'}): name one with "
            f"reward=COLUMN{several}"
        )
    return Form("rows", prompt, {"reward" if "reward" in numeric else numeric[0]: 1.0})


def _typed_form(path: Path, columns: Columns, reward: str) -> Form:
    """Return the form for several columns that the user named."""
    if reward.endswith("*"):
        names = [name for name in columns if name.startswith(reward[:-1])]
        names = [name for name in names if name not in GROUP_COLUMNS + ROW_COLUMNS + STEP_COLUMNS]
        if len(names) < 2:
            raise ConfigError(
                f"{path}: reward={reward} matches {len(names)} of the columns "
                f"{', '.join(columns)}, but at least two are needed"
            )
        return Form("wide", _prompt_column(path, columns, of_rows=False), dict.fromkeys(names, 1.0))
    if "," not in reward and "=" not in reward:
        raise ConfigError(f"{path} has no column {reward}: choose from {', '.join(columns)}")
    weights = Options(reward=reward).weights(columns)
    if absent := [name for name in weights if name not in columns]:
        raise ConfigError(f"{path} has no column {absent[0]}: choose from {', '.join(columns)}")
    prompt = _prompt_column(path, columns, of_rows=False)
    is_wide = len(weights) > 1 and "=" not in reward and _has_a_row_per_prompt(columns, prompt)
    return Form("wide" if is_wide else "rows", prompt, weights)


def _wide_form(path: Path, columns: Columns, numbered: Mapping[str, list[str]]) -> Form:
    """Return the form with a column per completion; refuse a table that may have another form."""
    prompt = _prompt_column(path, columns, of_rows=False)
    families = {stem: names for stem, names in numbered.items() if STEMS.fullmatch(stem.lower())}
    shown = "; ".join(f"{names[0]} to {names[-1]}" for names in numbered.values())
    if len(families) != 1:
        names = next(iter(families or numbered))
        raise ConfigError(
            f"{path} has numbered columns {shown}, and it is not clear which are the rewards of "
            f"the completions: name them, e.g. reward='{names}*'"
        )
    (names,) = families.values()
    other = [name for name in COMPLETION_COLUMNS if name in columns]
    if other or not _has_a_row_per_prompt(columns, prompt):
        reason = f"column {other[0]}" if other else f"several rows per {prompt}"
        raise ConfigError(
            f"{path} has {reason}, so {shown} are not the completions of a prompt: name the reward "
            "with reward=COLUMN, or a sum with reward="
            f"{','.join(f'{name}=1' for name in names)}"
        )
    return Form("wide", prompt, dict.fromkeys(names, 1.0))


def _numbered(columns: Columns) -> dict[str, list[str]]:
    """Find families of numeric columns whose names differ only in a number at the end.

    The keys are the names without the number. Each family has at least two columns.
    """
    families: dict[str, dict[int, str]] = {}
    for name, values in columns.items():
        match = NUMBERED.fullmatch(name)
        if match and any(isinstance(x, int | float | str) for x in values):
            families.setdefault(match["stem"], {})[int(match["number"])] = name
    return {
        stem: [names[number] for number in sorted(names)]
        for stem, names in families.items()
        if len(names) > 1 and _has_numbers(columns, names.values())
    }


def _has_numbers(columns: Columns, names: Any) -> bool:
    """Return True if at least half of the values in these columns are numbers."""
    values = [value for name in names for value in columns[name] if value is not None]
    return 2 * sum(isinstance(value, int | float) for value in values) > len(values)


def _prompt_column(path: Path, columns: Columns, of_rows: bool = True) -> str:
    """Return the column that identifies the prompt.

    Args:
        of_rows: True for a table with a row per completion.
    """
    choices = GROUP_COLUMNS if of_rows else GROUP_COLUMNS + ROW_COLUMNS
    prompt = next((name for name in choices if name in columns), None)
    if prompt is None:
        shown = ", ".join(list(columns)[:8]) + ", ..." * (len(columns) > 8)
        raise ConfigError(
            f"{path} has columns {shown} and none of {', '.join(GROUP_COLUMNS)}: rename the column "
            "that identifies the prompt"
        )
    return prompt


def step_column(columns: Columns) -> str | None:
    """Return the column with the step or the policy of a row; None if there is none."""
    return next((name for name in STEP_COLUMNS if name in columns), None)


def _has_a_row_per_prompt(columns: Columns, prompt: str) -> bool:
    """Return True if each prompt has at most one row per step."""
    step = step_column(columns)
    steps = columns[step] if step else [None] * len(columns[prompt])
    rows = Counter(map(repr, zip(steps, columns[prompt], strict=True)))
    return max(rows.values()) == 1
