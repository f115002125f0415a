"""Sampler of a study's completions, and its difference from the model that scores them."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch

from grpo_ustat.config.parts import PolicyOptions, StudySampling
from grpo_ustat.distributed.ranks import RefusedByRank, world
from grpo_ustat.policy.adapters import check_vllm_reads
from grpo_ustat.policy.configured import configured_policy, configured_task
from grpo_ustat.policy.loading import Policy
from grpo_ustat.policy.logprobs import pack, token_logprobs
from grpo_ustat.policy.scores.turns import split_turns
from grpo_ustat.records import Rollouts
from grpo_ustat.rollout.engine import Engine, LocalEngine, make_engine
from grpo_ustat.tasks.base import Task

# Largest difference in log-probabilities that rounding explains, in nats per token.
MAX_LOGPROB_GAP = 0.05
# The running vLLM engine, if there is one.
_STARTED_ENGINES: dict[str, tuple[list[Any], Policy, Engine]] = {}
# Policies that `kept_policy` keeps, keyed by their options; None outside its block.
_KEPT_POLICIES: dict[str, Policy] | None = None


def start_sampler(sampling: StudySampling) -> tuple[Policy, Engine, Task]:
    """Return the configured policy, an engine that samples from it, and the task that judges.

    vLLM is started once per process, when completions are first needed. Studies do not change the
    weights, so the same engine is used to extend the pool, to draw replicates, and to sample for
    the next study of a sweep over the same model.
    """
    options, sampler = sampling.policy, sampling.sampler
    if sampler.rollout.name == "local":
        policy = _loaded(options)
        return policy, LocalEngine(policy), configured_task(sampling.task, options.model)
    if world() > 1:
        raise RefusedByRank(
            f"rollout=vllm on {world()} ranks: a study samples with vLLM in a single process; "
            "start it without a launcher, and use study.part=k/n for several GPUs"
        )
    needs = [options, sampler.rollout, sampler.rows, sampler.max_completion_length]
    if "vllm" not in _STARTED_ENGINES or _STARTED_ENGINES["vllm"][0] != needs:
        # Free the memory of the old engine for the new engine.
        _STARTED_ENGINES.clear()
        policy = configured_policy(options)
        check_vllm_reads(policy.model, sampler.rollout.name, f"model={options.model.name}")
        _STARTED_ENGINES["vllm"] = (needs, policy, make_engine(sampler, options.model, policy))
    _, policy, engine = _STARTED_ENGINES["vllm"]
    return policy, engine, configured_task(sampling.task, options.model)


@contextmanager
def kept_policy() -> Iterator[None]:
    """Let `start_sampler` load the local policy only once in the block.

    This applies to the process that enters the block, but not to local workers.
    """
    global _KEPT_POLICIES
    _KEPT_POLICIES = {}
    try:
        yield
    finally:
        _KEPT_POLICIES = None


def _loaded(options: PolicyOptions) -> Policy:
    """Return the configured policy, which is loaded unless `kept_policy` has kept it."""
    if _KEPT_POLICIES is None:
        return configured_policy(options)
    key = repr(options)
    if key not in _KEPT_POLICIES:
        _KEPT_POLICIES[key] = configured_policy(options)
    return _KEPT_POLICIES[key]


def sampler_gap(policy: Policy, rollouts: Rollouts, index: np.ndarray, temperature: float) -> float:
    """Return the mean absolute difference between the policy's and the sampler's log-probabilities.

    The mean is over tokens, in nats.

    Args:
        rollouts: Rollouts with `logprobs_PGT`.
        index: Flat indices of the completions to compare.
        temperature: Divisor of the logits.
    """
    if rollouts.turn_PGT is not None:
        rollouts = split_turns(rollouts, index).rollouts
        index = np.arange(len(rollouts.prompts))
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
    """Return a space and a sentence on the difference between the sampler and the scoring model.

    If rounding does not explain the difference, the sentence is a warning.

    >>> sampler_text("vllm", 0.0004)
    " The log-probabilities of the sampler vllm differ from the model's by 0.0004 nats per token."
    """
    if gap <= MAX_LOGPROB_GAP:
        return (
            f" The log-probabilities of the sampler {name} differ from the model's by {gap:.2g} "
            "nats per token."
        )
    return (
        f" WARNING: the log-probabilities of the sampler {name} differ from the model's by "
        f"{gap:.2g} nats per token, but rounding explains at most {MAX_LOGPROB_GAP}. The "
        "completions come from a different distribution than the scored one, so this result is "
        "biased; use rollout=local or model.dtype=float32."
    )
