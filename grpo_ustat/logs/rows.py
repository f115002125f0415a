"""A row of any framework's rollouts, its reward and its faults, and the rows of a table.

`convert`, TRL, our own training or a user wrote the table. There are two kinds. Token-exact tables,
as `grpo-ustat convert` writes them, have `prompt_id`, `prompt_ids`, `completion_ids` (token ids,
end token included), `reward`, `ended`, and perhaps `loss_mask` (1 on tokens that the policy wrote),
`logprobs` (of the sampler, a number per token) and `policy_version`. Tables like TRL's completions
log have `prompt` and `completion`, texts or conversations (lists of messages with `role` and
`content`), and one column of rewards; `step`, `advantage` and the columns of our own
completions.parquet may be there too. Rows count from 0. `import_rollouts` says how `mse` uses the
rows.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from grpo_ustat.config.schema import ConfigError
from grpo_ustat.logs.turns import check_rollouts, check_turn_numbers, is_id
from grpo_ustat.records import MAX_REWARD, is_number
from grpo_ustat.runs.files import csv_rows, json_lines
from grpo_ustat.terminal.streams import single_line

# Columns that hold no rewards: TRL's, then ours.
KNOWN_COLUMNS = (
    "step", "prompt", "completion", "advantage",
    "prompt_id", "completion_index", "length", "ended", "answer", "extracted",
    "prompt_ids", "completion_ids", "loss_mask", "logprobs", "policy_version", "policy_step",
)  # fmt: skip
# Columns of token-exact rows.
TOKEN_COLUMNS = ("prompt_ids", "completion_ids")
# Key in the metadata that `convert` writes.
STEP_ROLLOUTS = "grpo_ustat.step_rollouts"
# A single prompt does not show how far gradients of different prompts differ.
MIN_PROMPTS = 2
# Completions of a prompt: the jackknife leaves three, which unbiased estimators need.
MIN_COMPLETIONS = 4


class DamagedFile(ConfigError):
    """A file that cannot be read at all, while others may be readable."""


@dataclass
class Rollout:
    """One completion as it was logged."""

    path: Path
    # Place in the file, for messages, such as `line 3`.
    place: str
    # The framework's name of the group, unique in a run and policy.
    group: str = ""
    # nan if there is none.
    reward: float = math.nan
    # Training run of the completion: a folder, and whatever distinguishes several runs in it.
    run: str = ""
    # Training step for which it was written; None: not logged.
    step: str | None = None
    # The framework's own name of the row in its run; None: it has none.
    sample: str | None = None
    # Unit that is appended to a file at once, such as a step. If a name occurs twice in one batch,
    # a resumed run has written it again. None: files are written from scratch, or names differ.
    batch: str | None = None
    # True if its file holds all rows that arrived, beside another file of those trained on.
    arrived: bool = False
    # Reason why the framework did not train on it; empty: it did.
    untrained: str = ""
    # Reason why it cannot be used; empty: it can.
    fault: str = ""
    # Reason why it was not taken; empty: it was, or nothing is decided yet.
    left_out: str = ""
    # Remark to show if it is used.
    note: str = ""
    # Token ids, end token included; None: only texts were logged.
    prompt_ids: list[int] | None = None
    completion_ids: list[int] | None = None
    # 1 on tokens of the completion that the policy wrote; None: all.
    loss_mask: list[int] | None = None
    # Log-probabilities of the completion's tokens, by the sampler; None: not logged.
    logprobs: list[float] | None = None
    # True if the policy wrote its end token, False if it was cut; None: not logged.
    ended: bool | None = None
    # Length in tokens, end token included, if only texts were logged; None: not logged.
    length: int | None = None
    # Version of the weights that wrote it; None: not logged.
    policy_version: str | None = None
    # Updates of these weights since training began; None: unknown.
    policy_step: int | None = None
    # Texts, or lists of messages; None: not logged. Completions of a table are texts, and so are
    # the prompts of a table with token ids.
    prompt: Any = None
    completion: Any = None
    # Short texts and whole numbers of its row by field, some of which may be ids.
    possible_ids: dict[str, str | int] = field(default_factory=dict)

    @property
    def is_exact(self) -> bool:
        """True if the token ids are known, not only the text."""
        return self.completion_ids is not None


@dataclass(frozen=True)
class Options:
    """Facts that a framework's files do not contain."""

    # Completions of a prompt, for rows without a group.
    group_size: int | None = None
    # The column or key of rewards if there are several, or several with weights, as in
    # `right=1,form=0.5`.
    reward: str | None = None
    # Version of the policy whose rollouts are kept; None: the last one.
    version: str | None = None
    # The file or folder that is read; `convert` sets it.
    source: Path | None = None

    def weights(self, names: Iterable[str]) -> dict[str, float]:
        """Return the weight of each requested reward; a name of `names` is never split.

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
                fault = fault or f"{weight!r} is not a finite weight of {name}"
        counts = Counter(name for name, _, _ in terms)
        if repeated := [name for name, count in counts.items() if count > 1]:
            fault = fault or f"{repeated[0]} is named {counts[repeated[0]]} times"
        if fault:
            raise ConfigError(
                f"--reward {self.reward or repr('')}: {fault}: write --reward NAME, or "
                "NAME=WEIGHT,NAME=WEIGHT"
            )
        return {name: _weight(weight) if equals else 1.0 for name, equals, weight in terms}


def _weight(text: str) -> float:
    """Parse a weight as typed; nan if it is no number."""
    try:
        return float(text)
    except ValueError:
        return math.nan


def reward_of(
    values: Mapping[str, Any],
    options: Options,
    default_weights: Mapping[str, float],
    skips_null: bool = False,
) -> dict[str, Any]:
    """Compute a row's reward: the sum of rewards with the weights of `--reward`, else the defaults.

    Args:
        values: rewards by name.
        default_weights: weights by name, used without `--reward`.
        skips_null: the framework adds the rewards that are present and ignores a null.

    Returns:
        `reward`, and if some or all of it is missing `fault` or `note`, as in `Rollout`.
    """
    rewards = dict(values)
    # `--reward` may also name a key of a dictionary; a column of the same name goes first.
    if options.reward is not None:
        for keys in [value for value in values.values() if isinstance(value, dict)]:
            rewards |= {key: x for key, x in keys.items() if isinstance(rewards.get(key, {}), dict)}
    weights = options.weights(rewards) or default_weights
    if absent := [name for name in weights if name not in rewards]:
        names = ", ".join(name for name, x in rewards.items() if isinstance(x, int | float | None))
        asked = f"--reward {absent[0]}: " if options.reward else f"{absent[0]}: "
        return {"fault": f"{asked}its row has no such reward (its numbers: {names or 'none'})"}
    if parts := [value for name in weights if isinstance(value := rewards[name], dict)]:
        return {"fault": f"its reward has parts {', '.join(parts[0])}: name one with --reward"}
    null = [name for name in weights if rewards[name] is None]
    note = ""
    if skips_null and 0 < len(null) < len(weights):
        weights = {name: weight for name, weight in weights.items() if name not in null}
        note = f"reward {', '.join(null)} is null and left out of the sum, as the framework does"
    total = sum(weight * as_float(rewards[name]) for name, weight in weights.items() if weight)
    return {"reward": total if weights else math.nan, "note": note}


def as_float(value: Any) -> float:
    """Return a reward as logged; nan if it is no number, infinite if no float is so large."""
    try:
        return float(value) if isinstance(value, int | float) else math.nan
    except OverflowError:
        return math.inf


def reward_columns(
    columns: Mapping[str, list[Any]], other_columns: set[str]
) -> tuple[list[str], list[str]]:
    """Find columns that may hold rewards; ids and `other_columns` do not.

    They are returned in two lists: columns in which most values that are not null are numbers, and
    columns that hold only nulls.
    """
    present = {
        name: [value for value in values if value is not None]
        for name, values in columns.items() if name not in other_columns and not is_id(name)
    }  # fmt: skip
    numbers = {
        name: sum(isinstance(value, int | float) for value in values)
        for name, values in present.items()
    }
    names = [name for name, values in present.items() if 2 * numbers[name] > len(values)]
    return names, [name for name, values in present.items() if not values]


def default_weights(
    place: object, names: list[str], nulls: list[str], options: Options
) -> dict[str, float]:
    """Give weight 1 to the only column of rewards.

    No column has a weight if `--reward` is typed or all rewards are null. Without any column of
    rewards the error is a ValueError, as for a row in another format.
    """
    if options.reward is not None or (nulls and not names):
        return {}
    if not names:
        raise ValueError("no column of numbers, so no rewards")
    if len(names) > 1:
        raise ConfigError(
            f"{place} has several columns of numbers, {', '.join(names)}: name the rewards with "
            "--reward COLUMN, or add columns up with --reward "
            f"{','.join(f'{name}=1' for name in names)} (their weights are not logged)"
        )
    return {names[0]: 1.0}


def read_columns(path: Path) -> dict[str, list[Any]]:
    """Read the columns of a Parquet, CSV or JSON Lines file; a missing value is None."""
    try:
        if path.suffix == ".parquet":
            from pyarrow import parquet

            columns: dict[str, list[Any]] = parquet.read_table(path).to_pydict()
        else:
            if path.suffix == ".csv":
                # Excel begins a file with a byte-order mark.
                rows = csv_rows(path.read_text(encoding="utf-8-sig"))
            else:
                rows = [row for _, row in json_lines(path)]
            names = dict.fromkeys(name for row in rows for name in row)
            columns = {name: [row.get(name) for row in rows] for name in names}
    except ConfigError:
        raise
    except (OSError, ValueError, RecursionError) as error:
        raise ConfigError(f"{path} cannot be read: {single_line(error, 200)}") from error
    if not any(columns.values()):
        raise ConfigError(f"{path} has no rows")
    return columns


def read_rollouts(path: Path) -> list[Rollout]:
    """Read every row of a table of one policy's rollouts, in its order."""
    columns = read_columns(path)
    _check_turns(path, columns.get("prompt_ids", columns.get("prompt")), columns)
    rewards, is_exact = _only_reward(path, columns), columns.keys() >= set(TOKEN_COLUMNS)
    # Completions of a study have no steps.
    if set(columns.get("step", ())) == {None}:
        del columns["step"]
    steps = columns.get("step", [0])
    _refuse(path, "step", ["is null" if step is None else None for step in steps])
    if len(set(steps)) > 1:
        raise ConfigError(
            f"{path} holds steps {min(steps)} to {max(steps)}, each of another policy: keep the "
            f"rows of one step, such as {max(steps)}"
        )
    versions = sorted(set(map(str, columns.get("policy_version", ()))))
    if len(versions) > 1:
        raise ConfigError(
            f"{path} holds rollouts of {len(versions)} policies, policy_version {versions[0]} to "
            f"{versions[-1]}: a study measures one policy, so keep the rows of one"
        )
    ended = [value for value in columns.get("ended", ()) if value is not None]
    if wrong := [value for value in ended if not isinstance(value, bool)]:
        raise ConfigError(
            f"{path}: column ended holds {type(wrong[0]).__name__}, not true (the end token was "
            "written) or false (the completion was cut): write it as booleans"
        )
    count = len(columns[rewards])
    if is_exact:
        faults = {"prompt_ids": ids_fault, "completion_ids": ids_fault, rewards: reward_fault}
    else:
        faults = {"prompt": prompt_fault, "completion": completion_fault, rewards: reward_fault}
        faults["ended"] = lambda value: "is null, not true or false" if value is None else None
    for name, fault in faults.items():
        _refuse(path, name, [fault(value) for value in columns.get(name, ())])
    if is_exact:
        tokens = [name for name in ("loss_mask", "logprobs") if name in columns]
        for name in tokens:
            pairs = zip(columns[name], columns["completion_ids"], strict=True)
            _refuse(path, name, [per_token_fault(value, len(ids)) for value, ids in pairs])
        logprobs = columns.get("logprobs", ())
        # Log-probabilities of some rows do not show which policy wrote the other rows.
        if any(logprobs):
            nulls = ["is null, other rows have it" if value is None else None for value in logprobs]
            _refuse(path, "logprobs", nulls)
        fields = ["prompt", "completion", "ended", *TOKEN_COLUMNS, *tokens]
        for name in ("prompt", "completion"):
            texts = columns.get(name, [None] * count)
            columns[name] = [value if isinstance(value, str) else None for value in texts]
    else:
        fields = ["prompt", "completion", "ended", "length"]
        columns["completion"] = [
            value if isinstance(value, str) else value[0]["content"]
            for value in columns["completion"]
        ]
    return [
        Rollout(
            path, f"row {row} (from 0)", reward=float(columns[rewards][row]),
            **{name: columns[name][row] for name in fields if name in columns},
        )
        for row in range(count)
    ]  # fmt: skip


