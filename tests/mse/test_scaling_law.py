"""The scaling law against minibatches that were really drawn, not recomputed from C1 to C3."""

from __future__ import annotations

import sys
from pathlib import Path

import numpy as np
import pytest
from scipy import stats

from grpo_ustat.estimators.closed_form import CurvePoint, Request, closed_form
from grpo_ustat.mse.pool import build_pool
from grpo_ustat.policy.configured import configured_task

sys.path.insert(0, str(Path(__file__).parents[1] / "helpers"))
from commands import compose  # noqa: E402
from prompt_pools import pool_of  # noqa: E402
from tabular import known_policy  # noqa: E402


def predicted(pool, points):
    """({G: Interval} of leave-one-out minibatches of (G, B) points drawn with replacement, C1)."""
    rows = [CurvePoint("leave_one_out", size, "with_replacement", count) for size, count in points]
    asked = Request(rows, {}, len(pool.rewards_PN), False, {})
    found = closed_form(pool, asked, "completions")
    return {row.group_size: found[row.key] for row in rows}, found["c1"].estimate


def leave_one_out(z, scores):
    """Gradient estimates [..., D] of groups with rewards [..., G] and scores [..., G, D]."""
    size = z.shape[-1]
    advantage = (z - z.mean(axis=-1, keepdims=True)) * size / (size - 1)
    return np.einsum("...g,...gd->...d", advantage, scores) / size


@pytest.mark.slow
def test_minibatches_of_a_tabular_policy_follow_the_prediction():
    """n = 24 rollouts split six ways, 20 000 fresh minibatches each, |z| < 3.5 for all."""
    policy, rng, replicates = known_policy(), np.random.default_rng(3), 20_000
    points = [(g, 24 // g) for g in (2, 3, 4, 6, 8, 12)]
    law, _ = predicted(pool_of(policy, 600, np.random.default_rng(0)), points)
    truth = policy.gradient_PD.mean(axis=0)
    cumulative = policy.probabilities_PY.cumsum(axis=1)
    for size, count in points:
        chosen = rng.integers(len(cumulative), size=(replicates, count))
        draws = rng.random((replicates, count, size, 1))
        outcome = (draws > cumulative[chosen][:, :, None, :]).sum(axis=-1).clip(max=3)
        z = policy.rewards_PY[chosen[:, :, None], outcome]
        scores = policy.scores_PYD[chosen[:, :, None], outcome]
        estimate = leave_one_out(z, scores).mean(axis=1)
        squared = np.square(estimate - truth).sum(axis=1)
        half = (law[size].high - law[size].low) / 2 / 1.96
        error = np.hypot(squared.std() / replicates**0.5, half)
        assert abs(squared.mean() - law[size].estimate) < 3.5 * error, size


@pytest.mark.nightly(minutes=0.4)
def test_minibatches_of_tiny_follow_the_prediction(tmp_path):
    """n = 32 of 24 questions: the law from one pool, minibatches from another.

    The second pool is split into 24 disjoint parts, each of which gives one independent measurement
    at every G; t criterion at 1 % over the four comparisons together.
    """
    points, parts = [(2, 16), (4, 8), (8, 4), (16, 2)], 24
    small = ("model=tiny_direct", "study.questions=24", "launch.workers=1")
    one = compose("mse", *small, "budget.pool_completions=288")
    two = compose("mse", *small, "seed=1", f"budget.pool_completions={16 * parts}",
                  "budget.feature_sketch=4093")  # fmt: skip
    prompts = configured_task(one.task_options, one.model).prompts("study")[:24]
    first, _ = build_pool(one, prompts, tmp_path / "one")
    second, _ = build_pool(two, prompts, tmp_path / "two")
    law, c1 = predicted(first, points)
    rng, scores = np.random.default_rng(0), {}
    for size, count in points:
        measured = [minibatch_mse(second, block, size, count, rng) for block in range(parts)]
        error = np.hypot(
            np.std(measured, ddof=1) / parts**0.5, (law[size].high - law[size].low) / 3.92
        )
        # the minibatches below have no question twice (Cochran 1977, section 2.5)
        expected = law[size].estimate - (count - 1) / (24 - 1) * c1 / count
        scores[size] = (np.mean(measured) - expected) / error
        print(size, np.mean(measured), expected)
    limit = stats.t.ppf(1 - 0.01 / len(points) / 2, parts - 1)
    assert max(map(abs, scores.values())) < limit, scores


def minibatch_mse(pool, block, size, count, rng, replicates=400):
    """E||T - grad J||^2 from 16 completions per question: minibatches, unbiased in the sketch."""
    inside = slice(16 * block, 16 * block + 16)
    z, features = pool.rewards_PN[:, inside], pool.features_PNR[:, inside].astype(float)
    ghat = leave_one_out(z, features)
    cross = np.square(ghat.sum(axis=0)).sum() - np.square(ghat).sum()
    questions, total = len(z), 0.0
    for _ in range(replicates):
        chosen = rng.permutation(questions)[:count]
        group = rng.permuted(np.tile(np.arange(16), (count, 1)), axis=1)[:, :size]
        rows = chosen[:, None]
        estimate = leave_one_out(z[rows, group], features[rows, group]).mean(axis=0)
        total += np.square(estimate).sum()
    return total / replicates - grad_sq(pool, inside, cross, questions)


def grad_sq(pool, inside, cross, questions):
    """||grad J||^2 of a part: products between questions, and ||g||^2 within from halves."""
    z, features = pool.rewards_PN[:, inside], pool.features_PNR[:, inside].astype(float)
    halves = [leave_one_out(z[:, h], features[:, h]) for h in (slice(0, 8), slice(8, 16))]
    return (cross + (halves[0] * halves[1]).sum()) / questions**2
