"""FSDP2: parameters, their gradients and the optimizer's state in shards, one on each rank.

The trained model exists twice. Gradients are formed through the sharded one, whose layers gather
their parameters as they run: collectives, which every rank enters equally often (`rounds`). All
else (sampling, evaluation, log-probabilities, scores, checkpoints) reads a whole copy on each rank,
with no collective, so there ranks may have unequal work. The copy's memory is given up while
gradients are formed (`updating`): a rank holds the shards and either whole weights or one layer's.

Sharding is torch's `fully_shard`, on a CPU as on GPUs; accelerate launches, and says which version
and which options, but shards nothing on a CPU itself.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import TYPE_CHECKING

import numpy as np
import torch
import torch.distributed as dist
from accelerate import Accelerator
from accelerate.utils import FullyShardedDataParallelPlugin, parse_flag_from_env
from torch.distributed.fsdp import CPUOffloadPolicy, FSDPModule, fully_shard
from torch.distributed.tensor import DTensor, distribute_tensor
from transformers.modeling_layers import GradientCheckpointingLayer

from grpo_ustat.checks import ConfigError
from grpo_ustat.policy.devices import out_of_memory
from grpo_ustat.policy.loading import Policy
from grpo_ustat.policy.logprobs import pack, positions
from grpo_ustat.policy.output_layer import Window, body, causal
from grpo_ustat.ranks import RefusedByRank, is_main
from grpo_ustat.records import Rollouts
from grpo_ustat.training.deepspeed import ZeroOptimizer
from grpo_ustat.training.plan import Result, plan

if TYPE_CHECKING:
    from grpo_ustat.training.setup import Run


def asked(accelerator: Accelerator) -> bool:
    """Whether this run was launched with FSDP2 (grpo_ustat/launch/accelerate/fsdp2.yaml).

    Raises:
        ConfigError: with options of it that would have no effect here.
    """
    if not parse_flag_from_env("ACCELERATE_USE_FSDP") or not dist.is_initialized():
        return False
    plugin = getattr(accelerator.state, "fsdp_plugin", None) or FullyShardedDataParallelPlugin()
    for name, value, wanted in (
        ("fsdp_version", plugin.fsdp_version, 2),
        ("fsdp_offload_params", isinstance(plugin.cpu_offload, CPUOffloadPolicy), False),
        ("fsdp_cpu_ram_efficient_loading", plugin.cpu_ram_efficient_loading, False),
        ("fsdp_activation_checkpointing", plugin.activation_checkpointing, False),
    ):
        if value != wanted:
            raise RefusedByRank(
                f"accelerate's {name}={value} is not supported: use {wanted}, as "
                "grpo_ustat/launch/accelerate/fsdp2.yaml does (gradient_checkpointing=true is ours)"
            )
    return True


def shard(policy: Policy, device: torch.device) -> Policy:
    """A copy of the policy whose parameters are shards, gathered layer by layer.

    Raises:
        ConfigError: the model has no layers that could be gathered one at a time.
    """
    inside = {
        id(p): torch.nn.Parameter(p.detach().cpu().clone(), requires_grad=p.requires_grad)
        for p in policy.model.parameters()
    }
    model = copy.deepcopy(policy.model, inside)  # moves to the device shard by shard
    layers = [x for x in model.modules() if isinstance(x, GradientCheckpointingLayer)]
    if not layers:
        raise RefusedByRank(
            f"FSDP2 finds no layers in {type(policy.model).__name__} to gather one at a time: "
            "use grpo_ustat/launch/accelerate/ddp.yaml"
        )
    mesh = dist.init_device_mesh(device.type, (dist.get_world_size(),))
    for module in (*layers, model):
        fully_shard(module, mesh=mesh)
    for module in model.modules():
        if isinstance(module, FSDPModule):
            module.set_gradient_divide_factor(1.0)  # ranks' gradients are summed, not averaged
            module.set_force_sum_reduction_for_comms(True)  # gloo knows no other reduction
    return replace(policy, model=model)


@contextmanager
def updating(run: Run) -> Iterator[None]:
    """While gradients are formed from shards, the whole copy gives up its memory; where nothing is
    sharded, nothing happens.

    On an error the copy stays empty: gathering it would wait for ranks that may not come.
    """
    if run.sharded is None:
        yield
        return
    for parameter in run.policy.model.parameters():
        parameter.data = parameter.data.new_empty(0)
    yield
    gather(run)


@torch.no_grad()
def gather(run: Run) -> None:
    """Fill the whole copy from the shards; on all ranks at once."""
    pairs = zip(run.policy.model.parameters(), run.sharded.model.parameters(), strict=True)
    for whole, part in pairs:
        whole.data = part.full_tensor()


@torch.no_grad()
def scatter(run: Run) -> None:
    """Fill the shards from the whole copy, which is the same on all ranks."""
    pairs = zip(run.policy.model.parameters(), run.sharded.model.parameters(), strict=True)
    for whole, part in pairs:
        part.copy_(_like(part, whole.detach()))


def rounds(run: Run, rollouts: Rollouts, index: np.ndarray) -> Iterator[tuple[Gathered, list]]:
    """Readers of this rank's completions with one part each, as many as the busiest rank has.

    A rank without work left gets empty parts: it takes part in the collectives and adds zero.
    """
    passes = plan(rollouts, index, run.passes.tokens, share=False)
    parts = [part for chosen in passes for part in chosen.parts]
    count = torch.tensor(len(parts), device=run.accelerator.device)
    dist.all_reduce(count, op=dist.ReduceOp.MAX)
    idle = [np.zeros(0, dtype=np.int64)] * (int(count) - len(parts))
    for part in parts + idle:
        yield Gathered(run.sharded, rollouts), [part]


def attempt_once(run: Run, work: Callable[[], Result]) -> Result:
    """What the work returns: with collectives inside, one rank cannot do it again alone.

    Raises:
        ConfigError: memory ran out.
    """
    try:
        return work()
    except RuntimeError as error:
        if not out_of_memory(error):
            raise
        raise ConfigError(
            f"out of memory in an update with micro_batch_tokens={run.passes.tokens}: under FSDP2 "
            "no rank can try again alone; start again with fewer"
        ) from error


class Gathered:
    """Prompts and completions read through the sharded model: one forward, one backward.

    The output layer's parameters stay gathered from the forward to the end of the backward pass,
    and what reached them in between is summed over ranks with the rest.

    Args:
        sharded: see `shard`.
        rollouts: prompts and completions.
    """

    def __init__(self, sharded: Policy, rollouts: Rollouts):
        self.model, self.rollouts = sharded.model, rollouts
        self.policy = replace(sharded, model=_WithoutHooks(sharded.model))
        self.precision = dict(  # without the cache, which would keep every gathered layer
            device_type=sharded.model.device.type,
            dtype=torch.bfloat16,
            enabled=sharded.bf16,
            cache_enabled=False,
        )

    def window(self, index: np.ndarray) -> Window:
        """Where these completions are predicted; with none of them, where one of this rank's is."""
        given = index if len(index) else np.zeros(1, dtype=np.int64)
        rows = pack(self.rollouts, given, self.policy.pad_token, self.policy.model.device)
        self.end = self._read(rows)[:, -rows.width - 1 : -1]
        self.leaf = self.end.detach().requires_grad_()
        targets_BT = rows.input_ids_BT[:, -rows.width :]
        return Window(self.leaf, targets_BT, rows.completion_mask_BT[:, -rows.width :])

    def backward(self) -> None:
        """Carry what reached the hidden states back, or zero: the collectives are the same."""
        for parameter in causal(self.model).get_output_embeddings().parameters():
            if parameter.requires_grad and parameter.grad is None:
                parameter.grad = torch.zeros_like(parameter)
        grad = self.leaf.grad
        self.end.backward(torch.zeros_like(self.end) if grad is None else grad)

    def _read(self, rows) -> torch.Tensor:
        """Last hidden states, through the root module, whose hooks gather the parameters."""
        seen = []
        below = body(causal(self.model))
        hook = below.register_forward_hook(lambda module, given, output: seen.append(output))
        try:
            with torch.autocast(**self.precision):
                self.model(
                    input_ids=rows.input_ids_BT,
                    attention_mask=rows.attention_mask_BT,
                    position_ids=positions(rows.attention_mask_BT),
                    logits_to_keep=1,
                    use_cache=False,
                )
        finally:
            hook.remove()
        self.output = type(seen[0])
        return seen[0].last_hidden_state


