"""Figure of a theorem's test, with measurements as markers and predictions as lines."""

from __future__ import annotations

from itertools import count
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from grpo_ustat.gap.evidence import Evidence, Panel
from grpo_ustat.pages.figures import (
    baseline_style,
    figure_fonts,
    line_style,
    log_sizes,
    pyplot,
    save,
)

if TYPE_CHECKING:
    from matplotlib.axes import Axes

# Name of the baseline of each curve label. It gives a baseline the same colour in every figure.
BASELINE_NAMES = {"vanilla": "none", "GRPO": "leave_one_out", "oracle": "oracle"}
# Largest number of panels in a row of the figure.
PANELS_ACROSS = 3
# Width and height of a panel in inches.
PANEL_INCHES = (4.6, 3.8)


def evidence_figure(folder: Path, evidence: Evidence, title: str) -> None:
    """Write all panels to `figure.{pdf,svg,png}`."""
    panels = evidence.panels
    columns = min(PANELS_ACROSS, len(panels))
    rows = -(-len(panels) // columns)
    size = (PANEL_INCHES[0] * columns, PANEL_INCHES[1] * rows + 0.5)
    with figure_fonts():
        figure, axes = pyplot().subplots(
            rows, columns, figsize=size, squeeze=False, layout="constrained"
        )
        for place, panel in zip(axes.flat, panels, strict=False):
            draw(place, panel)
        for place in axes.flat[len(panels) :]:
            place.set_visible(False)
        figure.suptitle(f"{title}\n{evidence.answer}", fontsize=10, x=0.02, ha="left")
        save(figure, folder, "figure")


def draw(axes: Axes, panel: Panel) -> None:
    """Draw one panel.

    Curves with the same label share a colour. A baseline has the same colour in every figure.
    """
    labels = list(dict.fromkeys(curve.label for curve in panel.curves))
    styles = {
        x: baseline_style(BASELINE_NAMES[x], unbiased=True)[:2]
        for x in labels
        if x in BASELINE_NAMES
    }
    others = (style for style in map(line_style, count()) if style not in styles.values())
    styles |= {label: next(others) for label in labels if label not in styles}
    legend: set[str] = set()
    for curve in panel.curves:
        colour, marker = styles[curve.label]
        label = None if curve.label in legend else curve.label
        legend.add(curve.label)
        x, y = np.array(curve.x, dtype=float), np.array(curve.y, dtype=float)
        if curve.predicted or curve.bound:
            dashes = "--" if curve.bound else "-"
            axes.plot(x, y, dashes, color=colour, linewidth=1.2, label=label)
            continue
        axes.plot(x, y, color=colour, marker=marker, markersize=4, linestyle="none", label=label)
        if curve.low is not None and curve.high is not None:
            low, high = np.array(curve.low, dtype=float), np.array(curve.high, dtype=float)
            # A logarithmic axis cannot show an interval that extends to 0.
            if "y" in panel.log:
                low = np.maximum(low, np.where(y > 0, y, np.nan) / 100)
            axes.vlines(x, low, high, color=colour, alpha=0.6, linewidth=1.2)
    for name in panel.log:
        getattr(axes, f"set_{name}scale")("log")
    if "x" in panel.log and panel.xlabel.startswith("group size"):
        log_sizes(axes, sorted({int(x) for curve in panel.curves for x in curve.x}))
    axes.set_title(panel.title, fontsize=9)
    axes.set_xlabel(panel.xlabel, fontsize=9)
    axes.set_ylabel(panel.ylabel, fontsize=9)
    axes.tick_params(labelsize=8, which="both")
    axes.grid(alpha=0.3, which="major", linewidth=0.5)
    axes.legend(frameon=False, fontsize=7)
