"""Records of what a pool keeps of one question: its completions, scored or not."""

from __future__ import annotations

from dataclasses import dataclass, fields

import numpy as np

from grpo_ustat.distributed.workers import WorkCost


@dataclass(frozen=True, kw_only=True)
class Completions:
    """N completions of one question with their rewards, not scored.

    Attributes:
        rewards_N, lengths_N, ended_N, tokens_NT: the completions; tokens are padded with 0.
        cost: what it took, as the fields of `WorkCost`.
        packages: versions of the packages that made it, as `scored_with`; None until it is
            written.
        sampler_gap: of some of them, the mean absolute difference of the sampler's and the model's
            own log-probabilities, nats a token, and the number of those tokens; None where the
            model itself sampled.
        further_rewards_NF: rewards by the reward functions after the task's own; None where there
            is none.
    """

    rewards_N: np.ndarray
    lengths_N: np.ndarray
    ended_N: np.ndarray
    tokens_NT: np.ndarray
    cost: np.ndarray
    packages: str | None = None
    sampler_gap: np.ndarray | None = None
    further_rewards_NF: np.ndarray | None = None

    @property
    def rewards_NF(self) -> np.ndarray:
        """Rewards by every reward function."""
        own_N1 = self.rewards_N[:, None]
        further_NF = self.further_rewards_NF
        return own_N1 if further_NF is None else np.concatenate([own_N1, further_NF], axis=1)

    @property
    def completions(self) -> Completions:
        """The completions without scores."""
        return Completions(**{x.name: getattr(self, x.name) for x in fields(Completions)})

    @property
    def work_cost(self) -> WorkCost:
        """The cost as a record."""
        counts, seconds = self.cost[:5].astype(int), self.cost[5:]
        return WorkCost(*counts.tolist(), *seconds.tolist())


@dataclass(frozen=True, kw_only=True)
class Part(Completions):
    """N scored completions of one question.

    Attributes:
        gram_NN: <s_i, s_j>.
        features_NR: sketches of the scores.
        centred_sum_R, score_sum_R: wider sketches of `sum_i (z_i - zbar) s_i`, zbar the part's mean
            reward, and of `sum_i s_i`.
        further_centred_sums_FR: `centred_sum_R` of the reward functions after the task's own; None
            where there is none.
    """

    gram_NN: np.ndarray
    features_NR: np.ndarray
    centred_sum_R: np.ndarray
    score_sum_R: np.ndarray
    further_centred_sums_FR: np.ndarray | None = None

    @property
    def centred_sums_FR(self) -> np.ndarray:
        """`centred_sum_R` of every reward function."""
        own_1R = self.centred_sum_R[None]
        further_FR = self.further_centred_sums_FR
        return own_1R if further_FR is None else np.concatenate([own_1R, further_FR])


@dataclass(frozen=True, kw_only=True)
class WeightedPart(Completions):
    """N completions of one question, scored with weights of their tokens, see `mse.off_policy`.

    Attributes:
        gram_VV, features_VR: inner products and sketches of the vectors of every kind in turn.
        drift: sums over tokens of importance ratios rho, of their squares and of ones; the largest
            log of a completion's product of them, and the sums of the products over that one and of
            their squares; the sum over tokens of `rho - 1 - log rho`.
    """

    gram_VV: np.ndarray
    features_VR: np.ndarray
    drift: np.ndarray
