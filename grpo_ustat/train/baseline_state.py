"""What baselines remember of past batches.

In every step `recall` comes before the batch's advantages and `learn` after them, both under the
policy that wrote the batch. So what is recalled holds nothing of the batch at hand, and the
baseline is unbiased given the past. All ranks learn from the whole batch and hold the same memory.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from accelerate.utils import gather_object

from grpo_ustat.config import BaselineConfig
from grpo_ustat.estimators.baselines import running_update, tracker_discount, tracker_start
from grpo_ustat.policy.loading import Policy
from grpo_ustat.policy.logprobs import left_padded, positions
from grpo_ustat.policy.output_layer import body, causal
from grpo_ustat.records import Rollouts
from grpo_ustat.tasks.base import rewards
from grpo_ustat.training.batch import Batch, Extra, fresh, gathered
from grpo_ustat.training.update import token_logprobs

if TYPE_CHECKING:
    from grpo_ustat.training.setup import Run

Recalled = tuple[dict[str, Any], Extra]


class Memory:
    """No memory: that of most rules."""

    def recall(self, run: Run, batch: Batch, step: int) -> Recalled:
        """Fields of the baseline's context, for all prompts, and what they cost."""
        return {}, Extra()

    def learn(self, run: Run, batch: Batch) -> None:
        """Take the batch in; its advantages are known by now."""

    def state_dict(self) -> dict[str, np.ndarray]:
        """Everything remembered, as arrays."""
        return {}

    def load_state_dict(self, state: dict[str, np.ndarray]) -> None:
        """Restore what `state_dict` gave."""


class RunningMean(Memory):
    """The moving average of rewards; it starts at 0, so the first step has no baseline."""

    def __init__(self, decay: float):
        self.decay, self.running = decay, 0.0

    def recall(self, run: Run, batch: Batch, step: int) -> Recalled:
        """See `Memory`."""
        return {"running": self.running}, Extra()

    def learn(self, run: Run, batch: Batch) -> None:
        """See `Memory`."""
        self.running = running_update(self.running, batch.rewards_PG, self.decay)

    def state_dict(self) -> dict[str, np.ndarray]:
        """See `Memory`."""
        return {"running": np.array(self.running)}

    def load_state_dict(self, state: dict[str, np.ndarray]) -> None:
        """See `Memory`."""
        self.running = float(state["running"])


