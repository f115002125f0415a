"""Pool of a study: N scored completions per question, computed by several workers, kept on disk.

The score of a completion is the gradient of its log-probability.
"""

from __future__ import annotations

import math
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch

from grpo_ustat.config.mse import MseConfig
from grpo_ustat.config.parts import PolicyOptions, SamplerOptions, StudySampling
from grpo_ustat.config.schema import ConfigError
from grpo_ustat.config.study import StudyBudget
from grpo_ustat.distributed.ranks import main_only, one_on_each_gpu, own_device
from grpo_ustat.distributed.signals import Stopped
from grpo_ustat.distributed.workers import WorkCost, share
from grpo_ustat.estimators.baselines import weighted_sum
from grpo_ustat.estimators.moments import centred
from grpo_ustat.mse.pool_parts import Completions, Part
from grpo_ustat.mse.pool_store import (
    SCORED,
    UNSCORED,
    PoolStore,
    distinct_rewards,
    draws_of,
    mean_sampler_gap,
)
from grpo_ustat.mse.sampler import start_sampler
from grpo_ustat.mse.scoring import (
    check_batch,
    completions_of,
    question_cost,
    score_part,
    score_sketches,
)
from grpo_ustat.pages.caveats import cut_text, often_cut
from grpo_ustat.policy.configured import configured_policy
from grpo_ustat.policy.memory import check_weights, free_bytes
from grpo_ustat.policy.scores.backward import parameter_sizes
from grpo_ustat.records import Array, Prompt, Rollouts, ScorePool
from grpo_ustat.rollout.engine import Engine
from grpo_ustat.rollout.local import Sampling
from grpo_ustat.tasks.base import Task, rewards
from grpo_ustat.terminal.progress import Notice

# Limits for the chunks in which questions are sampled; see `_chunks_to_sample`.
MAX_BATCHES_A_CHUNK, MIN_CHUNKS = 4, 16


class EqualRewards(Exception):
    """Raised if all rewards of a pool are equal, so that there is no gradient to measure.

    Args:
        prompts: Prompts of the pool.
        stored: Stored parts for each prompt.
    """

    def __init__(self, prompts: list[Prompt], stored: list[list[Completions]]):
        super().__init__(f"all completions of {len(prompts)} questions got the same reward")
        self.prompts, self.stored = prompts, stored


def build_pool(
    config: MseConfig, prompts: list[Prompt], folder: Path, completions: int | None = None
) -> tuple[ScorePool, WorkCost]:
    """Sample, score and store the missing completions of all prompts, and return the pool.

    The pool does not depend on the number of processes or on interruptions, because questions are
    sampled in chunks that depend only on the configuration, and are scored one by one. Several
    studies can fill a pool at the same time. If another study has meanwhile stored a question with
    fewer completions, the missing ones are drawn in another round. Nothing is scored as long as all
    rewards are equal; see `_score_chunks`.

    Args:
        completions: Number of completions per question, N; None: `budget.pool_completions`.

    Returns:
        The pool and its total cost.

    Raises:
        EqualRewards: If all completions have been drawn and all rewards are equal.
    """
    size = completions or config.budget.pool_completions
    store = PoolStore(folder, draws_of(config))
    with counting_stop(store, prompts, size):
        fill_pool(config, prompts, store, size)
    return read_pool(store, prompts, size, config.weights)


def build_part(config: MseConfig, prompts: list[Prompt], folder: Path) -> int:
    """Add this job's share of the chunks to a pool, as `build_pool` adds all of them.

    Several jobs can fill the same folder at the same time.

    Returns:
        Number of prompts in the whole pool that have all their completions.
    """
    size = config.budget.pool_completions
    store = PoolStore(folder, draws_of(config))
    with counting_stop(store, prompts, size):
        fill_pool(config, prompts, store, size)
    return main_only(_complete_questions, store, prompts, size)


@contextmanager
def counting_stop(store: PoolStore, prompts: list[Prompt], size: int) -> Iterator[None]:
    """If the study is stopped in the block, add the number of finished questions to the message."""
    try:
        yield
    except Stopped as stopped:
        complete = _complete_questions(store, prompts, size)
        raise Stopped(
            f"{stopped}; {complete} of {len(prompts)} questions are in the pool"
        ) from None


