"""How training went: reward, held-out accuracy, silent groups and lengths over steps."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from grpo_ustat.estimators.intervals import clustered_mean
from grpo_ustat.runs.contents import Contents
from grpo_ustat.runs.figures import FONTS, line_style, note, plt, save
from grpo_ustat.runs.log import warn
from grpo_ustat.runs.train_page import first_decoding

CURVES = {  # of metrics.jsonl, under TRL's names
    "reward": "reward",
    "frac_reward_zero_std": "silent groups, share",
    "completions/mean_length": "length, tokens",
    "completions/clipped_ratio": "completions cut, share",
}
ACCURACY = "held-out accuracy"
POINTS = 40  # of a line at most, but for accuracy
SHARES = ("reward", "frac_reward_zero_std", "completions/clipped_ratio")  # lie in [0, 1]


@dataclass(frozen=True)
class Learning:
    """What one run has left of its steps.

    Attributes:
        series: runs of one series differ in their seed alone and are averaged.
        metrics: rows of metrics.jsonl.
        evals: rows of eval.csv of one decoding.
    """

    series: str
    metrics: Sequence[dict[str, Any]]
    evals: Sequence[dict[str, Any]]


def draw_learning(folder: Path) -> None:
    """Draw how training went in a run folder, as its files tell, as `learning.{pdf,svg,png}`;
    whatever goes wrong is said, and never costs the run.
    """
    try:
        run = Contents(folder)
        learning_figure(folder, "learning", [Learning("", run.metrics, first_decoding(run))])
    except Exception as error:  # of any kind: a picture is a view of what the run is
        reason = " ".join(f"{type(error).__name__}: {error}".split())
        warn(f"{folder}/learning.* could not be drawn, the run goes on without it: {reason}")


def learning_figure(folder: Path, name: str, runs: Sequence[Learning]) -> list[dict[str, Any]]:
    """A panel per quantity, a line per series; `<name>.{pdf,svg,png}`.

    Args:
        folder, name: where to.
        runs: one, or several, of one or several series.

    Returns:
        The numbers drawn, see `learning_rows`.
    """
    rows = learning_rows(runs)
    with plt.rc_context(FONTS):
        size = (11.0, 6.6)
        figure, panels = plt.subplots(2, 3, figsize=size, squeeze=False, layout="constrained")
        names = list(dict.fromkeys(run.series for run in runs))
        for axes, quantity in zip(panels.flat, (ACCURACY, *CURVES), strict=False):
            _panel(axes, [row for row in rows if row["quantity"] == quantity], names)
            axes.set_ylabel(CURVES.get(quantity, quantity))
        _legend(panels.flat[-1], panels.flat, len(names) > 1)
        note(figure, notes(rows), size[0])
        save(figure, folder, name)
    return rows


def notes(rows: Sequence[dict[str, Any]]) -> list[str]:
    """What lines and bands are.

    Args:
        rows: see `learning_rows`.
    """
    steps = max((row["steps"] for row in rows), default=1)
    points = f" Points are means of {steps} steps, but for accuracy." if steps > 1 else ""
    if any(row["seeds"] > 1 for row in rows):
        return [
            "Lines: means over seeds, at the steps that all runs of a series have; bands: 95 % "
            "intervals over seeds, given the questions (t); of one seed, over questions, for "
            f"held-out accuracy alone.{points}"
        ]
    return [f"One seed; band: 95 % interval of held-out accuracy over questions.{points}"]


def learning_rows(runs: Sequence[Learning]) -> list[dict[str, Any]]:
    """Mean over seeds of every quantity, series and step, with its interval.

    Only steps that every run of the series has: a mean over other seeds at every step would show
    the seeds, not the steps. A run without any row of a quantity is left out of it. Of long runs
    each point is the mean of several steps, taken in each run first.

    Returns:
        Rows of `series`, `quantity`, `step` (the last averaged), `steps` (how many), `mean`,
        `low`, `high` (None with one seed, but for accuracy) and `seeds`.
    """
    longest = max((row["step"] for run in runs for row in run.metrics), default=0)
    block = max(1, -(-longest // POINTS))
    rows = []
    for series in dict.fromkeys(run.series for run in runs):
        mine = [run for run in runs if run.series == series]
        for quantity in (ACCURACY, *CURVES):
            steps = {"steps": 1 if quantity == ACCURACY else block}
            found = [_by_step(run, quantity, block) for run in mine]
            for point in _means([one for one in found if one]):
                rows.append({"series": series, "quantity": quantity} | point | steps)
    return rows


def _by_step(run: Learning, quantity: str, block: int) -> dict[int, tuple]:
    """Value and interval at each step, or at the last step of each block."""
    if quantity == ACCURACY:
        return {row["step"]: (row["accuracy"], row["low"], row["high"]) for row in run.evals}
    blocks: dict[int, list[dict[str, Any]]] = {}
    for row in run.metrics:
        if quantity in row:
            blocks.setdefault((row["step"] - 1) // block, []).append(row)
    return {
        rows[-1]["step"]: (float(np.mean([row[quantity] for row in rows])), None, None)
        for rows in blocks.values()
    }


def _means(found: list[dict[int, tuple]]) -> list[dict[str, Any]]:
    if not found:
        return []
    shared = set(found[0]).intersection(*found)
    points = []
    for step in sorted(shared):
        value, low, high = found[0][step]
        if len(found) > 1:
            value, low, high = clustered_mean(np.array([[one[step][0]] for one in found]))
        points.append({"step": step, "mean": value, "low": low, "high": high, "seeds": len(found)})
    return points


def _panel(axes, rows: list[dict[str, Any]], names: list[str]) -> None:
    """One quantity."""
    share = bool(rows) and rows[0]["quantity"] in (*SHARES, ACCURACY)
    for i, name in enumerate(names):
        mine = [row for row in rows if row["series"] == name]
        colour, marker = line_style(i)
        steps = [row["step"] for row in mine]
        few = marker if len(mine) <= 25 else ""
        axes.plot(
            steps, [row["mean"] for row in mine], color=colour, marker=few, markersize=3,
            linewidth=1.2, label=name,
        )  # fmt: skip
        known = [row for row in mine if row["low"] is not None]
        ends = ([row[end] for row in known] for end in ("low", "high"))
        axes.fill_between(
            [row["step"] for row in known], *(_inside(end, share) for end in ends),
            color=colour, alpha=0.12, linewidth=0,
        )  # fmt: skip
    axes.set_xlabel("step")
    axes.grid(alpha=0.3, linewidth=0.5)


def _inside(values: list[float], share: bool) -> list[float]:
    """Ends of bands where they can be: a share lies in [0, 1], a length above 0."""
    return [float(np.clip(value, 0, 1 if share else None)) for value in values]


def _legend(place, panels, shown: bool) -> None:
    """In the panel that is left over."""
    place.set_axis_off()
    if shown:
        handles, labels = next(iter(panels)).get_legend_handles_labels()
        place.legend(handles, labels, loc="center left", frameon=False, fontsize=9)
