"""Figures of the gradient's error: of one study, of several side by side, and their panels."""

from __future__ import annotations

import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
from matplotlib.axes import Axes

from grpo_ustat.estimators.scaling import ScalingLaw, divisible_rollouts
from grpo_ustat.pages.figures import (
    FONTS,
    STYLE,
    baseline_style,
    log_sizes,
    note,
    panels_wide,
    plt,
    save,
)
from grpo_ustat.pages.findings import (
    group_size_costs,
)
from grpo_ustat.pages.gradient_error import INTERVAL_WORDS, missing_numbers
from grpo_ustat.pages.tables import count_text, percent
from grpo_ustat.runs.record import RunRecord, study_rollouts
from grpo_ustat.terminal.streams import best_size

LINE_STYLES = {"closed_form": "-", "new_questions": "-", "monte_carlo": ":"}
GROUP_MEAN_DASHES = (0, (4, 2))
RATIO_TICKS = (0.01, 0.02, 0.05, 0.1, 0.2, 0.3, 0.5, 0.7, 1, 1.2, 1.5, 2, 3, 5, 10, 20, 50)
EXTRA_ERROR = "extra error at the same rollouts, %"
# Ratio of group sizes whose names and costs do not overlap.
APART = 1.3
# Top of the axis of extra errors: twice the error and a bit.
TOP_PERCENT = 105


def mse_figure(folder: Path, result: dict[str, Any]) -> None:
    """Draw one study's MSE against group size, `figure.{pdf,svg,png}`.

    There is a column of panels per setting; the lower panels show the MSE as a multiple of the
    oracle's.
    """
    rows = result["curves"]
    settings = list(dict.fromkeys(row["setting"] for row in rows))
    ratios = [ratio_rows(result, setting) for setting in settings]
    high = 2 if any(ratios) else 1
    with plt.rc_context(FONTS):
        size = (1.4 + 5.0 * len(settings), 5.6 + 2.9 * (high - 1))
        figure, panels = plt.subplots(
            high, len(settings), figsize=size, squeeze=False, layout="constrained",
            height_ratios=(1.6, 1)[:high],
        )  # fmt: skip
        for column, setting in enumerate(settings):
            axes, shown = panels[0, column], [row for row in rows if row["setting"] == setting]
            mse_panel(axes, shown)
            axes.set_title(f"batch: {batch_text(shown[0])}", fontsize=9, loc="left")
            if ratios[column]:
                ratio_panel(panels[1, column], ratios[column])
            elif high > 1:
                panels[1, column].set_visible(False)
        panels[0, 0].set_ylabel("mean squared error of the gradient")
        if high > 1:
            panels[1, 0].set_ylabel("MSE over the oracle's")
        labels: dict[str, Any] = {}  # of every rule, whatever panels it is in
        for axes in panels[0]:
            handles, own = axes.get_legend_handles_labels()
            labels |= dict(zip(own, handles, strict=True))
        if len(labels) > 6 or len(settings) > 1:
            figure.legend(
                list(labels.values()), list(labels), loc="outside right upper", frameon=False,
                fontsize=8,
            )  # fmt: skip
        else:
            panels[0, 0].legend(frameon=False, fontsize=9)
        figure.suptitle(_study_title(result), fontsize=9, x=0.02, ha="left")
        bands = bands_text([result])
        note(figure, [bands, *missing_numbers(result)], size[0])
        save(figure, folder, "figure")


def bands_text(results: Sequence[dict[str, Any]]) -> str:
    """Return a note on the bands of errors and ratios."""
    words = dict.fromkeys(
        INTERVAL_WORDS[row["interval"]] for one in results for row in one["curves"]
    )
    paired = any(one.get("ratio_to_oracle") for one in results)
    return f"Bands: 95 % intervals, {' or '.join(words)}{'; those of ratios are paired' * paired}."


