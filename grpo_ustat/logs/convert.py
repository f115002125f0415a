"""Convert a framework's rows to one Parquet file, and count the rows that are left out."""

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
    per_token_fault,
    prompt_fault,
)
from grpo_ustat.logs.turns import check_rollouts
from grpo_ustat.records import MAX_REWARD, is_number
from grpo_ustat.runs.files import atomic_write
from grpo_ustat.terminal.streams import SURROGATE, single_line

COLUMNS = (
    "prompt_id", "prompt_ids", "completion_ids", "reward", "ended", "loss_mask", "logprobs",
    "policy_version", "prompt", "completion",
)  # fmt: skip

BIAS = (
    "rows were left out because of their content: if this depends on the reward, the accuracy and "
    "gradient of the remaining rows are biased"
)
TYPE_NOUNS = {str: "text", list: "messages", type(None): "null"}


@dataclass(frozen=True)
class Conversion:
    """Result of a conversion, which keeps the rows of one policy."""

    # Name of the framework.
    name: str
    # Number of files that were read, and number of rows in these files.
    files: int
    rows: int
    # Number of rows that were written.
    kept: int
    # Number of different prompts in the written rows.
    groups: int
    # True if the token ids are logged.
    exact: bool
    # Number of rows that were left out, by reason.
    reasons: Counter[str]
    # Position of the first row that was left out, by reason.
    example: dict[str, str]
    # Remarks for the user.
    notes: tuple[str, ...] = ()
    # Number of rollouts per training step in the run; None: not logged.
    step_rollouts: int | None = None
    # Largest number of completions for any prompt.
    largest: int = 0
    # File with the kept rows and the nearest checkpoint; None if the run has no checkpoint.
    pairing: Pairing | None = None

    @property
    def is_for_mse(self) -> bool:
        """True if at least one prompt has as many completions as `mse` needs."""
        return self.largest >= MIN_COMPLETIONS

    def lines(self) -> list[str]:
        """Return lines for the user: number of kept rows, reasons for left-out rows, remarks."""
        tokens = "token-exact" if self.exact else "texts, to be tokenised again: inexact"
        lines = [
            f"{self.name}: {self.kept} of {self.rows} rows of {self.files} files taken, "
            f"{self.groups} prompts; {tokens}."
        ]
        for reason, count in self.reasons.most_common():
            lines.append(f"  {count} left out: {reason} (first: {self.example[reason]})")
        if self.pairing is not None:
            lines.append(f"  {self.pairing.line()}")
        lines += [f"  {note}" for note in self.notes]
        if self.step_rollouts is not None:
            lines.append(f"  a training step of this run has {self.step_rollouts} rollouts")
        if not self.is_for_mse:
            lines.append(
                f"  no prompt has the {MIN_COMPLETIONS} completions for mse: only advise can "
                "use the rewards"
            )
        elif self.groups < MIN_PROMPTS:
            lines.append(
                f"  there is only one prompt, as in TRL's default batch on one GPU: to find the "
                f"best G, log {MIN_PROMPTS} or more"
            )
        return lines


def convert(source: Path, framework: Format, target: Path, options: Options) -> Conversion:
    """Read a framework's files and write the rows that a study can use.

    The rows that are left out are counted by reason. Rows are left out if the framework did not
    train on them, or if they cannot be used, for example because of an infinite reward or a lone
    surrogate. `sieve` leaves out copies, batches that were written again, rows of other runs and
    other policies, groups with several prompts, and prompts with few completions.

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
            f"{source} contains no {pattern}, the files of {framework.name}: name the folder that "
            "contains them, or another format with --from"
        )
    paths, misnamed = split_by_name(source, framework, paths)
    notes = [
        f"not read: {path}, because {framework.name} writes no file with such a name"
        for path in misnamed
    ]
    notes += [f"not read: {path}, which is packed: unpack it" for path in packed]
    rollouts, damaged = _rollouts_of(paths, framework, replace(options, source=source))
    notes += [
        f"not read: {str(error).removesuffix(': choose another --from')}"
        for error in damaged.values()
    ]
    for row in rollouts:
        row.fault = row.fault or _fault(row)
        if row.untrained.startswith(EVALUATION) or row.fault.startswith(NOT_AS_WRITTEN):
            row.left_out = row.untrained or row.fault
    _check_turns(source, sieve.remaining_rows(rollouts))
    rows = sieve.without_copies(sieve.remaining_rows(rollouts))
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
    left_out = [row for row in rollouts if row.left_out]
    reasons = Counter(row.left_out for row in left_out)
    # Reversed, so that the dictionary keeps the first row with each reason.
    example = {row.left_out: f"{row.path} {row.place}" for row in reversed(left_out)}
    if not usable:
        if options.reward and all(reason.startswith("--reward") for reason in reasons):
            raise ConfigError(f"{next(iter(reasons))}, in {source}")
        counts = "; ".join(f"{count} {reason}" for reason, count in reasons.most_common(3))
        raise ConfigError(
            f"{source}: none of {len(rollouts)} rows can be used: {counts or 'there are no rows'}"
        )
    remarks = Counter(row.note for row in usable if row.note)
    notes += [f"{count} rows kept: {remark}" for remark, count in remarks.items()]
    if any(row.fault for row in left_out):
        notes.append(BIAS)
    exact = all(row.is_exact for row in usable)
    step = usable[0].policy_step
    pairing = pairing_of(usable[0].path.stem, step, checkpoints)
    metadata = {STEP_ROLLOUTS: step_rollouts, POLICY_STEP: step}
    _write(target, groups, exact, {key: str(x) for key, x in metadata.items() if x is not None})
    return Conversion(
        framework.name, len(paths) - len(damaged), len(rollouts), len(usable), len(groups), exact,
        reasons, example, tuple(notes), step_rollouts, max(map(len, groups)), pairing,
    )  # fmt: skip


def _check(target: Path, options: Options) -> None:
    """Check target and group size before any file is read, and create the target's folder."""
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