def fill_pool(config: MseConfig, prompts: list[Prompt], store: PoolStore, size: int) -> None:
    """Add the completions that are missing in this job's share of the pool.

    As long as a worker has seen only equal rewards, it leaves its completions unscored. If another
    worker then sees a different reward, these completions are drawn again (identically) and scored.
    """
    main_only(store.open)
    sampling, budget = config.sampling, config.budget
    workers = one_on_each_gpu(sampling.workers, sampling.policy.device)
    while True:
        seen = main_only(_rewards_so_far, store)
        kind = UNSCORED if seen is not None else SCORED
        chunks = main_only(
            _chunks_to_sample, sampling, config.study.share, prompts, store, size, kind
        )
        if not chunks:
            return
        total = sum((size - first) * len(chunk) for first, chunk in chunks)
        work = [(size - first) * sum(len(prompts[p].text) for p in c) for first, c in chunks]
        share(
            _score_chunks, chunks, workers, "score pool", total, sampling, budget, prompts,
            store, size, seen, weights=work,
        )  # fmt: skip


def _rewards_so_far(store: PoolStore) -> set[tuple[float, ...]] | None:
    """Return the only reward of all completions so far, or None if completions must be scored.

    Completions must be scored if rewards differ or if scored parts exist. If scored parts exist,
    unscored parts are deleted. Otherwise the result is a set with one reward, or an empty set if
    there are no completions yet.
    """
    if store.kind == SCORED:
        store.delete_unscored()
        return None
    seen = store.unscored_rewards()
    return seen if len(seen) < 2 else None


def _complete_questions(store: PoolStore, prompts: list[Prompt], size: int) -> int:
    """Return the number of prompts that have `size` completions in the pool."""
    kind = store.kind
    return store.stored_completions(prompts, size, kind).count(size)


@dataclass(frozen=True)
class ModelFacts:
    """Facts about the model and the prompts that are known before sampling."""

    # Number of parameters with respect to which scores are computed.
    parameters: int
    # Mean number of tokens per prompt.
    prompt_tokens: float


def model_facts(
    options: PolicyOptions,
    prompts: list[Prompt],
    weights: int | None = None,
    one_completion: int | None = None,
) -> ModelFacts:
    """Count parameters and tokens; raise an error if the policy does not fit on its GPU.

    Args:
        weights: Size of the policy in bytes; None if unknown.
        one_completion: Additional bytes needed to score one completion; None if unknown.
    """
    device = torch.device(own_device(options.device))
    is_there = device.type == "cuda" and (device.index or 0) < torch.cuda.device_count()
    if is_there and weights is not None and one_completion is not None:
        check_weights(weights, one_completion, free_bytes(device), str(device))
    policy = configured_policy(options)
    encoded = policy.encode([prompt.text for prompt in prompts])
    parameters = sum(parameter_sizes(policy.model).values())
    return ModelFacts(parameters, float(np.mean([len(ids) for ids in encoded])))


def greedy_rewards(sampling: StudySampling, prompts: list[Prompt]) -> Array:
    """Return the rewards of the prompts' greedy completions, [P]."""
    (rewards_P,), _ = share(_greedy, [prompts], 1, "greedy", len(prompts), sampling)
    return rewards_P


def _greedy(items: list[list[Prompt]], sampling: StudySampling) -> Iterator[WorkCost | Array]:
    """Compute `greedy_rewards` in a worker process."""
    _, engine, task = start_sampler(sampling)
    for prompts in items:
        rewards_P, cost = greedy_rewards_with_cost(sampling.sampler, engine, task, prompts)
        yield cost
        yield rewards_P


def greedy_rewards_with_cost(
    sampler: SamplerOptions, engine: Engine, task: Task, prompts: list[Prompt]
) -> tuple[Array, WorkCost]:
    """Draw greedy completions, and return their rewards, [P], and their cost."""
    greedy = Sampling.of(sampler, "greedy", greedy=True)
    rollouts, cost = sample_with_cost(engine, prompts, 1, greedy)
    rewards_P1F, judge_cost = reward_completions(task, rollouts)
    rewards_P1 = weighted_sum(rewards_P1F, task.reward_weights_F)
    return rewards_P1[:, 0], cost + judge_cost + WorkCost(rollouts=len(prompts))


def reward_completions(task: Task, rollouts: Rollouts) -> tuple[Array, WorkCost]:
    """Return the rewards of all completions by F functions, [P, G, F], and the cost of judging."""
    rewards_PGF = rewards(task, rollouts)
    return rewards_PGF, WorkCost(**task.take_counts())


