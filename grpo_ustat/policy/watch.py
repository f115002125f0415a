"""Meter of the gradient noise scale for any PyTorch training loop, from gradient norms only.

    import grpo_ustat as gu

    meter = gu.watch(model, optimizer, rollouts=256, group_size=8)
    ...                       # the training loop, unchanged
    logger.log(meter.metrics())

The noise scale is the number of rollouts per step at which the squared error of the gradient equals
the squared length of the expected gradient.

After each backward pass, the meter takes the norm of the accumulated gradient. Before each
optimizer step, it turns these norms into two estimates: the squared length of the expected
gradient, and the size of the noise. `estimators.micro_batch_norms` derives them. The meter needs no
gradients of single completions, and by default it keeps no copy of a gradient. With several ranks,
it adds one all-gather of six numbers to each step. The host waits for the device only in `metrics`
and `summary`.

For each micro-batch, the meter reads sharded gradients once and other gradients twice. This cost
does not depend on the number of tokens, so its share of the time falls as micro-batches grow. For
SmolLM2-135M on a CPU core, the meter took these shares of the CPU time
(`scripts/benchmarks/speed.py meter` at commit ebbcb118):

- 1.8 % with micro-batches of 1024 tokens
- 1.1 % with micro-batches of 2048 tokens
- 0.8 % with micro-batches of 3072 tokens

The meter takes each call of the model with gradients as a micro-batch. The backward passes up to
the next call belong to it. If the loop calls only parts of the model, every backward pass counts as
a micro-batch. Gradients are read before clipping. Parameters without a gradient, tied weights and
gradient checkpointing need no settings.

The meter detects how ranks combine their gradients:

- `DistributedDataParallel`: the meter reads the gradient of each rank before the ranks average
  their gradients. One micro-batch per rank and step is therefore enough.
- FSDP2 (`fully_shard`), tensor parallelism, FSDP1: ranks add their gradients during the backward
  pass. The rows of all ranks therefore count as one micro-batch, and a step needs at least two.
- Otherwise, each rank keeps its own gradient until the optimizer step. The meter compares the
  micro-batches of each rank with each other.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.fsdp import FullyShardedDataParallel, ShardingStrategy
from torch.distributed.tensor import DTensor
from torch.nn.parallel import DistributedDataParallel
from torch.utils._pytree import tree_leaves

from grpo_ustat.config.schema import ConfigError
from grpo_ustat.estimators.intervals import Interval, in_words
from grpo_ustat.estimators.micro_batch_norms import Layout, norm_weights
from grpo_ustat.policy.step_norms import (
    DDP,
    NUMBERS,
    SEPARATE,
    SHARDED,
    SQ_NORM,
    NormEstimate,
    StepRows,
)
from grpo_ustat.records import Array

PREFIX = "grpo_ustat"
REENTRANT = (
    "the backward pass is visible only inside checkpointed layers; use use_reentrant=False, or "
    "pass the model that the loop calls"
)
NOT_REDUCED = (
    "ranks do not add their gradients after each micro-batch; do not use no_sync or "
    "set_requires_gradient_sync(False)"
)


def watch(
    model: nn.Module,
    optimizer: Any,
    rollouts: int,
    group_size: int | None = None,
    prompts_together: bool = False,
    copy_gradient: bool = False,
    data_ranks: int | None = None,
    scaler: torch.amp.GradScaler | None = None,
) -> Meter:
    """Attach a meter of the gradient noise scale to a training loop.

    Args:
        model: model that the loop calls. If the loop wraps it by DDP or FSDP, pass the wrapped
            model.
        optimizer: PyTorch optimizer of the model, or a list of optimizers. The meter measures the
            gradients of the parameters that they train.
        rollouts: number of rollouts per optimizer step, summed over ranks.
        group_size: rollouts per prompt, G. None if every row has its own prompt.
        prompts_together: True if the rows of a prompt are consecutive. A micro-batch then contains
            whole groups or a consecutive part of a group.
        copy_gradient: True to keep a copy of the accumulated gradient. With sharded gradients, the
            meter then knows the norm of each micro-batch's own gradient: estimates are more
            precise, and micro-batches may differ in size. It takes the memory of one more gradient,
            sharded like the others. Only sharded gradients use it.
        data_ranks: number of ranks with different rollouts; by default all ranks. Set it for
            tensor, context or sequence parallelism, where several ranks have the same rollouts.
        scaler: gradient scaler of fp16 training, so that the meter can undo the scaling.

    Raises:
        ConfigError: if a number is not valid, or if the meter cannot read the gradients.
    """
    return Meter(
        model, optimizer, rollouts, group_size, prompts_together, copy_gradient, data_ranks, scaler
    )


@dataclass
class _Norms:
    """Squared norms of the gradients in the current step, as tensors on the device."""

    # Squared norm of the accumulated gradient after each micro-batch.
    grown: list[Tensor] = field(default_factory=list)
    # Squared norm of each micro-batch's own gradient, if it is known.
    own: list[Tensor] = field(default_factory=list)
    # For each micro-batch: True if the ranks have summed its gradients.
    reduced: list[bool] = field(default_factory=list)
    # True if the gradient of a micro-batch came in several parts. `own` is then wrong, because the
    # squared norms of parts do not add up to the squared norm of their sum.
    split: bool = False
    # True if a parameter had a gradient after the last backward pass.
    any_gradient: bool = False


class Meter:
    """Meter of the gradient noise scale; see `watch`."""

    def __init__(
        self,
        model: nn.Module,
        optimizer: Any,
        rollouts: int,
        group_size: int | None,
        prompts_together: bool,
        copy_gradient: bool,
        data_ranks: int | None,
        scaler: torch.amp.GradScaler | None,
    ):
        self.copy_gradient, self.scaler = copy_gradient, scaler
        optimizers = [_torch_optimizer(each) for each in _several(optimizer)]
        self.parameters = _trained(optimizers)
        world = dist.get_world_size() if dist.is_initialized() else 1
        self.rows = StepRows(
            rollouts, group_size, prompts_together, _way(model, self.parameters), world,
            world if data_ranks is None else data_ranks,
        )  # fmt: skip
        self._weights = [_share(parameter, self.rows) for parameter in self.parameters]
        self._fsdp1 = [m for m in model.modules() if isinstance(m, FullyShardedDataParallel)]
        self._norms = _Norms()
        # Copy of the accumulated gradient, by index of the parameter.
        self._previous: dict[int, Tensor] = {}
        # Norm of each parameter's gradient in this backward pass, by index of the parameter.
        self._parts: dict[int, Tensor] = {}
        # Autograd's numbers of the backward passes at whose end `_end_of_backward` will be called.
        self._passes: set[int] = set()
        # True if the last backward pass seen was that of a checkpointed layer within another pass.
        self._nested = False
        # Number of calls of the model whose backward pass is still to come; True after any call.
        self._calls, self._is_called = 0, False
        self._coefficients: dict[tuple[Layout, bool], Tensor] = {}
        # Six numbers of each rank, one array [ranks, 6] per step. They stay on the device until
        # `estimate` moves them to `_records`.
        self._pending: list[Tensor] = []
        self._records: list[Array] = []
        self._interrupted, self._fault = 0, ""
        self._handles = [
            model.register_forward_pre_hook(self._before_call),
            model.register_forward_hook(self._after_call),
            *(each.register_step_pre_hook(self._before_step) for each in optimizers),
            *(self._watch_parameter(*item) for item in enumerate(self.parameters)),
        ]

    def close(self) -> None:
        """Detach the meter from model and optimizer; the estimates stay available."""
        for handle in self._handles:
            handle.remove()
        self._handles, self._previous = [], {}

    # Hooks, in the order of a step.

    def _watch_parameter(self, place: int, parameter: Tensor) -> Any:
        """Register a hook on a parameter that notes each backward pass.

        If gradients are not sharded, the hook also takes the norm of the pass's own gradient.
        """
        if self.rows.way == SHARDED:
            return parameter.register_post_accumulate_grad_hook(lambda _: self._in_backward())
        return parameter.register_hook(partial(self._own_gradient, place))

    @torch.no_grad()
    def _own_gradient(self, place: int, gradient: Tensor) -> None:
        """Take the norm of a gradient before autograd adds it to the accumulated gradient.

        Args:
            place: index of the parameter.
            gradient: gradient of this backward pass.
        """
        self._in_backward()
        # Reentrant checkpointing may call this hook several times for a tied weight.
        self._norms.split |= place in self._parts
        values = _values(gradient)
        self._parts[place] = torch.linalg.vector_norm(values, dtype=_norm_dtype([values]))

    def _before_call(self, *_: Any) -> None:
        """Discard the norms of a skipped step, recognised by gradients that were reset to None."""
        if torch.compiler.is_compiling() or not torch.is_grad_enabled():
            return
        if self._norms.any_gradient and all(p.grad is None for p in self.parameters):
            self._interrupted += 1
            self._begin_step()

    def _after_call(self, _module: nn.Module, _arguments: Any, output: Any) -> None:
        """Register hooks on the model's output, which note the start of the backward pass.

        They run before the nested backward pass of any checkpointed layer.
        """
        # A compiled model calls no such hooks. Every backward pass then counts as a micro-batch.
        if torch.compiler.is_compiling() or not torch.is_grad_enabled():
            return
        outputs = [x for x in tree_leaves(output) if isinstance(x, Tensor) and x.requires_grad]
        if not outputs:
            return
        self._calls, self._is_called = self._calls + 1, True
        for tensor in outputs:
            tensor.register_hook(lambda _: self._in_backward())

    def _in_backward(self) -> None:
        """Tell autograd to call `_end_of_backward` at the end of the current backward pass."""
        number = torch._C._current_graph_task_id()
        if number >= 0 and number not in self._passes and self._handles:
            self._passes.add(number)
            _after_backward(partial(self._end_of_backward, number))

    def _end_of_backward(self, number: int) -> None:
        """End the micro-batch, if this is not the nested backward pass of a checkpointed layer."""
        if torch._C._current_autograd_node() is not None:
            self._passes.discard(number)
            self._nested = True
        else:
            # DDP and FSDP finish their gradients in callbacks that may run after this one, so the
            # micro-batch ends in a callback that runs after theirs.
            _after_backward(self._end_of_micro_batch)

    @torch.no_grad()
    def _end_of_micro_batch(self) -> None:
        """Take the norms of the accumulated gradient and of the micro-batch's own gradient."""
        self._passes.clear()
        self._nested = False
        norms = self._norms
        norms.any_gradient = any(p.grad is not None for p in self.parameters)
        try:
            grown, own = self._sq_norm(_gradients(self.parameters)), self._own_sq_norm()
        except (ConfigError, RuntimeError) as error:
            # An exception here would block the other ranks, which wait for this rank's numbers in
            # the all-gather. The error is stored instead, and reported in `estimate`.
            self._fault = self._fault or str(error).splitlines()[0]
            grown, own = torch.tensor(math.nan), []
        if self._calls or not self._is_called or not norms.grown:
            norms.grown.append(grown)
            norms.reduced.append(self._is_reduced())
            norms.own += own
        else:
            norms.grown[-1], norms.reduced[-1] = grown, self._is_reduced()
            norms.split = True
        self._calls = max(0, self._calls - 1)

    def _is_reduced(self) -> bool:
        """Return True if the ranks have summed their sharded gradients of this micro-batch."""
        if self.rows.way != SHARDED:
            return True
        without_sync = any(getattr(m, "_sync_gradients", True) is False for m in self._fsdp1)
        return self._norms.any_gradient and not without_sync

    def _own_sq_norm(self) -> list[Tensor]:
        """Return a list with the squared norm of the micro-batch's own gradient; [] if unknown."""
        parts, self._parts = [*self._parts.values()], {}
        if self.copy_gradient and self.rows.way == SHARDED:
            gradients = _gradients(self.parameters)
            changes = {
                place: gradient - self._previous.get(place, 0.0)
                for place, gradient in gradients.items()
            }
            own = self._sq_norm(changes)
            self._previous = {place: gradient.clone() for place, gradient in gradients.items()}
            return [own]
        if self.rows.way == SHARDED:
            return []
        if not parts:
            return [torch.zeros(())]
        return [_stacked(parts, parts[0].device).square().sum()]

    def _sq_norm(self, gradients: dict[int, Tensor]) -> Tensor:
        """Return the squared norm of all gradients; of sharded gradients, this rank's part of it.

        Args:
            gradients: gradients by index of the parameter.
        """
        if not gradients:
            return torch.zeros(())
        # clip_grad_norm_ uses the same function; it reads all tensors in one kernel.
        values = [*gradients.values()]
        norms = torch._foreach_norm(  # pyright: ignore[reportPrivateImportUsage]
            values, 2, dtype=_norm_dtype(values)
        )
        squares = _stacked(norms, norms[0].device).square()
        weights = [self._weights[place] for place in gradients]
        if len({*weights}) == 1:
            return squares.sum() * weights[0]
        return (squares * torch.tensor(weights, dtype=squares.dtype, device=squares.device)).sum()

    @torch.no_grad()
    def _before_step(self, *_: Any) -> None:
        """Reduce the norms of the step to six numbers per rank, and gather those of all ranks."""
        norms = self._norms
        if not norms.grown:
            # Two harmless reasons are a first step without gradients that only creates the
            # optimizer's state, and the step of a second optimizer. But if the only backward pass
            # that was noticed is that of a checkpointed layer, its micro-batch was never ended.
            if self._nested:
                self._fault = REENTRANT
            return
        if not all(norms.reduced):
            self._fault = self._fault or NOT_REDUCED
        numbers = self._numbers_of(norms)
        if self.scaler is not None:
            numbers[SQ_NORM:] /= self.scaler.get_scale() ** 2
        if self.rows.world > 1:
            device = _device_of_group(numbers.device)
            gathered = torch.empty(self.rows.world * NUMBERS, dtype=numbers.dtype, device=device)
            dist.all_gather_into_tensor(gathered, numbers.to(device))
            numbers = gathered
        self._pending.append(numbers.reshape(-1, NUMBERS))
        self._begin_step()

    def _numbers_of(self, norms: _Norms) -> Tensor:
        """Return this rank's six numbers of a step; see the constants of `step_norms`."""
        device = next(
            (x.device for x in norms.grown if x.device.type != "cpu"), torch.device("cpu")
        )
        grown = _stacked(norms.grown, device)
        count, knows_own = len(grown), len(norms.own) == len(norms.grown) and not norms.split
        own = _stacked(norms.own, device) if knows_own else torch.zeros_like(grown)
        own_sum = own.sum() if knows_own else torch.full_like(grown[0], math.nan)
        layout = self.rows.layout(count)
        found = torch.full((3,), math.nan, dtype=grown.dtype, device=device)
        if layout.is_measurable:
            key = (layout, knows_own)
            if key not in self._coefficients:
                matrix = torch.from_numpy(norm_weights(*key))
                self._coefficients[key] = matrix.to(device, grown.dtype)
            found = self._coefficients[key] @ torch.cat([grown, own])
        fixed = torch.full_like(grown[0], float(count)), grown[-1], own_sum
        return torch.cat([torch.stack(fixed), found])

    def _begin_step(self) -> None:
        self._norms, self._previous, self._calls = _Norms(), {}, 0

    def estimate(self) -> NormEstimate:
        """Return estimates from the second half of the steps. The host waits for the device."""
        if self._pending:
            self._records += [*torch.stack(self._pending).double().cpu().numpy()]
            self._pending = []
        if self._fault:
            return NormEstimate({}, 0, self._fault)
        return self.rows.estimate(self._finite())

    def _finite(self) -> list[Array]:
        """Return the numbers of the steps with finite gradients."""
        return [step for step in self._records if np.isfinite(step[:, : SQ_NORM + 1]).all()]

    @property
    def skipped(self) -> int:
        """Number of steps that had no update or had gradients that were not finite."""
        return self._interrupted + len(self._records) - len(self._finite())

    def metrics(self) -> dict[str, float]:
        """Return the finite estimates as a dictionary for a logger.

        Each estimate has three keys: for example, `grpo_ustat/noise_scale` is the estimate, and
        `grpo_ustat/noise_scale_low` and `grpo_ustat/noise_scale_high` are the ends of its interval.
        `grpo_ustat/steps` and `grpo_ustat/skipped_steps` are the numbers of steps used and skipped.
        """
        estimate = self.estimate()
        numbers = {"steps": float(estimate.steps), "skipped_steps": float(self.skipped)}
        for name, interval in estimate.intervals.items():
            keys = (name, f"{name}_low", f"{name}_high")
            numbers |= dict(zip(keys, interval, strict=True))
        return {f"{PREFIX}/{name}": x for name, x in numbers.items() if math.isfinite(x)}

    def summary(self) -> list[str]:
        """Describe the estimates in lines of text, or say why there are none."""
        estimate = self.estimate()
        if estimate.problem:
            return [f"{PREFIX}: nothing was measured: {estimate.problem}."]
        lines = [
            f"{PREFIX}: {_noise_in_words(estimate.intervals, self.rows.rollouts)}; averaged over "
            f"{estimate.steps} steps."
        ]
        if estimate.only_bound:
            lines.append(
                f"The noise scale is a lower bound, and G* is unknown: {estimate.only_bound}."
            )
        elif estimate.no_gstar:
            lines.append(f"G* is unknown: {estimate.no_gstar}.")
        else:
            _, least, most = estimate.intervals["gstar"]
            end = f"at most {most:.1f}" if math.isfinite(most) else "has no known upper bound"
            lines.append(f"G* is at least {least:.1f} and {end}.")
        if self.skipped:
            lines.append(
                f"Steps that had no update, or gradients that were not finite: {self.skipped}."
            )
        return lines


