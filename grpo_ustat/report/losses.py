"""Losses of several studies: the worth of a rollout of each, as a table, a figure and a sentence.

Studies that differ only in the loss, such as those of a sweep over `objective`, measure the same
pool: their losses are lines of one panel.
"""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from grpo_ustat.measurements.base import Study, study_columns
from grpo_ustat.measurements.panels import panel_grid, panel_title
from grpo_ustat.pages.figures import FONTS, note, plt, save
from grpo_ustat.pages.losses import (
    AT_BEST,
    BARS_NOTE,
    NOISE_NOTE,
    WORTH_NOTE,
    by_loss,
    cosine_text,
    loss_words,
    nearest_usual,
    not_measured,
    worth_legend,
    worth_panel,
    worth_text,
)
from grpo_ustat.pages.tables import Table, enumeration, shorten
from grpo_ustat.report.collect import distinguishing_keys
from grpo_ustat.runs.contents import row_interval
from grpo_ustat.runs.record import RunRecord, key_label

LOSS_KEYS = ("objective", "objectives", "baseline")  # of a study, that change no pool
LAG_KEYS = ("study.policy", "study.reference", "study.corrections", "study.correction_cap")
MARKS_NOTE = "{} the best G of a loss; {} not significantly worse."


@dataclass(frozen=True)
class LossPanel:
    """Losses that were measured on one pool."""

    # The first study of the pool.
    study: RunRecord
    # The study and the rows by G of each loss, by a unique name.
    lines: dict[str, tuple[RunRecord, list[dict[str, Any]]]]

    @property
    def measured(self) -> dict[str, list[dict[str, Any]]]:
        """Rows with numbers, of each loss that has any."""
        rows = {name: [x for x in own if "noise" in x] for name, (_, own) in self.lines.items()}
        return {name: own for name, own in rows.items() if own}


def by_pool(studies: Sequence[RunRecord]) -> list[list[RunRecord]]:
    """Group studies that differ only in their losses; all else in their results is equal."""
    pools: dict[str, list[RunRecord]] = {}
    for run in studies:
        of_pool = {
            key: value
            for key, value in run.keys.items()
            if key.partition(".")[0] not in LOSS_KEYS and key not in LAG_KEYS
        }
        pools.setdefault(json.dumps(of_pool, sort_keys=True, default=str), []).append(run)
    return list(pools.values())


def loss_panels(studies: Sequence[RunRecord]) -> list[LossPanel]:
    """Make a panel for each pool on which losses were measured.

    A loss that several studies of a pool measured with equal results occurs once. Losses of the
    same name with different results are named by what differs.
    """
    panels = []
    for members in by_pool(studies):
        found: dict[str, list[tuple[RunRecord, list[dict[str, Any]]]]] = {}
        for run in members:
            for rows in by_loss(run.final_result):
                of_name = found.setdefault(rows[0]["loss"], [])
                if not any(_measured_alike(rows, other) for _, other in of_name):
                    of_name.append((run, rows))
        lines = {}
        for name, of_name in found.items():
            keys = distinguishing_keys([run.keys for run, _ in of_name])
            for run, rows in of_name:
                lines[f"{name} {key_label(run.keys, keys)}".strip()] = run, rows
        panel = LossPanel(members[0], lines)
        if panel.measured:
            panels.append(panel)
    return panels


def _measured_alike(rows: list[dict[str, Any]], others: list[dict[str, Any]]) -> bool:
    """Return True if two studies have equal results for a loss, up to rounding.

    The rounding comes from sums over more losses.
    """

    def texts(row: dict[str, Any]) -> list[Any]:
        return [row.get(key) for key in ("group_size", "baseline", "loss_type", "reason")]

    def numbers(row: dict[str, Any]) -> list[float]:
        return [row.get(key) or 0.0 for key in ("worth", "worth_best", "direction", "noise")]

    return len(rows) == len(others) and all(
        texts(row) == texts(other) and np.allclose(numbers(row), numbers(other), rtol=1e-4)
        for row, other in zip(rows, others, strict=True)
    )


