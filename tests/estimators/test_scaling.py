"""The scaling law and what follows from it, against enumeration, search and arithmetic by hand."""

from __future__ import annotations

import json

import numpy as np
import pytest
from reference import minibatch_mse
from tabular import TabularPolicy

from grpo_ustat.estimators.intervals import Interval, ratio_interval
from grpo_ustat.estimators.scaling import ScalingLaw, noise_share

SHARED = [([0.3, -0.8, 0.5], [1.0, 0.0, 0.25]), ([0.3, -0.8, 0.5], [0.0, 1.0, 0.7])]


def enumerated_law():
    """The law of two prompts with shared logits, `SHARED`."""
    policy = TabularPolicy(
        np.tile(np.eye(3), (2, 1, 1)), np.array(SHARED[0][0]), np.array([r for _, r in SHARED])
    )
    grad_sq = float(np.square(policy.gradient_PD.mean(axis=0)).sum())
    return ScalingLaw.of_moments(policy.moments(), grad_sq), grad_sq


def test_the_error_is_that_of_every_minibatch_and_smallest_at_the_best_group_size():
    law, _ = enumerated_law()
    for prompts, size in ((1, 2), (1, 4), (2, 2)):
        exact = minibatch_mse(SHARED, "leave_one_out", size, prompts)
        assert law.mse(prompts, size) == pytest.approx(exact, rel=1e-10)
        assert law.n_mse(size) == pytest.approx(prompts * size * exact, rel=1e-10)
    best = law.best_size()
    assert law.n_mse(best) < min(law.n_mse(best * 0.99), law.n_mse(best * 1.01))
    assert best == pytest.approx(1 + np.sqrt(law.c3 / law.c1))


def test_the_best_group_size_at_a_cost_is_where_the_error_is_smallest():
    sizes, law = np.linspace(1.01, 60, 400_000), ScalingLaw.exact(1.3, 2.0, 9.0)
    for k, c in ((0.0, 1.0), (10.0, 1.0), (3.0, 7.0)):
        error = (k + c * sizes) * (1.3 + 2.0 / sizes + 9.0 / (sizes * (sizes - 1)))
        assert law.best_size(k, c) == pytest.approx(sizes[error.argmin()], abs=1e-3)


def test_the_least_noise_scale_is_at_the_best_group_size():
    """By search over G: `(C1 + C2 + 2 sqrt(C1 C3)) / ||grad J||^2` at 1 + sqrt(C3/C1)."""
    law, sizes = ScalingLaw.exact(0.7, 2.0, 5.0, 0.1), np.linspace(1.5, 10, 2000)
    scales = [law.noise_scale(size).estimate for size in sizes]
    assert sizes[np.argmin(scales)] == pytest.approx(1 + np.sqrt(5.0 / 0.7), abs=0.01)
    assert min(scales) == pytest.approx((0.7 + 2.0 + 2 * np.sqrt(0.7 * 5.0)) / 0.1, rel=1e-5)


def test_the_noise_scale_is_that_of_enumerated_minibatches():
    """E||ghat||^2 / ||grad J||^2 - 1 = n_c / n over every minibatch of two prompts, G = 2 and 3."""
    law, grad_sq = enumerated_law()
    for prompts, size in ((1, 2), (2, 2), (1, 3)):
        error = minibatch_mse(SHARED, "leave_one_out", size, prompts)
        scale, rollouts = law.noise_scale(size), prompts * size
        assert error / grad_sq == pytest.approx(scale.estimate / rollouts, rel=1e-10)
        share = noise_share(scale, rollouts).estimate
        assert share == pytest.approx(error / (error + grad_sq), rel=1e-10)
        between = law.c1 / prompts / error
        assert law.prompt_share(size).estimate == pytest.approx(between, rel=1e-10)


def test_doubling_the_rollouts_gains_the_noise_share_of_the_doubled_step():
    scale = Interval(300.0, 200.0, 500.0)
    for n in (50, 300, 2000):
        gains = [n / (n + x) for x in scale]
        doubled = [2 * n / (2 * n + x) for x in scale]
        np.testing.assert_allclose(np.divide(doubled, gains) - 1, noise_share(scale, 2 * n))


def test_steps_of_a_run_are_averaged_before_they_are_divided(rng):
    values_4S = np.array([1.0, 2.0, 9.0, 0.5])[:, None] + 0.1 * rng.standard_normal((4, 12))
    law = ScalingLaw.of_steps(values_4S, prompts=16)
    scale, (c1, c2, c3, grad_sq) = law.noise_scale(4), values_4S.mean(axis=1)
    error = 4 * c1 + c2 + c3 / 3
    assert scale.estimate == pytest.approx(error / grad_sq)
    assert scale.low < scale.estimate < scale.high
    assert (law.dof, law.prompts) == (pytest.approx(11), 192)


def test_without_a_gradient_the_noise_scale_has_a_lower_end_alone():
    steps = np.array([[1.0], [2.0], [9.0], [0.0]]) + 0.1 * np.array([-1.0, 1.0, -1.0, 1.0])
    scale = ScalingLaw.of_steps(steps).noise_scale(4)
    assert np.isnan(scale.estimate) and scale.low > 0 and scale.high == np.inf
    assert noise_share(scale, 100).high == 1.0


def test_ratios_from_the_covariance_are_those_of_what_was_left_out(rng):
    """Of three parts with different noise: Fieller's set of means and their deletions."""
    units = np.array([1.0, 2.0, 9.0, 0.5])[:, None, None] + rng.normal(
        scale=[[0.2], [0.4], [0.3]], size=(4, 3, 12)
    )
    rest = (units.sum(axis=2, keepdims=True) - units) / 11
    whole_4 = units.mean(axis=(1, 2))
    delete_one = whole_4[:, None, None] + (rest - units.mean(axis=2, keepdims=True)) / 3
    law = ScalingLaw.jackknifed(whole_4, delete_one, prompts=36)
    expected = ratio_interval(whole_4[2], whole_4[0], delete_one[2], delete_one[0])
    np.testing.assert_allclose(law.constants_ratio(), expected, rtol=1e-10)


def test_what_a_result_stores_is_read_back(rng):
    """All but ||grad J||^2, of which nothing is said; without a covariance no error is known."""
    units = np.array([1.0, 2.0, 9.0, 0.5])[:, None] + 0.3 * rng.standard_normal((4, 40))
    law = ScalingLaw.of_steps(units, prompts=1)
    constants = {"c1": law.c1, "c2": law.c2, "c3": law.c3}
    read = ScalingLaw.stored(**json.loads(json.dumps(constants | law.stored_errors())))
    np.testing.assert_array_equal(read.covariance_33, law.covariance_33)
    assert (read.dof, read.prompts) == (pytest.approx(39), pytest.approx(40))
    assert read.gstar() == pytest.approx(law.gstar())
    assert read.extra_error(8, 4) == pytest.approx(law.extra_error(8, 4))
    assert np.isnan(read.noise_scale(8)).all()
    bare = ScalingLaw.stored(**constants)
    assert not bare.has_errors and bare.stored_errors() == {"covariance": None, "dof": None}
    assert np.isnan(bare.extra_error(8, 4)[1:]).all() and bare.best_of([2, 4, 8]) == 4