def _noise_in_words(intervals: Mapping[str, Interval], rollouts: int) -> str:
    """Describe the noise scale and the share of the squared gradient norm that is noise."""
    scale = in_words(intervals["noise_scale"])
    share, low, high = (100 * x for x in intervals["noise_share"])
    noise = f"at least {low:.0f} %"
    if math.isfinite(share):
        noise = f"{share:.0f} % [{low:.0f} %, {high:.0f} %]"
    return (
        f"noise scale {scale}{' rollouts' * (scale != 'unknown')}; {noise} of the squared norm of "
        f"a gradient of {rollouts} rollouts is noise"
    )


def _after_backward(callback: Callable[[], None]) -> None:
    """Tell autograd to call a function at the end of the current backward pass."""
    torch.autograd.Variable._execution_engine.queue_callback(callback)


def _several(optimizer: Any) -> list[Any]:
    """Return one or several optimizers as a list."""
    if hasattr(optimizer, "step"):
        return [optimizer]
    return [*optimizer] if isinstance(optimizer, Iterable) else [optimizer]


def _torch_optimizer(optimizer: Any) -> torch.optim.Optimizer:
    """Return the PyTorch optimizer inside wrappers such as Accelerate's.

    Raises:
        ConfigError: if there is no PyTorch optimizer inside.
    """
    inner = optimizer
    while isinstance(getattr(inner, "optimizer", None), torch.optim.Optimizer):
        inner = inner.optimizer
    if not isinstance(inner, torch.optim.Optimizer) or not hasattr(
        inner, "_optimizer_step_pre_hooks"
    ):
        raise ConfigError(
            f"optimizer {type(optimizer).__name__}: the meter needs a torch.optim.Optimizer, which "
            "DeepSpeed and Megatron do not use; see gu.noise_scale_from_norms"
        )
    return inner


