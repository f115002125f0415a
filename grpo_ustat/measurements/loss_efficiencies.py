"""Records, sentences, tables and figures on the relative efficiency of losses."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING

from grpo_ustat.estimators.group_size import USUAL_SIZE
from grpo_ustat.estimators.intervals import Interval
from grpo_ustat.estimators.losses import LossRow
from grpo_ustat.estimators.row_weights import RowFilter
from grpo_ustat.pages.figures import (
    figure_fonts,
    fitted,
    legend_above,
    legend_label,
    line_style,
    log_sizes,
    note,
    panel_figure,
    save,
)
from grpo_ustat.pages.tables import MAX_BASELINES, Table, enumeration

if TYPE_CHECKING:
    from matplotlib.axes import Axes

ADVANTAGE_WORDS = {
    "none": "no baseline",
    "leave_one_out": "reward minus the mean of the rest of the group",
    "group_mean": "reward minus the group mean",
    "group_std": "advantage divided by the group std",
    "batch_std": "advantage divided by the batch std",
    "reinforce_pp_baseline": "advantage divided by the std over the batch's tokens",
}
LOSS_TYPE_WORDS = {
    "sum": "sum over tokens",
    "luspo": "sum over tokens",
    "dr_grpo": "sum over tokens divided by the maximum length",
    "grpo": "mean over each completion's tokens",
    "sapo": "mean over each completion's tokens",
    "dapo": "mean over the update's tokens",
    "cispo": "mean over the update's tokens",
    "vespo": "mean over the update's tokens",
    "bnpo": "mean over each micro-batch's tokens",
}
# Text that is shown if a cosine is unknown.
NOT_KNOWN = "not known"
# Descriptions of the row filters of a loss.
FILTER_WORDS = {
    "drop": "zero-variance groups dropped",
    "replace": "zero-variance groups replaced",
    "reward_variance_share": "groups with {:g} of the reward variance",
}
EFFICIENCY_NOTE = (
    "The relative efficiency compares a loss with the unbiased leave-one-out gradient: one rollout "
    "with the loss is worth this many rollouts with that gradient, at the first update on a batch. "
    "The 95 % intervals are for new questions. All losses and G are measured on the same questions."
)
NOISE_NOTE = "The share of noise is the fraction of an update's squared norm that is noise."
# Mark for a relative efficiency that is significantly lower than at the best G of the loss.
WORSE = "*"
WORSE_SIZE_NOTE = (
    f"{WORSE} marks an efficiency significantly lower than the efficiency of the same loss at its "
    "best G."
)
UNDECIDED = "not decided"
BARS_NOTE = "Bars are 95 % intervals for new questions. At each G, losses are shifted horizontally."
# Horizontal distances in octaves of G: the largest distance between adjacent losses at one G, and
# the largest distance that all losses at one G may span.
APART, ASIDE = 0.12, 0.6
UNBIASED_SAME_G = "the unbiased gradient at the same G"
UNBIASED_BEST_G = "the unbiased gradient at its best G"


@dataclass(frozen=True, kw_only=True)
class LossEfficiency:
    """Relative efficiency of a loss at one G, for new questions; see `estimators.efficiency`."""

    # Name of the loss.
    loss: str
    # Baseline of the advantages.
    baseline: str
    # Type of the loss, which determines the normalisation over tokens.
    loss_type: str
    # The next two fields are the row filter; a field with its default value is absent. See
    # `estimators.row_weights.RowFilter`.
    zero_variance_groups: str | None = None
    reward_variance_share: float | None = None
    # Number of rollouts per update, n.
    rollouts: int
    # Group size, G.
    group_size: int
    # Share of the sampled groups that the update uses; present only if the loss replaces
    # zero-variance groups.
    kept: Interval | None = None
    unbiased_direction: bool
    # Number of rollouts of the unbiased estimate at the same G that are worth one rollout of the
    # loss.
    efficiency_same_g: Interval | None = None
    # Number of rollouts of the unbiased estimate at its best G that are worth one rollout of the
    # loss.
    efficiency_best_g: Interval | None = None
    # Squared cosine between the expected update and the gradient; 1 if `unbiased_direction`.
    direction: Interval | None = None
    # Fraction of an update's squared norm that is noise.
    noise: Interval | None = None
    # True if this G is the best measured G of the loss.
    best: bool
    # True if this G is not significantly worse than the best measured G.
    may_be_best: bool
    # Reason why the loss was not measured at this G.
    reason: str | None = None

    @property
    def is_measured(self) -> bool:
        """True if the loss was measured at this G."""
        return self.noise is not None

    @property
    def is_decided(self) -> bool:
        """True if the relative efficiency is known."""
        return self.efficiency_same_g is not None and self.efficiency_same_g.is_known

    @property
    def is_worse(self) -> bool:
        """True if another G is significantly better for the same loss."""
        return self.is_decided and not self.may_be_best


def loss_records(rows: Sequence[LossRow]) -> list[LossEfficiency]:
    """Convert measured losses to the records stored in `result.json`."""
    default = asdict(RowFilter())
    return [
        LossEfficiency(
            loss=row.loss.name,
            baseline=row.loss.baseline,
            loss_type=row.loss.loss_type,
            **{name: x for name, x in asdict(row.loss.rows).items() if x != default[name]},
            rollouts=row.rollouts,
            group_size=row.group_size,
            kept=row.kept,
            unbiased_direction=row.loss.scale(row.group_size) is not None,
            best=row.best,
            may_be_best=row.may_be_best,
            reason=row.reason and row.reason.line,
            **({} if row.efficiency is None else vars(row.efficiency)),
        )
        for row in rows
    ]


def by_loss(rows: Sequence[LossEfficiency]) -> list[list[LossEfficiency]]:
    """Group rows by loss; the rows of a loss keep their order."""
    losses: dict[str, list[LossEfficiency]] = {}
    for row in rows:
        losses.setdefault(row.loss, []).append(row)
    return list(losses.values())


def measured_rows(rows: Sequence[LossEfficiency]) -> list[LossEfficiency]:
    """Return the rows that were measured."""
    return [row for row in rows if row.is_measured]


def nearest_usual(rows: Sequence[LossEfficiency]) -> LossEfficiency:
    """Return the row whose G is nearest to 8."""
    return min(rows, key=lambda row: abs(math.log(row.group_size / USUAL_SIZE)))


def efficiency_sentences(
    rows: Sequence[LossEfficiency], wrote: str = "", compared: str = UNBIASED_SAME_G
) -> list[str]:
    """Return sentences on the relative efficiency, direction and best G of each loss.

    The efficiency is given at the measured G nearest to 8. If several losses have the same result,
    one sentence names all of them.

    Args:
        wrote: Text after the name of the loss, for example with the policy that wrote the rollouts.
        compared: Description of the gradient that the loss is compared with.
    """
    same: dict[str, list[list[LossEfficiency]]] = {}
    for of_loss in by_loss(rows):
        same.setdefault(_sentence("", of_loss, wrote, compared), []).append(of_loss)
    return [
        _sentence(
            enumeration([of_loss[0].loss for of_loss in losses], "or"), losses[0], wrote, compared
        )
        for losses in same.values()
    ]


def _sentence(names: str, rows: Sequence[LossEfficiency], wrote: str, compared: str) -> str:
    name = f"{names} ({loss_words(rows[0])}){wrote}"
    measured = measured_rows(rows)
    if not measured:
        return f"The relative efficiency of {name} was not measured: {rows[0].reason}."
    row = nearest_usual(measured)
    assert row.efficiency_same_g is not None and row.noise is not None
    where = f"At n = {row.rollouts} and G = {row.group_size}"
    if not row.efficiency_same_g.is_known:
        share = ""
        if row.noise.is_known:
            percents = [f"{100 * x:.0f} %" for x in row.noise]
            share = (
                f"; an update with this loss is {percents[0]} noise [{percents[1]}, {percents[2]}]"
            )
        return (
            f"{where} the relative efficiency of {name} is not decided because these questions "
            f"do not determine the direction of its update{share}."
        )
    direction = "its direction is unbiased"
    if not row.unbiased_direction:
        cosine = cosine_text(row)
        direction = f"the cosine of its direction with the gradient is {cosine}"
        if cosine == NOT_KNOWN:
            direction = f"the accuracy of its direction is {NOT_KNOWN}"
    drawn = ""
    if row.kept is not None:
        drawn = (
            f"; an update uses a share of {efficiency_text(row.kept)} of the sampled groups, and "
            "the cost of the unused groups is not counted"
        )
    return (
        f"{where} the relative efficiency of {name} is {efficiency_text(row.efficiency_same_g)} "
        f"against {compared}; {direction}; {_best_size_text(rows, measured)}{drawn}."
    )


def _best_size_text(rows: Sequence[LossEfficiency], measured: Sequence[LossEfficiency]) -> str:
    """Describe the best G of a loss; call it the best measured G if another G may be better."""
    if len(measured) == 1:
        return "no other G was measured"
    best = next(row.group_size for row in measured if row.best)
    sizes = [row.group_size for row in measured]
    text = f"its best G is {best}"
    if len(measured) < len(rows) or best in (min(sizes), max(sizes)):
        text = f"its best measured G is {best}"
    others = [str(row.group_size) for row in measured if row.may_be_best and row.group_size != best]
    return f"{text} ({enumeration(others)} may be as good)" if others else text


def efficiency_tables(
    rows: Sequence[LossEfficiency], wrote: str = "", notes: Sequence[str] = (EFFICIENCY_NOTE,)
) -> list[Table]:
    """Return tables of relative efficiency by G and loss, and a table of all numbers.

    The list is empty if no loss was measured. If no relative efficiency is decided, the table by G
    and loss contains only notes.

    Args:
        wrote: Text after "Relative efficiency", for example with the policy that wrote the
            rollouts.
        notes: Notes that define relative efficiency.
    """
    losses = [of_loss for of_loss in by_loss(rows) if measured_rows(of_loss)]
    if not losses:
        return []
    decided = [of_loss for of_loss in losses if any_decided(of_loss)]
    undecided = _undecided(losses)
    absent = not_measured([row for of_loss in losses for row in of_loss])
    title = f"Relative efficiency{wrote} at n = {losses[0][0].rollouts}, against {UNBIASED_BEST_G}"
    if not decided:
        line = Table(title, ["G"], [], undecided)
        return [line, _details_table(losses, wrote, [*notes, *absent])]
    first_places = range(0, len(decided), MAX_BASELINES)
    parts = [decided[place : place + MAX_BASELINES] for place in first_places]
    worse = [WORSE_SIZE_NOTE] * any(row.is_worse for row in rows)
    *first, last = (_efficiency_table(title, part, [*notes, *worse]) for part in parts)
    last = replace(last, notes=[*last.notes, *undecided, *absent])
    return [*first, last, _details_table(losses, wrote, notes)]


def _efficiency_table(
    title: str, losses: Sequence[Sequence[LossEfficiency]], notes: Sequence[str]
) -> Table:
    """Return a table with a row for each G at which at least one loss is decided."""
    cells = {
        (row.group_size, row.loss): efficiency_text(
            row.efficiency_best_g, WORSE * row.is_worse + "\n"
        )
        for of_loss in losses
        for row in of_loss
        if row.is_decided
    }
    names = [of_loss[0].loss for of_loss in losses]
    sizes = sorted({size for size, _ in cells})
    rows = [[str(size), *(cells.get((size, name), "-") for name in names)] for size in sizes]
    return Table(title, ["G", *names], rows, notes)


def _undecided(losses: Sequence[Sequence[LossEfficiency]]) -> list[str]:
    """Return a line for each set of group sizes at which measured losses are not decided."""
    names: dict[str, list[str]] = {}
    for of_loss in losses:
        measured = measured_rows(of_loss)
        sizes = [str(row.group_size) for row in measured if not row.is_decided]
        if sizes:
            where = f"at G = {enumeration(sizes)}" if len(sizes) < len(measured) else "at any G"
            names.setdefault(where, []).append(of_loss[0].loss)
    return [
        f"Not decided {where}: {enumeration(of_where)}, because these questions do not determine "
        "the direction."
        for where, of_where in names.items()
    ]


def not_measured(rows: Sequence[LossEfficiency]) -> list[str]:
    """Return a line for each reason why losses were not measured at some G."""
    missing: dict[str, dict[int, None]] = {}
    for row in rows:
        if row.reason is not None:
            missing.setdefault(row.reason, {})[row.group_size] = None
    return [
        f"Not measured at G = {', '.join(map(str, sizes))}: {reason}."
        for reason, sizes in missing.items()
    ]


def _details_table(
    losses: Sequence[Sequence[LossEfficiency]], wrote: str, notes: Sequence[str]
) -> Table:
    """Return a table with a row per loss and G, without columns in which nothing is decided."""
    rows = [
        [row.loss, loss_words(row), str(row.group_size), *number_cells(row, " ")]
        for of_loss in losses
        for row in measured_rows(of_loss)
    ]
    columns = [
        "loss",
        "advantage and tokens",
        "G",
        f"efficiency against {UNBIASED_SAME_G}",
        "at its best G",
        "cosine of expected update and gradient",
        "share of noise",
    ]
    kept = [
        place
        for place in range(len(columns))
        if not all(row[place] in (UNDECIDED, NOT_KNOWN) for row in rows)
    ]
    of = f",{wrote}" if wrote else ""
    return Table(
        f"Losses at every G{of}",
        [columns[place] for place in kept],
        [[row[place] for place in kept] for row in rows],
        [*notes, NOISE_NOTE],
        page_only=True,
    )


def number_cells(row: LossEfficiency, gap: str) -> list[str]:
    """Return the cells of both relative efficiencies, the cosine and the share of noise.

    The efficiency against the unbiased gradient at its best G is marked if another G is
    significantly better for the loss.
    """
    return [
        efficiency_text(row.efficiency_same_g, gap),
        efficiency_text(row.efficiency_best_g, WORSE * row.is_worse + gap),
        cosine_text(row, gap),
        efficiency_text(row.noise, gap),
    ]


def draw_efficiencies(
    folder: Path, name: str, title: str, rows: Sequence[LossEfficiency], lines: Sequence[str]
) -> None:
    """Plot each loss's relative efficiency against G; draw nothing if no efficiency is decided."""
    losses = {of_loss[0].loss: of_loss for of_loss in by_loss(rows)}
    if not any_decided(rows):
        return
    absent = [loss for loss, of_loss in losses.items() if not any_decided(of_loss)]
    without = [f"Not decided or not measured: {enumeration(absent)}."] if absent else []
    panel = (f"{title}, n = {rows[0].rollouts}", losses)
    draw_panels(folder, name, {"": [[panel]]}, [BARS_NOTE, *without, *lines])