def scaling_figure(folder: Path, result: dict[str, Any], rollouts: int) -> None:
    """Draw the cost of each G at n = `rollouts` of a step, `scaling.{pdf,svg,png}`."""
    with plt.rc_context(FONTS):
        figure, axes = plt.subplots(figsize=(6.4, 4.4), layout="constrained")
        scaling_panel(axes, result["scaling"], rollouts)
        axes.set_ylabel(EXTRA_ERROR)
        title = f"{_study_title(result)}, bands: 95 % for new questions"
        axes.set_title(title, fontsize=9, loc="left")
        save(figure, folder, "scaling")


def _study_title(result: dict[str, Any]) -> str:
    policy, corr = result["policy"], result["assumption2"]["corr"]
    relation = "all rewards of a question equal" if corr is None else f"corr(q, Z) = {corr:.2f}"
    return (
        f"{policy['name']}: {policy['quantity']} {policy['mean_reward']:.2f}, {relation}\n"
        f"{count_text(result['questions'], 'question')} x {result['pool_completions']} completions"
    )


def joint_mse_figure(
    folder: Path, name: str, studies: Sequence[RunRecord], notes: Sequence[str]
) -> None:
    """Draw the paper's Figure 4, `<name>.{pdf,svg,png}`: a panel per policy.

    The panel shows one setting, see `widest_setting`; below it is the MSE as a multiple of the
    oracle's.

    Args:
        studies: finished ones.
        notes: lines under the figure.
    """
    grid = panel_grid(studies)
    wide = max(map(len, grid))
    ratios = {}
    for run in studies:
        ratios[run] = ratio_rows(run.final_result, widest_setting(run.final_result))
    high = 2 if any(ratios.values()) else 1
    with plt.rc_context(FONTS):
        size = (0.6 + 3.6 * wide, 1.0 + (3.6 + 2.2 * (high - 1)) * len(grid))
        figure, panels = plt.subplots(
            high * len(grid), wide, figsize=size, squeeze=False, layout="constrained",
            height_ratios=(1.5, 1)[:high] * len(grid),
        )  # fmt: skip
        labels: dict[str, Any] = {}  # of every rule, whatever panels it is in
        for place, runs in enumerate(grid):
            line = panels[high * place : high * (place + 1)]
            for column, run in enumerate(runs):
                setting = widest_setting(run.final_result)
                rows = [row for row in run.final_result["curves"] if row["setting"] == setting]
                mse_panel(line[0, column], rows)
                line[0, column].set_title(
                    f"{panel_title(run)}\nbatch: {batch_text(rows[0])}", fontsize=8, loc="left"
                )
                handles, own = line[0, column].get_legend_handles_labels()
                labels |= dict(zip(own, handles, strict=True))
                if ratios[run]:
                    ratio_panel(line[1, column], ratios[run])
                elif high > 1:
                    line[1, column].set_visible(False)
            for axes in line[:, len(runs) :].flat:
                axes.set_visible(False)
            line[0, 0].set_ylabel("MSE of the gradient")
            if high > 1:
                line[1, 0].set_ylabel("MSE over the oracle's")
        figure.legend(
            list(labels.values()), list(labels), loc="outside upper left", frameon=False,
            fontsize=8, ncols=max(1, int(size[0] / 1.9)),
        )  # fmt: skip
        note(figure, notes, size[0])
        save(figure, folder, name)


def joint_fixed_n_figure(
    folder: Path, name: str, studies: Sequence[RunRecord], notes: Sequence[str]
) -> None:
    """Draw the cost of each G at a fixed number of rollouts, a panel per policy.

    Each data set has a line of panels, or several.

    Args:
        studies: finished ones.
        notes: lines under the figure.
    """
    grid = panel_grid(studies)
    wide, high = max(map(len, grid)), len(grid)
    with plt.rc_context(FONTS):
        size = (0.6 + 3.6 * wide, 0.8 + 3.6 * high)
        figure, panels = plt.subplots(high, wide, figsize=size, squeeze=False, layout="constrained")
        for line, runs in zip(panels, grid, strict=True):
            for axes, run in zip(line, runs, strict=False):
                scaling_panel(axes, run.final_result["scaling"], study_rollouts(run.config))
                axes.set_title(panel_title(run), fontsize=8, loc="left")
            for axes in line[len(runs) :]:
                axes.set_visible(False)
            line[0].set_ylabel(EXTRA_ERROR)
        if panels[0, 0].get_legend_handles_labels()[1]:
            panels[0, 0].legend(frameon=False, fontsize=8)
        note(figure, notes, size[0])
        save(figure, folder, name)


