"""`dry_run=true`: what runs would do and cost, printed; nothing is loaded or written."""

from __future__ import annotations

import math
import textwrap
from collections import Counter
from collections.abc import Sequence
from typing import Any

from rich.box import SIMPLE
from rich.filesize import decimal
from rich.table import Table

from grpo_ustat.config.mse import MseConfig
from grpo_ustat.config.train import TrainConfig
from grpo_ustat.costs.cost import (
    Cost,
    cost,
    published_size,
    score_memory,
    sharded_memory,
    total,
)
from grpo_ustat.costs.duration import Duration, Span, duration, hours_text, span_text
from grpo_ustat.runs.status import PlannedRun
from grpo_ustat.terminal.console import Console

BATCHES = 6  # different ones that are printed in words
PROCESSES = 8  # of the example of FSDP2


def show_costs(planned_runs: Sequence[PlannedRun]) -> None:
    """Print what all runs share, a line for each run, their totals, and their durations."""
    console = Console()
    configs = [planned.config for planned in planned_runs]
    costs, rows = [cost(config) for config in configs], [settings(config) for config in configs]
    shared = {k: v for k, v in rows[0].items() if all(row.get(k) == v for row in rows)}
    labels = [
        ", ".join(f"{key} {value}" for key, value in row.items() if key not in shared)
        for row in rows
    ]
    # No line breaks between a name and its value.
    text = ", ".join(f"{key}\xa0{value}" for key, value in shared.items())
    lines = textwrap.wrap(text, console.width, break_long_words=False, break_on_hyphens=False)
    console.print("\n".join(lines).replace("\xa0", " "))
    for line in batches_in_words(configs):
        console.print(line)
    console.print(cost_table(labels, costs))
    for note in cost_notes(configs, costs):
        console.print(note)
    durations = [duration(*pair) for pair in zip(planned_runs, costs, strict=True)]
    show_durations(labels, durations, console)


def settings(config: TrainConfig | MseConfig) -> dict[str, str]:
    """What a run is, and what decides its cost, as one types it.

    length: max_completion_length, P: prompts a step, N: completions a question.
    """
    values: dict[str, Any] = {
        "model": config.model.name,
        "dataset": config.dataset.name,
        "prompt": config.prompt.name,
        "prompt.max_length": config.prompt.max_length,
        "length": config.max_completion_length,
        "temperature": config.temperature,
        "rollout": config.rollout.name,
        "reward": config.rewards_plan or None,
    }
    if isinstance(config, TrainConfig):
        values |= {
            "objective": config.objective.name,
            "baseline": config.baseline.name,
            "G": config.group_size,
            "n": config.budget.rollouts,
            "P": config.prompts_per_step,
            "steps": config.max_steps,
            "learning_rate": f"{config.learning_rate:g}",
            "lora": f"r={config.lora.r}" if config.lora.r else None,
            "bf16": config.bf16,
            "eval_steps": config.eval_steps,
            "decoding": config.eval.decoding,
            "save_steps": config.save_steps,
            "seed": config.seed,
        }
    else:
        values |= {
            "questions": config.study.questions or config.dataset.study_size,
            "N": config.budget.pool_completions,
            "G": config.group_sizes,
            "baselines": config.baselines,
            "methods": config.study.methods,
            "seed": config.seed,
        }
    values["device"] = config.launch.device
    texts = {}
    for key, value in values.items():
        if isinstance(value, bool):
            texts[key] = str(value).lower()
        elif value is not None:
            texts[key] = ",".join(map(str, value)) if isinstance(value, list) else str(value)
    return texts


def batches_in_words(configs: Sequence[TrainConfig | MseConfig]) -> list[str]:
    """How each different batch of training is divided: `n = P x G`, what each process has of it,
    its updates and their backward passes.
    """
    lines: list[str] = []
    for config in configs:
        if not isinstance(config, TrainConfig):
            continue
        rollouts, prompts = config.budget.rollouts, config.prompts_per_step
        ranks, objective = config.launch.num_processes, config.objective
        size = objective.update_size(rollouts)
        updates = objective.num_iterations * math.ceil(rollouts / size)
        share = f"up to {math.ceil(prompts / ranks)} prompts on each of {ranks} processes; "
        longest = math.ceil(size / ranks) * config.max_completion_length
        passes = max(1, math.ceil(longest / config.micro_batch_tokens))
        lines.append(
            f"Batch: n = {rollouts} completions a step = {prompts} prompts x G = "
            f"{config.group_size}; {share if ranks > 1 else ''}{updates} "
            f"update{'s' * (updates > 1)} a step, each of {size} completions in at most about "
            f"{passes} backward pass{'es' * (passes > 1)} of {config.micro_batch_tokens} padded "
            "tokens, prompts left out."
        )
    lines = list(dict.fromkeys(lines))
    more = [f"and {len(lines) - BATCHES} other batches"] if len(lines) > BATCHES else []
    return lines[:BATCHES] + more


