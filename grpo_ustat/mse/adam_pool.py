"""Build pools in the metric of AdamW's step.

AdamW divides each gradient entry by the square root of its second moment v. To measure errors of
this step, the stored completions of a pool, which already have scores (gradients of the
log-probability), are scored a second time with each entry divided by the square root of v; see
`policy.scores.metric` and `mse.second_moments`.

The closed-form errors are unbiased only if v does not depend on the scored completions. Otherwise,
entries in which these completions have large gradients would get too little weight. Therefore the
questions are split into two halves, those at even and those at odd positions. Each half is scored
with the v of the other half, and the result is the mean over both halves. If the number of
questions is odd, the last question is left out.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import numpy as np
import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file

from grpo_ustat.config.mse import MseConfig
from grpo_ustat.config.parts import PolicyOptions, StudySampling
from grpo_ustat.config.schema import ConfigError
from grpo_ustat.config.study import StudyBudget
from grpo_ustat.distributed.ranks import main_only, one_on_each_gpu
from grpo_ustat.distributed.workers import WorkCost, share
from grpo_ustat.mse.pool import read_pool
from grpo_ustat.mse.pool_store import PoolStore, draws_of
from grpo_ustat.mse.scoring import score_part, score_sketches, stored_rollouts
from grpo_ustat.mse.second_moments import GroupGradients, shift
from grpo_ustat.policy.configured import configured_policy
from grpo_ustat.policy.loading import Policy
from grpo_ustat.policy.scores.backward import trainable
from grpo_ustat.policy.scores.metric import Metric, adam_metric
from grpo_ustat.policy.scores.rollouts import score_rollouts
from grpo_ustat.records import Prompt, Rollouts, ScorePool
from grpo_ustat.runs.files import atomic_write

# Fields of `GroupGradients` that are stored for each half.
SUMS = ("squares", "means", "squared_means")


def adam_pool(
    config: MseConfig, prompts: list[Prompt], plain: ScorePool, plain_folder: Path, folder: Path
) -> tuple[ScorePool, WorkCost, float]:
    """Score the completions of a pool in the metric of AdamW's step.

    Intermediate results are stored in `folder`, so that an interrupted study can continue.

    Args:
        plain: Pool of the same completions in the Euclidean metric, from `build_pool`.
        plain_folder: Folder of the Euclidean pool.
        folder: Folder of the new pool.

    Returns:
        The new pool, its additional cost, and a number that tells how much G* depends on the
        uncertain v (see `second_moments.shift`).
    """
    count, size = 2 * (len(prompts) // 2), plain.rewards_PN.shape[1]
    prompts, rewards_PN = prompts[:count], plain.rewards_PN[:count]
    source = PoolStore(plain_folder, draws_of(config))
    of = {"metric": "adam", "questions": count, "completions": size}
    of |= {"rollouts": config.study.adam_rollouts, "group_size": config.study.adam_group_size}
    store = PoolStore(folder, draws_of(config) | of)
    main_only(store.open)
    sampling, step_prompts = config.sampling, config.study.adam_prompts
    group_size = config.study.adam_group_size
    groups = config.budget.pool_completions // group_size
    for half in range(2):
        main_only(
            _keep_gradients, sampling.policy, sampling.sampler.temperature, group_size, prompts,
            source, store, rewards_PN, half,
        )  # fmt: skip
    moved = main_only(
        lambda: shift([_read_half(store, half, groups, count) for half in range(2)], step_prompts)
    )
    workers = one_on_each_gpu(sampling.workers, sampling.policy.device)
    missing = main_only(
        lambda: [
            (half, p)
            for half in range(2)
            for p, spans in zip(prompts[half::2], store.parts(prompts[half::2]), strict=True)
            if spans != [(0, size)]
        ]
    )
    _, cost = share(
        _score, missing, workers, "score in AdamW's metric", len(missing) * size, sampling,
        config.budget, source, store, size, groups, count, step_prompts,
    )  # fmt: skip
    pool, _ = read_pool(store, prompts, size, config.weights)
    greedy_P = None if plain.greedy_P is None else plain.greedy_P[:count]
    return replace(pool, sampler_gap=plain.sampler_gap, greedy_P=greedy_P, metrics=2), cost, moved


def group_gradients(
    policy: Policy,
    rollouts: Rollouts,
    rewards_N: np.ndarray,
    group_size: int,
    temperature: float,
) -> Iterator[dict[str, torch.Tensor]]:
    """Yield the leave-one-out gradient of each group of a question's completions, on the CPU.

    The N completions are split into N // G disjoint groups. Groups with equal rewards are skipped,
    because their gradient is 0.
    """
    for first in range(0, len(rewards_N) - group_size + 1, group_size):
        index = np.arange(first, first + group_size)
        z_G = rewards_N[index]
        if (z_G == z_G[0]).all():
            continue
        weights_1G = (z_G - z_G.mean())[None] / (group_size - 1)
        scores = score_rollouts(policy, rollouts, index, temperature, weights_KB=weights_1G)
        yield {name: u.cpu() for name, u in scores.gradients_K[0].items()}


def _keep_gradients(
    options: PolicyOptions,
    temperature: float,
    group_size: int,
    prompts: list[Prompt],
    source: PoolStore,
    store: PoolStore,
    rewards_PN: np.ndarray,
    half: int,
) -> None:
    """Write the sums of group gradients of one half to the folder of `store`, unless they exist."""
    file = _file(store, half)
    if file.exists():
        return
    policy, size = configured_policy(options), rewards_PN.shape[1]
    sums = GroupGradients(size // group_size)
    stored = source.completions(prompts[half::2], size)
    for prompt, rewards_N, parts in zip(prompts[half::2], rewards_PN[half::2], stored, strict=True):
        rollouts, _ = stored_rollouts(policy, prompt, parts)
        sums.add(group_gradients(policy, rollouts, rewards_N, group_size, temperature))
    if not sums.squares:
        raise ConfigError(
            f"study.metric=adam: all of AdamW's second moments are 0, because in {sums.questions} "
            f"questions no group of study.adam_group_size={group_size} has two different rewards; "
            "raise study.questions or use study.metric=euclidean"
        )
    tensors = {
        f"{kind}/{name}": tensor.contiguous()
        for kind in SUMS
        for name, tensor in getattr(sums, kind).items()
    }
    with atomic_write(file) as staged:
        save_file(tensors, staged)


def _file(store: PoolStore, half: int) -> Path:
    return store.folder / f"group_gradients-{half}.safetensors"


def _read_half(store: PoolStore, half: int, groups: int, count: int) -> GroupGradients:
    """Read the sums of group gradients of one half.

    Args:
        groups: Number of groups per question.
        count: Number of questions in both halves together.
    """
    file = _file(store, half)
    try:
        tensors = load_file(file)
    except (OSError, SafetensorError) as error:
        raise ConfigError(f"{file} is damaged: delete it; it will be recreated") from error
    sums = GroupGradients(groups, count // 2)
    for key, tensor in tensors.items():
        kind, name = key.split("/", 1)
        getattr(sums, kind)[name] = tensor
    return sums


def _score(
    items: list[tuple[int, Prompt]],
    sampling: StudySampling,
    budget: StudyBudget,
    source: PoolStore,
    store: PoolStore,
    size: int,
    groups: int,
    count: int,
    step_prompts: int,
) -> Iterator[WorkCost]:
    policy, sampler = configured_policy(sampling.policy), sampling.sampler
    sketches = score_sketches(budget, policy)
    metric, metric_of = None, -1
    stored = source.completions([prompt for _, prompt in items], size)
    for (half, prompt), parts in zip(items, stored, strict=True):
        if metric_of != half:
            metric_of = half
            metric = _metric(policy, _read_half(store, 1 - half, groups, count), step_prompts)
        rollouts, rewards_NF = stored_rollouts(policy, prompt, parts)
        part = score_part(policy, rollouts, 0, rewards_NF, sampler, sketches, WorkCost(), metric)
        store.write(prompt, 0, part)
        yield WorkCost(rollouts=size)


def _metric(policy: Policy, gradients: GroupGradients, step_prompts: int) -> Metric:
    device = policy.model.device
    return adam_metric(
        {
            name: gradients.second_moments(name, step_prompts).to(device)
            for name, _ in trainable(policy.model)
        }
    )
