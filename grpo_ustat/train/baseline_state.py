"""State that baselines keep between batches.

In every step, `context` is called before the batch's advantages are computed, and `update` is
called afterwards, before the policy is updated. What `context` returns therefore does not depend on
the completions of the current batch. If a baseline reads nothing else, the gradient is an unbiased
estimate for the current policy. Every rank updates its state with the completions of all ranks, so
all ranks have the same state.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import torch

from grpo_ustat.config.baseline import BaselineConfig
from grpo_ustat.estimators.baselines import (
    add_to_history,
    running_update,
)
from grpo_ustat.policy.logprobs import left_padded, positions
from grpo_ustat.policy.output_layer import body, causal
from grpo_ustat.records import Rollouts
from grpo_ustat.train.batch import gather_by_prompt
from grpo_ustat.train.context import BaselineState, Batch, TrainContext


class RunningMean(BaselineState):
    """Exponential moving average of past rewards, which starts at 0."""

    def __init__(self, decay: float):
        self.decay, self.running = decay, 0.0

    def context(self, run: TrainContext, batch: Batch) -> dict[str, Any]:
        """Return the average of past rewards."""
        return {"running": self.running}

    def update(self, run: TrainContext, batch: Batch) -> None:
        """Move the average towards the mean reward of the batch."""
        self.running = running_update(self.running, batch.rewards_PG, self.decay)

    def state_dict(self) -> dict[str, np.ndarray]:
        """Return the average."""
        return {"running": np.array(self.running)}

    def load_state_dict(self, state: dict[str, np.ndarray]) -> None:
        """Restore the average."""
        self.running = float(state["running"])


class RewardHistory(BaselineState):
    """Moments of all rewards and all group means since the first step, for the baseline `ebpo`."""

    def __init__(self):
        # For rewards (row 0) and group means (row 1): their number, mean, and sum of squared
        # deviations from the mean.
        self.history_23 = np.zeros((2, 3))

    def context(self, run: TrainContext, batch: Batch) -> dict[str, Any]:
        """Return the history."""
        return {"history": self.history_23}

    def update(self, run: TrainContext, batch: Batch) -> None:
        """Add the batch's rewards to the history."""
        self.history_23 = add_to_history(self.history_23, batch.rewards_PG)

    def state_dict(self) -> dict[str, np.ndarray]:
        """Return the history."""
        return {"history": self.history_23}

    def load_state_dict(self, state: dict[str, np.ndarray]) -> None:
        """Restore the history."""
        self.history_23 = state["history"]


class Critic(BaselineState):
    """Linear prediction of a prompt's mean reward from the policy's hidden state.

    The input is the last hidden state at the prompt's last token, from the policy that sampled the
    batch. The weights are fitted by ridge regression to the mean rewards of prompts in past
    batches. A batch from k steps ago has weight decay^k. Before the first batch, the prediction
    is 0.
    """

    def __init__(self, decay: float, ridge: float):
        self.decay, self.ridge = decay, ridge
        # Weighted sums over past batches of x x' and of x times the mean reward, with features x.
        self.gram, self.moment = np.zeros((0, 0)), np.zeros(0)
        # Features of the current batch's prompts: D numbers for each prompt.
        self.features_PD = np.zeros((0, 0))

    def context(self, run: TrainContext, batch: Batch) -> dict[str, Any]:
        """Return the predicted reward of each prompt."""
        self.features_PD = np.array(gather_by_prompt(prompt_features(run, batch.own_rollouts)))
        if not len(self.moment):
            return {"critic_P": np.zeros(len(batch.prompts))}
        penalty = self.ridge * np.eye(len(self.moment))
        weights_D = np.linalg.solve(self.gram + penalty, self.moment)
        return {"critic_P": self.features_PD @ weights_D}

    def update(self, run: TrainContext, batch: Batch) -> None:
        """Add the batch's features and mean rewards to the least-squares sums."""
        x_PD, width = self.features_PD, self.features_PD.shape[1]
        if not len(self.moment):
            self.gram, self.moment = np.zeros((width, width)), np.zeros(width)
        self.gram = self.decay * self.gram + x_PD.T @ x_PD
        self.moment = self.decay * self.moment + x_PD.T @ batch.rewards_PG.mean(axis=1)

    def state_dict(self) -> dict[str, np.ndarray]:
        """Return the least-squares sums."""
        return {"gram": self.gram, "moment": self.moment}

    def load_state_dict(self, state: dict[str, np.ndarray]) -> None:
        """Restore the least-squares sums."""
        self.gram, self.moment = state["gram"], state["moment"]


def make_baseline_state(baseline: BaselineConfig) -> BaselineState:
    """Return the state of a baseline; for most baselines, it is empty."""
    options = dict(baseline.options)
    options.pop("epsilon", None)
    kinds = {
        "running_mean": RunningMean,
        "critic": Critic,
        "ebpo": RewardHistory,
    }
    return kinds[baseline.name](**options) if baseline.name in kinds else BaselineState()


@torch.inference_mode()
def prompt_features(run: TrainContext, rollouts: Rollouts) -> np.ndarray:
    """Return the features of each prompt for `Critic`, [P, D + 1], float64.

    They are the last hidden state at the prompt's last token, of size D, and the constant 1.
    """
    policy, prompt_tokens = run.policy, rollouts.prompt_tokens

    def hidden_states() -> np.ndarray:
        """Compute the hidden states, [P, D], a few prompts at a time to fit the token budget."""
        size = max(1, run.token_budget.tokens // max(map(len, prompt_tokens)))
        parts = []
        for start in range(0, len(prompt_tokens), size):
            rows = prompt_tokens[start : start + size]
            ids_PL, mask_PL = left_padded(rows, policy.pad_token, policy.model.device)
            with policy.computing():
                hidden_PLD = body(causal(policy.model))(
                    input_ids=ids_PL,
                    attention_mask=mask_PL,
                    position_ids=positions(mask_PL),
                    use_cache=False,
                ).last_hidden_state
            parts.append(hidden_PLD[:, -1].double().cpu().numpy())
        return np.concatenate(parts)

    hidden_PD = run.token_budget.attempt(hidden_states)
    return np.concatenate([hidden_PD, np.ones((len(prompt_tokens), 1))], axis=1)