def check_columns(path: Path) -> None:
    """Refuse a Parquet file whose columns are not those of rollouts.

    KNOWN_COLUMNS are not read, except the prompts if other columns may be ids.
    """
    from pyarrow import parquet

    try:
        with parquet.ParquetFile(path) as file:
            names, rows = file.schema_arrow.names, file.metadata.num_rows
            others = [name for name in names if name not in KNOWN_COLUMNS]
            prompt = "prompt_ids" if "prompt_ids" in names else "prompt"
            prompts = [prompt] if prompt in names and len(others) > 1 else []
            columns = file.read(others + prompts).to_pydict()
    except (OSError, ValueError) as error:
        raise ConfigError(f"{path} cannot be read: {single_line(error, 200)}") from error
    if not rows:
        raise ConfigError(f"{path} has no rows")
    _check_turns(path, columns.get(prompt), {name: columns[name] for name in others})
    _only_reward(path, {name: columns.get(name, []) for name in names})


def _check_turns(
    path: Path, prompts: Sequence[Any] | None, columns: Mapping[str, Sequence[Any]]
) -> None:
    """Refuse a table whose rows are turns, see `check_rollouts` and `check_turn_numbers`."""
    check_rollouts(path, prompts, columns)
    if prompts is not None:
        check_turn_numbers(path, "prompt", prompts, columns)


