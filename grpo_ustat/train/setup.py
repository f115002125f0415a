"""Set-up of a training run before the first step: ranks, policy and all other objects."""

from __future__ import annotations

import sys
from dataclasses import replace
from datetime import timedelta

import torch
from accelerate import Accelerator
from accelerate.utils import InitProcessGroupKwargs, gather_object, parse_flag_from_env
from transformers import PreTrainedTokenizerBase, get_scheduler

from grpo_ustat.config.train import ENDING_SCHEDULES, TrainConfig
from grpo_ustat.distributed.ranks import RefusedByRank, is_main, main_only
from grpo_ustat.policy.adapters import checkpoint_layers, with_adapters
from grpo_ustat.policy.chat import reads_clock, tell_date, warn_of_options
from grpo_ustat.policy.configured import (
    check_device,
    check_lengths,
    configured_policy,
    configured_task,
)
from grpo_ustat.policy.loading import Policy
from grpo_ustat.policy.output_layer import causal
from grpo_ustat.policy.prompt_sharing import can_read_contiguous, can_share
from grpo_ustat.policy.tokenizer import configured_tokenizer
from grpo_ustat.rollout.engine import make_engine
from grpo_ustat.runs.folder import RunFolder
from grpo_ustat.tasks.base import tell_dropped, warn_of_prompt
from grpo_ustat.terminal.streams import tell
from grpo_ustat.train import fsdp2
from grpo_ustat.train.baseline_state import make_baseline_state
from grpo_ustat.train.context import TrainContext
from grpo_ustat.train.micro_batches import TokenBudget

# Time that a rank waits for the slowest rank before it fails. NCCL's default is 10 minutes.
RANK_TIMEOUT = timedelta(hours=2)


def set_up(config: TrainConfig, folder: RunFolder) -> TrainContext:
    """Build all objects of a run.

    Checks that need no weights come first, so that mistakes show before the weights are loaded.
    """
    accelerator = join_ranks(config)
    device = str(accelerator.device)
    tokenizer = configured_tokenizer(config.model)
    moment = main_only(folder.prompt_date) if reads_clock(tokenizer) else None
    task = configured_task(config.task_options, config.model, tokenizer, moment)
    train_prompts, test_prompts = task.prompts("train"), task.prompts("test")
    tell_dropped(task)
    warn_of_prompt(config.task_options, train_prompts)
    warn_of_options(config.prompt, tokenizer)
    tell_date(moment)
    check_sizes(config, len(train_prompts), len(test_prompts), accelerator.num_processes)
    check_lengths(
        config.policy_options, config.sampler_options, tokenizer, train_prompts + test_prompts
    )

    policy = _trained_policy(config, device, tokenizer)
    sharded_policy = None
    if config.launch.fsdp2 or fsdp2.is_configured(accelerator):
        if config.objective.top_entropy_quantile < 1:
            raise RefusedByRank(
                f"objective.top_entropy_quantile={config.objective.top_entropy_quantile} under "
                "FSDP2: entropies are read from the full policy before each update, but FSDP2 "
                "keeps shards: use launch.fsdp2=false, or objective.top_entropy_quantile=1"
            )
        sharded_policy = fsdp2.shard(policy, accelerator.device)
    optimizer, scheduler = make_optimizer(config, sharded_policy or policy)
    engine = make_engine(config.sampler_options, config.model, policy)
    reference = None
    if config.objective.beta and not config.lora.r:
        reference = replace(
            configured_policy(config.policy_options, device, tokenizer), bf16=config.bf16
        )
        reference.model.requires_grad_(False)
    return TrainContext(
        config=config,
        folder=folder,
        accelerator=accelerator,
        policy=policy,
        sharded_policy=sharded_policy,
        engine=engine,
        reference=reference,
        optimizer=optimizer,
        scheduler=scheduler,
        task=task,
        train_prompts=train_prompts,
        test_prompts=test_prompts,
        baseline_state=make_baseline_state(config.baseline),
        token_budget=TokenBudget(config.micro_batch_tokens),
        share_prompts=shares_prompts(config, policy),
        contiguous=can_read_contiguous(policy),
    )


def _trained_policy(config: TrainConfig, device: str, tokenizer: PreTrainedTokenizerBase) -> Policy:
    """Load the policy to train; add adapters, gradient checkpointing and bf16 as configured."""
    policy = configured_policy(config.policy_options, device, tokenizer)
    if config.lora.r:
        adapted = with_adapters(
            config.lora, policy.model, seed=config.seed, revision=config.model.revision,
            rollout=config.rollout.name,
        )  # fmt: skip
        policy = replace(policy, model=adapted)
    if config.gradient_checkpointing:
        checkpoint_layers(policy.model)
    return replace(policy, bf16=config.bf16)


