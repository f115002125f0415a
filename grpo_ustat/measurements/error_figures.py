"""Figures of the gradient error, for a single study and for several studies side by side."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

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
from grpo_ustat.pages.figures import (
    STYLE,
    baseline_style,
    figure_fonts,
    fitted,
    legend_above,
    log_sizes,
    note,
    panel_figure,
    save,
    spaced_ticks,
)
from grpo_ustat.pages.tables import count_text

if TYPE_CHECKING:
    from matplotlib.axes import Axes

LINE_STYLES = {"closed_form": "-", "new_questions": "-", "monte_carlo": ":"}
GROUP_MEAN_DASHES = (0, (4, 2))
RATIO_TICKS = (0.01, 0.02, 0.05, 0.1, 0.2, 0.3, 0.5, 0.7, 1, 1.2, 1.5, 2, 3, 5, 10, 20, 50)
# Labels of the y-axes of a panel, from top to bottom.
ERROR_LABELS = ("mean squared error\nof the gradient", "error over\nthe oracle's")
# On a logarithmic axis, a lower end of 0 is drawn here, below the visible range.
BELOW = 1e-9


# A study, the way in which batches draw questions (see `CurveRow.setting`), and the panel's title.
Panel = tuple[Study, str, str]


def draw(folder: Path, study: Study) -> None:
    """Plot a study's MSE against G, one panel per setting; save it as `figure.{pdf,svg,png}`."""
    curves = study.need(CURVES)
    settings = {row.setting: row for row in curves}
    titles = [f"batch: {batch_text(row)}" for row in settings.values()]
    titles[0] = f"{study_title(study)}\n{titles[0]}"
    panels = [(study, name, title) for name, title in zip(settings, titles, strict=True)]
    _draw(folder, "figure", [panels], [bands_text([study]), *missing_errors(curves)])


def draw_joint(folder: Path, name: str, studies: Sequence[Study], notes: Sequence[str]) -> None:
    """Plot the paper's Figure 4, one panel per policy, and save it as `<name>.{pdf,svg,png}`.

    Each panel shows one setting; see `widest_setting`.

    Args:
        notes: Lines under the figure.
    """
    grid: list[list[Panel]] = []
    for in_line in panel_grid(studies):
        panels = []
        for study in in_line:
            setting = widest_setting(study)
            batch = next(batch_text(row) for row in study.need(CURVES) if row.setting == setting)
            panels.append((study, setting, f"{panel_title(study)}\nbatch: {batch}"))
        grid.append(panels)
    _draw(folder, name, grid, notes)


def _draw(
    folder: Path,
    name: str,
    grid: Sequence[Sequence[Panel]],
    notes: Sequence[str],
) -> None:
    """Draw panels of errors, each with the ratios to the oracle's error below it if any are known.

    Args:
        grid: Rows of panels.
        notes: Lines under the figure.
    """
    ratios = {
        (study, setting): ratio_rows(study, setting)
        for in_line in grid
        for study, setting, _ in in_line
    }
    heights = (1.0, 0.7) if any(ratios.values()) else (1.0,)
    with figure_fonts():
        figure, panels = panel_figure([len(in_line) for in_line in grid], heights)
        for line, in_line in zip(panels, grid, strict=True):
            for (above, *below), (study, setting, panel_text) in zip(line, in_line, strict=True):
                curves = [row for row in study.need(CURVES) if row.setting == setting]
                mse_panel(above, curves)
                above.set_title(fitted(panel_text, len(line)), loc="left")
                for axes in below:
                    unbiased = {row.baseline: row.unbiased for row in curves}
                    ratio_panel(axes, ratios[study, setting], unbiased)
            for axes, label in zip(line[0], ERROR_LABELS, strict=False):
                axes.set_ylabel(label)
        legend_above(figure)
        note(figure, notes)
        save(figure, folder, name)


def bands_text(studies: Iterable[Study]) -> str:
    """Return a note that explains the bands of errors and ratios."""
    words = dict.fromkeys(
        INTERVAL_WORDS[row.interval] for study in studies for row in study.need(CURVES)
    )
    paired = any(study.need(RATIOS) for study in studies)
    return (
        f"Bands are 95 % intervals {' or '.join(words)}{'; those of ratios are paired' * paired}."
    )


