"""Common row type for logged rollouts; functions to read tables, check rows and compute rewards.

A table may come from `convert`, TRL, our own training or a user. There are two kinds of tables:

- Token-exact tables, such as those that `grpo-ustat convert` writes, have the columns `prompt_id`,
  `prompt_ids`, `completion_ids` (token ids including the end-of-sequence token), `reward` and
  `ended`. Optional columns are `loss_mask` (1 on tokens that the policy wrote), `logprobs` (the
  sampler's log-probability of each token) and `policy_version`.
- Tables like TRL's completions log have `prompt` and `completion`, which are texts or conversations
  (lists of messages with `role` and `content`), and one column of rewards. Optional columns are
  `step`, `advantage` and the columns of our own completions.parquet.

Several rows may be turns of one rollout; see `turns`. `convert` writes such rows with the columns
`rollout_id` and `turn`. Rows are numbered from 0. `import_rollouts` describes how `mse` uses a
table.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from grpo_ustat.config.schema import ConfigError
from grpo_ustat.logs.tables import read_table
from grpo_ustat.logs.turns import (
    Turns,
    find_turns,
    is_id,
    shared_rewards,
)
from grpo_ustat.records import MAX_REWARD, is_number
from grpo_ustat.terminal.streams import single_line

# Columns that contain no rewards: TRL's columns, then this package's columns.
KNOWN_COLUMNS = (
    "step", "prompt", "completion", "advantage",
    "prompt_id", "completion_index", "length", "ended", "answer", "extracted",
    "prompt_ids", "completion_ids", "loss_mask", "logprobs", "policy_version", "policy_step",
)  # fmt: skip
# Columns that only token-exact tables have.
TOKEN_COLUMNS = ("prompt_ids", "completion_ids")
# Key in the Parquet metadata that `convert` writes.
STEP_ROLLOUTS = "grpo_ustat.step_rollouts"
# Minimum number of prompts. A single prompt does not show how gradients differ between prompts.
MIN_PROMPTS = 2
# Minimum number of completions per prompt. The unbiased estimators need three, and the jackknife
# leaves one more out.
MIN_COMPLETIONS = 4


class DamagedFile(ConfigError):
    """Error for a file that cannot be read; other files of the same log may still be readable."""


@dataclass
class Rollout:
    """Rollout as it was logged: a single completion, or several turns.

    A rollout of several turns is represented by its first turn; `later` has the remaining turns.
    The fields describe the first turn, except `reward`, `ended`, `untrained` and `fault`, which
    describe the whole rollout.
    """

    path: Path
    # Position in the file, such as `line 3`, for use in messages.
    place: str
    # Name of the group of completions in the framework, unique within a run and a policy.
    group: str = ""
    # Reward of the rollout; NaN if the row has none.
    reward: float = math.nan
    # Identifier of the training run: its folder, and a suffix if the folder has several runs.
    run: str = ""
    # Training step that used the completion; None if it is not logged.
    step: str | None = None
    # Name that the framework gave the row within its run; None if it gave no name.
    sample: str | None = None
    # Name of the batch (such as a step) whose rows the framework appends to a file together. If a
    # row name occurs twice in a batch, a resumed run has written the batch a second time. None if
    # the framework does not append to files, or never repeats a name.
    batch: str | None = None
    # True if this file has all rows that the trainer received, while another file has the rows on
    # which it trained.
    arrived: bool = False
    # Reason why the framework did not train on the row; empty if it did.
    untrained: str = ""
    # Reason why the row cannot be used; empty if it can be used.
    fault: str = ""
    # Reason why the row was left out; empty if it was kept or is still undecided.
    left_out: str = ""
    # Remark for the user, shown if the row is kept.
    note: str = ""
    # Token ids including the end-of-sequence token; None if only texts were logged.
    prompt_ids: list[int] | None = None
    completion_ids: list[int] | None = None
    # 1 on completion tokens that the policy wrote; None if the policy wrote all tokens.
    loss_mask: list[int] | None = None
    # The sampler's log-probabilities of the completion tokens; None if they are not logged.
    logprobs: list[float] | None = None
    # True if the completion has an end-of-sequence token, False if it was truncated; None if this
    # is not logged.
    ended: bool | None = None
    # Length of the completion in tokens, including the end-of-sequence token. It is used if only
    # texts were logged; None if it is not logged.
    length: int | None = None
    # Version of the weights that wrote the completion; None if it is not logged.
    policy_version: str | None = None
    # Number of updates before these weights since the start of training; None if unknown.
    policy_step: int | None = None
    # Text or list of messages; None if not logged. Completions read from a table are texts. If the
    # table has token ids, its prompts are also texts.
    prompt: Any = None
    completion: Any = None
    # Short texts and whole numbers in the row, keyed by field. The id of a rollout and the turn
    # number are among them; see `turns`.
    possible_ids: dict[str, str | int] = field(default_factory=dict)
    # Logged advantage, or list of advantages by token; None if it is not logged.
    advantage: Any = None
    # Name of a rollout of several turns; None for a single turn.
    rollout_id: str | None = None
    # Later turns of the rollout. The score of a rollout (gradient of its log-probability) is the
    # sum of the scores of its turns.
    later: list[Rollout] = field(default_factory=list)

    @property
    def turns(self) -> list[Rollout]:
        """All rows of the rollout."""
        return [self, *self.later]

    @property
    def is_exact(self) -> bool:
        """True if the token ids are known."""
        return self.completion_ids is not None


@dataclass(frozen=True)
class Options:
    """Options for reading logs: information that the framework does not log, and choices."""

    # Number of completions per prompt, used if rows do not name their group.
    group_size: int | None = None
    # Name of the reward to use if rows have several, or a weighted sum such as `right=1,form=0.5`.
    reward: str | None = None
    # Version of the policy whose rollouts are kept; if None, `sieve.of_one_policy` chooses one.
    version: str | None = None
    # File or folder to read; set by `convert`.
    source: Path | None = None

    def weights(self, names: Iterable[str]) -> dict[str, float]:
        """Return the weight of each reward that `reward` names.

        If the whole text is one of `names`, it is that single reward, even if it has a comma.

        >>> Options(reward="right,form=0.5").weights(["right", "form"])
        {'right': 1.0, 'form': 0.5}
        """
        if self.reward is None or self.reward in names:
            return {} if self.reward is None else {self.reward: 1.0}
        terms = [term.strip().partition("=") for term in self.reward.split(",")]
        fault = ""
        for name, equals, weight in terms:
            if not name.strip():
                fault = fault or f"{name + equals + weight!r} has no reward name"
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
    """Parse a weight that a user typed; return NaN if it is not a number."""
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
    """Compute a row's reward: the sum of its rewards with the weights of `--reward`.

    Args:
        values: rewards by name.
        options: reading options, with the weights that the user gave with `--reward`.
        default_weights: weights by name, used without `--reward`.
        skips_null: True if the framework leaves null rewards out of the sum.

    Returns:
        The fields `reward` and `note` of a `Rollout`, or its `fault` if there is no reward.
    """
    rewards = dict(values)
    # A reward may be a dictionary, and `--reward` may name one of its keys. A column with the same
    # name takes precedence.
    if options.reward is not None:
        for keys in [value for value in values.values() if isinstance(value, dict)]:
            rewards |= {key: x for key, x in keys.items() if isinstance(rewards.get(key, {}), dict)}
    weights = options.weights(rewards) or default_weights
    if absent := [name for name in weights if name not in rewards]:
        names = ", ".join(name for name, x in rewards.items() if isinstance(x, int | float | None))
        asked = f"--reward {absent[0]}: " if options.reward else f"{absent[0]}: "
        return {"fault": f"{asked}the row has no such reward (numbers in it: {names or 'none'})"}
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
    """Return a logged reward; NaN if it is not a number, infinity if a float cannot hold it."""
    try:
        return float(value) if isinstance(value, int | float) else math.nan
    except OverflowError:
        return math.inf


def reward_columns(
    columns: Mapping[str, list[Any]], other_columns: set[str]
) -> tuple[list[str], list[str]]:
    """Find columns that may contain rewards, ignoring columns of ids and `other_columns`.

    Returns:
        Columns in which most non-null values are numbers, and columns that contain only nulls.
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
    """Return weight 1 for the only column of rewards.

    The result is empty if the user gave `--reward`, or if all rewards are null. If there is no
    column of rewards, a ValueError is raised. The reader then treats the row as a row of another
    format.
    """
    if options.reward is not None or (nulls and not names):
        return {}
    if not names:
        raise ValueError("no column contains numbers, so there are no rewards")
    if len(names) > 1:
        raise ConfigError(
            f"{place} has several columns of numbers, {', '.join(names)}: name the rewards with "
            "--reward COLUMN, or add columns up with --reward "
            f"{','.join(f'{name}=1' for name in names)} (their weights are not logged)"
        )
    return {names[0]: 1.0}


