"""The best group size of a rule at n rollouts, against exact laws of an enumerable policy."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from tabular import TabularPolicy
from test_closed_form import pool_of

from grpo_ustat.gap.normalised import (
    normalised_moments,
    right_and_wrong,
)
from grpo_ustat.mse.replay import replay
from grpo_ustat.mse.rule_sizes import ROLLOUTS, RuleLaw, best_sizes, growth, rule_sizes

SIZES = (4, 8, 16, 32, 64, 128)


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


def exact_law(policy, size):
    """Of group_std against g/sigma at epsilon 0, without replicates: an interval has no width.

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
    one = spread + shrink**2 * exact.variance.mean()
    bias = mu_K - tau_K
    whole = np.array([bias @ bias, one, spread, mu_K @ tau_K, tau_K @ tau_K])
    return RuleLaw(
        "group_std", size, "g_over_sigma", whole, np.tile(whole[:, None, None], (1, 1, 4))
    )


def gradients(policy):
    """Moments and gradients of the prompts."""
    moments = right_and_wrong(policy.probabilities_PY, policy.scores_PYD, policy.rewards_PY)
    chance_PY = policy.probabilities_PY * policy.rewards_PY
    return moments, np.einsum("py,pyk->pk", chance_PY, policy.scores_PYD)


def test_the_best_size_of_a_normalised_rule_grows_like_the_cube_root_of_n():
    """Exact errors of eight prompts at every G: 24, 35 and 84 where the leading term has 21.0, 33.4
    and 82.8."""
    policy = eight_prompts()
    laws = [exact_law(policy, size) for size in range(3, 130)]
    exact = gradients(policy)
    rate = best_group_size_at(*exact, 1.0, own_mean=True) ** 3
    for n, off in ((16384, 0.2), (65536, 0.08), (10**6, 0.03)):
        errors = [float(law.error(law.whole_5, n, "mse")) for law in laws]
        best = laws[int(np.argmin(errors))].group_size
        assert best == pytest.approx((rate * n) ** (1 / 3), rel=off)
    for size, off in ((64, 0.1), (256, 0.03)):
        assert growth(exact_law(policy, size)).estimate == pytest.approx(rate, rel=off)


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


def test_by_its_best_multiple_it_grows_later():
    policy = eight_prompts()
    laws = [exact_law(policy, size) for size in SIZES]
    own, scaled = (best_sizes(laws, measure) for measure in ("mse", "best_scalar"))
    assert [row.n for row in own] == list(ROLLOUTS)
    sizes = [row.group_size for row in own]
    assert sizes == sorted(sizes) and sizes[-1] >= 4 * sizes[0]
    assert all(a.group_size >= b.group_size for a, b in zip(own, scaled, strict=True))
    assert all(row.alike == [row.group_size] for row in own)  # nothing is uncertain
    rows = rule_sizes(laws)
    assert [row.measure for row in rows] == ["mse", "best_scalar"]
    assert all(row.grows for row in rows)
    against_g = [replace(law, target="expected_reward") for law in laws]  # its length would decide
    assert [row.measure for row in rule_sizes(against_g)] == ["best_scalar"]
    unbiased = [replace(law, baseline="leave_one_out") for law in against_g]
    assert [row.measure for row in rule_sizes(unbiased)] == ["mse", "best_scalar"]


@pytest.mark.slow
@pytest.mark.parametrize("interval", ["completions", "questions"])
def test_a_pool_says_what_is_exact(interval):
    """Replay of 400 completions of 8 prompts: v and C1 of group_std, bias^2 of leave_one_out."""
    policy = eight_prompts(0.3)
    pool = pool_of(policy, 400, np.random.default_rng(5))
    options = {"group_std": {"epsilon": 1e-9}}
    points = replay(
        pool, ["leave_one_out", "group_std", "opo"], options, [4, 8, 16],
        [("all_questions_once", 8), ("one_question", 1)], 3000, 1, interval,
    )  # fmt: skip
    laws = [point.law for point in points if point.law is not None]
    assert len(laws) == 3 + 3 + 3 + 3  # group_std against two targets, in the first setting alone
    for law in laws:
        if law.baseline == "leave_one_out":
            assert law.whole_5[0] == pytest.approx(0, abs=1e-12)
        if (law.baseline, law.target) == ("group_std", "g_over_sigma"):
            _, v, c1, *_ = exact_law(policy, law.group_size).whole_5  # of these 8; C1 8/7 for new
            np.testing.assert_allclose(law.whole_5[1:3], [v + c1 / 7, c1 * 8 / 7], rtol=0.15)
    rows = [row for row in rule_sizes(laws) if row.measure == "mse"]
    assert {row.baseline for row in rows} == {"leave_one_out", "group_std", "opo"}
    assert all([cell.n for cell in row.sizes] == list(ROLLOUTS) for row in rows)
