"""One run of `gap`: the study that a configuration names, its folder, table and costs."""

from __future__ import annotations

import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from rich.box import SIMPLE
from rich.table import Table

from grpo_ustat.config.gap import GapConfig
from grpo_ustat.costs.duration import (
    OTHER_SHAPE_FACTOR,
    SAME_SHAPE_FACTOR,
    Span,
    newest_folders,
    span_text,
    started_here,
)
from grpo_ustat.distributed.ranks import is_main, main_only
from grpo_ustat.distributed.signals import Stopped
from grpo_ustat.gap.evidence import theorem
from grpo_ustat.pages.run_page import leave_page
from grpo_ustat.pages.study_page import CLAIM_COLUMNS, TITLES, claim_cells
from grpo_ustat.pages.tables import write_csv
from grpo_ustat.runs.contents import content_of, is_number
from grpo_ustat.runs.folder import RunFolder, versions
from grpo_ustat.runs.record import RunRecord, verdict_counts
from grpo_ustat.runs.result import AGREES, TheoremCost, TheoremResult
from grpo_ustat.runs.status import PlannedRun
from grpo_ustat.terminal.console import Console

# completions a second and worker, beds of 2 to 5 outcomes, groups of 2 to 32
RATE = Span(1.5e6, 2e7)
ENUMERATED = Span(1.0, 60.0)  # seconds of a study that draws next to nothing

# keys of studies by which an earlier one tells the time of a planned one
SHARED_KEYS = (("study", "kind"), ("bed", "name"), ("launch", "workers"))
SAME_SIZE_TOLERANCE = 0.05  # relative difference in completions of studies of one size

SEVERITY_COLUMNS = 120  # columns of a terminal from which on severities are shown


def run(config: GapConfig, folder: RunFolder) -> float | None:
    """Run the study, or show the one that the folder already holds.

    Returns:
        How many of its predictions do not agree with what is measured.
    """
    console = Console(quiet=not is_main())
    result = main_only(folder.result)
    if result is None:
        theorem(config.study.kind).check(config.experiment)
        with folder.lock():  # which another process may have finished just now
            result = main_only(folder.result) or run_study(config, folder)
    else:
        text = f"{folder.path} is complete; on_existing=overwrite runs it again."
        console.print(text, soft_wrap=True)
    console.print(claims_table(result, console.width))
    if console.width < SEVERITY_COLUMNS and any(
        claim.get("severity") for claim in result["claims"]
    ):
        console.print("- which alternatives would also have agreed: see report.html")
    for note in result["notes"]:
        console.print(f"- {note}")
    console.print(result["answer"])
    console.print(f"Wrote {folder.path}", soft_wrap=True)
    return float(sum(claim["verdict"] != AGREES for claim in result["claims"]))


def run_study(config: GapConfig, folder: RunFolder) -> dict[str, Any]:
    """Run the study and write its folder: curves.csv, figure, report.html and result.json.

    Returns:
        What result.json holds.
    """
    main_only(folder.open)
    start, record = time.perf_counter(), theorem(config.study.kind)
    try:
        evidence = record.study(config.experiment)
    except Stopped:
        if is_main():
            leave_page(folder)
        raise
    seconds = time.perf_counter() - start
    counts = verdict_counts([claim.verdict for claim in evidence.claims])
    words = ", ".join(f"{count} {name}" for name, count in counts.items() if count)
    result = TheoremResult(
        study=config.study.kind,
        statement=record.statement,
        bed=evidence.bed,
        claims=list(evidence.claims),
        answer=evidence.answer,
        notes=list(evidence.notes),
        verdict=evidence.verdict,
        cost=TheoremCost(rollouts=evidence.rollouts, seconds=seconds),
        summary=f"{record.title}: {words}. {evidence.answer}",
        versions=versions(),
    )
    content = content_of(result)
    columns = dict.fromkeys(key for row in evidence.rows for key in row)
    rows = [{key: row.get(key) for key in columns} for row in evidence.rows]  # None: it lacks it
    write_csv(folder, "curves.csv", rows)
    if is_main():
        from grpo_ustat.gap.figures import evidence_figure

        evidence_figure(folder.path, evidence, record.title)
        leave_page(folder, content)
    folder.finish(result)
    return content


