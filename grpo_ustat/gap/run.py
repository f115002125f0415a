"""The command `gap`, which tests a theorem, writes the run folder and prints the claims."""

from __future__ import annotations

import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from rich.box import SIMPLE
from rich.table import Table

from grpo_ustat.config.gap import GapConfig
from grpo_ustat.costs.duration import finished_runs, time_text
from grpo_ustat.distributed.ranks import is_main, main_only
from grpo_ustat.distributed.signals import Stopped
from grpo_ustat.gap.evidence import theorem
from grpo_ustat.gap.page import VIEW
from grpo_ustat.pages.claims import CLAIM_COLUMNS, TITLES, claim_cells
from grpo_ustat.pages.run_page import leave_page
from grpo_ustat.pages.tables import write_csv
from grpo_ustat.runs.contents import content_of
from grpo_ustat.runs.folder import RunFolder, versions
from grpo_ustat.runs.record import verdict_counts
from grpo_ustat.runs.result import AGREES, TheoremCost, TheoremResult
from grpo_ustat.runs.status import PlannedRun
from grpo_ustat.terminal.console import Console

# Smallest terminal width, in columns, at which the table of claims shows its severity column.
SEVERITY_COLUMNS = 120


def run(config: GapConfig, folder: RunFolder) -> float | None:
    """Test the theorem, or load the result if the folder already has one, and print the result.

    Returns:
        Number of claims whose verdict is not `agrees`.
    """
    console = Console(quiet=not is_main())
    result = main_only(folder.result)
    if result is None:
        theorem(config.theorem.kind).check(config.experiment)
        with folder.lock():
            # Another process may have finished the run before this process got the lock.
            result = main_only(folder.result) or run_theorem(config, folder)
    else:
        text = f"{folder.path} is complete; on_existing=overwrite runs it again."
        console.print(text, soft_wrap=True)
    console.print(claims_table(result, console.width))
    if console.width < SEVERITY_COLUMNS and any(
        claim.get("severity") for claim in result["claims"]
    ):
        console.print(
            "- For each claim, report.html lists other predictions that would also have agreed."
        )
    for note in result["notes"]:
        console.print(f"- {note}")
    console.print(result["answer"])
    console.print(f"page: {folder.path / 'report.html'}", soft_wrap=True)
    return float(sum(claim["verdict"] != AGREES for claim in result["claims"]))


def run_theorem(config: GapConfig, folder: RunFolder) -> dict[str, Any]:
    """Test the theorem and write curves.csv, the figure, report.html and result.json.

    Returns:
        Content of result.json.
    """
    main_only(folder.open)
    start, record = time.perf_counter(), theorem(config.theorem.kind)
    try:
        evidence = record.run(config.experiment)
    except Stopped:
        if is_main():
            leave_page(folder, VIEW)
        raise
    seconds = time.perf_counter() - start
    counts = verdict_counts([claim.verdict for claim in evidence.claims])
    words = ", ".join(f"{count} {name}" for name, count in counts.items() if count)
    result = TheoremResult(
        theorem=config.theorem.kind,
        statement=record.statement,
        problem=evidence.problem,
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
    # Rows can have different columns. A missing value becomes None.
    rows = [{key: row.get(key) for key in columns} for row in evidence.rows]
    write_csv(folder, "curves.csv", rows)
    if is_main():
        from grpo_ustat.gap.figures import evidence_figure

        evidence_figure(folder.path, evidence, record.title)
        leave_page(folder, VIEW, content)
    folder.finish(result)
    return content


def claims_table(result: dict[str, Any], width: int) -> Table:
    """Return the table of predictions and measurements, without its empty columns.

    The severity column contains whole sentences. It is shown only if the terminal is wide enough
    (`SEVERITY_COLUMNS`).
    """
    table = Table(title=TITLES[result["theorem"]], caption=result["statement"])
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
    """Print one line per run and the total time."""
    table = Table(box=SIMPLE, pad_edge=False)
    for name in ("theorem", "problem", "replicates", "steps", "completions", "time"):
        side = "left" if name in ("theorem", "problem") else "right"
        table.add_column(name, justify=side, no_wrap=name in ("completions", "time"))
    times = []
    for planned in runs:
        config = planned.config
        completions = theorem(config.theorem.kind).completions(config.experiment)
        times.append(earlier_seconds(planned, completions))
        sizes = [
            _size_text(getattr(config.theorem, name, None)) for name in ("replicates", "steps")
        ]
        millions = f"{completions / 1e6:,.1f} M" if completions else "-"
        cells = [config.theorem.kind, config.problem.name, *sizes, millions, time_text(times[-1])]
        table.add_row(*cells)
    estimates = [seconds for seconds in times if seconds is not None]
    if len(runs) > 1:
        table.add_section()
        seconds = sum(estimates) if len(estimates) == len(times) else None
        table.add_row("one after the other", *[""] * 4, time_text(seconds))
    console = Console()
    console.print(table)
    notes = []
    if estimates:
        notes.append(
            "Times are estimated from the newest finished run on this machine with the same "
            "theorem, problem and launch.workers."
        )
    if len(estimates) < len(times):
        notes.append(
            "A time is unknown until a run with the same theorem, problem and launch.workers has "
            "finished on this machine."
        )
    console.print(*notes, "Each run folder takes less than 10 MB.")


def earlier_seconds(planned: PlannedRun, completions: int) -> float | None:
    """Return the expected duration of a planned run in seconds, estimated from an earlier run.

    The earlier run is the newest finished run on this machine with the same theorem, problem and
    number of workers. Its duration is scaled in proportion to the number of completions. If one of
    the two runs draws no completions, the duration is returned unchanged.

    Args:
        planned: run whose duration is estimated.
        completions: number of completions that the planned run will draw.

    Returns:
        Duration in seconds, or None if there is no earlier run.
    """
    config, folder = planned.config, planned.folder
    same = {
        "theorem.kind": config.theorem.kind,
        "problem.name": config.problem.name,
        "launch.workers": config.launch.workers,
    }
    earlier = finished_runs("gap", same, Path(config.output_root) / "gap", folder and folder.path)
    for run in earlier:
        seconds, drawn = (run.final_result["cost"][key] for key in ("seconds", "rollouts"))
        return seconds * completions / drawn if completions and drawn else seconds
    return None


def _size_text(value: int | list[int] | None) -> str:
    if isinstance(value, list):
        return ",".join(map(str, value))
    return "-" if value is None else f"{value:,}".replace(",", " ")
