"""Statistics that need only rewards: reward variances, and shares of zero-variance groups.

A group has zero variance if all of its rewards are equal. It then gives no gradient.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from grpo_ustat.config.schema import ConfigError
from grpo_ustat.estimators.intervals import (
    Interval,
    clustered_mean,
    clustered_wilson,
    is_binary,
    jackknife_variance,
    positive_interval,
    tails,
)
from grpo_ustat.estimators.ustatistic import zero_variance_share
from grpo_ustat.logs.reward_forms import GROUP_COLUMNS, ROW_COLUMNS, form_of, step_column
from grpo_ustat.logs.tables import read_table
from grpo_ustat.logs.turns import one_row_per_rollout
from grpo_ustat.records import MAX_REWARD, Array, is_number

# Columns that identify a prompt by its content. If one exists, it is used to find repeated prompts
# instead of the column of prompt ids.
CONTENT_COLUMNS = ("prompt", "prompt_ids")
# Group sizes of the table of shares.
SIZES = (2, 4, 8, 16, 32, 64)
# Minimum number of prompts for the interval of a variance over prompts.
MIN_PROMPTS = 20


@dataclass(frozen=True)
class RewardGroups:
    """Rewards of completions, in groups with the same prompt and the same step."""

    # Name of the column with the rewards, or of several columns.
    column: str
    # Finite rewards of each group, at least two per group.
    groups: Sequence[Array]
    # Number of groups that are left out because they have only one completion.
    single: int
    # Names of all columns in the file.
    columns: Sequence[str] = ()
    # Key of each group's prompt, or of its cluster of prompts. Groups with equal keys are
    # correlated. If empty, all groups have different prompts.
    prompts: Sequence[str] = ()
    # Distinct steps (or policies) at which groups were written, in the order of the file.
    steps: Sequence[Any] = ()
    # Name of the column with the steps; empty if there is none.
    step_name: str = ""
    # Number of empty cells in a table with a column per completion.
    empty: int = 0

    @property
    def group_size(self) -> int | None:
        """Number of completions per group; None if groups have different sizes."""
        sizes = {len(group) for group in self.groups}
        return sizes.pop() if len(sizes) == 1 else None

    @property
    def completions(self) -> int:
        """Total number of completions."""
        return sum(map(len, self.groups))

    @property
    def is_binary(self) -> bool:
        """True if every reward is 0 or 1."""
        return all(map(is_binary, self.groups))

    def by_prompt(self, statistic: Callable[[Array], float], least: int = 2) -> dict[str, float]:
        """Compute a statistic of each group, and average it over the groups of each prompt.

        Args:
            statistic: function of the rewards of a group.
            least: groups with fewer completions are left out.
        """
        prompts = self.prompts or [str(group) for group in range(len(self.groups))]
        values: dict[str, list[float]] = {}
        for prompt, group in zip(prompts, self.groups, strict=True):
            if len(group) >= least:
                values.setdefault(prompt, []).append(float(statistic(group)))
        return {prompt: float(np.mean(of_prompt)) for prompt, of_prompt in values.items()}

    def independent(self, size: int) -> int:
        """Return how many disjoint groups of `size` completions every prompt has at least."""
        prompts = self.prompts or range(len(self.groups))
        counts: dict[Any, int] = {}
        for prompt, group in zip(prompts, self.groups, strict=True):
            if len(group) >= size:
                counts[prompt] = counts.get(prompt, 0) + len(group) // size
        return min(counts.values(), default=1)


def read_rewards(path: Path, column: str | None = None, cluster: str | None = None) -> RewardGroups:
    """Read the rewards of a file, grouped by prompt and step.

    Args:
        path: Parquet, JSON or CSV file in one of the forms of `reward_forms`.
        column: column of rewards, or several; see `form_of`. If None, the column `reward` or
            `rewards` is used. If neither exists, it is the only numeric column that is not a known
            column of a log, or the numbered columns.
        cluster: column that marks correlated prompts, such as variants of one problem: prompts with
            equal values are correlated. If None, prompts with different texts (or different ids, if
            there is no text) are independent.
    """
    columns = read_table(path, GROUP_COLUMNS + ROW_COLUMNS)
    form = form_of(path, columns, column)
    if cluster is not None and cluster not in columns:
        raise ConfigError(f"{path} has no column {cluster}: choose from {', '.join(columns)}")
    if form.kind == "rows":
        columns = one_row_per_rollout(path, columns, list(form.weights))
    step_name = step_column(columns)
    prompts = columns[form.prompt]
    count = len(prompts)
    steps = columns[step_name] if step_name else [None] * count
    keys = [_key(pair) for pair in zip(steps, prompts, strict=True)]
    content = cluster or next((x for x in CONTENT_COLUMNS if x in columns), form.prompt)
    groups: dict[str, list[float]] = {}
    clusters: dict[str, str] = {}
    empty = 0
    for row, key in enumerate(keys):
        if prompts[row] is None or columns[content][row] is None:
            name = form.prompt if prompts[row] is None else content
            raise ConfigError(f"{path} row {row} (from 0): {name} is null: correct or drop the row")
        if isinstance(prompts[row], list) and not _is_prompt(prompts[row]):
            raise ConfigError(
                f"{path} row {row} (from 0): {form.prompt} is a list, {prompts[row]!r:.40}: "
                "write a row per prompt"
            )
        cells = [columns[name][row] for name in form.weights]
        if form.kind == "wide":
            empty += sum(cell is None for cell in cells)
            cells = [cell for cell in cells if cell is not None]
        elif form.kind == "lists":
            cells = _list_of_rewards(path, row, form.name, cells[0])
        values = [_reward(path, row, form.name, cell) for cell in cells]
        if form.kind == "rows":
            weights = form.weights.values()
            values = [sum(w * x for w, x in zip(weights, values, strict=True))]
        else:
            key = f"{row} {key}"
        groups.setdefault(key, []).extend(values)
        clusters[key] = _key(columns[content][row])
    kept = [key for key, group in groups.items() if len(group) > 1]
    if not kept:
        raise ConfigError(
            f"{path}: every {form.prompt} in the {count} rows has only one completion: log two or "
            "more completions per prompt"
        )
    different_steps = list(dict.fromkeys(map(_plain, steps))) if step_name else []
    return RewardGroups(
        form.name, [np.array(groups[key]) for key in kept], len(groups) - len(kept), list(columns),
        [clusters[key] for key in kept], different_steps, step_name or "", empty,
    )  # fmt: skip


def _key(value: Any) -> str:
    """Return a text for a value; equal values have equal texts."""
    return json.dumps(value, sort_keys=True, default=str)


def _is_prompt(values: list[Any]) -> bool:
    """Return True if a list contains the messages of a conversation."""
    return bool(values) and all(isinstance(value, dict) for value in values)


def _plain(value: Any) -> Any:
    """Return a value itself if it can be hashed, and otherwise its text."""
    return value if isinstance(value, str | int | float | None) else _key(value)


def _list_of_rewards(path: Path, row: int, name: str, value: Any) -> list[Any]:
    """Return the list of rewards in a row; raise an error if the value is not a list."""
    if isinstance(value, list):
        return value
    parts = f" with parts {', '.join(map(str, value))}" if isinstance(value, dict) else ""
    raise ConfigError(
        f"{path} row {row} (from 0): {name} is {value!r:.40}{parts}, not a list of rewards: "
        "correct or drop it"
    )


def _reward(path: Path, row: int, name: str, value: Any) -> float:
    """Return a reward as a float; raise an error if it is not a finite number."""
    if is_number(value, MAX_REWARD):
        return float(value)
    raise ConfigError(
        f"{path} row {row} (from 0): {name} is {value!r:.40}, not a finite number of at most "
        f"{MAX_REWARD:g}: correct or drop it"
    )


def expected_zero_variance(rewards: RewardGroups, size: int) -> Interval | None:
    """Estimate the share of zero-variance groups of a given size, with an interval over prompts.

    Args:
        rewards: rewards by prompt.
        size: group size G; groups with fewer completions are left out.

    Returns:
        The share, or None if fewer than two prompts have at least G completions.
    """
    values = rewards.by_prompt(lambda group: zero_variance_share(group[None], size)[0], size)
    if len(values) < 2:
        return None
    return clustered_wilson(np.array([*values.values()]), rewards.independent(size))


def mean_reward(rewards: RewardGroups) -> Interval:
    """Return the mean reward, with an interval over prompts."""
    means_P = np.array([*rewards.by_prompt(np.mean).values()])
    if rewards.is_binary:
        return clustered_wilson(means_P, rewards.independent(1))
    return clustered_mean(means_P[:, None])


def within_variance(rewards: RewardGroups) -> Interval:
    """Return the variance of the rewards of one prompt, averaged over prompts.

    For rewards of 0 and 1, this is the mean of p (1 - p), where p is the success probability of a
    prompt. The estimate is unbiased. For such rewards, twice the variance is the probability that
    two completions have different rewards, so the interval is computed as for a probability.
    """
    values_P = np.array([*rewards.by_prompt(lambda group: group.var(ddof=1)).values()])
    if rewards.is_binary:
        pairs = rewards.independent(2)
        return Interval(*(end / 2 for end in clustered_wilson(2 * values_P, pairs)))
    return clustered_mean(values_P[:, None]).within(0, math.inf)


def between_variance(rewards: RewardGroups) -> Interval:
    """Return the variance of the expected reward between prompts, with a jackknife interval.

    The observed mean rewards of the prompts vary more than the expected rewards, because they have
    sampling noise. The estimate subtracts this noise. There must be at least two prompts; the
    interval is NaN for fewer than 20.

    The coverage of the intervals was simulated with success probabilities from four beta
    distributions, 8 completions per prompt and 300 samples per case. It was .89 to .99 for 20 to
    150 prompts, and .83 for 10 prompts.
    """
    means = rewards.by_prompt(np.mean)
    means_P = np.array([*means.values()])
    counts = dict.fromkeys(means, 0)
    for prompt in rewards.prompts or means:
        counts[prompt] += 1
    noise = rewards.by_prompt(lambda group: group.var(ddof=1) / len(group))
    # The mean of a prompt is an average over its groups, so its noise falls with their number.
    noise_P = np.array([noise[prompt] / counts[prompt] for prompt in means])
    count = len(means_P)
    estimate = max(0.0, float(means_P.var(ddof=1) - noise_P.mean()))
    if count < MIN_PROMPTS:
        return Interval(estimate, math.nan, math.nan)
    sums, squares, noises = (x.sum() - x for x in (means_P, means_P**2, noise_P))
    delete_one_P = (squares - sums**2 / (count - 1)) / (count - 2) - noises / (count - 1)
    variance = float(jackknife_variance(delete_one_P))
    # If the distribution is skewed, a few prompts with extreme means determine the variance. The
    # interval then has fewer degrees of freedom.
    carriers = tails(np.ones((1, count)), [delete_one_P[None]]).carriers
    dof = max(min(carriers, count) - 1, 1.0)
    return positive_interval(estimate, variance, dof).within(0, math.inf)


def share_text(share: Interval) -> str:
    """Format a share and its interval in percent.

    >>> share_text(Interval(0.25, 0.1, 0.5))
    '25 % [10 %, 50 %]'
    """
    estimate, low, high = (f"{100 * value:.0f} %" for value in share)
    return f"{estimate} [{low}, {high}]"


def number_text(value: Interval) -> str:
    """Format a number and its interval, if it has one.

    >>> number_text(Interval(0.25, 0.1, 0.5)), number_text(Interval(0.25, math.nan, math.nan))
    ('0.25 [0.1, 0.5]', '0.25')
    """
    if not math.isfinite(value.low):
        return f"{value.estimate:.3g}"
    return f"{value.estimate:.3g} [{value.low:.3g}, {value.high:.3g}]"


def reward_lines(rewards: RewardGroups, group_size: int | None) -> list[str]:
    """Return lines with the number of rewards, the shares of zero-variance groups, and variances.

    Args:
        rewards: rewards by prompt.
        group_size: group size in use; None if unknown.
    """
    sizes = sorted({*SIZES} | ({group_size} if group_size else set()))
    prompts = len(rewards.by_prompt(np.mean))
    parts = []
    for size in sizes:
        share = expected_zero_variance(rewards, size)
        if share is not None:
            enough = len(rewards.by_prompt(np.mean, size))
            of_some = f" ({enough} prompts)" * (enough < prompts)
            parts.append(f"G = {size}: {share_text(share)}{of_some}")
    lines = [_counts_line(rewards)]
    if parts:
        lines.append(
            "Share of groups whose rewards are all equal, so that they give no gradient "
            f"(frac_reward_zero_std), by group size: {', '.join(parts)}."
        )
    lines.append(_variance_line(rewards, prompts))
    if len(rewards.steps) > 1:
        first, last = rewards.steps[0], rewards.steps[-1]
        lines.append(
            f"The rewards are from {len(rewards.steps)} policies ({rewards.step_name} {first} to "
            f"{last}). All numbers are averages over these policies."
        )
    return lines


def _counts_line(rewards: RewardGroups) -> str:
    """State the number of prompts, groups and completions, and how many prompts are left out."""
    lengths = [len(group) for group in rewards.groups]
    span = f"{min(lengths)}"
    if min(lengths) != max(lengths):
        span = f"{min(lengths)} to {max(lengths)}"
    prompts, groups = len(rewards.by_prompt(np.mean)), len(rewards.groups)
    if prompts == groups:
        line = f"The data are {groups} prompts with {span} completions each"
    else:
        line = (
            f"The data are {groups} groups of {span} completions from {prompts} different prompts "
            "(a prompt with several groups counts once in the intervals)"
        )
    line += f"; the rewards are from {rewards.column}"
    if rewards.single:
        line += f"; {rewards.single} prompts with only one completion are left out"
    if rewards.empty:
        line += f"; {rewards.empty} empty cells do not count as completions"
    return f"{line}."


def _variance_line(rewards: RewardGroups, prompts: int) -> str:
    """State the mean reward and the variances within and between prompts."""
    within = "The variance of the rewards of a prompt"
    if rewards.is_binary:
        within += ", p(1 - p) for success rate p,"
    if prompts == 1:
        group_means = [group.mean() for group in rewards.groups]
        variances = [group.var(ddof=1) for group in rewards.groups]
        return (
            f"The mean reward is {np.mean(group_means):.3g}. {within} is "
            f"{np.mean(variances):.3g} on average. A single prompt does not show the variance "
            "between prompts."
        )
    return (
        f"The mean reward is {number_text(mean_reward(rewards))}. {within} is "
        f"{number_text(within_variance(rewards))} on average. The variance of expected rewards "
        f"between prompts is {number_text(between_variance(rewards))}. The 95 % intervals are over "
        "prompts."
    )
