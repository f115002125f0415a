"""`dry_run=true`: what runs would do and cost, from their configurations alone.

Nothing is loaded and nothing is written. Prompts' tokens are not known without a tokenizer and are
in none of the figures. A figure that is not known is None.
"""

from __future__ import annotations

import json
import math
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from rich.box import SIMPLE
from rich.console import Console
from rich.filesize import decimal
from rich.markup import escape
from rich.table import Table

from grpo_ustat.checks import model_folder
from grpo_ustat.config import MseConfig, TrainConfig
from grpo_ustat.data_config import ModelConfig, ModelSize
from grpo_ustat.estimators.baselines import BASELINES
from grpo_ustat.runs.points import Point

ENTRY = {"float64": 8, "float32": 4, "bfloat16": 2, "float16": 2}  # bytes of a number
MOMENTS = {"adamw": 2, "sgd": 0}  # numbers that the optimizer keeps of a parameter
HEADER = 1000  # bytes of a safetensors file beside its arrays, about


@dataclass(frozen=True)
class Cost:
    """What one run costs; bytes are of one process.

    Attributes:
        rollouts: completions that gradients or errors are made of.
        values: fresh ones behind V, b* or a tracker, and greedy ones of remax; at most.
        evaluation: completions of test questions; None where all of an unknown number are asked.
        tokens: of all these completions, at most.
        weights: bytes of the model, and of a frozen reference.
        training: bytes of gradients and optimizer.
        cache: bytes of keys and values of the completions written side by side.
        logits: bytes of the most logits at a time.
        disk: bytes that stay, at most: checkpoints, or the study's pool.
    """

    rollouts: int
    values: int
    evaluation: int | None
    tokens: int
    weights: int | None
    training: int | None
    cache: int | None
    logits: int | None
    disk: int | None

    @property
    def memory(self) -> int | None:
        """Weights and training, beside the larger of what sampling and log-probabilities need."""
        parts = (self.weights, self.training, self.cache, self.logits)
        return None if None in parts else sum(parts)


def cost(config: TrainConfig | MseConfig) -> Cost:
    """What a run costs, see `train_cost` and `study_cost`."""
    return train_cost(config) if isinstance(config, TrainConfig) else study_cost(config)