# Title of a panel, and the rows of each loss, keyed by the name of the loss.
Panel = tuple[str, Mapping[str, Sequence[LossEfficiency]]]


def draw_panels(
    folder: Path, name: str, grids: Mapping[str, list[list[Panel]]], lines: Sequence[str]
) -> None:
    """Draw panels of relative efficiencies.

    Args:
        grids: Rows of panels of each data set.
        lines: Lines of text below the panels.
    """
    grid = [(dataset, titled) for dataset, of_dataset in grids.items() for titled in of_dataset]
    names = list(dict.fromkeys(x for _, titled in grid for _, losses in titled for x in losses))
    with figure_fonts():
        figure, panels = panel_figure([len(titled) for _, titled in grid])
        for line, (dataset, titled) in zip(panels, grid, strict=True):
            for [axes], (title, losses) in zip(line, titled, strict=True):
                efficiency_panel(axes, losses, names)
                axes.set_title(fitted(title, len(line)), loc="left")
            label = f"relative efficiency against\n{UNBIASED_BEST_G}\n{dataset}".rstrip()
            line[0][0].set_ylabel(label)
        legend_above(figure)
        note(figure, lines)
        save(figure, folder, name)


def efficiency_panel(
    axes: Axes, losses: Mapping[str, Sequence[LossEfficiency]], names: Sequence[str]
) -> None:
    """Plot each loss's relative efficiency against G, at every G at which it is decided.

    Args:
        losses: Rows of each loss, keyed by the name of the loss.
        names: Names of the losses in all panels; their order determines colours and markers.
    """
    lines: dict[str, dict[int, Interval]] = {}
    for name, rows in losses.items():
        efficiencies = {row.group_size: row.efficiency_best_g for row in rows if row.is_decided}
        if efficiencies:
            lines[name] = {
                size: efficiency
                for size, efficiency in efficiencies.items()
                if efficiency is not None
            }
    shown = [(size, efficiency) for line in lines.values() for size, efficiency in line.items()]
    least = min([1.0, *(x.low for _, x in shown)])
    most = max([1.0, *(x.estimate for _, x in shown)])
    # Infinite and very wide intervals extend beyond this limit of the axis.
    top = 1.05 * min(max([most, *(x.high for _, x in shown)]), 1.5 * most)
    spacing = min(APART, ASIDE / max(1, len(lines)))
    for place, (name, line) in enumerate(lines.items()):
        colour, marker = line_style(names.index(name))
        aside = 2 ** (spacing * (place - (len(lines) - 1) / 2))
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
    all_sizes = {row.group_size for rows in losses.values() for row in rows}
    log_sizes(axes, sorted({size for size, _ in shown} or all_sizes))
    axes.set_xlabel("group size G")
    axes.set_ylim(max(0.0, least - (top - least) / 10) if lines else 0, top)
    axes.grid(alpha=0.3, linewidth=0.5)


