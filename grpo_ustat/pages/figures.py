"""Common parts of all figures: fonts, colours, markers, lines below, and files (PDF, SVG, PNG)."""

from __future__ import annotations

import hashlib
import logging
import math
import textwrap
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import matplotlib
import matplotlib.pyplot as plt
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.text import Text
from matplotlib.ticker import FuncFormatter

from grpo_ustat.estimators.baselines import BASELINES
from grpo_ustat.pages.tables import broken
from grpo_ustat.terminal.console import excerpt
from grpo_ustat.terminal.streams import visible

matplotlib.use("Agg")
# fontTools reports every glyph table.
logging.getLogger("fontTools").setLevel(logging.WARNING)

# Okabe-Ito colours, and markers that differ in grey too.
STYLE = {
    "none": ("#D55E00", "s", "vanilla (no baseline)"),
    "leave_one_out": ("#0072B2", "o", "GRPO (leave_one_out)"),
    "group_mean": ("#56B4E9", "v", "group mean (biased)"),
    "oracle": ("#009E73", "D", "oracle"),
}
# Tol's muted scheme.
OTHER_COLOURS = (
    "#CC6677", "#332288", "#DDCC77", "#117733", "#882255", "#44AA99", "#999933", "#AA4499",
    "#88CCEE",
)  # fmt: skip
OTHER_MARKERS = "^PX<>*pdh"
# Inches that a page has for a figure: all are drawn at the size at which they are printed.
WIDTH = 6.4
# Points of letters, none of them smaller.
SMALL, LARGE = 8, 9
# The salt makes files of the same numbers equal.
FONTS: dict[Any, Any] = {
    "pdf.fonttype": 42, "svg.fonttype": "none", "svg.hashsalt": "grpo_ustat",
    "font.size": LARGE, "axes.titlesize": SMALL, "xtick.labelsize": SMALL,
    "ytick.labelsize": SMALL, "legend.fontsize": SMALL, "figure.titlesize": SMALL,
}  # fmt: skip
# Characters of small letters that fill the width of a figure.
LINE_CHARACTERS = 92
MAX_PANELS_WIDE = 3
# Inches of a line of panels.
PANEL_HEIGHT, SINGLE_PANEL_HEIGHT = 2.7, 3.8
UNDATED_METADATA = {"pdf": {"CreationDate": None}, "svg": {"Date": None}, "png": None}
# Characters of a line, and lines of a text.
MAX_CHARACTERS, MAX_LINES = 200, 40