def read_rollouts(path: Path) -> list[Rollout]:
    """Read the rollouts of a table, in table order; refuse a table with rows of several policies.

    Rows that are turns of one rollout become one `Rollout`.
    """
    columns = read_table(path)
    turns = find_turns(path, columns)
    rewards, is_exact = _only_reward(path, columns), columns.keys() >= set(TOKEN_COLUMNS)
    if turns is not None:
        columns[rewards] = shared_rewards(path, turns, columns[rewards], columns)
    # All steps are null in the completions that a study of this package writes.
    if set(columns.get("step", ())) == {None}:
        del columns["step"]
    steps = columns.get("step", [0])
    _refuse(path, "step", ["is null" if step is None else None for step in steps])
    if len(set(steps)) > 1:
        raise ConfigError(
            f"{path} has rows of steps {min(steps)} to {max(steps)}, and another policy wrote each "
            f"step: keep the rows of one step, such as {max(steps)}"
        )
    versions = sorted(set(map(str, columns.get("policy_version", ()))))
    if len(versions) > 1:
        raise ConfigError(
            f"{path} has rollouts of {len(versions)} policies (policy_version {versions[0]} to "
            f"{versions[-1]}), but a study measures one policy: keep the rows of one policy"
        )
    ended = [value for value in columns.get("ended", ()) if value is not None]
    if wrong := [value for value in ended if not isinstance(value, bool)]:
        raise ConfigError(
            f"{path}: column ended has a value of type {type(wrong[0]).__name__}: write true (the "
            "end token was written) or false (the completion was truncated)"
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
        # Log-probabilities show which policy wrote a row. Either all rows have them, or none.
        if any(logprobs):
            nulls = [
                "is null, but other rows have values" if value is None else None
                for value in logprobs
            ]
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
    rows = [
        Rollout(
            path, f"row {row} (from 0)", reward=float(columns[rewards][row]),
            **{name: columns[name][row] for name in fields if name in columns},
        )
        for row in range(count)
    ]  # fmt: skip
    if turns is None:
        return rows
    rollouts = joined(rows, turns)
    if not is_exact:
        _check_texts(path, rollouts)
    return rollouts


def joined(rows: Sequence[Rollout], turns: Turns) -> list[Rollout]:
    """Join rows that are turns of one rollout; rollouts are in the order of their first rows.

    The turns of a rollout are in the order of their turn numbers. The reward of the rollout must
    already be in its rows; see `turns.shared_rewards`.
    """
    rollouts: dict[int, Rollout] = {}
    joint = turns.rows()
    for name, places in joint.items():
        members = [rows[place] for place in places]
        rollouts[min(places)] = replace(
            members[0], rollout_id=name, later=members[1:], ended=members[-1].ended,
            untrained=next((row.untrained for row in members if row.untrained), ""),
            fault=next((row.fault for row in members if row.fault), ""),
        )  # fmt: skip
    inside = {place for places in joint.values() for place in places}
    return [
        rollouts.get(place, row)
        for place, row in enumerate(rows)
        if place in rollouts or place not in inside
    ]


def _check_texts(path: Path, rollouts: Sequence[Rollout]) -> None:
    """Raise an error if all turns of a rollout have the same prompt.

    The prompt of a turn must be the whole text that the model read, including earlier turns.
    """
    for rollout in rollouts:
        if rollout.later and all(row.prompt == rollout.prompt for row in rollout.later):
            raise ConfigError(
                f"{path} {rollout.place}: all {len(rollout.turns)} turns of rollout "
                f"{rollout.rollout_id} have the same prompt, but a later turn reads the earlier "
                "turns too: write the whole text that the model read in prompt"
            )


def check_columns(path: Path) -> None:
    """Raise an error if a Parquet file lacks a column that a study of rollouts needs.

    To save time, only columns outside KNOWN_COLUMNS are read.
    """
    from pyarrow import parquet

    try:
        with parquet.ParquetFile(path) as file:
            names, rows = file.schema_arrow.names, file.metadata.num_rows
            others = [name for name in names if name not in KNOWN_COLUMNS]
            columns = file.read(others).to_pydict()
    except (OSError, ValueError) as error:
        raise ConfigError(f"{path} cannot be read: {single_line(error, 200)}") from error
    if not rows:
        raise ConfigError(f"{path} has no rows")
    find_turns(path, columns)
    _only_reward(path, {name: columns.get(name, []) for name in names})


def _only_reward(path: Path, columns: Mapping[str, list[Any]]) -> str:
    """Return the name of the reward column; raise an error if a column for a study is missing."""
    names, _ = reward_columns(columns, set(KNOWN_COLUMNS))
    texts = [name for name in ("prompt", "completion") if name not in columns]
    tokens = [name for name in TOKEN_COLUMNS if name not in columns]
    missing = []
    if texts and tokens:
        fewer, other = sorted((texts, tokens), key=len)
        instead = f" (or {' and '.join(other)})" if len(fewer) == len(other) else ""
        missing.append(" and ".join(fewer) + instead)
    if not names:
        missing.append("a numeric column of rewards")
    if missing:
        raise ConfigError(
            f"{path} cannot be used by a study; missing: {', and '.join(missing)}; found "
            f"{', '.join(columns)}: add the missing columns, or let grpo-ustat convert read the "
            "framework's files"
        )
    if len(names) > 1:
        raise ConfigError(
            f"{path} has several columns of rewards, {', '.join(names)}, but a study uses one: "
            "drop the others, or add them up with their weights: grpo-ustat convert --reward "
            f"{','.join(f'{name}=1' for name in names)}"
        )
    return names[0]


def _refuse(path: Path, field: str, faults: Sequence[str | None]) -> None:
    """Raise an error with the first faulty row of a field and the number of other faulty rows."""
    rows = [row for row, fault in enumerate(faults) if fault]
    if rows:
        more = f", and {len(rows) - 1} more rows are faulty" if len(rows) > 1 else ""
        raise ConfigError(
            f"{path} row {rows[0]} (from 0): {field} {faults[rows[0]]}{more}: correct or drop the "
            "rows"
        )


def step_rollouts(path: Path) -> int | None:
    """Return the number of rollouts per step in the run that wrote a file; None if unknown.

    The number is read from the metadata that `convert` writes. Without this metadata, the file is
    taken as a log of TRL, which logs whole batches, and the rows of its last step are counted.
    """
    from pyarrow import parquet

    try:
        schema = parquet.read_schema(path)
        noted = (schema.metadata or {}).get(STEP_ROLLOUTS.encode())
        if noted is not None:
            return int(noted)
        if not {"step", "advantage"} <= set(schema.names) or "completion_index" in schema.names:
            # A log with completion_index is from `grpo-ustat train`, which logs only some groups of
            # a step, so their number is not the number of rollouts.
            return None
        steps = parquet.read_table(path, columns=["step"])["step"].to_pylist()
    except (OSError, ValueError):
        return None
    logged = [step for step in steps if step is not None]
    return logged.count(max(logged)) if logged else None


def reward_fault(value: Any) -> str | None:
    """Return the reason why a value is not a valid reward; None if it is valid."""
    if value is None:
        return "is null: no reward"
    if not is_number(value):
        return f"is {value}: not a finite reward"
    is_large = not is_number(value, MAX_REWARD)
    return f"is {value}: larger than {MAX_REWARD:g}, so its square overflows" if is_large else None


def ids_fault(value: Any) -> str | None:
    """Return the reason why a value is not a list of token ids; None if it is valid."""
    if value is None:
        return "is null"
    if not isinstance(value, list) or not value:
        return f"is {value!r:.40}, not a list of token ids"
    wrong = [item for item in value if type(item) is not int or not 0 <= item < 2**63]
    return f"holds {wrong[0]!r:.20}, which is not a token id" if wrong else None


def per_token_fault(value: Any, length: int) -> str | None:
    """Return the reason why a value is invalid; None if it is null or has one number per token."""
    if value is None:
        return None
    if not isinstance(value, list) or len(value) != length:
        count = len(value) if isinstance(value, list) else "no list of"
        return f"has {count} numbers, but the completion has {length} tokens"
    wrong = [number for number in value if not is_number(number)]
    return f"holds {wrong[0]!r:.20}, not a finite number" if wrong else None


def prompt_fault(value: Any) -> str | None:
    """Return the reason why a study cannot use a value as the prompt; None if it can."""
    if isinstance(value, str):
        return None if value else "is empty"
    fault = _conversation_fault(value)
    if fault is None and value[-1]["role"] == "assistant":
        return "ends with an assistant message, which a chat template closes or continues"
    return fault


def completion_fault(value: Any) -> str | None:
    """Return the reason why a study cannot use a value as the completion; None if it can.

    A completion is a text or a single message of the assistant.
    """
    if isinstance(value, str):
        return None
    fault = _conversation_fault(value)
    if fault is None and [message["role"] for message in value] != ["assistant"]:
        roles = ", ".join(message["role"] for message in value)
        return f"contains messages with the roles {roles}, not a single assistant message"
    return fault


def _conversation_fault(value: Any) -> str | None:
    """Return the reason why a value is not a list of text messages; None if it is valid."""
    if value is None:
        return "is null"
    if not isinstance(value, list):
        return f"is {value!r:.40}, neither text nor messages"
    if not value:
        return "has no messages"
    for message in value:
        if not isinstance(message, dict) or not isinstance(message.get("role"), str):
            return "has a message without a role"
        if not isinstance(message.get("content"), str):
            return f"has a message with role {message['role']} whose content is not text"
        others = [k for k, x in message.items() if k not in ("role", "content") and x is not None]
        if others:
            return f"has a message with {', '.join(others)} besides role and content"
    return None