def _trained(optimizers: Iterable[torch.optim.Optimizer]) -> list[Tensor]:
    """Return the parameters that the optimizers train, without duplicates."""
    parameters = {
        id(parameter): parameter
        for optimizer in optimizers
        for group in optimizer.param_groups
        for parameter in group["params"]
        if parameter.requires_grad
    }
    if not parameters:
        raise ConfigError("the optimizer trains no parameter: pass the optimizer of the model")
    if any(hasattr(parameter, "ds_id") for parameter in parameters.values()):
        raise ConfigError("DeepSpeed ZeRO-3 keeps gradients out of reach: use FSDP2 or DDP")
    return [*parameters.values()]


def _way(model: nn.Module, parameters: Iterable[Tensor]) -> str:
    """Return the way in which ranks combine their gradients: DDP, SHARDED or SEPARATE."""
    modules = [*model.modules()]
    for module in modules:
        if isinstance(module, FullyShardedDataParallel):
            strategy = module.sharding_strategy
            if strategy not in (ShardingStrategy.FULL_SHARD, ShardingStrategy.SHARD_GRAD_OP):
                raise ConfigError(
                    f"FSDP with {strategy}: use FULL_SHARD, SHARD_GRAD_OP or FSDP2 (fully_shard)"
                )
            return SHARDED
    if any(isinstance(parameter, DTensor) for parameter in parameters):
        return SHARDED
    return DDP if any(isinstance(x, DistributedDataParallel) for x in modules) else SEPARATE


