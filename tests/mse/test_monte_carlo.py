"""The Monte Carlo analysis on a tabular policy, where the truth is known."""

from __future__ import annotations

import numpy as np
import pytest
from fakes import TextLengthTask, random_policy
from prompt_pools import truth
from reference import one_flat_score, plain_advantages, zoo_advantages
from tabular import known_policy

from grpo_ustat.estimators.baselines import advantages
from grpo_ustat.estimators.moments import pool_gradient_weights
from grpo_ustat.mse.monte_carlo import _gradients, curve, group_weights
from grpo_ustat.records import BaselineContext
from grpo_ustat.rollout.local import Sampling, sample
from grpo_ustat.tasks.base import summed_rewards


def gradients(policy, name, group_size, rng, value_P=None):
    """One estimate per call, all prompts once, [D]."""
    outcomes = policy.sample(group_size, rng)
    rows = np.arange(len(outcomes))[:, None]
    scores, z = policy.scores_PYD[rows, outcomes], policy.rewards_PY[rows, outcomes]
    value_P = policy.value_P if value_P is None else value_P
    weights = (
        pool_gradient_weights(z)
        if name == "reference"
        else advantages(name, z, BaselineContext(value_P=value_P)) / group_size
    )
    return np.einsum("pn,pnd->d", weights, scores) / len(z)


def study(policy, name, group_size, replicates, blocks, block_size, rng):
    refs = np.array([gradients(policy, "reference", block_size, rng) for _ in range(blocks)])
    found = np.array([gradients(policy, name, group_size, rng) for _ in range(replicates)])
    total = found.sum(axis=0)
    squared = np.square(found).sum(axis=1)
    return curve(squared, found @ refs.T, refs @ refs.T, float(total @ total))


@pytest.mark.slow
@pytest.mark.parametrize(
    "name",
    [
        "leave_one_out",
        *(pytest.param(n, marks=pytest.mark.slow) for n in ("none", "group_mean", "oracle")),
    ],
)
def test_the_reference_noise_is_subtracted(name):
    """Four small blocks: the uncorrected distance would be far off, the corrected one is not."""
    policy, rng = known_policy(), np.random.default_rng(7)
    curves = [study(policy, name, 4, 60, 4, 8, rng) for _ in range(60)]
    mse = np.array([c.mse.estimate for c in curves])
    exact = truth(policy, [4])[f"mse/{name}/4"]
    assert abs(mse.mean() - exact) < 4 * mse.std(ddof=1) / np.sqrt(len(mse))
    bias2 = np.array([c.bias2 for c in curves])
    expected = truth(policy, [4])["grad_sq"] / 16 if name == "group_mean" else 0.0
    assert abs(bias2.mean() - expected) < 4 * bias2.std(ddof=1) / np.sqrt(len(bias2))


@pytest.mark.slow
def test_the_interval_covers():
    policy, rng = known_policy(), np.random.default_rng(8)
    exact = truth(policy, [4])["mse/leave_one_out/4"]
    found = [study(policy, "leave_one_out", 4, 60, 8, 8, rng).mse for _ in range(400)]
    coverage = np.mean([i.low <= exact <= i.high for i in found])
    assert 0.92 <= coverage <= 0.99


def test_group_weights_are_those_of_each_group_alone():
    z = np.array([[1.0, 0.0, 0.0, 1.0, 1.0], [0.0, 0.0, 1.0, 0.0, 1.0]])
    weights = group_weights(z, "leave_one_out", 2, BaselineContext(), {})
    assert weights.shape == (2, 2, 5)
    for k in range(2):
        for p in range(2):
            inside = z[p, 2 * k : 2 * k + 2].tolist()
            expected = np.zeros(5)
            expected[2 * k : 2 * k + 2] = np.array(plain_advantages("leave_one_out", inside, 0)) / 4
            np.testing.assert_allclose(weights[k, p], expected)


def test_group_weights_take_the_lengths_of_their_own_group():
    z = np.array([[1.0, 0.0, 0.0, 1.0], [0.0, 1.0, 1.0, 0.0]])
    lengths = np.array([[3, 1, 2, 5], [1, 4, 2, 2]])
    context, options = BaselineContext(lengths_PG=lengths), {"epsilon": 1e-8}
    weights = group_weights(z, "reinforce_pp", 2, context, options)
    for k, inside in enumerate((slice(0, 2), slice(2, 4))):
        slow = zoo_advantages(
            "reinforce_pp", z[:, inside].tolist(), lengths[:, inside].tolist(), {}, options
        )
        np.testing.assert_allclose(weights[k][:, inside], np.array(slow) / 4)


def test_gradients_of_a_model_are_the_formula_one_completion_at_a_time():
    policy, task = random_policy(), TextLengthTask()
    rollouts = sample(policy, task.prompts("study"), 4, Sampling(0, "t", 8))
    z = summed_rewards(task, rollouts)
    weights = group_weights(z, "leave_one_out", 4, BaselineContext(), {})
    fast, squared = _gradients(policy, rollouts, weights, 1.0)
    slow = 0.0
    for p, prompt in enumerate(rollouts.prompt_tokens):
        advantage = plain_advantages("leave_one_out", z[p].tolist(), 0.0)
        for i in range(4):
            tokens = rollouts.tokens_PGT[p, i][rollouts.mask_PGT[p, i]]
            score = one_flat_score(policy.model, prompt, tokens).numpy()
            slow = slow + advantage[i] * score / 4 / 4
            assert squared[p, i] == pytest.approx(float(score @ score), rel=1e-10)
    np.testing.assert_allclose(fast[0], slow, rtol=1e-9, atol=1e-11)
