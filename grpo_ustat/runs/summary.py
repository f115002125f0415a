"""Tables: CSV files and the console."""

from __future__ import annotations

import csv
import io
from typing import Any

from rich.table import Table

from grpo_ustat.runs.folder import RunFolder


def write_csv(folder: RunFolder, name: str, rows: list[dict[str, Any]]) -> None:
    """Write rows of equal keys; None becomes an empty field."""
    text = io.StringIO()
    writer = csv.DictWriter(text, fieldnames=list(rows[0]), lineterminator="\n")
    writer.writeheader()
    writer.writerows(rows)
    folder.write(name, text.getvalue())


def mse_table(result: dict[str, Any]) -> Table:
    """One row per method and baseline, one column per group size, interval in brackets."""
    policy = result["policy"]
    sizes = sorted({row["group_size"] for row in result["curves"]})
    interval = result["curves"][0]["interval"]
    given = "given the questions" if interval == "completions" else "over questions"
    title = (
        f"MSE of the gradient averaged over {result['questions']} questions, policy "
        f"{policy['name']}, accuracy {policy['accuracy']:.3f} "
        f"[{policy['accuracy_low']:.3f}, {policy['accuracy_high']:.3f}]"
    )
    caption = f"95 % intervals {given}; {result['pool_completions']} completions a question"
    table = Table(title=title, caption=caption)
    table.add_column("method")
    table.add_column("baseline")
    for size in sizes:
        table.add_column(f"G={size}", justify="right")
    for method, name in dict.fromkeys((r["method"], r["baseline"]) for r in result["curves"]):
        cells = [
            f"{row['mse']:.4g}\n[{row['low']:.4g}, {row['high']:.4g}]"
            for row in result["curves"]
            if (row["method"], row["baseline"]) == (method, name)
        ]
        table.add_row(method, name + (" (biased)" if name == "group_mean" else ""), *cells)
    return table


def train_table(result: dict[str, Any]) -> Table:
    """Held-out accuracy by step."""
    table = Table(title=f"Held-out accuracy of {result['run']}")
    for column in ("step", "accuracy", "95 % interval", "questions"):
        table.add_column(column, justify="right")
    for row in result["evals"]:
        interval = f"[{row['low']:.3f}, {row['high']:.3f}]"
        table.add_row(str(row["step"]), f"{row['accuracy']:.3f}", interval, str(row["n"]))
    return table