def _chunks_to_sample(
    sampling: StudySampling,
    job: tuple[int, int],
    prompts: list[Prompt],
    store: PoolStore,
    size: int,
    kind: str = SCORED,
) -> list[tuple[int, list[int]]]:
    """List the chunks of questions that lack completions.

    A chunk contains the completions that fit into one batch. On an accelerator, finished
    completions in a batch are replaced by waiting completions, so a chunk may contain up to
    MAX_BATCHES_A_CHUNK times as many completions, as long as each job has at least MIN_CHUNKS
    chunks. Jobs divide the chunks of a pool among themselves. The assignment does not depend on the
    content of the pool, so completions added by other jobs do not move a chunk from one job to
    another.

    Args:
        job: Tuple (k, n): this job fills part k of n.
        kind: Kind of parts in which completions must be stored, scored or unscored.

    Returns:
        For each chunk, the index of the first missing completion and the indices of its questions.
    """
    part, parts = job
    most = math.ceil(len(prompts) / (MIN_CHUNKS * parts))
    order = sorted(range(len(prompts)), key=lambda p: (len(prompts[p].text), p))
    missing: list[tuple[int, list[int]]] = []
    firsts = store.stored_completions(prompts, size, kind)
    for first in sorted(set(firsts) - {size}):
        per_chunk = max(1, sampling.sampler.rows // (size - first))
        if sampling.policy.device != "cpu":
            per_chunk = max(per_chunk, min(MAX_BATCHES_A_CHUNK * per_chunk, most))
        chunks = [order[i : i + per_chunk] for i in range(0, len(order), per_chunk)]
        own_chunks = chunks[part - 1 :: parts]
        missing += [(first, c) for c in own_chunks if any(firsts[p] == first for p in c)]
    return missing


def _score_chunks(
    items: list[tuple[int, list[int]]],
    sampling: StudySampling,
    budget: StudyBudget,
    prompts: list[Prompt],
    store: PoolStore,
    size: int,
    seen: set[tuple[float, ...]] | None,
) -> Iterator[WorkCost | Notice]:
    """Sample, score and store the missing completions of each chunk; see `_chunks_to_sample`.

    If many completions in the first chunk were cut, a notice is yielded.

    Args:
        items: Chunks from `_chunks_to_sample`.
        seen: Result of `_rewards_so_far`. If it is None, each chunk is scored at once. If it is a
            set, it has the only reward of all completions so far. Until a different reward occurs
            in these chunks or in the folder, chunks are stored without scores and kept in memory.
            When a different reward occurs, the kept chunks are scored in order.
    """
    policy, engine, task = start_sampler(sampling)
    sampler = sampling.sampler
    draws, sketches = Sampling.of(sampler, "pool"), score_sketches(budget, policy)
    checked, unscored = False, []
    for place, (first, chunk) in enumerate(items):
        chunk_prompts = [prompts[p] for p in chunk]
        rollouts, chunk_cost = sample_with_cost(
            engine, chunk_prompts, size - first, draws, first=first
        )
        yield chunk_cost
        share_cut = float((~rollouts.ended_PG).mean())
        if place == first == 0 and often_cut(share_cut):
            of = f"the first {rollouts.ended_PG.size}"
            yield Notice(f"WARNING: {cut_text(share_cut, of, sampler.max_completion_length)}")
        rewards_PNF, judge_cost = reward_completions(task, rollouts)
        seconds = chunk_cost.seconds_generate / len(chunk_prompts)
        costs_P = [question_cost(rollouts, row, seconds) for row in range(len(chunk_prompts))]
        # The cost of judging a chunk is assigned to the chunk's first question.
        costs_P[0] += judge_cost
        sampled = (first, rollouts, rewards_PNF, costs_P)
        if seen is not None:
            seen = seen | distinct_rewards(np.concatenate(rewards_PNF))
            for row, prompt in enumerate(chunk_prompts):
                part = completions_of(
                    policy, rollouts, row, rewards_PNF[row], sampler, costs_P[row]
                )
                store.write(prompt, first, part)
            if len(seen) < 2 and store.kind == UNSCORED:
                unscored.append(sampled)
                yield WorkCost(rollouts=rewards_PNF[..., 0].size)
                continue
            # Earlier completions of these questions are unscored, so all completions are drawn
            # again.
            if first:
                return
            seen = None
        for before in [*unscored, sampled]:
            first, rollouts, rewards_PNF, costs_P = before
            if not checked:
                check_batch(policy, rollouts, size - first)
                checked = True
            stored_P = store.stored_completions(rollouts.prompts, size)
            for row, (prompt, stored) in enumerate(zip(rollouts.prompts, stored_P, strict=True)):
                if stored == first and not store.has_part(prompt, first, size - first):
                    part = score_part(
                        policy, rollouts, row, rewards_PNF[row], sampler, sketches, costs_P[row]
                    )
                    store.write(prompt, first, part)
                yield WorkCost(rollouts=(size - first) * (before is sampled))
        unscored = []


def read_pool(
    store: PoolStore, prompts: list[Prompt], size: int, weights: Sequence[float] = (1.0,)
) -> tuple[ScorePool, WorkCost]:
    """Read the pool of all prompts, with `size` completions per prompt, and its cost.

    A question may have been scored in several parts. Inner products between scores of different
    parts are estimated from the sketches. To save memory, files are read one question at a time
    into preallocated arrays.

    Args:
        size: Number of completions per question, N.
        weights: Weights of the reward functions in the total reward.

    Raises:
        EqualRewards: If every reward function gave all completions the same reward.
    """
    count, cost, gaps = len(prompts), WorkCost(), list[np.ndarray | None]()
    seen: set[tuple[float, ...]] = set()
    packages: Counter[str] = Counter()
    # If a question has several parts, their sums are accumulated in float64; otherwise float32 is
    # enough.
    wide = np.float64 if any(len(spans) > 1 for spans in store.parts(prompts)) else np.float32
    arrays: dict[str, np.ndarray] = {}
    # Number of questions with all completions.
    complete = 0
    for row, parts in enumerate(store.completions(prompts, size)):
        complete += sum(len(part.rewards_N) for part in parts) == size
        for part in parts:
            seen |= distinct_rewards(part.rewards_NF)
            cost += part.work_cost
            gaps.append(part.sampler_gap)
            if part.packages is not None:
                packages[part.packages] += len(part.rewards_N)
        scored = [part for part in parts if isinstance(part, Part)]
        if not scored or complete <= row:
            continue
        if not arrays:
            functions, features = scored[0].rewards_NF.shape[1], scored[0].features_NR.shape[1]
            shape, sums = (count, size), scored[0].centred_sums_FR.shape
            arrays = {
                "rewards_NF": np.empty((*shape, functions)),
                "gram_NN": np.empty((*shape, size)),
                "lengths_N": np.empty(shape, np.int64),
                "ended_N": np.empty(shape, bool),
                "features_NR": np.empty((*shape, features), np.float32),
                "centred_sums_FR": np.zeros((count, *sums), wide),
            }
        gram_NN, features_NR = arrays["gram_NN"][row], arrays["features_NR"][row]
        for name in ("rewards_NF", "lengths_N", "ended_N", "features_NR"):
            np.concatenate([getattr(part, name) for part in scored], out=arrays[name][row])
        if len(scored) > 1:
            np.matmul(features_NR.astype(float), features_NR.T.astype(float), out=gram_NN)
        start, centred_FN = 0, centred(arrays["rewards_NF"][row].T)
        for part in scored:
            inside = slice(start, start + len(part.rewards_N))
            gram_NN[inside, inside] = part.gram_NN
            arrays["centred_sums_FR"][row] += part.centred_sums_FR
            if len(scored) > 1:
                # Each part was centred at its own mean reward. This moves its centre to the mean
                # reward over all parts.
                lead_F1 = centred_FN[:, inside].mean(axis=1, keepdims=True)
                arrays["centred_sums_FR"][row] += lead_F1 * part.score_sum_R
            start = inside.stop
    if complete == count and len(seen) == 1:
        stored = store.completions(prompts, size)
        raise EqualRewards(prompts, [[part.completions for part in parts] for parts in stored])
    if complete < count or not arrays:
        raise ConfigError(
            f"{store.folder} or parts of it were moved or removed during this study: run the same "
            "command again to continue, after restoring them or without them"
        )
    weights_F, several = np.array(weights), list(weights) != [1.0]
    pool = ScorePool(
        rewards_PN=weighted_sum(arrays["rewards_NF"], weights_F),
        gram_PNN=arrays["gram_NN"],
        lengths_PN=arrays["lengths_N"],
        ended_PN=arrays["ended_N"],
        features_PNR=arrays["features_NR"],
        centred_sums_PR=None if several else arrays["centred_sums_FR"][:, 0],
        sampler_gap=mean_sampler_gap(gaps),
        packages=dict(packages),
        rewards_PNF=arrays["rewards_NF"] if several else None,
        centred_sums_PFR=arrays["centred_sums_FR"] if several else None,
        reward_weights_F=weights_F if several else None,
    )
    return pool, cost


def sample_with_cost(
    engine: Engine, prompts: list[Prompt], size: int, sampling: Sampling, **key: int
) -> tuple[Rollouts, WorkCost]:
    """Sample rollouts with `engine.sample` and measure their cost.

    The cost leaves out the number of rollouts, because a completion is counted when it is scored.

    Args:
        key: Argument `first` or `step` for `engine.sample`.
    """
    start = time.perf_counter()
    rollouts = engine.sample(prompts, size, sampling, **key)
    seconds, cut = time.perf_counter() - start, int((~rollouts.ended_PG).sum())
    tokens = int(rollouts.lengths_PG.sum())
    return rollouts, WorkCost(tokens=tokens, clipped=cut, seconds_generate=seconds)
