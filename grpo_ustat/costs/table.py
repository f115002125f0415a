"""Tables for `dry_run=true`, which prints the planned runs and their costs.

Nothing is loaded or written.
"""

from __future__ import annotations

import textwrap
from collections import Counter
from collections.abc import Mapping, Sequence

from rich.box import SIMPLE
from rich.filesize import decimal
from rich.table import Table

from grpo_ustat.config.model import ModelConfig
from grpo_ustat.costs.cost import Cost, score_memory, sharded_memory, total
from grpo_ustat.costs.duration import (
    Duration,
    Plan,
    duration,
    number_text,
    one_after_the_other,
    time_text,
)
from grpo_ustat.terminal.console import Console

# Largest number of different batches that are described.
MAX_BATCHES = 6
# Number of processes for which the memory with FSDP2 is shown as an example.
EXAMPLE_PROCESSES = 8


def show_costs(plans: Sequence[Plan]) -> None:
    """Print the settings that all runs share, a table with one row per run, and the durations."""
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
    for line in batch_lines(plans):
        console.print(line)
    console.print(cost_table(labels, [plan.cost for plan in plans]))
    for note in cost_notes(plans):
        console.print(note)
    show_durations(labels, [duration(plan) for plan in plans], console)


def settings_in_words(settings: Mapping[str, object]) -> dict[str, str]:
    """Return the settings that are not None, with values as they are typed on a command line."""
    texts = {}
    for key, value in settings.items():
        if isinstance(value, bool):
            texts[key] = str(value).lower()
        elif value is not None:
            texts[key] = ",".join(map(str, value)) if isinstance(value, list) else str(value)
    return texts


def batch_lines(plans: Sequence[Plan]) -> list[str]:
    """Return a line for each different batch, which says how it is divided."""
    lines = list(dict.fromkeys(plan.batch for plan in plans if plan.batch))
    more = [f"and {len(lines) - MAX_BATCHES} other batches"] if len(lines) > MAX_BATCHES else []
    return lines[:MAX_BATCHES] + more


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
            "memory": _bytes(cost.memory),
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
    if any(plan.cost.values != 0 for plan in plans):
        notes.append("`values` is the number of completions that only serve to compute baselines.")
    if any(plan.cost.evaluation != 0 for plan in plans):
        notes.append("`tests` is the number of completions of test questions.")
    if cost.memory is None:
        notes.append(
            "Memory and disk space are unknown. To compute them, set model.size.parameters, "
            "model.size.layers and the other fields of model.size."
        )
    else:
        reference = f"reference {_bytes(cost.reference)}, " if cost.reference else ""
        program = f", the program {_bytes(cost.process)}" if cost.process else ""
        notes.append(
            f"Memory of the largest run: weights {_bytes(cost.weights)}, {reference}gradients and "
            f"optimizer {_bytes(cost.training)}, keys and values {_bytes(cost.cache)}, logits "
            f"{_bytes(cost.logits)}, activations of a backward pass {_bytes(cost.graph)}{program}. "
            "Keys and values are not in memory at the same time as these activations. Prompts are "
            "not counted."
        )
    notes += largest.notes
    if largest.device.startswith("cuda") and cost.memory is not None and cost.training:
        shards, gathered = sharded_memory(cost, EXAMPLE_PROCESSES)
        names = "weights and reference" if cost.reference else "weights"
        notes.append(
            f"With FSDP2 on {EXAMPLE_PROCESSES} processes, each process would need "
            f"{decimal(shards)} for its part of weights, gradients and optimizer, and during "
            f"sampling {decimal(gathered)} for the whole {names}."
        )

    sizes = {plan.published_tests for plan in plans}
    notes += [
        f"The number of test questions is taken to be the published {size}, because "
        "dataset.test_size=null."
        for size in sorted(size for size in sizes if size is not None)
    ]
    if any(plan.cost.evaluation is None for plan in plans):
        notes.append(
            "The number of test questions is unknown, because dataset.test_size=null uses all of "
            "them. Their tokens are not counted. To count them, set dataset.test_size."
        )
    return notes


def score_notes(
    model: ModelConfig, completions: int, max_completion_length: int, weights: int
) -> list[str]:
    """Say how much memory the gradients of a question's N completions need, as a list of notes.

    Args:
        model: configuration of the model.
        completions: number of completions, N.
        max_completion_length: largest length of a completion in tokens.
        weights: size of the weights in bytes.
    """
    memory = score_memory(model, completions, max_completion_length)
    if memory is None:
        return []
    whole_graph, by_layer, _ = memory
    text = (
        f"The gradients of a question's N = {completions} completions are computed together. In "
        f"addition to the weights, this needs {decimal(whole_graph)} with the whole computation "
        f"graph, or {decimal(by_layer)} layer by layer, which takes a quarter more time. It is "
        "done layer by layer if the whole graph needs more than half of the free memory. With the "
        f"weights, at least {decimal(weights + by_layer)} are needed."
    )
    if completions >= 8:
        text += (
            f" If this does not fit, run the study with budget.pool_completions="
            f"{completions // 2} pool=DIR first, and then again with budget.pool_completions="
            f"{completions} and the same pool=DIR."
        )
    return [text]


def show_durations(labels: Sequence[str], durations: Sequence[Duration], console: Console) -> None:
    """Print the wall time of each run and of all runs together, and how it was estimated."""
    several, hours = len(durations) > 1, any(estimate.gpus for estimate in durations)
    has_estimate = any(estimate.seconds is not None for estimate in durations)
    if several and has_estimate:
        table = Table(title="wall time, about", box=SIMPLE, pad_edge=False)
        table.add_column("")
        for name in ("wall time", "GPU hours") if hours else ("wall time",):
            table.add_column(name, justify="right", no_wrap=True)
        for label, estimate in zip(labels, durations, strict=True):
            table.add_row(
                label, time_text(estimate.seconds), *[number_text(estimate.gpu_hours)] * hours
            )
        table.add_section()
        seconds = one_after_the_other(durations)
        gpu_hours = [estimate.gpu_hours for estimate in durations if estimate.gpu_hours is not None]
        total_hours = sum(gpu_hours) if len(gpu_hours) == len(durations) else None
        cells = [number_text(total_hours)] * hours
        table.add_row("one after the other", time_text(seconds), *cells)
        console.print(table)
    bases = Counter((estimate.basis, estimate.seconds is None) for estimate in durations)
    for (basis, unknown), runs in bases.items():
        line = "Wall time unknown" if unknown else "Wall time"
        of = f" ({runs} of {len(durations)} runs)"
        if has_estimate and not several:
            line += f" about {time_text(durations[0].seconds)}"
            line += f", {number_text(durations[0].gpu_hours)} GPU hours" if hours else ""
        console.print(f"{line}: {basis}{of if runs < len(durations) else ''}.")
    if has_estimate:
        console.print(
            "This wall time is a rough estimate. The true time may be half as long or twice as "
            "long. The error can be larger if the earlier run had much smaller batches, or if the "
            "machine is busier now. Waiting in a queue is not counted."
        )


def _bytes(number: int | None) -> str:
    return "unknown" if number is None else decimal(number)


def _count(number: int | None) -> str:
    return "unknown" if number is None else f"{number:,}".replace(",", " ")
