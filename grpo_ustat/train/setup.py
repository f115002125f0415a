"""What a training run holds on to, and how it is put together."""

from __future__ import annotations

import sys
from dataclasses import dataclass, replace
from datetime import timedelta

import numpy as np
import torch
import torch.distributed as dist
from accelerate import Accelerator
from accelerate.utils import InitProcessGroupKwargs, gather_object
from transformers import PreTrainedTokenizerBase, get_scheduler

from grpo_ustat.config import TrainConfig
from grpo_ustat.policy.adapters import with_adapters
from grpo_ustat.policy.devices import check_device
from grpo_ustat.policy.lengths import check_lengths
from grpo_ustat.policy.loading import (
    Policy,
    configured_policy,
    configured_task,
    configured_tokenizer,
)
from grpo_ustat.policy.output_layer import causal
from grpo_ustat.policy.reading import can_share
from grpo_ustat.policy.recomputing import checkpoint_layers
from grpo_ustat.ranks import RefusedByRank, is_main
from grpo_ustat.records import Prompt
from grpo_ustat.rollout.engine import Engine, make_engine
from grpo_ustat.runs.folder import RunFolder
from grpo_ustat.tasks.base import Task, tell_dropped
from grpo_ustat.train_checks import ENDING
from grpo_ustat.training import deepspeed, sharded
from grpo_ustat.training.memory import Memory, make_memory
from grpo_ustat.training.plan import Limit

PATIENCE = timedelta(hours=2)  # that a rank waits for the slowest one; NCCL's own are 10 minutes


@dataclass(frozen=True)
class Run:
    """Everything the loop holds on to.

    Attributes:
        policy: whole on every rank; under FSDP2 it only reads, see `sharded`.
        sharded: the policy that FSDP2 trains, in shards; None without it.
        engine: what writes completions; `refresh` it after every change of the policy's weights.
        reference: a frozen copy of the policy before training; None without a penalty or with
            adapters, which are switched off instead.
        optimizer: moves the parameters; under DeepSpeed it holds a part of its state.
        memory: what the baseline remembers.
        passes: how many tokens a backward pass may take.
        shares: whether updates read a prompt once for its group.
    """

    config: TrainConfig
    folder: RunFolder
    accelerator: Accelerator
    policy: Policy
    sharded: Policy | None
    engine: Engine
    reference: Policy | None
    optimizer: torch.optim.Optimizer | deepspeed.ZeroOptimizer
    scheduler: torch.optim.lr_scheduler.LRScheduler
    task: Task
    train_prompts: list[Prompt]
    test_prompts: list[Prompt]
    memory: Memory
    passes: Limit
    shares: bool

    @property
    def trained(self) -> Policy:
        """The policy whose parameters the optimizer moves."""
        return self.policy if self.sharded is None else self.sharded

    def all_ranks_sum(self, values: np.ndarray) -> np.ndarray:
        """The sum of the ranks' arrays, exact for integers."""
        if self.accelerator.num_processes == 1:
            return values
        total = torch.from_numpy(values).to(self.accelerator.device)
        dist.all_reduce(total)
        return total.cpu().numpy()


def set_up(config: TrainConfig, folder: RunFolder) -> Run:
    """Load the policy and everything around it; what can be refused without its weights, before.

    Raises:
        ConfigError: what only the model or the machine can show to be impossible.
    """
    accelerator = joined(config)
    device = str(accelerator.device)
    tokenizer = configured_tokenizer(config)
    task, train, test = _task_and_prompts(config, tokenizer, accelerator.num_processes)
    policy = _trained(config, configured_policy(config, device, tokenizer))
    shards = sharded.shard(policy, accelerator.device) if sharded.asked(accelerator) else None
    optimizer = _optimizer(config, shards or policy)
    scheduler = _scheduler(config, optimizer)
    if deepspeed.asked():
        optimizer = deepspeed.ZeroOptimizer(policy, optimizer)
    return Run(
        config=config,
        folder=folder,
        accelerator=accelerator,
        policy=policy,
        sharded=shards,
        engine=make_engine(config, policy),
        reference=_reference(config, device, tokenizer),
        optimizer=optimizer,
        scheduler=scheduler,
        task=task,
        train_prompts=train,
        test_prompts=test,
        memory=make_memory(config.baseline),
        passes=Limit(config.micro_batch_tokens),
        shares=_shares(config, policy),
    )


def _task_and_prompts(
    config: TrainConfig, tokenizer: PreTrainedTokenizerBase, world: int
) -> tuple[Task, list[Prompt], list[Prompt]]:
    """The task with train and test prompts, as many and as long as they may be."""
    task = configured_task(config, tokenizer)
    train, test = task.prompts("train"), task.prompts("test")
    tell_dropped(task)
    check_sizes(config, len(train), len(test), world)
    check_lengths(config, tokenizer, train + test)
    return task, train, test


