"""A study of a theorem from configuration to `result.json`, table, figure and page."""

from __future__ import annotations

import time
from typing import Any

from rich.console import Console
from rich.markup import escape
from rich.table import Table

from grpo_ustat.gap_config import GapConfig
from grpo_ustat.ranks import is_main, on_main
from grpo_ustat.runs.folder import RunFolder, versions
from grpo_ustat.runs.gap_page import TITLES, interval_text, number_text
from grpo_ustat.runs.run_page import leave_page
from grpo_ustat.runs.summary import write_csv
from grpo_ustat.runs.verdicts import AGREES, verdict_counts
from grpo_ustat.signals import Stopped
from grpo_ustat.theorems.finding import Finding
from grpo_ustat.theorems.studies import check_asked, study


def run(config: GapConfig, folder: RunFolder) -> float | None:
    """Run the study, or show the one that the folder already holds.

    Returns:
        How many of its predictions do not agree with what is measured.
    """
    console = Console(quiet=not is_main(), highlight=False)
    result = on_main(folder.result)
    if result is None:
        check_asked(config)
        with folder.held():  # which another process may have finished just now
            result = on_main(folder.result) or _made(config, folder)
    else:
        text = f"{folder.path} is complete; on_existing=overwrite runs it again."
        console.print(text, soft_wrap=True, markup=False)
    console.print(claims_table(result))
    for note in result["notes"]:
        console.print(f"- {note}", markup=False)
    console.print(result["answer"], markup=False)
    console.print(f"Wrote {folder.path}", soft_wrap=True, markup=False)
    return float(sum(claim["verdict"] != AGREES for claim in result["claims"]))


def _made(config: GapConfig, folder: RunFolder) -> dict[str, Any]:
    on_main(folder.open)
    start = time.perf_counter()
    try:
        finding = study(config)
    except Stopped:
        if is_main():
            leave_page(folder)
        raise
    result = _result(config, finding, time.perf_counter() - start)
    write_csv(folder, "curves.csv", _even(finding))
    if is_main():
        from grpo_ustat.theorems.figures import finding_figure

        finding_figure(folder.path, finding, TITLES[config.study.kind])
        leave_page(folder, result)
    folder.finish(result)
    return result


def _result(config: GapConfig, finding: Finding, seconds: float) -> dict[str, Any]:
    found = {"study": config.study.kind} | finding.result()
    found["cost"] |= {"seconds": seconds}
    counts = verdict_counts(found["claims"])
    words = ", ".join(f"{count} {name}" for name, count in counts.items() if count)
    found |= {"summary": f"{TITLES[config.study.kind]}: {words}. {finding.answer}"}
    return found | {"versions": versions()}


def _even(finding: Finding) -> list[dict[str, Any]]:
    """Rows with all keys, those that a row lacks empty."""
    keys = dict.fromkeys(key for row in finding.rows for key in row)
    return [{key: row.get(key) for key in keys} for row in finding.rows]


def claims_table(result: dict[str, Any]) -> Table:
    """Predictions beside measurements."""
    table = Table(title=TITLES[result["study"]], caption=result["statement"])
    table.add_column("claim")
    for name in ("predicted", "measured", "95 % interval"):
        table.add_column(name, justify="right")
    table.add_column("verdict", no_wrap=True)
    for claim in result["claims"]:
        numbers = number_text(claim["predicted"]), number_text(claim["measured"])
        cells = claim["what"], *numbers, interval_text(claim), claim["verdict"]
        table.add_row(*map(escape, cells))
    return table
