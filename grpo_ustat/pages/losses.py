"""What a rollout of each loss is worth: sentences, tables and the figure."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from grpo_ustat.estimators.intervals import Interval
from grpo_ustat.pages.figures import FONTS, line_style, log_sizes, note, plt, save
from grpo_ustat.pages.findings import USUAL_SIZE
from grpo_ustat.pages.gradient_error import MOST_BASELINES
from grpo_ustat.pages.tables import Table, enumeration, row_interval

ADVANTAGE_WORDS = {
    "none": "no baseline",
    "leave_one_out": "less the mean of the group's others",
    "group_mean": "less the group's mean",
    "group_std": "std of the group",
    "batch_std": "std of the batch",
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
FILTER_WORDS = {  # of the keys of a row that say which rows count, where not all do
    "drop": "zero-variance groups dropped",
    "replace": "zero-variance groups replaced",
    "reward_variance_share": "groups that hold {:g} of the reward variance",
    "advantage_threshold": "|advantage| of {:g} or more",
}
WORTH_NOTE = (
    "Worth: rollouts of the unbiased leave-one-out gradient that do as much as one of the loss, at "
    "a batch's first update; 95 % intervals for new questions, paired among losses and G."
)
AT_BEST = "unbiased at its best G"


def loss_words(row: Mapping[str, Any]) -> str:
    """A loss's advantage, what divides its tokens, and which rows count.

    >>> row = {"baseline": "group_std", "loss_type": "dapo", "zero_variance_groups": "drop"}
    >>> loss_words(row | {"reward_variance_share": 1, "advantage_threshold": 0})
    "std of the group, mean over the update's tokens, zero-variance groups dropped"
    """
    rule: str = row["baseline"]
    words = [ADVANTAGE_WORDS.get(rule, rule), LOSS_TYPE_WORDS[row["loss_type"]]]
    if row["zero_variance_groups"] in FILTER_WORDS:
        words += [FILTER_WORDS[row["zero_variance_groups"]]]
    for name, neutral in (("reward_variance_share", 1), ("advantage_threshold", 0)):
        if row[name] != neutral:
            words += [FILTER_WORDS[name].format(row[name])]
    return ", ".join(words)


def by_loss(result: Mapping[str, Any]) -> list[list[dict[str, Any]]]:
    """The rows of each loss of a study, by G."""
    rows: dict[str, list[dict[str, Any]]] = {}
    for row in result.get("losses", []):
        rows.setdefault(row["loss"], []).append(row)
    return list(rows.values())


def losses_sentences(result: Mapping[str, Any]) -> list[str]:
    """What a rollout of each loss is worth at G = 8 or the nearest, in which direction it points,
    and its best G.

    Args:
        result: content of the study's `result.json`.
    """
    return [_sentence(rows) for rows in by_loss(result)]


def _sentence(rows: Sequence[Mapping[str, Any]]) -> str:
    first = rows[0]
    name = f"{first['loss']} ({loss_words(first)})"
    measured = [row for row in rows if "noise" in row]
    if not measured:
        return f"What a rollout of {name} is worth is not measured: {first['reason']}."
    row = min(measured, key=lambda row: abs(math.log(row["group_size"] / USUAL_SIZE)))
    where = f"At n = {row['rollouts']} and G = {row['group_size']}"
    worth, noise = row_interval(row, "worth"), row_interval(row, "noise")
    if not math.isfinite(worth.estimate):
        return (
            f"{where} it is not decided what a rollout of {name} is worth: its direction is not "
            "known from these questions; an update is "
            f"{100 * noise.estimate:.0f} % noise [{100 * noise.low:.0f} %, "
            f"{100 * noise.high:.0f} %]."
        )
    direction = "its direction is unbiased"
    if not row["unbiased_direction"]:
        direction = f"its direction is right to cos {_cosine(row)}"
    sizes = [row["group_size"] for row in measured if row["alike"]]
    best = next(row["group_size"] for row in measured if row["best"])
    others = [str(size) for size in sizes if size != best]
    best_size = f"its best G is {best}"
    if others:
        best_size += f" ({enumeration(others)} may be as good)"
    if len(measured) == 1:
        best_size = "no other G was measured"
    drawn = ""
    if "kept" in row:
        kept = row_interval(row, "kept")
        drawn = (
            f"; {_number(kept)} of the groups that are drawn are in an update, and what the others "
            "cost is not in its worth"
        )
    return (
        f"{where} a rollout of {name} is worth {_number(worth)} of an unbiased one; {direction}; "
        f"{best_size}{drawn}."
    )


def losses_tables(result: Mapping[str, Any]) -> list[Table]:
    """The worth of a rollout of each loss at each G, some losses side by side; none where no loss
    was measured.
    """
    measured = [rows for rows in by_loss(result) if any("noise" in row for row in rows)]
    return [
        _worth_table(measured[first : first + MOST_BASELINES])
        for first in range(0, len(measured), MOST_BASELINES)
    ]


def _worth_table(losses: Sequence[Sequence[Mapping[str, Any]]]) -> Table:
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
            *(_number(row_interval(known[size, i], "worth_best"), "\n") if (size, i) in known
              else "-" for i in range(len(losses))),
        ]
        for size in sizes
    ]  # fmt: skip
    marks = {
        (sizes.index(size), column + 1): row["best"]
        for (size, column), row in known.items()
        if row["alike"]
    }
    missing: dict[str, dict[int, None]] = {}
    for row in (row for rows in losses for row in rows if "reason" in row):
        missing.setdefault(row["reason"], {})[row["group_size"]] = None
    return Table(
        title=f"Worth of a rollout at n = {losses[0][0]['rollouts']}, of one {AT_BEST}",
        columns=["G", *(rows[0]["loss"] for rows in losses)],
        rows=cells,
        notes=[WORTH_NOTE, *(f"Not at G = {', '.join(map(str, sizes))}: {reason}."
                             for reason, sizes in missing.items())],
        marks=marks,
    )  # fmt: skip


def loss_details(result: Mapping[str, Any]) -> list[Table]:
    """Every loss at every G: both worths, direction and noise; none where none was measured."""
    rows = [
        [
            row["loss"],
            loss_words(row),
            str(row["group_size"]),
            _number(row_interval(row, "worth")),
            _number(row_interval(row, "worth_best")),
            "unbiased" if row["unbiased_direction"] else _cosine(row),
            _number(row_interval(row, "noise")),
        ]
        for rows in by_loss(result)
        for row in rows
        if "noise" in row
    ]
    if not rows:
        return []
    columns = ["loss", "advantage and tokens", "G", "worth at the same G", f"worth of {AT_BEST}",
               "cos of its mean and the gradient", "share of noise"]  # fmt: skip
    notes = [WORTH_NOTE, "The share of noise is that of an update's squared norm."]
    return [Table("Losses at every G", columns, rows, notes)]


def losses_figure(folder: Path, result: Mapping[str, Any]) -> None:
    """The worth of each loss's rollout against G, with its interval; `losses.{pdf,svg,png}`."""
    losses = by_loss(result)
    if not any("noise" in row for rows in losses for row in rows):
        return
    with plt.rc_context(FONTS):
        figure, axes = plt.subplots(figsize=(6.4, 4.4), layout="constrained")
        worth_panel(axes, losses)
        axes.set_ylabel(f"worth of a rollout, of one {AT_BEST}")
        axes.legend(frameon=False, fontsize=8)
        policy, first = result["policy"], losses[0][0]
        axes.set_title(
            f"{policy['name']}: {policy['quantity']} {policy['mean_reward']:.2f}, "
            f"n = {first['rollouts']}",
            fontsize=9,
            loc="left",
        )
        note(figure, ["Bands: 95 % intervals for new questions."], 6.4)
        save(figure, folder, "losses")


