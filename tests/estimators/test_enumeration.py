"""Bias and MSE of every baseline against full enumeration, in float64 to 1e-10."""

from __future__ import annotations

import dataclasses

import numpy as np
import pytest
from reference import bias_and_mse, softmax_policy, true_gradient
from tabular import TabularPolicy
from ustatistics import estimate, hoeffding, pairwise

from grpo_ustat.estimators.baselines import BASELINES, advantages, group_mean
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
    import itertools

    from reference import plain_advantages

    for outcome in itertools.product([0.0, 1.0, 0.25], repeat=3):
        group = np.array([outcome])
        value = float(rng.random())
        fast = advantages(name, group, BaselineContext(value_P=np.array([value])))[0]
        np.testing.assert_allclose(fast, plain_advantages(name, list(outcome), value), atol=1e-14)


def test_leave_one_out_is_the_pairwise_u_statistic(rng):
    scores, z = rng.normal(size=(7, 5)), rng.normal(size=7)
    advantage = advantages("leave_one_out", z[None], BaselineContext())[0]
    np.testing.assert_allclose(estimate(scores, advantage), pairwise(scores, z), atol=1e-14)


def test_hoeffding_components_are_orthogonal_and_add_up():
    logits, rewards = PROMPTS[0]
    p, scores = softmax_policy(logits)
    scores, z = np.array(scores), np.array(rewards)
    value, gradient = float(np.dot(p, rewards)), true_gradient(logits, rewards)
    import itertools
    import math

    products, squares = np.zeros((3, 3)), 0.0
    for actions in itertools.product(range(3), repeat=3):
        probability = math.prod(p[a] for a in actions)
        group = list(actions)
        parts = hoeffding(scores[group], z[group], value, gradient)
        whole = pairwise(scores[group], z[group])
        np.testing.assert_allclose(sum(parts), whole, atol=1e-14)
        products += probability * np.array([[a @ b for a in parts] for b in parts])
        squares += probability * float(((whole - gradient) ** 2).sum())
    np.testing.assert_allclose(products - np.diag(np.diag(products)), 0, atol=1e-14)
    assert products[1, 1] + products[2, 2] == pytest.approx(squares, rel=1e-10)


def test_second_order_component_has_the_stated_size():
    """E||h_2||^2 = (E q sigma^2 + ||g||^2) / 2 for a pair."""
    policy = tabular()
    moments = policy.moments()
    p, scores, z = policy.probabilities_PY[0], policy.scores_PYD[0], policy.rewards_PY[0]
    total = 0.0
    for i in range(3):
        for j in range(3):
            pair = [i, j]
            second = hoeffding(scores[pair], z[pair], policy.value_P[0], policy.gradient_PD[0])[2]
            total += p[i] * p[j] * float(second @ second)
    assert total == pytest.approx((moments.d[0] + moments.g_sq[0]) / 2, rel=1e-12)


def test_group_mean_for_leave_one_out_would_be_noticed(monkeypatch):
    """Mutation: with the group's own mean in its place, the leave-one-out checks fail."""
    mutant = dataclasses.replace(BASELINES["leave_one_out"], advantage=group_mean)
    monkeypatch.setitem(BASELINES, "leave_one_out", mutant)
    with pytest.raises(AssertionError):
        test_leave_one_out_is_the_pairwise_u_statistic(np.random.default_rng(0))
    with pytest.raises(AssertionError):
        test_advantages_are_those_written_out("leave_one_out", np.random.default_rng(0))
