"""Published recipes judged on one policy: the worth of a rollout of a whole loss at its G."""

from __future__ import annotations

import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from grpo_ustat.config.recipes import CHANCE, RECIPES
from grpo_ustat.estimators.intervals import CONFIDENCE, Interval
from grpo_ustat.estimators.scaling import CONSTANTS, ScalingLaw
from grpo_ustat.pages.figures import FONTS, STYLE, note, plt, save
from grpo_ustat.pages.losses import AT_BEST, loss_words, not_measured, worth_text
from grpo_ustat.pages.tables import Table
from grpo_ustat.runs.contents import row_interval
from grpo_ustat.terminal.streams import percentage

# Largest of the group sizes among which the best is looked for.
LARGEST_SIZE = 1024
TICKS = (0.002, 0.005, 0.01, 0.02, 0.05, 0.1, 0.2, 0.3, 0.5, 0.7, 0.85, 1, 1.2, 1.5, 2, 3, 5, 10)
# Ratio of rollouts from which on it is printed in times, not in percent.
MANY_TIMES = 3
ROUNDING = 1e-6
NOTHING = Interval(math.nan, 0.0, math.inf)
ALONE_NOTE = (
    "Group size alone: the error of leave_one_out at its best G over that at this one, by the "
    "scaling law. What else the recipe does is not in it; it stands where the loss cannot be "
    "measured or its direction is not known from these questions."
)
TOGETHER_NOTE = (
    "Intervals are for new questions, and all of them hold together in 95 % of studies (worths by "
    "Bonferroni's correction, group sizes by Scheffe's)."
)


class Judged(NamedTuple):
    """The worth of a rollout of a recipe."""

    # Of `result.json`, see `runs.study_parts.LossWorth`.
    row: Mapping[str, Any]
    # In rollouts of the unbiased gradient at its best G.
    worth: Interval
    # True if the worth is only that of its group size.
    alone: bool


def recipes(result: Mapping[str, Any]) -> list[Judged]:
    """Return the recipes of this policy, by group size; none where nothing is known of any.

    Args:
        result: content of the study's `result.json`. One without recipes is judged by the scaling
            law.
    """
    rows = result.get("recipes") or [_unmeasured(name) for name in RECIPES]
    measured = any("noise" in row for row in rows)
    level = 1 - CHANCE if measured else CONFIDENCE
    judged: list[Judged] = []
    for row in rows:
        worth = row_interval(row, "worth_best") if "noise" in row else NOTHING
        alone = not math.isfinite(worth.estimate)
        if alone:
            worth = group_size_worth(result["scaling"], row["group_size"], level)
        judged.append(Judged(row, worth, alone))
    return judged if any(math.isfinite(one.worth.estimate) for one in judged) else []


def _unmeasured(name: str) -> dict[str, Any]:
    """Return the row of a recipe in a study that measured none."""
    recipe = RECIPES[name]
    loss = recipe.loss(max_completion_length=1)
    row = {"loss": name, "baseline": loss.rule, "loss_type": loss.loss_type}
    if loss.rows.replaces:
        row["zero_variance_groups"] = loss.rows.zero_variance_groups
    return row | {"group_size": recipe.group_size}


def group_size_worth(scaling: Mapping[str, Any], group_size: int, level: float) -> Interval:
    """Compute the error of leave_one_out at its best G over that at this one.

    It is the same for any number of rollouts, and NaN where G* is not decided.

    Args:
        scaling: of `result.json`.
        level: of the intervals of all G together, see `ScalingLaw.extra_error`.
    """
    c1, c2, c3 = (scaling[name] for name in CONSTANTS)
    law = ScalingLaw.stored(c1, c2, c3, scaling.get("covariance"), scaling.get("dof"))
    decided = row_interval(scaling, "gstar")
    if not all(map(math.isfinite, decided)) or not law.has_errors:
        return NOTHING
    best = law.best_of(range(2, LARGEST_SIZE))
    extra, low, high = law.extra_error(group_size, best, level)
    return Interval(1 / (1 + extra), 1 / (1 + high), 1 / (1 + low) if low > -1 else math.inf)


def recipe_table(result: Mapping[str, Any]) -> Table | None:
    """Return a table with a row per recipe; None where nothing is known of any."""
    judged = recipes(result)
    if not judged:
        return None
    cells = [
        [
            one.row["loss"],
            loss_words(one.row),
            str(one.row["group_size"]),
            worth_text(one.worth),
            judgement(one),
        ]
        for one in judged
    ]
    counts = sorted({one.row["rollouts"] for one in judged if "noise" in one.row})
    update = f", of {' or '.join(map(str, counts))} rollouts in whole groups" if counts else ""
    names = [one.row["loss"] for one in judged if one.row["loss"] in RECIPES]
    typed = [f"{name.split(' (')[0]}: {' '.join(RECIPES[name].overrides)}" for name in names]
    notes = [
        "Worth: rollouts of the unbiased leave-one-out gradient at its best G that do as much as "
        f"one of the recipe, at a batch's first update{update}. {TOGETHER_NOTE}",
        *([ALONE_NOTE] if any(one.alone for one in judged) else []),
        *not_measured([[one.row for one in judged]]),
        f"What to type after grpo-ustat mse for a loss at every G: {'; '.join(typed)}.",
    ]
    columns = ["recipe", "its loss", "G", "worth", "verdict"]
    return Table("Published recipes on this policy", columns, cells, notes)


