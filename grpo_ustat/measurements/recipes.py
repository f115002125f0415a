"""Relative efficiency of published recipes (a loss and its G) on one policy."""

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
from grpo_ustat.pages.figures import STYLE, WIDTH, figure_fonts, note, pyplot, save, spaced_ticks
from grpo_ustat.pages.tables import Table
from grpo_ustat.records import ScorePool
from grpo_ustat.runs.study_parts import PolicyFacts
from grpo_ustat.terminal.streams import percentage

# Upper limit of the search for the best group size.
MAX_SIZE = 1024
TICKS = (0.002, 0.005, 0.01, 0.02, 0.05, 0.1, 0.2, 0.3, 0.5, 0.7, 0.85, 1, 1.2, 1.5, 2, 3, 5, 10)
# A ratio of rollouts above this value is printed as "N times" instead of in percent.
MANY_TIMES = 3
ROUNDING = 1e-6
NOTHING = Interval(math.nan, 0.0, math.inf)
SIZE_NOTE = (
    "The column 'efficiency of the group size only' ignores the loss of the recipe. It is the "
    "error of leave_one_out at its best G, divided by the error of leave_one_out at the recipe's "
    "G. Both errors come from the scaling law."
)
TOGETHER_NOTE = (
    "The 95 % intervals are for new questions and hold simultaneously. In the column 'efficiency', "
    "they have a Bonferroni correction for the number of recipes. In the column 'efficiency of the "
    "group size only', they all follow from a single interval of C3/C1."
)
OVERRIDES_NOTE = (
    "To measure the loss of a recipe at every G, add the overrides of the recipe to the command "
    "grpo-ustat mse."
)
NOT_MEASURED, BY_SIZE = "not measured", "efficiency of the group size only"


class Judged(NamedTuple):
    """Efficiency of a recipe relative to the unbiased gradient at the gradient's best G."""

    row: LossEfficiency
    # Relative efficiency of the recipe's group size alone, as if its loss were the unbiased one.
    by_size: Interval

    @property
    def whole_loss(self) -> Interval:
        """Relative efficiency of the whole loss; unknown if not measured or not decided."""
        return self.row.efficiency_best_g or NOTHING

    @property
    def is_by_size(self) -> bool:
        """True if the efficiency of the whole loss is unknown."""
        return not self.whole_loss.is_known

    @property
    def efficiency(self) -> Interval:
        """Relative efficiency of the whole loss or, if unknown, of the group size only."""
        return self.by_size if self.is_by_size else self.whole_loss


def measure(study: PoolStudy) -> list[LossEfficiency]:
    """Measure the relative efficiency of each recipe for new questions."""
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
    """Return the relative efficiency of each recipe for new questions.

    The loss of each row has the name of the recipe.

    An update contains only whole groups, so its number of rollouts n is the largest multiple of the
    recipe's G that does not exceed `rollouts`. Each recipe is compared with the unbiased estimate
    at the same n. The best G of the unbiased estimate is chosen from `group_sizes` and the group
    sizes of the recipes. It need not divide n, because the error formula holds for any n and G. The
    intervals of the m measured recipes have level 1 - .025/m each (Bonferroni), so they hold
    simultaneously with level 97.5 %.

    Args:
        max_completion_length: Maximum number of tokens per completion.
        rollouts: Number of rollouts of the study, n.
        draws, seed: See `loss_efficiencies`.
    """
    rows: dict[str, LossRow] = {}
    # Losses of the recipes, keyed by n and by the name of the recipe.
    updates: dict[int, dict[str, Loss]] = {}
    for name, recipe in RECIPES.items():
        loss, size = recipe.loss(max_completion_length), recipe.group_size
        count = rollouts // size * size or rollouts
        reason = refusal(pool, loss, size, count)
        rows[name] = LossRow(replace(loss, name=name), size, count, None, reason=reason)
        if reason is None:
            updates.setdefault(count, {})[name] = loss
    measured = sum(map(len, updates.values()))
    recipe_sizes = {RECIPES[name].group_size for of_count in updates.values() for name in of_count}
    completions = pool.rewards_PN.shape[1]
    sizes = sorted({size for size in {*group_sizes, *recipe_sizes} if 2 <= size <= completions})
    for count, losses in updates.items():
        wanted: dict[Loss, list[int]] = {UNBIASED: sizes}
        for name, loss in losses.items():
            wanted.setdefault(loss, []).append(RECIPES[name].group_size)
        errors = loss_errors(pool, wanted, count, draws, seed)
        unbiased = {size: errors[UNBIASED, size].error_D for size in sizes}
        for name, loss in losses.items():
            size = RECIPES[name].group_size
            efficiency = relative_efficiency(
                errors[loss, size], size, unbiased, 1 - CHANCE / measured
            )
            kept = kept_share(pool, size) if loss.rows.replaces else None
            rows[name] = replace(
                rows[name], efficiency=efficiency, best=True, may_be_best=True, kept=kept
            )
    return list(rows.values())


