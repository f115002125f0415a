"""Score a question's completions as a part of a pool, and check results and memory."""

from __future__ import annotations

import time
from dataclasses import astuple

import numpy as np

from grpo_ustat.config.parts import SamplerOptions
from grpo_ustat.config.schema import ConfigError
from grpo_ustat.config.study import StudyBudget
from grpo_ustat.distributed.workers import WorkCost
from grpo_ustat.estimators.moments import centred
from grpo_ustat.mse.pool_parts import Completions, Part
from grpo_ustat.mse.sampler import sampler_gap
from grpo_ustat.policy.loading import Policy
from grpo_ustat.policy.logprobs import pack
from grpo_ustat.policy.memory import free_bytes, score_bytes
from grpo_ustat.policy.output_layer import causal
from grpo_ustat.policy.prompt_sharing import can_read_contiguous
from grpo_ustat.policy.scores.backward import parameter_sizes
from grpo_ustat.policy.scores.by_layer import LayerByLayer
from grpo_ustat.policy.scores.check import check_scores
from grpo_ustat.policy.scores.rollouts import score_rollouts
from grpo_ustat.policy.scores.sketch import Sketch
from grpo_ustat.policy.scores.turns import most_turns, split_turns
from grpo_ustat.records import Array, Prompt, Rollouts

# Number of completions per part for which the log-probabilities of sampler and model are compared.
COMPARED_COMPLETIONS = 4

# Maximum number of tokens per completion when scores are compared with plain differentiation.
CHECKED_TOKENS = 64


def score_sketches(budget: StudyBudget, policy: Policy) -> tuple[Sketch, Sketch]:
    """Return a sketch for individual scores and a larger sketch for sums of scores."""
    sizes = parameter_sizes(policy.model)
    features = Sketch(sizes, budget.feature_sketch)
    return features, Sketch(sizes, budget.gradient_sketch, signs=features.signs)


def question_cost(rollouts: Rollouts, row: int, seconds_generate: float = 0.0) -> WorkCost:
    """Return the cost of sampling one question's completions, without scoring."""
    return WorkCost(
        rollouts=rollouts.mask_PGT.shape[1],
        tokens=int(rollouts.lengths_PG[row].sum()),
        clipped=int((~rollouts.ended_PG[row]).sum()),
        seconds_generate=seconds_generate,
    )


def completions_of(
    policy: Policy,
    rollouts: Rollouts,
    row: int,
    rewards_NF: Array,
    sampler: SamplerOptions,
    cost: WorkCost,
) -> Completions:
    """Return a question's completions as an unscored part; `score_part` explains the arguments."""
    gap, count = None, len(rewards_NF)
    if sampler.rollout.name != "local" and rollouts.logprobs_PGT is not None:
        read = row * count + np.unique(np.linspace(0, count - 1, COMPARED_COMPLETIONS).astype(int))
        tokens = int(rollouts.lengths_PG.ravel()[read].sum())
        gap = np.array([sampler_gap(policy, rollouts, read, sampler.temperature), tokens])
    return Completions(
        rewards_N=rewards_NF[:, 0],
        lengths_N=rollouts.lengths_PG[row],
        ended_N=rollouts.ended_PG[row],
        tokens_NT=rollouts.tokens_PGT[row].astype(np.int32),
        cost=np.array(astuple(cost), dtype=np.float64),
        sampler_gap=gap,
        further_rewards_NF=rewards_NF[:, 1:] if rewards_NF.shape[1] > 1 else None,
    )


