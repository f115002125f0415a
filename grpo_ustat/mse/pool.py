"""Build the score pool: N scored completions of every question, shared out and kept on disk."""

from __future__ import annotations

import time
from collections.abc import Iterator
from dataclasses import astuple, dataclass
from pathlib import Path

import numpy as np
import psutil
import torch

from grpo_ustat.checks import ConfigError
from grpo_ustat.config import MseConfig
from grpo_ustat.policy.batches import score_rollouts
from grpo_ustat.policy.loading import Policy, configured_policy, configured_task
from grpo_ustat.policy.logprobs import pack
from grpo_ustat.policy.scores import check_scores, parameter_sizes
from grpo_ustat.policy.sketch import Sketch
from grpo_ustat.ranks import on_main
from grpo_ustat.records import Prompt, Rollouts, ScorePool
from grpo_ustat.rollout.local import Sampling, sample
from grpo_ustat.signals import Stopped
from grpo_ustat.study.store import Part, PoolStore, draws_of
from grpo_ustat.study.workers import Done, share
from grpo_ustat.tasks.base import Task, rewards


def build_pool(
    config: MseConfig, prompts: list[Prompt], folder: Path, completions: int | None = None
) -> tuple[ScorePool, Done]:
    """Completions of every prompt, sampled, scored and kept; only what is missing is made.

    Questions are sampled in chunks that depend on the configuration alone and scored one by one, so
    the pool depends neither on the number of processes nor on where it was interrupted. Several
    studies may fill one pool at once; what is missing where one kept a shorter part of a question
    is made in another round.

    Args:
        config: the study's configuration.
        prompts: its questions.
        folder: of the pool.
        completions: N, `budget.pool_completions` unless given.

    Returns:
        The pool, and what all of it took.

    Raises:
        ConfigError: the folder holds other draws, or the model does not fit.
    """
    size = completions or config.budget.pool_completions
    return read_pool(_fill(config, prompts, folder, size), prompts, size)


def build_part(config: MseConfig, prompts: list[Prompt], folder: Path) -> int:
    """As `build_pool`, of this job's part of the chunks alone; jobs may share a folder at once.

    Returns:
        How many of the prompts have all their completions now, in this part and the others.
    """
    size = config.budget.pool_completions
    store = _fill(config, prompts, folder, size)
    return on_main(_whole, store, prompts, size)


def _fill(config: MseConfig, prompts: list[Prompt], folder: Path, size: int) -> PoolStore:
    """The folder, with what was missing of its own part."""
    store = PoolStore(folder, draws_of(config))
    on_main(store.open)
    while chunks := on_main(_missing, config, prompts, store, size):
        try:
            _score(config, prompts, store, size, chunks)
        except Stopped as stopped:
            there = _whole(store, prompts, size)
            raise Stopped(
                f"{stopped}; {there} of {len(prompts)} questions are in the pool"
            ) from None
    return store


def _score(config: MseConfig, prompts: list[Prompt], store: PoolStore, size: int, chunks) -> None:
    total = sum((size - first) * len(chunk) for first, chunk in chunks)
    work = [(size - first) * sum(len(prompts[p].text) for p in c) for first, c in chunks]
    share(
        _score_chunks, chunks, config.launch.workers, "score pool", total,
        config, prompts, store, size, weights=work,
    )  # fmt: skip


def _whole(store: PoolStore, prompts: list[Prompt], size: int) -> int:
    """How many of the prompts have all their completions."""
    return sum(_reached(store, prompt, size) == size for prompt in prompts)


@dataclass(frozen=True)
class ModelFacts:
    """What is known of model and prompts before anything is sampled.

    Attributes:
        parameters: that scores cover.
        prompt_tokens: mean length of a prompt.
        prompt_seconds: to read one prompt, measured here; a group shares it.
    """

    parameters: int
    prompt_tokens: float
    prompt_seconds: float


def model_facts(config: MseConfig, prompts: list[Prompt]) -> ModelFacts:
    """Count parameters and tokens, and time the reading of a few prompts."""
    policy = configured_policy(config)
    encoded = policy.encode([prompt.text for prompt in prompts])
    few = [torch.tensor([ids], device=policy.model.device) for ids in encoded[:8]]
    with torch.inference_mode():
        policy.model(input_ids=few[0])
        start = time.perf_counter()
        for ids in few:
            policy.model(input_ids=ids).logits[0, -1, 0].item()
        seconds = (time.perf_counter() - start) / len(few)
    parameters = sum(parameter_sizes(policy.model).values())
    return ModelFacts(parameters, float(np.mean([len(ids) for ids in encoded])), seconds)


