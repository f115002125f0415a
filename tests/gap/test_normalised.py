"""Division by the group's own standard deviation, against every group there is."""

from __future__ import annotations

import itertools
import math
import statistics

import numpy as np
import pytest
from reference import softmax_policy

from grpo_ustat.gap.normalised import RightAndWrong, normalised_moments, right_and_wrong

LOGITS = [[0.3, -0.8, 0.5], [-0.2, 1.1, 0.4]]
REWARDS = [[1.0, 0.0, 0.0], [0.0, 1.0, 1.0]]


def policy_arrays():
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
    found = normalised_moments(right_and_wrong(*policy_arrays()), group_size, epsilon)
    for prompt in range(2):
        expected = every_group(prompt, group_size, epsilon)
        mine = (found.difference, found.variance, found.plain_variance, found.bias)
        np.testing.assert_allclose([x[prompt] for x in mine], expected, rtol=1e-12)


def test_limits_for_large_groups():
    """The delta method's constants; what is left falls like 1/G."""
    moments = right_and_wrong(*policy_arrays())
    for group_size in (2**12, 2**16):
        found = normalised_moments(moments, group_size, 0.0)
        near = {"rtol": 40 / group_size}
        np.testing.assert_allclose(group_size * found.difference, moments.shift, **near)
        np.testing.assert_allclose(
            group_size * found.variance, moments.within + moments.shift, **near
        )
        np.testing.assert_allclose(
            group_size * found.plain_variance, moments.within + 4 * moments.shift, **near
        )
        np.testing.assert_allclose(-group_size * found.bias, moments.bias, **near)


def test_shift_is_that_of_the_fourth_moment():
    moments = right_and_wrong(*policy_arrays())
    v, sigma_sq = moments.value, moments.var_z
    fourth = v * (1 - v) ** 4 + (1 - v) * v**4
    expected = moments.g_sq * (fourth - sigma_sq**2) / (4 * sigma_sq**3)
    np.testing.assert_allclose(moments.shift, expected, rtol=1e-12)


def test_an_epsilon_leaves_a_floor():
    moments = right_and_wrong(*policy_arrays())
    found = normalised_moments(moments, 2**18, 0.2)
    np.testing.assert_allclose(found.difference, moments.floor(0.2), rtol=1e-4)


def test_where_scores_follow_the_reward_a_quarter_is_the_differences():
    """The most it can be: of two outcomes nothing is left within right and wrong ones."""
    p, scores, rewards = (x[:, :2] for x in policy_arrays())
    moments = right_and_wrong(p / p.sum(axis=1, keepdims=True), scores, rewards)
    np.testing.assert_allclose(moments.within, 0, atol=1e-15)
    found = normalised_moments(moments, 2**16, 0.0)
    np.testing.assert_allclose(found.difference / found.plain_variance, 0.25, rtol=1e-3)


def test_a_fair_coin_has_the_faster_rate():
    coin = RightAndWrong(*(np.array([x]) for x in (0.5, 0.25, 1.0, 1.0)))
    assert coin.shift[0] == coin.bias[0] == 0
    small, large = (normalised_moments(coin, size, 0.0).difference[0] for size in (2**12, 2**13))
    assert math.log2(small / large) == pytest.approx(2, abs=2e-3)


def test_other_rewards_and_silent_prompts_are_refused():
    p, scores, rewards = policy_arrays()
    with pytest.raises(ValueError, match="needs? 0/1 rewards, got 0.5"):
        right_and_wrong(p, scores, rewards / 2)
    with pytest.raises(ValueError, match="prompt 1 has V=0.0"):
        right_and_wrong(p, scores, rewards * [[1.0], [0.0]])