def train_cost(config: TrainConfig) -> Cost:
    """n completions a step; evaluations at step 0, every eval_steps and the last.

    Bytes, for P parameters of E bytes: weights E P, twice with a penalty (a frozen reference);
    training E P (1 + 2) with AdamW, so 16 P in all in float32, 0 with adapters, whose few
    parameters are not counted. A checkpoint has E P (1 + 2); save_total_limit + 1 are kept at most.
    """
    rollouts, values, tests = config.budget.rollouts * config.max_steps, *_extra(config)
    tokens = (rollouts + values + (tests or 0)) * config.max_completion_length
    size, entry, lora = model_size(config.model), ENTRY[config.model.dtype], config.lora.r > 0
    weights = _times(size.parameters, entry)
    moments = MOMENTS[config.optimizer.name]
    side = max(config.budget.rollouts, (tests or 0) // _evaluations(config))
    return Cost(
        rollouts=rollouts,
        values=values,
        evaluation=tests,
        tokens=tokens,
        weights=_times(weights, 1 if lora or not config.objective.beta else 2),
        training=0 if lora else _times(weights, 1 + moments),
        cache=_cache(config, size, side, 2 if config.bf16 else entry),
        logits=_logits(config, size, side),
        disk=0 if lora else _times(weights, (1 + moments) * _checkpoints(config)),
    )


def _extra(config: TrainConfig) -> tuple[int, int | None]:
    """Value completions, at most, and those of evaluations.

    Per step and prompt: budget.value_completions for `oracle` and `optimal`, one greedy for
    `remax`; `spo` spends budget.value_completions on a prompt's first visit.
    """
    needs, each = BASELINES[config.baseline.name].needs, config.budget.value_completions
    visits = config.prompts_per_step * config.max_steps
    values = visits * (each * bool(needs & {"value_P", "optimal_P"}) + ("greedy_P" in needs))
    if "tracker_P" in needs:
        values += each * min(visits, config.dataset.train_size or visits)
    asked = config.eval
    count = asked.num_generations * ("sampled" in asked.decoding) + ("greedy" in asked.decoding)
    tests = _times(config.dataset.test_size, count * _evaluations(config))
    return values, tests


def _evaluations(config: TrainConfig) -> int:
    return 1 + math.ceil(config.max_steps / config.eval_steps)


def _checkpoints(config: TrainConfig) -> int:
    written = math.ceil(config.max_steps / config.save_steps)
    limit = config.save_total_limit
    return written if limit is None else min(written, limit + 1)


def study_cost(config: MseConfig) -> Cost:
    """N completions of each question, up to max_pool_completions with target_halfwidth.

    monte_carlo adds, a question: `replicates` groups of the largest size and
    reference_completions, and value_completions where a baseline needs them. Bytes, for P
    parameters of E bytes: weights E P in each worker; a question's file has 8 N^2 for inner
    products, 4 N R and 8 R' for sketches of R = feature_sketch and R' = gradient_sketch numbers (P
    where that is smaller), 4 N tokens, 17 N for rewards, lengths and ends. Scores take more memory
    than is counted here: about one backward pass of N completions.
    """
    budget, size = config.budget, model_size(config.model)
    questions = 0 if config.imports_pool else config.study.questions or config.dataset.study_size
    count = budget.pool_completions
    if config.target_halfwidth is not None:
        count = budget.max_pool_completions
    rollouts, values = questions * count, questions * _greedy(config)
    if "monte_carlo" in config.study.methods:
        fresh = budget.replicates * max(config.group_sizes) + budget.reference_completions
        rollouts, values = rollouts + questions * fresh, values + questions * _values(config)
    weights = _times(size.parameters, ENTRY[config.model.dtype])
    side = questions * max(count, 1)
    return Cost(
        rollouts=rollouts,
        values=values,
        evaluation=0,
        tokens=(rollouts + values) * config.max_completion_length,
        weights=weights,
        training=0,
        cache=_cache(config, size, side, ENTRY[config.model.dtype]),
        logits=_logits(config, size, side),
        disk=_times(questions, _pool_file(config, size, count)),
    )


def _greedy(config: MseConfig) -> int:
    return any("greedy_P" in BASELINES[name].needs for name in config.baselines)


def _values(config: MseConfig) -> int:
    """Completions a question behind what baselines read besides the group, in monte_carlo."""
    needs = frozenset().union(*(BASELINES[name].needs for name in config.baselines))
    if not needs - {"lengths_PG"}:
        return 0
    return config.budget.value_completions + ("greedy_P" in needs)


def _pool_file(config: MseConfig, size: ModelSize, count: int) -> int:
    budget = config.budget
    most = math.inf if size.parameters is None else size.parameters
    features, gradients = min(budget.feature_sketch, most), min(budget.gradient_sketch, most)
    each = 8 * count + 4 * features + 4 * config.max_completion_length + 17
    return int(count * each + 8 * gradients + HEADER)


def _cache(config: Any, size: ModelSize, side: int, computed: int) -> int | None:
    """Keys and values of the rows written side by side, prompts and room to grow left out.

    A token leaves kv_width keys and as many values in each layer; keys have passed through rotary
    embeddings, in the weights' type, values have the type of the computation.
    """
    if size.layers is None or size.kv_width is None:
        return None
    row = size.layers * size.kv_width * (ENTRY[config.model.dtype] + computed)
    return min(config.rollout_batch_size, side) * row * config.max_completion_length


def _logits(config: Any, size: ModelSize, side: int) -> int | None:
    """Float32 logits of the next token of all rows, or one chunk of those of log-probabilities."""
    if size.vocabulary is None:
        return None
    from grpo_ustat.policy.head import LOGITS

    rows = min(config.rollout_batch_size, side)
    chunk = LOGITS["cuda" if config.launch.device.startswith("cuda") else "cpu"]
    whole = 4 * size.vocabulary * side * config.max_completion_length
    return max(4 * size.vocabulary * rows, min(chunk, whole))


def _times(a: int | None, b: int) -> int | None:
    return None if a is None else a * b


def model_size(model: ModelConfig) -> ModelSize:
    """`model.size`; what it leaves open from the model's folder where there is one."""
    folder = model_folder(model.model_name_or_path)
    if not (folder / "config.json").is_file():
        return model.size
    there = _size_of(folder)
    given = {key: value for key, value in vars(model.size).items() if value is not None}
    return replace(there, **given)


def _size_of(folder: Path) -> ModelSize:
    """From config.json, in the names of Llama and its kin, and the headers of the weight files."""
    stored = json.loads((folder / "config.json").read_text())
    heads = stored.get("num_key_value_heads") or stored.get("num_attention_heads")
    width = stored.get("head_dim")
    if width is None and stored.get("num_attention_heads"):
        width = stored["hidden_size"] // stored["num_attention_heads"]
    return ModelSize(
        parameters=_parameters(folder),
        layers=stored.get("num_hidden_layers"),
        kv_width=None if heads is None or width is None else heads * width,
        vocabulary=stored.get("vocab_size"),
    )


def _parameters(folder: Path) -> int | None:
    """The numbers in a folder's weight files; tied weights are stored once."""
    from safetensors import safe_open

    total = 0
    for file in folder.glob("*.safetensors"):
        with safe_open(file, "numpy") as tensors:
            total += sum(math.prod(tensors.get_slice(k).get_shape()) for k in tensors.keys())  # noqa: SIM118
    return total or None


def settings(config: TrainConfig | MseConfig) -> dict[str, str]:
    """What decides the cost, and the learning rate.

    length: max_completion_length, P: prompts a step, N: completions a question.
    """
    found = {"model": config.model.name, "dataset": config.dataset.name}
    found |= {"prompt": config.prompt.name, "length": config.max_completion_length}
    if isinstance(config, TrainConfig):
        found |= {"G": config.group_size, "n": config.budget.rollouts}
        found |= {"P": config.prompts_per_step, "steps": config.max_steps}
        found |= {"learning_rate": f"{config.learning_rate:g}", "baseline": config.baseline.name}
        found |= {"seed": config.seed}
    else:
        asked = config.study
        found |= {"questions": asked.questions or config.dataset.study_size}
        found |= {"N": config.budget.pool_completions}
        found |= {"G": ",".join(map(str, config.group_sizes))}
        found |= {"baselines": ",".join(config.baselines), "methods": ",".join(asked.methods)}
    return {key: str(value) for key, value in found.items()}


def show_costs(points: list[Point]) -> None:
    """Print a line for each run and their totals."""
    console = Console(highlight=False)
    costs, rows = [cost(p.config) for p in points], [settings(p.config) for p in points]
    shared = {k: v for k, v in rows[0].items() if all(row.get(k) == v for row in rows)}
    console.print(", ".join(f"{k} {v}" for k, v in shared.items()), markup=False)
    table = Table(title=f"{len(points)} run{'s' * (len(points) > 1)}", box=SIMPLE, pad_edge=False)
    table.add_column("")
    cells = [_cells(found) for found in (*costs, _total(costs))]
    columns = [key for key in cells[-1] if cells[-1][key] != "0"]
    for column in columns:
        table.add_column(column, justify="right", no_wrap=True)
    for row, found in zip(rows, cells, strict=False):
        own = ", ".join(f"{key} {value}" for key, value in row.items() if key not in shared)
        table.add_row(escape(own), *(found[key] for key in columns))
    if len(points) > 1:
        table.add_section()
        table.add_row("all", *(cells[-1][key] for key in columns))
    console.print(table)
    for note in _notes(points, costs):
        console.print(note, markup=False)


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


def _total(costs: list[Cost]) -> Cost:
    """Sums; of memory the largest, since the runs take turns."""

    def all_of(name: str, function) -> int | None:
        values = [getattr(x, name) for x in costs]
        return None if None in values else function(values)

    sums = ("rollouts", "values", "evaluation", "tokens", "disk")
    return replace(
        max(costs, key=lambda x: x.memory or 0), **{name: all_of(name, sum) for name in sums}
    )


def _notes(points: list[Point], costs: list[Cost]) -> list[str]:
    """What the largest run's memory consists of, and what is left out."""
    point, most = max(zip(points, costs, strict=True), key=lambda pair: pair[1].memory or 0)
    config = point.config
    notes = [
        "values: fresh completions behind a baseline; tests: of evaluations. Prompts' tokens are "
        "not counted: they are not known without a tokenizer."
    ]
    if most.memory is None:
        notes.append("Memory and disk unknown: set model.size.parameters and its neighbours.")
    else:
        notes.append(
            f"Memory of the largest: weights {decimal(most.weights)}, gradients and optimizer "
            f"{decimal(most.training)}, keys and values {decimal(most.cache)}, logits "
            f"{decimal(most.logits)}; without activations and prompts."
        )
    if isinstance(config, TrainConfig) and config.launch.device == "cuda" and most.training:
        held = most.weights + most.training
        notes.append(
            f"FSDP2 on 8 processes: {decimal(held // 8)} of weights, gradients and optimizer in "
            f"each, and {decimal(most.weights)} of whole weights while it samples."
        )
    elif isinstance(config, MseConfig):
        notes.append(f"Each of launch.workers={config.launch.workers} has this memory.")
    if any(found.evaluation is None for found in costs):
        notes.append(
            "Tests unknown: dataset.test_size=null asks all test questions; tokens leave them out."
        )
    return notes
