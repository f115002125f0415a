"""A pool in the metric of AdamW's step: its completions scored once more, every entry in units of
the optimizer's own scale, see `policy.scores.metric`.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import replace
from pathlib import Path

import numpy as np
import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file

from grpo_ustat.config.mse import MseConfig
from grpo_ustat.config.schema import ConfigError
from grpo_ustat.distributed.ranks import main_only, one_on_each_gpu
from grpo_ustat.distributed.workers import WorkCost, share
from grpo_ustat.mse.pool import read_pool, score_part, score_sketches
from grpo_ustat.mse.pool_store import PoolStore, draws_of
from grpo_ustat.policy.loading import Policy, configured_policy
from grpo_ustat.policy.scores.backward import trainable
from grpo_ustat.policy.scores.metric import adam_metric
from grpo_ustat.policy.scores.rollouts import score_rollouts
from grpo_ustat.records import Prompt, Rollouts, ScorePool
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
    main_only(_keep_second_moments, config, prompts, source, store, plain.rewards_PN)
    workers = one_on_each_gpu(config.sampling_workers, config.launch.device)
    missing = main_only(lambda: [p for p in prompts if store.parts(p) != [(0, size)]])
    _, cost = share(
        _score, missing, workers, "score in AdamW's metric", len(missing) * size, config, source,
        store, size,
    )  # fmt: skip
    pool, _ = read_pool(store, prompts, size, config.weights)
    return replace(pool, sampler_gap=plain.sampler_gap), cost


def second_moments(
    policy: Policy, groups: Iterable[Rollouts], rewards_PN: np.ndarray, temperature: float
) -> dict[str, torch.Tensor]:
    """v_j = mean over prompts of sigma_x^2 E s_j^2, of every trainable parameter by name.

    That is what one rollout adds to E ghat_j^2 as noise: with rewards and squared scores
    uncorrelated given the prompt, E (Z - V)^2 s_j^2. Of n rollouts it is all of E ghat_j^2 but for
    (E ghat_j)^2 and parts of order 1/G. sigma_x^2 is shrunken to the mean over prompts by one
    completion, (N s_x^2 + mean s^2) / (N + 1), so that no entry that a completion moves counts as
    one that the optimizer never saw where the rewards of its prompt happen to be equal.

    Args:
        policy: whose scores are taken.
        groups: the completions of each prompt.
        rewards_PN: their rewards.
        temperature: of the completions.
    """
    count, size = rewards_PN.shape
    variance_P = rewards_PN.var(axis=1, ddof=1)
    shrunken_P = (size * variance_P + variance_P.mean()) / (size + 1)
    total: dict[str, torch.Tensor] = {}
    for rollouts, variance in zip(groups, shrunken_P, strict=True):
        weights_N = np.full(size, variance / size / count)
        scores = score_rollouts(
            policy, rollouts, np.arange(size), temperature, square_weights_B=weights_N
        )
        for name, squares in scores.squares.items():
            total[name] = total[name] + squares if name in total else squares
    return total


def _keep_second_moments(
    config: MseConfig,
    prompts: list[Prompt],
    source: PoolStore,
    store: PoolStore,
    rewards_PN: np.ndarray,
) -> None:
    """Leave them in the folder of `store`, unless they are there."""
    file = store.folder / SECOND_MOMENTS
    if file.exists():
        return
    policy, size = configured_policy(config), rewards_PN.shape[1]
    groups = (_stored_rollouts(policy, prompt, source, size)[0] for prompt in prompts)
    v = second_moments(policy, groups, rewards_PN, config.temperature)
    with atomic_write(file) as staged:
        save_file({name: tensor.contiguous() for name, tensor in v.items()}, staged)


def _score(
    prompts: list[Prompt], config: MseConfig, source: PoolStore, store: PoolStore, size: int
) -> Iterator[WorkCost]:
    policy = configured_policy(config)
    sketches = score_sketches(config, policy)
    metric = adam_metric(_read_second_moments(store.folder / SECOND_MOMENTS, policy))
    for prompt in prompts:
        rollouts, rewards_NF = _stored_rollouts(policy, prompt, source, size)
        part = score_part(policy, rollouts, 0, rewards_NF, config, sketches, WorkCost(), metric)
        store.write(prompt, 0, part)
        yield WorkCost(rollouts=size)


def _read_second_moments(file: Path, policy: Policy) -> dict[str, torch.Tensor]:
    try:
        v = load_file(file, str(policy.model.device))
    except (OSError, SafetensorError) as error:
        raise ConfigError(f"{file} is damaged: delete it, it will be made again") from error
    if {name: x.shape for name, x in v.items()} != {n: p.shape for n, p in trainable(policy.model)}:
        raise ConfigError(f"{file} is of another model: delete it, it will be made again")
    return v


def _stored_rollouts(
    policy: Policy, prompt: Prompt, source: PoolStore, size: int
) -> tuple[Rollouts, np.ndarray]:
    """The completions of one prompt as a pool keeps them, and their rewards, [N, F]."""
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
    return rollouts, np.concatenate([part.rewards_NF for part in parts])
