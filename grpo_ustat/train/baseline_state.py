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
from accelerate.utils import gather_object

from grpo_ustat.config.baseline import BaselineConfig
from grpo_ustat.estimators.baselines import (
    UnfitRewards,
    add_to_history,
    running_update,
    tracker_discount,
    tracker_start,
)
from grpo_ustat.policy.logprobs import left_padded, positions
from grpo_ustat.policy.output_layer import body, causal
from grpo_ustat.records import Rollouts
from grpo_ustat.tasks.base import summed_rewards
from grpo_ustat.train.batch import gather_by_prompt, sample_extra
from grpo_ustat.train.context import BaselineState, Batch, SamplingCost, TrainContext
from grpo_ustat.train.update import token_logprobs


class RunningMean(BaselineState):
    """Exponential moving average of past rewards, which starts at 0."""

    def __init__(self, decay: float):
        self.decay, self.running = decay, 0.0

    def context(
        self, run: TrainContext, batch: Batch, step: int
    ) -> tuple[dict[str, Any], SamplingCost]:
        """Return the average of past rewards."""
        return {"running": self.running}, SamplingCost()

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

    def context(
        self, run: TrainContext, batch: Batch, step: int
    ) -> tuple[dict[str, Any], SamplingCost]:
        """Return the history."""
        return {"history": self.history_23}, SamplingCost()

    def update(self, run: TrainContext, batch: Batch) -> None:
        """Add the batch's rewards to the history."""
        self.history_23 = add_to_history(self.history_23, batch.rewards_PG)

    def state_dict(self) -> dict[str, np.ndarray]:
        """Return the history."""
        return {"history": self.history_23}

    def load_state_dict(self, state: dict[str, np.ndarray]) -> None:
        """Restore the history."""
        self.history_23 = state["history"]


class Tracker(BaselineState):
    """SPO's tracker (Xu and Ding 2025): a Beta(alpha, beta) distribution for each prompt.

    Alpha and beta are discounted counts of successes and failures. When a prompt is used for the
    first time, they come from `budget.value_completions` additional completions. Whenever it is
    used, the counts are multiplied by rho, and the group's successes and failures are added. The
    more the policy has changed since the prompt was last used, the smaller is rho. The first
    completion of that last time measures the change: it is the mean absolute difference of its
    tokens' log-probabilities between then and now.
    """

    def __init__(self, rho_min: float, rho_max: float, half_distance: float):
        self.rho_min, self.rho_max, self.half_distance = rho_min, rho_max, half_distance
        # Counts alpha and beta by prompt id.
        self.counts: dict[str, tuple[float, float]] = {}
        # For each prompt id: tokens and log-probabilities of the first completion from the last
        # step that used the prompt.
        self.completions: dict[str, tuple[np.ndarray, np.ndarray]] = {}

    def context(
        self, run: TrainContext, batch: Batch, step: int
    ) -> tuple[dict[str, Any], SamplingCost]:
        """Return the prompts' expected rewards, alpha / (alpha + beta), and the sampling cost."""
        unseen = [prompt for prompt in batch.own_rollouts.prompts if prompt.id not in self.counts]
        rollouts, cost = sample_extra(run, unseen, run.config.budget.value_completions, step)
        first_counts = {}
        if rollouts is not None:
            rewards_PN = summed_rewards(run.task, rollouts)
            check_successes(rewards_PN)
            starts = zip(*tracker_start(rewards_PN, self.rho_min), strict=True)
            first_counts = dict(zip((prompt.id for prompt in unseen), starts, strict=True))
        self.counts |= merge_ranks(first_counts)
        counts_P2 = np.array([self.counts[prompt.id] for prompt in batch.prompts])
        return {"tracker_P": counts_P2[:, 0] / counts_P2.sum(axis=1)}, cost

    def update(self, run: TrainContext, batch: Batch) -> None:
        """Discount each prompt's counts and add its group's rewards."""
        check_successes(batch.rewards_PG)
        own_distances = self.distances(run, batch.own_rollouts)
        own_completions = first_completions(run, batch.own_rollouts)
        distances = merge_ranks(own_distances)
        self.completions |= merge_ranks(own_completions)
        distance_P = np.array([distances[prompt.id] for prompt in batch.prompts])
        rho_P = tracker_discount(distance_P, self.half_distance, self.rho_min, self.rho_max)
        successes_P, size = batch.rewards_PG.sum(axis=1), batch.rewards_PG.shape[1]
        for prompt, rho, successes in zip(batch.prompts, rho_P, successes_P, strict=True):
            alpha, beta = self.counts[prompt.id]
            self.counts[prompt.id] = (rho * alpha + successes, rho * beta + size - successes)

    def distances(self, run: TrainContext, rollouts: Rollouts) -> dict[str, float]:
        """Return the change of the policy, measured on each of this rank's prompts, by prompt id.

        The change is the mean absolute difference of log-probabilities in the prompt's stored
        completion, in nats per token. It is 0 if the prompt is used for the first time.
        """
        result = {prompt.id: 0.0 for prompt in rollouts.prompts}
        visited = [p for p, prompt in enumerate(rollouts.prompts) if prompt.id in self.completions]
        if visited:
            past = [self.completions[rollouts.prompts[p].id] for p in visited]
            current = completion_logprobs(run, rollouts, visited, [tokens for tokens, _ in past])
            for p, (_, before), after in zip(visited, past, current, strict=True):
                result[rollouts.prompts[p].id] = float(np.abs(before - after).mean())
        return result

    def state_dict(self) -> dict[str, np.ndarray]:
        """Return counts and stored completions as arrays."""
        ids, completions = list(self.counts), [self.completions[name] for name in self.counts]
        return {
            "ids": np.array(ids, dtype=np.str_),
            "counts": np.array([self.counts[name] for name in ids]),
            "lengths": np.array([len(tokens) for tokens, _ in completions]),
            "tokens": np.concatenate([tokens for tokens, _ in completions]),
            "logprobs": np.concatenate([logprobs for _, logprobs in completions]),
        }

    def load_state_dict(self, state: dict[str, np.ndarray]) -> None:
        """Restore counts and stored completions."""
        ids = state["ids"].tolist()
        counts = ((alpha, beta) for alpha, beta in state["counts"].tolist())
        self.counts = dict(zip(ids, counts, strict=True))
        cuts = np.cumsum(state["lengths"])[:-1]
        completions = (np.split(state[name], cuts) for name in ("tokens", "logprobs"))
        self.completions = dict(zip(ids, zip(*completions, strict=True), strict=True))


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

    def context(
        self, run: TrainContext, batch: Batch, step: int
    ) -> tuple[dict[str, Any], SamplingCost]:
        """Return the predicted reward of each prompt."""
        self.features_PD = np.array(gather_by_prompt(prompt_features(run, batch.own_rollouts)))
        if not len(self.moment):
            return {"critic_P": np.zeros(len(batch.prompts))}, SamplingCost()
        penalty = self.ridge * np.eye(len(self.moment))
        weights_D = np.linalg.solve(self.gram + penalty, self.moment)
        return {"critic_P": self.features_PD @ weights_D}, SamplingCost()

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
        "spo": Tracker,
        "critic": Critic,
        "ebpo": RewardHistory,
    }
    return kinds[baseline.name](**options) if baseline.name in kinds else BaselineState()


