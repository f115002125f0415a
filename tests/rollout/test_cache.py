"""Sampling with the growing cache against one full forward pass per token."""

from __future__ import annotations

import contextlib
import dataclasses
import itertools

import numpy as np
import pytest
import torch
from architectures import ARCHITECTURES, AT_EVERY_PUSH, USUAL, VOCAB, build, takes_cache_as
from fakes import LetterTokenizer, letter_prompts, random_policy
from torch.utils._python_dispatch import TorchDispatchMode

from grpo_ustat.config.schema import ConfigError
from grpo_ustat.draws import uniforms
from grpo_ustat.mse.sampler import sampler_gap
from grpo_ustat.policy.loading import Policy
from grpo_ustat.policy.prompt_sharing import check_rows, trial
from grpo_ustat.rollout import cache, local
from grpo_ustat.rollout.batch import DecodingBatch
from grpo_ustat.rollout.engine import LocalEngine
from grpo_ustat.rollout.local import Sampling, sample

PROMPTS = letter_prompts("ab", "jjj", "bcdefgh", "c")
SAMPLING = Sampling(seed=0, stream="cache", max_completion_length=12, temperature=0.9)
KINDS = (
    *("llama", "qwen2", "mistral", "gemma2", "gemma3", "gpt2", "gpt_neo", "falcon-alibi"),
    *("gpt_oss", "deepseek_v3", "bloom", "mixtral", "lfm2"),
)


class Letters(LetterTokenizer):
    """Prompts of letters; completions may hold any token."""

    def batch_decode(self, rows, skip_special_tokens):
        return [" ".join(map(str, row)) for row in rows]


@torch.no_grad()
def one_by_one(policy, prompt, completion, sampling):
    """Tokens, log-probabilities and entropies; the whole text is read anew for every token."""
    drawn = uniforms(0, sampling.stream, 0, prompt.id, range(completion, completion + 1), 12)[0]
    ids, result = policy.tokenizer(prompt.text)["input_ids"], []
    for u in drawn:
        logits = policy.model(input_ids=torch.tensor([ids]), use_cache=False).logits[0, -1]
        logp = torch.log_softmax(logits / sampling.temperature, dim=-1)
        token = int((logp.exp().cumsum(0) <= u).sum())
        result.append((token, logp[token].item(), -(logp.exp() * logp).sum().item()))
        ids = [*ids, token]
        if token in policy.end_tokens:
            break
    return result


@pytest.fixture
def refills(monkeypatch):
    """Lengths are unequal enough from the start; how many rows waited at each refill."""
    waiting, refill = [], DecodingBatch.refill
    monkeypatch.setattr(local, "UNEQUAL_TOKEN_RATIO", 0)
    monkeypatch.setattr(
        DecodingBatch, "refill", lambda self, rows: (waiting.append(len(rows)), refill(self, rows))
    )
    return waiting


@pytest.mark.parametrize(
    "kind, in_place",
    [
        ("llama", True),
        ("llama", False),
        *(pytest.param(kind, True, marks=pytest.mark.slow) for kind in KINDS if kind != "llama"),
        pytest.param("gemma3", False, marks=pytest.mark.slow),
    ],
)
def test_sampling_equals_one_full_forward_pass_per_token(kind, in_place, monkeypatch, refills):
    """Float64; sliding windows of 3, prompts of four lengths, rows that leave or are replaced,
    buffers that fill up, groups that are split."""
    monkeypatch.setattr(cache, "MIN_IN_PLACE_BYTES", 0 if in_place else 2**60)
    monkeypatch.setattr(cache, "SPARE_TOKENS", 2)
    policy = Policy(build(kind, tied=False), Letters(), frozenset(range(1, VOCAB, 9)), 0)
    found = [sample(policy, PROMPTS, 4, dataclasses.replace(SAMPLING, rows=r)) for r in (512, 7)]
    assert len(set(found[0].lengths_PG.flatten())) > 2
    assert bool(refills) == (kind != "lfm2")  # its convolutions have states that cannot move
    for (p, prompt), i in itertools.product(enumerate(PROMPTS), range(4)):
        expected = one_by_one(policy, prompt, i, SAMPLING)
        for rollouts in found:
            assert rollouts.lengths_PG[p, i] == len(expected)
            fields = (rollouts.tokens_PGT, rollouts.logprobs_PGT, rollouts.entropy_PGT)
            written = np.stack([field[p, i] for field in fields], axis=1)
            np.testing.assert_allclose(written[: len(expected)], expected, rtol=0, atol=1e-9)
            assert not written[len(expected) :].any()


