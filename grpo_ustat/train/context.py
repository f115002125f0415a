"""Objects of a training run, completions of a step and progress of the run."""

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

    # All P prompts, of all ranks. The arrays below cover these prompts and are the same on every
    # rank.
    prompts: list[Prompt]
    # Completions of this rank's prompts, `prompts[rank::world]`; None if the rank has no prompts.
    rollouts: Rollouts | None
    # Rewards from each of the F reward functions.
    rewards_PGF: np.ndarray
    # Number of tokens in each completion.
    lengths_PG: np.ndarray
    # True if the completion ended before the length limit.
    ended_PG: np.ndarray
    # True if the completion contains an answer, right or wrong.
    answered_PG: np.ndarray
    # Number of tokens in each prompt.
    prompt_lengths_P: np.ndarray
    # Weight of each reward function.
    reward_weights_F: np.ndarray

    @property
    def rewards_PG(self) -> np.ndarray:
        """Weighted sum of the functions' rewards, for baselines and metrics."""
        return weighted_sum(self.rewards_PGF, self.reward_weights_F)

    @property
    def own_rollouts(self) -> Rollouts:
        """Completions of this rank, for training steps, in which every rank has completions."""
        assert self.rollouts is not None
        return self.rollouts


@dataclass(frozen=True)
class SamplingCost:
    """Number of additional completions that a baseline needed, and their tokens, on all ranks."""

    rollouts: int = 0
    tokens: int = 0


class BaselineState:
    """State that a baseline keeps between batches; this base class keeps no state."""

    def context(self, run: TrainContext, batch: Batch) -> dict[str, Any]:
        """Return fields of `BaselineContext` for all prompts."""
        return {}

    def update(self, run: TrainContext, batch: Batch) -> None:
        """Add a batch to the state. This is called after the batch's advantages were computed."""

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
    # Full policy; every rank has a copy. FSDP2 trains the sharded policy instead, and this copy is
    # only read, for sampling.
    policy: Policy
    # Sharded policy that FSDP2 trains; None without FSDP2.
    sharded_policy: Policy | None
    # Engine that samples completions. Call `refresh` after every change of the policy's weights.
    engine: Engine
    # Frozen copy of the policy before training, for the KL penalty. It is None without a penalty,
    # and if adapters are trained, because the policy with disabled adapters then replaces it.
    reference: Policy | None
    optimizer: torch.optim.Optimizer
    scheduler: torch.optim.lr_scheduler.LRScheduler
    task: Task
    train_prompts: list[Prompt]
    test_prompts: list[Prompt]
    baseline_state: BaselineState
    # Largest number of padded tokens in a backward pass.
    token_budget: TokenBudget
    # True if updates read each prompt once per group, not once per completion.
    share_prompts: bool
    # True if the model can read rows that are padded at the end without a mask; see
    # `prompt_sharing.ContiguousReader`.
    contiguous: bool

    @property
    def trained_policy(self) -> Policy:
        """Policy whose parameters the optimizer updates, which is sharded under FSDP2."""
        return self.policy if self.sharded_policy is None else self.sharded_policy

    def own_rows(self, values_P: np.ndarray) -> np.ndarray:
        """Select the rows of this rank's prompts from an array over all prompts."""
        return values_P[self.accelerator.process_index :: self.accelerator.num_processes]

    def all_ranks_sum(self, values: np.ndarray) -> np.ndarray:
        """Return the sum of an array over ranks, which is exact for integers."""
        if self.accelerator.num_processes == 1:
            return values
        total = torch.from_numpy(values).to(self.accelerator.device)
        dist.all_reduce(total)
        return total.cpu().numpy()


@dataclass
class TrainProgress:
    """Progress of a run, which is stored in each checkpoint."""

    # Number of finished steps.
    step: int = 0
    # Number of completions in these steps.
    rollouts: int = 0
    # Number of additional completions that the baseline sampled.
    value_rollouts: int = 0
    # Number of tokens in all completions.
    tokens: int = 0
    # Number of tokens in completions and prompts, counted as in TRL's metric `num_tokens`.
    num_tokens: int = 0
    # Seconds spent in steps.
    seconds: float = 0.0
    # Seconds spent writing the latest checkpoint.
    seconds_save: float = 0.0
    # Number of checkpoints that could not be written.
    failed_saves: int = 0
    # Share of truncated completions in the last step.
    clipped_ratio: float = 0.0
    # Rows of eval.csv.
    evals: list[dict[str, Any]] = field(default_factory=list)
    # Mean reward of each test question in the first and in the last evaluation, with the first of
    # the decodings in `eval.decoding`.
    rewards_first: list[float] = field(default_factory=list)
    rewards_last: list[float] = field(default_factory=list)
    # For each alarm, the number of consecutive steps that meet its condition, and the number of
    # steps with the alarm; see `alarms.check_alarms`.
    streaks: dict[str, int] = field(default_factory=dict)
    alarms: dict[str, int] = field(default_factory=dict)