def merge_ranks(own_entries: dict[str, Any]) -> dict[str, Any]:
    """Return a dictionary with the entries of all ranks, the same on every rank."""
    return {name: value for share in gather_object([own_entries]) for name, value in share.items()}


def check_successes(rewards_PG: np.ndarray) -> None:
    """Raise UnfitRewards if a reward is outside [0, 1] and so cannot be counted as a success."""
    low, high = rewards_PG.min(), rewards_PG.max()
    if low < 0 or high > 1:
        raise UnfitRewards(
            f"baseline spo counts successes and needs rewards in [0, 1], got {low} to {high}: "
            "rescale the rewards"
        )


def first_completions(
    run: TrainContext, rollouts: Rollouts
) -> dict[str, tuple[np.ndarray, np.ndarray]]:
    """Return tokens and log-probabilities of the first completion of each prompt of this rank.

    The keys are prompt ids.
    """
    tokens = [rollouts.tokens_PGT[p, 0, : n[0]].copy() for p, n in enumerate(rollouts.lengths_PG)]
    logprobs = completion_logprobs(run, rollouts, list(range(len(tokens))), tokens)
    ids = (prompt.id for prompt in rollouts.prompts)
    return dict(zip(ids, zip(tokens, logprobs, strict=True), strict=True))


def completion_logprobs(
    run: TrainContext, rollouts: Rollouts, prompts: list[int], tokens: list[np.ndarray]
) -> list[np.ndarray]:
    """Compute the log-probabilities of the tokens in one given completion for each of some prompts.

    Args:
        run: training run, whose policy is used.
        rollouts: rollouts that contain the prompts.
        prompts: indices of the prompts in `rollouts.prompts`.
        tokens: token ids of each prompt's completion.
    """
    lengths = [len(row) for row in tokens]
    mask_PT = np.arange(max(lengths)) < np.array(lengths)[:, None]
    tokens_PT = np.zeros(mask_PT.shape, dtype=np.int64)
    tokens_PT[mask_PT] = np.concatenate(tokens)
    completions = Rollouts(
        prompts=[rollouts.prompts[p] for p in prompts],
        prompt_tokens=[rollouts.prompt_tokens[p] for p in prompts],
        tokens_PGT=tokens_PT[:, None],
        mask_PGT=mask_PT[:, None],
        ended_PG=np.ones((len(tokens), 1), dtype=bool),
        texts_PG=[[""] for _ in tokens],
    )
    index = np.arange(len(prompts))
    logprob_NT = token_logprobs(run, run.policy, completions, index).double().cpu().numpy()
    return [row[:length].copy() for row, length in zip(logprob_NT, lengths, strict=True)]


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
