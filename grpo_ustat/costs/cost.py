"""What runs would cost, from their configurations alone.

Nothing is loaded. Prompts' tokens are not known without a tokenizer and are in none of the figures.
A figure that is not known is None.
"""

from __future__ import annotations

import json
import math
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from grpo_ustat.checks import model_folder
from grpo_ustat.config import MseConfig, TrainConfig
from grpo_ustat.estimators.baselines import BASELINES
from grpo_ustat.model_config import ModelConfig, ModelSize

ENTRY = {"float64": 8, "float32": 4, "bfloat16": 2, "float16": 2}  # bytes of a number
MOMENTS = {"adamw": 2, "sgd": 0}  # numbers that the optimizer keeps of a parameter
PUBLISHED = {  # test questions by hub id and subset, as their cards and papers give them
    ("openai/gsm8k", "main"): 1319,  # Cobbe et al. 2021
    ("HuggingFaceH4/MATH-500", None): 500,  # Lightman et al. 2023
}
HEADER = 1000  # bytes of a safetensors file beside its arrays, about


@dataclass(frozen=True)
class Cost:
    """What one run costs; bytes are of one process.

    Attributes:
        rollouts: completions that gradients or errors are made of.
        values: fresh ones behind V, b* or a tracker, and greedy ones of remax; at most.
        evaluation: completions of test questions; None where all of an unknown number are asked.
        tokens: of all these completions, at most.
        weights: bytes of the model.
        reference: bytes of its frozen copy, 0 without one.
        training: bytes of gradients and optimizer.
        cache: bytes of keys and values of the completions written side by side.
        logits: bytes of the most logits at a time.
        disk: bytes at most, while it runs: checkpoints, or the study's pool.
        kept: those of them that stay when it has finished.
    """

    rollouts: int
    values: int
    evaluation: int | None
    tokens: int
    weights: int | None
    reference: int | None
    training: int | None
    cache: int | None
    logits: int | None
    disk: int | None
    kept: int | None

    @property
    def memory(self) -> int | None:
        """Weights and training, beside the larger of what sampling and log-probabilities need."""
        parts = (self.weights, self.reference, self.training, self.cache, self.logits)
        return None if None in parts else sum(parts)


def cost(config: TrainConfig | MseConfig) -> Cost:
    """What a run costs, see `train_cost` and `study_cost`."""
    return train_cost(config) if isinstance(config, TrainConfig) else study_cost(config)


