"""Figures of the gradient's error: of one study, of several side by side, and their panels."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

from matplotlib.axes import Axes

from grpo_ustat.estimators.intervals import UNDETERMINED, Interval
from grpo_ustat.measurements.base import Study
from grpo_ustat.measurements.errors import (
    CURVES,
    INTERVAL_WORDS,
    ONCE,
    RATIOS,
    CurveRow,
    OracleRatio,
    missing_errors,
)
from grpo_ustat.measurements.panels import panel_grid, panel_title, study_title
from grpo_ustat.pages.figures import FONTS, STYLE, baseline_style, log_sizes, note, plt, save
from grpo_ustat.pages.tables import count_text

LINE_STYLES = {"closed_form": "-", "new_questions": "-", "monte_carlo": ":"}
GROUP_MEAN_DASHES = (0, (4, 2))
RATIO_TICKS = (0.01, 0.02, 0.05, 0.1, 0.2, 0.3, 0.5, 0.7, 1, 1.2, 1.5, 2, 3, 5, 10, 20, 50)
# On a logarithmic axis, a lower end of 0 is here, outside the picture.
BELOW = 1e-9


def draw(folder: Path, study: Study) -> None:
    """Draw one study's MSE against group size, `figure.{pdf,svg,png}`.

    There is a column of panels per setting; the lower panels show the MSE as a multiple of the
    oracle's.
    """
    curves = study.need(CURVES)
    settings = list(dict.fromkeys(row.setting for row in curves))
    ratios = [ratio_rows(study, setting) for setting in settings]
    high = 2 if any(ratios) else 1
    with plt.rc_context(FONTS):
        size = (1.4 + 5.0 * len(settings), 5.6 + 2.9 * (high - 1))
        figure, panels = plt.subplots(
            high, len(settings), figsize=size, squeeze=False, layout="constrained",
            height_ratios=(1.6, 1)[:high],
        )  # fmt: skip
        labels: dict[str, Any] = {}
        for column, setting in enumerate(settings):
            shown = [row for row in curves if row.setting == setting]
            title = f"batch: {batch_text(shown[0])}"
            labels |= _column(panels[:, column], shown, ratios[column], title, 9)
        panels[0, 0].set_ylabel("mean squared error of the gradient")
        if high > 1:
            panels[1, 0].set_ylabel("MSE over the oracle's")
        if len(labels) > 6 or len(settings) > 1:
            figure.legend(
                list(labels.values()), list(labels), loc="outside right upper", frameon=False,
                fontsize=8,
            )  # fmt: skip
        else:
            panels[0, 0].legend(frameon=False, fontsize=9)
        figure.suptitle(study_title(study), fontsize=9, x=0.02, ha="left")
        note(figure, [bands_text([study]), *missing_errors(curves)], size[0])
        save(figure, folder, "figure")


def draw_joint(folder: Path, name: str, studies: Sequence[Study], notes: Sequence[str]) -> None:
    """Draw the paper's Figure 4, `<name>.{pdf,svg,png}`: a panel per policy.

    The panel shows one setting, see `widest_setting`; below it is the MSE as a multiple of the
    oracle's.

    Args:
        notes: lines under the figure.
    """
    grid = panel_grid(studies)
    wide = max(map(len, grid))
    ratios = {study: ratio_rows(study, widest_setting(study)) for study in studies}
    high = 2 if any(ratios.values()) else 1
    with plt.rc_context(FONTS):
        size = (0.6 + 3.6 * wide, 1.0 + (3.6 + 2.2 * (high - 1)) * len(grid))
        figure, panels = plt.subplots(
            high * len(grid), wide, figsize=size, squeeze=False, layout="constrained",
            height_ratios=(1.5, 1)[:high] * len(grid),
        )  # fmt: skip
        labels: dict[str, Any] = {}
        for place, in_line in enumerate(grid):
            line = panels[high * place : high * (place + 1)]
            for column, study in enumerate(in_line):
                setting = widest_setting(study)
                shown = [row for row in study.need(CURVES) if row.setting == setting]
                title = f"{panel_title(study)}\nbatch: {batch_text(shown[0])}"
                labels |= _column(line[:, column], shown, ratios[study], title, 8)
            for axes in line[:, len(in_line) :].flat:
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


def _column(
    panels: Iterable[Axes],
    curves: Sequence[CurveRow],
    ratios: Sequence[OracleRatio],
    title: str,
    size: int,
) -> dict[str, Any]:
    """Draw errors, and below them their ratios where there are any; return lines by label.

    Args:
        curves: of one setting.
        size: of the title's letters.
    """
    above, *below = panels
    mse_panel(above, curves)
    above.set_title(title, fontsize=size, loc="left")
    for axes in below:
        if ratios:
            ratio_panel(axes, ratios, {row.baseline: row.unbiased for row in curves})
        else:
            axes.set_visible(False)
    handles, labels = above.get_legend_handles_labels()
    return dict(zip(labels, handles, strict=True))


def bands_text(studies: Iterable[Study]) -> str:
    """Return a note on the bands of errors and ratios."""
    words = dict.fromkeys(
        INTERVAL_WORDS[row.interval] for study in studies for row in study.need(CURVES)
    )
    paired = any(study.need(RATIOS) for study in studies)
    return f"Bands: 95 % intervals, {' or '.join(words)}{'; those of ratios are paired' * paired}."


def widest_setting(study: Study) -> str:
    """Return the setting that has most of a study's baselines, the first of such."""
    baselines: dict[str, set[str]] = {}
    for row in study.need(CURVES):
        baselines.setdefault(row.setting, set()).add(row.baseline)
    return max(baselines, key=lambda setting: len(baselines[setting]))


