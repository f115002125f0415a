"""Figures: PDF with embedded fonts, SVG, PNG; colour-blind safe."""

from __future__ import annotations

import logging
import textwrap
from pathlib import Path
from typing import Any

import matplotlib

matplotlib.use("Agg")
logging.getLogger("fontTools").setLevel(logging.WARNING)  # it reports every glyph table
import matplotlib.pyplot as plt  # noqa: E402 (the backend is chosen first)

from grpo_ustat.estimators.baselines import BASELINES  # noqa: E402

STYLE = {  # Okabe-Ito colours, and markers that differ in grey too
    "none": ("#D55E00", "s", "vanilla (none)"),
    "leave_one_out": ("#0072B2", "o", "GRPO (leave_one_out)"),
    "group_mean": ("#56B4E9", "v", "group_mean (biased)"),
    "oracle": ("#009E73", "D", "oracle"),
}
OTHER_COLOURS = (  # Tol's muted scheme
    "#CC6677", "#332288", "#DDCC77", "#117733", "#882255", "#44AA99", "#999933", "#AA4499",
    "#88CCEE",
)  # fmt: skip
OTHER_MARKERS = "^PX<>*pdh"
LINES = {"closed_form": "-", "replay": "--", "monte_carlo": ":"}
FIXED_N = "n x MSE at n = B G rollouts, any n (leave_one_out)"
FONTS = {
    "pdf.fonttype": 42, "svg.fonttype": "none", "font.size": 10,
    "svg.hashsalt": "grpo_ustat",  # the same numbers make the same file
}  # fmt: skip
UNDATED = {"pdf": {"CreationDate": None}, "svg": {"Date": None}, "png": None}


def mse_figure(folder: Path, result: dict[str, Any]) -> None:
    """MSE against group size, a panel per setting, with 95 % bands; `figure.{pdf,svg,png}`."""
    rows = [row for row in result["curves"] if row["target"].endswith("expected reward")]
    points = list(dict.fromkeys((row["setting"], row["num_prompts"]) for row in rows))
    with plt.rc_context(FONTS):
        size = (1.4 + 5.0 * len(points) + 2.0 * (len(rows) > 36), 5.0)
        figure, panels = plt.subplots(
            1, len(points), figsize=size, squeeze=False, layout="constrained"
        )
        for axes, point in zip(panels[0], points, strict=True):
            mse_panel(axes, [r for r in rows if (r["setting"], r["num_prompts"]) == point])
            if len(points) > 1:
                axes.set_title(f"{point[0].replace('_', ' ')}, B = {point[1]}", fontsize=9)
        panels[0, 0].set_ylabel("mean squared error of the gradient")
        handles, labels = panels[0, 0].get_legend_handles_labels()
        if len(labels) > 6:
            figure.legend(handles, labels, loc="outside right upper", frameon=False, fontsize=8)
        else:
            panels[0, 0].legend(frameon=False, fontsize=9)
        figure.suptitle(_title(result), fontsize=9, x=0.02, ha="left")
        note(figure, [result["summary"]], size[0])
        save(figure, folder, "figure")


def scaling_figure(folder: Path, result: dict[str, Any]) -> None:
    """n times the MSE at n rollouts against G, its minimum and interval; `scaling.*`."""
    with plt.rc_context(FONTS):
        figure, axes = plt.subplots(figsize=(6.4, 4.4), layout="constrained")
        scaling_panel(axes, result["scaling"])
        axes.set_ylabel(FIXED_N)
        axes.set_title(_title(result), fontsize=9, loc="left")
        save(figure, folder, "scaling")


def scaling_panel(axes, scaling: dict[str, Any]) -> None:
    """One study's curve at a fixed number of rollouts; a dashed line and a grey band at G*."""
    curve = scaling["curve"]
    sizes, colour = [point["group_size"] for point in curve], STYLE["leave_one_out"][0]
    axes.plot(sizes, [p["n_mse"] for p in curve], color=colour, marker="o", markersize=4)
    axes.fill_between(
        sizes, [max(p["low"], 1e-9) for p in curve], [p["high"] for p in curve],
        color=colour, alpha=0.2, linewidth=0,
    )  # fmt: skip
    _best_size(axes, *(scaling[f"gstar{end}"] for end in ("", "_low", "_high")))
    log_sizes(axes, [2**k for k in range(1, 9)])
    axes.set_yscale("log")
    lowest, highest = (end(p["n_mse"] for p in curve) for end in (min, max))
    if lowest > 0:  # a band that reaches 0 is cut by the frame
        axes.set_ylim(lowest / 3, 3 * highest)
    axes.grid(alpha=0.3, which="both", linewidth=0.5)


