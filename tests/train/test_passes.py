"""What a second pass over a batch does to an unbiased estimate, by enumerating a bandit."""

from __future__ import annotations

from itertools import product

import numpy as np
import pytest
import torch
from test_objective import objective

from grpo_ustat.train.objective import Part, surrogate

LOGITS, REWARDS = np.array([-2.5, 0.0, 0.5]), np.array([1.0, 0.0, 0.0])  # rare success
GROUPS = list(product(range(3), repeat=2))  # G = 2 of three outcomes, one token each


def probabilities(logits):
    weights = np.exp(logits - logits.max())
    return weights / weights.sum()


def true_gradient(logits):
    p = probabilities(logits)
    return p * (REWARDS - p @ REWARDS)


def chance(group, logits):
    return float(np.prod(probabilities(logits)[list(group)]))


def gradient(logits, group):
    """Of the objective with whole-sequence ratios and leave-one-out advantages, by autograd."""
    leaf = torch.tensor(logits, requires_grad=True)
    own = torch.tensor(group)
    rewards = REWARDS[list(group)]
    part = Part(
        advantage_B=torch.tensor(rewards - rewards[::-1]),
        mask_BT=torch.ones(2, 1, dtype=torch.float64),
        old_BT=torch.tensor(np.log(probabilities(LOGITS))[list(group)])[:, None],
        reference_BT=None,
        weight_B=torch.full((2,), 0.5, dtype=torch.float64),
        num_rollouts=2,
    )
    config = objective(importance_sampling_level="whole_sequence")
    surrogate(config, torch.log_softmax(leaf, 0)[own][:, None], part).backward()
    return leaf.grad.numpy()


def bias_of_second_update(rate, pairs):
    """||E[g2 - grad J(theta1)]|| / ||grad J(theta1)||, from (first, second group, chance)."""
    off, scale = np.zeros(3), np.zeros(3)
    for first, second, weight in pairs:
        moved = LOGITS + rate * gradient(LOGITS, first)
        off += weight * (gradient(moved, second) - true_gradient(moved))
        scale += weight * true_gradient(moved)
    return float(np.linalg.norm(off) / np.linalg.norm(scale))


@pytest.mark.parametrize("rate, least", [(0.1, 0.06), (0.5, 0.35)])
def test_a_second_pass_is_biased_and_a_second_minibatch_is_not(rate, least):
    """The ratio of whole completions corrects for the policy that wrote them, not for their part in
    moving it: E over a batch used twice is off, over a fresh minibatch exact.
    """
    twice = [(g, g, chance(g, LOGITS)) for g in GROUPS]
    fresh = [(g, h, chance(g, LOGITS) * chance(h, LOGITS)) for g in GROUPS for h in GROUPS]
    assert bias_of_second_update(rate, fresh) < 1e-12
    assert bias_of_second_update(rate, twice) > least