def _only_reward(path: Path, columns: Mapping[str, list[Any]]) -> str:
    """Return the column of rewards, after a check that the table has the columns of a study."""
    names, _ = reward_columns(columns, set(KNOWN_COLUMNS))
    texts = [name for name in ("prompt", "completion") if name not in columns]
    tokens = [name for name in TOKEN_COLUMNS if name not in columns]
    missing = []
    if texts and tokens:
        fewer, other = sorted((texts, tokens), key=len)
        instead = f" (or {' and '.join(other)})" if len(fewer) == len(other) else ""
        missing.append(" and ".join(fewer) + instead)
    if not names:
        missing.append("a column of rewards, which are numbers")
    if missing:
        raise ConfigError(
            f"{path} cannot be scored; missing: {', and '.join(missing)}; found "
            f"{', '.join(columns)}: add them, or let grpo-ustat convert read the framework's files"
        )
    if len(names) > 1:
        raise ConfigError(
            f"{path} has several columns of rewards, {', '.join(names)}, and a study uses one: "
            "drop the others, or add them up with their weights: grpo-ustat convert --reward "
            f"{','.join(f'{name}=1' for name in names)}"
        )
    return names[0]


def _refuse(path: Path, field: str, faults: Sequence[str | None]) -> None:
    """Raise the error for a field's first faulty row, with the number of the others."""
    rows = [row for row, fault in enumerate(faults) if fault]
    if rows:
        more = f", and {len(rows) - 1} more rows have such a fault" if len(rows) > 1 else ""
        raise ConfigError(
            f"{path} row {rows[0]} (from 0): {field} {faults[rows[0]]}{more}: mend or drop them"
        )


