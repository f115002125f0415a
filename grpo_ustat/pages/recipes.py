"""Published group sizes judged on one policy: the error of each at the same number of rollouts."""

from __future__ import annotations

import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from grpo_ustat.estimators.intervals import Interval, positive_interval
from grpo_ustat.pages.figures import FONTS, STYLE, note, plt, save
from grpo_ustat.pages.findings import DEFAULT_ROLLOUTS, is_decided, scaling_estimate_of
from grpo_ustat.pages.tables import Table, percent, three_digits

RECIPES = {  # whose group size, and where it is published
    "2-GRPO (arXiv 2510.00977)": 2,
    "TRL's default": 8,
    "DeepSeekMath (arXiv 2402.03300)": 64,
    "BroRL (arXiv 2510.01180)": 512,
}
LARGEST_SIZE = 1024  # of the group sizes among which the best is looked for
TICKS = (1, 1.1, 1.2, 1.5, 2, 3, 5, 10, 20, 50, 100, 200, 500)


class Recipe(NamedTuple):
    """One group size.

    Attributes:
        name: whose.
        group_size: G.
        error: MSE at n rollouts, prompts drawn independently.
        extra: error over that of the best G, less 1; the intervals of all sizes hold together, see
            `ScalingEstimate.extra_error`.
    """

    name: str
    group_size: int
    error: Interval
    extra: Interval


def recipes(scaling: Mapping[str, Any], rollouts: int = DEFAULT_ROLLOUTS) -> list[Recipe]:
    """The recipes and the best G of this policy, by group size; none where G* is not decided.

    Args:
        scaling: of `result.json`.
        rollouts: n of a training step. Errors over the best one's do not depend on it.
    """
    estimate = scaling_estimate_of(scaling)
    if not is_decided(scaling) or not np.isfinite(estimate.covariance_33).all():
        return []
    best = estimate.best_of(range(2, LARGEST_SIZE))
    rows = []
    for name, size in sorted({**RECIPES, "the best G": best}.items(), key=lambda pair: pair[1]):
        weights_3 = np.array([size, 1.0, 1 / (size - 1)]) / rollouts
        variance = max(float(weights_3 @ estimate.covariance_33 @ weights_3), 0.0)
        error = float(weights_3 @ estimate.constants_3)
        interval = positive_interval(error, variance, estimate.dof)
        rows.append(Recipe(name, size, interval, estimate.extra_error(size, best)))
    return rows


def recipe_table(scaling: Mapping[str, Any], rollouts: int = DEFAULT_ROLLOUTS) -> Table | None:
    """A row per recipe; None where G* is not decided."""
    rows = recipes(scaling, rollouts)
    if not rows:
        return None
    cells = []
    for name, size, error, extra in rows:
        prompts = f"{rollouts / size:.3g}" if size <= rollouts else f"takes n >= {size}"
        over_best = ""
        if not extra.low == extra.high == 0:
            ends = f"[{percent(extra.low)}, {percent(extra.high)}]"
            over_best = f"{percent(extra.estimate)} {ends}"
        cells.append([
            name,
            str(size),
            prompts,
            f"{three_digits(error.estimate)} [{three_digits(error.low)}, "
            f"{three_digits(error.high)}]",
            over_best,
            verdict(extra),
        ])  # fmt: skip
    error = f"error at n = {rollouts}"
    columns = ["recipe", "G", "prompts", error, "over the best G", "verdict"]
    notes = [
        "Error of leave_one_out's gradient, prompts drawn independently, 95 % intervals. Those "
        "over the best G hold together and do not depend on n. What else a recipe does, such as "
        "normalising or clipping, is not in it.",
    ]
    return Table("Published group sizes on this policy", columns, cells, notes)


def verdict(extra: Interval) -> str:
    """What a recipe's extra error means, in words.

    >>> verdict(Interval(0.5, 0.2, 0.9)), verdict(Interval(0.1, -0.1, 0.3))
    ('takes 50 % more rollouts for the same error', 'not significantly different from the best')
    >>> verdict(Interval(0.0, 0.0, 0.0))
    'the best'
    """
    if extra.low == extra.high == 0:
        return "the best"
    if not extra.low > 0:
        return "not significantly different from the best"
    return f"takes {100 * extra.estimate:.0f} % more rollouts for the same error"


def recipes_figure(folder: Path, result: Mapping[str, Any]) -> None:
    """Errors over the best one's with their simultaneous intervals; `recipes.{pdf,svg,png}`."""
    rows = recipes(result["scaling"])
    with plt.rc_context(FONTS):
        figure, axes = plt.subplots(figsize=(6.4, 3.2), layout="constrained")
        if not rows:
            axes.text(
                0.5, 0.5, "not enough data for a best G", transform=axes.transAxes, ha="center"
            )
        colour = STYLE["leave_one_out"][0]
        places = np.arange(len(rows))[::-1]
        for place, row in zip(places, rows, strict=True):
            ratio, low, high = (1 + x for x in row.extra)
            if math.isfinite(low) and math.isfinite(high):
                axes.plot([max(low, 1e-3), high], [place, place], color=colour, linewidth=2)
            axes.plot(ratio, place, "o", color=colour, markersize=6)
        axes.axvline(1.0, color="black", linestyle="--", linewidth=1)
        axes.set_yticks(places, [f"{row.name}: G = {row.group_size}" for row in rows])
        axes.set_xscale("log")
        highs = [row.extra.high for row in rows if math.isfinite(row.extra.high)]
        most = max([0.2, *(row.extra.estimate for row in rows)])
        top = 1.15 * (1 + min(max([most, *highs]), 3 * most))
        axes.set_xlim(min([0.85, *(1 + row.extra.low for row in rows)]), top)
        ticks = [1.0]
        for x in TICKS:
            if x <= top and x / ticks[-1] > top**0.12:  # so that their numbers do not overlap
                ticks.append(x)
        axes.set_xticks(ticks, [f"{x:g}" for x in ticks])
        axes.set_xticks([], minor=True)
        axes.set_xlabel("error over the best G's, same rollouts")
        axes.grid(alpha=0.3, linewidth=0.5, axis="x")
        policy = result["policy"]
        axes.set_title(
            f"{policy['name']}: {policy['quantity']} {policy['mean_reward']:.2f}",
            fontsize=9,
            loc="left",
        )
        note(figure, ["Lines: 95 % intervals that hold together."], 6.4)
        save(figure, folder, "recipes")
