"""`dry_run=true`: what runs would do and cost, printed; nothing is loaded or written."""

from __future__ import annotations

import math
import textwrap
from collections import Counter
from typing import Any

from rich.box import SIMPLE
from rich.console import Console
from rich.filesize import decimal
from rich.markup import escape
from rich.table import Table

from grpo_ustat.config import MseConfig, TrainConfig
from grpo_ustat.runs.cost import Cost, cost, published_size, sharded_memory, total
from grpo_ustat.runs.duration import Duration, Span, count_of, duration, said
from grpo_ustat.runs.points import Point

BATCHES = 6  # different ones that are said in words
PROCESSES = 8  # of the example of FSDP2


def show_costs(points: list[Point]) -> None:
    """Print what all runs share, a line for each run, and their totals."""
    console = Console(highlight=False)
    costs, rows = [cost(p.config) for p in points], [settings(p.config) for p in points]
    shared = {k: v for k, v in rows[0].items() if all(row.get(k) == v for row in rows)}
    own = [{k: v for k, v in row.items() if k not in shared} for row in rows]
    console.print(_paragraph(shared, console.width), markup=False)
    for line in arithmetic(points):
        console.print(line, markup=False)
    console.print(_table(own, costs))
    for note in _notes(points, costs):
        console.print(note, markup=False)
    _show_durations(own, [duration(*pair) for pair in zip(points, costs, strict=True)], console)


def _show_durations(own: list[dict[str, str]], found: list[Duration], console: Console) -> None:
    """How long each run and all of them would take one after the other, and what says so."""
    if len(found) > 1:
        console.print(_time_table(own, found))
    for basis, runs in Counter(one.basis for one in found).items():
        of = f" ({runs} of {len(found)} runs)" if runs < len(found) else ""
        console.print(f"Time{_alone(found)}: {basis}{of}.", markup=False)
    console.print("Time leaves out start-up, saving, and waiting in a queue.", markup=False)


def _alone(found: list[Duration]) -> str:
    """The time of a run that has no table."""
    if len(found) > 1 or found[0].seconds is None:
        return ""
    time, hours = _times(found[0])
    return f" {time}" + (f", {hours} GPU hours" if found[0].gpus else "")


def _time_table(own: list[dict[str, str]], found: list[Duration]) -> Table:
    table = Table(title="time", box=SIMPLE, pad_edge=False)
    table.add_column("")
    for name in ("time", *(["GPU hours"] if any(one.gpus for one in found) else [])):
        table.add_column(name, justify="right", no_wrap=True)
    cells = len(table.columns) - 1
    for row, one in zip(own, found, strict=True):
        table.add_row(escape(_pairs(row)), *_times(one)[:cells])
    table.add_section()
    both = (said(_sum([x.seconds for x in found])), count_of(_sum([x.gpu_hours for x in found])))
    table.add_row("one after the other", *both[:cells])
    return table


def _sum(spans: list[Span | None]) -> Span | None:
    return None if None in spans else sum(spans[1:], spans[0])


def _times(one: Duration) -> tuple[str, str]:
    return said(one.seconds), count_of(one.gpu_hours)


def arithmetic(points: list[Point]) -> list[str]:
    """How each different batch is made up, in words."""
    asked = [p.config for p in points if isinstance(p.config, TrainConfig)]
    found = list(dict.fromkeys(_batch(config) for config in asked))
    more = [f"and {len(found) - BATCHES} other batches"] if len(found) > BATCHES else []
    return found[:BATCHES] + more


def _batch(config: TrainConfig) -> str:
    """`n = P x G`, what each process has of it, its updates and their backward passes."""
    rollouts, prompts = config.budget.rollouts, config.prompts_per_step
    ranks, objective = config.launch.num_processes, config.objective
    size = objective.minibatch_size or rollouts
    updates = objective.num_iterations * math.ceil(rollouts / size)
    share = f"up to {math.ceil(prompts / ranks)} prompts on each of {ranks} processes; "
    longest = math.ceil(size / ranks) * config.max_completion_length
    passes = max(1, math.ceil(longest / config.micro_batch_tokens))
    return (
        f"Batch: n = {rollouts} completions a step = {prompts} prompts x G = {config.group_size}; "
        f"{share if ranks > 1 else ''}{updates} update{'s' * (updates > 1)} a step, each of {size} "
        f"completions in at most about {passes} backward pass{'es' * (passes > 1)} of "
        f"{config.micro_batch_tokens} padded tokens, prompts left out."
    )


def settings(config: TrainConfig | MseConfig) -> dict[str, str]:
    """What a run is, and what decides its cost.

    length: max_completion_length, P: prompts a step, N: completions a question.
    """
    found = {"model": config.model.name, "dataset": config.dataset.name}
    found |= {"prompt": config.prompt.name, "prompt.max_length": config.prompt.max_length}
    found |= {"length": config.max_completion_length, "temperature": config.temperature}
    found |= _of_training(config) if isinstance(config, TrainConfig) else _of_study(config)
    found |= {"device": config.launch.device}
    return {key: _said(value) for key, value in found.items() if value is not None}