def step_rollouts(path: Path) -> int | None:
    """Return the number of rollouts of the training step that wrote a file; None if unknown.

    The sources are the note of `convert`, or the rows of the last step in TRL's log, which holds a
    whole batch.
    """
    from pyarrow import parquet

    try:
        schema = parquet.read_schema(path)
        noted = (schema.metadata or {}).get(STEP_ROLLOUTS.encode())
        if noted is not None:
            return int(noted)
        if not {"step", "advantage"} <= set(schema.names) or "completion_index" in schema.names:
            # A log with completion_index is of our training, which logs some groups of a step.
            return None
        steps = parquet.read_table(path, columns=["step"])["step"].to_pylist()
    except (OSError, ValueError):
        return None
    logged = [step for step in steps if step is not None]
    return logged.count(max(logged)) if logged else None


def reward_fault(value: Any) -> str | None:
    """Return the reason why a value is no reward; None if it is one."""
    if value is None:
        return "is null: no reward"
    if not is_number(value):
        return f"is {value}: not a finite reward"
    is_large = not is_number(value, MAX_REWARD)
    return f"is {value}: larger than {MAX_REWARD:g}, its square overflows" if is_large else None


def ids_fault(value: Any) -> str | None:
    """Return the reason why a value is no list of token ids; None if it is one."""
    if value is None:
        return "is null"
    if not isinstance(value, list) or not value:
        return f"is {value!r:.40}, not a list of token ids"
    wrong = [item for item in value if type(item) is not int or not 0 <= item < 2**63]
    return f"holds {wrong[0]!r:.20}, which is no token id" if wrong else None


def per_token_fault(value: Any, length: int) -> str | None:
    """Return the reason why a value is neither null nor a finite number per token, or None."""
    if value is None:
        return None
    if not isinstance(value, list) or len(value) != length:
        count = len(value) if isinstance(value, list) else "no list"
        return f"has {count} numbers, the completion {length} tokens"
    wrong = [number for number in value if not is_number(number)]
    return f"holds {wrong[0]!r:.20}, not a finite number" if wrong else None


def prompt_fault(value: Any) -> str | None:
    """Return the reason why a value is no prompt of a study; None if it is one."""
    if isinstance(value, str):
        return None if value else "is empty"
    fault = _conversation_fault(value)
    if fault is None and value[-1]["role"] == "assistant":
        return "ends with an assistant message, which a chat template closes or continues"
    return fault


def completion_fault(value: Any) -> str | None:
    """Return the reason why a value is no completion of the policy only; None if it is one."""
    if isinstance(value, str):
        return None
    fault = _conversation_fault(value)
    if fault is None and [message["role"] for message in value] != ["assistant"]:
        roles = ", ".join(message["role"] for message in value)
        return f"holds messages of {roles}, not a single one of the assistant"
    return fault


def _conversation_fault(value: Any) -> str | None:
    """Return the reason why a value is not a list of text messages; None if it is one."""
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