class Tracker(Memory):
    """SPO's tracker (Xu and Ding 2025): a Beta(alpha, beta) for each prompt.

    A prompt seen for the first time starts from `budget.value_completions` completions outside the
    batch. Each visit discounts the past by rho, from the mean absolute change of the token
    log-probabilities of the last visit's first completion, and adds the group's rewards.
    """

    def __init__(self, rho_min: float, rho_max: float, half_distance: float):
        self.rho_min, self.rho_max, self.half_distance = rho_min, rho_max, half_distance
        self.counts: dict[str, tuple[float, float]] = {}
        self.answers: dict[str, tuple[np.ndarray, np.ndarray]] = {}  # tokens, log-probabilities

    def recall(self, run: Run, batch: Batch, step: int) -> Recalled:
        """See `Memory`."""
        unseen = [prompt for prompt in batch.rollouts.prompts if prompt.id not in self.counts]
        rollouts, extra = fresh(run, unseen, run.config.budget.value_completions, step)
        started = {}
        if rollouts is not None:
            found = _checked(rewards(run.task, rollouts))
            starts = zip(*tracker_start(found, self.rho_min), strict=True)
            started = dict(zip((prompt.id for prompt in unseen), starts, strict=True))
        self.counts |= _merged(started)
        counts_P2 = np.array([self.counts[prompt.id] for prompt in batch.prompts])
        return {"tracker_P": counts_P2[:, 0] / counts_P2.sum(axis=1)}, extra

    def learn(self, run: Run, batch: Batch) -> None:
        """See `Memory`."""
        distances, answers = self._distances(run, batch.rollouts), _answers(run, batch.rollouts)
        distances, self.answers = _merged(distances), self.answers | _merged(answers)
        distance_P = np.array([distances[prompt.id] for prompt in batch.prompts])
        rho_P = tracker_discount(distance_P, self.half_distance, self.rho_min, self.rho_max)
        right_P, size = _checked(batch.rewards_PG).sum(axis=1), batch.rewards_PG.shape[1]
        for prompt, rho, right in zip(batch.prompts, rho_P, right_P, strict=True):
            alpha, beta = self.counts[prompt.id]
            self.counts[prompt.id] = (rho * alpha + right, rho * beta + size - right)

    def _distances(self, run: Run, rollouts: Rollouts) -> dict[str, float]:
        """D of this rank's prompts; 0 at a first visit."""
        result = {prompt.id: 0.0 for prompt in rollouts.prompts}
        seen = [p for p, prompt in enumerate(rollouts.prompts) if prompt.id in self.answers]
        if seen:
            past = [self.answers[rollouts.prompts[p].id] for p in seen]
            now = _logprobs(run, _as_rollouts(rollouts, seen, [tokens for tokens, _ in past]))
            for p, (_, before), after in zip(seen, past, now, strict=True):
                result[rollouts.prompts[p].id] = float(np.abs(before - after).mean())
        return result

    def state_dict(self) -> dict[str, np.ndarray]:
        """See `Memory`."""
        ids, answers = list(self.counts), [self.answers[name] for name in self.counts]
        return {
            "ids": np.array(ids, dtype=np.str_),
            "counts": np.array([self.counts[name] for name in ids]),
            "lengths": np.array([len(tokens) for tokens, _ in answers]),
            "tokens": np.concatenate([tokens for tokens, _ in answers]),
            "logprobs": np.concatenate([logprobs for _, logprobs in answers]),
        }

    def load_state_dict(self, state: dict[str, np.ndarray]) -> None:
        """See `Memory`."""
        ids = state["ids"].tolist()
        self.counts = dict(zip(ids, map(tuple, state["counts"].tolist()), strict=True))
        cuts = np.cumsum(state["lengths"])[:-1]
        answers = (np.split(state[name], cuts) for name in ("tokens", "logprobs"))
        self.answers = dict(zip(ids, zip(*answers, strict=True), strict=True))


class Critic(Memory):
    """A linear value head on the policy's last hidden state at the prompt's last token.

    Least squares with a ridge on the mean rewards of past batches, batch k steps ago at weight
    decay^k; 0 for every prompt before the first batch. Hidden states are those of their own time.
    """

    def __init__(self, decay: float, ridge: float):
        self.decay, self.ridge = decay, ridge
        self.gram, self.moment = np.zeros((0, 0)), np.zeros(0)
        self.features_PD = np.zeros((0, 0))  # of the batch at hand

    def recall(self, run: Run, batch: Batch, step: int) -> Recalled:
        """See `Memory`."""
        self.features_PD = np.array(gathered(run.accelerator, _hidden(run, batch.rollouts)))
        if not len(self.moment):
            return {"critic_P": np.zeros(len(batch.prompts))}, Extra()
        penalty = self.ridge * np.eye(len(self.moment))
        weights_D = np.linalg.solve(self.gram + penalty, self.moment)
        return {"critic_P": self.features_PD @ weights_D}, Extra()

    def learn(self, run: Run, batch: Batch) -> None:
        """See `Memory`."""
        x_PD, width = self.features_PD, self.features_PD.shape[1]
        if not len(self.moment):
            self.gram, self.moment = np.zeros((width, width)), np.zeros(width)
        self.gram = self.decay * self.gram + x_PD.T @ x_PD
        self.moment = self.decay * self.moment + x_PD.T @ batch.rewards_PG.mean(axis=1)

    def state_dict(self) -> dict[str, np.ndarray]:
        """See `Memory`."""
        return {"gram": self.gram, "moment": self.moment}

    def load_state_dict(self, state: dict[str, np.ndarray]) -> None:
        """See `Memory`."""
        self.gram, self.moment = state["gram"], state["moment"]