def test_a_buffer_is_extended_in_place_until_it_is_full(monkeypatch):
    monkeypatch.setattr(cache, "MIN_IN_PLACE_BYTES", 0)
    monkeypatch.setattr(cache, "SPARE_TOKENS", 3)
    layer, whole, places = cache.GrowingLayer(), torch.randn(2, 1, 12, 4), []
    for t in range(12):
        keys, _ = layer.update(whole[:, :, t : t + 1], whole[:, :, t : t + 1])
        assert torch.equal(keys, whole[:, :, : t + 1])
        places.append(keys.untyped_storage().data_ptr())
    assert len(set(places[1:5])) == 1 and len(set(places)) < 6
    layer.batch_select_indices(torch.tensor([1]))
    keys, _ = layer.update(whole[1:, :, :1], whole[1:, :, :1])
    assert torch.equal(keys, torch.cat([whole[1:], whole[1:, :, :1]], dim=2))


def test_rows_are_replaced_where_lengths_are_unequal_alone(monkeypatch):
    """Equal lengths: whole batches after each other, no reading of prompts ahead."""
    waiting = []
    monkeypatch.setattr(DecodingBatch, "refill", lambda self, rows: waiting.append(len(rows)))
    equal = Policy(random_policy().model, LetterTokenizer(), frozenset({99}), 0)
    sample(equal, letter_prompts("ab", "jjj"), 8, dataclasses.replace(SAMPLING, rows=5))
    assert not waiting


def test_a_window_forgets_the_columns_that_no_row_has(monkeypatch):
    """Dropped before the window is full, and after."""
    monkeypatch.setattr(cache, "MIN_IN_PLACE_BYTES", 0)
    for window in (4, 12):
        layer, whole = cache.GrowingSlidingWindowLayer(window), torch.randn(2, 1, 16, 4)
        layer.update(whole[:, :, :8], whole[:, :, :8])
        layer.drop(3)
        assert layer.get_seq_length() == 5 and layer.holds(5)
        keys, _ = layer.update(whole[:, :, 8:9], whole[:, :, 8:9])
        assert torch.equal(keys, whole[:, :, 9 - min(window, 6) : 9])


class Casts(TorchDispatchMode):
    """Counts what is made bfloat16."""

    def __init__(self):
        super().__init__()
        self.count = 0

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        result = function(*args, **(kwargs or {}))
        copies = function.overloadpacket in (torch.ops.aten.to, torch.ops.aten._to_copy)
        if copies and result.dtype is torch.bfloat16:
            self.count += args[0].dtype is torch.float32
        return result


def casts_and_rollouts(longest):
    model = random_policy(dtype=torch.float32).model
    policy = Policy(model, LetterTokenizer(), frozenset({99}), 0, bf16=True)
    with Casts() as casts:
        rollouts = sample(
            policy, PROMPTS, 2, dataclasses.replace(SAMPLING, max_completion_length=longest)
        )
    return casts.count, rollouts


def test_weights_are_cast_once_a_call_and_the_numbers_stay(monkeypatch):
    """14 linear layers and the output: a token casts their inputs alone."""
    (few, _), (more, rollouts) = casts_and_rollouts(4), casts_and_rollouts(12)
    monkeypatch.setattr(local, "cast_linears", lambda model: contextlib.nullcontext())
    (few_before, _), (more_before, plain) = casts_and_rollouts(4), casts_and_rollouts(12)
    np.testing.assert_array_equal(rollouts.tokens_PGT, plain.tokens_PGT)
    np.testing.assert_array_equal(rollouts.logprobs_PGT, plain.logprobs_PGT)
    assert (more_before - few_before) - (more - few) >= 8 * 15


@pytest.mark.parametrize(
    "kind",
    [
        pytest.param(
            kind,
            marks=pytest.mark.slow if kind in {*USUAL, *AT_EVERY_PUSH} else pytest.mark.nightly,
        )
        for kind in ARCHITECTURES
    ],
)
def test_an_architecture_is_sampled_as_it_scores_or_is_refused(kind):
    """Padded prompts in float64: the sampler's log-probabilities are the model's own."""
    policy = Policy(build(kind, tied=False), Letters(), frozenset(range(1, VOCAB, 9)), 0)
    try:
        engine = LocalEngine(policy)
    except ConfigError as refusal:
        assert kind in ("mamba", "mamba2", "rwkv", "openai-gpt", "recurrent_gemma")
        assert f"rollout=local cannot sample from {kind}" in str(refusal)
        return
    rollouts = engine.sample(PROMPTS, 4, SAMPLING)
    assert sampler_gap(policy, rollouts, np.arange(16), SAMPLING.temperature) < 1e-6


