"""Relative efficiency, direction and best G of each loss at the first update on a batch.

Studies that differ only in the loss, as in a sweep over `objective`, measure the same pool. A
report draws their losses as lines of one panel.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from grpo_ustat.estimators.losses import loss_efficiencies
from grpo_ustat.measurements.base import (
    Figure,
    Joint,
    Measurement,
    PoolStudy,
    Study,
    by_pool,
    study_columns,
)
from grpo_ustat.measurements.loss_efficiencies import (
    BARS_NOTE,
    EFFICIENCY_NOTE,
    NOISE_NOTE,
    UNBIASED_SAME_G,
    WORSE_SIZE_NOTE,
    LossEfficiency,
    Panel,
    any_decided,
    by_loss,
    described,
    draw_efficiencies,
    draw_panels,
    efficiency_sentences,
    efficiency_tables,
    efficiency_text,
    loss_records,
    measured_rows,
    nearest_usual,
    not_measured,
    number_cells,
)
from grpo_ustat.measurements.panels import panel_grid, panel_title
from grpo_ustat.pages.tables import Table, enumeration, shorten
from grpo_ustat.runs.contents import content_of
from grpo_ustat.runs.record import distinguishing_keys, key_label


def measure(study: PoolStudy) -> list[LossEfficiency] | None:
    """Measure each requested loss at each G."""
    rows = loss_efficiencies(
        study.pool, study.losses, study.group_sizes, study.rollouts, study.draws, study.seed
    )
    return loss_records(rows) or None


def sentences(rows: list[LossEfficiency], study: Study) -> list[str]:
    """Return sentences on the relative efficiency of each loss at the first update on a batch."""
    return efficiency_sentences(rows)


def tables(rows_by_study: Mapping[Study, list[LossEfficiency]]) -> list[Table]:
    """Return short and full tables of the relative efficiency of each loss."""
    return [table for rows in rows_by_study.values() for table in efficiency_tables(rows)]


def draw(
    folder: Path, rows_by_study: Mapping[Study, list[LossEfficiency]], lines: Sequence[str]
) -> None:
    """Plot each loss's relative efficiency against G and save it as `losses.{pdf,svg,png}`."""
    for study, rows in rows_by_study.items():
        policy = study.result.policy
        title = f"{policy.name}: {policy.quantity} {policy.mean_reward.estimate:.2f}"
        draw_efficiencies(folder, "losses", title, rows, lines)


@dataclass(frozen=True)
class LossPanel:
    """Losses measured on one pool."""

    # First study of the pool.
    study: Study
    # Study and rows (one row per G) of each loss, keyed by a unique name.
    lines: dict[str, tuple[Study, list[LossEfficiency]]]

    @property
    def measured(self) -> dict[str, list[LossEfficiency]]:
        """Measured rows of each loss that was measured at some G."""
        rows = {name: measured_rows(of_loss) for name, (_, of_loss) in self.lines.items()}
        return {name: of_loss for name, of_loss in rows.items() if of_loss}


def loss_panels(rows_by_study: Mapping[Study, list[LossEfficiency]]) -> list[LossPanel]:
    """Return a panel for each pool on which losses were measured.

    If several studies of a pool have equal results for a loss, the loss occurs once. If their
    results differ, the names of the losses include the configuration keys that differ.
    """
    panels = []
    for members in by_pool(rows_by_study):
        by_name: dict[str, list[tuple[Study, list[LossEfficiency]]]] = {}
        for study in members:
            for rows in by_loss(rows_by_study[study]):
                of_name = by_name.setdefault(rows[0].loss, [])
                if not any(_measured_alike(rows, other) for _, other in of_name):
                    of_name.append((study, rows))
        lines = {}
        for name, of_name in by_name.items():
            keys = distinguishing_keys([study.run.keys for study, _ in of_name])
            for study, rows in of_name:
                lines[f"{name} {key_label(study.run.keys, keys)}".strip()] = study, rows
        panel = LossPanel(members[0], lines)
        if panel.measured:
            panels.append(panel)
    return panels


def _measured_alike(rows: Sequence[LossEfficiency], others: Sequence[LossEfficiency]) -> bool:
    """Return True if two studies have equal results for a loss, up to rounding errors.

    Equal results can differ by rounding, because a study computes all its losses in joint sums.
    """

    def texts(row: LossEfficiency) -> list[Any]:
        return [row.group_size, row.baseline, row.loss_type, row.reason]

    def numbers(row: LossEfficiency) -> list[float]:
        intervals = (row.efficiency_same_g, row.efficiency_best_g, row.direction, row.noise)
        return [x.estimate if x is not None and x.is_known else 0.0 for x in intervals]

    return len(rows) == len(others) and all(
        texts(row) == texts(other) and np.allclose(numbers(row), numbers(other), rtol=1e-4)
        for row, other in zip(rows, others, strict=True)
    )


