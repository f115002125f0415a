"""Tokens from logits: against numbers worked by hand and plain softmaxes."""

from __future__ import annotations

import math

import pytest
import torch

from grpo_ustat.rollout import decoding
from grpo_ustat.rollout.decoding import choose


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
