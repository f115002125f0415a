"""The power-sum estimators: equal to sums over distinct completions, unbiased by enumeration."""

from __future__ import annotations

import itertools
import math

import numpy as np
import pytest
from tabular import TabularPolicy

from grpo_ustat.estimators.moments import (
    _centred_powers,
    _squared_covariance,
    covariance_excess,
    pool_gradient_weights,
    pool_moments,
)


def squared_covariance(q, z):
    """Cov(q, z)^2 over the last axis, unbiased; it may be negative.

    `Cov = M_1 - V M_0`, so its square is `M_1^2 - 2 M_1 V M_0 + V^2 M_0^2`; each product of
    expectations is a mean over distinct completions, four of them in the last (Hoeffding 1948).

    Raises:
        ValueError: fewer than 4 completions.
    """
    if q.shape[-1] < 4:
        raise ValueError(f"the square of a covariance needs 4 completions, got {q.shape[-1]}")
    sums = {k: x.sum(axis=-1, keepdims=True) for k, x in _centred_powers(q, z).items()}
    return _squared_covariance(q.shape[-1], sums)[..., 0]


def policy():
    rng = np.random.default_rng(3)
    return TabularPolicy(rng.normal(size=(2, 3, 4)), rng.normal(size=4), rng.random((2, 3)))


def pool(tabular, outcomes_PN):
    """Rewards [P, N] and Gram matrices [P, N, N] of chosen outcomes."""
    rows = np.arange(len(outcomes_PN))[:, None]
    scores = tabular.scores_PYD[rows, outcomes_PN]
    return tabular.rewards_PY[rows, outcomes_PN], np.einsum("pid,pjd->pij", scores, scores)


@pytest.mark.parametrize("size", [3, 4])
def test_estimates_are_unbiased(size):
    """The mean of every estimate over all pools of `size` outcomes is the exact moment."""
    tabular = policy()
    exact = tabular.moments()
    names = ("m0", "m1", "value", "a_0", "a_v", "d", "g_sq", "cov_qz", "var_q", "var_z")
    for p in range(2):
        total = dict.fromkeys(names, 0.0)
        for outcomes in itertools.product(range(3), repeat=size):
            probability = math.prod(tabular.probabilities_PY[p, list(outcomes)])
            one = TabularPolicy(
                tabular.features_PYD[p : p + 1], tabular.theta_D, tabular.rewards_PY[p : p + 1]
            )
            estimate = pool_moments(*pool(one, np.array([outcomes])))
            for name in names:
                total[name] += probability * getattr(estimate, name)[0]
        for name in names:
            assert total[name] == pytest.approx(getattr(exact, name)[p], rel=1e-10, abs=1e-13), name


def test_power_sums_equal_sums_over_distinct_completions(rng):
    z = rng.random((1, 5))
    scores = rng.normal(size=(1, 5, 3))
    gram = np.einsum("pid,pjd->pij", scores, scores)
    q, n = np.diagonal(gram[0]), 5
    triples = list(itertools.permutations(range(n), 3))
    v2_m0 = np.mean([z[0, i] * z[0, j] * q[k] for i, j, k in triples])
    pairs = list(itertools.permutations(range(n), 2))
    v_m1 = np.mean([z[0, i] * q[k] * z[0, k] for i, k in pairs])
    w_m0 = np.mean([z[0, i] ** 2 * q[k] for i, k in pairs])
    estimate = pool_moments(z, gram)
    a_v = (q * z[0] ** 2).mean() - 2 * v_m1 + v2_m0
    assert estimate.a_v[0] == pytest.approx(a_v, rel=1e-12)
    assert estimate.d[0] == pytest.approx(w_m0 - v2_m0, rel=1e-12)


def test_objective_gradient_is_unbiased():
    """||grad J||^2 = 1/m^2 (sum ||g||^2 + products between), over all pools of three of both."""
    tabular = policy()
    total = 0.0
    outcomes = list(itertools.product(range(3), repeat=3))
    for first in outcomes:
        for second in outcomes:
            chosen = np.array([first, second])
            probability = math.prod(tabular.probabilities_PY[0, list(first)]) * math.prod(
                tabular.probabilities_PY[1, list(second)]
            )
            z, gram = pool(tabular, chosen)
            scores = tabular.scores_PYD[np.arange(2)[:, None], chosen]
            ghat = np.einsum("pn,pnd->pd", pool_gradient_weights(z), scores)
            estimate = (pool_moments(z, gram).g_sq.sum() + 2 * ghat[0] @ ghat[1]) / 4
            total += probability * estimate
    exact = np.square(tabular.gradient_PD.mean(axis=0)).sum()
    assert total == pytest.approx(exact, rel=1e-10)


