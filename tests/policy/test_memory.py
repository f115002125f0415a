"""What scoring holds at once, counted tensor by tensor, and when layers are computed twice."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from fakes import random_rollouts
from live_bytes import LiveBytes
from transformers import AutoConfig, AutoModelForCausalLM

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


def peak(model, by_layer):
    """Bytes a token."""
    ids = torch.arange(ROWS * TOKENS).view(ROWS, TOKENS) % 50
    ones = torch.ones_like(ids)
    completion = ones.clone()
    completion[:, :8] = 0
    with LiveBytes() as meter:
        completion_scores(model, ids, ones, completion, by_layer=by_layer)
    return meter.peak / ids.numel()


def test_layer_by_layer_another_layer_costs_its_input_alone():
    few, many = (peak(llama(layers), by_layer=True) for layers in (2, 6))
    assert (many - few) / 4 <= 1.05 * 4 * HIDDEN
    whole = [peak(llama(layers), by_layer=False) for layers in (2, 6)]
    assert (whole[1] - whole[0]) / 4 > 10 * 4 * HIDDEN


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
