"""The command `gap`, which tests a theorem, writes the run folder and prints the claims."""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import Any

from rich.table import Table

from grpo_ustat.config.gap import GapConfig
from grpo_ustat.distributed.ranks import is_main, main_only
from grpo_ustat.distributed.signals import Stopped
from grpo_ustat.gap.evidence import theorem
from grpo_ustat.gap.page import VIEW
from grpo_ustat.pages.claims import CLAIM_COLUMNS, TITLES, claim_cells
from grpo_ustat.pages.run_page import leave_page
from grpo_ustat.pages.tables import write_csv
from grpo_ustat.runs.contents import content_of
from grpo_ustat.runs.folder import RunFolder, versions
from grpo_ustat.runs.result import AGREES, TheoremCost, TheoremResult
from grpo_ustat.runs.status import PlannedRun
from grpo_ustat.terminal.console import Console
from grpo_ustat.terminal.streams import tell


def run(config: GapConfig, folder: RunFolder) -> float | None:
    """Test the theorem, or load the result if the folder already has one, and print the result.

    Returns:
        Number of claims whose verdict is not `agrees`.
    """
    console = Console(quiet=not is_main())
    result = main_only(folder.result)
    if result is None:
        theorem(config.theorem.kind).check(config.theorem)
        with folder.lock():
            # Another process may have finished the run before this process got the lock.
            result = main_only(folder.result) or run_theorem(config, folder)
    else:
        text = f"{folder.path} is complete; on_existing=overwrite runs it again."
        console.print(text, soft_wrap=True)
    console.print(claims_table(result))
    console.print(result["answer"])
    console.print(f"page: {folder.path / 'report.html'}", soft_wrap=True)
    return float(sum(claim["verdict"] != AGREES for claim in result["claims"]))


def run_theorem(config: GapConfig, folder: RunFolder) -> dict[str, Any]:
    """Test the theorem and write curves.csv, the figure, report.html and result.json.

    Returns:
        Content of result.json.
    """
    main_only(folder.open)
    kind, start = config.theorem.kind, time.perf_counter()
    record, title = theorem(kind), TITLES[kind]
    try:
        evidence = record.run(config)
    except Stopped:
        if is_main():
            leave_page(folder, VIEW)
        raise
    result = TheoremResult(
        theorem=kind,
        statement=record.statement,
        problem=evidence.problem,
        claims=list(evidence.claims),
        answer=evidence.answer,
        verdict=evidence.verdict,
        cost=TheoremCost(rollouts=evidence.rollouts, seconds=time.perf_counter() - start),
        summary=f"{title}: {evidence.answer}",
        versions=versions(),
    )
    content = content_of(result)
    write_csv(folder, "curves.csv", [dict(row) for row in evidence.rows])
    if is_main():
        from grpo_ustat.gap.figures import evidence_figure

        evidence_figure(folder.path, evidence, title)
        leave_page(folder, VIEW, content)
    folder.finish(result)
    return content


def claims_table(result: dict[str, Any]) -> Table:
    """Return the table of predictions and measurements, without its empty columns.

    The column severity contains whole sentences. Only the page shows it.
    """
    table = Table(title=TITLES[result["theorem"]], caption=result["statement"])
    rows = [claim_cells(claim) for claim in result["claims"]]
    columns = {name: [row[i] for row in rows] for i, name in enumerate(CLAIM_COLUMNS)}
    columns = {name: x for name, x in columns.items() if any(x) and name != "severity"}
    for name in columns:
        side = "left" if name in ("claim", "verdict") else "right"
        table.add_column(name, justify=side, no_wrap=name == "verdict")
    for cells in zip(*columns.values(), strict=True):
        table.add_row(*cells)
    return table


def show_plan(runs: Sequence[PlannedRun]) -> None:
    """Print the number of completions of each planned run."""
    for planned in runs:
        settings = planned.config.theorem
        completions = theorem(settings.kind).completions(settings)
        tell(f"{planned.config.plan}: {completions / 1e6:,.1f} M completions")