class _WithoutHooks:
    """A sharded model whose call starts no collective: its output layer is gathered already."""

    def __init__(self, model: torch.nn.Module):
        self._model = model

    def __call__(self, *args, **kwargs):
        return self._model.forward(*args, **kwargs)

    def __getattr__(self, name: str):
        return getattr(self._model, name)


def moments(
    policy: Policy, optimizer: torch.optim.Optimizer | ZeroOptimizer
) -> dict[str, torch.Tensor]:
    """The optimizer's whole state as `parameter/field`, on rank 0's CPU; on all ranks at once."""
    if isinstance(optimizer, ZeroOptimizer):
        return optimizer.moments(_names(policy))
    result = {}
    for name, parameter in _named(policy, optimizer).items():
        for field, value in optimizer.state.get(parameter, {}).items():
            value = whole(value)
            if is_main():
                result[f"{name}/{field}"] = value.cpu().contiguous()
    return result


def load_moments(
    policy: Policy,
    optimizer: torch.optim.Optimizer | ZeroOptimizer,
    stored: dict[str, torch.Tensor],
) -> None:
    """Put back what `moments` gave, whatever the number of ranks was and is."""
    if isinstance(optimizer, ZeroOptimizer):
        optimizer.load_moments(_names(policy), stored)
        return
    parameters = _named(policy, optimizer)
    for key, value in stored.items():
        name, _, field = key.rpartition("/")
        parameter = parameters[name]
        if value.ndim:
            value = _like(parameter, value)
        # fused AdamW counts its updates on the device too
        optimizer.state[parameter][field] = value.to(parameter.device)


def _named(policy: Policy, optimizer: torch.optim.Optimizer) -> dict[str, torch.nn.Parameter]:
    """The optimizer's parameters, shards or not, under the names of the whole copy's."""
    (group,) = optimizer.param_groups
    return dict(zip(_names(policy), group["params"], strict=True))


def _names(policy: Policy) -> list[str]:
    return [name for name, p in policy.model.named_parameters() if p.requires_grad]


def whole(value: torch.Tensor) -> torch.Tensor:
    """All of a tensor of which ranks may hold shards; on all ranks at once."""
    return value.full_tensor() if isinstance(value, DTensor) else value


def _like(parameter: torch.Tensor, value: torch.Tensor) -> torch.Tensor:
    """The value in the same shards as the parameter; every rank has all of it."""
    if not isinstance(parameter, DTensor):
        return value
    mesh, placements = parameter.device_mesh, parameter.placements
    return distribute_tensor(value.to(parameter.device), mesh, placements, src_data_rank=None)
