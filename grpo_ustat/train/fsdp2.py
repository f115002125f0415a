"""FSDP2: each rank keeps one part (shard) of the parameters, gradients and optimizer state.

The trained model exists twice. The sharded model computes gradients. Each of its layers gathers its
parameters from all ranks when it runs. All ranks must take part in this, so every rank must run the
layers equally often (`rounds`). Sampling, evaluation, log-probabilities, scores and checkpoints
instead use the full copy of the model that each rank has. They need no communication, so ranks can
have unequal amounts of work.

The memory of the full copy is freed while gradients are computed (`release_full_copy`). In addition
to its shards, a rank therefore stores at any time either the full copy or one gathered layer. With
bf16=true, autocast computes linear layers in bfloat16, so the full copy stores their weights in
bfloat16. Work that needs the exact weights, such as checkpoints, gathers them for its duration
(`exact_full_copy`).

Sharding uses torch's `fully_shard`, on CPUs and GPUs. Accelerate's own sharding is not used,
because it does not work on a CPU. `launch.fsdp2=true` or accelerate's configuration turns it on.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from accelerate import Accelerator
from accelerate.utils import FullyShardedDataParallelPlugin, parse_flag_from_env
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import CPUOffloadPolicy, FSDPModule, fully_shard
from torch.distributed.tensor import DTensor, distribute_tensor
from transformers.modeling_layers import GradientCheckpointingLayer

from grpo_ustat.config.schema import ConfigError
from grpo_ustat.distributed.ranks import RefusedByRank, is_main
from grpo_ustat.policy.loading import Policy
from grpo_ustat.policy.logprobs import ContiguousRows, pack, pack_contiguous, positions
from grpo_ustat.policy.memory import out_of_memory
from grpo_ustat.policy.output_layer import Window, body, causal
from grpo_ustat.records import Rollouts
from grpo_ustat.train.context import TrainContext
from grpo_ustat.train.micro_batches import Result, plan


def is_configured(accelerator: Accelerator) -> bool:
    """Return True if accelerate launched this run with FSDP2.

    An error is raised if accelerate's configuration has options that are not supported.
    """
    if not parse_flag_from_env("ACCELERATE_USE_FSDP") or not dist.is_initialized():
        return False
    plugin = getattr(accelerator.state, "fsdp_plugin", None) or FullyShardedDataParallelPlugin()
    for name, value, required in (
        ("fsdp_version", plugin.fsdp_version, 2),
        ("fsdp_offload_params", isinstance(plugin.cpu_offload, CPUOffloadPolicy), False),
        ("fsdp_cpu_ram_efficient_loading", plugin.cpu_ram_efficient_loading, False),
        ("fsdp_activation_checkpointing", plugin.activation_checkpointing, False),
    ):
        if value != required:
            raise RefusedByRank(
                f"accelerate's {name}={value} is not supported: use {required} (for activation "
                "checkpointing set gradient_checkpointing=true)"
            )
    return True


def shard(policy: Policy, device: torch.device) -> Policy:
    """Return a copy of the policy whose parameters are sharded, with each layer gathered alone."""
    # The copy may share the memory of the parameters, because `fully_shard` copies this rank's part
    # out of it.
    aliases = {
        id(p): torch.nn.Parameter(p.detach(), requires_grad=p.requires_grad)
        for p in policy.model.parameters()
    }
    model = copy.deepcopy(policy.model, aliases)
    layers = [x for x in model.modules() if isinstance(x, GradientCheckpointingLayer)]
    if not layers:
        raise RefusedByRank(
            f"FSDP2 finds no layers in {type(policy.model).__name__} to gather one at a time: "
            "train without FSDP2"
        )
    mesh = init_device_mesh(device.type, (dist.get_world_size(),))
    for module in (*layers, model):
        fully_shard(module, mesh=mesh)
    for module in model.modules():
        if isinstance(module, FSDPModule):
            # Sum the gradients of the ranks instead of averaging them: `update` divides by the
            # number of completions of all ranks.
            module.set_gradient_divide_factor(1.0)
            # The backend Gloo supports only sums.
            module.set_force_sum_reduction_for_comms(True)
    return replace(policy, model=model)


@contextmanager
def release_full_copy(run: TrainContext) -> Iterator[None]:
    """Free the memory of the full copy of the weights within the block.

    At the end of the block, the full copy is filled from the shards. After an error, it stays
    empty, because filling it would wait for ranks that may have failed too. Without FSDP2, nothing
    happens.
    """
    if run.sharded_policy is None:
        yield
        return
    for parameter in run.policy.model.parameters():
        parameter.data = parameter.data.new_empty(0)
    yield
    gather_weights(run)


@contextmanager
def exact_full_copy(run: TrainContext) -> Iterator[None]:
    """Keep the exact trained weights in the full copy within the block, even with bf16=true.

    All ranks must enter the block together. Without FSDP2, nothing happens.
    """
    narrowed = run.sharded_policy is not None and run.policy.bf16
    if narrowed:
        gather_weights(run, exact=True)
    yield
    if narrowed:
        gather_weights(run)


@torch.no_grad()
def gather_weights(run: TrainContext, exact: bool = False) -> None:
    """Fill the full copy from the shards under FSDP2; all ranks must call this together.

    Args:
        run: training run.
        exact: True to gather all weights exactly. By default, if bf16=true, the weights of linear
            layers are gathered in bfloat16. This halves the bytes and gives the same results,
            because autocast would round these weights at every call.
    """
    narrow: set[int] = set()
    if run.policy.bf16 and not exact:
        linear, other = set(), set()
        for module in run.policy.model.modules():
            parameters = {id(p) for p in module.parameters(recurse=False)}
            (linear if type(module) is torch.nn.Linear else other).update(parameters)
        # An output layer can share its weight with the embedding, which autocast does not round.
        # Such a weight is gathered exactly.
        narrow = linear - other
    for full, shard in parameter_pairs(run):
        full.data = full_tensor(shard.to(torch.bfloat16) if id(full) in narrow else shard)


@torch.no_grad()
def scatter_weights(run: TrainContext) -> None:
    """Fill the shards from the full copy, which must be equal on all ranks."""
    for full, shard in parameter_pairs(run):
        shard.copy_(shard_like(shard, full.detach()))


def parameter_pairs(run: TrainContext) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
    """Return pairs of a parameter in the full copy and the same parameter in the sharded model."""
    assert run.sharded_policy is not None
    return zip(run.policy.model.parameters(), run.sharded_policy.model.parameters(), strict=True)


def rounds(
    run: TrainContext, rollouts: Rollouts, index: np.ndarray
) -> Iterator[tuple[Fsdp2Reader, list[np.ndarray]]]:
    """Divide this rank's completions into parts; yield a reader and a list with one part at a time.

    All ranks yield equally many parts. Ranks with less work than the busiest rank also yield empty
    parts: for these, the rank takes part in the communication and adds 0 to the gradients.
    """
    assert run.sharded_policy is not None
    micro_batches = plan(rollouts, index, run.token_budget.tokens, share=False)
    parts = [part for micro_batch in micro_batches for part in micro_batch.parts]
    count = torch.tensor(len(parts), device=run.accelerator.device)
    dist.all_reduce(count, op=dist.ReduceOp.MAX)
    idle = [np.zeros(0, dtype=np.int64)] * (int(count) - len(parts))
    for part in parts + idle:
        yield Fsdp2Reader(run.sharded_policy, rollouts, run.contiguous), [part]


def attempt_once(run: TrainContext, work: Callable[[], Result]) -> Result:
    """Call a function and return its result; if memory runs out, raise an error with advice.

    A single rank cannot try again, because the other ranks would not take part in the
    communication.
    """
    try:
        return work()
    except RuntimeError as error:
        if not out_of_memory(error):
            raise
        raise ConfigError(
            f"out of memory in an update with micro_batch_tokens={run.token_budget.tokens}: FSDP2 "
            "cannot try again with fewer tokens; start again with a lower micro_batch_tokens"
        ) from error


class Fsdp2Reader:
    """Reader that runs one forward and one backward pass of the sharded model.

    The output layer's parameters stay gathered from the forward pass to the end of the backward
    pass, because `Head` uses them in between. Their gradients are summed over ranks together with
    all other gradients.

    Args:
        sharded_policy: policy that `shard` returned.
        rollouts: prompts and their completions.
        contiguous: True to read rows that are padded at the end, without a mask.
    """

    def __init__(self, sharded_policy: Policy, rollouts: Rollouts, contiguous: bool):
        self.model, self.rollouts = sharded_policy.model, rollouts
        self.contiguous = contiguous
        model: Any = _WithoutHooks(sharded_policy.model)
        # The sharded policy with a model whose calls start no communication.
        self.policy = replace(sharded_policy, model=model)

    def window(self, index: np.ndarray) -> Window:
        """Return the hidden states that predict the completions with flat indices p*G + i.

        If `index` is empty, this rank's first completion is read, so that the rank takes part in
        the communication.
        """
        if not len(index):
            index = np.zeros(1, dtype=np.int64)
        options = (self.rollouts, index, self.policy.pad_token, self.model.device)
        if self.contiguous:
            rows = pack_contiguous(*options)
            inputs = {"input_ids": rows.input_ids_BL}
        else:
            rows = pack(*options)
            mask = rows.attention_mask_BT
            inputs = {
                "input_ids": rows.input_ids_BT,
                "attention_mask": mask,
                "position_ids": positions(mask),
            }
        outputs, below = [], body(causal(self.model))
        hook = below.register_forward_hook(lambda _, inputs, output: outputs.append(output))
        try:
            with torch.autocast(
                self.model.device.type,
                torch.bfloat16,
                enabled=self.policy.bf16,
                # Autocast's cache would keep the rounded weights of every gathered layer.
                cache_enabled=False,
            ):
                # The whole model is called, because its hooks gather the parameters that belong to
                # no layer. `outputs` receives the hidden states.
                self.model(**inputs, logits_to_keep=1, use_cache=False)
        finally:
            hook.remove()
        # Class of the object that the model without its output layer returns.
        self.output = type(outputs[0])
        hidden = outputs[0].last_hidden_state
        if isinstance(rows, ContiguousRows):
            row_B1 = torch.arange(len(index), device=hidden.device)[:, None]
            self.hidden_BTD = hidden[row_B1, rows.columns_BT]
            targets_BT, mask_BT = rows.targets_BT, rows.mask_BT
        else:
            self.hidden_BTD = hidden[:, -rows.width - 1 : -1]
            targets_BT = rows.input_ids_BT[:, -rows.width :]
            mask_BT = rows.completion_mask_BT[:, -rows.width :]
        self.leaf_BTD = self.hidden_BTD.detach().requires_grad_()
        return Window(self.leaf_BTD, targets_BT, mask_BT)

    def backward(self) -> None:
        """Continue the backward pass from the hidden states to all parameters.

        A rank without gradients at the hidden states propagates zeros, because all ranks must take
        part in the communication.
        """
        model: Any = causal(self.model)
        for parameter in model.get_output_embeddings().parameters():
            if parameter.requires_grad and parameter.grad is None:
                parameter.grad = torch.zeros_like(parameter)
        grad = self.leaf_BTD.grad
        self.hidden_BTD.backward(torch.zeros_like(self.hidden_BTD) if grad is None else grad)


class _WithoutHooks:
    """Sharded model whose calls start no communication; its output layer must be gathered."""

    def __init__(self, model: torch.nn.Module):
        self._model = model

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return self._model.forward(*args, **kwargs)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._model, name)


def moments(policy: Policy, optimizer: torch.optim.Optimizer) -> dict[str, torch.Tensor]:
    """Return the optimizer's whole state on the CPU of rank 0, with keys `parameter/field`.

    All ranks must call this function together. Ranks other than 0 get an empty dictionary.
    """
    result = {}
    for name, parameter in named_parameters(policy, optimizer).items():
        for field, value in optimizer.state.get(parameter, {}).items():
            full = full_tensor(value)
            if is_main():
                result[f"{name}/{field}"] = full.cpu().contiguous()
    return result


def load_moments(
    policy: Policy, optimizer: torch.optim.Optimizer, entries: dict[str, torch.Tensor]
) -> None:
    """Restore the state that `moments` returned; the number of ranks may have changed since."""
    parameters = named_parameters(policy, optimizer)
    for key, value in entries.items():
        name, _, field = key.rpartition("/")
        parameter = parameters[name]
        if value.ndim:
            value = shard_like(parameter, value)
        # Fused AdamW needs all fields on the device, even its count of updates.
        optimizer.state[parameter][field] = value.to(parameter.device)


def named_parameters(
    policy: Policy, optimizer: torch.optim.Optimizer
) -> dict[str, torch.nn.Parameter]:
    """Return the optimizer's parameters (sharded under FSDP2) by their names in the full copy."""
    (group,) = optimizer.param_groups
    return dict(zip(trained_names(policy), group["params"], strict=True))


def trained_names(policy: Policy) -> list[str]:
    """Return the names of the trained parameters, in order."""
    return [name for name, p in policy.model.named_parameters() if p.requires_grad]


def full_tensor(value: torch.Tensor) -> torch.Tensor:
    """Gather a sharded tensor and return it in full; all ranks must call this together.

    A tensor that is not sharded is returned as it is.
    """
    return value.full_tensor() if isinstance(value, DTensor) else value


def shard_like(parameter: torch.Tensor, value: torch.Tensor) -> torch.Tensor:
    """Return the value, sharded like the parameter.

    All ranks must call this together, and each must pass the full value.
    """
    if not isinstance(parameter, DTensor):
        return value
    mesh, placements = parameter.device_mesh, parameter.placements
    return distribute_tensor(value.to(parameter.device), mesh, placements, src_data_rank=None)
