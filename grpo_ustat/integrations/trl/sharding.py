"""Whole weights of a model that training shards: DeepSpeed ZeRO-3, FSDP2 and FSDP1.

Scores need all weights of a model, and every parameter as one of its own shape and name. They are
gathered before scoring and dropped after it, and within the frameworks' hooks are off: these gather
and drop a layer at a time, so that ranks would have to score in step. Without them no rank waits
for another between the gathering and its end, and one that fails holds up none.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager
from typing import Any

import torch
from torch import nn

from grpo_ustat.config.schema import ConfigError
from grpo_ustat.integrations.trl.scoring import from_all_ranks
from grpo_ustat.policy.loading import out_of_memory

INSTEAD = "measure checkpoints with grpo-ustat mse model=CHECKPOINT"
NO_MEMORY = "out of memory for the whole weights of the model"
WRAPPED = ("_fsdp_wrapped_module", "_checkpoint_wrapped_module")  # FSDP1's, torch's checkpointing's


def sharding_of(trainer: Any) -> str:
    """What shards the parameters in a trainer's run: "ZeRO-3", "FSDP1", "FSDP2"; "": nothing."""
    state = trainer.accelerator.state
    plugin = getattr(state, "deepspeed_plugin", None)
    if plugin is not None and plugin.zero_stage == 3:
        return "ZeRO-3"
    plugin = getattr(state, "fsdp_plugin", None)
    return "" if plugin is None else f"FSDP{plugin.fsdp_version}"


def check_sharding(trainer: Any) -> None:
    """Refuse what keeps parameters elsewhere, or splits them in another way.

    Raises:
        ConfigError: parameters are offloaded, or layers or texts are split among processes.
    """
    state, sharding = trainer.accelerator.state, sharding_of(trainer)
    if sharding.startswith("FSDP") and _offloads(state.fsdp_plugin.cpu_offload):
        raise ConfigError(
            "fsdp_offload_params=True keeps parameters in the CPU's memory, where scores were not "
            f"tried: use fsdp_offload_params=False, or {INSTEAD}"
        )
    if sharding == "ZeRO-3":
        zero = state.deepspeed_plugin.deepspeed_config.get("zero_optimization", {})
        device = (zero.get("offload_param") or {}).get("device") or "none"
        if device != "none":
            raise ConfigError(
                f"offload_param.device={device} keeps parameters there, from where scores were not "
                f"tried: use offload_param.device=none, or {INSTEAD}"
            )
    parallelism = getattr(trainer.accelerator, "parallelism_config", None)
    for name in ("tp_size", "cp_size", "sp_size"):
        if (count := getattr(parallelism, name, 1) or 1) > 1:
            raise ConfigError(
                f"{name}={count} splits layers or texts among processes, and scores need whole "
                f"ones: use {name}=1, or {INSTEAD}"
            )


def _offloads(policy: Any) -> bool:
    """Whether accelerate's `cpu_offload` moves parameters: FSDP1's record or FSDP2's policy."""
    if isinstance(policy, bool):
        return policy
    return getattr(policy, "offload_params", type(policy).__name__ == "CPUOffloadPolicy")


@contextmanager
def whole_weights(trainer: Any) -> Iterator[Any]:
    """The model with all its weights on this rank, by the names and shapes of a single process.

    All ranks enter and leave together; within, each does what it likes. Where nothing shards the
    model it is handed out as it is. Weights must not be changed within.

    Raises:
        ConfigError: a rank has no memory for them, or cannot gather them; on all ranks.
    """
    sharding = sharding_of(trainer)
    with ExitStack() as stack:
        if sharding:
            model, sizes, gathered = GATHERED[sharding](trainer)
            # Before any begins: one whose memory ran out within would leave the others waiting.
            _on_all_ranks(lambda: [_allocated(size, model.device) for size in sizes])
            _on_all_ranks(lambda: stack.enter_context(gathered))
        else:
            model = trainer.accelerator.unwrap_model(trainer.model)
        stack.enter_context(_no_hooks_of_frameworks(model))
        yield stack.enter_context(_unwrapped(model))


def _allocated(size: int, device: torch.device) -> torch.Tensor:
    return torch.empty(size, dtype=torch.uint8, device=device)