def join_ranks(config: TrainConfig) -> Accelerator:
    """Connect this process with the other ranks, if it is not yet connected."""
    check_device(config.launch.device)
    if parse_flag_from_env("ACCELERATE_USE_DEEPSPEED"):
        raise RefusedByRank(
            "accelerate is configured for DeepSpeed, which is not supported: use launch.fsdp2=true "
            "to shard weights, gradients and the optimizer's state"
        )
    patience = InitProcessGroupKwargs(timeout=RANK_TIMEOUT)
    accelerator = Accelerator(cpu=config.launch.device == "cpu", kwargs_handlers=[patience])
    world = accelerator.num_processes
    if config.prompts_per_step < world:
        raise RefusedByRank(
            f"{config.prompts_per_step} prompts per step for {world} processes: "
            "raise budget.rollouts or lower group_size"
        )
    if accelerator.gradient_accumulation_steps != 1:
        raise RefusedByRank(
            f"accelerate's gradient_accumulation_steps={accelerator.gradient_accumulation_steps} "
            "has no effect here: set it to 1, and use micro_batch_tokens to set micro-batch sizes"
        )
    if accelerator.mixed_precision != "no":
        raise RefusedByRank(
            f"accelerate's mixed_precision={accelerator.mixed_precision} has no effect here: "
            "use mixed_precision=no for accelerate and bf16=true for this command"
        )
    return accelerator


def check_sizes(config: TrainConfig, train: int, test: int, world: int) -> None:
    """Refuse a data set with too few questions.

    Args:
        config: configuration of the run.
        train, test: number of training and test questions.
        world: number of ranks, each of which needs a test question.
    """
    if train < config.prompts_per_step:
        raise RefusedByRank(
            f"{config.prompts_per_step} prompts per step (budget.rollouts / group_size), but "
            f"{config.dataset.name} has {train} train questions: raise group_size"
        )
    if test < max(world, 2):
        raise RefusedByRank(
            f"{test} test questions are too few for {world} processes and a paired interval: "
            f"use dataset.test_size={max(world, 2)} or more"
        )


def make_optimizer(
    config: TrainConfig, policy: Policy
) -> tuple[torch.optim.Optimizer, torch.optim.lr_scheduler.LRScheduler]:
    """Build the configured optimizer of the trained parameters and its learning-rate schedule.

    The schedule advances once per training step, even if a step makes several updates.
    """
    options, schedule = config.optimizer, config.schedule
    parameters = [p for p in policy.model.parameters() if p.requires_grad]
    rate, decay = config.learning_rate, options.weight_decay
    if options.name == "sgd":
        optimizer = torch.optim.SGD(parameters, lr=rate, weight_decay=decay)
    else:
        betas = (options.beta1, options.beta2)
        optimizer = torch.optim.AdamW(
            parameters, lr=rate, weight_decay=decay, betas=betas, fused=True
        )
    kind = schedule.lr_scheduler_type
    scheduler = get_scheduler(
        kind,
        optimizer,
        num_warmup_steps=None if kind == "constant" else schedule.warmup_steps,
        num_training_steps=config.max_steps if kind in ENDING_SCHEDULES else None,
    )
    return optimizer, scheduler


def shares_prompts(config: TrainConfig, policy: Policy) -> bool:
    """Return True if updates read each prompt once per group, not once per completion.

    If sharing is configured but impossible, rank 0 prints the reason.
    """
    if not config.share_prompts:
        return False
    if config.gradient_checkpointing:
        reason = "with gradient_checkpointing=true, keys and values are not kept"
    elif not can_share(policy):
        reason = f"{type(causal(policy.model)).__name__} cannot read them once for all completions"
    else:
        return True
    if is_main():
        tell(f"note: updates read prompts once per completion, because {reason}", file=sys.stderr)
    return False


def check_same_start(run: TrainContext, step: int) -> None:
    """Raise an error if ranks start from different weights or steps.

    One check is enough: all ranks apply the same updates, so equal weights stay equal.
    """
    if run.accelerator.num_processes == 1:
        return
    starts = gather_object([(step, checksum(run.policy.model))])
    if len(set(starts)) > 1:
        ranks = ", ".join(f"rank {r} at step {s} with {c}" for r, (s, c) in enumerate(starts))
        raise RefusedByRank(
            f"ranks start from different weights or steps ({ranks}): give all ranks the same model "
            "files and the same run folder"
        )


@torch.no_grad()
def checksum(model: torch.nn.Module) -> str:
    """Return a checksum of all parameters: a sum of their bits as integers, exact on any device."""
    integers = {8: torch.int64, 4: torch.int32, 2: torch.int16, 1: torch.int8}
    total = 0
    for place, parameter in enumerate(model.parameters(), start=1):
        bits = parameter.contiguous().view(integers[parameter.element_size()])
        total += place * int(bits.sum(dtype=torch.int64))
    return f"{total % 2**64:016x}"
