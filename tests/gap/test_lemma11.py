"""Lemma 11: moments against every group there is, limits, and its verdicts."""

from __future__ import annotations

import itertools
import math
import statistics

import numpy as np
import pytest
from reference import softmax_policy

from grpo_ustat.gap.lemma11 import by_prompt, lemma11, limits, mean_weight, moments
from grpo_ustat.runs.record import AGREES

LOGITS = [[0.3, -0.8, 0.5], [-0.2, 1.1, 0.4]]
REWARDS = [[1.0, 0.0, 0.0], [0.0, 1.0, 1.0]]


def policy():
    """Probabilities [P, Y], scores [P, Y, K] and rewards [P, Y] of two softmax prompts."""
    found = [softmax_policy(logits) for logits in LOGITS]
    return tuple(np.array(x) for x in ([p for p, _ in found], [s for _, s in found], REWARDS))


def every_group(prompt, group_size, epsilon):
    """E||N - U||^2, tr Cov N, tr Cov U and the bias, by a walk over all groups."""
    p, scores = softmax_policy(LOGITS[prompt])
    scores, rewards = np.array(scores), REWARDS[prompt]
    value = sum(a * z for a, z in zip(p, rewards, strict=True))
    sigma = math.sqrt(value * (1 - value))
    g = sum(a * z * s for a, z, s in zip(p, rewards, scores, strict=True))
    rows = []
    for group in itertools.product(range(3), repeat=group_size):
        z = [rewards[y] for y in group]
        centred = [z[i] - statistics.mean(z[:i] + z[i + 1 :]) for i in range(group_size)]
        plain = sum(a * scores[y] for a, y in zip(centred, group, strict=True)) / group_size
        own = plain / (statistics.stdev(z) + epsilon) if len(set(z)) > 1 else 0 * plain
        rows.append((math.prod(p[y] for y in group), own, plain / sigma))
    chance = np.array([row[0] for row in rows])
    own, plain = (np.array([row[k] for row in rows]) for k in (1, 2))

    def spread(x):
        return chance @ np.square(x - chance @ x).sum(axis=1)

    bias = (chance @ own - g / sigma) @ g / np.linalg.norm(g)
    return chance @ np.square(own - plain).sum(axis=1), spread(own), spread(plain), bias


@pytest.mark.parametrize("epsilon", [0.0, 0.3])
@pytest.mark.parametrize("group_size", [2, 3, 5])
def test_equals_a_walk_over_all_groups(group_size, epsilon):
    found = moments(by_prompt(*policy()), group_size, epsilon)
    for prompt in range(2):
        mine = [values[prompt] for values in found.values()]
        np.testing.assert_allclose(mine, every_group(prompt, group_size, epsilon), rtol=1e-12)


def test_limits_for_large_groups():
    """The delta method's constants; what is left falls like 1/G."""
    of_prompts = by_prompt(*policy())
    within, shift, bias = limits(of_prompts)
    for size in (2**12, 2**16):
        found = moments(of_prompts, size, 0.0)
        expected = (shift, within + shift, within + 4 * shift, -bias)
        for value, limit in zip(found.values(), expected, strict=True):
            np.testing.assert_allclose(size * value, limit, rtol=40 / size)
    v = of_prompts[0]
    fourth = v * (1 - v) ** 4 + (1 - v) * v**4
    variance = v * (1 - v)
    expected = of_prompts[1] * (fourth - variance**2) / (4 * variance**3)
    np.testing.assert_allclose(shift, expected, rtol=1e-12)


def test_slope_and_verdict_for_half_right_answers(rng):
    """At V = 1/2 the difference has the faster rate."""
    scores = rng.normal(size=(1, 2, 3, 2))
    scores -= scores.mean(axis=(1, 2), keepdims=True)
    rewards = np.array([[1.0] * 3 + [0.0] * 3])
    found = lemma11(np.full((1, 6), 1 / 6), scores.reshape(1, 6, 2), rewards, [4, 16, 64, 256], 0.0)
    assert found.claims[0].predicted == -2.0 and found.verdict == AGREES


# The best group size at n rollouts of the derivations, by errors of eight prompts


def eight_prompts(theta=0.8):
    """Eight prompts of six outcomes, 0/1 rewards, V from 0.08 to 0.8, as in `policy`."""
    rng = np.random.default_rng(3)
    features, parameters = rng.normal(size=(8, 6, 5)), theta * rng.normal(size=5)
    rewards = (rng.random((8, 6)) < 0.35).astype(float)
    rewards[:, 0], rewards[:, 1] = 1, 0
    weights = np.exp(features @ parameters)
    law = weights / weights.sum(axis=1, keepdims=True)
    return law, features - np.einsum("py,pyk->pk", law, features)[:, None], rewards


def test_the_best_size_of_a_normalised_rule_grows_like_the_cube_root_of_n():
    """Exact errors of eight prompts at every G: 24, 35 and 84 where the leading term,
    `(2 ||b||^2 n / C1)^(1/3)`, has 21.0, 33.4 and 82.8; `group_std` subtracts the group's mean.
    """
    law, scores, rewards = eight_prompts()
    of_prompts = by_prompt(law, scores, rewards)
    value, v = of_prompts[0], of_prompts[0] * (1 - of_prompts[0])
    g_PK = np.einsum("py,pyk->pk", law * rewards, scores)
    tau_PK = g_PK / np.sqrt(v)[:, None]

    def spread(x_PK):
        return np.square(x_PK - x_PK.mean(axis=0)).sum(axis=1).mean()

    b_K = -(g_PK * ((1 + 4 * v) / (8 * v**1.5))[:, None]).mean(axis=0)
    rate, errors = 2 * b_K @ b_K / spread(tau_PK), {}
    for size in range(3, 130):
        shrink = (size - 1) / size
        mean_PK = shrink * g_PK * mean_weight(value, size, 0.0)[:, None]
        bias = (mean_PK - tau_PK).mean(axis=0)
        noise = spread(mean_PK) + shrink**2 * moments(of_prompts, size, 0.0)["variance"].mean()
        errors[size] = bias @ bias, size * noise
    for n, off in ((16384, 0.2), (65536, 0.08), (10**6, 0.03)):
        best = min(errors, key=lambda size: errors[size][0] + errors[size][1] / n)
        assert best == pytest.approx((rate * n) ** (1 / 3), rel=off)
