"""Gathering of the full weights of a sharded model: DeepSpeed ZeRO-3 and FSDP2.

Scores (gradients of log-probabilities) need full parameters with their original shapes and names.
All parameters are gathered before scoring and released afterwards.

The forward hooks of the frameworks gather and release one layer at a time, and all ranks must then
compute the same layer at the same time. The hooks are removed during scoring, so that each rank can
score its own groups at its own pace. A rank that fails does not delay the other ranks.

If the full weights do not fit in the memory of some rank, they are gathered layer by layer; see
`in_step`.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager, nullcontext
from typing import Any

import torch
from torch import nn

from grpo_ustat.config.schema import ConfigError
from grpo_ustat.integrations.trl.in_step import Gather, Gathered, LayersInStep, separate_layers
from grpo_ustat.integrations.trl.scoring import from_all_ranks
from grpo_ustat.policy.memory import out_of_memory

INSTEAD = "measure checkpoints with grpo-ustat mse model=CHECKPOINT"
NO_MEMORY = "out of memory for the full weights of the model"
# Name under which the wrapper of torch's activation checkpointing stores a module.
WRAPPED = "_checkpoint_wrapped_module"


def sharding_of(trainer: Any) -> str:
    """Return the kind of parameter sharding: "ZeRO-3", "FSDP2", or "" without sharding."""
    state = trainer.accelerator.state
    plugin = getattr(state, "deepspeed_plugin", None)
    if plugin is not None and plugin.zero_stage == 3:
        return "ZeRO-3"
    plugin = getattr(state, "fsdp_plugin", None)
    return "" if plugin is None else f"FSDP{plugin.fsdp_version}"


def check_sharding(trainer: Any) -> None:
    """Refuse FSDP1, offloaded parameters, and parallelism that splits layers or sequences."""
    state, sharding = trainer.accelerator.state, sharding_of(trainer)
    if sharding == "FSDP1":
        raise ConfigError(f"fsdp_version=1 is not supported: use fsdp_version=2, or {INSTEAD}")
    if sharding == "FSDP2" and _offloads(state.fsdp_plugin.cpu_offload):
        raise ConfigError(
            "fsdp_offload_params=True keeps parameters in the CPU's memory, and scores were not "
            f"tested with this: use fsdp_offload_params=False, or {INSTEAD}"
        )
    if sharding == "ZeRO-3":
        zero = state.deepspeed_plugin.deepspeed_config.get("zero_optimization", {})
        device = (zero.get("offload_param") or {}).get("device") or "none"
        if device != "none":
            raise ConfigError(
                f"offload_param.device={device} offloads parameters, and scores were not tested "
                f"with this: use offload_param.device=none, or {INSTEAD}"
            )
    parallelism = getattr(trainer.accelerator, "parallelism_config", None)
    for name in ("tp_size", "cp_size", "sp_size"):
        if (count := getattr(parallelism, name, 1) or 1) > 1:
            raise ConfigError(
                f"{name}={count} splits layers or sequences among processes, but scores need whole "
                f"layers and sequences: use {name}=1, or {INSTEAD}"
            )


def _offloads(policy: Any) -> bool:
    """Return True if accelerate's `cpu_offload` setting, a bool or a policy, offloads."""
    return policy is True or type(policy).__name__ == "CPUOffloadPolicy"


