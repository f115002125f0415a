"""Memory that a dry run estimates, by hand; and how many processes share out the work."""

from __future__ import annotations

import json
from dataclasses import replace

import numpy as np
import pytest
from commands import compose, cost_of
from safetensors.numpy import save_file

from grpo_ustat.config.model import ModelSize
from grpo_ustat.costs.cost import model_size, score_memory
from grpo_ustat.mse.plan import shared_by

SIZE = ModelSize(
    parameters=7_615_616_512, layers=28, kv_width=512, vocabulary=152_064, hidden=3584, inner=18_944
)
TOKEN = 2 * 28 * (16 * 3584 + 4 * 18_944)  # bytes of the whole graph in bfloat16: 7.5 MB


@pytest.fixture(scope="module")
def study():
    """32 completions of 96 tokens per question; a model of Qwen2.5-7B's shape on a GPU."""
    config = compose("mse", "budget.pool_completions=32", "launch.workers=8")
    model = replace(config.model, model_name_or_path="org/name", size=SIZE, dtype="bfloat16")
    launch = replace(config.launch, device="cuda")
    return replace(config, model=model, launch=launch, max_completion_length=96)


def test_a_studys_scores_and_signs_are_memory(study):
    one = cost_of(study)
    assert one.graph == 32 * 96 * TOKEN
    assert one.signs == -(-SIZE.parameters // 8)  # a bit each, once for both sketches
    assert one.logits == int(4.5 * 2**30) and one.process == 0
    assert one.cache < one.graph  # so sampling needs less
    assert one.memory == one.weights + one.signs + one.logits + one.graph


def test_long_answers_are_scored_layer_by_layer(study):
    one = cost_of(replace(study, max_completion_length=3200))
    assert one.graph == 32 * 3200 * 2 * (16 * 3584 + 4 * 18_944 + 28 * 3584)


def test_vllm_keeps_the_keys_of_its_own(study):
    assert cost_of(replace(study, rollout=replace(study.rollout, name="vllm"))).cache == 0


def test_a_program_on_a_cpu_has_its_own_memory(study):
    here = replace(study, launch=replace(study.launch, device="cpu"))
    assert cost_of(here).process == 580_000_000
    assert cost_of(here).logits == 4 * 152_064 * 512  # of the next tokens of all rows


def test_what_is_unknown_of_a_model_leaves_memory_unknown(study):
    size = replace(SIZE, hidden=None)
    assert cost_of(replace(study, model=replace(study.model, size=size))).memory is None


def test_the_first_process_of_a_large_study_holds_its_pool(study):
    here = replace(study.launch, device="cpu")
    size = replace(SIZE, parameters=1000, layers=1, vocabulary=10, hidden=64, inner=64, kv_width=8)
    small = replace(study, launch=here, model=replace(study.model, size=size))
    assert cost_of(small).memory == 580_000_000 + int(2.5 * cost_of(small).disk)


def test_an_update_holds_one_pass(study):
    """A quarter of its tokens, since answers differ in length."""
    config = compose("train", "micro_batch_tokens=4000", "bf16=true")
    model = replace(config.model, model_name_or_path="org/name", size=SIZE)
    config = replace(config, model=model)
    assert cost_of(config).graph == 1000 * TOKEN + 2 * SIZE.parameters
    by_layer = cost_of(replace(config, gradient_checkpointing=True)).graph
    assert by_layer == 1000 * 2 * (16 * 3584 + 4 * 18_944 + 28 * 3584) + 2 * SIZE.parameters


@pytest.mark.parametrize(
    "ranks, workers, sampler, count", [(1, 8, "local", 8), (4, 8, "local", 4), (1, 8, "vllm", 1)]
)
def test_a_study_is_shared_out_by_ranks_or_workers(study, ranks, workers, sampler, count):
    launch = replace(study.launch, num_processes=ranks, workers=workers)
    rollout = replace(study.rollout, name=sampler)
    assert shared_by(replace(study, launch=launch, rollout=rollout)) == count


LLAMA = {
    "num_hidden_layers": 3,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "vocab_size": 86,
}


def sized(study, folder, **changes):
    """The study's model in a folder with six weights, its config.json changed."""
    stored = {key: value for key, value in (LLAMA | changes).items() if value != "absent"}
    (folder / "config.json").write_text(json.dumps(stored))
    save_file({"w": np.ones((2, 3), np.float32)}, folder / "model.safetensors")
    return replace(study.model, model_name_or_path=str(folder), size=compose("mse").model.size)


@pytest.mark.parametrize("changes, expected", [
    ({}, {}),
    ({"intermediate_size": [48, 96, 64]}, {"inner": 96}),
    ({"num_key_value_heads": [1, 4, 2]}, {"kv_width": 32}),
    ({"num_attention_heads": [2, 4], "head_dim": None}, {}),
    ({"head_dim": [8, 16]}, {"kv_width": 32}),
    ({"hidden_size": [16, 32], "num_key_value_heads": "absent"}, {"kv_width": 32}),
    ({"intermediate_size": []}, {"inner": None}),
    ({"intermediate_size": [48, None]}, {"inner": None}),
    ({"intermediate_size": {"0": 48}}, {"inner": None}),
    ({"vocab_size": "86"}, {"vocabulary": None}),
    ({"num_hidden_layers": True}, {"layers": None}),
    ({"hidden_size": "absent", "head_dim": None}, {"hidden": None, "kv_width": None}),
    ({"num_attention_heads": 0, "num_key_value_heads": None}, {"kv_width": None}),
])  # fmt: skip
def test_a_size_of_each_layer_counts_by_the_largest(study, changes, expected, tmp_path):
    """Gemma 3n lists one intermediate_size a layer; what is no number gives no estimate."""
    model = sized(study, tmp_path, **changes)
    usual = dict(parameters=6, layers=3, kv_width=16, vocabulary=86, hidden=32, inner=48)
    assert vars(model_size(model)) == usual | expected
    whole = replace(study, model=model, rollout=compose("mse").rollout)
    unknown = None in {key: vars(model_size(model))[key] for key in usual}.values()
    assert (cost_of(whole).memory is None) == unknown
    score_memory(model, 4, 12)
