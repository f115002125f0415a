"""Several reward functions: against loops, and by enumeration of what their order changes."""

from __future__ import annotations

import itertools
import math

import numpy as np
import pytest
from reference import mean_of, softmax_policy, standardised, variance_of

from grpo_ustat.estimators.baselines.several import normalise_then_sum, sum_then_normalise

EPSILON = 1e-4


def slow(order, rewards, weights):
    """Advantages of a batch, written out."""
    count = len(weights)
    result = []
    for group in rewards:
        if order == "sum":
            totals = [sum(w * z for w, z in zip(weights, row, strict=True)) for row in group]
            result.append(standardised(totals, EPSILON))
            continue
        each = [standardised([row[f] for row in group], EPSILON) for f in range(count)]
        result.append([
            sum(weights[f] * each[f][i] for f in range(count)) for i in range(len(group))
        ])  # fmt: skip
    if order == "sum":
        return result
    flat = [x for row in result for x in row]
    spread = math.sqrt(variance_of(flat)) + EPSILON
    return [[(x - mean_of(flat)) / spread for x in row] for row in result]


@pytest.mark.parametrize("order, rule", [("sum", sum_then_normalise), ("each", normalise_then_sum)])
def test_both_orders_are_those_written_out(order, rule, rng):
    for trial in range(20):
        z = rng.random((3, 4, 2))
        z = np.round(z) if trial % 2 else z
        weights = rng.random(2) + 0.1
        found = rule(z, weights, epsilon=EPSILON)
        np.testing.assert_allclose(found, slow(order, z.tolist(), weights.tolist()), atol=1e-10)


def test_equal_rewards_give_no_advantage():
    z = np.full((2, 3, 2), 0.1)
    for rule in (sum_then_normalise, normalise_then_sum):
        np.testing.assert_allclose(rule(z, np.ones(2), epsilon=0.0), 0, atol=1e-12)


def mean_direction(rule, scale):
    """By enumeration of one prompt's groups of 4 over three outcomes, direction of the mean.

    The first function rewards outcome 0; the second, of that scale, outcome 1, and counts half:
    with equal weights a group of both would cancel but for epsilon, which the last std magnifies.
    """
    p, scores = softmax_policy([0.2, -0.3, 0.1])
    z = np.array([[1.0, 0.0], [0.0, scale], [0.0, 0.0]])
    total = np.zeros(3)
    for outcome in itertools.product(range(3), repeat=4):
        index = list(outcome)
        advantage = rule(z[index][None], np.array([1.0, 0.5]), epsilon=1e-9)[0]
        total += np.prod([p[y] for y in index]) * advantage @ np.array(scores)[index] / 4
    return total / np.linalg.norm(total)


def test_normalising_each_function_makes_the_scale_of_a_reward_harmless():
    """GDPO's mean is the same whatever the scale of one function; TRL's sum leans to the larger."""
    np.testing.assert_allclose(
        mean_direction(normalise_then_sum, 1.0), mean_direction(normalise_then_sum, 20.0), atol=1e-6
    )
    leaning = [mean_direction(sum_then_normalise, scale) for scale in (1.0, 20.0)]
    assert leaning[1][1] > leaning[0][1] + 0.3
