"""Meter of the gradient noise scale for any PyTorch training loop, from gradient norms only.

    import grpo_ustat as gu

    meter = gu.watch(model, optimizer, rollouts=256, group_size=8)
    for part in micro_batches:
        loss(part).backward()
        meter.after_backward()
    meter.before_step()  # before clipping
    optimizer.step()
    logger.log(meter.metrics())

The noise scale is the number of rollouts per step at which the squared error of the gradient equals
the squared length of the expected gradient.

After each micro-batch, the meter takes the norm of the accumulated gradient. From the norms of a
step it derives two estimates: the squared length of the expected gradient, and the size of the
noise; see `estimators.micro_batch_norms`. The meter needs no gradients of single completions and no
copy of a gradient. It reads the gradient once per micro-batch and once more in `before_step`, so
its share of the time falls as micro-batches grow. With several ranks, it adds one all-gather of a
few numbers to each step. The host waits for the device only in `estimate`, `metrics` and `summary`.

Ranks combine their gradients in one of two ways:

- FSDP2 (`fully_shard`), or `DistributedDataParallel` that averages after every micro-batch: the
  rows of all ranks count as one micro-batch.
- `DistributedDataParallel` with `no_sync` until the last micro-batch of a step: the gradients of
  the ranks before this micro-batch are compared with the average after it.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor
from torch.nn.parallel import DistributedDataParallel

from grpo_ustat.config.schema import ConfigError
from grpo_ustat.estimators.intervals import MIN_UNITS, UNDETERMINED, Interval, in_words
from grpo_ustat.estimators.micro_batch_norms import (
    law_of_norms,
    signal_of_increments,
    signal_of_ranks,
)
from grpo_ustat.estimators.scaling import GRAD_SQ, noise_share
from grpo_ustat.records import Array

PREFIX = "grpo_ustat"
# The estimates use the second half of the steps, but at least the last 8.
MIN_STEPS = 8
# Squared norms that differ by less than this relative amount count as equal.
EQUAL = 1e-5
# Numbers of micro-batches are padded to a multiple of this, so that ranks with different numbers
# can gather them.
PADDING = 16
CHANGED = (
    "the gradients changed between the last after_backward and before_step: call after_backward "
    "once after each micro-batch's backward pass, and before_step before gradients are unscaled or "
    "clipped"
)
NO_GRADIENTS = (
    "a micro-batch left no gradients in the optimizer's parameters: pass the model's optimizer; "
    "with FSDP2, do not use set_requires_gradient_sync(False)"
)


def watch(
    model: nn.Module,
    optimizer: Any,
    rollouts: int,
    group_size: int,
    prompts_together: bool = False,
    scaler: torch.amp.GradScaler | None = None,
) -> Meter:
    """Return a meter of the gradient noise scale, which the training loop calls.

    The loop calls `after_backward` after the backward pass of each micro-batch, and `before_step`
    before gradients are clipped and the optimizer makes its step. Where it leaves out an update or
    begins a step again, it calls `discard`.

    Args:
        model: model that the loop calls. If the loop wraps it by DDP, pass the wrapped model.
        optimizer: PyTorch optimizer of the model, or a list of optimizers. The meter measures the
            gradients of the parameters that they hold.
        rollouts: number of rollouts per optimizer step, summed over ranks.
        group_size: rollouts per prompt, G; 1 if every row has its own prompt.
        prompts_together: True if every micro-batch contains whole groups. Otherwise the noise scale
            is a lower bound. It must be False if rows are shuffled, as in TRL's trainers; use
            `integrations.trl.GradientNoiseCallback` there.
        scaler: gradient scaler of fp16 training, so that the meter can undo the scaling.

    Raises:
        ConfigError: if a number is not valid, or if the meter cannot read the gradients.
    """
    return Meter(model, optimizer, rollouts, group_size, prompts_together, scaler)


@dataclass(frozen=True)
class NormEstimate:
    """Estimates from the recent steps."""

    # Intervals by name. `noise_scale` is the noise scale in rollouts at the group size in use.
    # `grad_sq` is the squared length of the expected gradient. `noise_share` is the share of the
    # squared gradient norm that is noise.
    intervals: dict[str, Interval]
    # Number of steps from which the estimates were computed.
    steps: int
    # Reason why nothing could be measured; empty if the measurement succeeded.
    problem: str = ""
    # Reason why the noise scale is only bounded from below; empty if it is estimated.
    only_bound: str = ""


@dataclass(frozen=True)
class _Step:
    """A step's micro-batches of R ranks; K is the largest number of micro-batches of a rank."""

    # Squared norm of the accumulated gradient after each micro-batch, NaN after a rank's last one.
    norms_RK: Array
    # Number of rows in each micro-batch, NaN if the loop does not say it.
    rows_RK: Array
    # Squared norm in `before_step`, and the number of micro-batches of each rank.
    last_R: Array
    count_R: np.ndarray

    @property
    def is_finite(self) -> bool:
        """True if the gradients before the optimizer's step are finite."""
        return bool(np.isfinite(self.last_R).all())