def score_part(
    policy: Policy,
    rollouts: Rollouts,
    row: int,
    rewards_NF: Array,
    sampler: SamplerOptions,
    sketches: tuple[Sketch, Sketch],
    cost: WorkCost,
) -> Part:
    """Score one question's completions.

    Args:
        policy: Policy that computes the scores.
        rollouts: Completions of several questions.
        row: Index of the question in `rollouts`.
        rewards_NF: Rewards of the question's completions from all reward functions.
        sketches: Sketches from `score_sketches`.
        cost: Cost of sampling the completions; the cost of scoring is added to it.
    """
    start = time.perf_counter()
    count = len(rewards_NF)
    scores = score_rollouts(
        policy,
        rollouts,
        row * count + np.arange(count),
        sampler.temperature,
        weights_KB=np.concatenate([centred(rewards_NF.T), np.ones((1, count))]),
        gram=True,
        features=sketches[0],
        pooled=sketches[1],
    )
    # These fields are set because `gram`, `features` and `pooled` were given.
    assert scores.gram_BB is not None
    assert scores.features_BR is not None and scores.pooled_KR is not None
    sums_KR, gram_NN = scores.pooled_KR.float().cpu().numpy(), scores.gram_BB.cpu().numpy()
    dtype = str(policy.model.dtype).removeprefix("torch.")
    finite_NN = np.isfinite(gram_NN)
    # A score that is not finite makes all inner products with it infinite or NaN, so the diagonal
    # is searched first: it shows which score is the cause.
    for i in [*np.flatnonzero(~finite_NN.diagonal()), *np.flatnonzero(~finite_NN.all(axis=1))]:
        raise ConfigError(
            f"the score of completion {i} of prompt {rollouts.prompts[row].id} has squared norm "
            f"{gram_NN[i, i]} in {dtype}: use model.dtype=float64, and check that the model's "
            "weights are finite"
        )
    cost += WorkCost(seconds_score=time.perf_counter() - start)
    return Part(
        **vars(completions_of(policy, rollouts, row, rewards_NF, sampler, cost)),
        gram_NN=gram_NN,
        features_NR=scores.features_BR.float().cpu().numpy(),
        centred_sum_R=sums_KR[0],
        score_sum_R=sums_KR[-1],
        further_centred_sums_FR=sums_KR[1:-1] if rewards_NF.shape[1] > 1 else None,
    )


def stored_rollouts(
    policy: Policy, prompt: Prompt, parts: list[Completions]
) -> tuple[Rollouts, np.ndarray]:
    """Return a prompt's stored completions as rollouts, and their rewards, [N, F]."""
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
        texts_PG=[[""] * len(lengths_N)],
    )
    return rollouts, np.concatenate([part.rewards_NF for part in parts])


def check_batch(policy: Policy, rollouts: Rollouts, rows: int) -> None:
    """Check the memory of a batch, and check scores against plain differentiation.

    An error is raised if a batch of `rows` completions does not fit in memory. Scores are then
    compared on the first CHECKED_TOKENS tokens of the two shortest completions. If completions have
    several turns, each turn counts as a completion.
    """
    if rollouts.turn_PGT is not None:
        rows, index = most_turns(rollouts), np.arange(rollouts.ended_PG.size)
        rollouts = split_turns(rollouts, index).rollouts
    check_memory(policy, rows, int(max(map(len, rollouts.prompt_tokens))), rollouts)
    prompt_R = np.repeat(list(map(len, rollouts.prompt_tokens)), rollouts.mask_PGT.shape[1])
    shortest = np.argsort(prompt_R + rollouts.lengths_PG.ravel(), kind="stable")[:2]
    few = pack(rollouts, shortest, policy.pad_token, policy.model.device)
    columns = few.input_ids_BT.shape[1] - few.width + min(few.width, CHECKED_TOKENS)
    # If a tool wrote all these tokens, use the whole completions.
    if not few.completion_mask_BT[:, :columns].any():
        columns = few.input_ids_BT.shape[1]
    masks = (few.attention_mask_BT[:, :columns], few.completion_mask_BT[:, :columns])
    check_scores(
        policy.model,
        few.input_ids_BT[:, :columns],
        *masks,
        contiguous=can_read_contiguous(policy),
    )


def rows_that_fit(policy: Policy, tokens: int, by_layer: bool = False) -> int:
    """Estimate how many rows of `tokens` tokens fit in free memory during scoring."""
    free, row = free_bytes(policy.model.device), score_bytes(policy.model, tokens, by_layer)
    return free // row


def check_memory(policy: Policy, rows: int, prompt_tokens: int, rollouts: Rollouts) -> None:
    """Raise an error if the activations of a batch do not fit in memory."""
    tokens = prompt_tokens + rollouts.mask_PGT.shape[-1]
    fit = rows_that_fit(policy, tokens, by_layer=bool(LayerByLayer(causal(policy.model)).layers))
    if rows > fit:
        raise ConfigError(
            f"scoring {rows} completions of up to {tokens} tokens at once does not fit in memory, "
            f"which has room for {fit} completions: build the pool in parts, first with a smaller "
            "budget.pool_completions and then with larger ones on the same pool=DIR"
        )
