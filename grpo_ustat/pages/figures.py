"""Common parts of figures: fonts, colours, markers, notes and output files (PDF, SVG, PNG)."""

from __future__ import annotations

import hashlib
import importlib
import logging
import math
import textwrap
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

from grpo_ustat.estimators.baselines import BASELINES
from grpo_ustat.pages.tables import broken
from grpo_ustat.terminal.streams import excerpt, visible

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

# Okabe-Ito colours. The markers also differ, so that lines can be told apart in grey.
STYLE = {
    "none": ("#D55E00", "s", "vanilla (no baseline)"),
    "leave_one_out": ("#0072B2", "o", "GRPO (leave_one_out)"),
    "group_mean": ("#56B4E9", "v", "group mean (biased)"),
    "oracle": ("#009E73", "D", "oracle"),
}
# Tol's muted colour scheme.
OTHER_COLOURS = (
    "#CC6677", "#332288", "#DDCC77", "#117733", "#882255", "#44AA99", "#999933", "#AA4499",
    "#88CCEE",
)  # fmt: skip
OTHER_MARKERS = "^PX<>*pdh"
# Width of all figures in inches; they are printed at this width.
WIDTH = 6.4
# Font sizes in points; no text is smaller.
SMALL, LARGE = 8, 9
# With a fixed salt, equal figures give identical SVG files.
FONTS: dict[Any, Any] = {
    "pdf.fonttype": 42, "svg.fonttype": "none", "svg.hashsalt": "grpo_ustat",
    "font.size": LARGE, "axes.titlesize": SMALL, "xtick.labelsize": SMALL,
    "ytick.labelsize": SMALL, "legend.fontsize": SMALL, "figure.titlesize": SMALL,
}  # fmt: skip
# Number of characters per line of small text across the width of a figure.
LINE_CHARACTERS = 92
MAX_PANELS_WIDE = 3
# Height of a row of panels in inches.
PANEL_HEIGHT, SINGLE_PANEL_HEIGHT = 2.7, 3.8
UNDATED_METADATA = {"pdf": {"CreationDate": None}, "svg": {"Date": None}, "png": None}
# Maximum number of characters per line, and maximum number of lines per text.
MAX_CHARACTERS, MAX_LINES = 200, 40


def pyplot() -> Any:
    """Import matplotlib's pyplot, which draws to files only.

    It is not imported together with this module, so that commands that only read results start
    fast.
    """
    import matplotlib

    matplotlib.use("Agg")
    # At lower levels fontTools logs every glyph table.
    logging.getLogger("fontTools").setLevel(logging.WARNING)
    return importlib.import_module("matplotlib.pyplot")


@contextmanager
def figure_fonts() -> Iterator[None]:
    """Use the fonts of all figures in the block."""
    with pyplot().rc_context(FONTS):
        yield


def baseline_style(name: str, unbiased: bool) -> tuple[str, str, str]:
    """Return a baseline's colour, marker and label, which are the same in all figures.

    Each built-in baseline has a fixed pair of colour and marker. A user-defined baseline gets one
    of the pairs that no built-in baseline uses, chosen by a hash of its name. So its pair is the
    same on every machine, even if the baseline is not installed there.
    """
    if name in STYLE:
        return STYLE[name]
    others = [other for other in BASELINES if other not in STYLE]
    count = len(OTHER_COLOURS)
    # When the list of colours is used again, each colour gets the next marker in the list.
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
    """Return a label for a legend; matplotlib would drop labels that begin with `_`."""
    return f" {name}" if name.startswith("_") else name


def series_style(name: str, place: int) -> tuple[str, str]:
    """Return a series' colour and marker, chosen by name for a baseline and otherwise by index."""
    baseline = name.split("baseline=")[-1]
    if name.startswith("baseline=") and baseline in BASELINES:
        return baseline_style(baseline, unbiased=True)[:2]
    return line_style(place)


def line_style(place: int) -> tuple[str, str]:
    """Return the colour and marker of line number `place` among lines that are not baselines."""
    styles = [STYLE[name][:2] for name in ("leave_one_out", "none", "oracle", "group_mean")]
    styles += zip(OTHER_COLOURS, OTHER_MARKERS, strict=True)
    return styles[place % len(styles)]


