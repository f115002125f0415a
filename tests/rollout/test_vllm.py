"""The vLLM engine against a stand-in for vLLM; tests/gpu/test_vllm.py runs vLLM."""

from __future__ import annotations

import copy
import dataclasses
import sys

import numpy as np
import pytest
import torch
from commands import compose
from fake_vllm import FakeLLM, install
from fakes import letter_prompts, random_policy
from golden import naming

from grpo_ustat.config.rollout import RolloutConfig
from grpo_ustat.config.schema import ConfigError
from grpo_ustat.policy.logprobs import pack, token_logprobs
from grpo_ustat.policy.source import context_length
from grpo_ustat.rollout.engine import LocalEngine, make_engine
from grpo_ustat.rollout.local import Sampling, sample
from grpo_ustat.rollout.vllm import VllmEngine, checkpoint_weights

PROMPTS = letter_prompts("ab", "c", "abcde", "jjj", "bcdefgh")
SAMPLING = Sampling(seed=0, stream="test", max_completion_length=9, temperature=0.8)
OPTIONS = RolloutConfig(
    name="vllm", gpu_memory_utilization=0.3, max_model_len=None, enforce_eager=None
)


@pytest.fixture
def policy(monkeypatch):
    """A float32 policy, and a `vllm` whose engines draw from models of its shape."""
    policy = random_policy(dtype=torch.float32)
    install(monkeypatch, policy.model)
    return policy


def engine_of(policy, **options):
    return VllmEngine(policy, dataclasses.replace(OPTIONS, **options), rows=7)


def own_logprobs(policy, rollouts, temperature):
    rows = pack(rollouts, np.arange(rollouts.lengths_PG.size), policy.pad_token, "cpu")
    with torch.no_grad():
        return token_logprobs(policy.model, rows, temperature).numpy()


def gaps(policy, rollouts, temperature=0.8):
    """Absolute differences between the sampler's and the policy's log-probabilities."""
    mask = rollouts.mask_PGT
    own = own_logprobs(policy, rollouts, temperature).reshape(mask.shape)
    return np.abs(rollouts.logprobs_PGT - own)[mask]


@pytest.mark.slow
def test_rollouts_are_those_that_vllm_wrote(policy):
    rollouts = engine_of(policy).sample(PROMPTS, 8, SAMPLING)
    tokens, mask, lengths = rollouts.tokens_PGT, rollouts.mask_PGT, rollouts.lengths_PG
    assert rollouts.prompt_tokens == [policy.tokenizer(p.text)["input_ids"] for p in PROMPTS]
    assert (tokens[~mask] == 0).all() and (rollouts.logprobs_PGT[~mask] == 0).all()
    last = np.take_along_axis(tokens, lengths[..., None] - 1, axis=2)[..., 0]
    np.testing.assert_array_equal(rollouts.ended_PG, last == 1)
    assert rollouts.ended_PG.any() and (~rollouts.ended_PG).any()
    assert (lengths[~rollouts.ended_PG] == 9).all() and tokens.shape == (5, 8, lengths.max())
    for texts, rows, kept in zip(rollouts.texts_PG, tokens, mask, strict=True):
        decoded = [row[k] for row, k in zip(rows, kept, strict=True)]
        assert texts == policy.tokenizer.batch_decode(decoded, skip_special_tokens=True)


@pytest.mark.slow
def test_log_probabilities_are_those_of_the_policy_at_its_temperature(policy):
    """Of every token of its own row and prompt; another temperature or order would show."""
    rollouts = engine_of(policy).sample(PROMPTS, 8, SAMPLING)
    assert gaps(policy, rollouts).max() < 1e-5
    assert gaps(policy, rollouts, temperature=1.0).mean() > 0.05
    moved = dataclasses.replace(rollouts, logprobs_PGT=rollouts.logprobs_PGT[:, ::-1])
    assert gaps(policy, moved).mean() > 0.05


@pytest.mark.slow
def test_draws_depend_on_no_company_order_or_split(policy):
    engine = engine_of(policy)
    whole = engine.sample(PROMPTS, 8, SAMPLING, step=3)
    assert engine.sample(PROMPTS, 8, SAMPLING, step=3).texts_PG == whole.texts_PG
    assert engine.sample(PROMPTS[::-1], 8, SAMPLING, step=3).texts_PG == whole.texts_PG[::-1]
    assert engine.sample(PROMPTS[2:3], 8, SAMPLING, step=3).texts_PG == whole.texts_PG[2:3]
    later = engine.sample(PROMPTS, 3, SAMPLING, step=3, first=5)
    assert later.texts_PG == [texts[5:] for texts in whole.texts_PG]