def described(rows: Sequence[LossEfficiency]) -> str:
    """Describe each loss in the rows; losses with equal descriptions share an entry."""
    by_words: dict[str, dict[str, None]] = {}
    for row in rows:
        by_words.setdefault(loss_words(row), {})[row.loss] = None
    words = "; ".join(f"{enumeration([*names])}: {text}" for text, names in by_words.items())
    return f"{words}."


def any_decided(rows: Sequence[LossEfficiency]) -> bool:
    """Return True if the relative efficiency is known at any G."""
    return any(row.is_decided for row in rows)


def loss_words(row: LossEfficiency) -> str:
    """Describe a loss: its advantage, its normalisation over tokens and its row filter."""
    words = [ADVANTAGE_WORDS.get(row.baseline, row.baseline), LOSS_TYPE_WORDS[row.loss_type]]
    if row.zero_variance_groups is not None:
        words.append(FILTER_WORDS[row.zero_variance_groups])
    if row.reward_variance_share is not None:
        words.append(FILTER_WORDS["reward_variance_share"].format(row.reward_variance_share))
    return ", ".join(words)


def efficiency_text(value: Interval | None, gap: str = " ", digits: int = 2) -> str:
    """Format an efficiency or a share with its interval, rounded to `digits` decimals.

    >>> efficiency_text(Interval(0.981, 0.961, 1.0021))
    '0.98 [0.96, 1.00]'
    >>> efficiency_text(Interval(math.nan, 0, math.inf))
    'not decided'
    """
    if value is None or not value.is_known:
        return UNDECIDED
    high = f"{value.high:.{digits}f}" if math.isfinite(value.high) else "no upper end"
    return f"{value.estimate:.{digits}f}{gap}[{value.low:.{digits}f}, {high}]"


def cosine_text(row: LossEfficiency, gap: str = " ") -> str:
    """Format the cosine of a loss's expected update and the gradient; see `direction_text`."""
    return direction_text(row.unbiased_direction, row.direction, gap)


def direction_text(unbiased: bool, square: Interval | None, gap: str = " ") -> str:
    """Format a cosine with its interval, given the squared cosine."""
    if unbiased:
        return "unbiased"
    if square is None or not square.is_known:
        low = 0.0 if square is None else square.low
        return f"at least {math.sqrt(low):.2f}" if low > 0 else NOT_KNOWN
    estimate, low, high = (math.sqrt(max(0.0, x)) for x in square)
    return f"{estimate:.3f}{gap}[{low:.3f}, {high:.3f}]"