def batch_text(row: CurveRow) -> str:
    """Describe the batch of a row, as `256 rollouts: 256/G new questions x G completions`."""
    if row.setting == ONCE:
        return f"all {count_text(row.num_prompts, 'question')} x G completions"
    rollouts = row.num_prompts * row.group_size
    return f"{rollouts} rollouts: {rollouts}/G new questions x G completions"


def ratio_rows(study: Study, setting: str) -> list[OracleRatio]:
    """Return errors over the oracle's in one setting, with their paired intervals.

    Curves without any, such as those of baselines without a closed form, have the plain ratio to
    the oracle of the same method. There are no rows where every ratio is missing.
    """
    curves = [row for row in study.need(CURVES) if row.setting == setting]
    errors = {(row.method, row.baseline, row.group_size): row.error.estimate for row in curves}
    rows = {
        (row.baseline, row.group_size): row for row in study.need(RATIOS) if row.setting == setting
    }
    for row in curves:
        name, size = row.baseline, row.group_size
        error = errors[row.method, name, size]
        oracle = errors.get((row.method, "oracle", size), math.nan)
        if name != "oracle" and (name, size) not in rows and abs(error) > 0 and oracle > 0:
            rows[name, size] = OracleRatio(
                baseline=name,
                setting=setting,
                group_size=size,
                num_prompts=row.num_prompts,
                ratio=UNDETERMINED._replace(estimate=error / oracle),
            )
    return list(rows.values()) if any(row.ratio.is_known for row in rows.values()) else []


def mse_panel(axes: Axes, rows: Sequence[CurveRow]) -> None:
    """Draw the curves of one setting, a line per method and baseline, bands 95 %."""
    keys = dict.fromkeys((row.method, row.baseline) for row in rows)
    several = len({method for method, _ in keys}) > 1
    for method, name in keys:
        curve = [row for row in rows if (row.method, row.baseline) == (method, name)]
        colour, marker, label = baseline_style(name, curve[0].unbiased)
        dashes: Any = LINE_STYLES[method]
        if name == "group_mean" and method != "monte_carlo":
            dashes = GROUP_MEAN_DASHES
        points = sorted((row.group_size, row.error) for row in curve)
        axes.plot(
            *_line(points), linestyle=dashes, color=colour, marker=marker, markersize=4,
            label=f"{label}, {method}" if several else label,
        )  # fmt: skip
        axes.fill_between(*_band(points), color=colour, alpha=0.2, linewidth=0)
    positive = [row.error.estimate for row in rows if row.error.estimate > 0]
    if positive:
        axes.set_yscale("log")
        highs = [row.error.high for row in rows if math.isfinite(row.error.high)]
        axes.set_ylim(min(positive) / 2, 2 * max([*positive, *highs]))
    else:
        axes.set_ylim(-1, 1)
        axes.text(0.5, 0.6, "no error above 0", transform=axes.transAxes, ha="center")
    log_sizes(axes, sorted({row.group_size for row in rows}))
    axes.set_xlabel("group size G")
    axes.grid(alpha=0.3, which="both", linewidth=0.5)


def ratio_panel(axes: Axes, rows: Sequence[OracleRatio], unbiased: dict[str, bool]) -> None:
    """Draw errors over the oracle's, a line per baseline with its paired 95 % band.

    Args:
        unbiased: by baseline.
    """
    axes.axhline(1.0, color=STYLE["oracle"][0], linewidth=1.2)
    for name in dict.fromkeys(row.baseline for row in rows):
        points = sorted((row.group_size, row.ratio) for row in rows if row.baseline == name)
        colour, marker, _ = baseline_style(name, unbiased.get(name, True))
        dashes: Any = GROUP_MEAN_DASHES if name == "group_mean" else "-"
        axes.plot(*_line(points), linestyle=dashes, color=colour, marker=marker, markersize=4)
        axes.fill_between(*_band(points), color=colour, alpha=0.2, linewidth=0)
    values = [1.0, *(row.ratio.estimate for row in rows if row.ratio.estimate > 0)]
    ends = [end for row in rows for end in row.ratio[1:] if math.isfinite(end) and end != 0]
    # Wider bands leave the picture.
    bottom = max(min([*values, *ends]), min(values) / 3) / 1.1
    top = 1.1 * min(max([*values, *ends]), 3 * max(values))
    axes.set_yscale("log")
    axes.set_ylim(bottom, top)
    # So that the numbers of ticks do not overlap.
    apart = (top / bottom) ** 0.1
    ticks = [1.0]
    for x in RATIO_TICKS:
        if bottom <= x <= top and all(max(x / y, y / x) > apart for y in ticks):
            ticks.append(x)
    axes.set_yticks(ticks, [f"{x:g}" for x in ticks])
    axes.set_yticks([], minor=True)
    log_sizes(axes, sorted({row.group_size for row in rows}))
    axes.set_xlabel("group size G")
    axes.grid(alpha=0.3, linewidth=0.5)


def _line(points: Sequence[tuple[int, Interval]]) -> tuple[list[int], list[float]]:
    """Return group sizes and estimates; a missing one is NaN, a gap."""
    return [size for size, _ in points], [value.estimate for _, value in points]


def _band(points: Sequence[tuple[int, Interval]]) -> tuple[list[int], list[float], list[float]]:
    """Return group sizes and both ends of a band on a logarithmic axis; gaps where one is missing.

    An end at 0 lies outside the picture.
    """
    whole = [
        Interval(value.estimate, max(value.low, BELOW), value.high)
        if math.isfinite(value.low) and math.isfinite(value.high)
        else UNDETERMINED
        for _, value in points
    ]
    return [size for size, _ in points], [x.low for x in whole], [x.high for x in whole]
