"""Memory and disk space that a dry run estimates, by hand."""

from __future__ import annotations

import json
from dataclasses import replace

import numpy as np
import pytest
from commands import compose, cost_of
from safetensors.numpy import save_file

from grpo_ustat.config.model import ModelSize
from grpo_ustat.costs.cost import model_size, score_bytes, total

SIZE = ModelSize(parameters=7_615_616_512, layers=28, kv_width=512, hidden=3584, inner=18_944)


def sized(config, **changes):
    model = replace(config.model, model_name_or_path="org/name", size=replace(SIZE, **changes))
    return replace(config, model=model)


def test_a_training_keeps_gradients_moments_and_checkpoints():
    """16 bytes a parameter with AdamW in float32; a checkpoint has 12 of them."""
    config = sized(compose("train", "max_steps=20", "save_steps=5", "save_total_limit=2"))
    one, each = cost_of(config), 4 * SIZE.parameters
    assert (one.weights, one.training) == (each, 3 * each)
    assert (one.disk, one.disk_after) == (9 * each, 6 * each)
    assert one.memory == one.weights + one.training + one.cache
    assert cost_of(sized(compose("train", "lora=r16"))).training == 0
    assert cost_of(sized(compose("train", "objective=grpo_original"))).weights == 2 * each
    both = total([one, one])
    assert both.disk == 2 * one.disk_after + one.disk - one.disk_after
    assert (both.rollouts, both.memory) == (2 * one.rollouts, one.memory)


def test_a_study_stores_products_tokens_and_sketches():
    words = ("study.questions=10", "budget.pool_completions=32", "max_completion_length=96")
    config = sized(compose("mse", *words))
    features, gradients = config.budget.feature_sketch, config.budget.gradient_sketch
    one = 8 * 32**2 + 32 * (17 + 4 * 96 + 4 * features) + 8 * gradients + 1000
    assert cost_of(config).disk == 10 * one
    assert cost_of(config).cache == 320 * 2 * 28 * 512 * 4 * 96
    assert cost_of(sized(compose("mse", *words, "rollout=vllm"))).cache == 0


def test_what_is_unknown_of_a_model_leaves_memory_unknown():
    assert cost_of(sized(compose("mse"), kv_width=None)).memory is None
    assert cost_of(sized(compose("train"), parameters=None)).disk is None


LLAMA = {"num_hidden_layers": 3, "hidden_size": 32, "intermediate_size": 48,
         "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 8}  # fmt: skip


@pytest.mark.parametrize("changes, expected", [
    ({}, {}),
    ({"intermediate_size": [48, 96, 64]}, {"inner": 96}),
    ({"num_attention_heads": [2, 4], "head_dim": None}, {}),
    ({"hidden_size": [16, 32], "num_key_value_heads": None}, {"kv_width": 32}),
    ({"intermediate_size": [48, None]}, {"inner": None}),
    ({"num_hidden_layers": "3"}, {"layers": None}),
    ({"num_attention_heads": 0, "num_key_value_heads": None}, {"kv_width": None}),
])  # fmt: skip
def test_a_size_of_each_layer_counts_by_the_largest(changes, expected, tmp_path):
    """Gemma 3n lists one intermediate_size a layer; what is no number gives no estimate."""
    (tmp_path / "config.json").write_text(json.dumps(LLAMA | changes))
    save_file({"w": np.ones((2, 3), np.float32)}, tmp_path / "model.safetensors")
    config = compose("mse")
    model = replace(config.model, model_name_or_path=str(tmp_path))
    usual = dict(parameters=6, layers=3, kv_width=16, hidden=32, inner=48)
    assert vars(model_size(model)) == usual | expected
    is_known = None not in (usual | expected).values()
    assert is_known <= (score_bytes(model, 12) is not None)
