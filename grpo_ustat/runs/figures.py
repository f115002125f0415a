"""Figures: PDF with embedded fonts, SVG, PNG; colour-blind safe."""

from __future__ import annotations

import logging
from pathlib import Path
from typing import Any

import matplotlib

matplotlib.use("Agg")
logging.getLogger("fontTools").setLevel(logging.WARNING)  # it reports every glyph table
import matplotlib.pyplot as plt  # noqa: E402 (the backend is chosen first)

from grpo_ustat.config import MseConfig  # noqa: E402
from grpo_ustat.estimators.baselines import BASELINES  # noqa: E402

STYLE = {  # Okabe-Ito colours, and markers that differ in grey too
    "none": ("#D55E00", "s", "vanilla (none)"),
    "leave_one_out": ("#0072B2", "o", "GRPO (leave_one_out)"),
    "group_mean": ("#56B4E9", "v", "group_mean (biased)"),
    "oracle": ("#009E73", "D", "oracle"),
}
OTHER_COLOURS, OTHER_MARKERS = ("#E69F00", "#CC79A7", "#000000"), "^PX<>*pd"
LINES = {"closed_form": "-", "monte_carlo": ":"}


def mse_figure(folder: Path, result: dict[str, Any], config: MseConfig) -> None:
    """MSE against group size, both axes logarithmic, with 95 % bands; `figure.{pdf,svg,png}`."""
    with plt.rc_context({"pdf.fonttype": 42, "svg.fonttype": "none", "font.size": 10}):
        figure, axes = plt.subplots(figsize=(6.4, 4.4), layout="constrained")
        keys = dict.fromkeys((row["method"], row["baseline"]) for row in result["curves"])
        for method, name in keys:
            rows = [r for r in result["curves"] if (r["method"], r["baseline"]) == (method, name)]
            _curve(axes, rows, method, name, several=len({m for m, _ in keys}) > 1)
        axes.set_xscale("log", base=2)
        positive = [row["mse"] for row in result["curves"] if row["mse"] > 0]
        if positive:
            axes.set_yscale("log")
            axes.set_ylim(min(positive) / 2, 2 * max(row["high"] for row in result["curves"]))
        axes.set_xticks(config.group_sizes, [str(size) for size in config.group_sizes])
        axes.set_xlabel("group size G")
        axes.set_ylabel("mean squared error of the gradient")
        axes.grid(alpha=0.3, which="both", linewidth=0.5)
        axes.legend(frameon=False)
        axes.set_title(_title(result), fontsize=9, loc="left")
        for suffix in ("pdf", "svg", "png"):
            figure.savefig(folder / f"figure.{suffix}", dpi=150)
        plt.close(figure)


def _curve(axes, rows: list[dict[str, Any]], method: str, name: str, several: bool) -> None:
    colour, marker, label = _style(name)
    rows = sorted(rows, key=lambda row: row["group_size"])
    sizes = [row["group_size"] for row in rows]
    mse = [row["mse"] for row in rows]
    if several:
        label += f", {method}"
    axes.plot(sizes, mse, LINES[method], color=colour, marker=marker, markersize=4, label=label)
    low = [max(row["low"], 1e-9) for row in rows]  # a band that reaches 0 leaves the picture
    axes.fill_between(sizes, low, [r["high"] for r in rows], color=colour, alpha=0.2, linewidth=0)


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
