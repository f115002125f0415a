"""Build the score pool: N scored completions of every question, shared among workers."""

from __future__ import annotations

import time
from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
import psutil
import torch

from grpo_ustat.config import ConfigError, MseConfig
from grpo_ustat.estimators.moments import pool_gradient_weights
from grpo_ustat.policy.loading import Policy, configured_policy
from grpo_ustat.policy.logprobs import pack
from grpo_ustat.policy.scores import completion_scores, covered_parameters
from grpo_ustat.records import Prompt, Rollouts, ScorePool
from grpo_ustat.rollout.local import Sampling, sample
from grpo_ustat.study.workers import Done, share
from grpo_ustat.tasks.base import rewards
from grpo_ustat.tasks.registry import make_task

BLOCKS = 16  # of the delete-a-block jackknife behind ||grad J||^2


@dataclass(frozen=True)
class _Part:
    """One chunk of questions: their indices and per-completion arrays."""

    index: np.ndarray
    rewards_PN: np.ndarray
    gram_PNN: np.ndarray
    lengths_PN: np.ndarray


@dataclass(frozen=True)
class _Gradients:
    """One worker's sums over its questions, float64: by question block, and with each completion
    block left out.
    """

    by_prompt_block_KD: np.ndarray
    without_completions_KD: np.ndarray

    @property
    def parameters(self) -> int:
        """D, the number of parameters that the scores cover."""
        return self.by_prompt_block_KD.shape[1]


