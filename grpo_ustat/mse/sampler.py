"""The sampler of a study's completions, and its distance from the model that scores them."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch

from grpo_ustat.config.parts import StudySampling
from grpo_ustat.distributed.ranks import RefusedByRank, world
from grpo_ustat.policy.adapters import check_vllm_reads
from grpo_ustat.policy.configured import configured_policy, configured_task
from grpo_ustat.policy.loading import Policy
from grpo_ustat.policy.logprobs import pack, token_logprobs
from grpo_ustat.records import Rollouts
from grpo_ustat.rollout.engine import Engine, LocalEngine, make_engine
from grpo_ustat.tasks.base import Task

# Nats a token, between a sampler and the same model.
MAX_LOGPROB_GAP = 0.05
# vLLM, at most one.
_STARTED_ENGINES: dict[str, tuple[list[Any], Policy, Engine]] = {}


def start_sampler(sampling: StudySampling) -> tuple[Policy, Engine, Task]:
    """Return the configured policy, the engine that samples from it, and the task that judges.

    vLLM is started once in a process, where its first completions are needed: a study that extends
    its pool or draws replicates, and the next study of a sweep over the same model, go on with the
    same engine. The weights of a study never change.
    """
    options, sampler = sampling.policy, sampling.sampler
    if sampler.rollout.name == "local":
        policy = configured_policy(options)
        return policy, LocalEngine(policy), configured_task(sampling.task, options.model)
    if world() > 1:
        raise RefusedByRank(
            f"rollout=vllm on {world()} ranks: one process of a study samples with vLLM; start it "
            "without a launcher, and use study.part=k/n for several GPUs"
        )
    needs = [options, sampler.rollout, sampler.rows, sampler.max_completion_length]
    if "vllm" not in _STARTED_ENGINES or _STARTED_ENGINES["vllm"][0] != needs:
        # The next engine needs the memory of this one.
        _STARTED_ENGINES.clear()
        policy = configured_policy(options)
        check_vllm_reads(policy.model, sampler.rollout.name, f"model={options.model.name}")
        _STARTED_ENGINES["vllm"] = (needs, policy, make_engine(sampler, options.model, policy))
    _, policy, engine = _STARTED_ENGINES["vllm"]
    return policy, engine, configured_task(sampling.task, options.model)


def sampler_gap(policy: Policy, rollouts: Rollouts, index: np.ndarray, temperature: float) -> float:
    """Average the absolute gap of the policy's and the sampler's log-probabilities, nats a token.

    Args:
        rollouts: with `logprobs_PGT`.
        index: flat indices of the completions that are read.
        temperature: divides the logits.
    """
    assert rollouts.logprobs_PGT is not None
    width = rollouts.mask_PGT.shape[-1]
    logged_NT = rollouts.logprobs_PGT.reshape(-1, width)
    gaps = []
    with torch.inference_mode(), policy.computing():
        for place in index:
            rows = pack(rollouts, np.array([place]), policy.pad_token, policy.model.device)
            own_T = token_logprobs(policy.model, rows, temperature)[0].double().cpu().numpy()
            scored_T = rows.completion_mask_BT[0, -rows.width :].bool().cpu().numpy()
            gaps.append(np.abs(own_T - logged_NT[place, : rows.width])[scored_T])
    return float(np.concatenate(gaps).mean())


def sampler_text(name: str, gap: float) -> str:
    """Return a sentence on the distance of the sampler from the model that scores.

    It is a warning where that is more than rounding. It begins with a space.

    >>> sampler_text("vllm", 0.0004)
    " Completions are vllm's: its log-probabilities are 0.0004 nats a token from the model's own."
    """
    if gap <= MAX_LOGPROB_GAP:
        return (
            f" Completions are {name}'s: its log-probabilities are {gap:.2g} nats a token from the "
            "model's own."
        )
    return (
        f" WARNING: completions are {name}'s, whose log-probabilities are {gap:.2g} nats a token "
        f"from the model's own, where at most {MAX_LOGPROB_GAP} is rounding: they are draws of "
        "another distribution than the one that is scored, so this result is biased; use "
        "rollout=local, or model.dtype=float32."
    )