def make_memory(rule: BaselineConfig) -> Memory:
    """The memory behind a rule."""
    options = dict(rule.options)
    options.pop("epsilon", None)
    kinds = {"running_mean": RunningMean, "spo": Tracker, "critic": Critic}
    return kinds[rule.name](**options) if rule.name in kinds else Memory()


def _merged(mine: dict[str, Any]) -> dict[str, Any]:
    """All ranks' entries."""
    return {name: value for share in gather_object([mine]) for name, value in share.items()}


def _checked(rewards_PG: np.ndarray) -> np.ndarray:
    """Rewards that count as successes.

    Raises:
        ValueError: one is outside [0, 1].
    """
    low, high = rewards_PG.min(), rewards_PG.max()
    if low < 0 or high > 1:
        raise ValueError(
            f"baseline spo counts successes and needs rewards in [0, 1], got {low} to {high}: "
            "rescale the rewards"
        )
    return rewards_PG


def _as_rollouts(rollouts: Rollouts, prompts: list[int], tokens: list[np.ndarray]) -> Rollouts:
    """One given completion of each of the listed prompts."""
    width = max(map(len, tokens))
    mask_PT = np.arange(width) < np.array([len(row) for row in tokens])[:, None]
    tokens_PT = np.zeros(mask_PT.shape, dtype=np.int64)
    tokens_PT[mask_PT] = np.concatenate(tokens)
    return Rollouts(
        prompts=[rollouts.prompts[p] for p in prompts],
        prompt_tokens=[rollouts.prompt_tokens[p] for p in prompts],
        tokens_PGT=tokens_PT[:, None],
        mask_PGT=mask_PT[:, None],
        ended_PG=np.ones((len(tokens), 1), dtype=bool),
        texts_PG=[[""] for _ in tokens],
    )


def _answers(run: Run, rollouts: Rollouts) -> dict[str, tuple[np.ndarray, np.ndarray]]:
    """Tokens and log-probabilities of the first completion of each of this rank's prompts."""
    tokens = [rollouts.tokens_PGT[p, 0, : n[0]].copy() for p, n in enumerate(rollouts.lengths_PG)]
    found = _logprobs(run, _as_rollouts(rollouts, list(range(len(tokens))), tokens))
    ids = (prompt.id for prompt in rollouts.prompts)
    return dict(zip(ids, zip(tokens, found, strict=True), strict=True))


def _logprobs(run: Run, rollouts: Rollouts) -> list[np.ndarray]:
    """Token log-probabilities of completions, one per prompt, under the policy of now."""
    index = np.arange(len(rollouts.prompts))
    found_NT = token_logprobs(run, run.policy, rollouts, index).double().cpu().numpy()
    return [row[:n].copy() for row, n in zip(found_NT, rollouts.lengths_PG[:, 0], strict=True)]


@torch.inference_mode()
def _hidden(run: Run, rollouts: Rollouts) -> np.ndarray:
    """Last hidden state at each prompt's last token, and a constant 1: [P, D + 1], float64."""
    count, longest = len(rollouts.prompts), max(map(len, rollouts.prompt_tokens))

    def read() -> np.ndarray:
        size = max(1, run.passes.tokens // longest)
        parts = np.split(np.arange(count), range(size, count, size))
        return np.concatenate([_last_hidden(run.policy, rollouts, part) for part in parts])

    return np.concatenate([run.passes.attempt(read), np.ones((count, 1))], axis=1)


def _last_hidden(policy: Policy, rollouts: Rollouts, prompts: np.ndarray) -> np.ndarray:
    rows = [rollouts.prompt_tokens[p] for p in prompts]
    ids_PL, mask_PL = left_padded(rows, policy.pad_token, policy.model.device)
    with policy.computing():
        hidden_PLD = body(causal(policy.model))(
            input_ids=ids_PL,
            attention_mask=mask_PL,
            position_ids=positions(mask_PL),
            use_cache=False,
        ).last_hidden_state
    return hidden_PLD[:, -1].double().cpu().numpy()