def panel_grid(studies: Sequence[RunRecord]) -> list[list[RunRecord]]:
    """Arrange studies in lines of panels, each line of one data set, in the studies' order."""
    by_dataset: dict[str | None, list[RunRecord]] = {}
    for run in studies:
        by_dataset.setdefault(run.dataset, []).append(run)
    return [
        runs[first : first + panels_wide(len(runs))]
        for runs in by_dataset.values()
        for first in range(0, len(runs), panels_wide(len(runs)))
    ]


def panel_title(run: RunRecord) -> str:
    """Return policy, accuracy or mean reward, data set and pool of a study."""
    result = run.final_result
    policy = result["policy"]
    seed = f", seed {run.config['seed']}" if run.config["seed"] else ""
    return (
        f"{run.policy}{seed}\n{policy['quantity']} {policy['mean_reward']:.3f} "
        f"[{policy['mean_reward_low']:.3f}, {policy['mean_reward_high']:.3f}]\n"
        f"{run.dataset}: {count_text(result['questions'], 'question')} x "
        f"{result['pool_completions']} completions"
    )


def widest_setting(result: dict[str, Any]) -> str:
    """Return the setting that has most of a study's baselines, the first of such."""
    baselines: dict[str, set[str]] = {}
    for row in result["curves"]:
        baselines.setdefault(row["setting"], set()).add(row["baseline"])
    return max(baselines, key=lambda setting: len(baselines[setting]))


def batch_text(row: dict[str, Any]) -> str:
    """Describe the batch of a row of a curve.

    >>> batch_text({"setting": "all_questions_once", "num_prompts": 500, "group_size": 4})
    'all 500 questions x G completions'
    >>> batch_text({"setting": "with_replacement", "num_prompts": 64, "group_size": 4})
    '256 rollouts: 256/G new questions x G completions'
    """
    if row["setting"] == "all_questions_once":
        return f"all {count_text(row['num_prompts'], 'question')} x G completions"
    rollouts = row["num_prompts"] * row["group_size"]
    return f"{rollouts} rollouts: {rollouts}/G new questions x G completions"


def ratio_rows(result: dict[str, Any], setting: str) -> list[dict[str, Any]]:
    """Return errors over the oracle's in one setting, with their paired intervals.

    Curves without any, such as those of rules without a closed form, have the plain ratio to the
    oracle of the same method.

    Returns:
        Rows of `baseline`, `group_size`, `ratio`, `ratio_low`, `ratio_high` and `unbiased`; a ratio
        of None is missing. There are no rows where every ratio is missing.
    """
    curves = [row for row in result["curves"] if row["setting"] == setting]
    unbiased = {row["baseline"]: row["unbiased"] for row in curves}
    errors = {(row["method"], row["baseline"], row["group_size"]): row["mse"] for row in curves}
    rows = {
        (row["baseline"], row["group_size"]): row
        for row in result.get("ratio_to_oracle", [])
        if row["setting"] == setting
    }
    for (method, baseline, size), mse in errors.items():
        oracle = errors.get((method, "oracle", size))
        if baseline != "oracle" and (baseline, size) not in rows and mse and oracle and oracle > 0:
            rows[baseline, size] = {"baseline": baseline, "group_size": size, "ratio": mse / oracle}
    if all(row["ratio"] is None for row in rows.values()):
        return []
    ends = {"ratio_low": None, "ratio_high": None}
    return [ends | row | {"unbiased": unbiased.get(row["baseline"], True)} for row in rows.values()]


