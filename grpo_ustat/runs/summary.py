"""Tables: CSV files and the console."""

from __future__ import annotations

import csv
import io
from typing import Any

from rich.table import Table

from grpo_ustat.estimators.baselines import BASELINES
from grpo_ustat.runs.folder import RunFolder


def write_csv(folder: RunFolder, name: str, rows: list[dict[str, Any]]) -> None:
    """Write rows of equal keys; None becomes an empty field."""
    text = io.StringIO()
    writer = csv.DictWriter(text, fieldnames=list(rows[0]), lineterminator="\n")
    writer.writeheader()
    writer.writerows(rows)
    folder.write(name, text.getvalue())


def mse_tables(result: dict[str, Any]) -> list[Table]:
    """One table per method: a row per group size, a column per baseline, intervals in brackets."""
    methods = dict.fromkeys(row["method"] for row in result["curves"])
    return [_mse_table(result, method) for method in methods]


def _mse_table(result: dict[str, Any], method: str) -> Table:
    policy = result["policy"]
    rows = [row for row in result["curves"] if row["method"] == method]
    given = {"completions": "given the questions", "questions": "over questions"}
    title = (
        f"MSE of the gradient averaged over {result['questions']} questions ({method})\n"
        f"policy {policy['name']}, accuracy {policy['accuracy']:.3f} "
        f"[{policy['accuracy_low']:.3f}, {policy['accuracy_high']:.3f}] over questions"
    )
    source = f"{result['pool_completions']} completions a question"
    if method == "monte_carlo":
        source = "replicates of the largest G: " + str(min(row["replicates"] for row in rows))
    table = Table(title=title, caption=f"95 % intervals {given[rows[0]['interval']]}; {source}")
    table.min_width = 64
    table.add_column("G", justify="right")
    for name in dict.fromkeys(row["baseline"] for row in rows):
        label = name if BASELINES[name].unbiased else f"{name} (biased)"
        table.add_column(label, justify="right")
    for size in sorted({row["group_size"] for row in rows}):
        cells = [
            f"{_short(row['mse'])}\n[{_short(row['low'])}, {_short(row['high'])}]"
            for row in rows
            if row["group_size"] == size
        ]
        table.add_row(str(size), *cells)
    return table


def clipped_warning(clipped_ratio: float, max_completion_length: int) -> str:
    """A sentence where many completions were cut: they rarely hold an answer."""
    if clipped_ratio <= 0.05:
        return ""
    return (
        f" WARNING: {clipped_ratio:.0%} of the completions were cut at max_completion_length="
        f"{max_completion_length}: raise it, unless that is the point."
    )


def _short(value: float) -> str:
    """Three significant digits, trailing zeros kept."""
    return f"{value:#.3g}".removesuffix(".")


def train_table(result: dict[str, Any]) -> Table:
    """Held-out accuracy by step."""
    table = Table(title=f"Held-out accuracy of {result['run']}")
    for column in ("step", "accuracy", "95 % interval", "questions"):
        table.add_column(column, justify="right")
    for row in result["evals"]:
        interval = f"[{row['low']:.3f}, {row['high']:.3f}]"
        table.add_row(str(row["step"]), f"{row['accuracy']:.3f}", interval, str(row["n"]))
    return table