def _check_turns(source: Path, rows: Sequence[Rollout]) -> None:
    """Call `check_rollouts` on the rows of each run and policy."""
    policies: dict[tuple[str, str | None], list[Rollout]] = {}
    for row in rows:
        policies.setdefault((row.run, row.policy_version), []).append(row)
    for policy_rows in policies.values():
        fields = dict.fromkeys(name for row in policy_rows for name in row.possible_ids)
        check_rollouts(
            source,
            [row.prompt_ids or row.prompt for row in policy_rows],
            {name: [row.possible_ids.get(name) for row in policy_rows] for name in fields},
        )


def _fault(rollout: Rollout) -> str:
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
        return "loss_mask is 0 on every token"
    return ""


def _equally_logged(rows: list[Rollout], notes: list[str]) -> list[Rollout]:
    """Make all rows have the same fields and types, which `mse` requires.

    All remaining prompts have the same type (text or messages), and all remaining completions also
    have one type. Rows with a less common type are left out. Token ids and log-probabilities are
    each present in all rows or in none. If at least half of the rows have such a field, the rows
    without it are left out. If fewer rows have the field, it is dropped.
    """
    for name in ("prompt", "completion"):
        kinds = Counter(TYPE_NOUNS[type(getattr(row, name))] for row in rows)
        if len(kinds) > 1:
            commonest = kinds.most_common(1)[0][0]
            for row in rows:
                if (kind := TYPE_NOUNS[type(getattr(row, name))]) != commonest:
                    row.left_out = f"its {name} is {kind}, but in most rows it is {commonest}"
            rows = sieve.remaining_rows(rows)
    for name in ("completion_ids", "logprobs"):
        lacking = [row for row in rows if getattr(row, name) is None]
        if 0 < len(lacking) <= len(rows) / 2:
            for row in lacking:
                row.left_out = f"it has no {name}, but other rows have"
            rows = sieve.remaining_rows(rows)
        elif 0 < len(lacking) < len(rows):
            notes.append(f"{name} not written: {len(lacking)} of {len(rows)} rows lack it")
            for row in rows:
                setattr(row, name, None)
    return rows


def _write(
    target: Path, groups: list[list[Rollout]], exact: bool, metadata: dict[str, str]
) -> None:
    """Write the rows to a Parquet file, and omit columns that are empty in all rows.

    The file's metadata contains the number of rollouts per step and the update count of the policy
    that wrote the rows. `advise` and `mse` read both numbers.
    """
    import pyarrow
    from pyarrow import parquet

    rollouts = [rollout for group in groups for rollout in group]
    names = [name for name in COLUMNS if exact or name not in ("prompt_ids", "completion_ids")]
    columns: dict[str, list[Any]] = {
        name: [getattr(rollout, name, None) for rollout in rollouts] for name in names
    }
    for name, kind in (("loss_mask", int), ("logprobs", float)):
        columns[name] = [
            values if values is None else [kind(value) for value in values]
            for values in columns[name]
        ]
    columns["prompt_id"] = [group[0].group for group in groups for _ in group]
    columns = {
        name: values for name, values in columns.items() if any(x is not None for x in values)
    }
    # If this column is missing, a completion counts as ended if it has the end-of-sequence token.
    if any(value is None for value in columns.get("ended", ())):
        del columns["ended"]
    table = pyarrow.table(columns)
    if metadata:
        table = table.replace_schema_metadata(metadata)
    with atomic_write(target) as staged:
        parquet.write_table(table, staged)