def train_cost(config: TrainConfig) -> Cost:
    """n completions a step; evaluations at step 0, every eval_steps and the last.

    Bytes, for P parameters of E bytes: weights E P; a reference E P with a penalty, none with
    adapters; training E P (1 + 2) with AdamW, so 16 P in all in float32, 0 with adapters, whose few
    parameters are not counted. A checkpoint has E P (1 + 2); while one is written there are
    save_total_limit + 1, afterwards save_total_limit.
    """
    rollouts, values, tests = config.budget.rollouts * config.max_steps, *_extra(config)
    tokens = (rollouts + values + (tests or 0)) * config.max_completion_length
    size, entry, lora = model_size(config.model), ENTRY[config.model.dtype], config.lora.r > 0
    weights = _times(size.parameters, entry)
    trained = 0 if lora else 1 + MOMENTS[config.optimizer.name]  # gradient, moments
    most, kept = _checkpoints(config)
    side = max(config.budget.rollouts, (tests or 0) // evaluations(config))
    return Cost(
        rollouts=rollouts,
        values=values,
        evaluation=tests,
        tokens=tokens,
        weights=weights,
        reference=_times(weights, bool(config.objective.beta and not lora)),
        training=_times(weights, trained),
        cache=_cache(config, size, side, 2 if config.bf16 else entry),
        logits=_logits(config, size, side),
        disk=_times(weights, trained * most),
        kept=_times(weights, trained * kept),
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
    return values, _times(tests_asked(config), count * evaluations(config))


def tests_asked(config: TrainConfig) -> int | None:
    """`dataset.test_size`, or where it is null the published size; None where that is unknown."""
    size = config.dataset.test_size
    return published_size(config) if size is None else size


def published_size(config: TrainConfig) -> int | None:
    """Of all test questions, where `dataset` names a hub id of PUBLISHED and filters nothing."""
    dataset = config.dataset
    if dataset.kind not in ("gsm8k", "math") or dataset.test_split != "test":
        return None
    if dataset.kind == "math" and (dataset.filter_test or dataset.test_ids is not None):
        return None
    source = (dataset.path, dataset.subset) if dataset.test_path is None else None
    return PUBLISHED.get(source or (dataset.test_path, None))


def evaluations(config: TrainConfig) -> int:
    """How often held-out questions are asked."""
    return 1 + math.ceil(config.max_steps / config.eval_steps)


def _checkpoints(config: TrainConfig) -> tuple[int, int]:
    """At most at a time, and in the end."""
    written = math.ceil(config.max_steps / config.save_steps)
    limit = config.save_total_limit
    return (written, written) if limit is None else (min(written, limit + 1), min(written, limit))


def sharded_memory(found: Cost, processes: int) -> tuple[int, int]:
    """Under FSDP2 on each process: bytes of shards, and of what stays whole while it samples.

    Weights, gradients and optimizer are sharded; weights are gathered to sample; a reference is
    whole throughout.
    """
    return (found.weights + found.training) // processes, found.weights + found.reference


def total(costs: list[Cost]) -> Cost:
    """Of runs that take turns: sums; of memory the largest; of the disk what stays of all and what
    one needs beside that while it runs.
    """

    def all_of(values: list[int | None], function) -> int | None:
        return None if None in values else function(values)

    sums = {
        name: all_of([getattr(x, name) for x in costs], sum)
        for name in ("rollouts", "values", "evaluation", "tokens", "kept")
    }
    extra = [None if x.disk is None else x.disk - x.kept for x in costs]
    disk = None if None in extra else sums["kept"] + max(extra)
    return replace(max(costs, key=lambda x: x.memory or 0), disk=disk, **sums)


def study_cost(config: MseConfig) -> Cost:
    """N completions of each question, up to max_pool_completions with target_halfwidth.

    monte_carlo adds, a question: `replicates` groups of the largest size and
    reference_completions, and value_completions where a baseline needs them. Bytes, for P
    parameters of E bytes: weights E P in each worker; a question's file has 8 N^2 for inner
    products, 4 N R and 8 R' for sketches of R = feature_sketch and R' = gradient_sketch numbers (P
    where that is smaller), 4 N tokens, 17 N for rewards, lengths and ends. Scores take more memory
    than is counted here: about one backward pass of N completions.
    """
    size, count = model_size(config.model), _pool_completions(config)
    questions = 0 if config.imports_pool else config.study.questions or config.dataset.study_size
    rollouts, values = (questions * each for each in _of_a_question(config, count))
    disk = _times(questions, _pool_file(config, size, count))
    return Cost(
        rollouts=rollouts,
        values=values,
        evaluation=0,
        tokens=(rollouts + values) * config.max_completion_length,
        weights=_times(size.parameters, ENTRY[config.model.dtype]),
        reference=0,
        training=0,
        cache=_cache(config, size, questions * count, ENTRY[config.model.dtype]),
        logits=_logits(config, size, questions * count),
        disk=disk,
        kept=disk,
    )


def _pool_completions(config: MseConfig) -> int:
    budget = config.budget
    return (
        budget.pool_completions if config.target_halfwidth is None else budget.max_pool_completions
    )


def _of_a_question(config: MseConfig, count: int) -> tuple[int, int]:
    """Completions that errors are made of, and those behind baselines."""
    if "monte_carlo" not in config.study.methods:
        return count, _greedy(config)
    budget = config.budget
    fresh = budget.replicates * max(config.group_sizes) + budget.reference_completions
    return count + fresh, _greedy(config) + _values(config)


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