def panel_rows(count: int) -> list[int]:
    """Return the number of panels in each row of a figure: at most three, with no gaps.

    >>> [panel_rows(count) for count in range(1, 8)]
    [[1], [2], [3], [2, 2], [3, 2], [3, 3], [3, 2, 2]]
    """
    lines = -(-count // MAX_PANELS_WIDE)
    least, wider = divmod(count, lines)
    return [least + 1] * wider + [least] * (lines - wider)


def panel_figure(
    rows: Sequence[int], heights: Sequence[float] = (1.0,)
) -> tuple[Figure, list[list[list[Axes]]]]:
    """Return a figure and its panels by row; each row fills the figure's width.

    Args:
        rows: Number of panels in each row.
        heights: Heights of a panel's axes from top to bottom, relative to the height of a row.

    Returns:
        The figure, and a list of axes from top to bottom for each panel of each row.
    """
    inches = SINGLE_PANEL_HEIGHT if max(rows) == 1 else PANEL_HEIGHT
    # The additional 0.6 inches hold a title above the panels and notes below them.
    size = (WIDTH, 0.6 + inches * sum(heights) * len(rows))
    figure = pyplot().figure(figsize=size, layout="constrained")
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
    """Break all lines of a text that are wider than a panel.

    Args:
        count: Number of panels in a row of the figure.
    """
    return broken(text, LINE_CHARACTERS // count - 2)


def legend_above(figure: Figure) -> None:
    """Add a legend above the panels with each label once; add none if there are no labels."""
    labels: dict[str, Any] = {}
    for axes in figure.axes:
        handles, names = axes.get_legend_handles_labels()
        labels |= dict(zip(names, handles, strict=True))
    if not labels:
        return
    # The line sample of a label and the gap to the next label take about 8 characters.
    longest = max(map(len, labels)) + 8
    figure.legend(
        list(labels.values()), list(labels), loc="outside upper left", frameon=False,
        ncols=max(1, LINE_CHARACTERS // longest),
    )  # fmt: skip


def spaced_ticks(
    candidates: Sequence[float], least: float, most: float, share: float
) -> list[float]:
    """Choose ticks for a logarithmic axis whose labels do not overlap: 1 and some candidates.

    Args:
        candidates: Numbers to choose from; earlier numbers have priority.
        least, most: Ends of the axis.
        share: Minimum distance between two ticks, as a share of the axis length.
    """
    gap, ticks = (most / least) ** share, [1.0]
    for x in candidates:
        if least <= x <= most and all(max(x / y, y / x) > gap for y in ticks):
            ticks.append(x)
    return ticks


def log_sizes(axes: Axes, sizes: Sequence[int]) -> None:
    """Make the x-axis logarithmic, with a labelled tick at each group size."""
    axes.set_xscale("log", base=2)
    axes.set_xticks(sizes, [str(size) for size in sizes])
    axes.set_xticks([], minor=True)


def note(figure: Figure, lines: Sequence[str], width: float = WIDTH) -> None:
    """Add lines of small text below a figure.

    Args:
        width: Width of the figure in inches.
    """
    words = "\n".join(textwrap.fill(visible(line), LINE_CHARACTERS) for line in lines)
    figure.supxlabel(words, fontsize=SMALL * width / WIDTH, x=0.02, ha="left")


def show_names_as_texts(figure: Figure) -> None:
    """Show all texts of a figure literally, without parsing them as formulas.

    Numeric tick labels are the exception. Long lines are truncated, and invisible characters are
    spelt out.
    """
    from matplotlib.text import Text
    from matplotlib.ticker import FuncFormatter

    for axes in figure.axes:
        for axis in (axes.xaxis, axes.yaxis):
            # Axes.set_xticks with labels installs this formatter.
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
    """Write a figure as PDF, SVG and PNG with the same layout, then close the figure."""
    show_names_as_texts(figure)
    figure.draw_without_rendering()
    figure.set_layout_engine(None)
    for suffix, metadata in UNDATED_METADATA.items():
        figure.savefig(folder / f"{name}.{suffix}", dpi=150, metadata=metadata)
    pyplot().close(figure)
