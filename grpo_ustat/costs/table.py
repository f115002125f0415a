"""`dry_run=true`: prints the planned runs and their costs; nothing is loaded or written."""

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

# Different batches that are described in words.
MAX_BATCHES = 6
# Processes in the example of FSDP2.
EXAMPLE_PROCESSES = 8


def show_costs(plans: Sequence[Plan]) -> None:
    """Print what all runs share, a line for each run, their totals, and their durations."""
    console, rows = Console(), [settings_in_words(plan.settings) for plan in plans]
    shared = {k: v for k, v in rows[0].items() if all(row.get(k) == v for row in rows)}
    labels = [
        ", ".join(f"{key} {value}" for key, value in row.items() if key not in shared)
        for row in rows
    ]
    # No line breaks between a name and its value.
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
    """Return the settings that are not None, each value as one types it."""
    texts = {}
    for key, value in settings.items():
        if isinstance(value, bool):
            texts[key] = str(value).lower()
        elif value is not None:
            texts[key] = ",".join(map(str, value)) if isinstance(value, list) else str(value)
    return texts


def batch_lines(plans: Sequence[Plan]) -> list[str]:
    """Describe how each different batch of training is divided."""
    lines = list(dict.fromkeys(plan.batch for plan in plans if plan.batch))
    more = [f"and {len(lines) - MAX_BATCHES} other batches"] if len(lines) > MAX_BATCHES else []
    return lines[:MAX_BATCHES] + more


def cost_table(labels: Sequence[str], costs: list[Cost]) -> Table:
    """Return a table with a line for each run, labelled by its own settings, and a line for all."""
    runs = len(costs)
    table = Table(title=f"{runs} run{'s' * (runs > 1)}", box=SIMPLE, pad_edge=False)
    table.add_column("")
    cells = [
        {
            "rollouts": _count(one.rollouts),
            "values": _count(one.values),
            "tests": _count(one.evaluation),
            "tokens <=": f"{one.tokens / 1e6:,.1f} M".replace(",", " "),
            "memory": _bytes(one.memory),
            "disk <=": _bytes(one.disk),
        }
        for one in (*costs, total(costs))
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
    """Explain the parts of the largest run's memory, and what the figures leave out."""
    largest = max(plans, key=lambda plan: plan.cost.memory or 0)
    most = largest.cost
    notes = [
        "values: fresh completions behind a baseline; tests: of evaluations. Prompts' tokens are "
        "not counted: they are not known without a tokenizer."
    ]
    if most.memory is None:
        notes.append("Memory and disk unknown: set model.size.parameters and its neighbours.")
    else:
        reference = f"reference {_bytes(most.reference)}, " if most.reference else ""
        program = f", the program {_bytes(most.process)}" if most.process else ""
        notes.append(
            f"Memory of the largest: weights {_bytes(most.weights)}, {reference}gradients and "
            f"optimizer {_bytes(most.training)}, keys and values {_bytes(most.cache)}, logits "
            f"{_bytes(most.logits)}, activations of a backward pass {_bytes(most.graph)}{program}; "
            "keys and values and activations are not held at once; without prompts."
        )
    notes += largest.notes
    if largest.device.startswith("cuda") and most.memory is not None and most.training:
        shards, whole = sharded_memory(most, EXAMPLE_PROCESSES)
        names = "weights and reference" if most.reference else "weights"
        notes.append(
            f"FSDP2 on {EXAMPLE_PROCESSES} processes: {decimal(shards)} of weights, gradients and "
            f"optimizer in each, and {decimal(whole)} of whole {names} while it samples."
        )

    sizes = {plan.published_tests for plan in plans}
    notes += [
        f"Tests: dataset.test_size=null, published size {size} taken."
        for size in sorted(size for size in sizes if size is not None)
    ]
    if any(plan.cost.evaluation is None for plan in plans):
        notes.append(
            "Tests unknown: dataset.test_size=null asks all test questions; tokens leave them out."
        )
    return notes


def score_notes(
    model: ModelConfig, completions: int, max_completion_length: int, weights: int
) -> list[str]:
    """Describe how N completions of a question are scored and the memory that this needs.

    The text says what is held beside the bytes of the weights, and what to change if it does not
    fit.
    """
    memory = score_memory(model, completions, max_completion_length)
    if memory is None:
        return []
    whole, by_layer, _ = memory
    text = (
        f"Scores of N = {completions} completions at once, beside the weights: {decimal(whole)} "
        f"with the whole graph, or layer by layer {decimal(by_layer)}, at a quarter more time, "
        "where the first is over half of the free memory; so "
        f"{decimal(weights + by_layer)} at least."
    )
    if completions >= 8:
        text += (
            f" Where that does not fit: budget.pool_completions={completions // 2} first, then "
            f"{completions} on the same pool=DIR."
        )
    return [text]


def show_durations(labels: Sequence[str], durations: Sequence[Duration], console: Console) -> None:
    """Print the wall time of each run and of all in turn, and the basis of the estimate."""
    several, hours = len(durations) > 1, any(one.gpus for one in durations)
    has_estimate = any(one.seconds is not None for one in durations)
    if several and has_estimate:
        table = Table(title="wall time, about", box=SIMPLE, pad_edge=False)
        table.add_column("")
        for name in ("wall time", "GPU hours") if hours else ("wall time",):
            table.add_column(name, justify="right", no_wrap=True)
        for label, one in zip(labels, durations, strict=True):
            table.add_row(label, time_text(one.seconds), *[number_text(one.gpu_hours)] * hours)
        table.add_section()
        seconds, gpu_hours = one_after_the_other(durations), [one.gpu_hours for one in durations]
        known = [one for one in gpu_hours if one is not None]
        total_hours = sum(known) if len(known) == len(gpu_hours) else None
        cells = [number_text(total_hours)] * hours
        table.add_row("one after the other", time_text(seconds), *cells)
        console.print(table)
    for basis, runs in Counter(one.basis for one in durations).items():
        line, of = "Wall time", f" ({runs} of {len(durations)} runs)"
        if has_estimate and not several:
            line += f" about {time_text(durations[0].seconds)}"
            line += f", {number_text(durations[0].gpu_hours)} GPU hours" if hours else ""
        console.print(f"{line}: {basis}{of if runs < len(durations) else ''}.")
    if has_estimate:
        console.print(
            "Wall time is rough: half to twice that, and further off where batches were much "
            "smaller there or the machine is busier now; waiting in a queue is left out."
        )


def _bytes(number: int | None) -> str:
    return "unknown" if number is None else decimal(number)


def _count(number: int | None) -> str:
    return "unknown" if number is None else f"{number:,}".replace(",", " ")