@pytest.mark.parametrize("name", ["past_key_values", "cache"])
def test_a_cache_is_handed_over_by_the_models_name_for_it(name, monkeypatch):
    """Transformers 5.24 has another than those before."""
    policy = Policy(build("llama", tied=True), Letters(), frozenset(range(1, VOCAB, 9)), 0)
    expected = LocalEngine(policy).sample(PROMPTS, 4, SAMPLING)
    monkeypatch.setattr(policy.model, "forward", takes_cache_as(name, policy.model.forward))
    found = LocalEngine(policy).sample(PROMPTS, 4, SAMPLING)
    np.testing.assert_array_equal(found.tokens_PGT, expected.tokens_PGT)
    np.testing.assert_array_equal(found.logprobs_PGT, expected.logprobs_PGT)


@pytest.mark.parametrize("kind", ["mamba", "mamba2", "rwkv"])
def test_a_model_that_ignores_what_it_has_read_is_refused(kind):
    with pytest.raises(ConfigError, match="cache: use rollout"):
        LocalEngine(Policy(build(kind, tied=False), Letters(), frozenset({1}), 0))


_DECODER = dict(
    d_model=16, encoder_layers=1, decoder_layers=2, encoder_attention_heads=4,
    decoder_attention_heads=4, encoder_ffn_dim=24, decoder_ffn_dim=24,
)  # fmt: skip
_ROWS = dict(intermediate_size=24, is_decoder=True)
_LINEAR = ["linear_attention", "full_attention"]
REFUSED = {  # models, and what is said of them
    "roberta": ("roberta", _ROWS, "reads rows of a batch differently from sep"),
    "xlm-roberta": ("xlm-roberta", _ROWS, "reads rows of a batch differently from sep"),
    "bart": ("bart", _DECODER, "reads rows of a batch differently from sep"),
    "mbart": ("mbart", _DECODER, "reads rows of a batch differently from sep"),
    "doge": (
        "doge",
        dict(intermediate_size=24, num_key_value_heads=2, keep_window_size=6),
        "differ",
    ),
    "minimax": (
        "minimax",
        dict(intermediate_size=24, num_key_value_heads=2, head_dim=8, num_local_experts=2,
             num_experts_per_tok=1, layer_types=_LINEAR, block_size=8),
        "cannot sample from minimax, which does not accept .*rollout=vllm.*pool=FILE.parquet",
    ),
}  # fmt: skip


@pytest.mark.parametrize("kind", REFUSED)
def test_a_model_that_reads_or_draws_otherwise_than_alone_is_refused_at_the_start(
    kind, monkeypatch
):
    """By a trial of a few short rows, in float32 as by default, before anything is sampled."""
    name, options, message = REFUSED[kind]
    monkeypatch.setitem(ARCHITECTURES, kind, (name, options))
    policy = Policy(build(kind, False, torch.float32), Letters(), frozenset({1}), 0)
    with pytest.raises(ConfigError, match=message) as refused:
        LocalEngine(policy)
    assert "\n" not in str(refused.value) and name in str(refused.value)


def test_a_model_that_others_sample_is_read_in_batches_too(monkeypatch):
    monkeypatch.setitem(ARCHITECTURES, "roberta", REFUSED["roberta"][:2])
    policy = Policy(build("roberta", False, torch.float32), Letters(), frozenset({1}), 0)
    with pytest.raises(ConfigError, match="rows of a batch"):
        check_rows(policy)
    check_rows(random_policy())


@pytest.mark.parametrize("dtype, bf16", [(torch.float32, False), (torch.float32, True),
                                         (torch.bfloat16, False)])  # fmt: skip
def test_the_trial_changes_no_draw_and_passes_narrow_types(dtype, bf16):
    model = random_policy(dtype=dtype).model
    policy = Policy(model, LetterTokenizer(), frozenset({1}), 0, bf16=bf16)
    before = sample(policy, PROMPTS, 4, SAMPLING)
    after = LocalEngine(policy).sample(PROMPTS, 4, SAMPLING)
    np.testing.assert_array_equal(before.tokens_PGT, after.tokens_PGT)
    np.testing.assert_array_equal(before.logprobs_PGT, after.logprobs_PGT)


@pytest.mark.parametrize("room", [2, 5, 9, 64])
def test_a_trial_stays_within_the_models_positions_and_below_longropes_switch(room):
    model = random_policy().model
    model.config.max_position_embeddings = room
    prompts, width = trial(Policy(model, LetterTokenizer(), frozenset({1}), 0))
    assert 1 <= max(map(len, prompts)) + width <= max(room, 2) and width
    model.config.max_position_embeddings = 64
    model.config.rope_parameters = {
        "rope_type": "longrope", "original_max_position_embeddings": room,
    }  # fmt: skip
    assert trial(Policy(model, LetterTokenizer(), frozenset({1}), 0))[1] == width