class Meter:
    """Meter of the gradient noise scale; see `watch`."""

    def __init__(
        self,
        model: nn.Module,
        optimizer: Any,
        rollouts: int,
        group_size: int,
        prompts_together: bool,
        scaler: torch.amp.GradScaler | None,
    ):
        if rollouts < 1 or group_size < 1 or rollouts % group_size:
            raise ConfigError(
                f"rollouts={rollouts}, group_size={group_size}: use a group size that divides the "
                "number of rollouts per optimizer step"
            )
        self.rollouts, self.group_size, self.scaler = rollouts, group_size, scaler
        self.together = prompts_together or group_size == 1
        several = optimizer if isinstance(optimizer, list | tuple) else [optimizer]
        self._optimizers = [_torch_optimizer(each) for each in several]
        self.world = dist.get_world_size() if dist.is_initialized() else 1
        self.sharded = _is_sharded(model, [*self._parameters()], self.world)
        # Norms and rows of the micro-batches of this step.
        self._norms: list[Tensor] = []
        self._rows: list[float] = []
        # Numbers of each step, which stay on the device until `estimate` reads them.
        self._pending: list[Tensor] = []
        self._steps: list[_Step] = []
        self._discarded, self._fault = 0, ""

    def after_backward(self, rows: int | None = None) -> None:
        """Note the gradient after the backward pass of a micro-batch.

        Args:
            rows: number of rollouts in this rank's micro-batch. None if all micro-batches of a step
                have the same number.
        """
        if all(p.grad is None for p in self._parameters()):
            self._fault = NO_GRADIENTS
        self._norms.append(self._sq_norm())
        self._rows.append(math.nan if rows is None else float(rows))

    @torch.no_grad()
    def before_step(self) -> None:
        """End the step: gather the norms of all ranks. Call it before gradients are clipped."""
        if not self._norms:
            # The step of a second optimizer, or one that only creates the optimizer's state.
            return
        count, scale = len(self._norms), 1.0
        if self.scaler is not None:
            scale = self.scaler.get_scale()
        norms = [self._sq_norm(), *self._norms]
        device = next((x.device for x in norms if x.device.type != "cpu"), norms[0].device)
        dtype = torch.float32 if device.type == "mps" else torch.float64
        empty = [math.nan] * (-count % PADDING)
        numbers = torch.cat([
            torch.tensor([float(count)], dtype=dtype).to(device),
            torch.stack([x.to(device, dtype) for x in norms]) / scale**2,
            torch.tensor([*empty, *self._rows, *empty], dtype=dtype).to(device),
        ])  # fmt: skip
        if self.world > 1:
            place = _device_of_group(device)
            gathered = torch.empty(self.world * len(numbers), dtype=dtype, device=place)
            dist.all_gather_into_tensor(gathered, numbers.to(place))
            numbers = gathered
        self._pending.append(numbers.reshape(self.world, -1))
        self._norms, self._rows = [], []

    def discard(self) -> None:
        """Forget the micro-batches of this step, if its update is left out or begins again."""
        self._discarded += bool(self._norms)
        self._norms, self._rows = [], []

    def _parameters(self) -> Iterator[Tensor]:
        """Yield the parameters that the optimizers hold now."""
        for optimizer in self._optimizers:
            for group in optimizer.param_groups:
                yield from group["params"]

    @torch.no_grad()
    def _sq_norm(self) -> Tensor:
        """Return the squared norm of the gradients; of sharded ones, of this rank's part."""
        values = [_values(p.grad) for p in self._parameters() if p.grad is not None]
        if not values:
            return torch.zeros(())
        # clip_grad_norm_ uses the same function; it reads all tensors in one kernel.
        wide = torch.float64 if any(x.dtype == torch.float64 for x in values) else torch.float32
        norms = torch._foreach_norm(  # pyright: ignore[reportPrivateImportUsage]
            values, 2, dtype=wide
        )
        dtype = torch.float32 if norms[0].device.type == "mps" else torch.float64
        return torch.stack([x.to(norms[0].device, dtype) for x in norms]).square().sum()

    def estimate(self) -> NormEstimate:
        """Return estimates from the second half of the steps. The host waits for the device."""
        self._read()
        if self._fault:
            return NormEstimate({}, 0, self._fault)
        finite = [step for step in self._steps if step.is_finite]
        if len(finite) < MIN_UNITS:
            words = f"{len(finite)} steps so far have finite gradients"
            return NormEstimate({}, 0, f"{words}, but at least {MIN_UNITS} are needed")
        if any(not _equal(step.last_R, self._ends(step)) for step in finite):
            return NormEstimate({}, 0, CHANGED)
        alike = self._alike(finite)
        recent = alike[-max(MIN_STEPS, len(alike) - len(alike) // 2) :]
        values_2S = np.array([self._signal_and_noise(step) for step in recent]).T
        if len(recent) < MIN_UNITS or np.isnan(values_2S).any():
            return NormEstimate({}, 0, self._why_nothing(finite, len(recent)))
        signal_S, noise_S = values_2S
        law = law_of_norms(signal_S, noise_S, self.rollouts, self.group_size)
        # The law holds at any group size, because it has the whole noise in C2.
        intervals = {"noise_scale": law.noise_scale(2), "grad_sq": law.linear(GRAD_SQ)}
        only_bound = self._only_bound(recent)
        if only_bound:
            low = intervals["noise_scale"].low
            intervals = {
                "noise_scale": Interval(math.nan, low, math.inf), "grad_sq": UNDETERMINED
            }  # fmt: skip
        intervals["noise_share"] = noise_share(intervals["noise_scale"], self.rollouts)
        return NormEstimate(intervals, len(recent), "", only_bound)

    def _read(self) -> None:
        """Move the numbers of the pending steps from the device to `_steps`."""
        if not self._pending:
            return
        sizes = [x.numel() for x in self._pending]
        flat = torch.cat([x.flatten().to(self._pending[0].device) for x in self._pending])
        for numbers in flat.double().cpu().split(sizes):
            self._steps.append(_step(numbers.reshape(self.world, -1).numpy()))
        self._pending = []

    def _ends(self, step: _Step) -> Array:
        """Return the squared norm after each rank's last micro-batch."""
        return np.take_along_axis(step.norms_RK, step.count_R[:, None] - 1, axis=1)[:, 0]

    def _alike(self, steps: Sequence[_Step]) -> list[_Step]:
        """Return the steps with as many rows as `rollouts`, or else as many micro-batches as most.

        A step with another number is not a step of `rollouts` rollouts.
        """
        if all(np.isfinite(step.rows_RK).any() for step in steps):
            return [step for step in steps if np.nansum(step.rows_RK) == self.rollouts]
        counts = [tuple(step.count_R) for step in steps]
        usual = Counter(counts).most_common(1)[0][0]
        return [step for step, count in zip(steps, counts, strict=True) if count == usual]

    def _signal_and_noise(self, step: _Step) -> tuple[float, float]:
        """Return signal and noise of a step; NaN if they cannot be measured."""
        if np.ptp(step.count_R) or step.count_R[0] < 2:
            return math.nan, math.nan
        rows_RK = np.where(np.isnan(step.rows_RK), 1.0, step.rows_RK)
        shares_K, norms_RK = rows_RK.sum(axis=0) / rows_RK.sum(), step.norms_RK
        if self.sharded or _equal(norms_RK, norms_RK[0]):
            norms_K = norms_RK.sum(axis=0) if self.sharded else norms_RK[0]
            signal = signal_of_increments(norms_K, shares_K)
            return signal, norms_K[-1] - signal
        # The ranks averaged their gradients only after the last micro-batch.
        signal = signal_of_ranks(norms_RK[0, -1], norms_RK[:, -2], 1 - shares_K[-1])
        return signal, norms_RK[0, -1] - signal

    def _why_nothing(self, steps: Sequence[_Step], usable: int) -> str:
        """Return the reason why the noise of the steps cannot be measured."""
        last = steps[-1]
        if last.count_R.min() < 2:
            where = " per rank" * (self.world > 1)
            return (
                f"a step has {last.count_R.min()} micro-batch{where}, so there is nothing to "
                "compare: use at least two micro-batches per step"
            )
        if np.ptp(last.count_R):
            return "ranks have different numbers of micro-batches in a step"
        return (
            f"{usable} steps have {self.rollouts} rollouts, but at least {MIN_UNITS} are needed: "
            "check rollouts and the rows of after_backward"
        )

    def _only_bound(self, steps: Sequence[_Step]) -> str:
        """Return the reason why the noise scale is only a lower bound, or an empty text."""
        if not self.together:
            return (
                "micro-batches may share prompts, so the noise from drawing prompts is not visible;"
                " if every micro-batch contains whole groups, use prompts_together=True"
            )
        for step in steps:
            rows_RK = step.rows_RK
            if np.isnan(rows_RK).all():
                rows_RK = np.array([self.rollouts / step.count_R.sum()])
            if (rows_RK[np.isfinite(rows_RK)] % self.group_size).any():
                return (
                    f"a micro-batch of {rows_RK.flat[0]:g} rows does not contain whole groups of "
                    f"{self.group_size}"
                )
        return ""

    @property
    def skipped(self) -> int:
        """Number of steps that were discarded or had gradients that were not finite."""
        self._read()
        return self._discarded + sum(not step.is_finite for step in self._steps)

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
            f"{PREFIX}: {_noise_in_words(estimate.intervals, self.rollouts)}; averaged over "
            f"{estimate.steps} steps."
        ]
        if estimate.only_bound:
            lines.append(f"The noise scale is a lower bound: {estimate.only_bound}.")
        if self.skipped:
            lines.append(
                f"Steps that were discarded, or had gradients that were not finite: {self.skipped}."
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


def _step(table_RN: Array) -> _Step:
    """Read a step's numbers of R ranks; see `Meter.before_step`."""
    width, count_R = (table_RN.shape[1] - 2) // 2, table_RN[:, 0].astype(int)
    norms_RK, rows_RK = (table_RN[:, 2:][:, start:][:, : count_R.max()] for start in (0, width))
    return _Step(norms_RK, rows_RK, table_RN[:, 1], count_R)


def _equal(left: Array, right: Any) -> bool:
    return bool(np.allclose(left, right, rtol=EQUAL, atol=0))


def _torch_optimizer(optimizer: Any) -> torch.optim.Optimizer:
    """Return the PyTorch optimizer inside wrappers such as Accelerate's.

    Raises:
        ConfigError: if there is no PyTorch optimizer inside.
    """
    inner = optimizer
    while isinstance(getattr(inner, "optimizer", None), torch.optim.Optimizer):
        inner = inner.optimizer
    if not isinstance(inner, torch.optim.Optimizer):
        raise ConfigError(
            f"optimizer {type(optimizer).__name__}: the meter needs a torch.optim.Optimizer, which "
            "DeepSpeed and Megatron do not use; see gu.noise_scale_from_norms"
        )
    return inner


def _is_sharded(model: nn.Module, parameters: Sequence[Tensor], world: int) -> bool:
    """Return True for FSDP2 on several ranks, and False for DDP or one process.

    Raises:
        ConfigError: if ranks combine their gradients in another way.
    """
    modules = [*model.modules()]
    if any(hasattr(parameter, "ds_id") for parameter in parameters):
        raise ConfigError("DeepSpeed ZeRO-3 keeps gradients out of reach: use FSDP2 or DDP")
    if world == 1 or any(isinstance(module, DistributedDataParallel) for module in modules):
        return False
    over_all_ranks = all(
        isinstance(x, DTensor) and x.device_mesh.shape == (world,) and x.placements[0].is_shard()
        for x in parameters
    )
    if over_all_ranks and any(isinstance(module, FSDPModule) for module in modules):
        return True
    raise ConfigError(
        f"{world} ranks: the meter reads the gradients of DistributedDataParallel, or of FSDP2 "
        "(fully_shard) with one shard per rank: pass the wrapped model, which the loop calls"
    )


def _values(gradient: Tensor) -> Tensor:
    """Return the values of a gradient that this rank holds."""
    if isinstance(gradient, DTensor):
        gradient = gradient.to_local()
    return gradient.coalesce().values() if gradient.is_sparse else gradient


def _device_of_group(device: torch.device) -> torch.device:
    """Return a device whose tensors the backend of the process group can gather."""
    if dist.get_backend() == "nccl" and device.type != "cuda":
        return torch.device("cuda", torch.cuda.current_device())
    return torch.device("cpu") if dist.get_backend() == "gloo" else device
