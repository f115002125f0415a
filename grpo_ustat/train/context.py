"""What a training run holds, the completions of one step, and how far the run is."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from accelerate import Accelerator

from grpo_ustat.config.train import TrainConfig
from grpo_ustat.estimators.baselines import weighted_sum
from grpo_ustat.policy.loading import Policy
from grpo_ustat.records import Prompt, Rollouts
from grpo_ustat.rollout.engine import Engine
from grpo_ustat.runs.folder import RunFolder
from grpo_ustat.tasks.base import Task
from grpo_ustat.train.micro_batches import TokenBudget


@dataclass(frozen=True)
class Batch:
    """Completions of a step or of an evaluation.

    Attributes:
        prompts: all P prompts.
        rollouts: this rank's completions, of `prompts[rank::world]`; None where the rank has none.
        rewards_PGF: by every reward function, of all prompts, the same on every rank.
        lengths_PG, ended_PG: likewise.
        answered_PG: whether the text states an answer, right or wrong.
        prompt_lengths_P: tokens of the prompts.
        reward_weights_F: of the reward functions in their sum.
    """

    prompts: list[Prompt]
    rollouts: Rollouts | None
    rewards_PGF: np.ndarray
    lengths_PG: np.ndarray
    ended_PG: np.ndarray
    answered_PG: np.ndarray
    prompt_lengths_P: np.ndarray
    reward_weights_F: np.ndarray

    @property
    def rewards_PG(self) -> np.ndarray:
        """The weighted sum of the functions' rewards, which rules and metrics are of."""
        return weighted_sum(self.rewards_PGF, self.reward_weights_F)

    @property
    def own_rollouts(self) -> Rollouts:
        """Completions of this rank in a training step, in which every rank has some."""
        assert self.rollouts is not None
        return self.rollouts


@dataclass(frozen=True)
class SamplingCost:
    """What a baseline sampled beside the step's own completions, over all ranks.

    Attributes:
        rollouts: completions.
        tokens: completion tokens.
    """

    rollouts: int = 0
    tokens: int = 0


class BaselineState:
    """What a baseline carries from batch to batch; this class, for most rules, carries nothing."""

    def context(
        self, run: TrainContext, batch: Batch, step: int
    ) -> tuple[dict[str, Any], SamplingCost]:
        """Fields of the rule's `BaselineContext`, for all P prompts, and what they cost."""
        return {}, SamplingCost()

    def update(self, run: TrainContext, batch: Batch) -> None:
        """Add the batch, once its advantages are known."""

    def state_dict(self) -> dict[str, np.ndarray]:
        """The whole state as arrays, for a checkpoint."""
        return {}

    def load_state_dict(self, state: dict[str, np.ndarray]) -> None:
        """Restore what `state_dict` returned."""


@dataclass(frozen=True)
class TrainContext:
    """All objects of a training run; every step of the loop reads them from here.

    Attributes:
        policy: whole on every rank; under FSDP2 it is read and never trained.
        sharded_policy: the policy that FSDP2 trains, in shards; None without FSDP2.
        engine: samples completions; `refresh` it after every change of the policy's weights.
        reference: a frozen copy of the policy before training; None without a penalty or with
            adapters, which are switched off instead.
        optimizer: moves the parameters.
        baseline_state: what the baseline carries from batch to batch.
        token_budget: how many tokens a backward pass may take.
        share_prompts: whether updates read a prompt once for its group.
        contiguous: whether updates read other rows padded at the end and without a mask.
    """

    config: TrainConfig
    folder: RunFolder
    accelerator: Accelerator
    policy: Policy
    sharded_policy: Policy | None
    engine: Engine
    reference: Policy | None
    optimizer: torch.optim.Optimizer
    scheduler: torch.optim.lr_scheduler.LRScheduler
    task: Task
    train_prompts: list[Prompt]
    test_prompts: list[Prompt]
    baseline_state: BaselineState
    token_budget: TokenBudget
    share_prompts: bool
    contiguous: bool

    @property
    def trained_policy(self) -> Policy:
        """The policy whose parameters the optimizer moves."""
        return self.policy if self.sharded_policy is None else self.sharded_policy

    def own_rows(self, values_P: np.ndarray) -> np.ndarray:
        """Rows of this rank's prompts from an array over all prompts."""
        return values_P[self.accelerator.process_index :: self.accelerator.num_processes]

    def all_ranks_sum(self, values: np.ndarray) -> np.ndarray:
        """The sum of the ranks' arrays, exact for integers."""
        if self.accelerator.num_processes == 1:
            return values
        total = torch.from_numpy(values).to(self.accelerator.device)
        dist.all_reduce(total)
        return total.cpu().numpy()


@dataclass
class TrainProgress:
    """How far a run is; stored in each checkpoint.

    Attributes:
        step: updates of the policy.
        rollouts, tokens: completions of the steps, and tokens of all completions.
        value_rollouts: completions that the baseline sampled beside them.
        num_tokens: as TRL counts, prompts included.
        seconds: in steps.
        seconds_save: what the latest checkpoint took to write.
        failed_saves: checkpoints that the disk refused.
        clipped_ratio: share of the last step's completions that were cut.
        evals: rows of eval.csv.
        rewards_first, rewards_last: mean reward of each test question in the first and the last
            evaluation by the first decoding.
        streaks, alarms: see `alarms.check_alarms`.
    """

    step: int = 0
    rollouts: int = 0
    value_rollouts: int = 0
    tokens: int = 0
    num_tokens: int = 0
    seconds: float = 0.0
    seconds_save: float = 0.0
    failed_saves: int = 0
    clipped_ratio: float = 0.0
    evals: list[dict[str, Any]] = field(default_factory=list)
    rewards_first: list[float] = field(default_factory=list)
    rewards_last: list[float] = field(default_factory=list)
    streaks: dict[str, int] = field(default_factory=dict)
    alarms: dict[str, int] = field(default_factory=dict)
