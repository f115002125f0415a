"""Learning curves: reward, held-out accuracy or mean reward, zero-variance groups, and lengths."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from grpo_ustat.estimators.intervals import MIN_UNITS, clustered_mean
from grpo_ustat.estimators.scaling import CONSTANTS, CONSTANTS_AND_GRADIENT, ScalingLaw
from grpo_ustat.pages.advice import noise_text
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
from grpo_ustat.records import ACCURACY, MEAN_REWARD, Array, joint_quantity
from grpo_ustat.runs.record import RunRecord
from grpo_ustat.terminal.console import warn

if TYPE_CHECKING:
    from matplotlib.axes import Axes

# Axis labels by column of metrics.jsonl, which uses TRL's names.
CURVES = {
    "reward": "reward",
    "frac_reward_zero_std": "share of zero-variance groups",
    "completions/mean_length": "mean length (tokens)",
    "completions/clipped_ratio": "share of cut completions",
}
GSTAR, ERROR = "monitor/gstar", "monitor/mse"
# Axis labels of columns that exist only if `monitor.gradient_mse_every` is set.
MONITORED = {
    GSTAR: "best group size G* of the gradient",
    ERROR: "MSE of the leave_one_out gradient",
}
LABELS = CURVES | MONITORED
EVALUATIONS = {name: f"held-out {name}" for name in (ACCURACY, MEAN_REWARD)}
# Maximum number of points per line; lines of evaluations may have more.
MAX_POINTS = 40
# Quantities that lie between 0 and 1.
SHARES = (EVALUATIONS[ACCURACY], "frac_reward_zero_std", "completions/clipped_ratio")
UNBOUNDED = ("reward", EVALUATIONS[MEAN_REWARD])
GSTAR_NOTE = (
    " In the panel of G*, bars are 95 % intervals over seeds or, with one seed, over prompts or "
    "steps. If a bar extends beyond the axis, its upper end is off the axis or missing."
)
# If an interval has no upper end, its bar is drawn up to this value.
NO_UPPER_END = 1e9
# In a figure with more lines, the lines of individual seeds would hide the means.
MAX_LINES_WITH_SEEDS = 6


@dataclass(frozen=True)
class Learning:
    """Metrics and evaluations of a single run."""

    # Name of the series. Runs of the same series differ only in the seed and are averaged.
    series: str
    # Rows of metrics.jsonl.
    metrics: Sequence[dict[str, Any]]
    # Rows of eval.csv for a single decoding method.
    evals: Sequence[dict[str, Any]]


def draw_learning(folder: Path) -> None:
    """Draw a run folder's `learning.{pdf,svg,png}`; if this fails, only warn."""
    try:
        run = RunRecord(folder)
        learning_figure(folder, "learning", [Learning("", run.metrics, run.evals)])
    except Exception as error:
        # The figure only displays the run's files, so an error here must not end the run.
        reason = " ".join(f"{type(error).__name__}: {error}".split())
        warn(f"{folder}/learning.* could not be drawn; the run continues without it: {reason}")


def learning_figure(folder: Path, name: str, runs: Sequence[Learning]) -> list[dict[str, Any]]:
    """Draw one panel per quantity and save the figure as `<name>.{pdf,svg,png}`.

    Each series has a bold line for the mean over seeds. If there are few series, thin lines show
    the individual seeds.

    Args:
        runs: Runs of one or several series.

    Returns:
        Rows with the plotted numbers; see `learning_rows`.
    """
    rows = learning_rows(runs)
    quantities = [evaluation_name(runs), *CURVES]
    quantities += [name for name in MONITORED if any(row["quantity"] == name for row in rows)]
    with figure_fonts():
        figure, _ = panel_figure(panel_rows(len(quantities)))
        names = list(dict.fromkeys(run.series for run in runs))
        seeds = seed_rows(runs) if len(names) <= MAX_LINES_WITH_SEEDS else []
        for axes, quantity in zip(figure.axes, quantities, strict=True):
            _panel(
                axes,
                [row for row in rows if row["quantity"] == quantity],
                [row for row in seeds if row["quantity"] == quantity],
                names,
            )
            axes.set_ylabel(LABELS.get(quantity, quantity))
        if len(names) > 1:
            legend_above(figure)
        note(figure, notes(rows))
        save(figure, folder, name)
    return rows


