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
    # Two numbers for some compared completions: the mean absolute difference between the sampler's
    # and the model's log-probabilities (nats per token), and the number of tokens. None if the
    # model itself was the sampler.
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
    # Larger sketches of two sums over completions i with score s_i and reward z_i:
    # `sum_i (z_i - zbar) s_i`, with zbar the part's mean reward, and `sum_i s_i`.
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

    # Inner products and sketches of the weighted scores. A loss may need several kinds of weighted
    # scores; the V rows contain all completions of the first kind, then all of the second, ...
    gram_VV: np.ndarray
    features_VR: np.ndarray
    # Seven numbers on the importance ratios rho of the tokens. The first three are sums over
    # tokens: of rho, of rho^2, and of 1. The next three use the product of rho over each
    # completion: the log of the largest product, the sum over completions of product / largest
    # product, and the sum of the squares of these quotients. The last number is the sum over tokens
    # of `rho - 1 - log rho`.
    drift: np.ndarray