def joint_tables(rows_by_study: Mapping[Study, list[LossEfficiency]]) -> list[Table]:
    """Return a table with a row per policy, loss and G; no table if nothing was measured."""
    panels = loss_panels(rows_by_study)
    study_keys = distinguishing_keys([study.run.keys for study in rows_by_study])
    rows, data = [], []
    for panel in panels:
        for name, (study, of_loss) in panel.lines.items():
            run = study.run
            of_study = study_columns(run, study_keys) | {"seed": run.config["seed"], "line": name}
            data += [of_study | content_of(row) for row in of_loss]
            for row in panel.measured.get(name, []):
                policy = f"{run.policy}\n{run.dataset}\nn = {row.rollouts}"
                rows.append([policy, name, str(row.group_size), *number_cells(row, "\n")])
    all_rows = [row for panel in panels for _, of_loss in panel.lines.values() for row in of_loss]
    missing = [
        f"{panel.study.run.label}: {line}"
        for panel in panels
        for line in not_measured([row for _, of_loss in panel.lines.values() for row in of_loss])
    ]
    worse = [WORSE_SIZE_NOTE] * any(row.is_worse for row in all_rows)
    table = Table(
        name="losses",
        title="Relative efficiency of each loss",
        columns=["policy", "loss", "G", f"efficiency against\n{UNBIASED_SAME_G}", "at its best G",
                 "cosine with\nthe gradient", "share of\nnoise"],
        rows=rows,
        notes=[EFFICIENCY_NOTE, *worse, NOISE_NOTE, described(all_rows), *missing],
        data=data,
        figure_notes=[BARS_NOTE, *_without_a_line(panels)] if any_decided(all_rows) else None,
        headings=True,
    )  # fmt: skip
    return [table] if panels else []


def draw_joint(
    folder: Path, rows_by_study: Mapping[Study, list[LossEfficiency]], lines: Sequence[str]
) -> None:
    """Plot each loss's relative efficiency against G, with one panel per pool.

    Each row of panels shows a single data set. The figure is saved as `losses.{pdf,svg,png}`.
    """
    panels = {panel.study: panel for panel in loss_panels(rows_by_study)}
    grids: dict[str, list[list[Panel]]] = {}
    for studies in panel_grid(panels):
        line: list[Panel] = []
        for study in studies:
            measured = panels[study].measured
            rollouts = next(iter(measured.values()))[0].rollouts
            line.append((f"{panel_title(study)}\nn = {rollouts}", measured))
        grids.setdefault(str(studies[0].run.dataset), []).append(line)
    draw_panels(folder, "losses", grids, lines)


def _without_a_line(panels: Sequence[LossPanel]) -> list[str]:
    """List the losses that have no line in the figure, with one entry per panel."""
    lines = []
    for panel in panels:
        absent = [name for name, (_, of_loss) in panel.lines.items() if not any_decided(of_loss)]
        if absent:
            where = f"Not decided or not measured on {panel.study.run.policy}"
            lines.append(f"{where}: {enumeration(absent)}.")
    return shorten(lines, 3, "losses.csv")


def answer(rows_by_study: Mapping[Study, list[LossEfficiency]]) -> str:
    """State the smallest and largest relative efficiency of the losses at the G nearest to 8.

    The sentence also gives the number of losses whose efficiency is not decided.
    """
    panels = loss_panels(rows_by_study)
    decided, undecided, sizes = [], [], set()
    for panel in panels:
        for name, rows in panel.measured.items():
            row = nearest_usual(rows)
            sizes.add(row.group_size)
            if row.efficiency_same_g is not None and row.efficiency_same_g.is_known:
                where = f"{name} on {panel.study.run.policy}" if len(panels) > 1 else name
                decided.append((row.efficiency_same_g, where))
            else:
                undecided.append(name)
    at = f"At G = {' or '.join(map(str, sorted(sizes)))}"
    if not decided:
        names = enumeration([*dict.fromkeys(undecided)], "or")
        return f"{at} the relative efficiency of {names} is not decided."
    ends = sorted(decided, key=lambda entry: entry[0].estimate)
    ends = [ends[0], ends[-1]] if len(ends) > 1 else ends
    values = " to ".join(f"{efficiency_text(value)} ({where})" for value, where in ends)
    text = f"{at} the relative efficiency against {UNBIASED_SAME_G} is {values}."
    if undecided:
        text += (
            f" {len(undecided)} of {len(undecided) + len(decided)} efficiencies are not decided."
        )
    return text


LOSSES = Measurement(
    "losses",
    list[LossEfficiency],
    measure,
    sentences,
    tables,
    prints=True,
    figure=Figure("losses", "Relative efficiency of each loss", draw),
    joint=Joint(joint_tables, answer, draw_joint),
    leads=True,
)
