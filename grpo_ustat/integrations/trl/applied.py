"""Sketch (random projection) of the gradient that TRL is about to clip and apply.

The module supports every way in which gradients can be distributed over ranks. Each rank sketches
only its part of the gradient. A sketch is linear, so the sum over ranks is the sketch of the full
gradient, and no rank needs to hold the full gradient.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch

from grpo_ustat.integrations.trl.sharding import WRAPPED
from grpo_ustat.policy.scores.sketch import Sketch

# Number of gradient entries that are sketched at once, in float64.
ENTRIES_AT_ONCE = 2**24
# Component that `torch.compile` adds to parameter names.
COMPILED = "_orig_mod"

Shard = tuple[str, int, torch.Tensor]
"""Name of a parameter, an index into its flattened gradient, and the entries from this index on."""

Parameters = list[tuple[str, torch.nn.Parameter]]


def add_applied(out_1R: torch.Tensor, trainer: Any, sketch: Sketch) -> None:
    """Add the sketch of this rank's part of the negative gradient to a sum of sketches.

    The gradient of the loss is negated, so that it points in the direction of higher reward, like
    the scores. All ranks must call this function.

    Args:
        out_1R: sum of sketches; updated in place.
        trainer: trainer between the last backward pass of an update and clipping.
        sketch: sketch whose parameter names do not contain the names of wrappers. Parameters
            that the sketch does not contain are left out.

    Raises:
        LookupError: a parameter of the sketch is not trained, or its gradient cannot be read.
    """
    scale, names = 1 / gradient_scale(trainer), sketch.signs.sizes.keys()
    if missing := names - {name for name, _ in _trained(trainer)}:
        raise LookupError(f"{min(missing)} was scored but is not trained")
    for name, start, flat in shards(trainer):
        if name not in names:
            continue
        for first in range(0, len(flat), ENTRIES_AT_ONCE):
            part = flat[first : first + ENTRIES_AT_ONCE].detach().to(out_1R.device, torch.float64)
            sketch.add(out_1R, name, start + first, -scale * part[None])


def shards(trainer: Any) -> Iterator[Shard]:
    """Yield this rank's part of the gradient of each trained parameter."""
    accelerator = trainer.accelerator
    rank, world = accelerator.process_index, accelerator.num_processes
    parameters = _trained(trainer)
    if is_deepspeed(trainer):
        yield from _deepspeed(parameters, rank, world)
    else:
        yield from _full_or_dtensor(parameters, rank, world)


def gradient_scale(trainer: Any) -> float:
    """Return the loss scale of float16 training by which the gradient is still multiplied."""
    accelerator = trainer.accelerator
    if is_deepspeed(trainer):
        optimizer = accelerator.deepspeed_engine_wrapped.engine.optimizer
        return float(getattr(optimizer, "loss_scale", None) or 1)
    scaler = getattr(accelerator, "scaler", None)
    return float(scaler.get_scale()) if scaler is not None and scaler.is_enabled() else 1.0


def is_deepspeed(trainer: Any) -> bool:
    """Return True if a DeepSpeed engine applies the gradient."""
    return getattr(trainer.accelerator.state, "deepspeed_plugin", None) is not None


def plain_name(name: str) -> str:
    """Return the name of a parameter without the wrappers around modules.

    >>> plain_name("_orig_mod.model.layers.0._checkpoint_wrapped_module.q.weight")
    'model.layers.0.q.weight'
    """
    return ".".join(part for part in name.split(".") if part not in (WRAPPED, COMPILED))


def _trained(trainer: Any) -> Parameters:
    """Return the trained parameters of a trainer's model, with plain names."""
    model = trainer.accelerator.unwrap_model(trainer.model)
    return [(plain_name(name), p) for name, p in model.named_parameters() if p.requires_grad]


def _full_or_dtensor(parameters: Parameters, rank: int, world: int) -> Iterator[Shard]:
    """Yield this rank's parts of the gradients with FSDP2, DDP or a single process.

    With DDP, all ranks have the same gradients, so only one rank yields each parameter.
    """
    from torch.distributed.tensor import DTensor

    for place, (name, parameter) in enumerate(parameters):
        gradient = parameter.grad
        if isinstance(gradient, DTensor):
            yield from _dtensor(name, gradient, place % world == rank)
        elif gradient is not None and place % world == rank:
            yield name, 0, gradient.flatten()


def _dtensor(name: str, gradient: Any, gathers: bool) -> Iterator[Shard]:
    """Yield this rank's part of a gradient that is sharded along its first axis.

    If several ranks hold replicas of the part, only the first of them yields it. A tensor that is
    sharded along another axis is gathered on all ranks, and yielded only if `gathers` is True.
    """
    from torch.distributed.tensor import Replicate, Shard
    from torch.distributed.tensor._utils import compute_local_shape_and_global_offset

    mesh, placements = gradient.device_mesh, gradient.placements
    if not all(isinstance(kind, Replicate) or kind == Shard(0) for kind in placements):
        full = gradient.full_tensor()
        if gathers:
            yield name, 0, full.flatten()
        return
    place = mesh.get_coordinate()
    first = all(
        not isinstance(kind, Replicate) or place[axis] == 0 for axis, kind in enumerate(placements)
    )
    local = gradient.to_local()
    if first and local.numel():
        _, offset = compute_local_shape_and_global_offset(gradient.shape, mesh, placements)
        row = gradient.numel() // gradient.shape[0] if gradient.dim() else 1
        yield name, (offset[0] if offset else 0) * row, local.flatten()


def _deepspeed(parameters: Parameters, rank: int, world: int) -> Iterator[Shard]:
    """Yield this rank's part of the gradient of each parameter with ZeRO-3.

    With other stages of ZeRO, the gradients are gathered one at a time, and one rank yields each
    gradient.
    """
    from deepspeed.utils import (  # pyright: ignore[reportMissingImports]
        safe_get_full_grad,
        safe_get_local_grad,
    )

    for place, (name, parameter) in enumerate(parameters):
        sharded: Any = getattr(parameter, "ds_tensor", None)
        if sharded is None:
            # All ranks must call `safe_get_full_grad`.
            gradient = safe_get_full_grad(parameter)
            if gradient is not None and place % world == rank:
                yield name, 0, gradient.flatten()
            continue
        part = safe_get_local_grad(parameter)
        size = parameter.ds_numel  # pyright: ignore[reportAttributeAccessIssue]
        start = rank * sharded.ds_numel
        # Entries from `size` on are padding.
        if part is not None and start < size:
            yield name, start, part.flatten()[: size - start]
