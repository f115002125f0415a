"""Windows: scored groups from consecutive generation batches, collected until there are enough.

With TRL's defaults a generation batch has a single prompt, so one batch is not enough to compare
prompts. A window therefore collects the groups of several batches. The policy changes a little from
batch to batch, which affects the constants differently:

- C2 and C3 are means over groups, and each group contributes a value of the policy that wrote it.
  They are means over these policies.
- C1 and ||grad J||^2 need inner products between groups. If the groups come from several policies,
  the estimates are means of <grad J_s, grad J_t> over pairs of steps s and t of the window. Such a
  product is too small on average, because the update on an earlier group has already made part of
  the improvement in that group's direction. ||grad J||^2 is therefore underestimated, and C1 is
  overestimated by the same amount. In simulations, ||grad J||^2 was too small by 1, 12, 29 and 61 %
  if the policy changed by .02, .13, .48 and 1.3 nats per completion within a window.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np

from grpo_ustat.estimators.groups import GroupTerms, group_terms
from grpo_ustat.estimators.intervals import MIN_UNITS
from grpo_ustat.estimators.moments import pool_gradient_weights
from grpo_ustat.integrations.trl.generation import Group
from grpo_ustat.policy.scores.groups import GroupScores, gradient_gram
from grpo_ustat.records import Array, Integers, Mask, ScorePool

# Minimum number of groups in a window if a generation batch has fewer than MIN_UNITS groups.
WINDOW_GROUPS = 16


@dataclass(frozen=True)
class ScoredGroup:
    """Group of a generation batch, with its scores (gradients) but without its tokens."""

    # Number of updates before the group was generated.
    step: int
    # See `generation.Group`.
    rewards_G: Array
    rewards_GF: Array
    # Number of tokens that the policy wrote in each completion.
    lengths_G: Integers
    # True for each completion that contributes to TRL's loss.
    counted_G: Mask
    # None if no scores were computed: the rewards are equal, so the gradient is 0 in any case.
    scores: GroupScores | None


@dataclass
class OpenWindow:
    """Groups of the generation batches since the last complete window."""

    groups: list[ScoredGroup] = field(default_factory=list)
    batches: int = 0
    # Number of groups left out because no reward function gave a reward to some completion.
    unknown: int = 0

    @property
    def is_full(self) -> bool:
        """True if there are enough batches for a window; see `window_batches`."""
        return self.batches >= window_batches(max(1, len(self.groups) // self.batches))


@dataclass(frozen=True)
class Window:
    """Estimates from the groups of consecutive generation batches."""

    # Number of updates before the first batch of the window, and before its last batch.
    first: int
    last: int
    terms: GroupTerms
    # Number of groups left out because no reward function gave a reward to some completion.
    unknown: int


def scored_group(step: int, group: Group, scores: GroupScores | None) -> ScoredGroup:
    """Return a scored group, without tokens, from a group and its scores."""
    return ScoredGroup(
        step,
        group.rewards_G,
        group.rewards_GF,
        np.array([completion.length for completion in group.completions]),
        np.array([completion.counted for completion in group.completions]),
        scores,
    )


def window_batches(groups: int) -> int:
    """Return the number of generation batches in a window, given the number of groups per batch.

    >>> window_batches(8), window_batches(2), window_batches(1)
    (1, 8, 16)
    """
    return 1 if groups >= MIN_UNITS else math.ceil(WINDOW_GROUPS / groups)


def window_of(groups: Sequence[ScoredGroup], unknown: int, same_policy: bool = True) -> Window:
    """Compute the estimates of a window from its groups.

    Args:
        groups: at least two scored groups.
        unknown: see `Window`.
        same_policy: True if the policy in the scores wrote the completions. The expected score is
            then 0, which the estimates use.
    """
    rewards_PG = np.stack([group.rewards_G for group in groups])
    sq_norm_PG, gram_PP = np.zeros(rewards_PG.shape), np.zeros((len(groups), len(groups)))
    gradients = {
        place: group.scores.gradient(pool_gradient_weights(group.rewards_G))
        for place, group in enumerate(groups)
        if group.scores is not None
    }
    if varied := list(gradients):
        sq_norm_PG[varied] = [gradients[place].sq_norm_G for place in varied]
        gram_PP[np.ix_(varied, varied)] = gradient_gram(list(gradients.values()))
    size = rewards_PG.shape[1]
    gram_PGG = np.stack([np.zeros((size, size)) if g.scores is None else g.scores.gram_GG
                         for g in groups])  # fmt: skip
    terms = group_terms(rewards_PG, sq_norm_PG, gram_PP, None if same_policy else gram_PGG)
    return Window(groups[0].step, groups[-1].step, terms, unknown)


def score_pool(groups: Sequence[ScoredGroup]) -> ScorePool:
    """Return the groups as a score pool: each prompt has the N = G completions of its group.

    Groups without scores get scores of 0. This changes nothing, because every loss gives their
    completions the weight 0.
    """
    size = len(groups[0].rewards_G)
    dimension = max(
        (group.scores.features_GR.shape[1] for group in groups if group.scores is not None),
        default=1,
    )
    features_PNR = np.zeros((len(groups), size, dimension), dtype=np.float32)
    gram_PNN = np.zeros((len(groups), size, size))
    for place, group in enumerate(groups):
        if group.scores is not None:
            features_PNR[place], gram_PNN[place] = group.scores.features_GR, group.scores.gram_GG
    return ScorePool(
        rewards_PN=np.stack([group.rewards_G for group in groups]),
        gram_PNN=gram_PNN,
        lengths_PN=np.stack([group.lengths_G for group in groups]),
        features_PNR=features_PNR,
        centred_sums_PR=None,
        ended_PN=np.stack([group.counted_G for group in groups]),
        rewards_PNF=np.stack([group.rewards_GF for group in groups]),
    )
