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

from grpo_ustat.config import MseConfig  # noqa: E402
from grpo_ustat.estimators.baselines import BASELINES  # noqa: E402
from grpo_ustat.runs.points import Point  # noqa: E402

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
OTHER_MARKERS = "^PX<>*pd"
LINES = {"closed_form": "-", "replay": "--", "monte_carlo": ":"}
FONTS = {
    "pdf.fonttype": 42, "svg.fonttype": "none", "font.size": 10,
    "svg.hashsalt": "grpo_ustat",  # the same numbers make the same file
}  # fmt: skip
UNDATED = {"pdf": {"CreationDate": None}, "svg": {"Date": None}, "png": None}


def mse_figure(folder: Path, result: dict[str, Any], config: MseConfig) -> None:
    """MSE against group size, a panel per setting, with 95 % bands; `figure.{pdf,svg,png}`."""
    rows = [row for row in result["curves"] if row["target"].endswith("expected reward")]
    points = list(dict.fromkeys((row["setting"], row["num_prompts"]) for row in rows))
    with plt.rc_context(FONTS):
        size = (1.4 + 5.0 * len(points) + 2.0 * (len(rows) > 36), 5.0)
        figure, panels = plt.subplots(
            1, len(points), figsize=size, squeeze=False, layout="constrained"
        )
        for axes, point in zip(panels[0], points, strict=True):
            _panel(axes, [r for r in rows if (r["setting"], r["num_prompts"]) == point], config)
            if len(points) > 1:
                axes.set_title(f"{point[0].replace('_', ' ')}, B = {point[1]}", fontsize=9)
        panels[0, 0].set_ylabel("mean squared error of the gradient")
        handles, labels = panels[0, 0].get_legend_handles_labels()
        if len(labels) > 6:
            figure.legend(handles, labels, loc="outside right upper", frameon=False, fontsize=8)
        else:
            panels[0, 0].legend(frameon=False, fontsize=9)
        figure.suptitle(_title(result), fontsize=9, x=0.02, ha="left")
        words = textwrap.fill(result["summary"], int(17 * size[0]))
        figure.supxlabel(words.replace("$", r"\$"), fontsize=6.5, x=0.02, ha="left")
        _save(figure, folder, "figure")


def scaling_figure(folder: Path, result: dict[str, Any]) -> None:
    """n times the MSE at n rollouts against G, its minimum and interval; `scaling.*`."""
    curve, scaling = result["scaling"]["curve"], result["scaling"]
    sizes = [point["group_size"] for point in curve]
    with plt.rc_context(FONTS):
        figure, axes = plt.subplots(figsize=(6.4, 4.4), layout="constrained")
        colour = STYLE["leave_one_out"][0]
        axes.plot(sizes, [p["n_mse"] for p in curve], color=colour, marker="o", markersize=4)
        axes.fill_between(
            sizes, [max(p["low"], 1e-9) for p in curve], [p["high"] for p in curve],
            color=colour, alpha=0.2, linewidth=0,
        )  # fmt: skip
        best, low, high = (scaling[f"gstar{end}"] for end in ("", "_low", "_high"))
        if low is not None:
            axes.axvspan(low, high, color="#999999", alpha=0.3, linewidth=0)
            axes.axvline(best, color="black", linestyle="--", linewidth=1)
            axes.set_xlabel(f"group size G;  dashed: G* = {best:.1f} [{low:.1f}, {high:.1f}]")
        else:
            axes.set_xlabel("group size G;  G* has no finite interval")
        axes.set_xscale("log", base=2)
        axes.set_yscale("log")
        ticks = [2**k for k in range(1, 9)]
        axes.set_xticks(ticks, [str(t) for t in ticks])
        lowest, highest = (end(p["n_mse"] for p in curve) for end in (min, max))
        if lowest > 0:  # a band that reaches 0 is cut by the frame
            axes.set_ylim(lowest / 3, 3 * highest)
        axes.set_ylabel("n x MSE at n = B G rollouts, any n (leave_one_out)")
        axes.grid(alpha=0.3, which="both", linewidth=0.5)
        axes.set_title(_title(result), fontsize=9, loc="left")
        _save(figure, folder, "scaling")


def joint_mse_figure(folder: Path, found: list[tuple[Point, dict]], missing: list[str]) -> None:
    """A panel per study of a sweep, a row per data set; `figure.{pdf,svg,png}`.

    Of each study the first setting, against the expected reward.
    """
    datasets = list(dict.fromkeys(point.config.dataset.name for point, _ in found))
    grid = [[x for x in found if x[0].config.dataset.name == name] for name in datasets]
    wide, high = max(map(len, grid)), len(grid)
    with plt.rc_context(FONTS):
        figure, panels = plt.subplots(
            high, wide, figsize=(0.6 + 3.6 * wide, 0.8 + 3.6 * high), squeeze=False,
            layout="constrained",
        )  # fmt: skip
        for line, studies in zip(panels, grid, strict=True):
            for axes, study in zip(line, studies, strict=False):
                _study_panel(axes, *study)
            for axes in line[len(studies) :]:
                axes.set_visible(False)
            line[0].set_ylabel(f"MSE of the gradient\n{studies[0][0].config.dataset.name}")
        panels[0, 0].legend(frameon=False, fontsize=8)
        words = ["Bands: 95 % intervals."] + [f"Missing: {name}." for name in missing]
        figure.supxlabel("  ".join(words), fontsize=7, x=0.02, ha="left")
        _save(figure, folder, "figure")


