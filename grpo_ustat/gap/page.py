"""Page that shows the claims and verdicts of a theorem's test."""

from __future__ import annotations

from grpo_ustat.pages.claims import (
    CLAIM_COLUMNS,
    FAMILY_RULE,
    TITLES,
    VERDICT_WORDS,
    claim_cells,
)
from grpo_ustat.pages.run_page import PREDICTED_CAPTION, RunView
from grpo_ustat.pages.tables import Cell, Table, number_text, rows_table
from grpo_ustat.runs.record import RunRecord


def title(run: RunRecord) -> str:
    """Return a title that names the theorem, the test problem and the seed."""
    kind, problem = str(run.value("theorem.kind")), run.value("theorem.problem")
    return f"{TITLES.get(kind, kind)}, on {problem}, seed {run.value('seed')}"


def answer(run: RunRecord) -> str:
    """Return the overall verdict and the answer."""
    if run.result is None:
        return "Unfinished: there are no results yet."
    return f"{VERDICT_WORDS[run.result['verdict']]} {run.result['answer']}"


def facts(run: RunRecord) -> list[tuple[str, Cell]]:
    """Return the facts that the page lists: the test problem and the number of completions."""
    if run.result is None:
        return []
    problem = "\n".join(
        f"{name}: {number_text(value)}" for name, value in run.result["problem"].items()
    )
    rollouts = run.result["cost"]["rollouts"]
    return [
        ("Test problem", problem),
        (
            "Completions drawn",
            f"{rollouts:,}".replace(",", " ")
            if rollouts
            else "none (all outcomes were enumerated)",
        ),
    ]


def tables(run: RunRecord) -> list[Table]:
    """Return the table of claims and the table of curves.csv."""
    if run.result is None:
        return []
    columns = [*CLAIM_COLUMNS, "decision rule"]
    rows = [[*claim_cells(claim), claim["how"]] for claim in run.result["claims"]]
    tables = [Table("Predicted and measured", columns, rows, [FAMILY_RULE])]
    numbers = run.csv_rows("curves.csv")
    if numbers:
        tables.append(rows_table("Numbers", numbers))
    return tables


def notes(run: RunRecord) -> list[str]:
    """Return the theorem's statement."""
    return [run.result["statement"]] if run.result else []


VIEW = RunView(
    title=title, answer=answer, facts=facts, tables=tables, notes=notes,
    figures={"figure": (PREDICTED_CAPTION, "Numbers:", "curves.csv")},
)  # fmt: skip
