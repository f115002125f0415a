"""Costs of runs in completions, tokens, memory and disk, computed from the planned work.

Nothing is loaded. Prompt tokens are not counted, because that needs a tokenizer. An unknown figure
is None.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import Any, cast

from grpo_ustat.config.model import (
    ModelConfig,
    ModelSize,
    model_folder,
    read_config_json,
    weight_files,
)
from grpo_ustat.config.parts import SamplerOptions
from grpo_ustat.policy.limits import LOGIT_BYTES, pass_bytes

# Bytes of a number.
NUMBER_BYTES = {"float64": 8, "float32": 4, "bfloat16": 2, "float16": 2}
# Keys of config.json, by their names here.
SIZE_KEYS = {
    "layers": "num_hidden_layers",
    "vocabulary": "vocab_size",
    "hidden": "hidden_size",
    "inner": "intermediate_size",
    "heads": "num_attention_heads",
    "key_heads": "num_key_value_heads",
    "width": "head_dim",
}
# About the bytes of a safetensors file beside its arrays.
HEADER_BYTES = 1000
# Python with PyTorch, transformers and tasks; not counted on a GPU.
PROCESS_BYTES = 580_000_000
# Memory of the process that reads a pool, over the size of its files.
POOL_MEMORY_FACTOR = 2.5
# Memory of log-probabilities and derivatives, over the size of their logits.
LOGIT_MEMORY_FACTOR = 4.5
# Half of a GPU; a larger graph is scored layer by layer.
MAX_GRAPH_BYTES = 32 * 2**30


@dataclass(frozen=True)
class KeptPool:
    """Scored completions that a study keeps."""

    questions: int
    # N of each question.
    completions: int
    # Numbers of the two sketches, at most.
    feature_sketch: int
    gradient_sketch: int
    # True if completions are scored once more, in the metric of AdamW's step.
    in_adams_metric: bool


@dataclass(frozen=True)
class Work:
    """The sampling, scoring, updating and storing of a run, as its command describes it."""

    model: ModelConfig
    sampler: SamplerOptions
    # Torch device, as configured.
    device: str
    # Completions from which gradients or errors are computed.
    rollouts: int
    # Fresh completions from which baselines are estimated, at most.
    values: int
    # Completions of test questions; None if their number is unknown.
    evaluation: int | None
    # Completions to sample at a time, `sampler.rows` of them side by side.
    sampled_together: int
    pass_tokens: int
    # True if a backward pass holds one layer's graph at a time; None: if the whole graph is more
    # than `MAX_GRAPH_BYTES`.
    by_layer: bool | None
    # True if the run computes in bfloat16 over weights of a wider type.
    bf16: bool = False
    # Numbers of gradient and optimizer for each weight.
    kept_per_weight: int = 0
    # True if a frozen copy of the weights is kept.
    has_reference: bool = False
    # Checkpoints on disk at a time, and after the run has finished.
    most_checkpoints: int = 0
    last_checkpoints: int = 0
    # None for training.
    pool: KeptPool | None = None


@dataclass(frozen=True)
class Cost:
    """Cost of one run; bytes are those of one process."""

    # Completions from which gradients or errors are computed.
    rollouts: int
    # Fresh completions behind V, b* or a tracker, and greedy completions of remax; at most.
    values: int
    # Completions of test questions; None if their number is unknown.
    evaluation: int | None
    # Tokens of all these completions, at most.
    tokens: int
    # Bytes of the model.
    weights: int | None
    # Bytes of the model's frozen copy, 0 without one.
    reference: int | None
    # Bytes of gradients and optimizer.
    training: int | None
    # Bytes of the program itself on a CPU, 0 on a GPU.
    process: int
    # Bytes of the random signs behind a study's sketches.
    signs: int | None
    # Bytes of keys and values of the completions sampled side by side, 0 with vLLM.
    cache: int | None
    # Bytes of the most logits held at a time, and of what is computed from them.
    logits: int | None
    # Bytes of activations that one backward pass holds: of an update, or of a question's scores.
    graph: int | None
    # Bytes of a study's pool in the process that reads it, 0 on a GPU.
    pool: int | None
    # Bytes at most during the run: checkpoints, or the study's pool.
    disk: int | None
    # Bytes on disk that stay when the run has finished.
    disk_after: int | None

    @property
    def memory(self) -> int | None:
        """Bytes of all parts together at the peak.

        The peak is reached while completions are sampled or in a backward pass, or in the process
        that reads a study's pool.
        """
        if self.cache is None or self.graph is None:
            return None
        most = max(self.cache, self.graph)
        parts = [self.weights, self.reference, self.training, self.signs, self.logits]
        working = _sum([self.process, most, *parts])
        return None if working is None else max(working, self.process + (self.pool or 0))


def cost(work: Work) -> Cost:
    """Compute the cost of a run from its work.

    Bytes, for P parameters of E bytes: weights E P; a reference E P; with AdamW a gradient and two
    moments, so training E P (1 + 2), 16 P in all with the weights in float32. A checkpoint has E P
    (1 + 2). A question's file of a pool has 8 N^2 for inner products, 4 N R and 8 R' for sketches
    of R = feature_sketch and R' = gradient_sketch numbers (at most P), 4 N tokens, 17 N for
    rewards, lengths and ends. If a sketch is smaller than P, each parameter has a sign of one bit.
    AdamW's metric holds a gradient and the factors of every entry beside the weights, or on a CPU
    the six sums of group gradients of both halves; these and a second pool stay on disk.
    """
    size, entry, on_cpu = (
        model_size(work.model),
        NUMBER_BYTES[work.model.dtype],
        work.device == "cpu",
    )
    length, computed = work.sampler.max_completion_length, 2 if work.bf16 else entry
    graph = _graph(size, work.pass_tokens, computed, by_layer=bool(work.by_layer))
    if work.by_layer is None and graph is not None and graph > MAX_GRAPH_BYTES:
        graph = _graph(size, work.pass_tokens, computed, by_layer=True)
    if work.bf16:
        # Autocast holds a copy of the weights.
        graph = _sum([graph, _product(size.parameters, 2)])

    weights = _product(size.parameters, entry)
    training = _product(weights, work.kept_per_weight)
    disk, disk_after = (
        _product(training, count) for count in (work.most_checkpoints, work.last_checkpoints)
    )
    signs, pool = 0, work.pool
    if pool is not None:
        most = math.inf if size.parameters is None else size.parameters
        features, gradients = min(pool.feature_sketch, most), min(pool.gradient_sketch, most)
        row = 8 * pool.completions + 4 * features + 4 * length + 17
        disk = pool.questions * int(pool.completions * row + 8 * gradients + HEADER_BYTES)
        if pool.in_adams_metric:
            moment = max(entry, NUMBER_BYTES["float32"])
            disk = _sum([2 * disk, _product(size.parameters, 6 * moment)])
            weights = _product(size.parameters, entry + (6 if on_cpu else 2) * moment)
        disk_after = disk
        has_signs = most > min(pool.feature_sketch, pool.gradient_sketch)
        signs = _product(size.parameters and -(-size.parameters // 8), int(has_signs))
    return Cost(
        rollouts=work.rollouts,
        values=work.values,
        evaluation=work.evaluation,
        tokens=(work.rollouts + work.values + (work.evaluation or 0)) * length,
        weights=weights,
        reference=_product(weights, 1) if work.has_reference else 0,
        training=training,
        process=PROCESS_BYTES if on_cpu else 0,
        signs=signs,
        cache=_cache(work, size, computed),
        logits=_logits(work, size),
        graph=graph,
        pool=int(POOL_MEMORY_FACTOR * disk)
        if pool is not None and on_cpu and disk is not None
        else 0,
        disk=disk,
        disk_after=disk_after,
    )


def score_memory(
    model: ModelConfig, completions: int, max_completion_length: int
) -> tuple[int, int, int] | None:
    """Compute the bytes needed to score N completions of a question.

    Weights and prompts are not counted. The three numbers are for the whole graph, layer by layer,
    and for one completion layer by layer. None if the sizes are unknown.
    """
    size, length = model_size(model), max_completion_length
    layers, hidden, inner = size.layers, size.hidden, size.inner
    if layers is None or hidden is None or inner is None:
        return None
    shape = (NUMBER_BYTES[model.dtype], layers, hidden, inner)
    return (
        pass_bytes(completions * length, *shape, by_layer=False),
        pass_bytes(completions * length, *shape, by_layer=True),
        pass_bytes(length, *shape, by_layer=True),
    )


def sharded_memory(largest: Cost, processes: int) -> tuple[int, int]:
    """Return bytes of each FSDP2 process: its shards, and the whole weights while it samples.

    Weights, gradients and optimizer are sharded; weights are gathered to sample; a reference is
    never sharded. None of the three may be unknown.
    """
    weights, training, reference = largest.weights, largest.training, largest.reference
    assert weights is not None and training is not None and reference is not None
    return (weights + training) // processes, weights + reference


def total(costs: list[Cost]) -> Cost:
    """Add up the costs of runs that are executed one after another.

    Tokens add up. Memory is the maximum. Disk is the sum of what the runs keep and the largest
    temporary need.
    """
    names = ("rollouts", "values", "evaluation", "tokens", "disk_after")
    sums = {name: _sum([getattr(cost, name) for cost in costs]) for name in names}
    extra = [
        None if cost.disk is None or cost.disk_after is None else cost.disk - cost.disk_after
        for cost in costs
    ]
    numbers = [cost for cost in extra if cost is not None]
    disk = _sum([sums["disk_after"], max(numbers)]) if len(numbers) == len(extra) else None
    return replace(max(costs, key=lambda cost: cost.memory or 0), disk=disk, **sums)


def model_size(model: ModelConfig) -> ModelSize:
    """Return `model.size`, completed from the model's folder if there is one.

    Open sizes come from config.json, in the names of Llama and its relatives, and the number of
    parameters from the headers of the weight files, which store tied weights once. If each layer
    has its own size, the largest counts. A value that is neither a number nor such a list is
    unknown.
    """
    folder = model_folder(model.model_name_or_path)
    if not (folder / "config.json").is_file():
        return model.size
    from safetensors import safe_open

    parameters = 0
    for file in weight_files(folder):
        with safe_open(file, "numpy") as tensors:
            shapes = [tensors.get_slice(name).get_shape() for name in tensors.keys()]  # noqa: SIM118
            parameters += sum(map(math.prod, shapes))
    stored: Any = read_config_json(folder)
    sizes = {name: _largest(stored.get(key)) for name, key in SIZE_KEYS.items()}
    heads, hidden, width = sizes.pop("heads"), sizes["hidden"], sizes.pop("width")
    key_heads = sizes.pop("key_heads") or heads
    if width is None and hidden is not None and heads is not None:
        width = hidden // heads
    kv_width = None if key_heads is None or width is None else key_heads * width
    of_folder = ModelSize(parameters=parameters or None, kv_width=kv_width or None, **sizes)
    configured = {key: value for key, value in vars(model.size).items() if value is not None}
    return replace(of_folder, **configured)


def _largest(value: object) -> int | None:
    """Return a size of config.json, or the largest of a list with one size a layer, or None.

    >>> _largest(48), _largest([32, 48]), _largest([32, None]), _largest("48"), _largest(0)
    (48, 48, None, None, None)
    """
    entries = cast(list[object], value) if isinstance(value, list) else [value]
    sizes = [entry for entry in entries if isinstance(entry, int) and entry > 0]
    plain = len(sizes) == len(entries) and not any(isinstance(entry, bool) for entry in entries)
    return max(sizes) if sizes and plain else None


def _cache(work: Work, size: ModelSize, computed: int) -> int | None:
    """Return the bytes of keys and values of the completions sampled side by side.

    Prompts and room to grow are not counted.

    A token adds kv_width keys and as many values in each layer. Keys come from rotary embeddings
    in the weights' type; values have the type of the computation, of `computed` bytes.
    """
    sampler = work.sampler
    if sampler.rollout.name != "local":
        return 0
    if size.layers is None or size.kv_width is None:
        return None
    row = size.layers * size.kv_width * (NUMBER_BYTES[work.model.dtype] + computed)
    return min(sampler.rows, work.sampled_together) * row * sampler.max_completion_length


def _logits(work: Work, size: ModelSize) -> int | None:
    """Return the bytes of float32 logits, the larger of two needs.

    These are the logits of the next token of all rows, and one chunk of those behind
    log-probabilities with all that is computed from them.
    """
    if size.vocabulary is None:
        return None
    rows = min(work.sampler.rows, work.sampled_together)
    chunk = LOGIT_BYTES["cuda" if work.device.startswith("cuda") else "cpu"]
    all_logits = 4 * size.vocabulary * work.pass_tokens
    return max(4 * size.vocabulary * rows, int(LOGIT_MEMORY_FACTOR * min(chunk, all_logits)))


def _graph(size: ModelSize, tokens: int, entry: int, by_layer: bool = False) -> int | None:
    """Return the bytes of activations that a backward pass over so many tokens holds.

    They are counted as in `policy.memory.score_bytes`.

    Args:
        entry: bytes of a number in the computation.
        by_layer: hold the graph of one layer at a time, beside the inputs of all layers.
    """
    if size.layers is None or size.hidden is None or size.inner is None:
        return None
    layer = 16 * size.hidden + 4 * size.inner
    held = layer + size.layers * size.hidden if by_layer else size.layers * layer
    return entry * tokens * held


def _product(number: int | None, factor: int) -> int | None:
    return None if number is None else number * factor


def _sum(numbers: list[int | None]) -> int | None:
    values = [number for number in numbers if number is not None]
    return sum(values) if len(values) == len(numbers) else None
