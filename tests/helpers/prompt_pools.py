"""Prompts of a law that is known, and pools of their completions."""

from __future__ import annotations

import numpy as np
from tabular import TabularPolicy

from grpo_ustat.estimators.moments import centred
from grpo_ustat.records import ScorePool


def prompts(count, rng, beta=(1.5, 3.5), spread=0.25, slope=1.0):
    """Score norms that differ between prompts by exp(+-2 spread), and fall with V."""
    p_P1 = rng.beta(*beta, (count, 1))
    rewards_PY = (rng.random((count, 40)) < p_P1).astype(float)
    scale_P1 = np.exp(spread * rng.normal(size=(count, 1)) - slope * p_P1)
    features = rng.normal(size=(count, 40, 8)) * np.exp(0.3 * rng.normal(size=(count, 40, 1)))
    return TabularPolicy(features * scale_P1[:, :, None], 0.5 * np.eye(8)[0], rewards_PY)


def whole_pool(scores, rewards, lengths, **more):
    """A pool [P, N] whose features and sums are those of the scores [P, N, D], in full."""
    return ScorePool(
        rewards_PN=rewards,
        gram_PNN=np.einsum("pid,pjd->pij", scores, scores),
        lengths_PN=lengths,
        features_PNR=scores,
        centred_sums_PR=np.einsum("pn,pnd->pd", centred(rewards), scores),
        **more,
    )


def pool_of(policy, size, rng):
    outcomes, rows = policy.sample(size, rng), np.arange(len(policy.rewards_PY))[:, None]
    scores, rewards = policy.scores_PYD[rows, outcomes], policy.rewards_PY[rows, outcomes]
    gram = np.einsum("pid,pjd->pij", scores, scores)
    nothing = np.zeros((1, 1))
    return ScorePool(rewards, gram, 1 + outcomes, nothing[None], nothing, nothing)