def build_pool(config: MseConfig, prompts: list[Prompt]) -> tuple[ScorePool, Done, int]:
    """Sample and score `budget.pool_completions` completions of every prompt.

    Questions are worked on in chunks that depend on the configuration alone, so the pool does not
    depend on the number of workers.

    Returns:
        The pool, what it took, and the number of parameters that the scores cover.
    """
    size = config.budget.pool_completions
    order = sorted(range(len(prompts)), key=lambda p: (len(prompts[p].text), p))
    per_chunk = max(1, config.rollout_batch_size // size)
    chunks = [order[i : i + per_chunk] for i in range(0, len(order), per_chunk)]
    results, spent = share(
        _score_chunks, chunks, config.launch.workers, "score pool", len(prompts) * size,
        config, prompts,
    )  # fmt: skip
    gradients = [r for r in results if isinstance(r, _Gradients)]
    parts = [r for r in results if isinstance(r, _Part)]
    return _assemble(parts, gradients, len(prompts), size), spent, gradients[0].parameters


def blocks(count: int) -> list[np.ndarray]:
    """At most 16 blocks of indices, as equal as possible."""
    return [np.arange(count)[k :: min(BLOCKS, count)] for k in range(min(BLOCKS, count))]


def _score_chunks(chunks: list[list[int]], config: MseConfig, prompts: list[Prompt]) -> Iterator:
    policy, task = configured_policy(config), make_task(config)
    sampling, size = Sampling.of(config, "pool"), config.budget.pool_completions
    prompt_blocks, completion_blocks = blocks(len(prompts)), blocks(size)
    covered = set(covered_parameters(policy.model))
    check_memory(policy, size, len(completion_blocks) + len(prompt_blocks))
    dimension = sum(p.numel() for name, p in policy.model.named_parameters() if name in covered)
    owner = {p: k for k, block in enumerate(prompt_blocks) for p in block}
    by_prompts = np.zeros((len(prompt_blocks), dimension))
    without = np.zeros((len(completion_blocks), dimension))
    for chunk in chunks:
        rollouts, took = timed_sample(policy, [prompts[p] for p in chunk], size, sampling)
        yield took
        rewards_PN, grams = rewards(task, rollouts), []
        for row, p in enumerate(chunk):
            start = time.perf_counter()
            weights_KN = _weights(rewards_PN[row], completion_blocks)
            gram, gradients_KD = score(policy, rollouts, row, weights_KN, config.temperature)
            grams.append(gram)
            by_prompts[owner[p]] += gradients_KD[0]
            without += gradients_KD[1:]
            yield Done(rollouts=size, seconds_score=time.perf_counter() - start)
        yield _Part(np.array(chunk), rewards_PN, np.array(grams), rollouts.lengths_PG)
    yield _Gradients(by_prompts, without)


def timed_sample(policy: Policy, prompts: list[Prompt], size: int, sampling: Sampling, **key):
    """`sample` with what it took; its completions are counted as done once they are scored."""
    start = time.perf_counter()
    rollouts = sample(policy, prompts, size, sampling, **key)
    seconds, cut = time.perf_counter() - start, int((~rollouts.ended_PG).sum())
    tokens = int(rollouts.lengths_PG.sum())
    return rollouts, Done(tokens=tokens, clipped=cut, seconds_generate=seconds)


def check_memory(policy: Policy, rows: int, gradients: int) -> None:
    """Refuse a model whose per-completion gradients do not fit.

    Raises:
        ConfigError: with the memory that `rows` completions of its largest layer and `gradients`
            whole gradients need, and what is free.
    """
    sizes = [p.numel() for p in policy.model.parameters()]
    needed = 3 * 4 * rows * max(sizes) + 16 * gradients * sum(sizes)
    free = psutil.virtual_memory().available
    if policy.model.device.type == "cuda":
        free = torch.cuda.mem_get_info(policy.model.device)[0]
    if needed > free:
        raise ConfigError(
            f"scoring {rows} completions side by side of a model with {sum(sizes):.3g} parameters "
            f"needs about {needed / 2**30:.0f} GiB and {free / 2**30:.0f} GiB are free: lower the "
            "number of completions per question or use a smaller model"
        )


def _weights(rewards_N: np.ndarray, completion_blocks: list[np.ndarray]) -> np.ndarray:
    """Weights of the pool's leave-one-out gradient, then of the same without each block."""
    rows = [pool_gradient_weights(rewards_N)]
    for block in completion_blocks:
        kept = np.delete(np.arange(len(rewards_N)), block)
        row = np.zeros(len(rewards_N))
        row[kept] = pool_gradient_weights(rewards_N[kept])
        rows.append(row)
    return np.array(rows)


def score(
    policy: Policy, rollouts: Rollouts, prompt: int, weights_KN: np.ndarray, temperature: float
) -> tuple[np.ndarray, np.ndarray]:
    """Gram matrix [N, N] and pooled gradients [K, D] of one prompt's completions, NumPy."""
    count = rollouts.mask_PGT.shape[1]
    device = policy.model.device
    index = np.arange(prompt * count, (prompt + 1) * count)
    rows = pack(rollouts, index, policy.pad_token, device)
    scores = completion_scores(
        policy.model,
        rows.input_ids_BT,
        rows.attention_mask_BT,
        rows.completion_mask_BT,
        weights_KB=torch.from_numpy(weights_KN).to(device),
        gram=True,
        temperature=temperature,
    )
    return scores.gram_BB.cpu().numpy(), flat(scores.gradients_K)


def flat(gradients_K: list[dict[str, torch.Tensor]]) -> np.ndarray:
    """Gradients by parameter name as rows of one array [K, D], float32 or wider."""
    names = sorted(gradients_K[0])
    rows = [torch.cat([gradient[name].flatten() for name in names]) for gradient in gradients_K]
    return torch.stack(rows).cpu().numpy()


def _assemble(parts: list[_Part], gradients: list[_Gradients], count: int, size: int) -> ScorePool:
    rewards_PN, gram_PNN = np.zeros((count, size)), np.zeros((count, size, size))
    lengths_PN = np.zeros((count, size), dtype=np.int64)
    for part in parts:
        rewards_PN[part.index] = part.rewards_PN
        gram_PNN[part.index] = part.gram_PNN
        lengths_PN[part.index] = part.lengths_PN
    by_prompts_KD = sum(g.by_prompt_block_KD for g in gradients)
    without_KD = sum(g.without_completions_KD for g in gradients)
    total_D, prompt_blocks = by_prompts_KD.sum(axis=0), blocks(count)
    kept = np.array([count - len(block) for block in prompt_blocks])
    return ScorePool(
        rewards_PN=rewards_PN,
        gram_PNN=gram_PNN,
        lengths_PN=lengths_PN,
        grad_sq=float(np.square(total_D / count).sum()),
        grad_sq_without_K=np.square(without_KD / count).sum(axis=1),
        completion_blocks_K=blocks(size),
        grad_sq_without_prompts_K=_squared(total_D - by_prompts_KD, kept),
        prompt_blocks_K=prompt_blocks,
    )


def _squared(rows_KD: np.ndarray, counts_K: np.ndarray) -> np.ndarray:
    """Squared norms of the rows over their counts; nothing is left of a single question."""
    safe = np.maximum(counts_K, 1)[:, None]
    return np.square(rows_KD / safe).sum(axis=1)
