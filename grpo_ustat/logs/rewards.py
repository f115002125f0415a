"""Statistics that need only rewards: zero-variance groups by group size, and reward variances."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from grpo_ustat.config.schema import ConfigError
from grpo_ustat.estimators.intervals import Interval, clustered_wilson
from grpo_ustat.estimators.ustatistic import zero_variance_share
from grpo_ustat.logs.rows import KNOWN_COLUMNS, read_columns
from grpo_ustat.logs.turns import check_rollouts, check_turn_numbers, is_id
from grpo_ustat.records import MAX_REWARD, Array, is_number

GROUP_COLUMNS = ("prompt_id", "prompt", "group_id", "group", "question")
LOG_SUFFIXES = (".parquet", ".csv", ".jsonl")


@dataclass(frozen=True)
class RewardGroups:
    """Rewards of completions, grouped by prompt."""

    # Name of the column with the rewards.
    column: str
    # Finite rewards of each prompt, at least two per prompt.
    groups: Sequence[Array]
    # Number of prompts that are left out because they have only one completion.
    single: int
    # Names of all columns in the file.
    columns: Sequence[str] = ()


def read_rewards(path: Path, column: str | None = None) -> RewardGroups:
    """Read the rewards of a file, grouped by prompt.

    Args:
        path: Parquet, CSV or JSON Lines file with a column that identifies the prompt (`prompt_id`,
            `prompt`, `group_id`, `group` or `question`) and a column of rewards.
        column: name of the column of rewards. None: `reward` if it exists, otherwise the only
            numeric column that is not a known column of a log.
    """
    columns = read_columns(path)
    check_rollouts(path, columns.get("prompt_ids", columns.get("prompt")), columns)
    prompt = next((name for name in GROUP_COLUMNS if name in columns), None)
    if prompt is None:
        raise ConfigError(
            f"{path} has columns {', '.join(columns)} and none of {', '.join(GROUP_COLUMNS)}: "
            "rename the column that identifies the prompt"
        )
    if column is None:
        numeric = [
            name for name, values in columns.items()
            if name not in (*KNOWN_COLUMNS, *GROUP_COLUMNS) and not is_id(name)
            and any(isinstance(x, int | float) for x in values)
        ]  # fmt: skip
        if "reward" not in numeric and len(numeric) != 1:
            raise ConfigError(
                f"{path} has {len(numeric)} columns that may be rewards "
                f"({', '.join(numeric) or 'no other column is numeric'}): name one with "
                "reward=COLUMN"
            )
        column = "reward" if "reward" in numeric else numeric[0]
    elif column not in columns:
        raise ConfigError(f"{path} has no column {column}: choose from {', '.join(columns)}")
    rewards, prompts = columns[column], columns[prompt]
    steps = columns.get("step", [None] * len(rewards))
    groups: dict[str, list[float]] = {}
    keys = [
        json.dumps(key, sort_keys=True, default=str) for key in zip(steps, prompts, strict=True)
    ]
    check_turn_numbers(path, prompt, keys, columns)
    for row, (value, name, key) in enumerate(zip(rewards, prompts, keys, strict=True)):
        if not is_number(value, MAX_REWARD):
            raise ConfigError(
                f"{path} row {row} (from 0): {column} is {value!r:.40}, not a finite number "
                f"of at most {MAX_REWARD:g}: correct or drop it"
            )
        if name is None:
            raise ConfigError(f"{path} row {row} (from 0): {prompt} is null: correct or drop it")
        groups.setdefault(key, []).append(float(value))
    rewards_by_prompt = [np.array(group) for group in groups.values() if len(group) > 1]
    if not rewards_by_prompt:
        raise ConfigError(
            f"{path}: no {prompt} has two completions among {len(rewards)} rows: log groups of two "
            "or more"
        )
    return RewardGroups(
        column, rewards_by_prompt, len(groups) - len(rewards_by_prompt), list(columns)
    )


def expected_zero_variance(groups: Sequence[Array], size: int) -> Interval | None:
    """Estimate the share of zero-variance groups of a given size, with an interval over prompts.

    Args:
        groups: rewards by prompt.
        size: group size G; prompts with fewer completions are left out.

    Returns:
        The share, or None if fewer than two prompts have at least G completions.
    """
    values = [zero_variance_share(group[None], size)[0] for group in groups if len(group) >= size]
    if len(values) < 2:
        return None
    return clustered_wilson(np.array(values))


def share_text(share: Interval) -> str:
    """Format a share and its interval in percent.

    >>> share_text(Interval(0.25, 0.1, 0.5))
    '25 % [10 %, 50 %]'
    """
    estimate, low, high = (f"{100 * value:.0f} %" for value in share)
    return f"{estimate} [{low}, {high}]"


def reward_lines(rewards: RewardGroups, group_size: int | None) -> list[str]:
    """Return lines with the number of rewards, the shares of zero-variance groups, and variances.

    Args:
        rewards: rewards by prompt.
        group_size: group size in use; None if unknown.
    """
    groups = rewards.groups
    lengths = [len(group) for group in groups]
    span = (
        f"{min(lengths)}" if min(lengths) == max(lengths) else f"{min(lengths)} to {max(lengths)}"
    )
    single = f"; {rewards.single} prompts with only one completion are left out" * bool(
        rewards.single
    )
    lines = [
        f"{len(groups)} prompts with {span} completions each, rewards of {rewards.column}{single}."
    ]
    sizes = sorted({2, 4, 8, 16, 32, 64} | ({group_size} if group_size else set()))
    shares = {size: expected_zero_variance(groups, size) for size in sizes}
    parts = [
        f"G = {size}: {share_text(share)}" for size, share in shares.items() if share is not None
    ]
    if parts:
        lines.append(
            "Zero-variance groups (frac_reward_zero_std), which give no gradient: "
            f"{', '.join(parts)}."
        )
    means_P = np.array([group.mean() for group in groups])
    within_P = np.array([group.var(ddof=1) for group in groups])
    noise = float(np.mean([v / n for v, n in zip(within_P, lengths, strict=True)]))
    between = "unknown from a single prompt"
    if len(groups) > 1:
        between = f"{max(float(means_P.var(ddof=1)) - noise, 0.0):.3g}"
    lines.append(
        f"Mean reward {means_P.mean():.3g}; variance within prompts {within_P.mean():.3g}, "
        f"variance of prompts' expected rewards {between}."
    )
    return lines