def _of_training(config: TrainConfig) -> dict[str, Any]:
    return {
        "rollout": config.rollout.name,
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


def _of_study(config: MseConfig) -> dict[str, Any]:
    return {
        "questions": config.study.questions or config.dataset.study_size,
        "N": config.budget.pool_completions,
        "G": config.group_sizes,
        "baselines": config.baselines,
        "methods": config.study.methods,
        "seed": config.seed,
    }


def _said(value: Any) -> str:
    """As it is typed, lists without spaces."""
    if isinstance(value, bool):
        return str(value).lower()
    return ",".join(map(str, value)) if isinstance(value, list) else str(value)


def _pairs(values: dict[str, str]) -> str:
    return ", ".join(f"{key} {value}" for key, value in values.items())


def _paragraph(values: dict[str, str], width: int) -> str:
    """Settings in lines, none of them cut between a name and its value."""
    text = ", ".join(f"{key}\xa0{value}" for key, value in values.items())
    options = {"break_long_words": False, "break_on_hyphens": False}
    return textwrap.fill(text, width, **options).replace("\xa0", " ")


def _table(own: list[dict[str, str]], costs: list[Cost]) -> Table:
    """A line for each run, what is its own on the left, and one for all."""
    runs = len(costs)
    table = Table(title=f"{runs} run{'s' * (runs > 1)}", box=SIMPLE, pad_edge=False)
    table.add_column("")
    cells = [_cells(found) for found in (*costs, total(costs))]
    columns = [key for key in cells[-1] if cells[-1][key] != "0"]
    for column in columns:
        table.add_column(column, justify="right", no_wrap=True)
    for row, found in zip(own, cells, strict=False):
        table.add_row(escape(_pairs(row)), *(found[key] for key in columns))
    if runs > 1:
        table.add_section()
        table.add_row("all", *(cells[-1][key] for key in columns))
    return table


def _cells(found: Cost) -> dict[str, str]:
    return {
        "rollouts": _count(found.rollouts),
        "values": _count(found.values),
        "tests": _count(found.evaluation),
        "tokens <=": f"{found.tokens / 1e6:,.1f} M".replace(",", " "),
        "memory": _bytes(found.memory),
        "disk <=": _bytes(found.disk),
    }


def _bytes(number: int | None) -> str:
    return "unknown" if number is None else decimal(number)


def _count(number: int | None) -> str:
    return "unknown" if number is None else f"{number:,}".replace(",", " ")


def _notes(points: list[Point], costs: list[Cost]) -> list[str]:
    """What the largest run's memory consists of, and what is left out."""
    point, most = max(zip(points, costs, strict=True), key=lambda pair: pair[1].memory or 0)
    return [
        "values: fresh completions behind a baseline; tests: of evaluations. Prompts' tokens are "
        "not counted: they are not known without a tokenizer.",
        _memory_note(most),
        *_processes_note(point.config, most),
        *_tests_note(points, costs),
    ]


def _memory_note(found: Cost) -> str:
    if found.memory is None:
        return "Memory and disk unknown: set model.size.parameters and its neighbours."
    reference = f"reference {decimal(found.reference)}, " if found.reference else ""
    return (
        f"Memory of the largest: weights {decimal(found.weights)}, {reference}gradients and "
        f"optimizer {decimal(found.training)}, keys and values {decimal(found.cache)}, logits "
        f"{decimal(found.logits)}; without activations and prompts."
    )


def _processes_note(config: TrainConfig | MseConfig, found: Cost) -> list[str]:
    """What each of several processes has."""
    if isinstance(config, MseConfig):
        return [f"Each of launch.workers={config.launch.workers} has this memory."]
    if not config.launch.device.startswith("cuda") or found.memory is None or not found.training:
        return []
    shards, whole = sharded_memory(found, PROCESSES)
    named = "weights and reference" if found.reference else "weights"
    return [
        f"FSDP2 on {PROCESSES} processes: {decimal(shards)} of weights, gradients and optimizer in "
        f"each, and {decimal(whole)} of whole {named} while it samples."
    ]


def _tests_note(points: list[Point], costs: list[Cost]) -> list[str]:
    """Where the number of test questions comes from when dataset.test_size=null."""
    asked = [p.config for p in points if isinstance(p.config, TrainConfig)]
    sizes = {published_size(c) for c in asked if c.dataset.test_size is None} - {None}
    found = [
        f"Tests: dataset.test_size=null, published size {size} taken." for size in sorted(sizes)
    ]
    if any(one.evaluation is None for one in costs):
        found.append(
            "Tests unknown: dataset.test_size=null asks all test questions; tokens leave them out."
        )
    return found