def joined(config: TrainConfig) -> Accelerator:
    """The ranks, the same at every call; each has a prompt of every step and of the evaluation.

    Raises:
        ConfigError: there are too many of them, or accelerate was configured for what is ours.
    """
    check_device(config.launch.device)
    deepspeed.check_options()
    patience = InitProcessGroupKwargs(timeout=PATIENCE)
    accelerator = Accelerator(cpu=config.launch.device == "cpu", kwargs_handlers=[patience])
    world = accelerator.num_processes
    if config.prompts_per_step < world:
        raise RefusedByRank(
            f"{config.prompts_per_step} prompts a step for {world} processes: "
            "raise budget.rollouts or lower group_size"
        )
    if accelerator.gradient_accumulation_steps != 1:
        raise RefusedByRank(
            f"accelerate's gradient_accumulation_steps={accelerator.gradient_accumulation_steps} "
            "has no effect here: micro_batch_tokens alone says how a gradient is cut"
        )
    if accelerator.mixed_precision != "no":
        raise RefusedByRank(
            f"accelerate's mixed_precision={accelerator.mixed_precision} has no effect here: "
            "use mixed_precision=no there and bf16=true here"
        )
    return accelerator


def check_sizes(config: TrainConfig, train: int, test: int, world: int) -> None:
    """There are as many questions as a step and the ranks of an evaluation need.

    Raises:
        ConfigError: naming how many there are.
    """
    if train < config.prompts_per_step:
        raise RefusedByRank(
            f"{config.prompts_per_step} prompts a step (budget.rollouts / group_size), but "
            f"{config.dataset.name} has {train} train questions: raise group_size"
        )
    if test < max(world, 2):
        raise RefusedByRank(
            f"{test} test questions for {world} processes and a paired interval: "
            f"use dataset.test_size={max(world, 2)} or more"
        )


def _shares(config: TrainConfig, policy: Policy) -> bool:
    """Whether updates read prompts once per group; where they can't, that is said."""
    if not config.share_prompts:
        return False
    if config.gradient_checkpointing:
        reason = "gradient_checkpointing=true keeps no keys and values"
    elif not can_share(policy):
        reason = f"{type(causal(policy.model)).__name__} does not allow it"
    else:
        return True
    if is_main():
        print(f"note: updates read each prompt once a completion: {reason}", file=sys.stderr)
    return False


def check_same_start(run: Run, step: int) -> None:
    """Ranks apply the same updates to weights that no collective ever compares again.

    Raises:
        ConfigError: their weights or steps differ; on all ranks.
    """
    if run.accelerator.num_processes == 1:
        return
    starts = gather_object([(step, checksum(run.policy.model))])
    if len(set(starts)) > 1:
        told = ", ".join(f"rank {r} at step {s} with {c}" for r, (s, c) in enumerate(starts))
        raise RefusedByRank(
            f"ranks start from different weights or steps ({told}): give every one of them the "
            "same model files and the same run folder"
        )


@torch.no_grad()
def checksum(model: torch.nn.Module) -> str:
    """Of all parameters' bits: a sum of integers, exact in any order and on any device."""
    integers = {8: torch.int64, 4: torch.int32, 2: torch.int16, 1: torch.int8}
    total = 0
    for place, parameter in enumerate(model.parameters(), start=1):
        bits = parameter.contiguous().view(integers[parameter.element_size()])
        total += place * int(bits.sum(dtype=torch.int64))
    return f"{total % 2**64:016x}"


def _trained(config: TrainConfig, policy: Policy) -> Policy:
    """The policy with adapters, precision and checkpointing as configured."""
    if config.lora.r:
        policy = replace(policy, model=with_adapters(config, policy.model))
    if config.gradient_checkpointing:
        checkpoint_layers(policy.model)
    return replace(policy, bf16=config.bf16)


def _reference(
    config: TrainConfig, device: str, tokenizer: PreTrainedTokenizerBase
) -> Policy | None:
    if not config.objective.beta or config.lora.r:
        return None
    policy = configured_policy(config, device, tokenizer)
    policy.model.requires_grad_(False)
    return replace(policy, bf16=config.bf16)


def _optimizer(config: TrainConfig, policy: Policy) -> torch.optim.Optimizer:
    options = config.optimizer
    parameters = [p for p in policy.model.parameters() if p.requires_grad]
    common = dict(lr=config.learning_rate, weight_decay=options.weight_decay)
    if options.name == "sgd":
        return torch.optim.SGD(parameters, **common)
    betas = (options.beta1, options.beta2)
    return torch.optim.AdamW(parameters, betas=betas, fused=True, **common)


def _scheduler(config: TrainConfig, optimizer: torch.optim.Optimizer):
    """One tick a step, whatever the number of its updates: its state is the step alone."""
    kind, warmup = config.schedule.lr_scheduler_type, config.schedule.warmup_steps
    end = config.max_steps if kind in ENDING else None
    warms = None if kind == "constant" else warmup
    return get_scheduler(kind, optimizer, num_warmup_steps=warms, num_training_steps=end)
