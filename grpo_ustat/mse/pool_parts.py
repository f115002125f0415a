"""Records that a pool keeps of one question: its completions, scored or not."""

from __future__ import annotations

from dataclasses import dataclass, fields

import numpy as np

from grpo_ustat.distributed.workers import WorkCost


@dataclass(frozen=True, kw_only=True)
class Completions:
    """N completions of one question with their rewards, not scored."""

    rewards_N: np.ndarray
    lengths_N: np.ndarray
    ended_N: np.ndarray
    # Padded with 0.
    tokens_NT: np.ndarray
    # The fields of `WorkCost`, in order.
    cost: np.ndarray
    # Versions of the packages that made it, as `scored_with`; None until it is written.
    packages: str | None = None
    # Of some completions, the mean absolute difference of the sampler's and the model's own
    # log-probabilities, nats a token, and the number of those tokens; None where the model itself
    # sampled.
    sampler_gap: np.ndarray | None = None
    # Rewards by the reward functions after the task's own; None where there is none.
    further_rewards_NF: np.ndarray | None = None

    @property
    def rewards_NF(self) -> np.ndarray:
        """Rewards by every reward function."""
        own_N1 = self.rewards_N[:, None]
        further_NF = self.further_rewards_NF
        return own_N1 if further_NF is None else np.concatenate([own_N1, further_NF], axis=1)

    @property
    def completions(self) -> Completions:
        """Completions without scores."""
        return Completions(**{x.name: getattr(self, x.name) for x in fields(Completions)})

    @property
    def work_cost(self) -> WorkCost:
        """Cost as a record."""
        counts, seconds = self.cost[:5].astype(int), self.cost[5:]
        return WorkCost(*counts.tolist(), *seconds.tolist())


@dataclass(frozen=True, kw_only=True)
class Part(Completions):
    """N scored completions of one question."""

    # <s_i, s_j>.
    gram_NN: np.ndarray
    # Sketches of the scores.
    features_NR: np.ndarray
    # Wider sketches of `sum_i (z_i - zbar) s_i`, zbar the part's mean reward, and of `sum_i s_i`.
    centred_sum_R: np.ndarray
    score_sum_R: np.ndarray
    # `centred_sum_R` of the reward functions after the task's own; None where there is none.
    further_centred_sums_FR: np.ndarray | None = None

    @property
    def centred_sums_FR(self) -> np.ndarray:
        """`centred_sum_R` of every reward function."""
        own_1R = self.centred_sum_R[None]
        further_FR = self.further_centred_sums_FR
        return own_1R if further_FR is None else np.concatenate([own_1R, further_FR])


@dataclass(frozen=True, kw_only=True)
class WeightedPart(Completions):
    """N completions of one question, scored with weights of their tokens, see `mse.off_policy`."""

    # Inner products and sketches of the vectors of every kind in turn.
    gram_VV: np.ndarray
    features_VR: np.ndarray
    # Sums over tokens of importance ratios rho, of their squares and of ones; the largest log of a
    # completion's product of them, and the sums of the products over that one and of their squares;
    # the sum over tokens of `rho - 1 - log rho`.
    drift: np.ndarray
