"""The policy that writes tokens, against loops over tokens and finite differences."""

from __future__ import annotations

import itertools
import math

import numpy as np
import pytest
from offpolicy_problem import token_kl_P

from grpo_ustat.gap.sequences import SequencePolicy

STEP = 1e-5
LENGTH, SIZE, PROMPTS = 3, 3, 2


@pytest.fixture
def policy(rng):
    return SequencePolicy(
        rng.normal(size=(LENGTH, SIZE, SIZE)), rng.normal(size=(PROMPTS, SIZE)) / 2
    )


@pytest.fixture
def reference(policy, rng):
    return policy.at(policy.theta_D + rng.normal(size=policy.theta_D.shape) / 3)


@pytest.fixture
def reward_PY(rng):
    return rng.random((PROMPTS, SIZE**LENGTH))


def differences(function, policy):
    """Central differences of a function of the policy, [P, D]."""
    columns = []
    for unit in np.eye(len(policy.theta_D)) * STEP:
        rise = function(policy.at(policy.theta_D + unit)) - function(
            policy.at(policy.theta_D - unit)
        )
        columns.append(rise / (2 * STEP))
    return np.stack(columns, axis=-1)


def written_out(policy, prompt, tokens):
    """Log-probabilities of one completion's tokens."""
    found = []
    for t, token in enumerate(tokens):
        row = policy.theta_LVV[t, tokens[t - 1] if t else 0] + policy.offset_PV[prompt]
        found.append(row[token] - math.log(sum(math.exp(x) for x in row)))
    return found


def test_log_probabilities_are_those_written_out(policy):
    for prompt in range(PROMPTS):
        for y, tokens in enumerate(itertools.product(range(SIZE), repeat=LENGTH)):
            assert policy.completions_YL[y].tolist() == list(tokens)
            np.testing.assert_allclose(
                policy.logprob_PYL[prompt, y], written_out(policy, prompt, tokens), rtol=1e-12
            )
    np.testing.assert_allclose(policy.probabilities_PY.sum(axis=1), 1, rtol=1e-13)


def test_scores_are_gradients_of_log_probabilities(policy):
    found = policy.token_scores_PYLD
    np.testing.assert_allclose(
        found, differences(lambda at: at.logprob_PYL, policy), atol=1e-9, rtol=0
    )
    np.testing.assert_allclose(policy.scores_PYD, found.sum(axis=2), atol=1e-14)


def test_gradients_are_those_of_finite_differences(policy, reward_PY):
    slope = differences(lambda at: at.value_P(reward_PY), policy)
    np.testing.assert_allclose(policy.gradient_PD(reward_PY), slope, atol=1e-9, rtol=0)


def test_gradient_token_by_token_holds_the_prefixes_fixed(policy, reference):
    for law_PY in (policy.probabilities_PY, reference.probabilities_PY):
        slope = differences(lambda at, law_PY=law_PY: token_kl_P(at, reference, law_PY), policy)
        found = policy.token_kl_gradient_PD(reference, law_PY)
        np.testing.assert_allclose(found, slope, atol=1e-9, rtol=0)
