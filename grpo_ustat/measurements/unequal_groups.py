"""Change of the error by unequal group sizes at the same number of rollouts."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from grpo_ustat.estimators.allocation import AllocationSaving, allocation_savings
from grpo_ustat.estimators.group_size import USUAL_SIZE
from grpo_ustat.measurements.base import Measurement, PoolStudy, Study, table_of_studies
from grpo_ustat.pages.tables import Table
from grpo_ustat.terminal.streams import percent

# Smallest relative reduction of the error that counts as helpful.
HELPFUL_SAVING = 0.05
NOTE = (
    "Numbers are changes of the error relative to equal groups with the same number of rollouts. "
    "Each plan is made from one half of the pool and evaluated on the other half, and then the "
    "halves are swapped. Every prompt gets at least 2 completions. Brackets contain 95 % intervals "
    'for new prompts, which hold simultaneously for the plans in a column. The row "best sizes, in '
    'sample" uses the same estimates for planning and evaluation, so a real plan saves less.'
)


def measure(study: PoolStudy) -> list[AllocationSaving] | None:
    """Compute each plan's change of the error; None if the study does not test published claims."""
    return allocation_savings(study.pool) if "verdicts" in study.asked else None


def sentences(rows: list[AllocationSaving], study: Study) -> list[str]:
    """Return a sentence on the best plan at a mean G of 8; no sentence if the pool is too small."""
    of_size = [row for row in rows if row.group_size == USUAL_SIZE and row.change.is_known]
    if not of_size:
        return []
    best = min(of_size, key=lambda row: row.change.estimate)
    change, low, high = map(percent, best.change)
    if best.change.high < 0:
        return [
            f"Unequal group sizes help: with the plan {best.plan}, the error changes by {change} "
            f"[{low}, {high}]."
        ]
    finding = "Unequal group sizes do not help"
    if best.change.low <= -HELPFUL_SAVING:
        finding = "The data do not show that unequal group sizes help"
    return [f"{finding}: with the best plan, the error changes by {change} [{low}, {high}]."]


def tables(rows_by_study: Mapping[Study, list[AllocationSaving]]) -> list[Table]:
    """Return a table with a row per plan and a column per mean G."""
    sizes = sorted({row.group_size for rows in rows_by_study.values() for row in rows})
    columns = ["plan", *(f"mean G = {size}" for size in sizes)]
    cells = {study: _rows(rows, sizes) for study, rows in rows_by_study.items() if rows}
    return [table_of_studies("Unequal group sizes", columns, cells, [NOTE])] if cells else []


def _rows(rows: Sequence[AllocationSaving], sizes: Sequence[int]) -> list[list[str]]:
    cells = []
    for plan in dict.fromkeys(row.plan for row in rows):
        of_plan = {row.group_size: row for row in rows if row.plan == plan}
        cells.append([plan, *(_change_text(of_plan.get(size)) for size in sizes)])
    in_sample = {row.group_size: row.in_sample for row in rows if row.in_sample is not None}
    if in_sample:
        changes = [percent(in_sample[size]) if size in in_sample else "-" for size in sizes]
        cells.append(["best sizes, in sample", *changes])
    return cells


def _change_text(row: AllocationSaving | None) -> str:
    """Format a change in percent with its interval; `-` if the change is unknown."""
    if row is None or not row.change.is_known:
        return "-"
    change, low, high = map(percent, row.change)
    return f"{change} [{low}, {high}]"


UNEQUAL_GROUPS = Measurement("allocation", list[AllocationSaving], measure, sentences, tables)