def baseline_style(name: str, unbiased: bool) -> tuple[str, str, str]:
    """Return colour, marker and label of a baseline, the same in every figure.

    Our baselines have a pair of colour and marker each. A user's baseline, which need not be
    installed where it is drawn, has a pair that its name selects and that none of ours has.
    """
    if name in STYLE:
        return STYLE[name]
    others = [other for other in BASELINES if other not in STYLE]
    count = len(OTHER_COLOURS)
    # Markers are shifted against the colours each time that the colours begin again.
    shifts = -(-len(others) // count)
    if name in others:
        shift, place = divmod(others.index(name), count)
    else:
        digest = int.from_bytes(
            hashlib.blake2b(name.encode(errors="surrogatepass"), digest_size=8).digest(), "big"
        )
        place, shift = digest % count, shifts + digest // count % (count - shifts)
    colour, marker = OTHER_COLOURS[place], OTHER_MARKERS[(place + shift) % count]
    return colour, marker, legend_label(name if unbiased else f"{name} (biased)")


def legend_label(name: str) -> str:
    """Return a name as a legend shows it: matplotlib leaves out names that begin with `_`."""
    return f" {name}" if name.startswith("_") else name


def series_style(name: str, place: int) -> tuple[str, str]:
    """Return colour and marker of a series: of a baseline by its name, else by its place."""
    baseline = name.split("baseline=")[-1]
    if name.startswith("baseline=") and baseline in BASELINES:
        return baseline_style(baseline, unbiased=True)[:2]
    return line_style(place)


def line_style(place: int) -> tuple[str, str]:
    """Return colour and marker of the i-th of lines that have no names of their own."""
    styles = [STYLE[name][:2] for name in ("leave_one_out", "none", "oracle", "group_mean")]
    styles += zip(OTHER_COLOURS, OTHER_MARKERS, strict=True)
    return styles[place % len(styles)]


def panel_rows(count: int) -> list[int]:
    """Return the number of panels in each line of a figure: three at most, none of them empty.

    >>> [panel_rows(count) for count in range(1, 8)]
    [[1], [2], [3], [2, 2], [3, 2], [3, 3], [3, 2, 2]]
    """
    lines = -(-count // MAX_PANELS_WIDE)
    least, wider = divmod(count, lines)
    return [least + 1] * wider + [least] * (lines - wider)


def panel_figure(
    rows: Sequence[int], heights: Sequence[float] = (1.0,)
) -> tuple[Figure, list[list[list[Axes]]]]:
    """Return a figure and its panels by line; each line fills the width.

    Args:
        rows: number of panels in each line.
        heights: of the axes of a panel from above, in heights of a line of panels.

    Returns:
        The figure, and the axes of each panel from above.
    """
    inches = SINGLE_PANEL_HEIGHT if max(rows) == 1 else PANEL_HEIGHT
    # A title above the panels, and lines below them.
    size = (WIDTH, 0.6 + inches * sum(heights) * len(rows))
    figure = plt.figure(figsize=size, layout="constrained")
    columns = math.lcm(*rows)
    grid = figure.add_gridspec(
        len(heights) * len(rows), columns, height_ratios=[*heights] * len(rows)
    )
    panels = []
    for line, count in enumerate(rows):
        wide, tall = columns // count, range(line * len(heights), (line + 1) * len(heights))
        panels.append([
            [figure.add_subplot(grid[i, j * wide : (j + 1) * wide]) for i in tall]
            for j in range(count)
        ])  # fmt: skip
    return figure, panels


def fitted(text: str, count: int) -> str:
    """Break lines of a text that are wider than a panel.

    Args:
        count: panels in a line of the figure.
    """
    return broken(text, LINE_CHARACTERS // count - 2)


def legend_above(figure: Figure) -> None:
    """Add a legend of all panels above them, each label once; none where there is no line."""
    labels: dict[str, Any] = {}
    for axes in figure.axes:
        handles, names = axes.get_legend_handles_labels()
        labels |= dict(zip(names, handles, strict=True))
    if not labels:
        return
    # A line and the space between two labels take the width of some letters.
    longest = max(map(len, labels)) + 8
    figure.legend(
        list(labels.values()), list(labels), loc="outside upper left", frameon=False,
        ncols=max(1, LINE_CHARACTERS // longest),
    )  # fmt: skip


def spaced_ticks(
    candidates: Sequence[float], least: float, most: float, share: float
) -> list[float]:
    """Return 1 and those candidates along a logarithmic axis whose numbers do not overlap.

    Args:
        candidates: numbers to choose from, the first ones first.
        least, most: ends of the axis.
        share: of the axis that lies between two numbers at least.
    """
    gap, ticks = (most / least) ** share, [1.0]
    for x in candidates:
        if least <= x <= most and all(max(x / y, y / x) > gap for y in ticks):
            ticks.append(x)
    return ticks


def log_sizes(axes: Axes, sizes: Sequence[int]) -> None:
    """Set group sizes along a logarithmic axis, each named."""
    axes.set_xscale("log", base=2)
    axes.set_xticks(sizes, [str(size) for size in sizes])
    axes.set_xticks([], minor=True)


def note(figure: Figure, lines: Sequence[str], width: float = WIDTH) -> None:
    """Add small lines below a figure of so many inches."""
    words = "\n".join(textwrap.fill(visible(line), LINE_CHARACTERS) for line in lines)
    figure.supxlabel(words, fontsize=SMALL * width / WIDTH, x=0.02, ha="left")


def show_names_as_texts(figure: Figure) -> None:
    """Make all texts of a figure plain.

    Formulas are read only in numbers along its axes, long lines are cut, and invisible characters
    are spelt out.
    """
    for axes in figure.axes:
        for axis in (axes.xaxis, axes.yaxis):
            # That of Axes.set_xticks with names.
            named = isinstance(axis.get_major_formatter(), FuncFormatter)
            for tick in axis.get_major_ticks() if named else ():
                tick.label1.set_parse_math(False)
    numbers = {
        label
        for axes in figure.axes
        for label in (*axes.get_xticklabels(which="both"), *axes.get_yticklabels(which="both"))
    }
    for text in figure.findobj(Text):
        if text not in numbers:
            text.set_parse_math(False)
            lines = visible(text.get_text()).split("\n")
            text.set_text("\n".join(excerpt(line, MAX_CHARACTERS) for line in lines[:MAX_LINES]))


def save(figure: Figure, folder: Path, name: str) -> None:
    """Write a figure as PDF, SVG and PNG, laid out once for all three, and close it."""
    show_names_as_texts(figure)
    figure.draw_without_rendering()
    figure.set_layout_engine(None)
    for suffix, metadata in UNDATED_METADATA.items():
        figure.savefig(folder / f"{name}.{suffix}", dpi=150, metadata=metadata)
    plt.close(figure)
