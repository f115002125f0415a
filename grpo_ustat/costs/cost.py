"""Costs of planned runs in completions, tokens, memory and disk space.

The costs are computed from the configuration, without loading a model. Prompt tokens are not
counted, because counting them needs a tokenizer. Memory does not include activations. Numbers that
are not known are None.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
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
from grpo_ustat.policy.limits import pass_bytes

# Bytes per number, by data type.
NUMBER_BYTES = {"float64": 8, "float32": 4, "bfloat16": 2, "float16": 2}


@dataclass(frozen=True)
class Cost:
    """Cost of one run; bytes are for one process."""

    # Number of completions from which gradients or errors are computed.
    rollouts: int
    # Largest number of further completions for baselines: to estimate V and b*, and to
    # compute the greedy baseline of remax.
    values: int
    # Number of completions of test questions; None if unknown.
    evaluation: int | None
    # Largest total number of tokens in all these completions.
    tokens: int
    # Bytes of the weights and of the frozen reference copy.
    weights: int | None
    # Bytes of gradients and optimizer state.
    training: int | None
    # Bytes of the keys and values of the completions sampled in parallel; 0 with vLLM.
    cache: int | None
    # Largest number of bytes on disk during the run, for checkpoints or stored completions.
    disk: int | None
    # Bytes on disk after the run has finished.
    disk_after: int | None

    @property
    def memory(self) -> int | None:
        """Bytes of weights, gradients, optimizer state, keys and values."""
        return added((self.weights, self.training, self.cache))


@dataclass(frozen=True)
class Plan:
    """Settings and cost of a planned run, as they are shown."""

    # Settings that determine the cost, by the names that are shown. A value None is not shown.
    settings: Mapping[str, object]
    cost: Cost
    # Sentence that says how the batch of a step is divided.
    batch: str = ""
    notes: Sequence[str] = ()


def weight_bytes(model: ModelConfig) -> int | None:
    """Return the bytes of a model's weights."""
    return product(model_size(model).parameters, NUMBER_BYTES[model.dtype])


def cache_bytes(
    model: ModelConfig, sampler: SamplerOptions, together: int, *, bf16: bool = False
) -> int | None:
    """Return the bytes of the keys and values of the completions sampled in parallel.

    Prompts are not counted. Each token adds kv_width keys and kv_width values in each layer.

    Args:
        model: configuration of the model.
        sampler: options of the sampler.
        together: number of completions that one call of the sampler returns.
        bf16: True if the sampler computes in bfloat16, so that keys and values have 2 bytes.
    """
    size = model_size(model)
    if sampler.rollout.name != "local":
        return 0
    if size.layers is None or size.kv_width is None:
        return None
    number = 2 if bf16 else NUMBER_BYTES[model.dtype]
    row = 2 * size.layers * size.kv_width * number
    return min(sampler.rows, together) * row * sampler.max_completion_length


def score_bytes(model: ModelConfig, tokens: int) -> int | None:
    """Return the bytes needed, besides the weights, to score a completion layer by layer."""
    size = model_size(model)
    if size.layers is None or size.hidden is None or size.inner is None:
        return None
    shape = (NUMBER_BYTES[model.dtype], size.layers, size.hidden, size.inner)
    return pass_bytes(tokens, *shape, by_layer=True)


def total(costs: list[Cost]) -> Cost:
    """Return the total cost of runs that are executed one after another.

    Completions and tokens are added up. Memory is the maximum over the runs. Disk space is the sum
    of what all runs keep, plus the largest additional space that one run needs temporarily.
    """
    names = ("rollouts", "values", "evaluation", "tokens", "disk_after")
    sums: dict[str, Any] = {name: added(getattr(cost, name) for cost in costs) for name in names}
    extra = [(x.disk or 0) - (x.disk_after or 0) for x in costs]
    disk = added((sums["disk_after"], max(extra)))
    return replace(max(costs, key=lambda cost: cost.memory or 0), disk=disk, **sums)


def model_size(model: ModelConfig) -> ModelSize:
    """Return `model.size`, with missing values read from the model's folder if there is one.

    The sizes are read from config.json, under the keys of Llama-like models. If config.json lists a
    size for each layer, the largest is used. The number of parameters is read from the headers of
    the weight files, which store tied weights once.
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
    stored = cast(dict[str, Any], read_config_json(folder))
    layers, hidden, inner, heads, key_heads, width = (
        _largest(stored.get(key))
        for key in (
            "num_hidden_layers", "hidden_size", "intermediate_size", "num_attention_heads",
            "num_key_value_heads", "head_dim",
        )
    )  # fmt: skip
    if width is None and hidden is not None and heads is not None:
        width = hidden // heads
    kv_width = product(width, key_heads or heads or 0)
    of_folder = ModelSize(parameters or None, layers, kv_width or None, hidden, inner)
    configured = {key: value for key, value in vars(model.size).items() if value is not None}
    return replace(of_folder, **configured)


def _largest(value: object) -> int | None:
    """Return a size from config.json, or the largest of a list of sizes; None for other values.

    >>> _largest(48), _largest([32, 48]), _largest([32, None]), _largest("48"), _largest(0)
    (48, 48, None, None, None)
    """
    entries = cast(list[object], value) if isinstance(value, list) else [value]
    sizes = [entry for entry in entries if type(entry) is int and entry > 0]
    return max(sizes) if sizes and len(sizes) == len(entries) else None


def product(number: int | None, factor: int) -> int | None:
    """Multiply a number that may be unknown."""
    return None if number is None else number * factor


def added(numbers: Iterable[int | None]) -> int | None:
    """Add numbers; None if one is unknown."""
    values = list(numbers)
    known = [number for number in values if number is not None]
    return sum(known) if len(known) == len(values) else None