def claims_table(result: dict[str, Any], width: int) -> Table:
    """Predictions beside measurements, without columns that are empty; severities where there is
    room for sentences, at 120 columns and more.
    """
    table = Table(title=TITLES[result["study"]], caption=result["statement"])
    rows = [claim_cells(claim) for claim in result["claims"]]
    columns = {name: [row[i] for row in rows] for i, name in enumerate(CLAIM_COLUMNS)}
    columns = {name: cells for name, cells in columns.items() if any(cells)}
    if width < SEVERITY_COLUMNS:
        columns.pop("severity", None)
    for name in columns:
        words = name in ("claim", "verdict", "severity")
        table.add_column(name, justify="left" if words else "right", no_wrap=name == "verdict")
    for cells in zip(*columns.values(), strict=True):
        table.add_row(*cells)
    return table


def show_plan(runs: Sequence[PlannedRun]) -> None:
    """Print a line for each run, and their total."""
    table = Table(box=SIMPLE, pad_edge=False)
    for name in ("study", "bed", "replicates", "steps", "completions", "time"):
        side = "left" if name in ("study", "bed") else "right"
        table.add_column(name, justify=side, no_wrap=name in ("completions", "time"))
    spans, measured = [], []
    for planned in runs:
        config = planned.config
        completions = theorem(config.study.kind).completions(config.experiment)
        earlier = earlier_seconds(planned, completions)
        measured.append(earlier is not None)
        spans.append(earlier or assumed_seconds(completions, config.launch.workers))
        sizes = [_size_text(getattr(config.study, name, None)) for name in ("replicates", "steps")]
        millions = f"{completions / 1e6:,.1f} M" if completions else "-"
        cells = [config.study.kind, config.bed.name, *sizes, millions, span_text(spans[-1])]
        table.add_row(*cells)
    if len(runs) > 1:
        table.add_section()
        table.add_row("one after the other", *[""] * 4, span_text(sum(spans[1:], spans[0])))
    console = Console()
    console.print(table)
    notes = []
    if any(measured):
        notes.append(
            f"Time: measured, earlier studies of this kind and bed here, {SAME_SHAPE_FACTOR:g} "
            f"times either way, {OTHER_SHAPE_FACTOR:g} where sizes differ; on a machine as busy "
            "as then."
        )
    if not all(measured):
        workers = runs[0].config.launch.workers
        notes.append(
            f"Time{' of others' if any(measured) else ''}: a guess, {RATE.low / 1e6:g} to "
            f"{RATE.high / 1e6:g} million completions a second for each of {workers} workers on a "
            "core of its own; after one study of this kind and bed here, its time is used."
        )
    console.print(*notes, "Folders hold less than 10 MB each.")


def earlier_seconds(planned: PlannedRun, completions: int) -> Span | None:
    """Seconds of a study by what earlier ones of the same kind, bed and workers took on this
    machine, in proportion to the completions; None where there is none.
    """
    config, own = planned.config, planned.folder
    usual_place = Path(config.output_root) / "gap"
    of_this_size: list[Span] = []
    of_others: list[Span] = []
    for folder in newest_folders(usual_place, own and own.path):
        run = RunRecord(folder)
        groups = [(run.config.get(key), name) for key, name in SHARED_KEYS]
        names = [group.get(name) for group, name in groups if isinstance(group, dict)]
        cost = (run.result or {}).get("cost") or {}
        same = names == [config.study.kind, config.bed.name, config.launch.workers]
        numbers = all(is_number(cost.get(key)) for key in ("seconds", "rollouts"))
        if not same or not numbers or not started_here(run.launches):
            continue
        seconds, drawn = float(cost["seconds"]), float(cost["rollouts"])
        ratio = completions / drawn if completions and drawn > 0 else 1.0
        if abs(ratio - 1) < SAME_SIZE_TOLERANCE:
            of_this_size.append(
                Span(seconds * ratio / SAME_SHAPE_FACTOR, seconds * ratio * SAME_SHAPE_FACTOR)
            )
        else:
            of_others.append(
                Span(seconds * ratio / OTHER_SHAPE_FACTOR, seconds * ratio * OTHER_SHAPE_FACTOR)
            )
    spans = of_this_size or of_others
    if not spans:
        return None
    return Span(min(span.low for span in spans), max(span.high for span in spans))


def assumed_seconds(completions: int, workers: int) -> Span:
    """Seconds that a study of so many completions takes, from the least to the most."""
    if not completions:
        return ENUMERATED
    least, most = (completions / rate / workers for rate in (RATE.high, RATE.low))
    return Span(least, most)


def _size_text(value: int | list[int] | None) -> str:
    if isinstance(value, list):
        return ",".join(map(str, value))
    return "-" if value is None else f"{value:,}".replace(",", " ")
