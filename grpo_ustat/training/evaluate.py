"""Held-out accuracy: one sampled completion of every test question."""

from __future__ import annotations

from typing import Any

import numpy as np
from accelerate import Accelerator
from accelerate.utils import gather_object

from grpo_ustat.estimators.intervals import wilson
from grpo_ustat.policy.loading import Policy
from grpo_ustat.records import Prompt
from grpo_ustat.rollout.local import Sampling, sample
from grpo_ustat.tasks.base import Task, rewards


def held_out(
    policy: Policy, task: Task, prompts: list[Prompt], sampling: Sampling, accelerator: Accelerator
) -> np.ndarray:
    """Rewards of one completion per prompt, shape [P], the same on every rank.

    Draws are keyed by prompt alone, so evaluations at different steps share their randomness and
    differences between them are paired.
    """
    rank, world = accelerator.process_index, accelerator.num_processes
    mine = prompts[rank::world]
    found = rewards(task, sample(policy, mine, 1, sampling))[:, 0]
    shares = gather_object([found])
    result = np.zeros(len(prompts))
    for r, values in enumerate(shares):
        result[r::world] = values
    return result


def eval_row(step: int, reward_P: np.ndarray) -> dict[str, Any]:
    """One row of eval.csv, with a Wilson interval: one independent completion per question."""
    accuracy = wilson(int(reward_P.sum()), len(reward_P))
    return {
        "step": step,
        "split": "test",
        "decoding": "sampled",
        "accuracy": accuracy.estimate,
        "low": accuracy.low,
        "high": accuracy.high,
        "n": len(reward_P),
    }
