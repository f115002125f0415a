"""Correlations of proxies: by enumeration, in simulated pools, and what they cannot say."""

from __future__ import annotations

import itertools

import numpy as np
import pytest
from prompt_pools import pool_with_lengths, prompts
from scipy import stats

from grpo_ustat.estimators.halves import group_error, halves_of
from grpo_ustat.estimators.proxies import (
    corrected_correlation,
    correlation,
    grade_covariances,
    linear_covariance,
    within_correlation,
)


def test_a_covariance_of_grades_is_the_mean_over_all_triples():
    """With ties, of each of two prompts."""
    rng = np.random.default_rng(0)
    x, y = rng.integers(0, 4, (2, 2, 9)).astype(float)

    def triples(p):
        return np.mean([
            np.sign(x[p, i] - x[p, j]) * np.sign(y[p, i] - y[p, k])
            for i, j, k in itertools.permutations(range(9), 3)
        ])  # fmt: skip

    np.testing.assert_allclose(grade_covariances(x, y), [triples(0), triples(1)], rtol=1e-12)


def test_its_mean_over_all_samples_is_that_of_the_law():
    """Every sample of 4 units from 4 outcomes, two of them tied; grades enumerated."""
    x, y = np.array([0.0, 1.0, 1.0, 3.0]), np.array([2.0, 0.0, 5.0, 5.0])
    law = np.array([0.1, 0.2, 0.3, 0.4])
    mean = sum(
        law[list(units)].prod() * grade_covariances(x[None, list(units)], y[None, list(units)])[0]
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

    assert found.value == pytest.approx(reference(np.arange(7)), rel=1e-12)
    without = [reference(np.delete(np.arange(7), c)) for c in range(7)]
    np.testing.assert_allclose(found.delete_one_n, without, rtol=1e-12)


def test_ranks_within_a_prompt_are_spearmans_of_many_completions():
    """200 prompts of 20: within 1/n of the textbook's; a prompt's own level does not count."""
    rng = np.random.default_rng(2)
    x = rng.normal(size=(200, 20))
    y = x + rng.normal(size=x.shape)
    textbook = stats.spearmanr(x.ravel(), y.ravel()).statistic
    found = within_correlation(x, y)
    assert found.estimate == pytest.approx(textbook, abs=0.02)
    assert found.low < textbook < found.high
    shifted = within_correlation(x + np.arange(200)[:, None], y)
    assert shifted.estimate == pytest.approx(found.estimate, rel=1e-12)
    assert np.isnan(within_correlation(np.ones_like(x), y)).all()


def test_errors_that_both_sides_share_are_taken_out():
    """60 prompts of 16, 20 pools: the corrected one is at the truth, that of whole pools above."""
    rng = np.random.default_rng(4)
    moments = prompts(3000, rng, slope=3.0).moments()
    truth = np.corrcoef(moments.var_z, moments.mse("leave_one_out", 8))[0, 1]
    corrected, of_whole_pools = [], []
    for _ in range(20):
        halves, whole = halves_of(pool_with_lengths(prompts(60, rng, slope=3.0), 16, rng))
        noise = [group_error(part["first"], part["second"], 8) for part in (halves, whole)]
        corrected.append(corrected_correlation(halves["variance"], noise[0]))
        of_whole_pools.append(np.corrcoef(whole["variance"], noise[1])[0, 1])
    known = [interval for interval in corrected if np.isfinite(interval.estimate)]
    estimates = np.array([interval.estimate for interval in known])
    error = estimates.std(ddof=1) / len(known) ** 0.5
    assert len(known) >= 19 and error < 0.06
    assert abs(estimates.mean() - truth) < 3 * error
    assert np.mean(of_whole_pools) > truth + 0.2
    assert np.mean([interval.low <= truth <= interval.high for interval in known]) >= 0.8


def test_an_interval_at_one_stays_within_it():
    x = np.arange(20.0)
    one = linear_covariance(x[None], x[None])
    assert correlation(one, one, one) == (1.0, 1.0, 1.0)
