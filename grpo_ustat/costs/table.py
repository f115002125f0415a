"""Tables for `dry_run=true`, which prints the planned runs and their costs.

Nothing is loaded or written.
"""

from __future__ import annotations

import textwrap
from collections.abc import Mapping, Sequence

from rich.box import SIMPLE
from rich.filesize import decimal
from rich.table import Table

from grpo_ustat.costs.cost import Cost, Plan, total
from grpo_ustat.terminal.console import Console

# Largest number of different batches that are described.
MAX_BATCHES = 6


def show_costs(plans: Sequence[Plan]) -> None:
    """Print the settings that all runs share, and a table with one row per run."""
    console, rows = Console(), [settings_in_words(plan.settings) for plan in plans]
    shared = {k: v for k, v in rows[0].items() if all(row.get(k) == v for row in rows)}
    labels = [
        ", ".join(f"{key} {value}" for key, value in row.items() if key not in shared)
        for row in rows
    ]
    # A no-break space keeps a name and its value on one line.
    text = ", ".join(f"{key}\xa0{value}" for key, value in shared.items())
    lines = textwrap.wrap(text, console.width, break_long_words=False, break_on_hyphens=False)
    console.print("\n".join(lines).replace("\xa0", " "))
    batches = list(dict.fromkeys(plan.batch for plan in plans if plan.batch))
    more = [f"and {len(batches) - MAX_BATCHES} other batches"] * (len(batches) > MAX_BATCHES)
    for line in batches[:MAX_BATCHES] + more:
        console.print(line)
    console.print(cost_table(labels, [plan.cost for plan in plans]))
    for note in cost_notes(plans):
        console.print(note)


def settings_in_words(settings: Mapping[str, object]) -> dict[str, str]:
    """Return the settings that are not None, with values as they are typed on a command line."""
    texts = {}
    for key, value in settings.items():
        if isinstance(value, bool):
            texts[key] = str(value).lower()
        elif value is not None:
            texts[key] = ",".join(map(str, value)) if isinstance(value, list) else str(value)
    return texts


def cost_table(labels: Sequence[str], costs: list[Cost]) -> Table:
    """Return a table of costs, with one row per run and a row of totals."""
    runs = len(costs)
    table = Table(title=f"{runs} run{'s' * (runs > 1)}", box=SIMPLE, pad_edge=False)
    table.add_column("")
    cells = [
        {
            "rollouts": _count(cost.rollouts),
            "values": _count(cost.values),
            "tests": _count(cost.evaluation),
            "tokens <=": f"{cost.tokens / 1e6:,.1f} M".replace(",", " "),
            "memory >=": _bytes(cost.memory),
            "disk <=": _bytes(cost.disk),
        }
        for cost in (*costs, total(costs))
    ]
    columns = [key for key, cell in cells[-1].items() if cell != "0"]
    for column in columns:
        table.add_column(column, justify="right", no_wrap=True)
    for label, row in zip(labels, cells, strict=False):
        table.add_row(label, *(row[key] for key in columns))
    if runs > 1:
        table.add_section()
        table.add_row("all", *(cells[-1][key] for key in columns))
    return table


def cost_notes(plans: Sequence[Plan]) -> list[str]:
    """Return notes that explain the columns, the memory of the largest run, and what is missing."""
    largest = max(plans, key=lambda plan: plan.cost.memory or 0)
    cost = largest.cost
    notes = ["Prompt tokens are not counted, because counting them needs a tokenizer."]
    if any(plan.cost.values for plan in plans):
        notes.append("`values` is the number of completions that only serve to compute baselines.")
    if any(plan.cost.evaluation != 0 for plan in plans):
        notes.append("`tests` is the number of completions of test questions.")
    if cost.memory is None:
        notes.append(
            "Memory and disk space are unknown. To compute them, set model.size.parameters, "
            "model.size.layers and model.size.kv_width."
        )
    else:
        notes.append(
            f"Memory of the largest run: weights {_bytes(cost.weights)}, gradients and optimizer "
            f"{_bytes(cost.training)}, keys and values {_bytes(cost.cache)}. Activations, which "
            "are not counted, need more. To measure them, run a few steps or questions."
        )
    if any(plan.cost.evaluation is None for plan in plans):
        notes.append(
            "The number of test questions is unknown, because dataset.test_size=null uses all of "
            "them. Their tokens are not counted. To count them, set dataset.test_size."
        )
    return [*notes, *largest.notes]


def _bytes(number: int | None) -> str:
    return "unknown" if number is None else decimal(number)


def _count(number: int | None) -> str:
    return "unknown" if number is None else f"{number:,}".replace(",", " ")