def _share(parameter: Tensor, rows: StepRows) -> float:
    """Return the weight of this rank's values of a parameter in a sum over ranks.

    If several ranks hold the same values, the weight is below 1, so that the sum counts every value
    once.
    """
    if rows.way != SHARDED or not isinstance(parameter, DTensor):
        # In FSDP1, each shard is on one rank only.
        return 1.0
    shards = 1
    for dimension, placement in enumerate(parameter.placements):
        if not placement.is_replicate():
            shards *= parameter.device_mesh.size(dimension)
    return shards / rows.world


def _gradients(parameters: Sequence[Tensor]) -> dict[int, Tensor]:
    """Return this rank's values of the accumulated gradients, by index of the parameter."""
    return {
        place: _values(parameter.grad)
        for place, parameter in enumerate(parameters)
        if parameter.grad is not None
    }


def _values(gradient: Tensor) -> Tensor:
    """Return the values of a gradient that this rank holds."""
    if isinstance(gradient, DTensor):
        if any(placement.is_partial() for placement in gradient.placements):
            raise ConfigError(
                f"gradients with placements {gradient.placements} are not summed over ranks yet: "
                "the meter cannot read them"
            )
        gradient = gradient.to_local()
    if gradient.is_sparse:
        return gradient.coalesce().values()
    return gradient


def _norm_dtype(values: Iterable[Tensor]) -> torch.dtype:
    """Return the dtype for norms: at least float32, because bfloat16 has only 3 decimal digits."""
    return torch.float64 if any(x.dtype == torch.float64 for x in values) else torch.float32


def _stacked(numbers: Sequence[Tensor], device: torch.device) -> Tensor:
    """Return scalar tensors from any devices as one vector on `device`."""
    return torch.stack([number.to(device, _wide(device)) for number in numbers])


def _wide(device: torch.device) -> torch.dtype:
    """Return the most precise floating-point type of a device."""
    return torch.float32 if device.type == "mps" else torch.float64


def _device_of_group(device: torch.device) -> torch.device:
    """Return a device whose tensors the backend of the process group can gather."""
    if dist.get_backend() == "nccl" and device.type != "cuda":
        return torch.device("cuda", torch.cuda.current_device())
    return torch.device("cpu") if dist.get_backend() == "gloo" else device
