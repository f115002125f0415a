"""The plan of a study that draws until it decides, against measured variances."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from prompt_pools import whole_pool

from grpo_ustat.estimators.closed_form import Request, closed_form
from grpo_ustat.estimators.pilot import (
    GROWTH,
    PILOT_COMPLETIONS,
    PILOT_QUESTIONS,
    completions_per_question,
    next_count,
    variance_coefficients,
)


def noisy_pool(rng, questions, completions, signal):
    """Scores whose mean gradients differ between questions, by `signal`; the rest is noise."""
    z = rng.integers(0, 2, (questions, completions)).astype(float)
    direction_PD = signal * rng.normal(size=(questions, 12)) / np.sqrt(12)
    noise = rng.normal(size=(questions, completions, 12)) / np.sqrt(12)
    return whole_pool(
        (2 * z - 1)[..., None] * direction_PD[:, None] + noise, z, np.ones_like(z, dtype=int)
    )


def test_looks_grow_by_a_quarter_up_to_the_last():
    counts = [next_count(0, 200)]
    while counts[-1] < 200:
        counts.append(next_count(counts[-1], 200))
    assert counts[0] == PILOT_QUESTIONS and counts[-1] == 200
    growths = np.diff(counts[:-1]) / counts[:-2]
    assert (growths >= GROWTH - 1).all() and (growths < GROWTH - 1 + 1 / PILOT_QUESTIONS).all()
    assert next_count(0, 7) == 7 and next_count(200, 200) == 200


def test_fewer_completions_than_the_least_choice_leave_no_choice(rng):
    pilot = noisy_pool(rng, 8, 5, 1.0)
    assert [completions_per_question(pilot, most) for most in (5, 16, 31)] == [5, 16, 16]


def test_the_noisier_a_completion_the_more_of_each_question(rng):
    """Differences between questions that one completion shows, and those that many hide."""
    chosen = {
        signal: [
            completions_per_question(
                noisy_pool(rng, PILOT_QUESTIONS, PILOT_COMPLETIONS, signal), 64
            )
            for _ in range(20)
        ]
        for signal in (2.0, 0.05)
    }
    assert np.mean(chosen[2.0]) < 20 and np.mean(chosen[0.05]) > 40


def test_the_fitted_variance_is_that_of_larger_pools(rng):
    """m times the jackknife variance of C1 at N = 64, predicted by pools of 16."""
    signal, questions = 0.5, 400
    pilot = noisy_pool(rng, questions, PILOT_COMPLETIONS, signal)
    coefficients_3 = variance_coefficients(pilot)
    large = noisy_pool(rng, questions, 64, signal)
    law = closed_form(large, Request([], {}, questions, True, {}), "questions").law
    ratio = law.c3 / law.c1
    weights_3 = np.array([1, 0, -1 / ratio])
    measured = questions * (
        weights_3 @ law.covariance_33 @ weights_3 + law.undrawn * (law.c3 / ratio) ** 2
    )
    predicted = coefficients_3 @ [1, 1 / 64, 1 / 64**2]
    assert predicted == pytest.approx(measured, rel=0.3)


def test_units_of_rewards_do_not_matter_and_equal_rewards_leave_the_least(rng):
    pilot = noisy_pool(rng, PILOT_QUESTIONS, PILOT_COMPLETIONS, 0.3)
    scaled = replace(
        pilot, rewards_PN=7 * pilot.rewards_PN - 2, centred_sums_PR=7 * pilot.centred_sums_PR
    )
    first, second = map(variance_coefficients, (pilot, scaled))
    np.testing.assert_allclose(second, 7**4 * first, rtol=1e-6)
    equal = replace(
        pilot,
        rewards_PN=np.ones_like(pilot.rewards_PN),
        centred_sums_PR=0 * pilot.centred_sums_PR,
    )
    assert completions_per_question(equal, 64) == 16


def test_rewards_that_hardly_differ_give_a_choice_nevertheless(rng):
    """Two wrong answers in all, in one half: quarters without a gradient, and none with NaN."""
    pilot = noisy_pool(rng, PILOT_QUESTIONS, PILOT_COMPLETIONS, 0.3)
    rewards_PN = np.ones_like(pilot.rewards_PN)
    rewards_PN[3, :2] = 0
    features_PNR = pilot.features_PNR
    rare = whole_pool(features_PNR, rewards_PN, pilot.lengths_PN)
    assert completions_per_question(rare, 64) in (16, 32, 64)
