"""Conversion of the rollouts that a framework logged to one Parquet file.

The file has the rows of one policy. Rows that cannot be used are left out and counted by reason.
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from grpo_ustat.config.model import checkpoints_of
from grpo_ustat.config.schema import ConfigError
from grpo_ustat.logs import sieve
from grpo_ustat.logs.formats import (
    EVALUATION,
    NOT_AS_WRITTEN,
    Format,
    files_of,
    packed_files,
    split_by_name,
)
from grpo_ustat.logs.pairing import POLICY_STEP, Pairing, pairing_of
from grpo_ustat.logs.rows import (
    MIN_COMPLETIONS,
    MIN_PROMPTS,
    STEP_ROLLOUTS,
    DamagedFile,
    Options,
    Rollout,
    completion_fault,
    ids_fault,
    joined,
    per_token_fault,
    prompt_fault,
)
from grpo_ustat.logs.turns import find_turns, shared_rewards
from grpo_ustat.records import MAX_REWARD, is_number
from grpo_ustat.runs.files import atomic_write
from grpo_ustat.terminal.streams import SURROGATE, single_line

COLUMNS = (
    "prompt_id", "rollout_id", "turn", "prompt_ids", "completion_ids", "reward", "ended",
    "loss_mask", "logprobs", "policy_version", "prompt", "completion",
)  # fmt: skip

BIAS = (
    "some rows were left out because of their content: if the content of such rows depends on the "
    "reward, the accuracy and gradient of the remaining rows are biased"
)
NO_SCORED_TOKEN = "loss_mask is 0 on every token"
TYPE_NOUNS = {str: "text", list: "messages", type(None): "null"}


@dataclass(frozen=True)
class Conversion:
    """Result of a conversion: counts of rows, and remarks."""

    # Name of the framework.
    name: str
    # Number of files that were read, and number of rows in these files.
    files: int
    rows: int
    # Number of rows that were written, and number of rollouts in them.
    kept: int
    rollouts: int
    # Number of different prompts in the written rows.
    groups: int
    # True if the log has token ids, so that no text must be tokenised again.
    exact: bool
    # Number of rows that were left out, by reason.
    reasons: Counter[str]
    # For each reason, the position of the first row that was left out.
    example: dict[str, str]
    # Remarks for the user.
    notes: tuple[str, ...] = ()
    # Number of rollouts per training step in the run; None if it is not logged.
    step_rollouts: int | None = None
    # Number of completions of the prompt with the most completions.
    largest: int = 0
    # File with the kept rows, and the checkpoint nearest to the policy that wrote them; None if the
    # run has no checkpoint.
    pairing: Pairing | None = None

    @property
    def is_for_mse(self) -> bool:
        """True if at least one prompt has as many completions as `mse` needs."""
        return self.largest >= MIN_COMPLETIONS

    def lines(self) -> list[str]:
        """Return lines for the user: number of kept rows, reasons for left-out rows, remarks."""
        tokens = (
            "The log has token ids (token-exact)"
            if self.exact
            else "The log has only texts; tokenising them again may give other tokens (inexact)"
        )
        lines = [
            f"{self.name}: {self.kept} of {self.rows} rows in {self.files} files were kept, with "
            f"{self.groups} prompts. {tokens}."
        ]
        if self.rollouts < self.kept:
            lines.append(
                f"  the rows are turns of {self.rollouts} rollouts: the gradient of a rollout's "
                "log-probability is the sum over its turns"
            )
        for reason, count in self.reasons.most_common():
            lines.append(f"  {count} rows left out: {reason} (first: {self.example[reason]})")
        if self.pairing is not None:
            lines.append(f"  {self.pairing.line()}")
        lines += [f"  {note}" for note in self.notes]
        if self.step_rollouts is not None:
            lines.append(f"  a training step of this run has {self.step_rollouts} rollouts")
        if not self.is_for_mse:
            lines.append(
                f"  no prompt has the {MIN_COMPLETIONS} completions that mse needs: only advise "
                "can use the file, for its rewards"
            )
        elif self.groups < MIN_PROMPTS:
            lines.append(
                f"  there is only one prompt, as in TRL's default batch on one GPU: to find the "
                f"best G, log {MIN_PROMPTS} or more prompts per batch"
            )
        return lines


def convert(source: Path, framework: Format, target: Path, options: Options) -> Conversion:
    """Read a framework's files and write the rows that a study can use.

    A row is left out if the framework did not train on it, or if its content cannot be used, for
    example because its reward is infinite. `sieve` also leaves out copies, batches that were
    written a second time, rows of other runs and other policies, groups with several prompts, and
    prompts with few completions. Rows that are turns of one rollout are kept or left out together.

    Args:
        source: file or folder to read.
        framework: format of the files.
        target: Parquet file to write; it must not exist yet.
        options: reading options.
    """
    _check(target, options)
    paths = files_of(source, framework)
    packed = packed_files(source, [framework])
    if packed and not paths:
        raise ConfigError(f"{packed[0]} is packed: unpack it first, as with gunzip")
    if not paths:
        pattern = framework.pattern.rpartition("/")[2]
        raise ConfigError(
            f"{source} contains no {pattern} files, which {framework.name} writes: name the folder "
            "that contains them, or another format with --from"
        )
    paths, misnamed = split_by_name(source, framework, paths)
    notes = [
        f"not read: {path}, because {framework.name} does not write files with such names"
        for path in misnamed
    ]
    notes += [f"not read: {path}, which is packed: unpack it" for path in packed]
    rollouts, damaged = _rollouts_of(paths, framework, replace(options, source=source))
    notes += [
        f"not read: {str(error).removesuffix(': choose another --from')}"
        for error in damaged.values()
    ]
    for row in rollouts:
        if row.untrained.startswith(EVALUATION) or row.fault.startswith(NOT_AS_WRITTEN):
            row.left_out = row.untrained or row.fault
    rows = _joined_turns(source, sieve.without_copies(sieve.remaining_rows(rollouts)))
    # From here on, a rollout of several turns is one item.
    items = [*(row for row in rollouts if row.left_out), *rows]
    for row in rows:
        row.fault = row.fault or _fault(row)
    rows = sieve.last_written(rows)
    rows = sieve.of_one_run(rows, options.version)
    step_rollouts = sieve.rollouts_of_step(rows)
    checkpoints = checkpoints_of(Path(rows[-1].run)) if rows and rows[-1].run else {}
    for row in rows:
        row.left_out = row.untrained or row.fault
    if rows := sieve.remaining_rows(rows):
        rows = sieve.of_one_policy(rows, options.version, checkpoints)
        rows = _equally_logged(rows, notes)
    groups = sieve.in_groups(rows)
    usable = [row for group in groups for row in group]
    left_out = [row for row in items if row.left_out]
    reasons = Counter(row.left_out for row in left_out for _ in row.turns)
    # The order is reversed, so that the first row with each reason overwrites the later ones.
    example = {row.left_out: f"{row.path} {row.place}" for row in reversed(left_out)}
    if not usable:
        if options.reward and all(reason.startswith("--reward") for reason in reasons):
            raise ConfigError(f"{next(iter(reasons))}, in {source}")
        counts = "; ".join(f"{count} {reason}" for reason, count in reasons.most_common(3))
        raise ConfigError(
            f"{source}: none of {len(rollouts)} rows can be used: {counts or 'there are no rows'}"
        )
    remarks = Counter(row.note for row in usable for _ in row.turns if row.note)
    notes += [f"{count} rows kept: {remark}" for remark, count in remarks.items()]
    if any(row.fault for row in left_out):
        notes.append(BIAS)
    exact = all(row.is_exact for row in usable)
    step = usable[0].policy_step
    pairing = pairing_of(usable[0].path.stem, step, checkpoints)
    metadata = {STEP_ROLLOUTS: step_rollouts, POLICY_STEP: step}
    _write(target, groups, exact, {key: str(x) for key, x in metadata.items() if x is not None})
    return Conversion(
        framework.name, len(paths) - len(damaged), sum(len(row.turns) for row in rollouts),
        sum(len(row.turns) for row in usable), len(usable), len(groups), exact, reasons, example,
        tuple(notes), step_rollouts, max(map(len, groups)), pairing,
    )  # fmt: skip


def _check(target: Path, options: Options) -> None:
    """Check the target and the group size before any file is read; create the target's folder."""
    if target.suffix != ".parquet":
        raise ConfigError(f"{target} does not end in .parquet: name a Parquet file to write")
    if target.exists():
        raise ConfigError(f"{target} exists already: name another file, or remove it")
    if options.group_size is not None and options.group_size < 1:
        raise ConfigError(
            f"--group-size {options.group_size} is below 1: give the number of completions per "
            "prompt"
        )
    try:
        target.parent.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise ConfigError(
            f"{target}: its folder cannot be created ({single_line(error, 120)}): name another file"
        ) from error


