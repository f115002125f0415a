"""Costs of runs in completions, tokens, memory and disk, computed from the planned work.

No model is loaded. Prompt tokens are not counted, because counting needs a tokenizer. Unknown
numbers are None.
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

# Bytes per number, by data type.
NUMBER_BYTES = {"float64": 8, "float32": 4, "bfloat16": 2, "float16": 2}
# Keys of config.json, by the names of the sizes in this module.
SIZE_KEYS = {
    "layers": "num_hidden_layers",
    "vocabulary": "vocab_size",
    "hidden": "hidden_size",
    "inner": "intermediate_size",
    "heads": "num_attention_heads",
    "key_heads": "num_key_value_heads",
    "width": "head_dim",
}
# Approximate bytes of a safetensors file in addition to its arrays.
HEADER_BYTES = 1000
# Bytes of memory of a Python process with PyTorch, transformers and tasks; not counted on a GPU.
PROCESS_BYTES = 580_000_000
# Memory of the process that reads a pool, relative to the size of the pool's files.
POOL_MEMORY_FACTOR = 2.5
# Memory of log-probabilities and derivatives, relative to the size of the logits.
LOGIT_MEMORY_FACTOR = 4.5
# Largest number of bytes of a graph that is scored at once, half the memory of a GPU. A larger
# graph is scored layer by layer.
MAX_GRAPH_BYTES = 32 * 2**30


@dataclass(frozen=True)
class KeptPool:
    """Scored completions that a study keeps."""

    questions: int
    # Number of completions per question, N.
    completions: int
    # Largest number of entries of each of the two sketches.
    feature_sketch: int
    gradient_sketch: int
    # True if completions are scored again in the metric of AdamW's step.
    in_adams_metric: bool


@dataclass(frozen=True)
class Work:
    """Sampling, scoring, updates and storage of a planned run."""

    model: ModelConfig
    sampler: SamplerOptions
    # Configured torch device.
    device: str
    # Number of completions from which gradients or errors are computed.
    rollouts: int
    # Largest number of fresh completions from which baselines are estimated.
    values: int
    # Number of completions of test questions; None if unknown.
    evaluation: int | None
    # Number of completions per call of the sampler, which generates `sampler.rows` of them at once.
    sampled_together: int
    # Number of tokens in a backward pass.
    pass_tokens: int
    # True if a backward pass holds the graph of one layer at a time. None if this depends on
    # whether the whole graph exceeds `MAX_GRAPH_BYTES`.
    by_layer: bool | None
    # True if the run computes in bfloat16 with weights of a wider type.
    bf16: bool = False
    # Number of values per weight that the gradient and the optimizer state store.
    kept_per_weight: int = 0
    # True if a frozen copy of the weights is kept.
    has_reference: bool = False
    # Largest number of checkpoints on disk during the run, and number of checkpoints after the run.
    most_checkpoints: int = 0
    last_checkpoints: int = 0
    # Pool of a study; None for training.
    pool: KeptPool | None = None


@dataclass(frozen=True)
class Cost:
    """Cost of one run; bytes are for one process."""

    # Number of completions from which gradients or errors are computed.
    rollouts: int
    # Largest number of completions for estimates of V and b*, for SPO's trackers, and for the
    # greedy baseline of remax.
    values: int
    # Number of completions of test questions; None if unknown.
    evaluation: int | None
    # Largest total number of tokens in these completions.
    tokens: int
    # Bytes of the model.
    weights: int | None
    # Bytes of the frozen copy of the model; 0 without a copy.
    reference: int | None
    # Bytes of gradients and optimizer state.
    training: int | None
    # Bytes of the program itself on a CPU; 0 on a GPU.
    process: int
    # Bytes of the random signs for the sketches of a study.
    signs: int | None
    # Bytes of the KV cache of the completions sampled at once; 0 with vLLM.
    cache: int | None
    # Largest number of bytes of logits and of the values computed from them.
    logits: int | None
    # Bytes of activations in one backward pass of an update or of scoring a question.
    graph: int | None
    # Bytes of a study's pool in the process that reads it; 0 on a GPU.
    pool: int | None
    # Largest number of bytes on disk during the run, for checkpoints or a study's pool.
    disk: int | None
    # Bytes on disk after the run has finished.
    disk_after: int | None

    @property
    def memory(self) -> int | None:
        """Peak memory in bytes; None if a part is unknown.

        The peak occurs during sampling, in a backward pass, or in the process that reads a study's
        pool.
        """
        if self.cache is None or self.graph is None:
            return None
        most = max(self.cache, self.graph)
        parts = [self.weights, self.reference, self.training, self.signs, self.logits]
        working = _sum([self.process, most, *parts])
        return None if working is None else max(working, self.process + (self.pool or 0))


def cost(work: Work) -> Cost:
    """Compute the cost of a run from its work.

    The weights of P parameters take E P bytes, with E bytes per parameter. A frozen reference copy
    takes the same. With AdamW, a gradient and two moments take E P (1 + 2) bytes, which gives 16 P
    bytes in total for float32 weights. A checkpoint takes E P (1 + 2) bytes. The pool file of a
    question takes 8 N^2 bytes for inner products and 17 N bytes for rewards, lengths and
    end-of-sequence flags. Tokens take 4 N bytes for each token position. The two sketches take
    4 N R and 8 R' bytes, with R = feature_sketch and R' = gradient_sketch entries, at most P. If a
    sketch has fewer than P entries, each parameter has a random sign, stored in one bit. In AdamW's
    metric, scoring needs memory for a gradient and a factor per parameter, in addition to the
    weights. On a CPU, it instead needs memory for three sums of group gradients for each half of
    the questions. These six sums and a second pool stay on disk.
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
        # Autocast keeps a copy of the weights.
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

    Weights and prompts are not counted. The three numbers are for scoring with the whole graph, for
    scoring layer by layer, and for scoring one completion layer by layer. The result is None if the
    sizes are unknown.
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
    """Return the bytes of the shards and of the full weights in each FSDP2 process.

    Weights, gradients and optimizer state are sharded. The full weights are gathered for sampling.
    A reference is never sharded. The bytes of weights, training and reference must be known.
    """
    weights, training, reference = largest.weights, largest.training, largest.reference
    assert weights is not None and training is not None and reference is not None
    return (weights + training) // processes, weights + reference