def _on_all_ranks(act: Callable[[], Any]) -> None:
    """Do something on every rank.

    Raises:
        ConfigError: it failed on some rank; on all.
    """

    def attempt() -> list[Any]:
        """Act; lack of memory is said as such."""
        try:
            act()
        except RuntimeError as error:
            if out_of_memory(error):
                raise ConfigError(f"{NO_MEMORY}: {INSTEAD}") from None
            raise
        return []

    from_all_ranks(attempt)


# a model, the bytes of all that gathering it allocates, and within what its weights are whole
Gathering = tuple[Any, list[int], AbstractContextManager[None]]


def _zero3(trainer: Any) -> Gathering:
    import deepspeed  # pyright: ignore[reportMissingImports]

    model = trainer.accelerator.unwrap_model(trainer.model_wrapped)
    parameters = list(model.parameters())
    sizes = [p.ds_numel * p.element_size() for p in parameters]
    return model, sizes, deepspeed.zero.GatheredParameters(parameters)


def _fsdp2(trainer: Any) -> Gathering:
    """Weights in the precision in which the units compute."""
    from torch.distributed.fsdp import FSDPModule

    model = trainer.model
    policy = trainer.accelerator.state.fsdp_plugin.mixed_precision_policy
    narrow = policy and policy.param_dtype
    units: list[Any] = [one for one in model.modules() if isinstance(one, FSDPModule)]

    def sizes_of(module: nn.Module) -> list[int]:  # numel of a DTensor is that of the whole
        return [p.numel() * (narrow or p.dtype).itemsize for p in module.parameters()]

    # a unit's weights come in one buffer, from which they are copied
    buffer = max(sum(sizes_of(unit)) for unit in units[1:] or units)

    @contextmanager
    def gathered() -> Iterator[None]:
        """Every unit's weights whole; sharded again afterwards."""
        try:
            for unit in units:
                unit.unshard()
            yield
        finally:
            for unit in units:
                unit.reshard()

    return model, [*sizes_of(model), buffer], gathered()


def _fsdp1(trainer: Any) -> Gathering:
    """Weights in the precision in which the optimizer keeps them."""
    from torch.distributed.fsdp import FullyShardedDataParallel

    model = trainer.model
    units: list[Any] = FullyShardedDataParallel.fsdp_modules(model)
    flat = [unit._handle.flat_param for unit in units if unit._handle is not None]
    sizes = [p._unpadded_unsharded_size.numel() * p.element_size() for p in flat]
    whole = FullyShardedDataParallel.summon_full_params(model, recurse=True, writeback=False)
    return model, sizes, whole


GATHERED = {"ZeRO-3": _zero3, "FSDP2": _fsdp2, "FSDP1": _fsdp1}


@contextmanager
def _no_hooks_of_frameworks(model: nn.Module) -> Iterator[None]:
    """Within, forward hooks of FSDP and DeepSpeed are off; PEFT's and TRL's stay."""
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
    """The model within FSDP1's and activation checkpointing's wrappers, in which children are
    called, and parameters named, as if they had none.
    """

    def inner(module: Any) -> nn.Module:
        while within := [name for name in WRAPPED if name in module._modules]:
            module = module._modules[within[0]]
        return module

    wrapped = [
        (parent, name, child)
        for parent in list(model.modules())
        for name, child in parent._modules.items()
        if name not in WRAPPED and child is not None and inner(child) is not child
    ]
    try:
        for parent, name, child in wrapped:
            parent._modules[name] = inner(child)
        yield inner(model)
    finally:
        for parent, name, child in wrapped:
            parent._modules[name] = child


def precision_of(model: nn.Module) -> str:
    """The precision of a model's weights, and of its buffers where these are narrower, in words."""
    weights = {p.dtype for p in model.parameters() if p.is_floating_point()}
    least = min((dtype.itemsize for dtype in weights), default=0)
    buffers = {b.dtype for b in model.buffers() if b.is_floating_point()}
    narrow = {dtype for dtype in buffers if dtype.itemsize < least}
    words, within = (
        " and ".join(sorted(str(dtype).removeprefix("torch.") for dtype in dtypes))
        for dtypes in (weights, narrow)
    )
    return f"{words} (buffers in {within})" if narrow else words
