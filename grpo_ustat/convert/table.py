"""From rows of any framework to the one Parquet file, and what was taken, left out and why."""

from __future__ import annotations

import json
import math
import re
from collections import Counter
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from grpo_ustat.config.schema import ConfigError
from grpo_ustat.convert.formats import Format, Options, Rollout, files_of
from grpo_ustat.runs.files import atomic_write
from grpo_ustat.streams import HALF

COLUMNS = (
    "prompt_id", "prompt_ids", "completion_ids", "reward", "ended", "loss_mask", "logprobs",
    "policy_version", "prompt", "completion",
)  # fmt: skip


@dataclass(frozen=True)
class Conversion:
    """What became of a framework's rows: those of one policy are kept.

    Attributes:
        name: of the framework.
        files: that were read.
        rows: that they hold.
        kept: rows that were written.
        groups: prompts that they belong to.
        exact: whether their tokens are known.
        reasons: how many rows were left out, by reason.
        example: place of the first such row, by reason.
    """

    name: str
    files: int
    rows: int
    kept: int
    groups: int
    exact: bool
    reasons: Counter[str]
    example: dict[str, str]

    def lines(self) -> list[str]:
        """What a person reads: what was taken, then each reason for leaving rows out."""
        tokens = "token-exact" if self.exact else "texts, which are tokenised again: inexact"
        lines = [
            f"{self.name}: {self.kept} of {self.rows} rows of {self.files} files taken, "
            f"{self.groups} prompts; {tokens}."
        ]
        for reason, count in self.reasons.most_common():
            lines.append(f"  {count} left out: {reason} (first: {self.example[reason]})")
        return lines


def convert(source: Path, one: Format, target: Path, options: Options) -> Conversion:
    """Read a framework's files and write the rows that a study can use.

    Left out, and counted by reason: rewards that are not finite, half characters, completions or
    prompts without a token, per-token columns of another length, groups of several policies or
    prompts, groups of one, and groups of another policy than the one that is kept.

    Args:
        source: a file or a folder.
        one: the framework's format.
        target: a Parquet file, which must not be there.
        options: see `Options`.

    Raises:
        ConfigError: no file fits, a file cannot be read, the target is there, or no row is left.
    """
    if target.suffix != ".parquet":
        raise ConfigError(f"{target}: the converted file ends in .parquet")
    if target.exists():
        raise ConfigError(f"{target} is there already: name another file, or remove it")
    paths = files_of(source, one)
    if not paths:
        raise ConfigError(f"{source} holds no {one.pattern}, as {one.name} writes them")
    rollouts, reasons, example = [], Counter[str](), dict[str, str]()
    groups: dict[str, list[Rollout]] = {}

    def leave_out(rollout: Rollout, reason: str) -> None:
        reasons[reason] += 1
        example.setdefault(reason, rollout.place)

    for path in paths:
        try:
            rollouts += one.read(path, options)
        except (KeyError, TypeError, ValueError, OSError) as error:
            if isinstance(error, ConfigError):
                raise
            reason = f"{type(error).__name__}: {error}"
            raise ConfigError(
                f"{path} is not as {one.name} writes it ({reason:.120}): choose another --from"
            ) from error
    for rollout in rollouts:
        reason = rollout.fault or _fault(rollout)
        if reason:
            leave_out(rollout, reason)
        else:
            groups.setdefault(rollout.prompt_id, []).append(rollout)
    versions = {one.policy_version for group in groups.values() for one in group}
    version = options.version or max(versions, key=_age, default=None)
    for name, group in list(groups.items()):
        own = {rollout.policy_version for rollout in group}
        prompts = {str(rollout.prompt_ids or rollout.prompt) for rollout in group}
        reason = ""
        if len(own) > 1:
            reason = "its group was written by several policies"
        elif version not in own:
            reason = f"of another policy than {version}, which is kept (--version takes another)"
        elif len(prompts) > 1:
            reason = "its group has several prompts (group_size= may be wrong)"
        elif len(group) == 1:
            reason = "a group of one completion"
        if reason:
            for rollout in groups.pop(name):
                leave_out(rollout, reason)
    usable = [rollout for group in groups.values() for rollout in group]
    if not usable:
        why = "; ".join(f"{count} {reason}" for reason, count in reasons.most_common(3))
        raise ConfigError(f"{source}: none of {len(rollouts)} rows can be used: {why or 'no rows'}")
    exact = all(rollout.completion_ids is not None for rollout in usable)
    _write(target, usable, exact)
    return Conversion(
        one.name, len(paths), len(rollouts), len(usable), len(groups), exact, reasons, example
    )


def _age(version: str | None) -> tuple[list[int], str]:
    """The numbers of a policy's version, by which the last one is found."""
    return [int(one) for one in re.findall(r"\d+", version or "")], version or ""


def _fault(rollout: Rollout) -> str:
    """Why a row cannot be used by itself; empty where it can."""
    if not math.isfinite(rollout.reward):
        return "its reward is not a finite number"
    texts = (rollout.prompt_id, rollout.policy_version, rollout.prompt, rollout.completion)
    if HALF.search(json.dumps(texts, ensure_ascii=False, default=str)):
        return "a text has half of a character, which no file can hold"
    if rollout.completion_ids is None:
        return "" if rollout.completion else "its completion is empty"
    if not rollout.completion_ids or not rollout.prompt_ids:
        return "it has no prompt or no completion tokens"
    length = len(rollout.completion_ids)
    for name in ("loss_mask", "logprobs"):
        values = getattr(rollout, name)
        if values is not None and len(values) != length:
            return f"{name} is not as long as the completion"
    if rollout.loss_mask is not None and not any(rollout.loss_mask):
        return "loss_mask is 0 on every token"
    if rollout.logprobs is not None and not all(map(math.isfinite, rollout.logprobs)):
        return "a log-probability is not a finite number"
    return ""


def _write(target: Path, rollouts: list[Rollout], exact: bool) -> None:
    """The rows as Parquet; columns that no row has are left out."""
    import pyarrow
    from pyarrow import parquet

    names = [name for name in COLUMNS if exact or name not in ("prompt_ids", "completion_ids")]
    columns: dict[str, list[Any]] = {
        name: [getattr(rollout, name) for rollout in rollouts] for name in names
    }
    columns = {name: x for name, x in columns.items() if any(one is not None for one in x)}
    if any(one is None for one in columns.get("ended", ())):
        del columns["ended"]  # then the end token says it
    target.parent.mkdir(parents=True, exist_ok=True)
    with atomic_write(target) as staged:
        parquet.write_table(pyarrow.table(columns), staged)