def mse_panel(axes: Axes, rows: Sequence[dict[str, Any]]) -> None:
    """Draw the curves of one setting, a line per method and baseline, bands 95 %."""
    keys = dict.fromkeys((row["method"], row["baseline"]) for row in rows)
    several = len({method for method, _ in keys}) > 1
    for method, name in keys:
        curve = [row for row in rows if (row["method"], row["baseline"]) == (method, name)]
        colour, marker, label = baseline_style(name, curve[0]["unbiased"])
        curve = sorted(curve, key=lambda row: row["group_size"])
        errors = [math.nan if row["mse"] is None else row["mse"] for row in curve]  # a gap
        dashes = (
            GROUP_MEAN_DASHES
            if name == "group_mean" and method != "monte_carlo"
            else LINE_STYLES[method]
        )
        axes.plot(
            [row["group_size"] for row in curve], errors, linestyle=dashes,
            color=colour, marker=marker, markersize=4,
            label=f"{label}, {method}" if several else label,
        )  # fmt: skip
        axes.fill_between(
            [row["group_size"] for row in curve], *_band(curve, "low", "high"),
            color=colour, alpha=0.2, linewidth=0,
        )  # fmt: skip
    positive = [row["mse"] for row in rows if row["mse"] is not None and row["mse"] > 0]
    if positive:
        axes.set_yscale("log")
        highest = max(row["high"] or row["mse"] or 0 for row in rows)
        axes.set_ylim(min(positive) / 2, 2 * highest)
    else:
        axes.set_ylim(-1, 1)
        axes.text(0.5, 0.6, "no error above 0", transform=axes.transAxes, ha="center")
    log_sizes(axes, sorted({row["group_size"] for row in rows}))
    axes.set_xlabel("group size G")
    axes.grid(alpha=0.3, which="both", linewidth=0.5)


def ratio_panel(axes: Axes, rows: Sequence[dict[str, Any]]) -> None:
    """Draw errors over the oracle's, a line per baseline with its paired 95 % band.

    The `rows` are as `ratio_rows` returns them.
    """
    axes.axhline(1.0, color=STYLE["oracle"][0], linewidth=1.2)
    for name in dict.fromkeys(row["baseline"] for row in rows):
        curve = sorted(
            (row for row in rows if row["baseline"] == name), key=lambda row: row["group_size"]
        )
        colour, marker, _ = baseline_style(name, curve[0]["unbiased"])
        axes.plot(
            [row["group_size"] for row in curve],
            [math.nan if row["ratio"] is None else row["ratio"] for row in curve],  # a gap
            linestyle=GROUP_MEAN_DASHES if name == "group_mean" else "-", color=colour,
            marker=marker, markersize=4,
        )  # fmt: skip
        axes.fill_between(
            [row["group_size"] for row in curve], *_band(curve, "ratio_low", "ratio_high"),
            color=colour, alpha=0.2, linewidth=0,
        )  # fmt: skip
    values = [1.0, *(row["ratio"] for row in rows if row["ratio"] and row["ratio"] > 0)]
    lows, highs = ([row[end] for row in rows if row[end]] for end in ("ratio_low", "ratio_high"))
    bottom = max(min([*values, *lows]), min(values) / 3) / 1.1  # wider bands leave the picture
    top = 1.1 * min(max([*values, *highs]), 3 * max(values))
    axes.set_yscale("log")
    axes.set_ylim(bottom, top)
    apart = (top / bottom) ** 0.1  # so that their numbers do not overlap
    ticks = [1.0]
    for x in RATIO_TICKS:
        if bottom <= x <= top and all(max(x / y, y / x) > apart for y in ticks):
            ticks.append(x)
    axes.set_yticks(ticks, [f"{x:g}" for x in ticks])
    axes.set_yticks([], minor=True)
    log_sizes(axes, sorted({row["group_size"] for row in rows}))
    axes.set_xlabel("group size G")
    axes.grid(alpha=0.3, linewidth=0.5)