def cost_table(labels: Sequence[str], costs: list[Cost]) -> Table:
    """A line for each run, labelled by its own settings, and one for all."""
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


def cost_notes(configs: Sequence[TrainConfig | MseConfig], costs: Sequence[Cost]) -> list[str]:
    """What the largest run's memory consists of, and what the figures leave out."""
    config, most = max(zip(configs, costs, strict=True), key=lambda pair: pair[1].memory or 0)
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

    if isinstance(config, MseConfig):
        notes += score_notes(config)
        notes.append(
            f"Each of launch.workers={config.launch.workers} has this memory."
            if config.rollout.name == "local"
            else "One process has this memory, and vLLM has what "
            f"rollout.gpu_memory_utilization={config.rollout.gpu_memory_utilization} gives it; "
            f"launch.workers={config.launch.workers} share out replay alone."
        )
    elif config.launch.device.startswith("cuda") and most.memory is not None and most.training:
        shards, whole = sharded_memory(most, PROCESSES)
        names = "weights and reference" if most.reference else "weights"
        notes.append(
            f"FSDP2 on {PROCESSES} processes: {decimal(shards)} of weights, gradients and "
            f"optimizer in each, and {decimal(whole)} of whole {names} while it samples."
        )

    training = [one for one in configs if isinstance(one, TrainConfig)]
    sizes = {published_size(one) for one in training if one.dataset.test_size is None}
    notes += [
        f"Tests: dataset.test_size=null, published size {size} taken."
        for size in sorted(size for size in sizes if size is not None)
    ]
    if any(one.evaluation is None for one in costs):
        notes.append(
            "Tests unknown: dataset.test_size=null asks all test questions; tokens leave them out."
        )
    return notes


def score_notes(config: MseConfig) -> list[str]:
    """How a question's completions are scored, what that holds, and what to change where it does
    not fit.
    """
    memory = score_memory(config)
    if memory is None:
        return []
    count, weights = config.budget.pool_completions, cost(config).weights or 0
    whole, by_layer, _ = memory
    text = (
        f"Scores of N = {count} completions at once, beside the weights: {decimal(whole)} with the "
        f"whole graph, or layer by layer {decimal(by_layer)}, at a quarter more time, where the "
        f"first is over half of the free memory; so {decimal(weights + by_layer)} at least."
    )
    if count >= 8:
        text += (
            f" Where that does not fit: budget.pool_completions={count // 2} first, then {count} "
            "on the same pool=DIR."
        )
    return [text]


def show_durations(labels: Sequence[str], durations: Sequence[Duration], console: Console) -> None:
    """Print how long each run and all of them would take one after the other, and what says so."""
    has_estimate = any(one.seconds is not None for one in durations)
    hours = any(one.gpus for one in durations)
    if len(durations) > 1 and has_estimate:
        table = Table(title="wall time", box=SIMPLE, pad_edge=False)
        table.add_column("")
        for name in ("wall time", "GPU hours") if hours else ("wall time",):
            table.add_column(name, justify="right", no_wrap=True)
        for label, one in zip(labels, durations, strict=True):
            gpu_hours = [hours_text(one.gpu_hours)] if hours else []
            table.add_row(label, span_text(one.seconds), *gpu_hours)
        table.add_section()
        gpu_hours = [hours_text(_sum([one.gpu_hours for one in durations]))] if hours else []
        seconds = _sum([one.seconds for one in durations])
        table.add_row("one after the other", span_text(seconds), *gpu_hours)
        console.print(table)
    for basis, runs in Counter(one.basis for one in durations).items():
        time, of = (
            "Wall time",
            f" ({runs} of {len(durations)} runs)" if runs < len(durations) else "",
        )
        if len(durations) == 1 and has_estimate:
            time += f" {span_text(durations[0].seconds)}"
            time += f", {hours_text(durations[0].gpu_hours)} GPU hours" if hours else ""
        console.print(f"{time}: {basis}{of}.")
    if has_estimate:
        console.print(
            "Wall time leaves out start-up, saving, and waiting in a queue.",
        )


def _bytes(number: int | None) -> str:
    return "unknown" if number is None else decimal(number)


def _count(number: int | None) -> str:
    return "unknown" if number is None else f"{number:,}".replace(",", " ")


def _sum(spans: Sequence[Span | None]) -> Span | None:
    """Sum of numbers; None where one of them is not known."""
    total_span = Span(0.0, 0.0)
    for span in spans:
        if span is None:
            return None
        total_span += span
    return total_span
