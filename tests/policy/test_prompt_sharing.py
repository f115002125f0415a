"""Prompts read once and logits in chunks: the gradient of one plain pass, on many architectures."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from architectures import UNPADDED, USUAL, VOCAB, build, every_architecture, takes_cache_as
from fakes import LetterTokenizer, random_rollouts
from peft import LoraConfig, get_peft_model

from grpo_ustat.policy import output_layer
from grpo_ustat.policy import prompt_sharing as module
from grpo_ustat.policy.loading import Policy
from grpo_ustat.policy.output_layer import Head, body
from grpo_ustat.policy.prompt_sharing import (
    ContiguousReader,
    FullReader,
    SharedPromptReader,
    can_read_contiguous,
    can_share,
)

PARTS = ([0, 1, 2, 3, 4], [5, 8], [6, 7, 9, 10, 11])  # of prompts 0; 1; 1 and 2, with gaps


def case(name, tied=True, longest=7):
    lengths = [5, 5, 5] if name in UNPADDED else [2, 6, 4]
    rollouts = random_rollouts(lengths, group_size=4, longest=longest, vocab=VOCAB)
    return Policy(build(name, tied), LetterTokenizer(), frozenset({1}), 0), rollouts


def coefficients(seed=1):
    """Factors of log-probabilities and of entropies, a few of both exactly 0."""
    rng = np.random.default_rng(seed)
    factors = rng.normal(size=(2, 12, 7)) * (rng.random((2, 12, 7)) < 0.8)
    return torch.from_numpy(factors)


def plain(policy, rollouts, factors, temperature):
    """Each completion alone and unpadded, all logits, autograd; gradients and log-probabilities."""
    total, found = 0.0, torch.zeros(12, 7, dtype=torch.float64)
    for i in range(12):
        prompt, mask = rollouts.prompt_tokens[i // 4], rollouts.mask_PGT[i // 4, i % 4]
        tokens = torch.from_numpy(rollouts.tokens_PGT[i // 4, i % 4][mask])
        ids = torch.cat([torch.tensor(prompt), tokens])[None]
        logits = policy.model(input_ids=ids, use_cache=False).logits[0, len(prompt) - 1 : -1]
        logp = (logits / temperature).log_softmax(-1)
        chosen, length = logp.gather(1, tokens[:, None])[:, 0], len(tokens)
        entropy = -(logp.exp() * logp).sum(-1)
        total = total + (factors[0, i, :length] * chosen + factors[1, i, :length] * entropy).sum()
        found[i, :length] = chosen.detach()
    named = [(n, p) for n, p in policy.model.named_parameters() if p.requires_grad]
    grads = torch.autograd.grad(total, [p for _, p in named], allow_unused=True)
    names = [n for n, _ in named]
    return {n: g for n, g in zip(names, grads, strict=True) if g is not None}, found


def read(policy, rollouts, factors, temperature, way):
    policy.model.zero_grad()
    reader = way(policy, rollouts, np.arange(3))
    found = torch.zeros(12, 7, dtype=torch.float64)
    for index in map(np.array, PARTS):
        window = reader.window(index)
        head, width = Head(policy, reader.output, temperature), window.mask_BT.shape[1]
        mine = factors[:, index, :width] * window.mask_BT
        logprob = head.logprobs(window)
        again = head.backward(window, *mine)
        used = mine.ne(0).any(dim=0)
        torch.testing.assert_close(again[used], logprob[used], rtol=1e-12, atol=1e-12)
        found[index, :width] = logprob
    reader.backward()
    grads = {n: p.grad for n, p in policy.model.named_parameters() if p.grad is not None}
    return grads, found


def assert_equal(found, expected):
    assert set(expected) <= set(found)
    for name, grad in found.items():
        wanted = expected.get(name, torch.zeros_like(grad))
        scale = max(1e-3, wanted.abs().max().item())
        torch.testing.assert_close(grad, wanted, rtol=0, atol=1e-10 * scale, msg=name)


@every_architecture
def test_gradients_are_those_of_a_plain_pass(name, tied, monkeypatch):
    monkeypatch.setitem(output_layer.CHUNK_BYTES, "cpu", 3 * 8 * VOCAB)  # three tokens at a time
    policy, rollouts = case(name, tied)
    factors = coefficients()
    expected, logprobs = plain(policy, rollouts, factors, 0.7)
    contiguous = can_read_contiguous(policy)
    assert contiguous or name not in USUAL
    ways = [FullReader] + [SharedPromptReader] * can_share(policy)
    ways += [ContiguousReader] * contiguous
    for way in ways:
        grads, found = read(policy, rollouts, factors, 0.7, way)
        torch.testing.assert_close(found, logprobs, rtol=1e-10, atol=1e-10)
        assert_equal(grads, expected)


def test_completions_of_one_token_are_read_from_their_prompts_alone(monkeypatch):
    """Of which nothing is read after the prompt."""
    policy, rollouts = case("llama", longest=1)
    expected, logprobs = plain(policy, rollouts, coefficients(), 0.7)
    lengths, own = [], SharedPromptReader._read
    monkeypatch.setattr(
        SharedPromptReader, "_read",
        lambda self, ids_BT, *rest: lengths.append(ids_BT.shape[1]) or own(self, ids_BT, *rest),
    )  # fmt: skip
    grads, found = read(policy, rollouts, coefficients(), 0.7, SharedPromptReader)
    torch.testing.assert_close(found, logprobs, rtol=1e-10, atol=1e-10)
    assert_equal(grads, expected)
    assert len(lengths) == 1 and lengths[0] > 1


@pytest.mark.parametrize(
    "name, shared",
    [("llama", True), ("qwen2", True), ("gemma2", True), ("gpt2", True), ("mamba", False)],
)
def test_prompts_are_shared_where_keys_and_values_say_everything(name, shared):
    assert can_share(case(name)[0]) is shared


@pytest.mark.parametrize("name", ["past_key_values", "cache"])
def test_prompts_are_shared_whatever_the_model_calls_its_cache(name, monkeypatch):
    """Transformers 5.24 has another name than those before."""
    policy, _ = case("llama")
    below = body(policy.model)
    monkeypatch.setattr(below, "forward", takes_cache_as(name, below.forward))
    assert can_share(policy)


def test_adapters_get_their_gradients():
    policy, rollouts = case("llama")
    options = LoraConfig(r=2, target_modules="all-linear", init_lora_weights=False)
    torch.manual_seed(0)
    policy = Policy(get_peft_model(policy.model, options).double().eval(), None, frozenset({1}), 0)
    factors = coefficients()
    expected, _ = plain(policy, rollouts, factors, 1.0)
    for way in (SharedPromptReader, FullReader):
        grads, _ = read(policy, rollouts, factors, 1.0, way)
        assert "lora_A" in "".join(grads) and not any("base_layer" in n for n in grads)
        assert_equal(grads, expected)


def test_tokens_without_a_factor_are_not_computed(monkeypatch):
    policy, rollouts = case("llama")
    seen, final = [], Head._logits
    monkeypatch.setattr(Head, "_logits", lambda self, h: (seen.append(len(h)), final(self, h))[1])
    reader = SharedPromptReader(policy, rollouts, np.arange(3))
    window = reader.window(np.arange(4))
    factors = torch.zeros(window.mask_BT.shape, dtype=torch.float64)
    factors[1, 0] = factors[2, 0] = 1.0
    Head(policy, reader.output, 1.0).backward(window, factors)
    assert sum(seen) == 2


def test_a_model_is_tried_once_unless_there_is_no_memory(monkeypatch):
    policy, calls = case("llama")[0], []

    def trial(*given):
        calls.append(given)
        raise torch.OutOfMemoryError("none")

    with monkeypatch.context() as patched:
        patched.setattr(module, "_trial", trial)
        assert not can_read_contiguous(policy) and calls
    assert can_read_contiguous(policy)
    monkeypatch.setattr(module, "_trial", trial)
    assert can_read_contiguous(policy) and len(calls) == 1
