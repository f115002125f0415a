"""Figure of held-out accuracy or mean reward against the swept setting."""

from __future__ import annotations

import textwrap
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from grpo_ustat.estimators.intervals import Interval
from grpo_ustat.pages.figures import (
    figure_fonts,
    legend_above,
    legend_label,
    note,
    panel_figure,
    panel_rows,
    save,
    series_style,
)
from grpo_ustat.records import joint_quantity
from grpo_ustat.report.accuracy import AccuracyCell
from grpo_ustat.report.settings import Axis, value_text
from grpo_ustat.terminal.streams import excerpt, visible

if TYPE_CHECKING:
    from matplotlib.axes import Axes

# Maximum number of characters in a tick label.
MAX_CHARACTERS = 60


def accuracy_figure(
    folder: Path,
    name: str,
    cells: Sequence[AccuracyCell],
    rows: Sequence[dict[str, Any]],
    axis: Axis,
    notes: Sequence[str],
    gstar: Interval | None = None,
) -> None:
    """Draw the paper's Figure 5: held-out accuracy or mean reward by value of the swept setting.

    The figure has a panel per step and a line per series. Each seed is a small dot.

    Args:
        folder, name: Folder and base name of the output files `<folder>/<name>.{pdf,svg,png}`.
        cells: Cells of `accuracy.BY_LINE`.
        rows: Rows of individual runs; see `accuracy.accuracy_rows`.
        axis: Axis of the swept setting.
        notes: Lines to print below the figure.
        gstar: Group size with the smallest gradient error, G*, and its interval, drawn as a
            vertical band.
    """
    lines = list(dict.fromkeys(cell["line"] for cell in cells))
    quantity = joint_quantity(cell["quantity"] for cell in cells)
    steps = sorted({cell["step"] for cell in cells})
    with figure_fonts():
        figure, panels = panel_figure(panel_rows(len(steps)))
        for axes, step in zip(figure.axes, steps, strict=True):
            axes.sharey(figure.axes[0])
            _accuracy_panel(
                axes,
                [cell for cell in cells if cell["step"] == step],
                [row for row in rows if row["step"] == step],
                lines,
                axis,
            )
            if gstar is not None:
                _gstar_band(axes, gstar)
            axes.set_title(f"step {step}")
        for line in panels:
            line[0][0].set_ylabel(f"held-out {quantity}")
        if len(lines) > 1:
            legend_above(figure)
        note(figure, [*(lines if len(lines) == 1 else []), *notes])
        save(figure, folder, name)


def _accuracy_panel(
    axes: Axes,
    cells: Sequence[AccuracyCell],
    rows: Sequence[dict[str, Any]],
    lines: Sequence[str],
    axis: Axis,
) -> None:
    """Draw means and intervals at one step, with hollow markers for significantly smaller means."""
    positions = [axis.position(value) for value in axis.values]
    span = max(positions) - min(positions) or 1.0

    def shifted(x: float, share: float) -> float:
        """Move a point to the right by a share of the distance between neighbouring values."""
        if axis.is_logarithmic:
            return x * 2**share
        return x + share * span / max(len(positions) - 1, 1)

    # Use the colours that the learning curves use.
    by_value = len(lines) == 1 and not axis.is_numeric
    for i, name in enumerate(axis.values if by_value else lines):
        line = [cell for cell in cells if cell["x" if by_value else "line"] == name]
        line = sorted(line, key=lambda cell: axis.position(cell["x"]))
        if not line:
            continue
        of_line = [row for row in rows if row["x" if by_value else "line"] == name]
        title = f"{axis.key.removesuffix('.name')}={name}" if by_value else name
        place = 0 if by_value else i
        colour, marker = series_style(title, i)
        # Bars of different lines are drawn side by side so that they do not overlap.
        places = [shifted(axis.position(cell["x"]), 0.07 * place) for cell in line]
        if any(cell["seeds"] > 1 for cell in line):
            axes.plot(
                [shifted(axis.position(row["x"]), 0.07 * place - 0.1) for row in of_line],
                [row["mean_reward"] for row in of_line], ".", color=colour, markersize=5, alpha=0.6,
                markeredgewidth=0,
            )  # fmt: skip
        heights = [cell["mean_reward"] for cell in line]
        # Because of rounding, a mean of 0 or 1 may be slightly outside its interval.
        below = [max(0.0, cell["mean_reward"] - cell["low"]) for cell in line]
        above = [max(0.0, cell["high"] - cell["mean_reward"]) for cell in line]
        axes.errorbar(
            places, heights, (below, above), color=colour, marker=marker, markersize=4,
            linewidth=1, capsize=2, label=legend_label(title),
            linestyle="-" if axis.is_numeric else "none",
        )  # fmt: skip
        for x, y, cell in zip(places, heights, line, strict=True):
            if cell["distinct"]:
                axes.plot(
                    x, y, marker, color=colour, markerfacecolor="white", markersize=5, zorder=4
                )
    names = [excerpt(visible(value_text(value)), MAX_CHARACTERS) for value in axis.values]
    if axis.is_logarithmic:
        axes.set_xscale("log", base=2)
    axes.set_xticks(positions, [textwrap.fill(x, 14) for x in names])
    axes.set_xticks([], minor=True)
    if sum(map(len, names)) > 30:
        axes.tick_params(axis="x", labelrotation=25)
    if not axis.is_logarithmic:
        margin = 0.5 * span / max(len(positions) - 1, 1)
        axes.set_xlim(min(positions) - margin, max(positions) + margin)
    axes.set_xlabel(axis.label)
    axes.grid(alpha=0.3, linewidth=0.5)


def _gstar_band(axes: Axes, gstar: Interval) -> None:
    """Draw the interval of G* as a grey band with a dashed line at the estimate."""
    left, right = axes.get_xlim()
    axes.axvspan(
        max(gstar.low, left), max(left, min(gstar.high, right)), color="#999999", alpha=0.3,
        linewidth=0, zorder=0,
    )  # fmt: skip
    if left <= gstar.estimate <= right:
        axes.axvline(gstar.estimate, color="black", linestyle="--", linewidth=0.8, zorder=1)
    axes.set_xlim(left, right)
