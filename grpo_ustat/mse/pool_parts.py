"""Records for one question in a pool: scored or unscored completions."""

from __future__ import annotations

from dataclasses import dataclass, fields

import numpy as np

from grpo_ustat.distributed.workers import WorkCost


@dataclass(frozen=True, kw_only=True)
class Completions:
    """N completions of one question and their rewards, without scores."""

    rewards_N: np.ndarray
    lengths_N: np.ndarray
    ended_N: np.ndarray
    # Token ids, padded with 0.
    tokens_NT: np.ndarray
    # Fields of `WorkCost`, in order.
    cost: np.ndarray
    # Package versions from `scored_with`; None until the record is written.
    packages: str | None = None
    # Mean absolute difference between the sampler's and the model's log-probabilities (nats per
    # token) over some completions, and number of tokens in these completions; None if the model was
    # the sampler.
    sampler_gap: np.ndarray | None = None
    # Rewards from all reward functions except the first; None if there is only one function.
    further_rewards_NF: np.ndarray | None = None

    @property
    def rewards_NF(self) -> np.ndarray:
        """Rewards from all reward functions."""
        own_N1 = self.rewards_N[:, None]
        further_NF = self.further_rewards_NF
        return own_N1 if further_NF is None else np.concatenate([own_N1, further_NF], axis=1)

    @property
    def completions(self) -> Completions:
        """The same completions without scores."""
        return Completions(**{x.name: getattr(self, x.name) for x in fields(Completions)})

    @property
    def work_cost(self) -> WorkCost:
        """The cost as a `WorkCost`."""
        counts, seconds = self.cost[:5].astype(int), self.cost[5:]
        return WorkCost(*counts.tolist(), *seconds.tolist())


@dataclass(frozen=True, kw_only=True)
class Part(Completions):
    """N scored completions of one question."""

    # Inner products of the scores, <s_i, s_j>.
    gram_NN: np.ndarray
    # Sketches of the scores.
    features_NR: np.ndarray
    # Larger sketches of `sum_i (z_i - zbar) s_i` and `sum_i s_i`, with zbar the part's mean reward.
    centred_sum_R: np.ndarray
    score_sum_R: np.ndarray
    # `centred_sum_R` for all reward functions except the first; None if there is only one function.
    further_centred_sums_FR: np.ndarray | None = None

    @property
    def centred_sums_FR(self) -> np.ndarray:
        """`centred_sum_R` for all reward functions."""
        own_1R = self.centred_sum_R[None]
        further_FR = self.further_centred_sums_FR
        return own_1R if further_FR is None else np.concatenate([own_1R, further_FR])


@dataclass(frozen=True, kw_only=True)
class WeightedPart(Completions):
    """N completions of one question that were scored with token weights; see `mse.off_policy`."""

    # Inner products and sketches of the vectors; all vectors of one kind come before the next kind.
    gram_VV: np.ndarray
    features_VR: np.ndarray
    # Seven numbers. The first three are sums over tokens: importance ratios rho, squared ratios,
    # and the token count. The next three are computed from each completion's product of rho: the
    # log of the largest product, the sum of all products divided by the largest product, and the
    # sum of squares of these quotients. The last number is the sum over tokens of `rho - 1 - log
    # rho`.
    drift: np.ndarray