@contextmanager
def scored_weights(
    trainer: Any, by_layer: bool = False
) -> Iterator[tuple[Any, LayersInStep | None]]:
    """Gather the model's weights on this rank, with the names and shapes of an unsharded model.

    If the full weights fit in the memory of every rank, the context yields (model with full
    weights, None), and the ranks work independently within the block. Otherwise it yields (model,
    layers whose weights are gathered one by one), and the ranks work in rounds; see `in_step`. All
    ranks must enter and leave the block together. Weights must not be changed.

    Args:
        trainer: trainer with the model, which may be unsharded.
        by_layer: True to gather layer by layer even if the full weights fit.
    """
    sharding = sharding_of(trainer)
    with ExitStack() as stack:
        model, gather = SHARDED[sharding](trainer)
        sizes, gathered = gather(model, ())
        layers = None
        # Memory is checked before gathering: if a rank ran out of memory during it, the other ranks
        # would wait forever.
        if by_layer or (sharding and not _fit_on_all_ranks(sizes, model.device)):
            layers = LayersInStep(_layers(model, by_layer), gather)
            sizes, gathered = gather(model, layers.layers)
            largest = max((gather(layer, ())[0] for layer in layers.layers), key=sum)
            if not _fit_on_all_ranks([*sizes, *largest], model.device):
                raise ConfigError(f"{NO_MEMORY}, even layer by layer: {INSTEAD}")

        def enter() -> list[None]:
            """Gather the weights; return no items for the other ranks."""
            stack.enter_context(gathered)
            return []

        if sharding:
            from_all_ranks(enter)
        stack.enter_context(_no_hooks_of_frameworks(model))
        unwrapped = stack.enter_context(_unwrapped(model))
        if layers is not None:
            stack.enter_context(layers.in_place())
        yield unwrapped, layers


def _fit_on_all_ranks(sizes: Sequence[int], device: torch.device) -> bool:
    """Return True if every rank has enough memory for allocations of these sizes, in bytes."""

    def fits() -> bool:
        """Return True if this rank has enough memory."""
        try:
            _ = [torch.empty(size, dtype=torch.uint8, device=device) for size in sizes]
        except RuntimeError as error:
            if out_of_memory(error):
                return False
            raise
        return True

    return all(from_all_ranks(lambda: [fits()]))


def _layers(model: nn.Module, by_layer: bool) -> list[nn.Module]:
    """Return the layers of a model without wrappers; refuse a model without layers."""
    with _unwrapped(model) as inner:
        layers = separate_layers(inner)
    if layers:
        return layers
    reason = f"{type(inner).__name__} does not consist of layers with separate weights"
    if by_layer:
        raise ConfigError(f"by_layer=True, but {reason}: use by_layer=False")
    raise ConfigError(f"{NO_MEMORY}, and {reason}: {INSTEAD}")


def _unsharded(trainer: Any) -> tuple[Any, Gather]:
    return trainer.accelerator.unwrap_model(trainer.model), lambda *_: ([], nullcontext())


def _zero3(trainer: Any) -> tuple[Any, Gather]:
    """Return the model under ZeRO-3, and a function that gathers full weights."""
    import deepspeed  # pyright: ignore[reportMissingImports]

    def gather(module: nn.Module, without: Sequence[nn.Module]) -> Gathered:
        """Gather the full weights of a module except for some modules within it."""
        excluded = {id(p) for inner in without for p in inner.parameters()}
        parameters: list[Any] = [p for p in module.parameters() if id(p) not in excluded]
        sizes = [p.ds_numel * p.element_size() for p in parameters]
        return sizes, deepspeed.zero.GatheredParameters(parameters)

    return trainer.accelerator.unwrap_model(trainer.model_wrapped), gather


