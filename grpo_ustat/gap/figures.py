"""Figure of a theorem's test, with measurements as markers and predictions as lines."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from grpo_ustat.gap.evidence import Evidence, Panel
from grpo_ustat.pages.figures import figure_fonts, line_style, log_sizes, pyplot, save

if TYPE_CHECKING:
    from matplotlib.axes import Axes


def evidence_figure(folder: Path, evidence: Evidence, title: str) -> None:
    """Write the panel to `figure.{pdf,svg,png}`."""
    with figure_fonts():
        figure, axes = pyplot().subplots(figsize=(6.4, 4.6), layout="constrained")
        draw(axes, evidence.panel)
        figure.suptitle(f"{title}\n{evidence.answer}", fontsize=10, x=0.02, ha="left")
        save(figure, folder, "figure")


def draw(axes: Axes, panel: Panel) -> None:
    """Draw measurements, with their intervals if they have some, and predictions."""
    for place, series in enumerate(panel.series):
        (colour, marker), label = line_style(place), series.label
        x, measured = np.array(series.x, dtype=float), np.array(series.measured, dtype=float)
        if measured.size:
            y, *ends = measured.T if measured.ndim == 2 else (measured,)
            style = {"color": colour, "label": label, "linestyle": "none", "markersize": 4}
            axes.plot(x, y, marker=marker, **style)
            label = None
            if ends:
                # A logarithmic axis cannot show an interval that extends to 0.
                low = np.maximum(ends[0], y / 100) if "y" in panel.log else ends[0]
                axes.vlines(x, low, ends[1], color=colour, alpha=0.6, linewidth=1.2)
        if len(series.predicted):
            axes.plot(x, series.predicted, color=colour, linewidth=1.2, label=label)
    for name in panel.log:
        getattr(axes, f"set_{name}scale")("log")
    if panel.xlabel == "group size G":
        log_sizes(axes, sorted({int(x) for series in panel.series for x in series.x}))
    axes.set_xlabel(panel.xlabel, fontsize=9)
    axes.set_ylabel(panel.ylabel, fontsize=9)
    axes.tick_params(labelsize=8, which="both")
    axes.grid(alpha=0.3, which="major", linewidth=0.5)
    axes.legend(frameon=False, fontsize=7)
