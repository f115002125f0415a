"""Rollouts that were logged elsewhere: the rows of a Parquet file, each refused by row and field.

Two kinds of columns. Token-exact ones, as `grpo-ustat convert` writes them: `prompt_id`,
`prompt_ids`, `completion_ids` (token ids, end token included), `reward`, `ended`, and perhaps
`loss_mask` (1 on tokens that the policy wrote), `logprobs` (of the sampler, a number a token) and
`policy_version`. Or those of TRL's completions log: `prompt` and `completion`, texts or
conversations (lists of messages with `role` and `content`), and one column of rewards; `step`,
`advantage` and the columns of our own completions.parquet may be there too. Rows count from 0. What
the rows become is said in `import_rollouts`.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pyarrow
from pyarrow import parquet, types

from grpo_ustat.config.schema import ConfigError
from grpo_ustat.records import LARGEST_REWARD, is_number
from grpo_ustat.terminal.streams import single_line

KNOWN = (  # TRL's, then ours
    "step", "prompt", "completion", "advantage",
    "prompt_id", "completion_index", "length", "ended", "answer", "extracted",
    "prompt_ids", "completion_ids", "loss_mask", "logprobs", "policy_version", "policy_step",
)  # fmt: skip
EXACT = ("prompt_ids", "completion_ids")  # what makes rows token-exact
PER_TOKEN = ("loss_mask", "logprobs")  # a number for each token of the completion
LEAST_COMPLETIONS = 4  # of a prompt: the jackknife leaves three, which unbiased estimators need
STEP_ROLLOUTS = "grpo_ustat.step_rollouts"  # in the metadata that `convert` writes

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
        prompt_ids, completion_ids: token ids; None: only texts are known.
        loss_mask: whether the policy wrote each token of the completion; None: it wrote all.
        logprobs: of the tokens, by the sampler; None: not logged.
    """

    row: int
    prompt: str | list[Message]
    completion: str
    reward: float
    ended: bool | None
    length: int | None
    prompt_ids: list[int] | None = None
    completion_ids: list[int] | None = None
    loss_mask: list[bool] | None = None
    logprobs: list[float] | None = None

    @property
    def is_exact(self) -> bool:
        """Whether its tokens are known, not only its text."""
        return self.completion_ids is not None


