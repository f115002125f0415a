"""Equal completions of a prompt are scored once and put back in place."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from fakes import random_policy, random_rollouts
from scored import flat, one_by_one

from grpo_ustat.policy.scores import rollouts as module
from grpo_ustat.policy.scores.rollouts import distinct, pass_sizes, score_rollouts


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


@pytest.mark.parametrize("layer, free, passes", [
    (1e9, 2**40, [3]), (0, 2**40, [1, 1, 1]), (0, 2**10, [1, 1, 1]),
])  # fmt: skip
def test_scores_are_those_of_every_completion(rollouts, monkeypatch, layer, free, passes):
    """In one pass, where another costs much, or in a pass for each length, where it costs nothing;
    with much memory or little.
    """
    policy, index, calls = random_policy(), np.array([6, 1, 4, 0]), []
    weights, original = np.array([[1.0, 2.0, 3.0, 4.0]]), module.completion_scores
    monkeypatch.setitem(module.PRODUCTS_OF_A_LAYER, "cpu", layer)
    monkeypatch.setattr(module, "free_bytes", lambda device: free)

    def spy(*arguments, **options):
        calls.append((options["passes"], options["by_layer"]))
        return original(*arguments, **options)

    monkeypatch.setattr(module, "completion_scores", spy)
    found = score_rollouts(policy, rollouts, index, 1.0, weights_KB=weights, gram=True)
    assert calls == [(passes, free == 2**10)]
    scores = one_by_one(policy.model, rollouts)[index]
    torch.testing.assert_close(found.gram_BB, scores @ scores.T, rtol=1e-9, atol=1e-9)
    torch.testing.assert_close(found.sq_norm_B, scores.square().sum(1), rtol=1e-9, atol=1e-9)
    torch.testing.assert_close(
        flat(found.gradients_K[0]), scores.T @ torch.tensor(weights[0]), rtol=1e-9, atol=1e-9
    )


def test_tokens_weigh_as_asked(rollouts):
    """By differentiating the weighted sum of a completion's log-probabilities; equal completions of
    unequal weights are apart, and rows may come twice.
    """
    policy, index = random_policy(), np.array([4, 6, 1, 4])
    weights = np.random.default_rng(3).normal(size=(4, 5))
    weights[2, :2] = 0  # tokens that do not count
    found = score_rollouts(policy, rollouts, index, 0.7, token_weights_BT=weights, gram=True)
    parameters = [p for p in policy.model.parameters() if p.requires_grad]
    scores = []
    for i, own in zip(index, weights, strict=True):
        prompt, mask = rollouts.prompt_tokens[i // 4], rollouts.mask_PGT[i // 4, i % 4]
        ids = [*prompt, *rollouts.tokens_PGT[i // 4, i % 4][mask].tolist()]
        logits = policy.model(torch.tensor([ids])).logits[0, len(prompt) - 1 : -1] / 0.7
        logprobs = logits.log_softmax(-1)[range(mask.sum()), ids[len(prompt) :]]
        total = (logprobs * torch.tensor(own[: mask.sum()])).sum()
        scores.append(torch.cat([g.flatten() for g in torch.autograd.grad(total, parameters)]))
    scores = torch.stack(scores)
    torch.testing.assert_close(found.gram_BB, scores @ scores.T, rtol=1e-9, atol=1e-9)


def splits(count):
    """All ways to cut so many rows into passes."""
    if count == 0:
        yield []
    for first in range(1, count + 1):
        for rest in splits(count - first):
            yield [first, *rest]


def padded(sizes, tokens, overhead):
    """What passes cost, by hand."""
    ends = np.cumsum(sizes)
    return sum(n * tokens[end - 1] + overhead for n, end in zip(sizes, ends, strict=True))


@pytest.mark.parametrize("overhead", [0, 3, 20, 500])
def test_passes_cost_least_of_all_ways_to_cut(overhead):
    for seed in range(5):
        tokens = np.sort(np.random.default_rng(seed).integers(5, 60, 9))
        sizes = pass_sizes(tokens, overhead)
        assert sum(sizes) == 9 and min(sizes) > 0
        least = min(padded(way, tokens, overhead) for way in splits(9))
        assert padded(sizes, tokens, overhead) == least


def test_passes_by_hand():
    """Of 10, 10 and 100 tokens: one pass costs 300, two 120 and another overhead."""
    assert pass_sizes(np.array([10, 10, 100]), 179) == [2, 1]
    assert pass_sizes(np.array([10, 10, 100]), 181) == [3]
