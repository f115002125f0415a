"""Published recipes judged on one policy: the relative efficiency of a whole loss at its G."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import NamedTuple

import numpy as np

from grpo_ustat.config.presets import CHANCE, RECIPES
from grpo_ustat.estimators.efficiency import relative_efficiency
from grpo_ustat.estimators.intervals import CONFIDENCE, Interval
from grpo_ustat.estimators.losses import UNBIASED, LossRow, kept_share, loss_errors, refusal
from grpo_ustat.estimators.row_weights import Loss
from grpo_ustat.measurements.base import Figure, Joint, Measurement, PoolStudy, Study
from grpo_ustat.measurements.group_size import SCALING, Scaling
from grpo_ustat.measurements.loss_efficiencies import (
    UNBIASED_BEST_G,
    LossEfficiency,
    efficiency_text,
    loss_records,
    loss_words,
    not_measured,
)
from grpo_ustat.pages.figures import FONTS, STYLE, note, plt, save
from grpo_ustat.pages.tables import Table
from grpo_ustat.records import ScorePool
from grpo_ustat.runs.study_parts import PolicyFacts
from grpo_ustat.terminal.streams import percentage

# Largest of the group sizes among which the best is looked for.
MAX_SIZE = 1024
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
    "Intervals are for new questions, and all of them hold together in 95 % of studies "
    "(Bonferroni's correction; Scheffe's for group sizes)."
)


class Judged(NamedTuple):
    """The relative efficiency of a recipe."""

    row: LossEfficiency
    # In rollouts of the unbiased gradient at its best G.
    efficiency_best_g: Interval
    # True if the efficiency is only that of its group size.
    alone: bool


def measure(study: PoolStudy) -> list[LossEfficiency]:
    """Measure every recipe, for new questions, by its name."""
    rows = recipe_efficiencies(
        study.pool, study.max_completion_length, study.group_sizes, study.rollouts, study.draws,
        study.seed,
    )  # fmt: skip
    return loss_records(rows)


def recipe_efficiencies(
    pool: ScorePool,
    max_completion_length: int,
    group_sizes: Sequence[int],
    rollouts: int,
    draws: int,
    seed: int,
) -> list[LossRow]:
    """Measure the relative efficiency of each recipe, for new questions, by the recipe's name.

    An update holds whole groups: its n is the largest multiple of the recipe's G up to `rollouts`.
    The unbiased estimate that it is judged against has the same n; its error is n's alone, so that
    its best G, of `group_sizes` and those of the recipes, need not divide n. The m recipes that are
    measured have intervals of 1 - .025/m each (Bonferroni), so that all hold together in 97.5 %.

    Args:
        max_completion_length: tokens after which a completion is cut.
        rollouts: n of the study.
        draws, seed: see `loss_efficiencies`.
    """
    rows: dict[str, LossRow] = {}
    # Recipes by n.
    updates: dict[int, dict[str, Loss]] = {}
    for name, recipe in RECIPES.items():
        loss, size = recipe.loss(max_completion_length), recipe.group_size
        count = rollouts // size * size or rollouts
        reason = refusal(pool, loss, size, count)
        rows[name] = LossRow(replace(loss, name=name), size, count, None, reason=reason)
        if reason is None:
            updates.setdefault(count, {})[name] = loss
    measured = sum(map(len, updates.values()))
    own_sizes = {RECIPES[name].group_size for of_count in updates.values() for name in of_count}
    completions = pool.rewards_PN.shape[1]
    sizes = sorted({size for size in {*group_sizes, *own_sizes} if 2 <= size <= completions})
    for count, losses in updates.items():
        wanted: dict[Loss, list[int]] = {UNBIASED: sizes}
        for name, loss in losses.items():
            wanted.setdefault(loss, []).append(RECIPES[name].group_size)
        errors = loss_errors(pool, wanted, count, draws, seed)
        unbiased = {size: errors[UNBIASED, size].error_D for size in sizes}
        for name, loss in losses.items():
            size = RECIPES[name].group_size
            found = relative_efficiency(
                errors[loss, size], size, unbiased, pool.metrics, 1 - CHANCE / measured
            )
            kept = kept_share(pool, size) if loss.rows.replaces else None
            rows[name] = replace(
                rows[name], efficiency=found, best=True, may_be_best=True, kept=kept
            )
    return list(rows.values())


def judged_recipes(rows: Sequence[LossEfficiency], study: Study) -> list[Judged]:
    """Return the recipes of a policy, by group size; none where nothing is known of any.

    One whose whole loss is not decided is judged by the scaling law.
    """
    measured = any(row.is_measured for row in rows)
    level = 1 - CHANCE if measured else CONFIDENCE
    judged: list[Judged] = []
    for row in rows:
        found, alone = row.efficiency_best_g, False
        if found is None or not found.is_known:
            alone = True
            found = group_size_efficiency(study.need(SCALING), row.group_size, level)
        judged.append(Judged(row, found, alone))
    return judged if any(one.efficiency_best_g.is_known for one in judged) else []


def group_size_efficiency(scaling: Scaling, group_size: int, level: float) -> Interval:
    """Compute the error of leave_one_out at its best G over that at this one.

    It is the same for any number of rollouts, and NaN where G* is not decided.

    Args:
        level: of the intervals of all G together, see `ScalingLaw.extra_error`.
    """
    law = scaling.law
    if not scaling.is_decided or not law.has_errors:
        return NOTHING
    best = law.best_of(range(2, MAX_SIZE))
    extra, low, high = law.extra_error(group_size, best, level)
    return Interval(1 / (1 + extra), 1 / (1 + high), 1 / (1 + low) if low > -1 else math.inf)


def tables(rows_by_study: Mapping[Study, list[LossEfficiency]]) -> list[Table]:
    """Return a table of each study with a row per recipe; none where nothing is known of any."""
    judged = [judged_recipes(rows, study) for study, rows in rows_by_study.items()]
    return [_table(of_study) for of_study in judged if of_study]


def _table(judged: Sequence[Judged]) -> Table:
    cells = [
        [
            one.row.loss,
            loss_words(one.row),
            str(one.row.group_size),
            efficiency_text(one.efficiency_best_g),
            judgement(one),
        ]
        for one in judged
    ]
    counts = sorted({one.row.rollouts for one in judged if one.row.is_measured})
    update = f", of {' or '.join(map(str, counts))} rollouts in whole groups" if counts else ""
    names = [one.row.loss for one in judged if one.row.loss in RECIPES]
    typed = [f"{name.split(' (')[0]}: {' '.join(RECIPES[name].overrides)}" for name in names]
    notes = [
        "Relative efficiency: rollouts of the unbiased leave-one-out gradient at its best G that "
        f"do as much as one of the recipe, at a batch's first update{update}. {TOGETHER_NOTE}",
        *([ALONE_NOTE] if any(one.alone for one in judged) else []),
        *not_measured([one.row for one in judged]),
        f"What to type after grpo-ustat mse for a loss at every G: {'; '.join(typed)}.",
    ]
    columns = ["recipe", "its loss", "G", "efficiency", "verdict"]
    return Table("Published recipes on this policy", columns, cells, notes)


def judgement(one: Judged) -> str:
    """Describe a recipe's efficiency, its scope, and the share of its groups that count."""
    words = verdict(one.efficiency_best_g)
    if one.alone:
        undecided = "whole loss not decided; " if one.row.is_measured else ""
        words = f"{undecided}group size alone: {words}"
    if one.row.kept is not None:
        kept = one.row.kept.estimate
        words += f"; {kept:.2f} of the groups drawn count"
        if not one.alone:
            drawn = kept * one.efficiency_best_g.estimate
            words += f", so the efficiency of a rollout drawn is {drawn:.2f}"
    return words


