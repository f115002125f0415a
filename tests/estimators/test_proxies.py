"""Correlations of proxies: by enumeration, in simulated pools, and what they cannot say."""

from __future__ import annotations

import itertools

import numpy as np
import pytest
from prompt_pools import pool_of, prompts
from scipy import stats

from grpo_ustat.estimators.moments import pool_moments
from grpo_ustat.estimators.proxies import (
    completion_correlation,
    correlation,
    grade_covariance,
    linear_covariance,
    proxy_correlations,
    within_correlation,
)
from grpo_ustat.records import ScorePool


def by_words(pool):
    return {(row.units, row.proxy, row.target): row for row in proxy_correlations(pool)}


VARIANCE = ("prompts", "p(1-p)", "the noise of a group of 8")


def test_a_covariance_of_grades_is_the_mean_over_all_triples():
    """With ties, whole and without each unit."""
    rng = np.random.default_rng(0)
    x, y = rng.integers(0, 4, 9).astype(float), rng.integers(0, 4, 9).astype(float)

    def triples(units):
        return np.mean([
            np.sign(x[i] - x[j]) * np.sign(y[i] - y[k])
            for i, j, k in itertools.permutations(units, 3)
        ])  # fmt: skip

    found = grade_covariance(x, y)
    assert found.whole == pytest.approx(triples(range(9)), rel=1e-12)
    without = [triples([i for i in range(9) if i != c]) for c in range(9)]
    np.testing.assert_allclose(found.delete_one_n, without, rtol=1e-12)


def test_its_mean_over_all_samples_is_that_of_the_law():
    """Every sample of 4 units from 4 outcomes, two of them tied; grades enumerated."""
    x, y = np.array([0.0, 1.0, 1.0, 3.0]), np.array([2.0, 0.0, 5.0, 5.0])
    law = np.array([0.1, 0.2, 0.3, 0.4])
    mean = sum(
        law[list(units)].prod() * grade_covariance(x[list(units)], y[list(units)]).whole
        for units in itertools.product(range(4), repeat=4)
    )
    grade_x, grade_y = (
        (law * ((v[:, None] > v) + 0.5 * (v[:, None] == v))).sum(axis=1) for v in (x, y)
    )
    covariance = law @ (grade_x * grade_y) - (law @ grade_x) * (law @ grade_y)
    assert mean == pytest.approx(4 * covariance, rel=1e-12)


def test_a_covariance_of_values_leaves_each_prompt_out():
    rng = np.random.default_rng(1)
    x, y = rng.normal(size=(2, 3, 7))
    found = linear_covariance(x, y)

    def reference(keep):
        return np.mean([np.cov(a[keep], b[keep])[0, 1] for a, b in zip(x, y, strict=True)])

    assert found.whole == pytest.approx(reference(np.arange(7)), rel=1e-12)
    without = [reference(np.delete(np.arange(7), c)) for c in range(7)]
    np.testing.assert_allclose(found.delete_one_n, without, rtol=1e-12)


def test_ranks_of_completions_are_spearmans_of_many():
    """200 prompts of 20: within 1/n of the textbook's, over all and where prompts are alike."""
    rng = np.random.default_rng(2)
    x = rng.normal(size=(200, 20))
    y = x + rng.normal(size=x.shape)
    textbook = stats.spearmanr(x.ravel(), y.ravel()).statistic
    for found in (completion_correlation(x, y), within_correlation(x, y)):
        assert found.estimate == pytest.approx(textbook, abs=0.02)
        assert found.low < textbook < found.high
    shifted = within_correlation(x + np.arange(200)[:, None], y)
    assert shifted.estimate == pytest.approx(within_correlation(x, y).estimate, rel=1e-12)
    assert completion_correlation(x + np.arange(200)[:, None], y).estimate < 0.1


def test_errors_that_both_sides_share_are_taken_out():
    """60 prompts of 16, 20 pools: the corrected one is at the truth, the uncorrected far above."""
    rng = np.random.default_rng(4)
    moments = prompts(3000, rng, slope=3.0).moments()
    truth = np.corrcoef(moments.var_z, moments.mse("leave_one_out", 8))[0, 1]
    rows = [by_words(pool_of(prompts(60, rng, slope=3.0), 16, rng))[VARIANCE] for _ in range(20)]
    known = [row for row in rows if np.isfinite(row.correlation.estimate)]
    corrected = np.array([row.correlation.estimate for row in known])
    uncorrected = np.array([row.uncorrected for row in known])
    error = corrected.std(ddof=1) / len(known) ** 0.5
    assert len(known) >= 19 and error < 0.06
    assert abs(corrected.mean() - truth) < 3 * error
    assert uncorrected.mean() > truth + 0.2
    covers = [row.correlation.low <= truth <= row.correlation.high for row in known]
    assert np.mean(covers) >= 0.8


def test_every_part_is_what_its_words_say():
    """Of whole pools the uncorrected number is the plain correlation of unbiased estimates."""
    rng = np.random.default_rng(3)
    pool = pool_of(prompts(20, rng), 12, rng)
    rows, moments = by_words(pool), pool_moments(pool.rewards_PN, pool.gram_PNN)
    noise = moments.mse("leave_one_out", 8)
    lengths = pool.lengths_PN.mean(axis=1)
    plain = {
        VARIANCE: (moments.var_z, noise),
        ("prompts", "mean length", VARIANCE[2]): (lengths, noise),
        ("prompts", "the mean squared score norm", VARIANCE[2]): (moments.m0, noise),
        ("prompts", "p(1-p)", "the squared length of the gradient"): (moments.var_z, moments.g_sq),
    }
    for words, (x, y) in plain.items():
        assert rows[words].uncorrected == pytest.approx(np.corrcoef(x, y)[0, 1], rel=1e-9), words
    assert rows["completions", "length", "the squared score norm"].correlation == (
        completion_correlation(pool.lengths_PN.astype(float), pool.sq_norm_PN)
    )
    assert len(rows) == len(plain) + 2


def test_small_pools_and_equal_lengths_say_nothing():
    rng = np.random.default_rng(5)
    assert proxy_correlations(pool_of(prompts(9, rng), 8, rng)) == []
    assert proxy_correlations(pool_of(prompts(12, rng), 5, rng)) == []
    pool = pool_of(prompts(12, rng), 8, rng)
    alike = by_words(
        ScorePool(
            pool.rewards_PN, pool.gram_PNN, np.ones_like(pool.lengths_PN),
            pool.features_PNR, pool.centred_sums_PR,
        )
    )  # fmt: skip
    assert np.isnan(alike["completions", "length", "the squared score norm"].correlation).all()
    partial = by_words(
        ScorePool(
            pool.rewards_PN / 2 + 0.1, pool.gram_PNN, pool.lengths_PN,
            pool.features_PNR, pool.centred_sums_PR,
        )
    )  # fmt: skip
    assert ("prompts", "the variance of rewards", VARIANCE[2]) in partial


def test_an_interval_at_one_stays_within_it():
    x = np.arange(20.0)
    one = linear_covariance(x[None], x[None])
    assert correlation(one, one, one) == (1.0, 1.0, 1.0)