def worth_panel(axes: Any, losses: Sequence[Sequence[Mapping[str, Any]]]) -> None:
    """Lines of worth against G, a loss each, where they are decided."""
    shown: list[int] = []
    for place, rows in enumerate(losses):
        known = [
            (row["group_size"], row_interval(row, "worth_best")) for row in rows if "noise" in row
        ]
        known = [(size, worth) for size, worth in known if math.isfinite(worth.estimate)]
        colour, marker = line_style(place)
        label = rows[0]["loss"] + ("" if known else " (not decided)")
        sizes = [size for size, _ in known]
        axes.plot(sizes, [x.estimate for _, x in known], color=colour, marker=marker,
                  markersize=4, label=label)  # fmt: skip
        axes.fill_between(sizes, [x.low for _, x in known], [x.high for _, x in known],
                          color=colour, alpha=0.15, linewidth=0)  # fmt: skip
        shown += sizes
    axes.axhline(1.0, color="black", linestyle="--", linewidth=1)
    log_sizes(axes, sorted(set(shown)) or [2, 4, 8])
    axes.set_xlabel("group size G")
    axes.set_ylim(bottom=0)
    axes.grid(alpha=0.3, linewidth=0.5)


def _number(value: Interval, gap: str = " ") -> str:
    """A worth or a share with its interval.

    >>> _number(Interval(0.981, 0.961, 1.0021)), _number(Interval(math.nan, 0, math.inf))
    ('0.98 [0.96, 1.00]', 'not decided')
    """
    if not math.isfinite(value.estimate):
        return "not decided"
    high = f"{value.high:.2f}" if math.isfinite(value.high) else "no end"
    return f"{value.estimate:.2f}{gap}[{value.low:.2f}, {high}]"


def _cosine(row: Mapping[str, Any]) -> str:
    """The cosine of a loss's mean and the gradient, with its interval."""
    square = row_interval(row, "direction")
    if not math.isfinite(square.estimate):
        return f"at least {math.sqrt(max(0.0, square.low)):.2f}" if square.low > 0 else "not known"
    estimate, low, high = (math.sqrt(max(0.0, x)) for x in square)
    return f"{estimate:.3f} [{low:.3f}, {high:.3f}]"