def verdict(efficiency: Interval) -> str:
    """Return the meaning of a relative efficiency, in words.

    >>> verdict(Interval(0.8, 0.7, 0.9)), verdict(Interval(1.25, 1.1, 1.4))
    ('takes 25 % more rollouts for the same error', 'takes 20 % fewer rollouts for the same error')
    >>> verdict(Interval(0.95, 0.8, 1.1))
    'not significantly different from the best, at most 25 % more rollouts'
    >>> verdict(Interval(1.0, 1.0, 1.0)), verdict(Interval(math.nan, 0.0, math.inf))
    ('the best', 'not decided')
    >>> verdict(Interval(0.1, 0.05, 0.2))
    'takes 10 times the rollouts for the same error'
    """
    if not math.isfinite(efficiency.estimate):
        return "not decided"
    if max(abs(x - 1) for x in efficiency) < ROUNDING:  # the best itself, up to rounding
        return "the best"
    if efficiency.high < 1 and efficiency.estimate < 1 / MANY_TIMES:
        return f"takes {1 / efficiency.estimate:.2g} times the rollouts for the same error"
    if efficiency.high < 1:
        return f"takes {percentage(1 / efficiency.estimate - 1)} more rollouts for the same error"
    if efficiency.low > 1:
        return f"takes {percentage(1 - 1 / efficiency.estimate)} fewer rollouts for the same error"
    most = (
        f", at most {percentage(1 / efficiency.low - 1)} more rollouts"
        if efficiency.low > 0
        else ""
    )
    return f"not significantly different from the best{most}"