def read_rollouts(path: Path) -> list[LoggedRollout]:
    """Every row of the file, in its order.

    Raises:
        ConfigError: the file cannot be read, lacks columns, holds several steps, or has a row that
            cannot be used: it names the first such row, its field and how many more there are.
    """
    table = _table(path)
    rewards = _reward_column(table, path)
    columns = {name: table[name].to_pylist() for name in table.column_names}
    if set(columns.get("step", ())) == {None}:  # completions of a study, which has no steps
        del columns["step"]
    steps = columns.get("step", [0])
    _refuse(path, "step", ["is null" if step is None else None for step in steps])
    if len(set(steps)) > 1:
        raise ConfigError(
            f"{path} holds steps {min(steps)} to {max(steps)}, each of another policy: keep "
            f"the rows of one, such as those whose step is {max(steps)}"
        )
    versions = sorted(set(map(str, columns.get("policy_version", ()))))
    if len(versions) > 1:
        raise ConfigError(
            f"{path} holds rollouts of {len(versions)} policies, policy_version {versions[0]} to "
            f"{versions[-1]}: a study is of one, keep one"
        )
    if "ended" in columns and not types.is_boolean(table["ended"].type):
        raise ConfigError(
            f"{path}: column ended holds {table['ended'].type}, not true (the end token was "
            "written) or false (the completion was cut): write it as booleans"
        )
    if set(EXACT) <= set(columns):
        return _exact_rollouts(path, columns, rewards)
    faults = {
        "prompt": prompt_fault,
        "completion": completion_fault,
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


def step_rollouts(path: Path) -> int | None:
    """How many rollouts the training step had that wrote a file: what `convert` noted, or the rows
    of the last step in TRL's log, which holds a whole batch. None: nothing says it.
    """
    try:
        schema = parquet.read_schema(path)
        noted = (schema.metadata or {}).get(STEP_ROLLOUTS.encode())
        if noted is not None:
            return int(noted)
        if not {"step", "advantage"} <= set(schema.names) or "completion_index" in schema.names:
            return None  # completion_index is of our own training, which logs some groups of a step
        steps = parquet.read_table(path, columns=["step"])["step"].to_pylist()
    except (OSError, ValueError):
        return None
    known = [step for step in steps if step is not None]
    return known.count(max(known)) if known else None


def _exact_rollouts(path: Path, columns: dict[str, list[Any]], rewards: str) -> list[LoggedRollout]:
    """Rows whose tokens are known."""
    faults: dict[str, Callable[[Any], str | None]] = {
        "prompt_ids": ids_fault,
        "completion_ids": ids_fault,
        rewards: _reward_fault,
    }
    for name, fault in faults.items():
        _refuse(path, name, [fault(value) for value in columns[name]])
    lengths = [len(ids) for ids in columns["completion_ids"]]
    for name in PER_TOKEN:
        values = columns.get(name, [None] * len(lengths))
        pairs = zip(values, lengths, strict=True)
        _refuse(path, name, [per_token_fault(value, length) for value, length in pairs])
        columns[name] = values
    if any(columns["logprobs"]):  # of some rows alone they cannot show which policy wrote the rest
        nulls = [value is None for value in columns["logprobs"]]
        _refuse(
            path, "logprobs", ["is null, other rows have it" if null else None for null in nulls]
        )
    nothing = [None] * len(lengths)
    texts = [columns.get(name, [""] * len(lengths)) for name in ("prompt", "completion")]
    rows = zip(
        *texts, columns[rewards], columns.get("ended", nothing), lengths, columns["prompt_ids"],
        columns["completion_ids"], columns["loss_mask"], columns["logprobs"], strict=True,
    )  # fmt: skip
    return [
        LoggedRollout(
            row, prompt if isinstance(prompt, str) else "",
            completion if isinstance(completion, str) else "", float(reward), ended, length,
            prompt_ids, completion_ids, None if mask is None else [bool(x) for x in mask], logprobs,
        )
        for row, (prompt, completion, reward, ended, length, prompt_ids, completion_ids, mask,
                  logprobs) in enumerate(rows)
    ]  # fmt: skip


def ids_fault(value: Any) -> str | None:
    """Why a value is no list of token ids; None where it is one."""
    if value is None:
        return "is null"
    if not isinstance(value, list) or not value:
        return f"is {value!r:.40}, not a list of token ids"
    wrong = [one for one in value if type(one) is not int or not 0 <= one < 2**63]
    return f"holds {wrong[0]!r:.20}, which is no token id" if wrong else None


def per_token_fault(value: Any, length: int) -> str | None:
    """Why a value is not null and not a list of one finite number a token; None where it is."""
    if value is None:
        return None
    if not isinstance(value, list) or len(value) != length:
        count = len(value) if isinstance(value, list) else "no list"
        return f"has {count} numbers, the completion {length} tokens"
    wrong = [one for one in value if not is_number(one)]
    return f"holds {wrong[0]!r:.20}, not a finite number" if wrong else None


def _table(path: Path) -> pyarrow.Table:
    try:
        table = parquet.read_table(path)
    except (OSError, ValueError) as error:
        reason = single_line(error, 200)
        raise ConfigError(f"pool={path} cannot be read: {reason}") from error
    if not len(table):
        raise ConfigError(f"{path} has no rows")
    return table


def _reward_column(table: pyarrow.Table, path: Path) -> str:
    """The name of the column of rewards: the only numeric one that is not in `KNOWN` and holds a
    value (TRL's log has a column for a reward function that rewards nothing).
    """
    missing = {"prompt", "completion"} - set(table.column_names)
    if set(EXACT) <= set(table.column_names):
        missing = set[str]()
    numeric = [
        name
        for name in table.column_names
        if name not in KNOWN
        and _is_numeric(table[name].type)
        and table[name].null_count < len(table)
    ]
    if missing or len(numeric) != 1:
        raise ConfigError(
            f"{path} has columns {', '.join(table.column_names)}: prompt, completion and exactly "
            f"one column of rewards are needed, found {', '.join(numeric) or 'none'}; leave the "
            "others out, or add them up with their weights: grpo-ustat convert --reward A=1,B=0.5"
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


def prompt_fault(value: Any) -> str | None:
    """Why a value is no prompt of a study; None where it is one."""
    if isinstance(value, str):
        return None if value else "is empty"
    fault = _conversation_fault(value)
    if fault is None and value[-1]["role"] == "assistant":
        return "ends with an assistant message, which a chat template closes or continues"
    return fault


def completion_fault(value: Any) -> str | None:
    """Why a value is no completion that the policy alone wrote; None where it is one."""
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
    if not is_number(value):
        return f"is {value}: not a finite reward"
    is_large = not is_number(value, LARGEST_REWARD)
    return f"is {value}: larger than {LARGEST_REWARD:g}, its square overflows" if is_large else None


def _text(completion: str | list[Message]) -> str:
    return completion if isinstance(completion, str) else completion[0]["content"]
