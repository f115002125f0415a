"""Costs of planned runs in completions, tokens, memory and disk space.

The costs are computed from the configuration, without loading a model. Prompt tokens are not
counted, because counting them needs a tokenizer. Numbers that are not known are None.
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
# Key of a model's config.json for each size of the model.
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
# Bytes of memory of a Python process with PyTorch, transformers and the tasks. It is not counted
# for a GPU, because it is main memory.
PROCESS_BYTES = 580_000_000
# Memory of the process that reads a study's stored completions, relative to the size of their
# files.
POOL_MEMORY_FACTOR = 2.5
# Memory for logits, log-probabilities and derivatives, relative to the size of the logits.
LOGIT_MEMORY_FACTOR = 4.5
# Largest size in bytes of a computation graph that is kept as a whole, half the memory of a GPU.
# With a larger graph, gradients are computed layer by layer.
MAX_GRAPH_BYTES = 32 * 2**30


@dataclass(frozen=True)
class KeptPool:
    """Completions that a study stores, together with their gradients, called the pool.

    Gradients are stored as sketches: shorter vectors that preserve norms and inner products
    approximately.
    """

    questions: int
    # Number of completions per question, N.
    completions: int
    # Largest number of entries in the sketch of a completion's gradient.
    feature_sketch: int
    # Largest number of entries in the sketch of a question's gradient.
    gradient_sketch: int


@dataclass(frozen=True)
class Work:
    """Sampling, gradients, updates and storage of a planned run, from which its cost follows."""

    model: ModelConfig
    sampler: SamplerOptions
    # Configured torch device.
    device: str
    # Number of completions from which gradients or errors are computed.
    rollouts: int
    # Largest number of further completions from which baselines are estimated.
    values: int
    # Number of completions of test questions; None if unknown.
    evaluation: int | None
    # Number of completions that one call of the sampler returns. It samples at most `sampler.rows`
    # of them in parallel.
    sampled_together: int
    # Number of tokens in a backward pass.
    pass_tokens: int
    # True if a backward pass keeps the graph of one layer at a time. None if it does so only when
    # the whole graph exceeds `MAX_GRAPH_BYTES`.
    by_layer: bool | None
    # True if the run computes in bfloat16 and stores its weights in a wider type.
    bf16: bool = False
    # Number of values that gradient and optimizer state store for each weight.
    kept_per_weight: int = 0
    # True if a frozen copy of the weights is kept.
    has_reference: bool = False
    # Largest number of checkpoints on disk during the run.
    most_checkpoints: int = 0
    # Number of checkpoints on disk after the run.
    last_checkpoints: int = 0
    # Stored completions of a study; None for training.
    pool: KeptPool | None = None


@dataclass(frozen=True)
class Cost:
    """Cost of one run; bytes are for one process."""

    # Number of completions from which gradients or errors are computed.
    rollouts: int
    # Largest number of further completions for baselines: to estimate V and b*, to start the
    # trackers of SPO, and to compute the greedy baseline of remax.
    values: int
    # Number of completions of test questions; None if unknown.
    evaluation: int | None
    # Largest total number of tokens in all these completions.
    tokens: int
    # Bytes of the model.
    weights: int | None
    # Bytes of the frozen copy of the model; 0 without a copy.
    reference: int | None
    # Bytes of gradients and optimizer state.
    training: int | None
    # Bytes of the program itself on a CPU; 0 on a GPU.
    process: int
    # Bytes of the random signs from which a study computes sketches of gradients.
    signs: int | None
    # Bytes of the keys and values of the completions sampled in parallel; 0 with vLLM.
    cache: int | None
    # Largest number of bytes of logits and of the values computed from them.
    logits: int | None
    # Bytes of activations in one backward pass of training or of a study.
    graph: int | None
    # Bytes of a study's stored completions in the process that reads them; 0 on a GPU.
    pool: int | None
    # Largest number of bytes on disk during the run, for checkpoints or stored completions.
    disk: int | None
    # Bytes on disk after the run has finished.
    disk_after: int | None

    @property
    def memory(self) -> int | None:
        """Peak memory in bytes; None if a part is unknown.

        The peak is reached during sampling, in a backward pass, or in the process that reads a
        study's stored completions.
        """
        if self.cache is None or self.graph is None:
            return None
        most = max(self.cache, self.graph)
        parts = [self.weights, self.reference, self.training, self.signs, self.logits]
        working = _sum([self.process, most, *parts])
        return None if working is None else max(working, self.process + (self.pool or 0))


def cost(work: Work) -> Cost:
    """Compute the cost of a run from its work.

    For a model of P parameters with E bytes each:

    - The weights take E P bytes, and a frozen reference copy takes the same.
    - With AdamW, the gradient and two moments take 3 E P bytes. With float32 weights (E = 4), this
      makes 16 P bytes in total.
    - A checkpoint takes 3 E P bytes on disk.

    A study stores a file for each question, with N completions. It contains

    - 8 N^2 bytes of inner products,
    - 17 N bytes of rewards, lengths and end-of-sequence flags,
    - 4 N bytes of tokens for each token position,
    - 4 N R + 8 R' bytes of sketches, with R = feature_sketch and R' = gradient_sketch entries, but
      at most P. If a sketch has fewer than P entries, each parameter has a random sign of one bit,
      which is kept in memory.
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
    """Compute the memory needed for the gradients of the N completions of a question.

    Weights and prompts are not counted.

    Args:
        model: configuration of the model.
        completions: number of completions, N.
        max_completion_length: largest length of a completion in tokens.

    Returns:
        Bytes if the whole computation graph is kept, bytes if the gradients are computed layer by
        layer, and bytes for a single completion layer by layer. None if the model's sizes are
        unknown.
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
    """Return the bytes of the shards, and of the full weights, in each of several FSDP2 processes.

    Weights, gradients and optimizer state are divided into shards. For sampling, every process
    gathers the full weights. A reference model is never divided.

    Args:
        largest: cost of the run, in which the bytes of weights, training and reference are known.
        processes: number of processes.
    """
    weights, training, reference = largest.weights, largest.training, largest.reference
    assert weights is not None and training is not None and reference is not None
    return (weights + training) // processes, weights + reference


def total(costs: list[Cost]) -> Cost:
    """Return the total cost of runs that are executed one after another.

    Completions and tokens are added up. Memory is the maximum over the runs. Disk space is the sum
    of what all runs keep, plus the largest additional space that one run needs temporarily.
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
    """Return `model.size`, with missing values read from the model's folder if there is one.

    The sizes are read from config.json, under the keys of Llama-like models. If config.json lists a
    size for each layer, the largest is used. A value that is neither a number nor a list of numbers
    counts as unknown. The number of parameters is read from the headers of the weight files, which
    store tied weights once.
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
    """Return a size from config.json, or the largest of a list of sizes; None for other values.

    >>> _largest(48), _largest([32, 48]), _largest([32, None]), _largest("48"), _largest(0)
    (48, 48, None, None, None)
    """
    entries = cast(list[object], value) if isinstance(value, list) else [value]
    sizes = [entry for entry in entries if isinstance(entry, int) and entry > 0]
    plain = len(sizes) == len(entries) and not any(isinstance(entry, bool) for entry in entries)
    return max(sizes) if sizes and plain else None


def _cache(work: Work, size: ModelSize, computed: int) -> int | None:
    """Return the bytes of the keys and values of the completions sampled in parallel.

    Prompts and spare space are not counted. Each token adds kv_width keys and kv_width values in
    each layer. Keys have the data type of the weights, because they pass through rotary embeddings.
    Values have the data type of the computation, with `computed` bytes per number.
    """
    sampler = work.sampler
    if sampler.rollout.name != "local":
        return 0
    if size.layers is None or size.kv_width is None:
        return None
    row = size.layers * size.kv_width * (NUMBER_BYTES[work.model.dtype] + computed)
    return min(sampler.rows, work.sampled_together) * row * sampler.max_completion_length


def _logits(work: Work, size: ModelSize) -> int | None:
    """Return the bytes of float32 logits, the larger of the needs of sampling and of training.

    Sampling needs the next-token logits of all completions. Training and studies compute
    log-probabilities from chunks of logits; they need one chunk and the values computed from it.
    """
    if size.vocabulary is None:
        return None
    rows = min(work.sampler.rows, work.sampled_together)
    chunk = LOGIT_BYTES["cuda" if work.device.startswith("cuda") else "cpu"]
    all_logits = 4 * size.vocabulary * work.pass_tokens
    return max(4 * size.vocabulary * rows, int(LOGIT_MEMORY_FACTOR * min(chunk, all_logits)))


def _graph(size: ModelSize, tokens: int, entry: int, by_layer: bool = False) -> int | None:
    """Return the bytes of activations in a backward pass.

    Args:
        size: sizes of the model.
        tokens: number of tokens in the pass.
        entry: bytes per number in the computation.
        by_layer: True if the pass keeps the inputs of all layers, but the graph of only one layer
            at a time.
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
