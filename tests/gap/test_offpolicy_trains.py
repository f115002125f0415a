"""What the study calls Algorithm 2 is what training ascends: autograd of the objective."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from offpolicy_problem import BETA, LENGTH, small_setting
from reference import plain_advantages

from grpo_ustat.config.objective import ObjectiveConfig
from grpo_ustat.gap.offpolicy import estimate
from grpo_ustat.train.objective import Part, surrogate

PROMPTS, OUTCOMES = np.array([1, 0]), np.array([[0, 3, 1], [2, 2, 1]])


def objective(level, beta):
    return ObjectiveConfig(
        name="test",
        importance_sampling_level=level,
        loss_type="sum",
        num_iterations=1,
        num_minibatches=1,
        minibatch_size=None,
        epsilon=None,
        epsilon_high=None,
        beta=beta,
        kl_estimator="k3" if beta else None,
        kl_in="loss" if beta else None,
        entropy_coef=0.0,
    )


def trained(setting, current, config, advantages):
    """Gradient in theta of the objective of six completions, by autograd."""
    own = np.repeat(PROMPTS, 3), OUTCOMES.ravel()
    theta = torch.tensor(current.theta_LVV, requires_grad=True)
    rows = []
    for prompt, outcome in zip(*own, strict=True):
        tokens, previous = setting.old.completions_YL[outcome], 0
        logprobs = []
        for t, token in enumerate(tokens):
            logits = theta[t, previous] + torch.tensor(current.offset_PV[prompt])
            logprobs.append(torch.log_softmax(logits, dim=0)[token])
            previous = token
        rows.append(torch.stack(logprobs))
    part = Part(
        advantage_B=torch.tensor(advantages),
        mask_BT=torch.ones(6, LENGTH, dtype=torch.float64),
        old_BT=torch.tensor(setting.old.logprob_PYL[own]),
        reference_BT=torch.tensor(setting.reference.logprob_PYL[own]),
        weight_B=torch.full((6,), 1 / 6, dtype=torch.float64),
        num_rollouts=6,
    )
    surrogate(config, torch.stack(rows), part).backward()
    return theta.grad.numpy().ravel()


@pytest.fixture
def setting(rng):
    return small_setting(rng)


@pytest.fixture
def current(setting, rng):
    return setting.old.at(setting.old.theta_D + rng.normal(size=8) / 3)


@pytest.fixture
def advantages(setting):
    rewards = [[setting.reward_PY[p, y] for y in g] for p, g in zip(PROMPTS, OUTCOMES, strict=True)]
    return [a for row in rewards for a in plain_advantages("leave_one_out", row, None)]


def test_token_ratios_and_the_penalty_are_those_of_training(setting, current, advantages):
    found = trained(setting, current, objective("token", BETA), advantages)
    expected = estimate(setting, current, PROMPTS, OUTCOMES)
    np.testing.assert_allclose(found, expected, rtol=1e-12, atol=1e-14)


def test_the_completions_ratio_is_that_of_training(setting, current, advantages):
    found = trained(setting, current, objective("whole_sequence", 0.0), advantages)
    weight_PYD, _ = setting.tables(current, "sequence")
    own = np.repeat(PROMPTS, 3), OUTCOMES.ravel()
    expected = np.array(advantages) @ weight_PYD[own] / 6
    np.testing.assert_allclose(found, expected, rtol=1e-12, atol=1e-14)
