"""Equal completions of a prompt are scored once and put back in place."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from fakes import random_policy, random_rollouts
from reference import one_flat_score

from grpo_ustat.policy.scores.rollouts import distinct, score_rollouts


@pytest.fixture
def rollouts():
    """Two prompts of four completions; completion 2 of the second repeats its completion 0."""
    found = random_rollouts([3, 2], group_size=4, longest=5)
    found.tokens_PGT[1, 2], found.mask_PGT[1, 2] = found.tokens_PGT[1, 0], found.mask_PGT[1, 0]
    return found


def test_distinct_names_the_first_of_each(rollouts):
    index = np.arange(4, 8)
    first, place = distinct(rollouts, index)
    assert len(first) == 3 and place[2] == place[0]
    flat = rollouts.tokens_PGT.reshape(8, -1)
    for i in range(4):
        np.testing.assert_array_equal(flat[index[first[place[i]]]], flat[4 + i])


def test_scores_are_those_of_every_completion(rollouts):
    policy, index = random_policy(), np.array([6, 1, 4, 0])
    weights = np.array([[1.0, 2.0, 3.0, 4.0]])
    found = score_rollouts(policy, rollouts, index, 1.0, weights_KB=weights, gram=True)
    scores = torch.stack([
        one_flat_score(
            policy.model,
            rollouts.prompt_tokens[i // 4],
            rollouts.tokens_PGT[i // 4, i % 4][rollouts.mask_PGT[i // 4, i % 4]],
        )
        for i in index
    ])  # fmt: skip
    torch.testing.assert_close(found.gram_BB, scores @ scores.T, rtol=1e-9, atol=1e-9)
    torch.testing.assert_close(found.sq_norm_B, scores.square().sum(1), rtol=1e-9, atol=1e-9)
    pooled = torch.cat([found.gradients_K[0][n].flatten() for n in sorted(found.gradients_K[0])])
    torch.testing.assert_close(pooled, scores.T @ torch.tensor(weights[0]), rtol=1e-9, atol=1e-9)