def _best_size(axes, best: float | None, low: float | None, high: float | None) -> None:
    if low is None:
        axes.set_xlabel("group size G;  G* has no finite interval")
        return
    axes.axvspan(low, high, color="#999999", alpha=0.3, linewidth=0)
    axes.axvline(best, color="black", linestyle="--", linewidth=1)
    axes.set_xlabel(f"group size G;  dashed: G* = {best:.1f} [{low:.1f}, {high:.1f}]")


def log_sizes(axes, sizes: list[int]) -> None:
    """Group sizes along a logarithmic axis, each named."""
    axes.set_xscale("log", base=2)
    axes.set_xticks(sizes, [str(size) for size in sizes])
    axes.set_xticks([], minor=True)


def note(figure, lines: list[str], width: float) -> None:
    """Small lines below a figure of so many inches."""
    words = "\n".join(textwrap.fill(line, int(17 * width)) for line in lines)
    figure.supxlabel(words.replace("$", r"\$"), fontsize=6.5, x=0.02, ha="left")


def mse_panel(axes, rows: list[dict[str, Any]]) -> None:
    """Curves of one setting, a line per method and baseline, bands 95 %."""
    keys = dict.fromkeys((row["method"], row["baseline"]) for row in rows)
    for method, name in keys:
        mine = [r for r in rows if (r["method"], r["baseline"]) == (method, name)]
        _curve(axes, mine, method, name, several=len({m for m, _ in keys}) > 1)
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


def save(figure, folder: Path, name: str) -> None:
    """As PDF, SVG and PNG, and close it; laid out once for all three."""
    figure.draw_without_rendering()
    figure.set_layout_engine(None)
    for suffix, metadata in UNDATED.items():
        figure.savefig(folder / f"{name}.{suffix}", dpi=150, metadata=metadata)
    plt.close(figure)


def _curve(axes, rows: list[dict[str, Any]], method: str, name: str, several: bool) -> None:
    colour, marker, label = _style(name)
    rows = sorted((r for r in rows if r["mse"] is not None), key=lambda row: row["group_size"])
    if several:
        label += f", {method}"
    sizes, mse = [row["group_size"] for row in rows], [row["mse"] for row in rows]
    axes.plot(sizes, mse, LINES[method], color=colour, marker=marker, markersize=4, label=label)
    known = [row for row in rows if row["low"] is not None and row["high"] is not None]
    axes.fill_between(
        [row["group_size"] for row in known],
        [max(row["low"], 1e-9) for row in known],  # a band that reaches 0 leaves the picture
        [row["high"] for row in known],
        color=colour, alpha=0.2, linewidth=0,
    )  # fmt: skip


def line_style(place: int) -> tuple[str, str]:
    """Colour and marker of the i-th of lines that have no names of their own."""
    named = [STYLE[name][:2] for name in ("leave_one_out", "none", "oracle", "group_mean")]
    known = [*named, *zip(OTHER_COLOURS, OTHER_MARKERS, strict=True)]
    return known[place % len(known)]


def _style(name: str) -> tuple[str, str, str]:
    """Colour, marker and label of a rule, the same in every figure."""
    if name in STYLE:
        return STYLE[name]
    place = [other for other in BASELINES if other not in STYLE].index(name)
    colour = OTHER_COLOURS[place % len(OTHER_COLOURS)]
    label = name if BASELINES[name].unbiased else f"{name} (biased)"
    return colour, OTHER_MARKERS[place % len(OTHER_MARKERS)], label


def _title(result: dict[str, Any]) -> str:
    policy, corr = result["policy"], result["assumption2"]["corr"]
    relation = "all rewards of a question equal" if corr is None else f"corr(q, Z) = {corr:.2f}"
    return (
        f"{policy['name']}: accuracy {policy['accuracy']:.2f}, {relation}\n"
        f"{result['questions']} questions x {result['pool_completions']} completions, bands: 95 %"
    )
