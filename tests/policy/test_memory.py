"""What scoring holds at once, counted tensor by tensor, and when layers are computed twice."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from commands import compose, cost_of
from fakes import random_rollouts
from live_bytes import LiveBytes
from transformers import AutoConfig, AutoModelForCausalLM

from grpo_ustat.config.schema import ConfigError
from grpo_ustat.costs.cost import score_bytes
from grpo_ustat.mse import pool
from grpo_ustat.policy import memory
from grpo_ustat.policy.loading import load_policy
from grpo_ustat.policy.scores import completion_scores, rollouts
from grpo_ustat.policy.scores.rollouts import score_rollouts

HIDDEN, ROWS, TOKENS = 64, 4, 48


def llama(layers):
    torch.manual_seed(0)
    config = AutoConfig.for_model(
        "llama", hidden_size=HIDDEN, intermediate_size=172, num_hidden_layers=layers,
        num_attention_heads=4, num_key_value_heads=2, vocab_size=50,
    )  # fmt: skip
    return AutoModelForCausalLM.from_config(config).eval()


def peak(model, by_layer, tokens=TOKENS, passes=None):
    """Bytes a token."""
    ids = torch.arange(ROWS * tokens).view(ROWS, tokens) % 50
    ones = torch.ones_like(ids)
    completion = ones.clone()
    completion[:, :8] = 0
    with LiveBytes() as meter:
        completion_scores(model, ids, ones, completion, by_layer=by_layer, passes=passes)
    return meter.peak / ids.numel()


def test_layer_by_layer_another_layer_costs_its_input_alone():
    few, many = (peak(llama(layers), by_layer=True) for layers in (2, 6))
    assert (many - few) / 4 <= 1.05 * 4 * HIDDEN
    whole = [peak(llama(layers), by_layer=False) for layers in (2, 6)]
    assert (whole[1] - whole[0]) / 4 > 10 * 4 * HIDDEN


@pytest.mark.slow
def test_several_passes_hold_no_more_than_one():
    model = llama(6)
    one = peak(model, by_layer=False)
    assert peak(model, by_layer=False, passes=(2, 2)) < one
    assert peak(model, by_layer=False, passes=(1, 1, 1, 1)) < one


@pytest.mark.parametrize("layers", [2, 6])
def test_the_estimate_of_a_graph_is_near_what_is_held(layers):
    model = llama(layers)
    for by_layer, least in ((False, 0.6), (True, 0.4)):  # the output layer is not in it
        estimate = memory.score_bytes(model, 1, by_layer)
        assert least < estimate / peak(model, by_layer) < 1.7


def test_layers_are_computed_twice_where_memory_is_short(monkeypatch):
    policy, ways, scores = load_policy("embedded:tiny"), [], []
    drawn = random_rollouts([3, 5], group_size=3, longest=6, vocab=90)
    original = rollouts.completion_scores

    def spy(*args, **kwargs):
        ways.append(kwargs["by_layer"])
        return original(*args, **kwargs)

    monkeypatch.setattr(rollouts, "completion_scores", spy)
    for free in (2**40, 2**10):
        monkeypatch.setattr(rollouts, "free_bytes", lambda device, free=free: free)
        scores.append(score_rollouts(policy, drawn, np.arange(6), 1.0, gram=True))
    assert ways == [False, True]
    torch.testing.assert_close(scores[0].gram_BB, scores[1].gram_BB)


@pytest.mark.slow
def test_layer_by_layer_the_peak_grows_by_an_input_a_token_and_layer():
    """With depth and tokens both doubled, what is left beside the layers' inputs is as with one."""
    peaks = {
        (layers, tokens): peak(llama(layers), True, tokens) * ROWS * tokens
        for layers in (4, 8)
        for tokens in (64, 128)
    }
    inputs = {key: key[0] * key[1] * ROWS * HIDDEN * 4 for key in peaks}
    rest = {key: (peaks[key] - inputs[key]) / key[1] for key in peaks}
    assert max(rest.values()) < 1.1 * min(rest.values())


def test_weights_that_do_not_fit_are_refused_with_the_sum():
    memory.check_weights(15 * 10**9, 2 * 10**9, 17 * 10**9, "cuda")
    with pytest.raises(ConfigError) as error:
        memory.check_weights(144 * 10**9, 2 * 10**9, 80 * 10**9, "cuda")
    for size in ("144.0 GB", "2.0 GB", "146.0 GB", "cuda", "80.0 GB"):
        assert size in str(error.value)


def test_a_large_model_is_refused_before_it_is_loaded(monkeypatch):
    config = compose("mse", "model=qwen2_5_math_7b", "launch.device=cuda")
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    monkeypatch.setattr(pool, "free_bytes", lambda device: 20 * 10**9)
    monkeypatch.setattr(pool, "configured_policy", None)
    one_completion = score_bytes(config.model, config.max_completion_length)
    with pytest.raises(ConfigError, match=r"30\.5 GB"):
        pool.model_facts(config.policy_options, [], cost_of(config).weights, one_completion)
