"""Selection of the rows that a conversion keeps: one policy, no copies, grouped by prompt.

The steps run in this order: remove copies, keep one attempt of each batch that a resumed run wrote
several times, choose one run, choose one policy, and form groups. Each step writes a reason into
the rows that it leaves out, and returns the remaining rows.

Definition of a copy: **if the framework names rows, two rows with the same name and identical
contents are copies. If it does not, a row is a copy if its complete group also occurs in another
file. Equal completions of a group in one file are separate samples, and all of them count**,
because two samples of a short answer can have the same tokens and even the same log-probabilities.
"""

from __future__ import annotations

import hashlib
import re
from collections import Counter
from collections.abc import Collection, Sequence
from pathlib import Path
from statistics import median_high

from grpo_ustat.config.schema import ConfigError
from grpo_ustat.logs.pairing import updates_away
from grpo_ustat.logs.rows import MIN_COMPLETIONS, Rollout

COPY = "a copy of another row that is counted"


def remaining_rows(rows: Sequence[Rollout]) -> list[Rollout]:
    """Return the rows that have not been left out."""
    return [row for row in rows if not row.left_out]


def copy_digest(row: Rollout) -> bytes:
    """Compute a digest of the fields that are equal in all copies of a row."""
    shared = (
        row.run, row.policy_version, row.group, row.prompt_ids or row.prompt,
        row.completion_ids or row.completion, row.logprobs, row.reward,
        [(x.prompt_ids or x.prompt, x.completion_ids or x.completion, x.logprobs)
         for x in row.later],
    )  # fmt: skip
    return hashlib.blake2b(repr(shared).encode(), digest_size=16).digest()


def without_copies(rows: Sequence[Rollout]) -> list[Rollout]:
    """Leave out copies, as defined in the module docstring.

    If a run has a separate log of the rows on which it trained, all its other rows are left out
    too.
    """
    contents = [copy_digest(row) for row in rows]
    shipped: dict[str, set[str | bytes]] = {}
    for row, digest in zip(rows, contents, strict=True):
        if not row.arrived:
            shipped.setdefault(row.run, set()).add(row.sample or digest)
    named: set[tuple[str, str, bytes]] = set()
    nameless: dict[tuple[str, str | None, str], dict[Path, list[tuple[Rollout, bytes]]]] = {}
    for row, digest in zip(rows, contents, strict=True):
        if row.arrived and row.run in shipped:
            reason = COPY if (row.sample or digest) in shipped[row.run] else row.untrained
            row.left_out = reason or "in folder all but not in effective: it was not trained on"
        elif row.sample is None:
            files = nameless.setdefault((row.run, row.policy_version, row.group), {})
            files.setdefault(row.path, []).append((row, digest))
        elif (row.run, row.sample, digest) in named:
            row.left_out = COPY
        else:
            named.add((row.run, row.sample, digest))
    for files in nameless.values():
        groups: list[Counter[bytes]] = []
        for members in sorted(files.values(), key=len, reverse=True):
            group = Counter(digest for _, digest in members)
            if any(group <= other for other in groups):
                for row, _ in members:
                    row.left_out = COPY
            else:
                groups.append(group)
    return remaining_rows(rows)


def last_written(rows: Sequence[Rollout]) -> list[Rollout]:
    """Keep only one attempt of each batch that a resumed run wrote several times.

    A new attempt begins where a row name occurs a second time. The kept attempt is the last one
    that has at least half as many rows as the largest attempt. A later attempt with fewer rows is
    assumed to be incomplete.
    """
    attempts: dict[tuple[str, str], list[dict[str, Rollout]]] = {}
    for row in rows:
        if row.batch is not None and row.sample is not None:
            batch_attempts = attempts.setdefault((row.run, row.batch), [{}])
            if row.sample in batch_attempts[-1]:
                batch_attempts.append({})
            batch_attempts[-1][row.sample] = row
    for batch_attempts in attempts.values():
        most = max(map(len, batch_attempts))
        last = max(k for k, attempt in enumerate(batch_attempts) if 2 * len(attempt) >= most)
        for row in (row for attempt in batch_attempts[:last] for row in attempt.values()):
            row.left_out = "written again later, after the run was resumed from an earlier step"
        for row in (row for attempt in batch_attempts[last + 1 :] for row in attempt.values()):
            row.left_out = (
                "written again with less than half as many rows as the largest attempt, so this "
                "attempt is incomplete"
            )
    return remaining_rows(rows)