def _rollouts_of(
    paths: Sequence[Path], framework: Format, options: Options
) -> tuple[list[Rollout], dict[Path, DamagedFile]]:
    """Read all files; return their rows, and an error for each file that cannot be read."""
    rollouts: list[Rollout] = []
    damaged: dict[Path, DamagedFile] = {}
    for path in paths:
        try:
            rollouts += list(framework.read(path, options))
        except DamagedFile as error:
            damaged[path] = error
        except (KeyError, TypeError, ValueError, OSError) as error:
            if isinstance(error, ConfigError):
                raise
            reason = single_line(f"{type(error).__name__}: {error}", 120)
            damaged[path] = DamagedFile(
                f"{path} is not as {framework.name} writes it ({reason}): choose another --from"
            )
    if damaged and not rollouts:
        raise next(iter(damaged.values()))
    if rollouts and all(row.fault.startswith(NOT_AS_WRITTEN) for row in rollouts):
        reason = rollouts[0].fault.removeprefix(NOT_AS_WRITTEN).strip(" ()")
        raise ConfigError(
            f"{rollouts[0].path} is not as {framework.name} writes it ({reason:.120}): choose "
            "another --from"
        )
    return rollouts, damaged


def _joined_turns(source: Path, rows: Sequence[Rollout]) -> list[Rollout]:
    """Join rows that are turns of one rollout, separately for each run and policy."""
    policies: dict[tuple[str, str | None], list[Rollout]] = {}
    for row in rows:
        policies.setdefault((row.run, row.policy_version), []).append(row)
    result = []
    for policy_rows in policies.values():
        fields = dict.fromkeys(name for row in policy_rows for name in row.possible_ids)
        columns: dict[str, list[Any]] = {
            name: [row.possible_ids.get(name) for row in policy_rows] for name in fields
        }
        # verl names the turn of each row. If all rows have the same turn, rows with the same name
        # are different rollouts.
        turns = None if len({*columns.get("turn", ())}) == 1 else find_turns(source, columns)
        if turns is None:
            result += policy_rows
            continue
        columns["advantage"] = [row.advantage for row in policy_rows]
        rewards = [row.reward for row in policy_rows]
        places = [f"{row.path.name} {row.place}" for row in policy_rows]
        rewards = shared_rewards(source, turns, rewards, columns, places)
        for row, reward in zip(policy_rows, rewards, strict=True):
            row.reward = reward
        result += joined(policy_rows, turns)
    return result