def judged_recipes(rows: Sequence[LossEfficiency], study: Study) -> list[Judged]:
    """Return the recipes with their efficiencies; an empty list if no efficiency is known."""
    is_measured = any(row.is_measured for row in rows)
    level = 1 - CHANCE if is_measured else CONFIDENCE
    scaling = study.need(SCALING)
    recipes = [Judged(row, group_size_efficiency(scaling, row.group_size, level)) for row in rows]
    return recipes if any(recipe.efficiency.is_known for recipe in recipes) else []


def group_size_efficiency(scaling: Scaling, group_size: int, level: float) -> Interval:
    """Return the error of leave_one_out at its best G divided by its error at `group_size`.

    The ratio does not depend on the number of rollouts. It is NaN if G* is not decided.

    Args:
        level: Simultaneous confidence level of the intervals over all G; see
            `ScalingLaw.extra_error`.
    """
    law = scaling.law
    if not scaling.is_decided or not law.has_errors:
        return NOTHING
    best = law.best_of(range(2, MAX_SIZE))
    extra, low, high = law.extra_error(group_size, best, level)
    return Interval(1 / (1 + extra), 1 / (1 + high), 1 / (1 + low) if low > -1 else math.inf)


def tables(rows_by_study: Mapping[Study, list[LossEfficiency]]) -> list[Table]:
    """Return a table per study with a row per recipe, and a table of the recipes' overrides.

    The list is empty if no efficiency is known.
    """
    judged = [judged_recipes(rows, study) for study, rows in rows_by_study.items()]
    efficiencies = [_table(recipes) for recipes in judged if recipes]
    names = dict.fromkeys(recipe.row.loss for recipes in judged for recipe in recipes)
    overrides = [[name, " ".join(RECIPES[name].overrides)] for name in names if name in RECIPES]
    if not overrides:
        return efficiencies
    title = "Overrides for the losses of the recipes"
    return [*efficiencies, Table(title, ["recipe", "overrides"], overrides, [OVERRIDES_NOTE])]


def _table(recipes: Sequence[Judged]) -> Table:
    rows = [recipe.row for recipe in recipes]
    cells = [
        [
            recipe.row.loss,
            loss_words(recipe.row),
            str(recipe.row.group_size),
            efficiency_text(recipe.whole_loss) if recipe.row.is_measured else NOT_MEASURED,
            efficiency_text(recipe.by_size),
            "-" if recipe.is_by_size else verdict(recipe.whole_loss),
        ]
        for recipe in recipes
    ]
    counts = sorted({row.rollouts for row in rows if row.is_measured})
    update = f" of {' or '.join(map(str, counts))} rollouts" if counts else ""
    kept = [
        f"An update of {row.loss} uses a share of {efficiency_text(row.kept)} of the sampled "
        "groups. Its efficiency does not count the cost of sampling the other groups."
        for row in rows
        if row.kept is not None
    ]
    notes = [
        "The efficiency compares a recipe with the unbiased leave-one-out gradient at its best G: "
        "one rollout of the recipe is worth this many rollouts of that gradient. It is measured at "
        f"the first update on a batch{update}.",
        SIZE_NOTE,
        TOGETHER_NOTE,
        *kept,
        *not_measured(rows),
    ]
    columns = ["recipe", "loss", "G", "efficiency", BY_SIZE, "verdict"]
    return Table("Published recipes on this policy", columns, cells, notes)