def of_one_run(rows: Sequence[Rollout], version: str | None) -> list[Rollout]:
    """Keep only the rows of the run that wrote the last usable row."""
    usable = [
        row for row in rows
        if not row.untrained and not row.fault and version in (None, row.policy_version)
    ]  # fmt: skip
    if not usable:
        return list(rows)
    run = usable[-1].run
    for row in rows:
        if row.run != run:
            other = f"of another run than {run}, which is kept (to keep it, name its folder)"
            row.left_out = row.untrained or other
    return remaining_rows(rows)


def rollouts_of_step(rows: Sequence[Rollout]) -> int | None:
    """Return the median number of rollouts per training step; None if steps are not logged.

    If most groups have the same size, the median is rounded to a multiple of this size. The
    rounding corrects for a few missing rows.
    """
    steps = Counter(row.step for row in rows if row.step is not None)
    if not steps:
        return None
    groups = Counter((row.step, row.group) for row in rows)
    sizes = Counter(groups.values())
    size = max(sizes, key=lambda group_size: (group_size * sizes[group_size], group_size))
    rows_of_step = median_high(steps.values())
    if 2 * sizes[size] <= len(groups):
        return rows_of_step
    return max(1, round(rows_of_step / size)) * size


def of_one_policy(
    rows: Sequence[Rollout], version: str | None, checkpoints: Collection[int] = ()
) -> list[Rollout]:
    """Keep only the rows of one policy.

    This is the policy `version` if it is given. Otherwise, only policies with enough rows are
    considered: at least half as many as the policy with the most rows, because the last step of a
    log may be incomplete. Groups with a single row do not count here. If the run has checkpoints,
    the policy that is the fewest updates away from a checkpoint is kept. If several policies are
    equally near, or if there are no checkpoints, the last of them is kept.
    """
    groups = Counter((row.policy_version, row.group) for row in rows)
    sizes: Counter[str | None] = Counter()
    for (policy, _), size in groups.items():
        sizes[policy] += size if size > 1 else 0
    if version is not None and version not in sizes:
        versions = sorted(sizes, key=_age)
        raise ConfigError(
            f"--version {version}: no usable row has this version; the versions are "
            + (
                f"{versions[0]} to {versions[-1]}"
                if len(versions) > 1
                else ", ".join(map(str, versions))
            )
            + "".join(
                f": use --version '{name}'"
                for name in versions
                if name and name.split()[-1] == version
            )
        )
    most = max(sizes.values(), default=0)
    steps = {row.policy_version: row.policy_step for row in rows}
    complete = [name for name in sizes if 2 * sizes[name] >= most]
    chosen = version or max(
        complete, key=lambda name: (-updates_away(steps[name], checkpoints), _age(name))
    )
    is_nearest = version is None and checkpoints and steps[chosen] is not None
    nearest = " because it is nearest to a checkpoint" if is_nearest else ""
    for row in rows:
        if row.policy_version != chosen:
            row.left_out = (
                f"of another policy than {chosen}, which is kept{nearest} (--version to change it)"
            )
    return remaining_rows(rows)


def _age(version: str | None) -> tuple[list[int], str]:
    """Return the sort key of a policy version: the numbers in its text, then the text itself."""
    return [int(number) for number in re.findall(r"\d+", version or "")], version or ""


def in_groups(rows: Sequence[Rollout]) -> list[list[Rollout]]:
    """Group the completions by prompt.

    Within a step, all rows of a group must have the same prompt; other groups are left out. Groups
    with the same prompt are merged. Prompts with fewer completions than `mse` needs are left out.
    If no prompt has that many, only prompts with a single completion are left out.
    """
    groups: dict[tuple[str | None, str], list[Rollout]] = {}
    for row in rows:
        groups.setdefault((row.step, row.group), []).append(row)
    prompts: dict[str, list[Rollout]] = {}
    for group in groups.values():
        texts = {repr(row.prompt_ids or row.prompt) for row in group}
        if len(texts) == 1:
            prompts.setdefault(texts.pop(), []).extend(group)
        else:
            for row in group:
                row.left_out = "its group has several prompts (--group-size may be wrong)"
    largest = max(map(len, prompts.values()), default=0)
    least = MIN_COMPLETIONS if largest >= MIN_COMPLETIONS else 2
    for group in prompts.values():
        for row in group if len(group) < least else ():
            few = f"its prompt has fewer than {least} completions"
            row.left_out = "a group of one completion" if len(group) == 1 else few
    return [group for group in prompts.values() if len(group) >= least]