def notes(rows: Sequence[dict[str, Any]]) -> list[str]:
    """Return notes that explain the lines and bands of a figure.

    Args:
        rows: See `learning_rows`.
    """
    steps = max((row["steps"] for row in rows), default=1)
    points = f" Points are means over {steps} steps, except for evaluations." if steps > 1 else ""
    monitored = any(row["quantity"] == GSTAR for row in rows)
    gstar = GSTAR_NOTE * monitored
    missing = Counter(row["quantity"] for row in rows if row["mean"] is None)
    for quantity, count in missing.items():
        why = "it is not decided" if quantity == GSTAR else "metrics.jsonl has no number"
        points += (
            f" Gaps in {LABELS.get(quantity, quantity)}: at {count} point{'s' * (count > 1)} {why}."
        )
    if any(row["seeds"] > 1 for row in rows):
        thin = " Thin lines are individual seeds."
        if len({row["series"] for row in rows}) > MAX_LINES_WITH_SEEDS:
            thin = " Bands are 95 % t intervals over seeds, conditional on these questions."
        return [
            f"Bold lines are means over seeds, at the steps that all runs of a series share.{thin}"
            f"{gstar}{points}"
        ]
    name = next((row["quantity"] for row in rows if row["quantity"] in EVALUATIONS.values()), "")
    band = f" The band is the 95 % interval of {name} for new questions." * bool(name)
    return [f"Each line is a single seed.{band}{gstar}{points}"]


def learning_rows(runs: Sequence[Learning]) -> list[dict[str, Any]]:
    """Average each quantity of a series over seeds at each step, and compute its interval.

    Only steps that all runs of a series have are used. Otherwise the mean would change from step to
    step just because the set of seeds changes. If a run has no row of a quantity at all, the mean
    of this quantity leaves the run out. In long runs, each point is an average over several steps.

    Returns:
        Rows with `series`, `quantity`, `step` (last step in the average), `steps` (number of steps
        in the average), `mean`, `low`, `high` and `seeds`. With one seed, only evaluations and G*
        have an interval; for other quantities, `low` and `high` are None. `mean` is None if the
        runs have no number at this step or if their G* is undecided; the line then has a gap.
    """
    block, evaluation = _block(runs), evaluation_name(runs)
    rows = []
    for series in dict.fromkeys(run.series for run in runs):
        members = [run for run in runs if run.series == series]
        for quantity in (evaluation, *LABELS):
            curves = [curve for run in members if (curve := _curve(run, quantity, block))]
            shared = set.intersection(*map(set, curves)) if curves else set()
            for step in sorted(shared):
                mean, low, high = curves[0][step]
                if len(curves) > 1 and quantity == GSTAR:
                    parts = [_monitored(run, block).get(step) for run in members]
                    measured = [part for part in parts if part]
                    unknown = len(measured) < len(curves)
                    mean, low, high = UNKNOWN if unknown else _joint_gstar(measured)
                elif len(curves) > 1:
                    values = np.array([[curve[step][0]] for curve in curves])
                    mean, low, high = clustered_mean(values)
                if not math.isfinite(mean):
                    mean = low = high = None
                point = {"series": series, "quantity": quantity, "step": step, "mean": mean}
                point |= {"low": low, "high": high, "seeds": len(curves)}
                rows.append(point | {"steps": 1 if quantity == evaluation else block})
    drawn = {row["quantity"] for row in rows if row["mean"] is not None}
    return [row for row in rows if row["quantity"] in drawn]


def evaluation_name(runs: Sequence[Learning]) -> str:
    """Return the displayed name of the evaluated quantity: held-out accuracy or mean reward."""
    return EVALUATIONS[joint_quantity(row["quantity"] for run in runs for row in run.evals)]