def draw(
    folder: Path, rows_by_study: Mapping[Study, list[LossEfficiency]], lines: Sequence[str]
) -> None:
    """Draw the relative efficiency of each recipe, with intervals, `recipes.{pdf,svg,png}`."""
    for study, rows in rows_by_study.items():
        judged = [one for one in judged_recipes(rows, study) if one.efficiency_best_g.is_known]
        _draw(folder, judged, study.result.policy, lines)


def _draw(
    folder: Path, judged: Sequence[Judged], policy: PolicyFacts, notes: Sequence[str]
) -> None:
    with plt.rc_context(FONTS):
        figure, axes = plt.subplots(figsize=(6.4, 3.4), layout="constrained")
        if not judged:
            axes.text(0.5, 0.5, "not enough data to judge recipes", transform=axes.transAxes,
                      ha="center")  # fmt: skip
        colour = STYLE["leave_one_out"][0]
        places = np.arange(len(judged))[::-1]
        least = 0.8 * min([0.8, *(one.efficiency_best_g.estimate for one in judged)])
        most = 1.2 * max([1.0, *(one.efficiency_best_g.estimate for one in judged)])
        for place, (_, (efficiency, low, high), alone) in zip(places, judged, strict=True):
            ends = [max(low, least / 2), min(high, 2 * most)]
            axes.plot(ends, [place, place], color=colour, linewidth=2, alpha=0.5 if alone else 1)
            axes.plot(efficiency, place, "o", color=colour, markersize=6,
                      markerfacecolor="white" if alone else colour)  # fmt: skip
        axes.axvline(1.0, color="black", linestyle="--", linewidth=1)
        labels = [f"{one.row.loss}: G = {one.row.group_size}" for one in judged]
        axes.set_yticks(places, labels)
        axes.set_xscale("log")
        lows = [one.efficiency_best_g.low for one in judged if one.efficiency_best_g.low > 0]
        highs = [
            one.efficiency_best_g.high
            for one in judged
            if math.isfinite(one.efficiency_best_g.high)
        ]
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
        axes.set_xlabel(f"relative efficiency against\n{UNBIASED_BEST_G}")
        axes.grid(alpha=0.3, linewidth=0.5, axis="x")
        axes.set_title(
            f"{policy.name}: {policy.quantity} {policy.mean_reward.estimate:.2f}",
            fontsize=9,
            loc="left",
        )
        lines = ["Lines: 95 % intervals that hold together."]
        if any(one.alone for one in judged):
            lines.append("Open circles: the group size alone, by the scaling law.")
        note(figure, [*lines, *notes], 6.4)
        save(figure, folder, "recipes")


RECIPE_EFFICIENCIES = Measurement(
    "recipes",
    list[LossEfficiency],
    measure,
    tables=tables,
    figure=Figure("recipes", "Relative efficiency of published recipes", draw),
    # Its table is of one policy.
    joint=Joint(),
)
