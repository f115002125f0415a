"""Worth of a rollout of each loss: sentences, tables and the figure."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from matplotlib.axes import Axes
from matplotlib.figure import Figure

from grpo_ustat.estimators.group_size import USUAL_SIZE
from grpo_ustat.estimators.intervals import Interval
from grpo_ustat.pages.figures import (
    FONTS,
    legend_label,
    line_style,
    log_sizes,
    note,
    plt,
    save,
)
from grpo_ustat.pages.tables import MOST_BASELINES, Table, enumeration
from grpo_ustat.runs.contents import row_interval

ADVANTAGE_WORDS = {
    "none": "no baseline",
    "leave_one_out": "less the mean of the group's others",
    "group_mean": "less the group's mean",
    "group_std": "std of the group",
    "batch_std": "std of the batch",
    "reinforce_pp_baseline": "std of the batch's tokens",
}
LOSS_TYPE_WORDS = {
    "sum": "sum over tokens",
    "luspo": "sum over tokens",
    "dr_grpo": "sum over tokens by the longest length",
    "grpo": "mean over each completion's tokens",
    "sapo": "mean over each completion's tokens",
    "dapo": "mean over the update's tokens",
    "cispo": "mean over the update's tokens",
    "vespo": "mean over the update's tokens",
    "bnpo": "mean over each micro-batch's tokens",
}
# Shown in place of a cosine that is not known.
NOT_KNOWN = "not known"
# Words for the keys of a row that say which rows count, where not all do.
FILTER_WORDS = {
    "drop": "zero-variance groups dropped",
    "replace": "zero-variance groups replaced",
    "reward_variance_share": "groups that hold {:g} of the reward variance",
    "advantage_threshold": "|advantage| of {:g} or more",
}
WORTH_NOTE = (
    "Worth: rollouts of the unbiased leave-one-out gradient that do as much as one of the loss, at "
    "a batch's first update; 95 % intervals for new questions, paired among losses and G."
)
NOISE_NOTE = "The share of noise is that of an update's squared norm."
BARS_NOTE = "Bars: 95 % intervals for new questions; losses stand side by side at each G."
# Octaves of G: between losses at one G, and of all of them at most.
APART, ASIDE = 0.12, 0.6
AT_BEST = "unbiased ones at their best G"


def loss_words(row: Mapping[str, Any]) -> str:
    """Describe a loss by its advantage, the divisor of its tokens, and the rows that count.

    >>> row = {"baseline": "group_std", "loss_type": "dapo", "zero_variance_groups": "drop"}
    >>> loss_words(row)
    "std of the group, mean over the update's tokens, zero-variance groups dropped"
    """
    rule: str = row["baseline"]
    words = [ADVANTAGE_WORDS.get(rule, rule), LOSS_TYPE_WORDS[row["loss_type"]]]
    if "zero_variance_groups" in row:
        words.append(FILTER_WORDS[row["zero_variance_groups"]])
    for name in ("reward_variance_share", "advantage_threshold"):
        if name in row:
            words.append(FILTER_WORDS[name].format(row[name]))
    return ", ".join(words)


def by_loss(result: Mapping[str, Any]) -> list[list[dict[str, Any]]]:
    """Group the rows of a study by loss, each in the order of G."""
    rows: dict[str, list[dict[str, Any]]] = {}
    for row in result.get("losses", []):
        rows.setdefault(row["loss"], []).append(row)
    return list(rows.values())


def losses_sentences(
    result: Mapping[str, Any], wrote: str = "", compared: str = "an unbiased one"
) -> list[str]:
    """Return sentences on the worth of a rollout of each loss, its direction and its best G.

    The worth is that at G = 8 or the nearest. Losses with the same result share a sentence.

    Args:
        result: content of the study's `result.json`, or its `off_policy`.
        wrote: the policy that wrote the rollout, in words.
        compared: the rollouts in which worth is counted, in words.
    """
    same: dict[str, list[list[dict[str, Any]]]] = {}
    for rows in by_loss(result):
        same.setdefault(_sentence("", rows, wrote, compared), []).append(rows)
    return [
        _sentence(
            enumeration([rows[0]["loss"] for rows in losses], "or"), losses[0], wrote, compared
        )
        for losses in same.values()
    ]


def nearest_usual(rows: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """Return the row of G = 8, or of the nearest."""
    return min(rows, key=lambda row: abs(math.log(row["group_size"] / USUAL_SIZE)))


def _sentence(names: str, rows: Sequence[dict[str, Any]], wrote: str, compared: str) -> str:
    first = rows[0]
    name = f"{names} ({loss_words(first)}){wrote}"
    measured = [row for row in rows if "noise" in row]
    if not measured:
        return f"What a rollout of {name} is worth is not measured: {first['reason']}."
    row = nearest_usual(measured)
    where = f"At n = {row['rollouts']} and G = {row['group_size']}"
    worth, noise = row_interval(row, "worth"), row_interval(row, "noise")
    if not math.isfinite(worth.estimate):
        share = ""
        if math.isfinite(noise.estimate):
            ends = f"[{100 * noise.low:.0f} %, {100 * noise.high:.0f} %]"
            share = f"; an update is {100 * noise.estimate:.0f} % noise {ends}"
        return (
            f"{where} it is not decided what a rollout of {name} is worth: its direction is not "
            f"known from these questions{share}."
        )
    direction = "its direction is unbiased"
    if not row["unbiased_direction"]:
        cosine = cosine_text(row)
        direction = f"its direction is right to cos {cosine}"
        if cosine == NOT_KNOWN:
            direction = f"how far its direction is right is {NOT_KNOWN}"
    sizes = [row["group_size"] for row in measured if row["alike"]]
    best = next(row["group_size"] for row in measured if row["best"])
    others = [str(size) for size in sizes if size != best]
    best_size = f"its best G is {best}"
    if len(measured) < len(rows) or best in _end_sizes(measured):
        best_size = f"of the measured G {best} is its best"
    if others:
        best_size += f" ({enumeration(others)} may be as good)"
    if len(measured) == 1:
        best_size = "no other G was measured"
    drawn = ""
    if "kept" in row:
        kept = row_interval(row, "kept")
        drawn = (
            f"; {worth_text(kept)} of the groups that are drawn are in an update, and what the "
            "others cost is not in its worth"
        )
    return (
        f"{where} a rollout of {name} is worth {worth_text(worth)} of {compared}; "
        f"{direction}; {best_size}{drawn}."
    )


def _end_sizes(rows: Sequence[dict[str, Any]]) -> tuple[int, int]:
    """Return the smallest and the largest G, beyond which a better one may be."""
    sizes = [row["group_size"] for row in rows]
    return min(sizes), max(sizes)


def losses_tables(
    result: Mapping[str, Any], wrote: str = "", notes: Sequence[str] = (WORTH_NOTE,)
) -> list[Table]:
    """Return tables of the worth of a rollout of each loss at each G, some losses side by side.

    There are none where no loss was measured.

    Args:
        result: content of the study's `result.json`, or its `off_policy`.
        wrote: the policy that wrote the rollout, in words.
        notes: the definition of worth.
    """
    measured = [rows for rows in by_loss(result) if any("noise" in row for row in rows)]
    return [
        _worth_table(measured[first : first + MOST_BASELINES], wrote, notes)
        for first in range(0, len(measured), MOST_BASELINES)
    ]


def _worth_table(
    losses: Sequence[Sequence[Mapping[str, Any]]], wrote: str, notes: Sequence[str]
) -> Table:
    known = {
        (row["group_size"], column): row
        for column, rows in enumerate(losses)
        for row in rows
        if "noise" in row
    }
    sizes = sorted({size for size, _ in known})
    cells = [
        [
            str(size),
            *(worth_text(row_interval(known[size, i], "worth_best"), "\n") if (size, i) in known
              else "-" for i in range(len(losses))),
        ]
        for size in sizes
    ]  # fmt: skip
    marks = {
        (sizes.index(size), column + 1): row["best"]
        for (size, column), row in known.items()
        if row["alike"]
    }
    return Table(
        title=f"Worth of a rollout{wrote} at n = {losses[0][0]['rollouts']}, in {AT_BEST}",
        columns=["G", *(rows[0]["loss"] for rows in losses)],
        rows=cells,
        notes=[*notes, *not_measured(losses)],
        marks=marks,
    )  # fmt: skip


def not_measured(losses: Sequence[Sequence[Mapping[str, Any]]]) -> list[str]:
    """Return a line for every reason why losses are not measured at some G."""
    missing: dict[str, dict[int, None]] = {}
    for row in (row for rows in losses for row in rows if "reason" in row):
        missing.setdefault(row["reason"], {})[row["group_size"]] = None
    return [
        f"Not at G = {', '.join(map(str, sizes))}: {reason}." for reason, sizes in missing.items()
    ]


def loss_details(
    result: Mapping[str, Any], wrote: str = "", notes: Sequence[str] = (WORTH_NOTE,)
) -> list[Table]:
    """Return a table of every loss at every G: both worths, direction and noise.

    There is none where no loss was measured. For the arguments see `losses_tables`.
    """
    rows = [
        [
            row["loss"],
            loss_words(row),
            str(row["group_size"]),
            worth_text(row_interval(row, "worth")),
            worth_text(row_interval(row, "worth_best")),
            cosine_text(row),
            worth_text(row_interval(row, "noise")),
        ]
        for rows in by_loss(result)
        for row in rows
        if "noise" in row
    ]
    if not rows:
        return []
    columns = ["loss", "advantage and tokens", "G", "worth at the same G", f"worth in {AT_BEST}",
               "cos of its mean and the gradient", "share of noise"]  # fmt: skip
    of = f", a rollout{wrote}" if wrote else ""
    return [Table(f"Losses at every G{of}", columns, rows, [*notes, NOISE_NOTE])]


def losses_figure(
    folder: Path, result: Mapping[str, Any], off_policy: Mapping[str, Any] | None = None
) -> None:
    """Draw the worth of each loss's rollout against G, with its interval.

    It writes `losses.{pdf,svg,png}`, or `off_policy.*` for rollouts that another policy wrote.
    """
    losses = {rows[0]["loss"]: rows for rows in by_loss(off_policy or result)}
    if not any("noise" in row for rows in losses.values() for row in rows):
        return
    with plt.rc_context(FONTS):
        size = (6.4, 4.4 + 0.09 * len(losses))  # a legend of two columns
        figure, axes = plt.subplots(figsize=size, layout="constrained")
        absent = worth_panel(axes, losses, list(losses))
        axes.set_ylabel(f"worth of a rollout,\nin {AT_BEST}")
        worth_legend(figure, 6.4)
        policy, first = result["policy"], next(iter(losses.values()))[0]
        title = f"{policy['name']}: {policy['quantity']} {policy['mean_reward']:.2f}"
        if off_policy:
            title = f"written by {off_policy['written_by']}, at {off_policy['policy']}"
        axes.set_title(f"{title}, n = {first['rollouts']}", fontsize=9, loc="left")
        lines = [f"Not decided or not measured: {enumeration(absent)}."] if absent else []
        note(figure, [BARS_NOTE, *lines], 6.4)
        save(figure, folder, "off_policy" if off_policy else "losses")


def worth_panel(
    axes: Axes, losses: Mapping[str, Sequence[Mapping[str, Any]]], names: Sequence[str]
) -> list[str]:
    """Draw lines of worth against G, where they are decided.

    Args:
        losses: the rows of each loss by its name.
        names: of the losses of all panels, whose places give colours and markers.

    Returns:
        The names of losses without a line.
    """
    lines: dict[str, dict[int, Interval]] = {}
    for name, rows in losses.items():
        worths = {row["group_size"]: row_interval(row, "worth_best") for row in rows}
        known = {size: x for size, x in worths.items() if math.isfinite(x.estimate)}
        if known:
            lines[name] = known
    shown = [(size, worth) for line in lines.values() for size, worth in line.items()]
    least = min([1.0, *(x.low for _, x in shown)])
    most = max([1.0, *(x.estimate for _, x in shown)])
    # wider intervals leave the picture, some have no end
    top = 1.05 * min(max([most, *(x.high for _, x in shown)]), 1.5 * most)
    apart = min(APART, ASIDE / max(1, len(lines)))
    for place, (name, line) in enumerate(lines.items()):
        colour, marker = line_style(names.index(name))
        aside = 2 ** (apart * (place - (len(lines) - 1) / 2))
        sizes = [size * aside for size in line]
        axes.plot(sizes, [x.estimate for x in line.values()], color=colour, marker=marker,
                  markersize=4, linewidth=0.6, label=legend_label(name))  # fmt: skip
        axes.vlines(sizes, [x.low for x in line.values()],
                    [min(x.high, 2 * top) for x in line.values()], color=colour,
                    linewidth=1.2, alpha=0.6)  # fmt: skip
    if not lines:
        axes.text(0.5, 0.4, "not decided from these questions", transform=axes.transAxes,
                  ha="center")  # fmt: skip
    axes.axhline(1.0, color="black", linestyle="--", linewidth=1)
    every = {row["group_size"] for rows in losses.values() for row in rows}
    log_sizes(axes, sorted({size for size, _ in shown} or every))
    axes.set_xlabel("group size G")
    axes.set_ylim(max(0.0, least - (top - least) / 10) if lines else 0, top)
    axes.grid(alpha=0.3, linewidth=0.5)
    return [name for name in losses if name not in lines]


def worth_legend(figure: Figure, width: float) -> None:
    """Add a legend of all panels above a figure of so many inches; none where there is no line."""
    labels: dict[str, Any] = {}
    for axes in figure.axes:
        handles, names = axes.get_legend_handles_labels()
        labels |= dict(zip(names, handles, strict=True))
    if labels:
        longest = 0.5 + 0.065 * max(map(len, labels))  # inches, at this size
        figure.legend(
            list(labels.values()), list(labels), loc="outside upper left", frameon=False,
            fontsize=8, ncols=max(1, int(width / longest)),
        )  # fmt: skip


def worth_text(value: Interval, gap: str = " ", digits: int = 2) -> str:
    """Format a worth or a share with its interval, with so many digits after the point.

    >>> worth_text(Interval(0.981, 0.961, 1.0021)), worth_text(Interval(math.nan, 0, math.inf))
    ('0.98 [0.96, 1.00]', 'not decided')
    """
    if not math.isfinite(value.estimate):
        return "not decided"
    high = f"{value.high:.{digits}f}" if math.isfinite(value.high) else "no end"
    return f"{value.estimate:.{digits}f}{gap}[{value.low:.{digits}f}, {high}]"


def cosine_text(row: Mapping[str, Any], gap: str = " ") -> str:
    """Format the cosine of a loss's mean and the gradient, with its interval.

    >>> cosine_text({"unbiased_direction": True})
    'unbiased'
    """
    if row["unbiased_direction"]:
        return "unbiased"
    square = row_interval(row, "direction")
    if not math.isfinite(square.estimate):
        return f"at least {math.sqrt(max(0.0, square.low)):.2f}" if square.low > 0 else NOT_KNOWN
    estimate, low, high = (math.sqrt(max(0.0, x)) for x in square)
    return f"{estimate:.3f}{gap}[{low:.3f}, {high:.3f}]"
