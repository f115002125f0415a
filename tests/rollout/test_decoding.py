"""Tokens from logits: against numbers worked by hand and plain softmaxes."""

from __future__ import annotations

import math

import pytest
import torch

from grpo_ustat.rollout import decoding
from grpo_ustat.rollout.decoding import BLOCK_TOKENS, choose, draw_by_blocks, draw_token


def test_a_token_its_logprob_and_entropy_by_hand():
    """p = (1/2, 1/4, 1/4) at temperature 2; the entropy is 3/2 log 2."""
    logits = 2 * torch.tensor([[0.5, 0.25, 0.25]]).double().log().repeat(5, 1) + 7
    uniform = torch.tensor([0.0, 0.49, 0.51, 0.74, 0.76]).double()
    token, logprob, entropy = choose(logits, uniform, temperature=2.0)
    assert token.tolist() == [0, 0, 1, 1, 2]
    expected = [math.log(p) for p in (0.5, 0.5, 0.25, 0.25, 0.25)]
    assert logprob.tolist() == pytest.approx(expected, abs=1e-12)
    assert entropy.tolist() == pytest.approx([1.5 * math.log(2)] * 5, abs=1e-12)


def test_a_logit_of_minus_infinity_is_never_drawn_and_adds_no_entropy():
    logits = torch.tensor([[-math.inf, 0.0, -math.inf, 0.0, -math.inf]]).double().repeat(3, 1)
    token, logprob, entropy = choose(logits, torch.tensor([0.0, 0.5, 0.999]).double(), 1.0)
    assert token.tolist() == [1, 3, 3]
    assert logprob.tolist() == pytest.approx([-math.log(2)] * 3)
    assert entropy.tolist() == pytest.approx([math.log(2)] * 3)


def test_greedy_is_the_first_of_the_largest_with_its_logprob_at_the_temperature():
    logits = torch.tensor([[0.0, 3.0, 1.0, 3.0]]).double()
    token, logprob, _ = choose(logits, torch.tensor([0.99]).double(), 0.5, greedy=True)
    assert token.tolist() == [1]
    assert logprob.item() == pytest.approx(torch.log_softmax(logits / 0.5, -1)[0, 1].item())


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
def test_rows_by_parts_equal_plain_softmaxes_of_widened_logits(dtype, monkeypatch):
    monkeypatch.setitem(decoding.LOGITS_AT_ONCE, "cpu", 300)  # three rows at a time
    torch.manual_seed(0)
    logits, uniform = 3 * torch.randn(50, 97, dtype=dtype), torch.rand(50, dtype=torch.float64)
    token, logprob, entropy = choose(logits, uniform, 0.7)
    wide = logits if dtype == torch.float64 else logits.float()
    logp = torch.log_softmax((wide / 0.7).double(), dim=-1)
    drawn = (logp.exp().cumsum(-1) <= uniform[:, None]).sum(-1)
    assert torch.equal(token, drawn)
    close = dict(rtol=0, atol=1e-12 if dtype == torch.float64 else 1e-5, check_dtype=False)
    torch.testing.assert_close(logprob, logp.gather(1, drawn[:, None])[:, 0], **close)
    torch.testing.assert_close(entropy, -(logp.exp() * logp).sum(-1), **close)


@pytest.mark.parametrize(
    "vocabulary", [1, 97, BLOCK_TOKENS, BLOCK_TOKENS + 1, 9 * BLOCK_TOKENS, 10 * BLOCK_TOKENS + 3]
)
def test_blocks_draw_the_tokens_of_the_plain_cumulative_sum(vocabulary):
    torch.manual_seed(0)
    weights = (3 * torch.randn(400, vocabulary).double()).exp()
    weights[torch.rand(400, vocabulary) < 0.3] = 0
    weights[:, vocabulary // 2] += 1e-3
    uniform = torch.rand(400, 1, dtype=torch.float64)
    token, total = draw_by_blocks(weights, uniform)
    expected, plain_total = draw_token(weights, uniform)
    assert torch.equal(token, expected)
    torch.testing.assert_close(total, plain_total, rtol=1e-13, atol=0)


@pytest.mark.parametrize("draw", [draw_token, draw_by_blocks])
def test_a_token_of_weight_zero_is_never_drawn_wherever_rounding_brings_the_threshold(draw):
    """Positive weights stand alone among zeros, at the edges of blocks too; u is next to the sums
    of weights, and next to 0 and 1.
    """
    positive = [5, BLOCK_TOKENS - 1, 2 * BLOCK_TOKENS, 3 * BLOCK_TOKENS + 7]
    torch.manual_seed(0)
    shares = torch.rand(300, 4, dtype=torch.float64)
    weights = torch.zeros(300, 5 * BLOCK_TOKENS + 11, dtype=torch.float64)
    weights[:, positive] = shares
    edges = torch.cat([torch.zeros(300, 1), shares.cumsum(-1) / shares.sum(-1, keepdim=True)], 1)
    below_one = math.nextafter(1.0, 0.0)
    for k in range(5):
        for direction in (0.0, 2.0):
            uniform = edges[:, k : k + 1].double().nextafter(torch.tensor(direction).double())
            token, _ = draw(weights, uniform.clamp(0, below_one))
            assert set(token.flatten().tolist()) <= set(positive)


@pytest.mark.parametrize("draw", [draw_token, draw_by_blocks])
def test_a_row_that_is_not_finite_draws_a_token_of_the_vocabulary(draw):
    weights = torch.full((2, 3 * BLOCK_TOKENS + 5), torch.nan)
    token, total = draw(weights, torch.tensor([[0.3], [0.9]], dtype=torch.float64))
    assert (token < weights.shape[1]).all() and total.isnan().all()


def test_frequencies_of_a_large_vocabulary_in_float32_are_its_probabilities():
    """Uniforms on a fine grid, so that each token is drawn in proportion but for one draw."""
    torch.manual_seed(0)
    logits = torch.randn(1, 40 * BLOCK_TOKENS)
    draws = 4096
    uniform = (torch.arange(draws, dtype=torch.float64) + 0.5) / draws
    token, _, _ = choose(logits.expand(draws, -1), uniform, 1.0)
    expected = draws * torch.softmax(logits.double(), -1)[0].cumsum(-1)
    counted = torch.bincount(token, minlength=40 * BLOCK_TOKENS).cumsum(0)
    assert (counted - expected).abs().max() < 1