def verdict(efficiency: Interval) -> str:
    """Compare the rollouts that a recipe needs with those of the unbiased gradient at its best G.

    >>> verdict(Interval(0.8, 0.7, 0.9)), verdict(Interval(1.25, 1.1, 1.4))
    ('25 % more rollouts', '20 % fewer rollouts')
    >>> verdict(Interval(0.95, 0.8, 1.1)), verdict(Interval(0.1, 0.05, 0.2))
    ('not significantly different', '10 times the rollouts')
    >>> verdict(Interval(1.0, 1.0, 1.0)), verdict(Interval(math.nan, 0.0, math.inf))
    ('the best', 'not decided')
    """
    if not efficiency.is_known:
        return "not decided"
    # The recipe equals the unbiased estimate at its best G, up to rounding.
    if max(abs(x - 1) for x in efficiency) < ROUNDING:
        return "the best"
    if efficiency.high < 1 and efficiency.estimate < 1 / MANY_TIMES:
        return f"{1 / efficiency.estimate:.2g} times the rollouts"
    if efficiency.high < 1:
        return f"{percentage(1 / efficiency.estimate - 1)} more rollouts"
    if efficiency.low > 1:
        return f"{percentage(1 - 1 / efficiency.estimate)} fewer rollouts"
    return "not significantly different"


def draw(
    folder: Path, rows_by_study: Mapping[Study, list[LossEfficiency]], lines: Sequence[str]
) -> None:
    """Plot each recipe's relative efficiency and save it as `recipes.{pdf,svg,png}`."""
    for study, rows in rows_by_study.items():
        recipes = [recipe for recipe in judged_recipes(rows, study) if recipe.efficiency.is_known]
        _draw(folder, recipes, study.result.policy, lines)


def _draw(
    folder: Path, recipes: Sequence[Judged], policy: PolicyFacts, lines: Sequence[str]
) -> None:
    with figure_fonts():
        figure, axes = pyplot().subplots(figsize=(WIDTH, 3.4), layout="constrained")
        if not recipes:
            axes.text(0.5, 0.5, "not enough data to judge recipes", transform=axes.transAxes,
                      ha="center")  # fmt: skip
        colour = STYLE["leave_one_out"][0]
        places = np.arange(len(recipes))[::-1]
        estimates = [recipe.efficiency.estimate for recipe in recipes]
        least, most = 0.8 * min([0.8, *estimates]), 1.2 * max([1.0, *estimates])
        for place, recipe in zip(places, recipes, strict=True):
            ends = [max(recipe.efficiency.low, least / 2), min(recipe.efficiency.high, 2 * most)]
            axes.plot(ends, [place, place], color=colour, linewidth=2,
                      alpha=0.5 if recipe.is_by_size else 1)  # fmt: skip
            axes.plot(recipe.efficiency.estimate, place, "o", color=colour, markersize=6,
                      markerfacecolor="white" if recipe.is_by_size else colour)  # fmt: skip
        axes.axvline(1.0, color="black", linestyle="--", linewidth=1)
        labels = [f"{recipe.row.loss}: G = {recipe.row.group_size}" for recipe in recipes]
        axes.set_yticks(places, labels)
        axes.set_xscale("log")
        lows = [recipe.efficiency.low for recipe in recipes if recipe.efficiency.low > 0]
        highs = [
            recipe.efficiency.high for recipe in recipes if math.isfinite(recipe.efficiency.high)
        ]
        left = max(0.9 * min([0.85, *lows]), least / 2)
        right = min(1.1 * max([1.0, *highs]), 2 * most)
        axes.set_xlim(left, right)
        ticks = spaced_ticks(TICKS, left, right, 0.08)
        axes.set_xticks(ticks, [f"{x:g}" for x in ticks])
        axes.set_xticks([], minor=True)
        axes.set_xlabel(f"relative efficiency against\n{UNBIASED_BEST_G}")
        axes.grid(alpha=0.3, linewidth=0.5, axis="x")
        title = f"{policy.name}: {policy.quantity} {policy.mean_reward.estimate:.2f}"
        axes.set_title(title, loc="left")
        meanings = ["Horizontal lines are simultaneous 95 % intervals."]
        if any(recipe.is_by_size for recipe in recipes):
            meanings.append(
                f"Open circles: {BY_SIZE}; the efficiency of the whole recipe is unknown."
            )
        note(figure, [*meanings, *lines])
        save(figure, folder, "recipes")


RECIPE_EFFICIENCIES = Measurement(
    "recipes",
    list[LossEfficiency],
    measure,
    tables=tables,
    figure=Figure("recipes", "Relative efficiency of published recipes", draw),
    # The table applies to one policy only.
    joint=Joint(),
)
