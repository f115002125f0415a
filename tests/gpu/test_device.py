"""A device against the CPU in float64: the same draws, scores, gradients and updates.

Skipped where no GPU is seen. `GRPO_USTAT_TEST_DEVICE=cpu` runs it on the CPU, where everything but
the narrower types is exact.
"""

from __future__ import annotations

import copy
import os
from dataclasses import replace

import numpy as np
import pytest
import torch
from commands import compose

from grpo_ustat.policy.configured import configured_task
from grpo_ustat.policy.loading import load_policy
from grpo_ustat.policy.memory import free_bytes
from grpo_ustat.policy.scores.rollouts import score_rollouts
from grpo_ustat.policy.scores.sketch import Sketch
from grpo_ustat.rollout.local import Sampling, sample

DEVICE = os.environ.get("GRPO_USTAT_TEST_DEVICE", "cuda")
pytestmark = pytest.mark.skipif(
    DEVICE == "cuda" and not torch.cuda.is_available(), reason="no GPU is seen"
)
QUESTIONS, COMPLETIONS = 6, 8
SAMPLING = Sampling(seed=0, stream="device", max_completion_length=48, rows=16)
FEATURES = 1021


@pytest.fixture(scope="module")
def prompts():
    config = compose("mse", "model=tiny")
    return configured_task(config.task_options, config.model).prompts("study")[:QUESTIONS]


@pytest.fixture
def exact(prompts):
    """The completions of the CPU in float64, and their scores; within each test, where models of
    float64 compute in it throughout.
    """
    policy = load_policy("embedded:tiny", dtype="float64")
    rollouts = sample(policy, prompts, COMPLETIONS, SAMPLING)
    return rollouts, scores(policy, rollouts)


def scores(policy, rollouts):
    """Of all completions: Gram matrix, two pooled gradients, sketches."""
    count = QUESTIONS * COMPLETIONS
    weights_KB = np.stack([np.linspace(-1, 1, count), np.ones(count)])
    sketch = Sketch({name: p.numel() for name, p in policy.model.named_parameters()}, FEATURES)
    return score_rollouts(
        policy, rollouts, np.arange(count), 1.0, weights_KB=weights_KB, gram=True, features=sketch
    )


def on_device(dtype):
    return load_policy("embedded:tiny", dtype=dtype, device=DEVICE)


def apart(found, expected):
    """Largest difference, of the largest entry."""
    return float((found.double().cpu() - expected).abs().max() / expected.abs().max())


def test_float64_draws_the_same_tokens(prompts, exact):
    rollouts = sample(on_device("float64"), prompts, COMPLETIONS, SAMPLING)
    np.testing.assert_array_equal(rollouts.mask_PGT, exact[0].mask_PGT)
    np.testing.assert_array_equal(rollouts.tokens_PGT, exact[0].tokens_PGT)
    np.testing.assert_allclose(rollouts.logprobs_PGT, exact[0].logprobs_PGT, atol=1e-9)


def test_less_memory_draws_the_same_tokens(prompts):
    """Float64, 192 rows of 512 columns and 1 MB each: half as many until they fit."""
    if DEVICE != "cuda":
        pytest.skip("limits CUDA's allocator")
    policy = on_device("float64")
    sampling = replace(SAMPLING, max_completion_length=400, rows=192)
    expected = sample(policy, prompts, 32, sampling)
    torch.cuda.empty_cache()
    limit = torch.cuda.memory_reserved() + 160 * 2**20
    torch.cuda.set_per_process_memory_fraction(limit / torch.cuda.mem_get_info()[1])
    try:
        with pytest.warns(UserWarning, match="not enough memory for 192 completions"):
            rollouts = sample(policy, prompts, 32, sampling)
    finally:
        torch.cuda.set_per_process_memory_fraction(1.0)
    np.testing.assert_array_equal(rollouts.mask_PGT, expected.mask_PGT)
    np.testing.assert_array_equal(rollouts.tokens_PGT, expected.tokens_PGT)


def test_the_same_call_gives_the_same_tokens_and_scores(prompts):
    policy = on_device("float32")
    first, second = (sample(policy, prompts, COMPLETIONS, SAMPLING) for _ in range(2))
    np.testing.assert_array_equal(first.tokens_PGT, second.tokens_PGT)
    one, two = scores(policy, first), scores(policy, first)
    torch.testing.assert_close(one.gram_BB, two.gram_BB, rtol=1e-6, atol=1e-6)


# bfloat16: the longest score is off by 0.02 to 0.2 on a CPU, by implementation of attention
@pytest.mark.parametrize("dtype, most", [("float64", 1e-10), ("float32", 5e-5), ("bfloat16", 0.3)])
def test_scores_are_those_of_the_cpu(exact, dtype, most):
    rollouts, expected = exact
    found = scores(on_device(dtype), rollouts)
    assert apart(found.gram_BB, expected.gram_BB) < most
    assert apart(found.features_BR, expected.features_BR) < most
    for gradient, own in zip(found.gradients_K, expected.gradients_K, strict=True):
        whole = torch.stack([value.double().norm() for value in own.values()]).norm()
        gaps = [(gradient[k].double().cpu() - own[k]).norm() for k in own]
        assert float(torch.stack(gaps).norm() / whole) < most


def test_layer_by_layer_scores_are_those_of_the_cpu(exact, monkeypatch):
    rollouts, expected = exact
    monkeypatch.setattr("grpo_ustat.policy.scores.rollouts.free_bytes", lambda device: 1)
    found = scores(on_device("float64"), rollouts)
    assert apart(found.gram_BB, expected.gram_BB) < 1e-10


def test_an_update_is_that_of_the_cpu(exact):
    """A step of AdamW along the pooled gradient; `eps` so large that gradients which are 0 but for
    rounding, as those of the keys' biases, move nothing.
    """
    rollouts, _ = exact
    stepped = []
    for policy in (load_policy("embedded:tiny", dtype="float64"), on_device("float64")):
        model = copy.deepcopy(policy.model)
        gradient = scores(policy, rollouts).gradients_K[0]
        for name, parameter in model.named_parameters():
            parameter.grad = -gradient[name]
        torch.optim.AdamW(model.parameters(), lr=1e-3, eps=1e-4).step()
        stepped.append({name: p.detach().cpu() for name, p in model.named_parameters()})
    for name, value in stepped[0].items():
        torch.testing.assert_close(stepped[1][name], value, rtol=0, atol=1e-9, msg=name)


def test_free_memory_counts_what_the_allocator_holds_unused():
    if DEVICE != "cuda":
        pytest.skip("of CUDA's allocator")
    device = torch.device("cuda")
    before = free_bytes(device)
    block = torch.empty(2**28, dtype=torch.uint8, device=device)
    assert free_bytes(device) == pytest.approx(before - 2**28, abs=2**25)
    del block
    assert free_bytes(device) == pytest.approx(before, abs=2**25)