def greedy_rewards(config: MseConfig, prompts: list[Prompt]) -> np.ndarray:
    """Reward of each prompt's greedy completion, [P]."""
    (found,), _ = share(_greedy, [prompts], 1, "greedy", len(prompts), config)
    return found


def _greedy(items: list[list[Prompt]], config: MseConfig) -> Iterator:
    policy, task = configured_policy(config), configured_task(config)
    for prompts in items:
        found, took = greedily(config, policy, task, prompts)
        yield took
        yield found


def greedily(config: MseConfig, policy: Policy, task: Task, prompts: list[Prompt]):
    """Rewards of the greedy completions, [P], and what they took."""
    sampling = Sampling.of(config, "greedy", greedy=True)
    rollouts, took = timed_sample(policy, prompts, 1, sampling)
    rewards_P1, judged = judged_rewards(task, rollouts)
    return rewards_P1[:, 0], took + judged + Done(rollouts=len(prompts))


def judged_rewards(task: Task, rollouts: Rollouts) -> tuple[np.ndarray, Done]:
    """Rewards of every completion, shape [P, G], and how many could not be judged."""
    rewards_PG = rewards(task, rollouts)
    return rewards_PG, Done(**task.take_counts())


def _missing(
    config: MseConfig, prompts: list[Prompt], store: PoolStore, size: int
) -> list[tuple[int, list[int]]]:
    """(first missing completion, questions) of every chunk that has any to make.

    Parts of a pool share out whole chunks, the same whatever is there already: what others have
    made in the meantime moves none of theirs here.
    """
    part, parts = config.study.share
    order = sorted(range(len(prompts)), key=lambda p: (len(prompts[p].text), p))
    found = []
    firsts = [_reached(store, prompts[p], size) for p in range(len(prompts))]
    for first in sorted(set(firsts) - {size}):
        per_chunk = max(1, config.rollout_batch_size // (size - first))
        chunks = [order[i : i + per_chunk] for i in range(0, len(order), per_chunk)]
        mine = chunks[part - 1 :: parts]
        found += [(first, c) for c in mine if any(firsts[p] == first for p in c)]
    return found


def _reached(store: PoolStore, prompt: Prompt, size: int) -> int:
    """How many of the wanted completions are there.

    Raises:
        ConfigError: a part ends beyond them.
    """
    reached = 0
    for first, count in store.parts(prompt):
        if first >= size:
            break
        reached = first + count
    if reached > size:
        raise ConfigError(
            f"{store.folder} holds {reached} completions a question in parts that cannot be split, "
            f"asked is budget.pool_completions={size}: use {reached} or another pool=DIR"
        )
    return reached


def _score_chunks(items, config: MseConfig, prompts: list[Prompt], store, size: int) -> Iterator:
    policy, task = configured_policy(config), configured_task(config)
    sampling, sizes = Sampling.of(config, "pool"), parameter_sizes(policy.model)
    sketches = [
        Sketch(sizes, dimension)
        for dimension in (config.budget.feature_sketch, config.budget.gradient_sketch)
    ]
    checked = False
    for first, chunk in items:
        asked = [prompts[p] for p in chunk]
        rollouts, took = timed_sample(policy, asked, size - first, sampling, first=first)
        yield took
        rewards_PN, judged = judged_rewards(task, rollouts)
        if not checked:
            check_batch(policy, rollouts, size - first)
            checked = True
        for row, prompt in enumerate(asked):
            if _reached(store, prompt, size) == first:
                cost = _share_of(took, rollouts, row, len(asked))
                cost += judged if row == 0 else Done()  # once for the chunk
                part = score_part(policy, rollouts, row, rewards_PN[row], config, sketches, cost)
                store.write(prompt, first, part)
            yield Done(rollouts=size - first)


def _share_of(took: Done, rollouts: Rollouts, row: int, questions: int) -> Done:
    return Done(
        rollouts=rollouts.mask_PGT.shape[1],
        tokens=int(rollouts.lengths_PG[row].sum()),
        clipped=int((~rollouts.ended_PG[row]).sum()),
        seconds_generate=took.seconds_generate / questions,
    )


def score_part(
    policy, rollouts: Rollouts, row: int, rewards_N, config, sketches, cost: Done
) -> Part:
    """Score one question's completions."""
    start = time.perf_counter()
    count = len(rewards_N)
    scores = score_rollouts(
        policy,
        rollouts,
        row * count + np.arange(count),
        config.temperature,
        weights_KB=np.stack([rewards_N, np.ones(count)]),
        gram=True,
        features=sketches[0],
        pooled=sketches[1],
    )
    sums_KR = scores.pooled_KR.float().cpu().numpy()
    seconds = Done(seconds_score=time.perf_counter() - start)
    return Part(
        rewards_N=rewards_N,
        lengths_N=rollouts.lengths_PG[row],
        ended_N=rollouts.ended_PG[row],
        tokens_NT=rollouts.tokens_PGT[row].astype(np.int32),
        gram_NN=scores.gram_BB.cpu().numpy(),
        features_NR=scores.features_BR.float().cpu().numpy(),
        reward_sum_R=sums_KR[0],
        score_sum_R=sums_KR[1],
        cost=np.array(astuple(cost + seconds), dtype=np.float64),
    )


def read_pool(store: PoolStore, prompts: list[Prompt], size: int) -> tuple[ScorePool, Done]:
    """The pool of all prompts, each with `size` completions, and what it took.

    Inner products between parts, which were scored apart, come from the sketches.
    """
    found = [
        [store.read(p, first, count) for first, count in store.parts(p) if first < size]
        for p in prompts
    ]

    def joined(name: str, dtype=np.float64) -> np.ndarray:
        return np.array([np.concatenate([vars(x)[name] for x in parts]) for parts in found], dtype)

    def added(name: str) -> np.ndarray:
        return np.array([sum(vars(x)[name].astype(np.float64) for x in parts) for parts in found])

    pool = ScorePool(
        rewards_PN=joined("rewards_N"),
        gram_PNN=np.array([_gram(parts) for parts in found]),
        lengths_PN=joined("lengths_N", np.int64),
        features_PNR=joined("features_NR", np.float32),
        reward_sums_PR=added("reward_sum_R"),
        score_sums_PR=added("score_sum_R"),
    )
    return pool, sum((x.done for parts in found for x in parts), Done())


def _gram(parts: list[Part]) -> np.ndarray:
    features = np.concatenate([part.features_NR for part in parts]).astype(np.float64)
    gram, first = features @ features.T, 0
    for part in parts:
        inside = slice(first, first + len(part.rewards_N))
        gram[inside, inside] = part.gram_NN
        first = inside.stop
    return gram


def timed_sample(policy: Policy, prompts: list[Prompt], size: int, sampling: Sampling, **key):
    """`sample` with what it took; its completions are counted as done once they are scored."""
    start = time.perf_counter()
    rollouts = sample(policy, prompts, size, sampling, **key)
    seconds, cut = time.perf_counter() - start, int((~rollouts.ended_PG).sum())
    tokens = int(rollouts.lengths_PG.sum())
    return rollouts, Done(tokens=tokens, clipped=cut, seconds_generate=seconds)


def check_batch(policy: Policy, rollouts: Rollouts, rows: int) -> None:
    """Compare scores with plain differentiation on a few completions; refuse what cannot fit."""
    check_memory(policy, rows, int(max(map(len, rollouts.prompt_tokens))), rollouts)
    index = np.arange(min(3, rollouts.mask_PGT[..., 0].size))
    few = pack(rollouts, index, policy.pad_token, policy.model.device)
    check_scores(policy.model, few.input_ids_BT, few.attention_mask_BT, few.completion_mask_BT)


def rows_that_fit(policy: Policy, tokens: int) -> int:
    """How many rows of so many tokens can be scored at once, about, in the memory that is free."""
    config, entry = policy.model.config, policy.model.dtype.itemsize
    width = 16 * config.hidden_size + 4 * (getattr(config, "intermediate_size", None) or 0)
    free = psutil.virtual_memory().available
    if policy.model.device.type == "cuda":
        free = torch.cuda.mem_get_info(policy.model.device)[0]
    return int(free / (entry * tokens * config.num_hidden_layers * width))


def check_memory(policy: Policy, rows: int, prompt_tokens: int, rollouts: Rollouts) -> None:
    """Refuse a batch whose activations do not fit.

    Raises:
        ConfigError: with the number of completions that would fit.
    """
    tokens = prompt_tokens + rollouts.mask_PGT.shape[-1]
    fit = rows_that_fit(policy, tokens)
    if rows > fit:
        raise ConfigError(
            f"scoring {rows} completions of up to {tokens} tokens at once does not fit, {fit} do: "
            "build the pool in parts, a smaller budget.pool_completions first, then larger ones on "
            "the same pool=DIR"
        )