def _band(curve: Sequence[dict[str, Any]], low: str, high: str) -> tuple[list[float], list[float]]:
    """Return both ends of a band on a logarithmic axis.

    An end at 0 lies outside the picture, a missing end leaves a gap.
    """
    ends = [
        (math.nan, math.nan)
        if row[low] is None or row[high] is None
        else (max(row[low], 1e-9), row[high])
        for row in curve
    ]
    return [pair[0] for pair in ends], [pair[1] for pair in ends]


def scaling_panel(axes: Axes, scaling: dict[str, Any], rollouts: int) -> None:
    """Draw one study's extra error at a fixed number of rollouts.

    It is in percent of the error at the best group size that divides them: a curve over all sizes
    with simultaneous bands, dots at the sizes that divide. If the interval of G* has two ends, the
    dots are labelled with their costs, and a dashed line and a grey band mark G*; else a dotted
    line marks the lower end of G*.
    """
    law = ScalingLaw.of_result(scaling)
    costs = group_size_costs(law, divisible_rollouts(rollouts))
    colour = STYLE["leave_one_out"][0]
    best, low, high = (scaling[f"gstar{end}"] for end in ("", "_low", "_high"))
    size_text = best_size(best, low, high)
    named = [costs.best]
    for size in costs.extra:
        if all(max(size / other, other / size) > APART for other in named):
            named.append(size)
    log_sizes(axes, sorted(named))
    within = [size for size, extra in costs.extra.items() if 100 * extra.estimate <= TOP_PERCENT]
    axes.set_xlim(1.5, max([32, *within]) * 2.2)
    axes.set_ylim(-10, TOP_PERCENT)
    axes.grid(alpha=0.3, linewidth=0.5)
    if size_text is None:
        axes.text(0.5, 0.5, "not enough data for a best G", transform=axes.transAxes, ha="center")
        axes.set_xlabel("group size G")
        return
    dots = f"group size G;  dots: sizes that divide n = {costs.rollouts}"
    if high is None:
        axes.axvline(low, color="black", linestyle=":", linewidth=1)
        axes.set_xlabel(f"{dots}\ndotted: G* is {size_text}")
    else:
        axes.axvspan(low, high, color="#999999", alpha=0.3, linewidth=0)
        if best is not None:
            axes.axvline(best, ymin=0.12, color="black", linestyle="--", linewidth=1)
        axes.set_xlabel(f"{dots}\ndashed: G* = {size_text}")
    grid = np.geomspace(2, max(costs.extra), 200)
    curve = [law.extra_error(size, costs.best) for size in grid]
    heights, lows, highs = (100 * np.array(ends) for ends in zip(*curve, strict=True))
    axes.plot(grid, heights, color=colour, linewidth=1.5)
    highs = np.minimum(highs, 10 * TOP_PERCENT)  # some have no upper end
    axes.fill_between(grid, lows, highs, color=colour, alpha=0.2, linewidth=0)
    for size, extra in costs.extra.items():
        if not 100 * extra.estimate <= TOP_PERCENT - 10:
            continue
        is_best = size == costs.best
        axes.plot(size, 100 * extra.estimate, "o", color=colour, markersize=6)
        if high is None or size not in named:  # a cost against a best size that is not known
            continue
        axes.annotate(
            f"G = {size}" if is_best else percent(extra.estimate),
            (size, 100 * extra.estimate), (0, -14) if is_best else (6, -10) if size > costs.best
            else (4, 5), textcoords="offset points", fontsize=9, ha="center" if is_best else "left",
            fontweight="bold" if is_best else "normal",
            bbox=dict(facecolor="white", alpha=0.9, linewidth=0, pad=0.5), zorder=5,
        )  # fmt: skip
