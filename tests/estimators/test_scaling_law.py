"""The scaling law against minibatches that were really drawn, not recomputed from C1 to C3."""

from __future__ import annotations

import numpy as np
import pytest
from prompt_pools import pool_of
from tabular import known_policy

from grpo_ustat.estimators.closed_form import CurvePoint, Request, closed_form


def leave_one_out(z, scores):
    """Gradient estimates [..., D] of groups with rewards [..., G] and scores [..., G, D]."""
    size = z.shape[-1]
    advantage = (z - z.mean(axis=-1, keepdims=True)) * size / (size - 1)
    return np.einsum("...g,...gd->...d", advantage, scores) / size


@pytest.mark.slow
def test_minibatches_of_a_tabular_policy_follow_the_prediction():
    """n = 24 rollouts split six ways, 20 000 fresh minibatches each, |z| < 3.5 for all.

    The minibatches draw the policy's own m questions. Their C1 is (m - 1)/m of the estimate for the
    population from which the questions are a sample. The law is the mean over 12 pools.
    """
    policy, rng, replicates = known_policy(), np.random.default_rng(3), 20_000
    points = [
        CurvePoint("leave_one_out", size, "with_replacement", 24 // size)
        for size in (2, 3, 4, 6, 8, 12)
    ]
    pool_rng, questions = np.random.default_rng(0), len(policy.rewards_PY)
    laws = [closed_form(pool_of(policy, 60, pool_rng), Request(points, {}, {})) for _ in range(12)]
    truth = policy.gradient_PD.mean(axis=0)
    cumulative = policy.probabilities_PY.cumsum(axis=1)
    for point in points:
        size, count = point.group_size, point.num_prompts
        chosen = rng.integers(len(cumulative), size=(replicates, count))
        draws = rng.random((replicates, count, size, 1))
        outcome = (draws > cumulative[chosen][:, :, None, :]).sum(axis=-1).clip(max=3)
        z = policy.rewards_PY[chosen[:, :, None], outcome]
        scores = policy.scores_PYD[chosen[:, :, None], outcome]
        estimate = leave_one_out(z, scores).mean(axis=1)
        squared = np.square(estimate - truth).sum(axis=1)
        predicted = [
            law[point.key].estimate - law["c1"].estimate / questions / count for law in laws
        ]
        error = np.hypot(squared.std() / replicates**0.5, np.std(predicted, ddof=1) / 12**0.5)
        assert abs(squared.mean() - np.mean(predicted)) < 3.5 * error, size
