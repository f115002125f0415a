"""Objects of a training run, completions of a step, and progress of the run."""

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
    """Completions of a step or of an evaluation."""

    # All P prompts.
    prompts: list[Prompt]
    # This rank's completions, of `prompts[rank::world]`; None if the rank has none.
    rollouts: Rollouts | None
    # This and the next three are of all prompts, the same on every rank. Rewards by each function.
    rewards_PGF: np.ndarray
    lengths_PG: np.ndarray
    ended_PG: np.ndarray
    # True if the text states an answer, right or wrong.
    answered_PG: np.ndarray
    # Tokens of the prompts.
    prompt_lengths_P: np.ndarray
    reward_weights_F: np.ndarray

    @property
    def rewards_PG(self) -> np.ndarray:
        """Weighted sum of the functions' rewards, for baselines and metrics."""
        return weighted_sum(self.rewards_PGF, self.reward_weights_F)

    @property
    def own_rollouts(self) -> Rollouts:
        """Completions of this rank in a training step, which are never empty there."""
        assert self.rollouts is not None
        return self.rollouts


@dataclass(frozen=True)
class SamplingCost:
    """Number of further completions that a baseline sampled, and their tokens, over all ranks."""

    rollouts: int = 0
    tokens: int = 0


class BaselineState:
    """State of a baseline from batch to batch; this class, for most baselines, has none."""

    def context(
        self, run: TrainContext, batch: Batch, step: int
    ) -> tuple[dict[str, Any], SamplingCost]:
        """Return fields of the baseline's `BaselineContext`, for all P prompts, and their cost."""
        return {}, SamplingCost()

    def update(self, run: TrainContext, batch: Batch) -> None:
        """Add the batch, after its advantages were computed."""

    def state_dict(self) -> dict[str, np.ndarray]:
        """Return the whole state as arrays, for a checkpoint."""
        return {}

    def load_state_dict(self, state: dict[str, np.ndarray]) -> None:
        """Restore the state that `state_dict` returned."""


@dataclass(frozen=True)
class TrainContext:
    """All objects of a training run."""

    config: TrainConfig
    folder: RunFolder
    accelerator: Accelerator
    # Full copy on every rank; under FSDP2 it is only read, not trained.
    policy: Policy
    # The policy that FSDP2 trains, in shards; None without FSDP2.
    sharded_policy: Policy | None
    # Samples completions; call `refresh` after every change of the policy's weights.
    engine: Engine
    # Frozen copy of the policy before training; None without a penalty, or with adapters, which can
    # be switched off instead.
    reference: Policy | None
    optimizer: torch.optim.Optimizer
    scheduler: torch.optim.lr_scheduler.LRScheduler
    task: Task
    train_prompts: list[Prompt]
    test_prompts: list[Prompt]
    baseline_state: BaselineState
    # Number of tokens that a backward pass may take.
    token_budget: TokenBudget
    # True if updates read a prompt once for its group.
    share_prompts: bool
    # True if updates that do not share prompts read rows padded at the end, without a mask.
    contiguous: bool

    @property
    def trained_policy(self) -> Policy:
        """Policy with the parameters of the optimizer: in shards under FSDP2."""
        return self.policy if self.sharded_policy is None else self.sharded_policy

    def own_rows(self, values_P: np.ndarray) -> np.ndarray:
        """Select the rows of this rank's prompts from an array over all prompts."""
        return values_P[self.accelerator.process_index :: self.accelerator.num_processes]

    def all_ranks_sum(self, values: np.ndarray) -> np.ndarray:
        """Return the sum of the ranks' arrays, exact for integers."""
        if self.accelerator.num_processes == 1:
            return values
        total = torch.from_numpy(values).to(self.accelerator.device)
        dist.all_reduce(total)
        return total.cpu().numpy()


@dataclass
class TrainProgress:
    """Progress of a run; stored in each checkpoint."""

    # Steps done.
    step: int = 0
    # Completions of the steps.
    rollouts: int = 0
    # Further completions that the baseline sampled.
    value_rollouts: int = 0
    # Tokens of all completions.
    tokens: int = 0
    # Tokens as TRL counts them, prompts included.
    num_tokens: int = 0
    # Time spent in steps.
    seconds: float = 0.0
    # Time that the latest checkpoint took to write.
    seconds_save: float = 0.0
    # Checkpoints that could not be written.
    failed_saves: int = 0
    # Share of the last step's completions that were cut.
    clipped_ratio: float = 0.0
    # Rows of eval.csv.
    evals: list[dict[str, Any]] = field(default_factory=list)
    # Mean reward of each test question in the first and in the last evaluation by the first
    # decoding.
    rewards_first: list[float] = field(default_factory=list)
    rewards_last: list[float] = field(default_factory=list)
    # See `alarms.check_alarms`.
    streaks: dict[str, int] = field(default_factory=dict)
    alarms: dict[str, int] = field(default_factory=dict)