@pytest.mark.slow
def test_seed_stream_step_prompt_and_completion_change_the_draws(policy):
    engine, seen = engine_of(policy), []
    for change in ({}, {"seed": 1}, {"stream": "value"}):
        for step in (0, 1):
            rollouts = engine.sample(PROMPTS, 4, dataclasses.replace(SAMPLING, **change), step=step)
            seen.append(str(rollouts.texts_PG))
    same_text = [dataclasses.replace(PROMPTS[2], id=name) for name in ("one", "other")]
    one, other = engine.sample(same_text, 4, SAMPLING).texts_PG
    assert len(set(seen)) == len(seen) and one != other
    assert len(set(one)) > 1


def test_greedy_is_the_likeliest_token_each_time(policy):
    greedy = dataclasses.replace(SAMPLING, greedy=True)
    rollouts = engine_of(policy).sample(PROMPTS, 2, greedy)
    own = LocalEngine(policy).sample(PROMPTS, 2, greedy)
    np.testing.assert_array_equal(rollouts.tokens_PGT, own.tokens_PGT)
    assert rollouts.texts_PG == own.texts_PG and rollouts.logprobs_PGT is None


@pytest.mark.slow
def test_stop_tokens_beside_the_models_own_end_a_completion(policy):
    stopped = dataclasses.replace(policy, end_tokens=frozenset({1, 5}))
    rollouts = engine_of(stopped).sample(PROMPTS, 8, SAMPLING)
    last = np.take_along_axis(rollouts.tokens_PGT, rollouts.lengths_PG[..., None] - 1, axis=2)
    np.testing.assert_array_equal(np.isin(last[..., 0], [1, 5]), rollouts.ended_PG)
    assert (last == 5).any() and ((rollouts.tokens_PGT == 5).sum(axis=2) <= 1).all()


@pytest.mark.slow
def test_a_refresh_takes_the_new_weights_over_and_nothing_else_does(policy):
    """The reset comes after the weights: what is cached in between is of the old ones."""
    engine = engine_of(policy)
    (llm,) = FakeLLM.made
    before = engine.sample(PROMPTS, 8, SAMPLING)
    with torch.no_grad():
        for parameter in policy.model.parameters():
            parameter += 0.2 * torch.randn_like(parameter)
    stale = engine.sample(PROMPTS, 8, SAMPLING)
    np.testing.assert_array_equal(before.logprobs_PGT, stale.logprobs_PGT)
    engine.refresh()
    assert llm.calls == 2 * ["reload_weights", "reset_prefix_cache"]
    fresh = engine.sample(PROMPTS, 8, SAMPLING)
    assert gaps(policy, fresh).max() < 1e-5
    assert gaps(policy, stale).max() > 0.1


def test_a_tied_output_layer_is_handed_over_as_one_of_its_own(policy):
    """vLLM on CPUs would not reload it with the embeddings."""
    engine_of(policy)
    (llm,) = FakeLLM.made
    assert policy.model.config.tie_word_embeddings and not llm.config["tie_word_embeddings"]
    embeddings = policy.model.get_input_embeddings().weight
    assert torch.equal(llm.weights["lm_head.weight"], embeddings)


def test_adapters_are_merged_and_stay_as_they_are(policy):
    peft = pytest.importorskip("peft")
    torch.manual_seed(1)
    options = peft.LoraConfig(r=2, target_modules=["q_proj", "down_proj"], init_lora_weights=False)
    adapted = peft.get_peft_model(copy.deepcopy(policy.model), options)
    before = {name: value.clone() for name, value in adapted.state_dict().items()}
    weights = checkpoint_weights(adapted)
    for name, value in adapted.state_dict().items():
        assert torch.equal(value, before[name]), name
    merged = copy.deepcopy(policy.model)
    merged.load_state_dict(weights, strict=True)
    ids = torch.tensor([[2, 3, 4, 5]])
    torch.testing.assert_close(merged(ids).logits, adapted(ids).logits, rtol=1e-4, atol=1e-5)
    assert (merged(ids).logits - policy.model(ids).logits).abs().max() > 0.01


