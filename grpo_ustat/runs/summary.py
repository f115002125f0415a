"""Tables: CSV files and the console."""

from __future__ import annotations

import csv
import io
from typing import Any

from rich.markup import escape
from rich.table import Table

from grpo_ustat.estimators.baselines import BASELINES
from grpo_ustat.runs.folder import RunFolder


def write_csv(folder: RunFolder, name: str, rows: list[dict[str, Any]]) -> None:
    """Write rows of equal keys; None becomes an empty field."""
    folder.write(name, csv_text(rows))


def csv_text(rows: list[dict[str, Any]]) -> str:
    """Rows of equal keys; None becomes an empty field."""
    text = io.StringIO()
    writer = csv.DictWriter(text, fieldnames=list(rows[0]), lineterminator="\n")
    writer.writeheader()
    writer.writerows(rows)
    return text.getvalue()


COLUMNS = 4  # baselines side by side on a terminal of 80 characters


def mse_tables(result: dict[str, Any]) -> list[Table]:
    """One table per method, target and setting: a row per group size, a column per baseline."""
    keys = ("method", "target", "setting", "num_prompts")
    kinds = dict.fromkeys(tuple(row[k] for k in keys) for row in result["curves"])
    tables = []
    for kind in kinds:
        rows = [row for row in result["curves"] if tuple(row[k] for k in keys) == kind]
        names = list(dict.fromkeys(row["baseline"] for row in rows))
        for first in range(0, len(names), COLUMNS):
            shown = names[first : first + COLUMNS]
            tables.append(_mse_table(result, [r for r in rows if r["baseline"] in shown]))
    return tables


def _mse_table(result: dict[str, Any], rows: list[dict[str, Any]]) -> Table:
    policy, first = result["policy"], rows[0]
    given = {"completions": "given the questions", "questions": "over questions"}
    title = (
        f"MSE of the gradient, {_setting(first, result['questions'])} ({first['method']})\n"
        f"against the {first['target']}\n"
        f"policy {policy['name']}, accuracy {policy['accuracy']:.3f} "
        f"[{policy['accuracy_low']:.3f}, {policy['accuracy_high']:.3f}] over questions"
    )
    source = f"{result['pool_completions']} completions a question"
    if first["replicates"] is not None:
        source = f"{min(row['replicates'] for row in rows)} replicates at least, from {source}"
        if first["method"] == "monte_carlo":
            source = f"replicates of the largest G: {min(row['replicates'] for row in rows)}"
    table = Table(
        title=escape(title), caption=f"95 % intervals {given[first['interval']]}; {source}"
    )
    table.min_width = 64
    table.add_column("G", justify="right")
    names = list(dict.fromkeys(row["baseline"] for row in rows))
    for name in names:
        label = name if BASELINES[name].unbiased else f"{name} (biased)"
        table.add_column(label, justify="right")
    cells = {(row["group_size"], row["baseline"]): mse_cell(row) for row in rows}
    for size in sorted({row["group_size"] for row in rows}):
        table.add_row(str(size), *(cells.get((size, name), "-") for name in names))
    return table


def _setting(row: dict[str, Any], questions: int) -> str:
    count = row["num_prompts"]
    return {
        "all_questions_once": f"averaged over {questions} questions",
        "with_replacement": f"B = {count} of {questions} questions with replacement",
        "without_replacement": f"B = {count} of {questions} questions without replacement",
        "one_question": f"of one question, mean over {questions}",
    }[row["setting"]]


def mse_cell(row: dict[str, Any]) -> str:
    """An error with its interval below it."""
    if row["mse"] is None:
        return "-"
    if row["low"] is None or row["high"] is None:
        return f"{_short(row['mse'])}\n(no interval)"
    return f"{_short(row['mse'])}\n[{_short(row['low'])}, {_short(row['high'])}]"


def clipped_warning(of: str, clipped_ratio: float, max_completion_length: int) -> str:
    """A sentence where many completions `of` something were cut: they rarely hold an answer."""
    if clipped_ratio <= 0.05:
        return ""
    return (
        f" WARNING: {clipped_ratio:.0%} of the {of} completions were cut at max_completion_length="
        f"{max_completion_length}: raise it, unless that is the point."
    )


def unjudged_warning(timeouts: int, failures: int, rollouts: int) -> str:
    """A sentence where answers could not be judged: they earned nothing, right or wrong."""
    if not timeouts + failures:
        return ""
    return (
        f" WARNING: {timeouts + failures} of {rollouts} answers could not be judged ({timeouts} "
        f"timed out, {failures} failed) and count as wrong."
    )


def _short(value: float) -> str:
    """Three significant digits, trailing zeros kept."""
    return f"{value:#.3g}".removesuffix(".")


def train_table(result: dict[str, Any]) -> Table:
    """Held-out accuracy by step and decoding, with the largest k's pass@k where there is one."""
    first = result["evals"][0]
    solved = [key for key in first if key.startswith("pass@") and key[5:].isdigit()][-1:]
    table = Table(
        title=f"Held-out accuracy of {result['run']}",
        caption=f"{first['n']} questions; 95 % intervals over questions; cut: at "
        "max_completion_length; no answer: none found",
    )
    columns = ("step", "decoding", "accuracy", "95 % interval", *solved, "cut", "no answer")
    for column in columns:
        table.add_column(column, justify="right")
    for row in result["evals"]:
        interval = f"[{row['low']:.3f}, {row['high']:.3f}]"
        extra = ["-" if row[key] is None else f"{row[key]:.3f}" for key in solved]
        shares = [f"{row[key]:.1%}" for key in ("clipped_ratio", "extraction_failure_ratio")]
        accuracy = f"{row['accuracy']:.3f}"
        table.add_row(str(row["step"]), row["decoding"], accuracy, interval, *extra, *shares)
    return table