def _study_panel(axes, point: Point, result: dict[str, Any]) -> None:
    rows = [row for row in result["curves"] if row["target"].endswith("expected reward")]
    first = (rows[0]["setting"], rows[0]["num_prompts"])
    _panel(axes, [r for r in rows if (r["setting"], r["num_prompts"]) == first], point.config)
    policy = result["policy"]
    axes.set_title(
        f"{point.policy}\naccuracy {policy['accuracy']:.3f} "
        f"[{policy['accuracy_low']:.3f}, {policy['accuracy_high']:.3f}]\n"
        f"{result['questions']} questions x {result['pool_completions']} completions",
        fontsize=8, loc="left",
    )  # fmt: skip


def joint_accuracy_figure(folder: Path, cells: list[dict[str, Any]], notes: list[str]) -> None:
    """Held-out accuracy against G, a panel per step, a line per series; `figure.{pdf,svg,png}`.

    Args:
        folder: where to.
        cells: see `joint.accuracy_cells`.
        notes: lines under the figure.
    """
    steps = sorted({cell["step"] for cell in cells})
    wide = min(4, len(steps))
    high = -(-len(steps) // wide)
    with plt.rc_context(FONTS):
        figure, panels = plt.subplots(
            high, wide, figsize=(0.8 + 3.0 * wide, 1.0 + 2.8 * high), squeeze=False, sharey=True,
            layout="constrained",
        )  # fmt: skip
        for axes, step in zip(panels.flat, steps, strict=False):
            _accuracy_panel(axes, [cell for cell in cells if cell["step"] == step])
            axes.set_title(f"step {step}", fontsize=9)
        for axes in list(panels.flat)[len(steps) :]:
            axes.set_visible(False)
        for line in panels:
            line[0].set_ylabel("held-out accuracy")
        series = list(dict.fromkeys(cell["series"] for cell in cells))
        if len(series) > 1:
            panels[0, 0].legend(fontsize=7)
        else:
            notes = [f"{series[0]}; {notes[0]}", *notes[1:]]
        words = "\n".join(textwrap.fill(note, int(38 * wide)) for note in notes)
        figure.supxlabel(words, fontsize=7, x=0.02, ha="left")
        _save(figure, folder, "figure")


def _accuracy_panel(axes, cells: list[dict[str, Any]]) -> None:
    """One step: means with intervals, the largest ringed, those surely below it hollow."""
    for i, series in enumerate(dict.fromkeys(cell["series"] for cell in cells)):
        mine = sorted((c for c in cells if c["series"] == series), key=lambda c: c["group_size"])
        colour, marker, _ = list(STYLE.values())[(i + 1) % len(STYLE)]
        sizes = [cell["group_size"] * 1.04**i for cell in mine]  # apart, so that bars show
        heights = [cell["accuracy"] for cell in mine]
        below = [cell["accuracy"] - cell["low"] for cell in mine]
        above = [cell["high"] - cell["accuracy"] for cell in mine]
        axes.errorbar(
            sizes, heights, (below, above), color=colour, marker=marker, markersize=4,
            linewidth=1, capsize=2, label=series,
        )  # fmt: skip
        for x, y, cell in zip(sizes, heights, mine, strict=True):
            if cell["best"]:
                axes.plot(x, y, "o", color="black", fillstyle="none", markersize=11)
            if cell["distinct"]:
                hollow = dict(markerfacecolor="white", markersize=5, zorder=4)
                axes.plot(x, y, marker, color=colour, **hollow)
    axes.set_xscale("log", base=2)
    ticks = sorted({cell["group_size"] for cell in cells})
    axes.set_xticks(ticks, [str(tick) for tick in ticks])
    axes.minorticks_off()
    axes.set_xlabel("group size G")
    axes.grid(alpha=0.3, linewidth=0.5)


def _panel(axes, rows: list[dict[str, Any]], config: MseConfig) -> None:
    keys = dict.fromkeys((row["method"], row["baseline"]) for row in rows)
    for method, name in keys:
        mine = [r for r in rows if (r["method"], r["baseline"]) == (method, name)]
        _curve(axes, mine, method, name, several=len({m for m, _ in keys}) > 1)
    axes.set_xscale("log", base=2)
    positive = [row["mse"] for row in rows if row["mse"] is not None and row["mse"] > 0]
    if positive:
        axes.set_yscale("log")
        highest = max(row["high"] or row["mse"] or 0 for row in rows)
        axes.set_ylim(min(positive) / 2, 2 * highest)
    else:
        axes.set_ylim(-1, 1)
        axes.text(0.5, 0.6, "no error above 0", transform=axes.transAxes, ha="center")
    axes.set_xticks(config.group_sizes, [str(size) for size in config.group_sizes])
    axes.set_xlabel("group size G")
    axes.grid(alpha=0.3, which="both", linewidth=0.5)


def _save(figure, folder: Path, name: str) -> None:
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