def widest_setting(study: Study) -> str:
    """Return the study's setting with the most baselines; if several have the most, the first."""
    baselines: dict[str, set[str]] = {}
    for row in study.need(CURVES):
        baselines.setdefault(row.setting, set()).add(row.baseline)
    return max(baselines, key=lambda setting: len(baselines[setting]))


def batch_text(row: CurveRow) -> str:
    """Describe the batch of a row, e.g. `256 rollouts: 256/G new questions x G completions`."""
    if row.setting == ONCE:
        return f"all {count_text(row.num_prompts, 'question')} x G completions"
    rollouts = row.num_prompts * row.group_size
    return f"{rollouts} rollouts: {rollouts}/G new questions x G completions"


def ratio_rows(study: Study, setting: str) -> list[OracleRatio]:
    """Return ratios of errors to the oracle's error in one setting, with paired intervals.

    If the ratios of a curve were not measured (for example, for a baseline without a closed form),
    its errors are divided by the oracle's errors from the same method, without an interval. The
    list is empty if every ratio is missing.
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
    """Plot the curves of one setting with 95 % bands, and with a line per method and baseline."""
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
    """Plot ratios to the oracle's error with paired 95 % bands, and with a line per baseline.

    Args:
        rows: Ratios; empty if the study has no error of the oracle.
        unbiased: Dictionary that maps the name of a baseline to True if the baseline is unbiased.
    """
    if not rows:
        axes.text(0.5, 0.5, "oracle not measured", transform=axes.transAxes, ha="center")
        return
    axes.axhline(1.0, color=STYLE["oracle"][0], linewidth=1.2)
    for name in dict.fromkeys(row.baseline for row in rows):
        points = sorted((row.group_size, row.ratio) for row in rows if row.baseline == name)
        colour, marker, _ = baseline_style(name, unbiased.get(name, True))
        dashes: Any = GROUP_MEAN_DASHES if name == "group_mean" else "-"
        axes.plot(*_line(points), linestyle=dashes, color=colour, marker=marker, markersize=4)
        axes.fill_between(*_band(points), color=colour, alpha=0.2, linewidth=0)
    values = [1.0, *(row.ratio.estimate for row in rows if row.ratio.estimate > 0)]
    ends = [end for row in rows for end in row.ratio[1:] if math.isfinite(end) and end != 0]
    # Very wide bands extend beyond the axis limits.
    bottom = max(min([*values, *ends]), min(values) / 3) / 1.1
    top = 1.1 * min(max([*values, *ends]), 3 * max(values))
    axes.set_yscale("log")
    axes.set_ylim(bottom, top)
    ticks = spaced_ticks(RATIO_TICKS, bottom, top, 0.12)
    axes.set_yticks(ticks, [f"{x:g}" for x in ticks])
    axes.set_yticks([], minor=True)
    log_sizes(axes, sorted({row.group_size for row in rows}))
    axes.set_xlabel("group size G")
    axes.grid(alpha=0.3, linewidth=0.5)


def _line(points: Sequence[tuple[int, Interval]]) -> tuple[list[int], list[float]]:
    """Return group sizes and estimates; a missing estimate is NaN, which leaves a gap."""
    return [size for size, _ in points], [value.estimate for _, value in points]


def _band(points: Sequence[tuple[int, Interval]]) -> tuple[list[int], list[float], list[float]]:
    """Return group sizes and both ends of a band on a logarithmic axis.

    If an end is missing, both ends are NaN, which leaves a gap. A lower end below `BELOW` is moved
    to `BELOW`, outside the visible range.
    """
    closed = [
        Interval(value.estimate, max(value.low, BELOW), value.high)
        if math.isfinite(value.low) and math.isfinite(value.high)
        else UNDETERMINED
        for _, value in points
    ]
    return [size for size, _ in points], [x.low for x in closed], [x.high for x in closed]
