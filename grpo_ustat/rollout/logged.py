"""Rollouts that were logged elsewhere: the rows of a Parquet file, each refused by row and field.

The columns are those of TRL's completions log: `prompt` and `completion`, texts or conversations
(lists of messages with `role` and `content`), and one column of rewards; `step`, `advantage` and
the columns of our own completions.parquet may be there too. Rows count from 0. What the rows become
is said in `import_rollouts`.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pyarrow
from pyarrow import parquet, types

from grpo_ustat.config.schema import ConfigError

KNOWN = (  # TRL's, then ours
    "step", "prompt", "completion", "advantage",
    "prompt_id", "completion_index", "length", "ended", "answer", "extracted",
)  # fmt: skip

Message = dict[str, str]


@dataclass(frozen=True)
class LoggedRollout:
    """One row of the file.

    Attributes:
        row: its place in the file, from 0.
        prompt: the text that the model read, or the messages that its chat template wrote.
        completion: the text that it wrote.
        reward: finite.
        ended: whether it wrote its end token, False where it was cut; None: no such column.
        length: in tokens, end token included; None: no such column.
    """

    row: int
    prompt: str | list[Message]
    completion: str
    reward: float
    ended: bool | None
    length: int | None


def read_rollouts(path: Path) -> list[LoggedRollout]:
    """Every row of the file, in its order.

    Raises:
        ConfigError: the file cannot be read, lacks columns, holds several steps, or has a row that
            cannot be used: it names the first such row, its field and how many more there are.
    """
    table = _table(path)
    rewards = _reward_column(table, path)
    columns = {name: table[name].to_pylist() for name in table.column_names}
    steps = columns.get("step", [0])
    _refuse(path, "step", ["is null" if step is None else None for step in steps])
    if len(set(steps)) > 1:
        raise ConfigError(
            f"{path} holds steps {min(steps)} to {max(steps)}, each of another policy: keep one"
        )
    if "ended" in columns and not types.is_boolean(table["ended"].type):
        raise ConfigError(
            f"{path}: column ended holds {table['ended'].type}, not true (the end token was "
            "written) or false (the completion was cut): write it as booleans"
        )
    faults = {
        "prompt": _prompt_fault,
        "completion": _completion_fault,
        rewards: _reward_fault,
        "ended": lambda value: "is null, not true or false" if value is None else None,
    }
    for name, fault in faults.items():
        _refuse(path, name, [fault(value) for value in columns.get(name, ())])
    nothing = [None] * len(table)
    rows = zip(
        columns["prompt"],
        columns["completion"],
        columns[rewards],
        columns.get("ended", nothing),
        columns.get("length", nothing),
        strict=True,
    )
    return [
        LoggedRollout(row, prompt, _text(completion), float(reward), ended, length)
        for row, (prompt, completion, reward, ended, length) in enumerate(rows)
    ]


def _table(path: Path) -> pyarrow.Table:
    try:
        table = parquet.read_table(path)
    except (OSError, ValueError) as error:
        reason = " ".join(str(error).split())[:200]
        raise ConfigError(f"pool={path} cannot be read: {reason}") from error
    if not len(table):
        raise ConfigError(f"{path} has no rows")
    return table


def _reward_column(table: pyarrow.Table, path: Path) -> str:
    """The name of the column of rewards: the only numeric one that is not in `KNOWN`."""
    missing = {"prompt", "completion"} - set(table.column_names)
    numeric = [
        name for name in table.column_names if name not in KNOWN and _is_numeric(table[name].type)
    ]
    if missing or len(numeric) != 1:
        raise ConfigError(
            f"{path} has columns {', '.join(table.column_names)}: prompt, completion and exactly "
            f"one column of rewards are needed, found {', '.join(numeric) or 'none'}; leave the "
            "others out, or add them up with their weights"
        )
    return numeric[0]


def _is_numeric(kind: pyarrow.DataType) -> bool:
    return any(test(kind) for test in (types.is_integer, types.is_floating, types.is_boolean))


def _refuse(path: Path, field: str, faults: list[str | None]) -> None:
    """Raise the error for a field's first faulty row, with the number of the others."""
    rows = [row for row, fault in enumerate(faults) if fault]
    if rows:
        more = f", and {len(rows) - 1} more rows have such a fault" if len(rows) > 1 else ""
        raise ConfigError(
            f"{path} row {rows[0]} (from 0): {field} {faults[rows[0]]}{more}: mend or drop them"
        )


def _prompt_fault(value: Any) -> str | None:
    if isinstance(value, str):
        return None if value else "is empty"
    fault = _conversation_fault(value)
    if fault is None and value[-1]["role"] == "assistant":
        return "ends with an assistant message, which a chat template closes or continues"
    return fault


def _completion_fault(value: Any) -> str | None:
    if isinstance(value, str):
        return None
    fault = _conversation_fault(value)
    if fault is None and [message["role"] for message in value] != ["assistant"]:
        roles = ", ".join(message["role"] for message in value)
        return f"holds messages of {roles}, not one of the assistant: only it wrote its own tokens"
    return fault


def _conversation_fault(value: Any) -> str | None:
    """Why a value is not a list of messages that hold text alone; None where it is one."""
    if value is None:
        return "is null"
    if not isinstance(value, list):
        return f"is {value!r:.40}, neither text nor messages"
    if not value:
        return "has no messages"
    for message in value:
        if not isinstance(message, dict) or not isinstance(message.get("role"), str):
            return "has a message without role"
        if not isinstance(message.get("content"), str):
            return f"has a message of the {message['role']} whose content is not text"
        others = [k for k, x in message.items() if k not in ("role", "content") and x is not None]
        if others:
            return f"has a message with {', '.join(others)} beside role and content"
    return None


def _reward_fault(value: Any) -> str | None:
    if value is None:
        return "is null: no reward"
    return None if math.isfinite(value) else f"is {value}: not a finite reward"


def _text(completion: str | list[Message]) -> str:
    return completion if isinstance(completion, str) else completion[0]["content"]
