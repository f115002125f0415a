"""Scores of completions as the package computes them, against one-at-a-time autograd."""

from __future__ import annotations

import numpy as np
import torch
from reference import one_score

from grpo_ustat.policy.logprobs import pack
from grpo_ustat.policy.scores.backward import completion_scores, parameter_sizes
from grpo_ustat.policy.scores.sketch import Sketch


def trainable(model):
    return {name for name, parameter in model.named_parameters() if parameter.requires_grad}


def one_by_one(model, rollouts, temperature=1.0):
    """Scores of all completions, [B, D], each run alone and unpadded; names sorted."""
    rows = [
        one_score(model, prompt, tokens[mask], temperature)
        for p, prompt in enumerate(rollouts.prompt_tokens)
        for tokens, mask in zip(rollouts.tokens_PGT[p], rollouts.mask_PGT[p], strict=True)
    ]
    return torch.stack([torch.cat([row[name].flatten() for name in sorted(row)]) for row in rows])


def packed(rollouts, index=None):
    """Token ids, attention mask and completion mask of rollouts with padding 0."""
    count = rollouts.mask_PGT.shape[0] * rollouts.mask_PGT.shape[1]
    rows = pack(rollouts, np.arange(count) if index is None else index, 0, "cpu")
    return rows.input_ids_BT, rows.attention_mask_BT, rows.completion_mask_BT


def all_at_once(model, rollouts, **way):
    """Scores of all completions in one left-padded batch."""
    return completion_scores(model, *packed(rollouts), **way)


def flat(gradient):
    return torch.cat([gradient[name].flatten() for name in sorted(gradient)])


def assert_close(found, expected, rounding=1e-10):
    """To a share of the largest entry: smaller ones may be sums that cancel."""
    scale = max(1e-3, expected.abs().max().item())
    torch.testing.assert_close(found, expected, rtol=0, atol=rounding * scale)


def agree(model, rollouts, scores=None, rounding=1e-10, temperature=1.0, **way):
    """Assert that norms, inner products, full sketches and weighted sums are those of autograd.

    Args:
        model, rollouts: which scores.
        scores: of autograd, [B, D]; those of `one_by_one` if None.
        rounding: share of the largest entry by which they may differ.
        temperature: of both.
        way: how the package is to score.
    """
    if scores is None:
        scores = one_by_one(model, rollouts, temperature)
    assert torch.isfinite(scores).all() and (scores.square().sum(dim=1) > 1e-3).all()
    way["temperature"], dtype = temperature, torch.float64
    weights_KB = torch.randn(2, len(scores), dtype=dtype)
    sketch = Sketch(parameter_sizes(model), 10**7)
    alone = all_at_once(model, rollouts, **way)
    assert alone.gram_BB is None and alone.gradients_K == []
    sums = all_at_once(model, rollouts, weights_KB=weights_KB, gram=True, **way)
    sketched = all_at_once(model, rollouts, gram=True, features=sketch, **way)
    for found in (alone, sums, sketched):
        expected = scores.square().sum(dim=1)
        torch.testing.assert_close(found.sq_norm_B, expected, rtol=rounding, atol=0)
    for found in (sums, sketched):
        assert_close(found.gram_BB, scores @ scores.T, rounding)
    assert_close(sketched.features_BR, scores, rounding)
    shapes = {name: p.shape for name, p in model.named_parameters() if p.requires_grad}
    for gradient, row in zip(sums.gradients_K, weights_KB @ scores, strict=True):
        assert {name: g.shape for name, g in gradient.items()} == shapes
        places = np.cumsum([0, *(shapes[name].numel() for name in sorted(shapes))])
        for name, start, stop in zip(sorted(shapes), places[:-1], places[1:], strict=True):
            assert_close(gradient[name].flatten(), row[start:stop], rounding)