def seed_rows(runs: Sequence[Learning]) -> list[dict[str, Any]]:
    """Return the curves of individual runs, for series with several runs.

    Each row has the keys `series`, `quantity`, `steps` and `values`. `steps` and `values` are lists
    with one item per point of the run.
    """
    block = _block(runs)
    counts = Counter(run.series for run in runs)
    rows = []
    for run in runs:
        for quantity in (evaluation_name(runs), *LABELS) if counts[run.series] > 1 else ():
            curve = _curve(run, quantity, block)
            values = [estimate[0] for estimate in curve.values()]
            point = {"series": run.series, "quantity": quantity}
            rows.append(point | {"steps": list(curve), "values": values})
    return rows


def _block(runs: Sequence[Learning]) -> int:
    """Return the number of steps that are averaged per point."""
    longest = max((row["step"] for run in runs for row in run.metrics), default=0)
    return max(1, -(-longest // MAX_POINTS))


# Estimate and both ends of its interval; None if an end is unknown.
Estimate = tuple[float, float | None, float | None]
UNKNOWN: Estimate = (math.nan, None, None)


def _curve(run: Learning, quantity: str, block: int) -> dict[int, Estimate]:
    """Return a run's quantity by step: its evaluations, or averages over blocks of steps."""
    if quantity in EVALUATIONS.values():
        return {row["step"]: (row["mean_reward"], row["low"], row["high"]) for row in run.evals}
    if quantity == GSTAR:
        curve = {}
        for step, rows in _monitored(run, block).items():
            if len(rows) > 1:
                curve[step] = _joint_gstar([[row] for row in rows])
            else:
                # For a single step, use the interval in metrics.jsonl.
                best, low, high = (rows[0].get(f"{GSTAR}{end}") for end in ("", "_low", "_high"))
                curve[step] = math.nan if best is None else best, low, high
        blocks_known = {(step - 1) // block for step in curve}
        without = {
            (row["step"] - 1) // block: row["step"]
            for row in run.metrics
            if GSTAR in row and (row["step"] - 1) // block not in blocks_known
        }
        return dict(sorted((curve | dict.fromkeys(without.values(), UNKNOWN)).items()))
    blocks: dict[int, list[dict[str, Any]]] = {}
    for row in run.metrics:
        if quantity in row:
            blocks.setdefault((row["step"] - 1) // block, []).append(row)
    curve = {}
    for rows in blocks.values():
        values = [row[quantity] for row in rows if row[quantity] is not None]
        curve[rows[-1]["step"]] = (float(np.mean(values)), None, None) if values else UNKNOWN
    return curve if any(math.isfinite(value) for value, *_ in curve.values()) else {}


def _monitored(run: Learning, block: int) -> dict[int, list[dict[str, Any]]]:
    """Return each block's rows that have C1, C2 and C3, keyed by the last step of these rows."""
    blocks: dict[int, list[dict[str, Any]]] = {}
    for row in run.metrics:
        if all(row.get(f"monitor/{name}") is not None for name in CONSTANTS):
            blocks.setdefault((row["step"] - 1) // block, []).append(row)
    return {rows[-1]["step"]: rows for rows in blocks.values()}


def _joint_gstar(parts: list[list[dict[str, Any]]]) -> Estimate:
    """Compute G* from C1, C2 and C3 averaged over several parts (seeds or steps).

    The mean of the parts' G* would be biased, because `1 + sqrt(C3/C1)` is not linear. The interval
    is computed from the variation between parts.
    """
    means_4N = np.stack([monitored_constants(rows).mean(axis=1) for rows in parts], axis=1)
    ratio = ScalingLaw.of_steps(means_4N).constants_ratio()
    low, high = (1 + math.sqrt(end) if math.isfinite(end) else None for end in ratio[1:])
    return 1 + math.sqrt(max(ratio.estimate, 0.0)), low, high


def _panel(
    axes: Axes,
    rows: Sequence[dict[str, Any]],
    seeds: Sequence[dict[str, Any]],
    names: Sequence[str],
) -> None:
    """Draw one quantity: a line per series, with thin lines for the seeds or with a band.

    Bands are clipped to the possible values: [0, 1] for shares, and at least 0 for lengths. Rewards
    are not clipped.

    Args:
        rows: See `learning_rows`.
        seeds: See `seed_rows`; if empty, bands are drawn.
        names: Names of the series.
    """
    from matplotlib import ticker

    quantity = rows[0]["quantity"] if rows else ""
    least, most = (-math.inf if quantity in UNBOUNDED else 0), (1 if quantity in SHARES else None)
    for i, name in enumerate(names):
        line = [row for row in rows if row["series"] == name]
        colour, marker = series_style(name, i)
        of_series = [row for row in seeds if row["series"] == name]
        for row in of_series:
            axes.plot(row["steps"], row["values"], color=colour, linewidth=0.6, alpha=0.28)
        # NaN for a missing mean leaves a gap in the line.
        means = [math.nan if row["mean"] is None else row["mean"] for row in line]
        axes.plot(
            [row["step"] for row in line], means, color=colour,
            marker=marker if len(line) <= 25 else "", markersize=3,
            linewidth=2.0 if of_series else 1.2, label=legend_label(name),
        )  # fmt: skip
        if quantity == GSTAR:
            span = max((row["step"] for row in rows), default=0)
            _gstar_bars(axes, line, colour, 0.012 * span * i)
        elif not of_series:
            band = [row for row in line if row["low"] is not None]
            low, high = (
                [float(np.clip(row[end], least, most)) for row in band] for end in ("low", "high")
            )
            axes.fill_between(
                [row["step"] for row in band], low, high, color=colour, alpha=0.12, linewidth=0
            )
    # The axis begins just below all intervals and ends well above most estimates. Ticks are powers
    # of two.
    if quantity == GSTAR:
        lows = [max(row["low"], 1.0) for row in rows if row["low"] is not None]
        means = [row["mean"] for row in rows if row["mean"] is not None]
        bottom = max(min([*means, *lows]), 1.0) / 1.15
        top = min(2.0 * max(means), 8.0 * float(np.median(means)))
        axes.set_yscale("log", base=2)
        ticks = [2**k for k in range(20) if bottom <= 2**k <= top]
        axes.set_yticks(ticks, [str(tick) for tick in ticks])
        axes.set_yticks([], minor=True)
        axes.set_ylim(bottom, top)
    elif quantity in SHARES and not any(row["mean"] for row in rows):
        axes.set_ylim(-0.005, 0.1)
    axes.xaxis.set_major_locator(ticker.MaxNLocator(integer=True))
    axes.set_xlabel("step")
    axes.grid(alpha=0.3, linewidth=0.5)


def _gstar_bars(axes: Axes, line: Sequence[dict[str, Any]], colour: str, shift: float) -> None:
    """Draw the interval of G* at each step, shifted right so that series do not overlap.

    An interval without an upper end is drawn beyond the axis.
    """
    for row in line:
        if row["low"] is not None:
            high = NO_UPPER_END if row["high"] is None else row["high"]
            axes.plot(
                [row["step"] + shift] * 2, [max(row["low"], 1.0), high], color=colour, linewidth=1,
                alpha=0.6,
            )  # fmt: skip


def monitored_constants(rows: Sequence[Mapping[str, Any]]) -> Array:
    """Return C1, C2, C3 and ||grad J||^2 of S monitored steps (rows of metrics.jsonl), [4, S]."""
    values_4S = [[row.get(f"monitor/{name}") for row in rows] for name in CONSTANTS_AND_GRADIENT]
    return np.array(values_4S, float)


def training_noise_sentence(
    metrics: Sequence[Mapping[str, Any]], group_size: int, rollouts: int
) -> str:
    """Return `noise_text` for the monitored steps in the second half of training.

    The result is "" if the second half has fewer than 4 monitored steps.

    Args:
        metrics: Rows of `metrics.jsonl`.
        rollouts: Number of rollouts per training step, n.
    """
    keys = [f"monitor/{name}" for name in CONSTANTS_AND_GRADIENT]
    rows = [row for row in metrics if all(row.get(key) is not None for key in keys)]
    recent = [row for row in rows if 2 * row["step"] >= rows[-1]["step"]]
    if len(recent) < MIN_UNITS:
        return ""
    law = ScalingLaw.of_steps(monitored_constants(recent))
    text = noise_text(law.noise_scale(group_size), rollouts)
    return text and f"{text} (Mean over steps {recent[0]['step']} to {recent[-1]['step']}.)"