def _fsdp2(trainer: Any) -> tuple[Any, Gather]:
    """Return the model under FSDP2, and a function that gathers weights.

    FSDP2 gathers weights in the precision in which the model computes.
    """
    from torch.distributed.fsdp import FSDPModule

    model = trainer.model
    policy = trainer.accelerator.state.fsdp_plugin.mixed_precision_policy
    narrow = policy and policy.param_dtype
    units: list[Any] = [module for module in model.modules() if isinstance(module, FSDPModule)]
    # The innermost unit of a module comes last in `units`, so it replaces the outer units.
    unit_of = {module: unit for unit in units for module in unit.modules()}
    sizes_of: dict[nn.Module, dict[int, int]] = {unit: {} for unit in units}
    for module, unit in unit_of.items():
        for p in module.parameters(recurse=False):
            # The numel of a DTensor is the number of entries of the full tensor.
            sizes_of[unit][id(p)] = p.numel() * (narrow or p.dtype).itemsize

    @contextmanager
    def gathered(some: Sequence[Any]) -> Iterator[None]:
        """Unshard the weights of some units within the block; shard them again afterwards."""
        try:
            for unit in some:
                unit.unshard()
            yield
        finally:
            for unit in some:
                unit.reshard()

    def gather(module: nn.Module, without: Sequence[nn.Module]) -> Gathered:
        """Gather the full weights of a module except for some modules within it."""
        some = _units_within(module, without, units)
        sizes = [list(sizes_of[unit].values()) for unit in some]
        # FSDP2 receives the weights of a unit in one buffer and then copies them, so the largest
        # unit needs its memory twice.
        return [*sum(sizes, []), max(map(sum, sizes), default=0)], gathered(some)

    return model, gather


SHARDED = {"": _unsharded, "ZeRO-3": _zero3, "FSDP2": _fsdp2}


def _units_within(
    module: nn.Module, without: Sequence[nn.Module], units: Sequence[Any]
) -> list[Any]:
    """Return the FSDP units within a module, except units within the modules `without`."""
    within = set(module.modules()) - {inner for outer in without for inner in outer.modules()}
    return [unit for unit in units if _inner(unit) in within]


@contextmanager
def _no_hooks_of_frameworks(model: nn.Module) -> Iterator[None]:
    """Remove the forward hooks of FSDP and DeepSpeed within the block; keep all other hooks."""
    kept = []
    for module in model.modules():
        for table in ("_forward_pre_hooks", "_forward_hooks"):
            hooks = getattr(module, table)
            if any(map(_is_of_framework, hooks.values())):
                kept.append((module, table, hooks))
                others = [(key, h) for key, h in hooks.items() if not _is_of_framework(h)]
                setattr(module, table, OrderedDict(others))
    try:
        yield
    finally:
        for module, table, hooks in kept:
            setattr(module, table, hooks)


def _is_of_framework(hook: Callable[..., Any]) -> bool:
    return str(hook.__module__).startswith(("torch.distributed", "deepspeed"))


@contextmanager
def _unwrapped(model: nn.Module) -> Iterator[nn.Module]:
    """Remove the wrappers of activation checkpointing within the block.

    Yields the model with the modules and parameter names that it has without wrappers.
    """
    wrapped = [
        (parent, name, child)
        for parent in list(model.modules())
        for name, child in parent._modules.items()
        if name != WRAPPED and child is not None and _inner(child) is not child
    ]
    try:
        for parent, name, child in wrapped:
            parent._modules[name] = _inner(child)
        yield _inner(model)
    finally:
        for parent, name, child in wrapped:
            parent._modules[name] = child


def _inner(module: Any) -> nn.Module:
    """Return the module inside a wrapper."""
    return module._modules.get(WRAPPED, module)


def narrow_loss(trainer: Any, model: nn.Module) -> torch.dtype | None:
    """Return the precision of a trainer's loss if it is lower than the precision of some weight.

    Return None if no trainable weight is more precise than the loss.
    """
    accelerator = trainer.accelerator
    dtype = {"bf16": torch.bfloat16, "fp16": torch.float16}.get(accelerator.mixed_precision)
    # A DeepSpeed engine keeps weights in the precision of the loss.
    if dtype is None or getattr(accelerator.state, "deepspeed_plugin", None) is not None:
        return None
    wide = any(p.requires_grad and p.dtype.itemsize > dtype.itemsize for p in model.parameters())
    return dtype if wide else None


def precision_of(model: nn.Module) -> str:
    """Describe the precision of a model's weights."""
    weights = {p.dtype for p in model.parameters() if p.is_floating_point()}
    return " and ".join(sorted(str(dtype).removeprefix("torch.") for dtype in weights))