def test_adding_a_constant_to_rewards_changes_only_vanilla(rng):
    z = rng.random((2, 6))
    scores = rng.normal(size=(2, 6, 3))
    gram = np.einsum("pid,pjd->pij", scores, scores)
    before, after = pool_moments(z, gram), pool_moments(z + 5.0, gram)
    for name in ("oracle", "leave_one_out"):
        np.testing.assert_allclose(before.mse(name, 4), after.mse(name, 4), rtol=1e-9)
    assert not np.allclose(before.mse("none", 4), after.mse("none", 4))


def test_too_small_a_pool_is_refused():
    with pytest.raises(ValueError, match="at least 3 completions per prompt, got 2"):
        pool_moments(np.zeros((1, 2)), np.zeros((1, 2, 2)))


def test_the_square_of_a_covariance_is_unbiased_by_enumeration():
    """All 3^5 samples of five from three outcomes."""
    p, q, z = np.array([0.2, 0.5, 0.3]), np.array([1.0, 2.0, 7.0]), np.array([1.0, 0.0, 1.0])
    draws = np.array(list(itertools.product(range(3), repeat=5)))
    covariance = (p * q * z).sum() - (p * q).sum() * (p * z).sum()
    mean = p[draws].prod(axis=1) @ squared_covariance(q[draws], z[draws])
    assert mean == pytest.approx(covariance**2, rel=1e-12)


def test_the_square_of_a_covariance_is_the_mean_over_four_distinct_completions(rng):
    q, z = 100 + 9 * rng.random(7), rng.random(7)
    pairs = [
        (q[i] - q[j]) * (z[i] - z[j]) * (q[k] - q[m]) * (z[k] - z[m]) / 4
        for i, j, k, m in itertools.permutations(range(7), 4)
    ]
    assert squared_covariance(q, z) == pytest.approx(np.mean(pairs), rel=1e-9)
    with pytest.raises(ValueError, match="needs 4 completions, got 3"):
        squared_covariance(q[:3], z[:3])


def test_the_excess_is_the_jackknife_of_a_ratio_and_of_mean_0_under_assumption_2(rng):
    """By hand; and over all rewards of six completions, independent of heavy-tailed norms."""
    q = rng.lognormal(0, 2, 6)
    z = rng.random(6)

    def ratio(kept):
        return squared_covariance(q[kept], z[kept]) / q[kept].mean()

    left = [ratio(np.delete(np.arange(6), i)) for i in range(6)]
    by_hand = 6 * ratio(np.arange(6)) - 5 * np.mean(left)
    assert covariance_excess(q, z) == pytest.approx(by_hand, rel=1e-9)
    rewards = np.array(list(itertools.product([0.0, 1.0], repeat=6)))
    chance = np.where(rewards == 1, 0.3, 0.7).prod(axis=1)
    mean = chance @ covariance_excess(np.tile(q, (64, 1)), rewards)
    assert mean == pytest.approx(0, abs=1e-12 * q.max())
    assert np.isnan(covariance_excess(q[:4], z[:4]))


@pytest.mark.parametrize("offset", [1e3, 1e6, 1e8])
def test_a_large_constant_in_all_rewards_costs_no_digits(offset):
    """Rewards of multiples of 2^-10, which any of the offsets leaves exact."""
    rng = np.random.default_rng(7)
    z, scores = np.round(rng.random((3, 6)) * 1024) / 1024, rng.normal(size=(3, 6, 3))
    gram = np.einsum("pid,pjd->pij", scores, scores)
    before, after = pool_moments(z, gram), pool_moments(z + offset, gram)
    for name in ("a_v", "d", "g_sq", "cov_qz", "var_z", "var_q", "m0"):
        expected = getattr(before, name)
        atol = 1e-14 * np.abs(expected).max()
        np.testing.assert_allclose(getattr(after, name), expected, rtol=1e-11, atol=atol)
    for name, power in (("m1", 1), ("a_0", 2), ("v_m1", 2), ("v2_m0", 2)):
        np.testing.assert_allclose(getattr(after, name), before.m0 * offset**power, rtol=1e-2)
    np.testing.assert_allclose(after.value, before.value + offset, rtol=1e-14)
    np.testing.assert_array_equal(pool_gradient_weights(z + offset), pool_gradient_weights(z))
    assert not pool_gradient_weights(np.full((1, 10), 0.1) + offset).any()