def judgement(one: Judged) -> str:
    """Describe a recipe's worth, its scope, and the share of its groups that count."""
    words = verdict(one.worth)
    if one.alone:
        undecided = "whole loss not decided; " if "noise" in one.row else ""
        words = f"{undecided}group size alone: {words}"
    if "kept" in one.row:
        kept = one.row["kept"]
        words += f"; {kept:.2f} of the groups drawn count"
        if not one.alone:
            words += f", so a rollout drawn is worth {kept * one.worth.estimate:.2f}"
    return words


def verdict(worth: Interval) -> str:
    """Return the meaning of a worth against the best, in words.

    >>> verdict(Interval(0.8, 0.7, 0.9)), verdict(Interval(1.25, 1.1, 1.4))
    ('takes 25 % more rollouts for the same error', 'takes 20 % fewer rollouts for the same error')
    >>> verdict(Interval(0.95, 0.8, 1.1))
    'not significantly different from the best, at most 25 % more rollouts'
    >>> verdict(Interval(1.0, 1.0, 1.0)), verdict(Interval(math.nan, 0.0, math.inf))
    ('the best', 'not decided')
    >>> verdict(Interval(0.1, 0.05, 0.2))
    'takes 10 times the rollouts for the same error'
    """
    if not math.isfinite(worth.estimate):
        return "not decided"
    if max(abs(x - 1) for x in worth) < ROUNDING:  # the best itself, up to rounding
        return "the best"
    if worth.high < 1 and worth.estimate < 1 / MANY_TIMES:
        return f"takes {1 / worth.estimate:.2g} times the rollouts for the same error"
    if worth.high < 1:
        return f"takes {percentage(1 / worth.estimate - 1)} more rollouts for the same error"
    if worth.low > 1:
        return f"takes {percentage(1 - 1 / worth.estimate)} fewer rollouts for the same error"
    most = f", at most {percentage(1 / worth.low - 1)} more rollouts" if worth.low > 0 else ""
    return f"not significantly different from the best{most}"


def recipes_figure(folder: Path, result: Mapping[str, Any]) -> None:
    """Draw the worth of a rollout of each recipe, with intervals, `recipes.{pdf,svg,png}`."""
    judged = [one for one in recipes(result) if math.isfinite(one.worth.estimate)]
    with plt.rc_context(FONTS):
        figure, axes = plt.subplots(figsize=(6.4, 3.4), layout="constrained")
        if not judged:
            axes.text(0.5, 0.5, "not enough data to judge recipes", transform=axes.transAxes,
                      ha="center")  # fmt: skip
        colour = STYLE["leave_one_out"][0]
        places = np.arange(len(judged))[::-1]
        least = 0.8 * min([0.8, *(one.worth.estimate for one in judged)])
        most = 1.2 * max([1.0, *(one.worth.estimate for one in judged)])
        for place, (_, (worth, low, high), alone) in zip(places, judged, strict=True):
            ends = [max(low, least / 2), min(high, 2 * most)]
            axes.plot(ends, [place, place], color=colour, linewidth=2, alpha=0.5 if alone else 1)
            axes.plot(worth, place, "o", color=colour, markersize=6,
                      markerfacecolor="white" if alone else colour)  # fmt: skip
        axes.axvline(1.0, color="black", linestyle="--", linewidth=1)
        labels = [f"{one.row['loss']}: G = {one.row['group_size']}" for one in judged]
        axes.set_yticks(places, labels)
        axes.set_xscale("log")
        lows = [one.worth.low for one in judged if one.worth.low > 0]
        highs = [one.worth.high for one in judged if math.isfinite(one.worth.high)]
        left = max(0.9 * min([0.85, *lows]), least / 2)
        right = min(1.1 * max([1.0, *highs]), 2 * most)
        axes.set_xlim(left, right)
        apart = (right / left) ** 0.08  # so that their numbers do not overlap
        ticks = [1.0]
        for x in TICKS:
            if left <= x <= right and all(max(x / y, y / x) > apart for y in ticks):
                ticks.append(x)
        axes.set_xticks(ticks, [f"{x:g}" for x in ticks])
        axes.set_xticks([], minor=True)
        axes.set_xlabel(f"worth of a rollout,\nin {AT_BEST}")
        axes.grid(alpha=0.3, linewidth=0.5, axis="x")
        policy = result["policy"]
        axes.set_title(
            f"{policy['name']}: {policy['quantity']} {policy['mean_reward']:.2f}",
            fontsize=9,
            loc="left",
        )
        lines = ["Lines: 95 % intervals that hold together."]
        if any(one.alone for one in judged):
            lines.append("Open circles: the group size alone, by the scaling law.")
        note(figure, lines, 6.4)
        save(figure, folder, "recipes")