def losses_table(panels: Sequence[LossPanel], study_keys: Sequence[str]) -> Table:
    """Make a table with a row per policy, loss and group size.

    Args:
        panels: panels with a measured loss each.
        study_keys: configuration keys in which their studies differ.
    """
    rows, marks, data = [], {}, []
    for panel in panels:
        for name, (run, own) in panel.lines.items():
            study = study_columns(run, study_keys) | {"seed": run.config["seed"], "line": name}
            data += [study | row for row in own]
            measured = panel.measured.get(name, [])
            for row in measured:
                mark = ""
                if row["alike"] and len(measured) > 1 and _known([row]):
                    marks[len(rows), 2] = row["best"]
                    mark = "*" if row["best"] else "~"
                rows.append([
                    f"{run.policy}\n{run.dataset}\nn = {row['rollouts']}",
                    name,
                    f"{row['group_size']}{mark}",
                    worth_text(row_interval(row, "worth"), "\n"),
                    worth_text(row_interval(row, "worth_best"), "\n"),
                    cosine_text(row, "\n"),
                    worth_text(row_interval(row, "noise"), "\n"),
                ])  # fmt: skip
    by_words: dict[str, dict[str, None]] = {}
    for row in data:
        by_words.setdefault(loss_words(row), {})[row["loss"]] = None
    words = "; ".join(f"{enumeration([*names])}: {text}" for text, names in by_words.items())
    missing = [
        f"{panel.study.label}: {line}"
        for panel in panels
        for line in not_measured([own for _, own in panel.lines.values()])
    ]
    notes = [WORTH_NOTE, NOISE_NOTE, f"{words}."]
    drawn_notes = [BARS_NOTE, *_without_a_line(panels)]
    return Table(
        name="losses",
        title="Worth of a rollout of each loss",
        columns=["policy", "loss", "G", "worth at the same G", f"in {AT_BEST}",
                 "cos with the gradient", "share of noise"],
        rows=rows,
        notes=[*notes, *[MARKS_NOTE.format("*:", "~:")] * bool(marks), *missing],
        data=data,
        figure_notes=drawn_notes,
        headings=True,
        marks=marks,
        latex_notes=[*notes, *[MARKS_NOTE.format("Bold:", "underlined:")] * bool(marks), *missing],
    )  # fmt: skip


def joint_losses_figure(
    folder: Path, name: str, panels: Sequence[LossPanel], notes: Sequence[str]
) -> None:
    """Draw the worth of a rollout of each loss, in a panel per pool.

    Each data set has a line of panels or more; the file is `<folder>/<name>.{pdf,svg,png}`.

    Args:
        panels: panels with a measured loss each.
        notes: lines under the figure.
    """
    of_study = {Study(panel.study): panel for panel in panels}
    grid = panel_grid(of_study)
    names = list(dict.fromkeys(name for panel in panels for name in panel.measured))
    wide, high = max(map(len, grid)), len(grid)
    with plt.rc_context(FONTS):
        size = (max(6.4, 0.6 + 3.6 * wide), 1.2 + 3.6 * high)
        figure, axes = plt.subplots(high, wide, figsize=size, squeeze=False, layout="constrained")
        for line, studies in zip(axes, grid, strict=True):
            for one, study in zip(line, studies, strict=False):
                panel = of_study[study]
                worth_panel(one, panel.measured, names)
                rollouts = next(iter(panel.measured.values()))[0]["rollouts"]
                one.set_title(f"{panel_title(study)}\nn = {rollouts}", fontsize=8, loc="left")
            for one in line[len(studies) :]:
                one.set_visible(False)
            line[0].set_ylabel(f"worth of a rollout,\nin {AT_BEST}\n{studies[0].run.dataset}")
        worth_legend(figure, size[0])
        note(figure, notes, size[0])
        save(figure, folder, name)


def _without_a_line(panels: Sequence[LossPanel]) -> list[str]:
    """List, for each panel, the losses that have no line in it."""
    lines = []
    for panel in panels:
        absent = [name for name in panel.lines if not _known(panel.measured.get(name, []))]
        if absent:
            where = f"Not decided or not measured on {panel.study.policy}"
            lines.append(f"{where}: {enumeration(absent)}.")
    return shorten(lines, 3, "losses.csv")


def losses_answer(panels: Sequence[LossPanel]) -> str:
    """State the worth of a rollout at G = 8 or the nearest, from the least to the most.

    The sentence also gives the number of losses for which it is not decided.
    """
    decided, undecided, sizes = [], [], set()
    for panel in panels:
        for name, rows in panel.measured.items():
            row = nearest_usual(rows)
            sizes.add(row["group_size"])
            if _known([row]):
                where = f"{name} on {panel.study.policy}" if len(panels) > 1 else name
                decided.append((row_interval(row, "worth"), where))
            else:
                undecided.append(name)
    at = f"At G = {' or '.join(map(str, sorted(sizes)))}"
    if not decided:
        names = enumeration([*dict.fromkeys(undecided)], "or")
        return f"{at} it is not decided what a rollout of {names} is worth."
    ends = sorted(decided, key=lambda found: found[0].estimate)
    ends = [ends[0], ends[-1]] if len(ends) > 1 else ends
    values = " to ".join(f"{worth_text(value)} ({where})" for value, where in ends)
    text = f"{at} a rollout of a loss is worth {values} of an unbiased one"
    if undecided:
        text += f"; not decided: {len(undecided)} of {len(undecided) + len(decided)}"
    return f"{text}."


def _known(rows: Sequence[dict[str, Any]]) -> bool:
    """Return True if any of the rows has a worth."""
    return any(math.isfinite(row_interval(row, "worth").estimate) for row in rows)