def test_the_process_keeps_its_threads_and_its_random_state(policy):
    set_num_threads, threads = torch.set_num_threads, torch.get_num_threads()
    torch.manual_seed(5)
    expected = torch.rand(3)
    torch.manual_seed(5)
    engine_of(policy).sample(PROMPTS, 2, SAMPLING)
    assert torch.equal(torch.rand(3), expected)
    assert torch.set_num_threads is set_num_threads and torch.get_num_threads() == threads


def test_the_configured_engine(policy):
    config = compose("train", "rollout=vllm", "rollout_batch_size=11")
    assert isinstance(make_engine(config.sampler_options, config.model, policy), VllmEngine)
    options = FakeLLM.made[0].options
    assert options["max_num_seqs"] == 11 and "max_model_len" not in options
    local = make_engine(compose("train").sampler_options, config.model, policy)
    assert local.sample(PROMPTS, 2, SAMPLING, step=3, first=1).texts_PG == [
        texts[1:] for texts in sample(policy, PROMPTS, 3, SAMPLING, step=3).texts_PG
    ]


@pytest.mark.parametrize("longest, room", [(40, 40 + 96), (9999, 512)])
def test_vllm_has_room_for_the_longest_prompt_and_completion(policy, longest, room):
    """As far as the model has positions."""
    config = compose("train", "rollout=vllm", f"prompt.max_length={longest}")
    assert config.max_completion_length == 96 and context_length(config.model) == 512
    make_engine(config.sampler_options, config.model, policy)
    assert FakeLLM.made[-1].options["max_model_len"] == room


def test_nulls_are_left_to_vllm_and_values_handed_over(policy):
    engine_of(policy), engine_of(policy, max_model_len=32, enforce_eager=True)
    plain, chosen = (llm.options for llm in FakeLLM.made)
    assert plain["gpu_memory_utilization"] == 0.3 and plain["max_num_seqs"] == 7
    assert not {"max_model_len", "enforce_eager", "distributed_executor_backend"} & set(plain)
    assert chosen["max_model_len"] == 32 and chosen["enforce_eager"] is True
    assert plain["enable_chunked_prefill"] is False  # on a CPU
    assert plain["logprobs_mode"] == "processed_logprobs" and plain["dtype"] == "float32"


def test_it_computes_in_the_precision_that_the_policy_computes_in(policy):
    engine_of(dataclasses.replace(policy, bf16=True))
    assert [llm.options["dtype"] for llm in FakeLLM.made] == ["bfloat16"]


def test_under_a_launcher_every_rank_has_an_engine(policy, monkeypatch):
    monkeypatch.setenv("RANK", "1")
    monkeypatch.setenv("WORLD_SIZE", "2")
    engine_of(policy)
    assert FakeLLM.made[0].options["distributed_executor_backend"] == "external_launcher"


def test_what_vllm_would_change_silently_is_refused(policy):
    engine = engine_of(policy, max_model_len=12)
    with pytest.raises(ConfigError, match=naming("7 tokens", "rollout.max_model_len=16")):
        engine.sample(PROMPTS, 2, SAMPLING)
    engine.sample(PROMPTS[:2], 2, SAMPLING)
    with pytest.raises(ConfigError, match=naming("temperature=0.005", 0.01)):
        engine.sample(PROMPTS[:2], 2, dataclasses.replace(SAMPLING, temperature=0.005))


def test_what_vllm_cannot_run_is_refused(policy, monkeypatch):
    with pytest.raises(ConfigError, match=naming("model.dtype=float64", "rollout=vllm")):
        engine_of(random_policy())

    def refuse(*_, **__):
        raise ValueError("Available memory\n is less than desired")

    monkeypatch.setattr(sys.modules["vllm"], "LLM", refuse)
    with pytest.raises(ConfigError, match="Available memory is less than desired"):
        engine_of(policy)


def test_without_vllm_one_line_says_how_to_get_it(monkeypatch):
    monkeypatch.setitem(sys.modules, "vllm", None)
    with pytest.raises(ConfigError, match=r"pip install -e '\.\[cli,vllm\]'") as caught:
        engine_of(random_policy(dtype=torch.float32))
    assert "\n" not in str(caught.value)
