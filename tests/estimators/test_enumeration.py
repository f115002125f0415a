"""Bias and MSE of every baseline against full enumeration, in float64 to 1e-10."""

from __future__ import annotations

import itertools

import numpy as np
import pytest
from reference import bias_and_mse, plain_advantages
from tabular import TabularPolicy

from grpo_ustat.estimators.baselines import BASELINES, advantages
from grpo_ustat.records import BaselineContext

LOGITS = [[0.3, -0.8, 0.5], [-0.2, 1.1, 0.4]]
REWARDS = [[1.0, 0.0, 0.25], [0.0, 1.0, 0.7]]
EXACT = ("none", "leave_one_out", "group_mean", "oracle")  # the baselines with an exact MSE here
PROMPTS = list(zip(LOGITS, REWARDS, strict=True))


def tabular():
    """The same two prompts: features [eye; eye + shift], so that logits are those above."""
    features = np.zeros((2, 3, 3))
    features[:] = np.eye(3)
    theta = np.array(LOGITS[0])
    return TabularPolicy(features, theta, np.array([REWARDS[0], REWARDS[1]]))


def shared_prompts():
    """Both prompts under one parameter vector, as the tabular policy has them."""
    return [(LOGITS[0], REWARDS[0]), (LOGITS[0], REWARDS[1])]


def closed_form(policy, name, group_size):
    moments = policy.moments()
    count = len(policy.rewards_PY)
    if name != "group_mean":
        return moments.mse(name, group_size).sum() / count**2
    grad_sq = np.square(policy.gradient_PD.mean(axis=0)).sum()
    shrink = (group_size - 1) / group_size
    loo = moments.mse("leave_one_out", group_size).sum() / count**2
    return shrink**2 * loo + grad_sq / group_size**2


@pytest.mark.parametrize("group_size", [2, 3, 4])
@pytest.mark.parametrize("name", EXACT)
def test_mse_of_all_prompts_once(name, group_size):
    policy = tabular()
    bias, mse = bias_and_mse(shared_prompts(), name, group_size)
    assert closed_form(policy, name, group_size) == pytest.approx(mse, abs=1e-12, rel=1e-10)
    expected = -policy.gradient_PD.mean(axis=0) / group_size if name == "group_mean" else 0.0
    np.testing.assert_allclose(bias, np.broadcast_to(expected, bias.shape), atol=1e-12)
    assert (np.abs(bias).max() < 1e-12) == BASELINES[name].unbiased


@pytest.mark.parametrize("name", EXACT)
def test_advantages_are_those_written_out(name, rng):
    """The package's baseline on every group of three outcomes equals the reference's."""
    for outcome in itertools.product([0.0, 1.0, 0.25], repeat=3):
        group = np.array([outcome])
        value = float(rng.random())
        fast = advantages(name, group, BaselineContext(value_P=np.array([value])))[0]
        np.testing.assert_allclose(fast, plain_advantages(name, list(outcome), value), atol=1e-14)


def test_leave_one_out_is_the_pairwise_u_statistic(rng):
    """The mean of the kernel (s - s')(z - z') / 2 over all pairs (Lemma 1)."""
    scores, z = rng.normal(size=(7, 5)), rng.normal(size=7)
    advantage = advantages("leave_one_out", z[None], BaselineContext())[0]
    i, j = np.triu_indices(7, k=1)
    kernel = (scores[i] - scores[j]) * (z[i] - z[j])[:, None] / 2
    np.testing.assert_allclose(advantage @ scores / 7, kernel.mean(axis=0), atol=1e-14)
