"""The noise scale from norms of gradients against enumeration, scores, hand and simulation."""

from __future__ import annotations

import itertools

import numpy as np
import pytest
from reference import enumerate_prompt
from tabular import TabularPolicy

from grpo_ustat.estimators.gradient_norms import noise_scale_from_norms
from grpo_ustat.estimators.groups import group_terms, noise_estimate
from grpo_ustat.estimators.intervals import ratio_interval
from grpo_ustat.estimators.moments import pool_gradient_weights
from grpo_ustat.estimators.scaling import ScalingLaw

LOGITS, REWARDS = [0.3, -0.8, 0.5], [[1.0, 0.0, 0.25], [0.0, 1.0, 0.7]]


def mean_sq_norm(baseline, size, groups):
    """E||ghat||^2 of so many groups, of two prompts, by enumeration of all of them."""
    every = [
        (p / 2, ghat)
        for rewards in REWARDS
        for p, ghat in enumerate_prompt(LOGITS, rewards, baseline, size)
    ]
    total = 0.0
    for joint in itertools.product(every, repeat=groups):
        chance = np.prod([p for p, _ in joint])
        total += chance * np.square(sum(ghat for _, ghat in joint) / groups).sum()
    return total


@pytest.mark.parametrize(("size", "most"), [(2, 3), (3, 2)])
@pytest.mark.parametrize(("baseline", "factor"), [("leave_one_out", 1.0), ("group_mean", None)])
def test_norms_tell_the_two_terms_apart(baseline, factor, size, most):
    """Of the group mean's baseline, (G-1)/G of leave-one-out, the terms are its own."""
    policy = TabularPolicy(
        np.tile(np.eye(3), (2, 1, 1)), np.array(LOGITS), np.array(REWARDS, dtype=float)
    )
    factor = factor or (size - 1) / size
    grad_sq = float(np.square(policy.gradient_PD.mean(axis=0)).sum())
    mse = ScalingLaw.of_moments(policy.moments(), grad_sq).mse(1, size)
    norms = {b: np.full(4, mean_sq_norm(baseline, size, b)) for b in range(1, most + 1)}
    found = noise_scale_from_norms(norms, size)
    assert found["grad_sq"].estimate == pytest.approx(factor**2 * grad_sq, rel=1e-9)
    assert found["group_mse"].estimate == pytest.approx(factor**2 * mse, rel=1e-9)
    assert found["noise_scale"].estimate == pytest.approx(size * mse / grad_sq, rel=1e-9)


def batches(rng, steps, prompts, size, shift=1.0, dimensions=3):
    """Rewards, scores and leave-one-out gradients of steps; as in test_noise, ||g||^2 = D shift^2
    on average and D/4 more between prompts.
    """
    shape = (steps, prompts, size)
    gradient = shift + 0.5 * rng.standard_normal((steps, prompts, 1, dimensions))
    scores = rng.standard_normal((*shape, dimensions))
    rewards = (scores * gradient).sum(axis=-1) + rng.standard_normal(shape)
    ghat = np.einsum("spg,spgd->spd", pool_gradient_weights(rewards), scores)
    return rewards, scores, ghat


@pytest.mark.parametrize("size", [2, 5])
def test_norms_of_every_group_say_what_scores_say(rng, size):
    """||grad J||^2 and the noise scale at the g in use are the very same numbers."""
    rewards, scores, ghat = batches(rng, steps=6, prompts=12, size=size)
    whole = np.square(ghat.mean(axis=1)).sum(axis=-1)
    found = noise_scale_from_norms({1: np.square(ghat).sum(axis=-1), 12: whole}, size)
    steps = [
        group_terms(z, np.square(s).sum(axis=-1), x @ x.T)
        for z, s, x in zip(rewards, scores, ghat, strict=True)
    ]
    of_scores = noise_estimate(steps, size).intervals
    for name in ("grad_sq", "noise_scale"):
        assert found[name].estimate == pytest.approx(of_scores[name].estimate, rel=1e-9)


def test_intervals_leave_out_one_step(rng):
    norms = {b: 3 + 5 / b + rng.standard_normal(7) / b for b in (1, 4, 16)}
    found = noise_scale_from_norms(norms, 8)
    parts = []
    for k in range(7):
        rest = {b: np.delete(values, k) for b, values in norms.items()}
        without = noise_scale_from_norms(rest, 8)
        parts.append([8 * without["group_mse"].estimate, without["grad_sq"].estimate])
    above, below = np.array(parts).T[:, None]
    expected = ratio_interval(
        8 * found["group_mse"].estimate, found["grad_sq"].estimate, above, below
    )
    np.testing.assert_allclose(found["noise_scale"], expected, rtol=1e-9)


def test_the_truth_is_in_the_intervals(rng):
    """E||ghat||^2 = 3 + V/b with V = 0.75 + 18/8 + 18/56, see test_noise; 100 runs of 20 steps."""
    mse = 0.75 + 18 / 8 + 18 / 56
    truth = {"grad_sq": 3.0, "group_mse": mse, "noise_scale": 8 * mse / 3}
    inside, sums = dict.fromkeys(truth, 0), dict.fromkeys(truth, 0.0)
    for _ in range(100):
        _, _, ghat = batches(rng, steps=20, prompts=16, size=8)
        parts = ghat.reshape(20, 4, 4, 3).mean(axis=2)
        norms = {4: np.square(parts).sum(axis=-1), 16: np.square(ghat.mean(axis=1)).sum(axis=-1)}
        found = noise_scale_from_norms(norms, 8)
        for name, value in truth.items():
            inside[name] += found[name].low <= value <= found[name].high
            sums[name] += found[name].estimate / 100
    assert all(count >= 88 for count in inside.values()), inside
    for name, value in sums.items():
        assert value == pytest.approx(truth[name], rel=0.05), name


@pytest.mark.parametrize(
    ("norms", "words"),
    [
        ({8: np.ones(9)}, "two numbers of groups"),
        (
            {1: np.ones(9), 8: np.ones(8)},
            "{1: 9, 8: 8}: they must be equal and at least 4",
        ),
        ({1: np.ones(3), 8: np.ones(3)}, "at least 4"),
    ],
)
def test_norms_that_say_nothing_are_refused(norms, words):
    with pytest.raises(ValueError) as error:
        noise_scale_from_norms(norms, 8)
    assert words in str(error.value)
