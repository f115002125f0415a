from __future__ import annotations

import numpy as np
import pytest

from grpo_ustat.estimators.intervals import (
    clustered_mean,
    jackknife_variance,
    paired_difference,
    pooled_dof,
    t_interval,
    wilson,
)


def test_jackknife_of_a_mean_is_its_textbook_variance(rng):
    x = rng.normal(size=9)
    deleted = (x.sum() - x) / 8
    assert jackknife_variance(deleted) == pytest.approx(x.var(ddof=1) / 9)


def test_t_interval_by_hand():
    """t at 0.975 with 4 degrees of freedom is 2.7764."""
    interval = t_interval(1.0, 4.0, 4)
    assert interval.low == pytest.approx(1 - 2 * 2.776445, abs=1e-5)


def test_clustering_is_wider_than_pretending_independence():
    """Ten questions, each always right or always wrong: the width is that of ten values."""
    values = np.repeat(np.array([[0.0], [1.0]] * 5), 100, axis=1)
    interval = clustered_mean(values)
    assert interval.high - interval.estimate == pytest.approx(
        2.262157 * np.sqrt(0.25 / 9), abs=1e-5
    )


def test_pairing_removes_what_both_share():
    before = np.array([0.0, 1.0, 0.0, 1.0])
    assert paired_difference(before + 0.5, before).low == pytest.approx(0.5)


def test_wilson_at_the_edge_stays_inside():
    assert wilson(0, 10).low == pytest.approx(0.0, abs=1e-12)
    assert wilson(0, 10).high == pytest.approx(0.2775, abs=1e-4)


def test_pooled_dof_of_equal_variances_adds_up():
    assert pooled_dof(np.ones(5), 7) == pytest.approx(35)