def _fault(rollout: Rollout) -> str:
    """Return the reason why a rollout is unusable; empty if it is usable.

    A turn may have no token that counts in the loss, if another turn of the rollout has some.
    """
    faults = [_row_fault(row) for row in rollout.turns]
    if "" in faults:
        faults = [fault for fault in faults if fault != NO_SCORED_TOKEN]
    return next(filter(None, faults), "")


def _row_fault(rollout: Rollout) -> str:
    """Return the reason why the content of a row makes it unusable; empty if it is usable."""
    if not is_number(rollout.reward):
        return "its reward is not a finite number"
    if not is_number(rollout.reward, MAX_REWARD):
        return f"its reward is larger than {MAX_REWARD:g}, so its square overflows"
    texts = (rollout.group, rollout.policy_version, rollout.prompt, rollout.completion)
    if SURROGATE.search(json.dumps(texts, ensure_ascii=False, default=str)):
        return (
            "a text contains a lone surrogate (half a character), which cannot be written to a file"
        )
    if rollout.completion_ids is None:
        if rollout.completion == "" and rollout.ended is False:
            return "its completion was cut before its first token"
        for name, fault_of in (("prompt", prompt_fault), ("completion", completion_fault)):
            if fault := fault_of(getattr(rollout, name)):
                return f"its {name} {fault}"
        return ""
    if not rollout.completion_ids or not rollout.prompt_ids:
        return "it has no prompt or no completion tokens"
    if fault := ids_fault(rollout.prompt_ids) or ids_fault(rollout.completion_ids):
        return f"it {fault}"
    length = len(rollout.completion_ids)
    for name in ("loss_mask", "logprobs"):
        values = getattr(rollout, name)
        if isinstance(values, list) and len(values) != length:
            return f"{name} is not as long as the completion"
        if per_token_fault(values, length):
            return f"{name} contains a value that is not a finite number"
    if rollout.loss_mask is not None and not any(rollout.loss_mask):
        return NO_SCORED_TOKEN
    return ""


