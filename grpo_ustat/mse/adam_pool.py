"""A pool in the metric of AdamW's step: its completions scored once more, every entry in units of
the optimizer's own scale, see `policy.scores.metric`.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import numpy as np
import torch
from safetensors.torch import load_file, save_file

from grpo_ustat.config.mse import MseConfig
from grpo_ustat.distributed.ranks import main_only, one_on_each_gpu
from grpo_ustat.distributed.workers import WorkCost, share
from grpo_ustat.estimators.baselines.group import leave_one_out
from grpo_ustat.mse.pool import read_pool, score_part, score_sketches
from grpo_ustat.mse.pool_store import PoolStore, draws_of
from grpo_ustat.policy.loading import Policy, configured_policy
from grpo_ustat.policy.scores.backward import trainable
from grpo_ustat.policy.scores.metric import adam_metric, counted_parameters
from grpo_ustat.policy.scores.rollouts import score_rollouts
from grpo_ustat.records import BaselineContext, Prompt, Rollouts, ScorePool
from grpo_ustat.runs.files import atomic_write

SECOND_MOMENTS = "second_moments.safetensors"


def adam_pool(
    config: MseConfig, prompts: list[Prompt], plain: ScorePool, plain_folder: Path, folder: Path
) -> tuple[ScorePool, WorkCost]:
    """The completions of a pool, with scores in the metric of AdamW's step.

    What is made stays in `folder`, so that an interrupted study goes on.

    Args:
        config: the study's configuration.
        prompts: its questions.
        plain: the pool of these completions, as `build_pool` makes it.
        plain_folder: where that one is kept.
        folder: for this one.

    Returns:
        The pool, and what it took beyond the plain one.
    """
    size = plain.rewards_PN.shape[1]
    source = PoolStore(plain_folder, draws_of(config))
    of = {"metric": "adam", "questions": len(prompts), "completions": size}
    store = PoolStore(folder, draws_of(config) | of)
    main_only(store.open)
    main_only(_keep_second_moments, config, prompts, source, store, size)
    workers = one_on_each_gpu(config.sampling_workers, config.launch.device)
    missing = main_only(lambda: [p for p in prompts if store.parts(p) != [(0, size)]])
    _, cost = share(
        _score, missing, workers, "score in AdamW's metric", len(missing) * size, config, source,
        store, size,
    )  # fmt: skip
    pool, _ = read_pool(store, prompts, size)
    return replace(pool, sampler_gap=plain.sampler_gap), cost


def second_moments(policy: Policy, batches: Iterator[tuple[Rollouts, np.ndarray]], temperature):
    """v_j = E ghat_j^2 of every trainable parameter, by name: the mean over prompts of the squared
    entries of each one's leave_one_out gradient by all its completions.

    Args:
        policy: whose scores are taken.
        batches: of each prompt its completions and their rewards, [1, N].
        temperature: of the completions.
    """
    total: dict[str, torch.Tensor] = {}
    count = 0
    for rollouts, rewards_PN in batches:
        weights_KB = leave_one_out(rewards_PN, BaselineContext()) / rewards_PN.shape[1]
        rows = np.arange(rewards_PN.shape[1])
        scores = score_rollouts(policy, rollouts, rows, temperature, weights_KB=weights_KB)
        for name, gradient in scores.gradients_K[0].items():
            total[name] = gradient.square() + total.get(name, 0)
        count += 1
    return {
        name: total.get(name, torch.zeros_like(parameter)) / count
        for name, parameter in trainable(policy.model)
    }


def _keep_second_moments(
    config: MseConfig, prompts: list[Prompt], source: PoolStore, store: PoolStore, size: int
) -> None:
    """Leave them in the folder of `store`, unless they are there."""
    file = store.folder / SECOND_MOMENTS
    if file.exists():
        return
    policy = configured_policy(config)
    batches = (_stored_rollouts(policy, prompt, source, size) for prompt in prompts)
    v = second_moments(policy, batches, config.temperature)
    with atomic_write(file) as staged:
        save_file({name: tensor.contiguous() for name, tensor in v.items()}, staged)


def _score(
    prompts: list[Prompt], config: MseConfig, source: PoolStore, store: PoolStore, size: int
) -> Iterator[WorkCost]:
    policy = configured_policy(config)
    parameters, sketches = trainable(policy.model), score_sketches(config, policy)
    v = load_file(store.folder / SECOND_MOMENTS, device=str(policy.model.device))
    metric = adam_metric(v, counted_parameters(parameters, config.study.parameters))
    for prompt in prompts:
        rollouts, (rewards_N,) = _stored_rollouts(policy, prompt, source, size)
        part = score_part(policy, rollouts, 0, rewards_N, config, sketches, WorkCost(), metric)
        store.write(prompt, 0, part)
        yield WorkCost(rollouts=size)


def _stored_rollouts(
    policy: Policy, prompt: Prompt, source: PoolStore, size: int
) -> tuple[Rollouts, np.ndarray]:
    """The completions of one prompt as a pool keeps them, and their rewards, [1, N]."""
    parts = [source.read(prompt, first, n) for first, n in source.parts(prompt) if first < size]
    length = max(part.tokens_NT.shape[1] for part in parts)
    tokens_NT = np.concatenate(
        [np.pad(part.tokens_NT, ((0, 0), (0, length - part.tokens_NT.shape[1]))) for part in parts]
    ).astype(np.int64)
    lengths_N = np.concatenate([part.lengths_N for part in parts])
    rollouts = Rollouts(
        prompts=[prompt],
        prompt_tokens=policy.encode([prompt.text]),
        tokens_PGT=tokens_NT[None],
        mask_PGT=(np.arange(length) < lengths_N[:, None])[None],
        ended_PG=np.concatenate([part.ended_N for part in parts])[None],
        texts_PG=[[""] * size],
    )
    return rollouts, np.concatenate([part.rewards_N for part in parts])[None]
