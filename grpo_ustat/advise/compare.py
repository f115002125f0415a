"""Comparison of several runs by their rewards: a table of the runs, and differences of means."""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np

from grpo_ustat.advise.kinds import Kind
from grpo_ustat.advise.request import Request
from grpo_ustat.advise.rewards import read_log
from grpo_ustat.estimators.intervals import CONFIDENCE
from grpo_ustat.estimators.run_differences import Difference, reward_difference, units_to_show
from grpo_ustat.logs.rewards import (
    RewardGroups,
    expected_zero_variance,
    mean_reward,
    number_text,
    share_text,
)
from grpo_ustat.pages.advice import DIFFERENT, UNKNOWN, Advice
from grpo_ustat.terminal.streams import aligned

# The output says how many prompts are needed to show this difference of mean rewards.
POINT = 0.01
# Maximum length of a run's name in the table, so that a row has at most 80 characters.
NAME_WIDTH = 14


def compared_advice(request: Request, kinds: Sequence[Kind]) -> Advice:
    """Return a table with a row per run, and compare the mean reward of each run with the first."""
    sources = [request.source, *request.others]
    names = short_names(sources)
    logs = [
        read_log(replace(request, source=source), kind)
        for source, kind in zip(sources, kinds, strict=True)
    ]
    rewards = [log.rewards for log in logs]
    sizes = {of_run.group_size for of_run in rewards}
    size = request.num_generations or (sizes.pop() if len(sizes) == 1 else None)
    details = _rows(names, rewards, size)
    if any("..." in name for name in names):
        details += [f"{name}: {source}" for name, source in zip(names, sources, strict=True)]
    if size is not None:
        details.append(
            f"The last column is the share of groups of {size} whose rewards are equal, so that "
            "they give no gradient."
        )
    # Bonferroni correction: the intervals of all comparisons hold together with 95 % confidence.
    level = 1 - (1 - CONFIDENCE) / (len(rewards) - 1)
    means = [of_run.by_prompt(np.mean) for of_run in rewards]
    is_binary = all(of_run.is_binary for of_run in rewards)
    sentences, decided, numbers = list[str](), list[bool](), list[dict[str, Any]]()
    spreads = []
    for name, of_run in zip(names[1:], means[1:], strict=True):
        difference = reward_difference(means[0], of_run, level, is_binary)
        if difference is None:
            sentences.append(
                f"{name} and {names[0]} cannot be compared: one of them has only one prompt."
            )
            continue
        spreads.append(difference.spread)
        _, low, high = difference.interval
        decided.append(low > 0 or high < 0)
        sentences.append(_sentence(name, names[0], difference, is_binary))
        numbers.append(
            {
                "run": name,
                "difference": difference.interval.estimate,
                "difference_low": low,
                "difference_high": high,
                "paired_prompts": difference.pairs,
            }
        )
    details += sentences[1:]
    needed = units_to_show(max(spreads), POINT, level) if max(spreads, default=0) > 0 else None
    if needed is not None:
        unit = "one percentage point" if is_binary else f"{POINT}"
        details.append(
            f"To detect a true difference of {unit} in 4 of 5 such comparisons, each run needs "
            f"rewards for {needed} prompts."
        )
    details.append(
        "The intervals cover the variation from drawing other prompts for the same policies. They "
        "do not cover the variation between training runs with other seeds. To see that variation, "
        "name the scalar logs of several seeds of each run."
    )
    for name, log in zip(names, logs, strict=True):
        details += [f"{name}: {line}" for line in log.details]
    verdict = DIFFERENT if decided and all(decided) else UNKNOWN
    following = "use the run with the higher mean reward, if runs with another seed agree"
    if verdict == UNKNOWN:
        count = f"{needed} " * (needed is not None)
        following = f"log rewards for {count}prompts, the same in each run, and name these logs"
    content = {"num_generations": size, "comparisons": numbers, "prompts_for_a_point": needed}
    return Advice(verdict, sentences[0], details, following, content)


def _sentence(name: str, first: str, difference: Difference, is_binary: bool) -> str:
    """State if the mean reward of a run differs from the first run's, with the difference."""
    scale, unit = (100, " percentage points") if is_binary else (1, "")
    number, low, high = (scale * value for value in difference.interval)
    text = f"{number:+.3g}{unit} [{low:+.3g}, {high:+.3g}]"
    how = "not paired, because the prompts differ"
    if difference.pairs:
        how = f"paired over {difference.pairs} prompts"
    if low > 0 or high < 0:
        word = "higher" if number > 0 else "lower"
        return (
            f"The mean reward of {name} is {word} than the mean reward of {first}: the difference "
            f"is {text}, {how}."
        )
    return (
        f"The mean rewards of {name} and {first} do not differ significantly: the difference "
        f"({name} minus {first}) is {text}, {how}."
    )


def _rows(names: Sequence[str], rewards: Sequence[RewardGroups], size: int | None) -> list[str]:
    """Return the lines of a table with a row per run."""
    table = [["run", "prompts", "completions", "mean reward"]]
    if size is not None:
        table[0].append(f"equal at G = {size}")
    for name, of_run in zip(names, rewards, strict=True):
        means = of_run.by_prompt(np.mean)
        mean = number_text(mean_reward(of_run)) if len(means) > 1 else f"{[*means.values()][0]:.3g}"
        row = [name, str(len(means)), str(of_run.completions), mean]
        if size is not None:
            share = expected_zero_variance(of_run, size)
            row.append("not enough data" if share is None else share_text(share))
        table.append(row)
    return aligned(table)


def short_names(sources: Sequence[Path]) -> list[str]:
    """Return short different names: the paths without their common beginning and end.

    >>> short_names([Path("runs/a/log.csv"), Path("runs/b/log.csv")])
    ['a', 'b']
    >>> short_names([Path("x/base.csv"), Path("x/tuned.csv")])
    ['base', 'tuned']
    """
    parts = [Path(os.path.abspath(source)).parts for source in sources]
    while len({path[0] for path in parts}) == 1 and min(map(len, parts)) > 1:
        parts = [path[1:] for path in parts]
    while len({path[-1] for path in parts}) == 1 and min(map(len, parts)) > 1:
        parts = [path[:-1] for path in parts]
    names = [str(Path(*path)) for path in parts]
    stems = [str(Path(name).with_suffix("")) for name in names]
    names = stems if len(set(stems)) == len(stems) else names
    return [
        name if len(name) <= NAME_WIDTH else f"{place} ...{name[-(NAME_WIDTH - 6) :]}"
        for place, name in enumerate(names, start=1)
    ]