def _equally_logged(rows: list[Rollout], notes: list[str]) -> list[Rollout]:
    """Make all rows have the same fields and types, which `mse` requires.

    Prompts are either texts or lists of messages, and so are completions. If rows differ in this
    type, the rows with the less common type are left out. Token ids and log-probabilities can be
    missing in some rows. If at least half of the rows have such a field, the rows without it are
    left out. If fewer rows have the field, it is dropped from all rows.
    """
    for name in ("prompt", "completion"):
        types = [{TYPE_NOUNS[type(getattr(x, name))] for x in row.turns} for row in rows]
        kinds = Counter(kind for row_kinds in types for kind in row_kinds)
        if len(kinds) > 1:
            commonest = kinds.most_common(1)[0][0]
            for row, row_kinds in zip(rows, types, strict=True):
                if other := row_kinds - {commonest}:
                    row.left_out = f"its {name} is {min(other)}, but in most rows it is {commonest}"
            rows = sieve.remaining_rows(rows)
    for name in ("completion_ids", "logprobs"):
        lacking = [row for row in rows if any(getattr(x, name) is None for x in row.turns)]
        if 0 < len(lacking) <= len(rows) / 2:
            for row in lacking:
                row.left_out = f"it has no {name}, but other rows have it"
            rows = sieve.remaining_rows(rows)
        elif 0 < len(lacking) < len(rows):
            notes.append(f"{name} not written: {len(lacking)} of {len(rows)} rows lack it")
            for row in (turn for rollout in rows for turn in rollout.turns):
                setattr(row, name, None)
    return rows


def _write(
    target: Path, groups: list[list[Rollout]], exact: bool, metadata: dict[str, str]
) -> None:
    """Write the rows to a Parquet file, and omit columns that are empty in all rows.

    If rollouts have several turns, each turn is a row. It has its turn number, and the name and the
    reward of the rollout. The file's metadata contains two numbers that `advise` and `mse` read:
    the number of rollouts per training step, and the number of updates of the policy that wrote the
    rows.
    """
    import pyarrow
    from pyarrow import parquet

    whole = [rollout for group in groups for rollout in group]
    rollouts = [turn for rollout in whole for turn in rollout.turns]
    names = [name for name in COLUMNS if exact or name not in ("prompt_ids", "completion_ids")]
    columns: dict[str, list[Any]] = {
        name: [getattr(rollout, name, None) for rollout in rollouts] for name in names
    }
    for name, kind in (("loss_mask", int), ("logprobs", float)):
        columns[name] = [
            values if values is None else [kind(value) for value in values]
            for values in columns[name]
        ]
    columns["prompt_id"] = [
        group[0].group for group in groups for rollout in group for _ in rollout.turns
    ]
    columns["reward"] = [rollout.reward for rollout in whole for _ in rollout.turns]
    if len(whole) < len(rollouts):
        columns["rollout_id"] = [
            f"{place} {rollout.rollout_id or rollout.sample or ''}".strip()
            for place, rollout in enumerate(whole)
            for _ in rollout.turns
        ]
        columns["turn"] = [turn for rollout in whole for turn in range(len(rollout.turns))]
    columns = {
        name: values for name, values in columns.items() if any(x is not None for x in values)
    }
    # The column is dropped if some values are unknown. Readers then count a completion as ended if
    # it has the end-of-sequence token.
    if any(value is None for value in columns.get("ended", ())):
        del columns["ended"]
    table = pyarrow.table(columns)
    if metadata:
        table = table.replace_schema_metadata(metadata)
    with atomic_write(target) as staged:
        parquet.write_table(table, staged)
