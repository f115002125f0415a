"""Division by the group's own standard deviation, against every group there is."""

from __future__ import annotations

import itertools
import math
import statistics

import numpy as np
import pytest
from reference import softmax_policy
from tabular import TabularPolicy

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


# The best group size at n rollouts, by errors of group_std against g/sigma of eight prompts


def leading_bias(moments, g_PK, own_mean=False):
    """b_x, the limits of G times the prompts' biases against g/sigma, [P, K].

    Args:
        moments: of the prompts.
        g_PK: their gradients.
        own_mean: whether the group's own mean is subtracted, as by `group_std`, not the others'.
    """
    v = moments.var_z
    factor = 1 + 4 * v if own_mean else 1 - 4 * v
    return -g_PK * (factor / (8 * v**1.5))[:, None]


def best_group_size_at(moments, g_PK, rollouts, own_mean=False):
    """The leading term of the best G at n rollouts, `( 2 ||b||^2 n / C1 )^(1/3)`.

    It is where `||b||^2 / G^2 + G C1 / n` is least.

    Args:
        moments, g_PK, own_mean: see `leading_bias`.
        rollouts: n.
    """
    b_K = leading_bias(moments, g_PK, own_mean).mean(axis=0)
    tau_PK = g_PK / np.sqrt(moments.var_z)[:, None]
    spread = np.square(tau_PK - tau_PK.mean(axis=0)).sum(axis=1).mean()
    return float((2 * b_K @ b_K * rollouts / spread) ** (1 / 3))


def break_even_rollouts(moments, g_PK, group_size):
    """The n below which N has a smaller error than U, `G^2 (4 shift + 2 <tau, b>) / ||b||^2`.

    It is of leading order in 1/G: up to G = 16 the exact n may be a quarter of it or less.

    Args:
        moments, g_PK: see `leading_bias`.
        group_size: G.
    """
    b_K = leading_bias(moments, g_PK).mean(axis=0)
    tau_K = (g_PK / np.sqrt(moments.var_z)[:, None]).mean(axis=0)
    return float(group_size**2 * (4 * moments.shift.mean() + 2 * tau_K @ b_K) / (b_K @ b_K))


def eight_prompts(theta=0.8):
    """Eight prompts of six outcomes, 0/1 rewards, V from 0.08 to 0.8."""
    rng = np.random.default_rng(3)
    features = rng.normal(size=(8, 6, 5))
    parameters = theta * rng.normal(size=5)
    rewards = (rng.random((8, 6)) < 0.35).astype(float)
    rewards[:, 0], rewards[:, 1] = 1, 0
    return TabularPolicy(features, parameters, rewards)


def exact_error(policy, size):
    """(||b||^2, v, C1) of group_std against g/sigma at epsilon 0, v of one group.

    By a sum over the number of right answers; group_std subtracts the group's own mean, which
    shortens the leave-one-out estimate by (G-1)/G.
    """
    moments = right_and_wrong(policy.probabilities_PY, policy.scores_PYD, policy.rewards_PY)
    exact = normalised_moments(moments, size, 0.0)
    g_PK = np.einsum("py,pyk->pk", policy.probabilities_PY * policy.rewards_PY, policy.scores_PYD)
    sigma_P, norm_P = np.sqrt(moments.var_z), np.sqrt(moments.g_sq)
    shrink = (size - 1) / size
    mean_PK = shrink * g_PK * (1 / sigma_P + exact.bias / norm_P)[:, None]
    tau_K, mu_K = (g_PK / sigma_P[:, None]).mean(axis=0), mean_PK.mean(axis=0)
    spread = np.square(mean_PK).sum(axis=1).mean() - mu_K @ mu_K
    bias = mu_K - tau_K
    return bias @ bias, spread + shrink**2 * exact.variance.mean(), spread


def gradients(policy):
    """Moments and gradients of the prompts."""
    moments = right_and_wrong(policy.probabilities_PY, policy.scores_PYD, policy.rewards_PY)
    chance_PY = policy.probabilities_PY * policy.rewards_PY
    return moments, np.einsum("py,pyk->pk", chance_PY, policy.scores_PYD)


def test_the_best_size_of_a_normalised_rule_grows_like_the_cube_root_of_n():
    """Exact errors of eight prompts at every G: 24, 35 and 84 where the leading term has 21.0, 33.4
    and 82.8."""
    policy = eight_prompts()
    errors = {size: exact_error(policy, size) for size in range(3, 130)}
    exact = gradients(policy)
    rate = best_group_size_at(*exact, 1.0, own_mean=True) ** 3
    for n, off in ((16384, 0.2), (65536, 0.08), (10**6, 0.03)):
        best = min(errors, key=lambda size: errors[size][0] + errors[size][1] * size / n)
        assert best == pytest.approx((rate * n) ** (1 / 3), rel=off)
    for size, off in ((64, 0.1), (256, 0.03)):
        bias2, _, c1 = exact_error(policy, size)
        assert 2 * size**2 * bias2 / c1 == pytest.approx(rate, rel=off)


@pytest.mark.parametrize(
    "theta, size, ratio",
    [(0.3, 4, 8.98), (0.3, 8, 5.70), (0.3, 16, 2.14), (0.3, 32, 1.31), (0.3, 64, 1.13),
     (0.3, 128, 1.06), (0.3, 256, 1.03), (0.8, 4, 4.34), (0.8, 8, 5.30), (0.8, 16, 3.91),
     (0.8, 32, 1.96), (0.8, 64, 1.25), (0.8, 128, 1.10), (0.8, 256, 1.05)],
)  # fmt: skip
def test_below_its_break_even_the_groups_own_std_beats_the_known_one(theta, size, ratio):
    """Exact errors of N and U over eight prompts are equal below the n of the leading terms, and
    near it at large G."""
    moments, g_PK = gradients(eight_prompts(theta))
    exact = normalised_moments(moments, size, 0.0)
    sigma_P, norm_P = np.sqrt(moments.var_z), np.sqrt(moments.g_sq)
    tau_PK = g_PK / sigma_P[:, None]
    mean_PK = tau_PK + g_PK * (exact.bias / norm_P)[:, None]
    bias2 = np.square(mean_PK.mean(axis=0) - tau_PK.mean(axis=0)).sum()

    def one(means_PK, variance_P):
        spread = np.square(means_PK - means_PK.mean(axis=0)).sum(axis=1).mean()
        return size * (spread + variance_P.mean())

    n = (one(tau_PK, exact.plain_variance) - one(mean_PK, exact.variance)) / bias2
    assert break_even_rollouts(moments, g_PK, size) / n == pytest.approx(ratio, abs=6e-3)
