"""What the page of a study of a theorem says: statement, bed, what agrees and what does not."""

from __future__ import annotations

from typing import Any

from grpo_ustat.runs.contents import Contents
from grpo_ustat.runs.page import Cell, Table
from grpo_ustat.runs.train_page import rows_table

MOST_ROWS = 200  # that a page holds
TITLES = {
    "lemma6": "Lemma 6, the gap under constant and falling learning rates",
    "theorem7": "Theorem 7, the best group size",
    "theorem8": "Theorem 8, the law of the gap",
    "corollaries9_10": "Corollaries 9 and 10, GRPO, the oracle and other baselines",
    "lemma11": "Lemma 11, normalised advantages as a U-statistic",
    "theorem12": "Theorem 12, the error of Algorithm 2",
    "proposition13": "Proposition 13, what normalised advantages maximise",
    "best_group_size": "The scaling law in training",
}


def gap_title(run: Contents) -> str:
    """Which result, on which bed."""
    kind, bed = str(run.value("study.kind")), run.value("bed.name")
    on = "" if run.value("bed.kind") == "none" else f", on {bed}"
    return f"{TITLES.get(kind, kind)}{on}, seed {run.value('seed')}"


def gap_answer(run: Contents) -> str:
    """The verdict and what was found."""
    if run.result is None:
        return "Unfinished: nothing is measured yet."
    return f"Theory and measurement: {run.result['verdict']}. {run.result['answer']}"


def gap_facts(run: Contents) -> list[tuple[str, Cell]]:
    """Bed and cost."""
    if run.result is None:
        return []
    bed = "\n".join(f"{name}: {_fact(value)}" for name, value in run.result["bed"].items())
    drawn = run.result["cost"]["rollouts"]
    return [
        ("Bed", bed),
        ("Completions drawn", f"{drawn:,}".replace(",", " ") if drawn else "0: enumerated"),
    ]


def gap_tables(run: Contents) -> list[Table]:
    """Predictions beside measurements."""
    if run.result is None:
        return []
    rows = [
        [
            claim["what"],
            number_text(claim["predicted"]),
            number_text(claim["measured"]),
            interval_text(claim),
            claim["verdict"],
            claim["how"],
        ]
        for claim in run.result["claims"]
    ]
    columns = ("claim", "predicted", "measured", "95 % interval", "verdict", "how it is decided")
    tables = [Table("Predicted and measured", columns, rows)]
    measured = run.rows("curves.csv")
    return tables + (
        [rows_table("Numbers", measured[:MOST_ROWS], _left(measured))] if measured else []
    )


def _left(rows: list[dict[str, Any]]) -> str:
    return (
        f"The first {MOST_ROWS} of {len(rows)}, all in curves.csv." if len(rows) > MOST_ROWS else ""
    )


def number_text(value: float | str) -> str:
    """As tables show it.

    >>> number_text(0.123456), number_text("<= 1"), number_text(-0.0)
    ('0.1235', '<= 1', '0')
    """
    return value if isinstance(value, str) else f"{value + 0.0:.4g}"


def interval_text(claim: dict[str, Any]) -> str:
    """Of a claim; exact where it was enumerated."""
    if claim["low"] is None or claim["high"] is None:
        return ""
    return f"[{number_text(claim['low'])}, {number_text(claim['high'])}]"


def _fact(value: float | str) -> str:
    return value if isinstance(value, str) else number_text(value)
