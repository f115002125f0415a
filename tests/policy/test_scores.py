"""Score norms, pooled gradients and Gram matrices against one-at-a-time autograd in float64."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from fakes import random_policy, random_rollouts
from reference import one_flat_score

from grpo_ustat.policy import scores as scores_module
from grpo_ustat.policy.loading import load_policy
from grpo_ustat.policy.logprobs import completion_logprobs, pack
from grpo_ustat.policy.scores import completion_scores, covered_parameters


def reference(policy, rollouts, temperature=1.0):
    """One flat score per completion, each from its own unpadded forward and backward."""
    rows = []
    for p, prompt in enumerate(rollouts.prompt_tokens):
        for tokens, mask in zip(rollouts.tokens_PGT[p], rollouts.mask_PGT[p], strict=True):
            rows.append(one_flat_score(policy.model, prompt, tokens[mask], temperature))
    return torch.stack(rows)


def fast(policy, rollouts, weights=None, gram=True, temperature=1.0):
    count = rollouts.mask_PGT.shape[0] * rollouts.mask_PGT.shape[1]
    rows = pack(rollouts, np.arange(count), policy.pad_token, policy.model.device)
    return completion_scores(
        policy.model,
        rows.input_ids_BT,
        rows.attention_mask_BT,
        rows.completion_mask_BT,
        weights_KB=weights,
        gram=gram,
        temperature=temperature,
    )


def flat(gradient):
    return torch.cat([gradient[name].flatten() for name in sorted(gradient)])


CASES = {"tied": dict(tied=True), "untied": dict(tied=False)}


@pytest.mark.parametrize("options", CASES.values(), ids=CASES)
@pytest.mark.parametrize("temperature", [1.0, 0.7])
def test_everything_equals_autograd(options, temperature):
    """Several prompts of different lengths in one left-padded batch, grouped-query attention."""
    policy = random_policy(**options)
    rollouts = random_rollouts([2, 5, 3], group_size=4, longest=6)
    slow = reference(policy, rollouts, temperature)
    weights = torch.randn(3, 12, dtype=torch.float64)
    result = fast(policy, rollouts, weights, temperature=temperature)
    torch.testing.assert_close(result.sq_norm_B, slow.square().sum(1), rtol=1e-10, atol=1e-10)
    torch.testing.assert_close(result.gram_BB, slow @ slow.T, rtol=1e-10, atol=1e-9)
    for gradient, row in zip(result.gradients_K, weights, strict=True):
        torch.testing.assert_close(flat(gradient), row @ slow, rtol=1e-10, atol=1e-10)


def test_a_padding_token_inside_a_completion_counts_as_autograd_counts_it():
    """Its embedding row gets no gradient from being read, but does from being predicted."""
    policy, rollouts = random_policy(), random_rollouts([3, 2], group_size=3, longest=6)
    rollouts.tokens_PGT[:, :, 1] = 0
    slow = reference(policy, rollouts)
    torch.testing.assert_close(
        fast(policy, rollouts).sq_norm_B, slow.square().sum(1), rtol=1e-10, atol=1e-10
    )


def test_norms_do_not_need_the_gram_matrix():
    policy, rollouts = random_policy(), random_rollouts([3, 2], group_size=3, longest=5)
    both = fast(policy, rollouts, gram=True)
    torch.testing.assert_close(fast(policy, rollouts, gram=False).sq_norm_B, both.sq_norm_B)


def test_dropping_the_tied_cross_term_would_be_noticed(monkeypatch):
    """Mutation: square embedding and output layer on their own, as if they were two weights."""
    policy, rollouts = random_policy(tied=True), random_rollouts([3], group_size=4, longest=5)
    slow = reference(policy, rollouts).square().sum(1)
    original = scores_module._add_ends

    def separate(model, input_ids, grads, of_head, names, sums):
        name = names[id(model.get_input_embeddings().weight)]
        sums.add(name, of_head.pop("weight"))
        of_head["weight"] = torch.zeros(())
        original(model, input_ids, grads, of_head, names, sums)

    monkeypatch.setattr(scores_module, "_add_ends", separate)
    broken = fast(policy, rollouts, gram=False).sq_norm_B
    assert not torch.allclose(broken, slow, rtol=1e-3)


def test_frozen_parameters_are_left_out_and_stay_frozen():
    policy, rollouts = random_policy(tied=False), random_rollouts([3], group_size=3, longest=4)
    slow = fast(policy, rollouts).sq_norm_B
    policy.model.lm_head.weight.requires_grad_(False)
    rest = fast(policy, rollouts)
    assert (rest.sq_norm_B < slow).all()
    assert "lm_head.weight" not in covered_parameters(policy.model)
    assert not policy.model.lm_head.weight.requires_grad
    assert policy.model.model.norm.weight.requires_grad


def test_a_parameter_without_a_rule_is_refused_by_name():
    policy, rollouts = random_policy(), random_rollouts([3], group_size=2, longest=4)
    policy.model.model.layers[0].mlp.extra = torch.nn.Parameter(torch.zeros(2))
    with pytest.raises(ValueError, match=r"first model\.layers\.0\.mlp\.extra"):
        fast(policy, rollouts)


def test_part_of_a_completion_can_be_scored_alone():
    """Scores of two halves add up to the whole: masks choose tokens, not sequences."""
    policy, rollouts = random_policy(), random_rollouts([4], group_size=3, longest=6)
    rows = pack(rollouts, np.arange(3), 0, policy.model.device)
    weights = torch.eye(3, dtype=torch.float64)

    def gradients(mask):
        arguments = (rows.input_ids_BT, rows.attention_mask_BT, mask)
        found = completion_scores(policy.model, *arguments, weights_KB=weights)
        return torch.stack([flat(g) for g in found.gradients_K])

    first = rows.completion_mask_BT.clone()
    first[:, 6:] = 0
    second = rows.completion_mask_BT - first
    whole = gradients(rows.completion_mask_BT)
    torch.testing.assert_close(gradients(first) + gradients(second), whole)


def test_logprobs_do_not_depend_on_the_batch():
    """Alone and unpadded, or with longer neighbours: the same log-probability."""
    policy, rollouts = random_policy(), random_rollouts([1, 6], group_size=2, longest=5)
    together = completion_logprobs(policy.model, pack(rollouts, np.arange(4), 0, "cpu"))
    for i in range(4):
        alone = completion_logprobs(policy.model, pack(rollouts, np.array([i]), 0, "cpu"))
        assert alone.item() == pytest.approx(together[i].item(), rel=1e-12)


@pytest.mark.parametrize("name", ["tiny", "tiny_base", "tiny_direct"])
def test_embedded_policies_in_float64(name):
    policy = load_policy(f"embedded:{name}", dtype="float64")
    assert sum(p.numel() for p in policy.model.parameters()) < 400_000
    rollouts = random_rollouts([5, 9], group_size=3, longest=12, vocab=90)
    slow = reference(policy, rollouts)
    result = fast(policy, rollouts)
    torch.testing.assert_close(result.sq_norm_B, slow.square().sum(1), rtol=1e-10, atol=1e-8)
    torch.testing.assert_close(result.gram_BB, slow @ slow.T, rtol=1e-10, atol=1e-7)