def total(costs: list[Cost]) -> Cost:
    """Add up the costs of runs that are executed one after another.

    Completions and tokens are added, and memory is the maximum over the runs. Disk space is the sum
    over the files that runs keep, plus the largest temporary need of a run.
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
    """Return `model.size`, with unset values taken from the model's folder if there is one.

    Unset sizes come from config.json, with the key names of Llama-like models. The number of
    parameters comes from the headers of the weight files, which store tied weights once. If each
    layer has its own size, the largest is used. A value that is neither a number nor a list of
    numbers is treated as unknown.
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
    """Return a size in config.json, or the largest in a list of sizes; None for any other value.

    >>> _largest(48), _largest([32, 48]), _largest([32, None]), _largest("48"), _largest(0)
    (48, 48, None, None, None)
    """
    entries = cast(list[object], value) if isinstance(value, list) else [value]
    sizes = [entry for entry in entries if isinstance(entry, int) and entry > 0]
    plain = len(sizes) == len(entries) and not any(isinstance(entry, bool) for entry in entries)
    return max(sizes) if sizes and plain else None


def _cache(work: Work, size: ModelSize, computed: int) -> int | None:
    """Return the bytes of the KV cache of the completions sampled at once.

    Prompts and reserved space are not counted. Each token adds kv_width keys and kv_width values in
    each layer. Keys pass through rotary embeddings and have the data type of the weights. Values
    have the data type of the computation, with `computed` bytes per number.
    """
    sampler = work.sampler
    if sampler.rollout.name != "local":
        return 0
    if size.layers is None or size.kv_width is None:
        return None
    row = size.layers * size.kv_width * (NUMBER_BYTES[work.model.dtype] + computed)
    return min(sampler.rows, work.sampled_together) * row * sampler.max_completion_length


def _logits(work: Work, size: ModelSize) -> int | None:
    """Return the larger of two memory needs for float32 logits, in bytes.

    The first need is for the next-token logits of all rows. The second is for one chunk of the
    logits that give log-probabilities, and for the values computed from this chunk.
    """
    if size.vocabulary is None:
        return None
    rows = min(work.sampler.rows, work.sampled_together)
    chunk = LOGIT_BYTES["cuda" if work.device.startswith("cuda") else "cpu"]
    all_logits = 4 * size.vocabulary * work.pass_tokens
    return max(4 * size.vocabulary * rows, int(LOGIT_MEMORY_FACTOR * min(chunk, all_logits)))


def _graph(size: ModelSize, tokens: int, entry: int, by_layer: bool = False) -> int | None:
    """Return the bytes of activations in a backward pass over a number of tokens.

    The count is the same as in `policy.memory.score_bytes`.

    Args:
        size: sizes of the model.
        tokens: number of tokens.
        entry: bytes per number in the computation.
        by_layer: True if only the graph of one layer is held at a time, plus the inputs of all
            layers.
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
