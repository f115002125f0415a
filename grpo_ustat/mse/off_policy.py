"""Score rollouts that a different policy sampled: an earlier checkpoint or a different sampler.

This module also scores rollouts for losses with a penalty on the distance to a reference model.
`measurements.off_policy` measures the efficiency of all these rollouts.

The stored completions of a pool already have scores (gradients of the log-probability). The current
policy scores them a second time, with the token weights of the loss (`estimators.token_weights`).
This costs one more backward pass per kind of score that the losses need. The result is compared
with an unbiased estimate of the current policy's gradient. That estimate is computed from
completions of the current policy or, for a logged pool, from the same completions with exact
importance ratios.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np
import torch

from grpo_ustat.config.identity import weights_fingerprint
from grpo_ustat.config.model import ModelConfig
from grpo_ustat.config.mse import MseConfig
from grpo_ustat.config.parts import PolicyOptions, SamplerOptions
from grpo_ustat.config.schema import ConfigError
from grpo_ustat.config.study import StudyBudget
from grpo_ustat.distributed.ranks import main_only, one_on_each_gpu
from grpo_ustat.distributed.workers import WorkCost, share
from grpo_ustat.estimators.drift import drift_of
from grpo_ustat.estimators.token_weights import (
    EXACT,
    TokenWeights,
    reward_penalty,
    token_factors,
)
from grpo_ustat.measurements.base import Rescored
from grpo_ustat.mse.pool import EqualRewards, build_pool
from grpo_ustat.mse.pool_parts import WeightedPart
from grpo_ustat.mse.pool_store import PoolStore, draws_of, reuse_pool
from grpo_ustat.mse.scoring import (
    completions_of,
    question_cost,
    score_sketches,
    stored_rollouts,
)
from grpo_ustat.policy.configured import configured_policy
from grpo_ustat.policy.loading import Policy
from grpo_ustat.policy.logprobs import pack, token_logprobs
from grpo_ustat.policy.scores.rollouts import score_rollouts
from grpo_ustat.policy.scores.sketch import Sketch
from grpo_ustat.policy.scores.turns import split_turns
from grpo_ustat.policy.tokenizer import configured_tokenizer
from grpo_ustat.records import Array, Prompt, Rollouts, ScorePool

# With exact importance ratios, a logged pool is refused if the effective sample size is less than
# this share of the completions.
MIN_EFFECTIVE = 0.2


def check_tokenizers(config: MseConfig) -> None:
    """Raise an error if `study.scored_by` or `study.reference` has another vocabulary than `model`.

    This is checked before anything is sampled.
    """
    for key in ("scored_by", "reference"):
        place = getattr(config.study, key)
        if place is None:
            continue
        other = {"scored_by": config.later_model, "reference": config.reference_model}[key]
        vocabulary = configured_tokenizer(config.model).get_vocab()
        theirs = configured_tokenizer(other, f"study.{key}").get_vocab()
        if vocabulary != theirs:
            raise ConfigError(
                f"study.{key}={place} and {config.model.name} have different vocabularies "
                f"({len(theirs)} and {len(vocabulary)} tokens), so neither can score the "
                f"other's completions: use a checkpoint of {config.model.name}"
            )


def rescored_pool(
    config: MseConfig,
    pool: ScorePool,
    prompts: Sequence[Prompt],
    rollouts: Sequence[Rollouts],
    folder: Path,
) -> tuple[Rescored, WorkCost]:
    """Score the study's completions under `study.scored_by`, or with `study.corrections`.

    Args:
        pool: Pool of the study, sampled from `model` or read from a file.
        prompts: Questions of the study.
        rollouts: Completions of each question, in order; they include the sampler's
            log-probabilities if these were logged.
        folder: Run folder, in which the scores are stored.
    """
    study = config.study
    is_logged = config.imports_pool and all(logged.logprobs_PGT is not None for logged in rollouts)
    question = "lag" if study.scored_by is not None else "gap" if is_logged else "penalty"
    at_hand, losses = replace(config, model=config.later_model), config.measured.off_policy
    judged = config.measured.judged
    scored = [*losses, *judged.values()]
    wanted = list(dict.fromkeys(loss.tokens for loss in scored if loss.tokens is not None))
    if question == "gap" and EXACT not in wanted:
        # The losses are compared with the loss that uses exact ratios.
        wanted.append(EXACT)
    parts, cost = _scored(config, wanted, prompts, rollouts, pool.rewards_PN, folder)
    weighted = {weights: _pool_of(pool, weights, of_policy) for weights, of_policy in parts.items()}
    size = pool.rewards_PN.shape[1]
    drift = drift_of(np.array([part.drift for part in parts[wanted[0]]]), size)
    compared = pool
    if question == "lag":
        fresh = folder / "pool_scored_by"
        root, draws = Path(config.output_root), draws_of(at_hand)
        main_only(reuse_pool, root, draws, fresh, list(prompts), size)
        try:
            compared, further = build_pool(at_hand, list(prompts), fresh, size)
        except EqualRewards:
            raise ConfigError(
                f"study.scored_by={study.scored_by}: all completions of this policy got the same "
                "reward, so there is no gradient to estimate; use an earlier checkpoint or other "
                "questions"
            ) from None
        cost += further
    elif question == "gap":
        if drift.completions.estimate < MIN_EFFECTIVE:
            raise ConfigError(
                f"{config.pool}: with exact ratios, the effective share of the completions is "
                f"{drift.completions.estimate:.0%}, but an unbiased gradient for the comparison "
                f"needs {MIN_EFFECTIVE:.0%}; use study.corrections=[]"
            )
        compared = weighted[EXACT]
    writer = Path(config.model.name).name
    if question == "gap":
        writer = f"the sampler of {Path(str(config.pool)).name}"
    rescored = Rescored(
        written_by=writer,
        policy=Path(config.later_model.name).name,
        reference=Path(config.reference_model.name).name,
        question=question,
        drift=drift,
        losses=losses,
        judged=judged,
        compared=compared,
        weighted=weighted,
    )
    return rescored, cost


def _scored(
    config: MseConfig,
    wanted: Sequence[TokenWeights],
    prompts: Sequence[Prompt],
    rollouts: Sequence[Rollouts],
    rewards_PN: Array,
    folder: Path,
) -> tuple[dict[TokenWeights, list[WeightedPart]], WorkCost]:
    """Score the completions of each question with each kind of token weights.

    Scores that the folder already contains are not computed again.
    """
    study, at_hand = config.study, replace(config, model=config.later_model)
    reference_weights = weights_fingerprint(config.reference_model.model_name_or_path)
    draws = draws_of(at_hand) | {
        "written_by": draws_of(config), "reference": [study.reference, reference_weights]
    }  # fmt: skip
    stores = {
        weights: PoolStore(
            folder / "pool_weighted" / str(number), draws | {"weights": repr(weights)}
        )
        for number, weights in enumerate(wanted)
    }
    main_only(lambda: [store.open() for store in stores.values()])
    items = list(zip(range(len(prompts)), rollouts, rewards_PN, strict=True))
    workers = one_on_each_gpu(config.sampling_workers, config.launch.device)

    def logprobs_of(model: ModelConfig) -> list[Array | None]:
        """Compute the log-probabilities of each question's completions under a model."""
        options, temperature = replace(config.policy_options, model=model), config.temperature
        title = f"log-probabilities of {model.name}"
        logprobs, _ = share(_logprobs, items, workers, title, rewards_PN.size, options, temperature)
        return [logprobs_NT for _, logprobs_NT in sorted(logprobs, key=lambda pair: pair[0])]

    # None stands for the log-probabilities of the current policy, which `_score` computes.
    written: list[Array | None] = [None] * len(items)
    reference = written
    if config.imports_pool:
        written = [
            None if logged.logprobs_PGT is None else logged.logprobs_PGT[0] for logged in rollouts
        ]
    elif study.scored_by is not None:
        written = logprobs_of(config.model)
    if any(weights.beta for weights in wanted):
        if study.reference is not None:
            reference = logprobs_of(config.reference_model)
        elif study.scored_by is not None:
            reference = written
    scored_parts = [
        (*item, old_NT, reference_NT)
        for item, old_NT, reference_NT in zip(items, written, reference, strict=True)
    ]
    _, cost = share(
        _score, scored_parts, workers, f"score at {at_hand.model.name}",
        rewards_PN.size * len(stores), at_hand.policy_options, config.sampler_options,
        config.budget, stores,
    )  # fmt: skip
    size = rewards_PN.shape[1]
    parts = {
        weights: [store.weighted_part(prompt, size) for prompt in prompts]
        for weights, store in stores.items()
    }
    return parts, cost


def stored_completions(
    config: MseConfig, prompts: Sequence[Prompt], pool: Path, size: int
) -> list[Rollouts]:
    """Read each question's first `size` completions from a pool folder, without texts."""
    policy = configured_policy(config.policy_options)
    stored = PoolStore(pool, draws_of(config)).completions(prompts, size)
    return [
        stored_rollouts(policy, prompt, parts)[0]
        for prompt, parts in zip(prompts, stored, strict=True)
    ]


def _logprobs(
    items: list[tuple[int, Rollouts, Array]], options: PolicyOptions, temperature: float
) -> Iterator[WorkCost | tuple[int, Array]]:
    """Yield the index of each question and the log-probabilities of its completions, [N, T]."""
    policy = configured_policy(options)
    for place, rollouts, rewards_N in items:
        yield place, _question_logprobs(policy, rollouts, temperature)
        yield WorkCost(rollouts=len(rewards_N))


def _question_logprobs(policy: Policy, rollouts: Rollouts, temperature: float) -> Array:
    """Compute the log-probabilities of one question's completions, 0 on padding, [N, T]."""
    (prompt,) = rollouts.prompts
    read = policy.encode([prompt.text])
    if prompt.kind != "imported" and read != rollouts.prompt_tokens:
        raise ConfigError(
            f"the policy that wrote the completions and study.scored_by or study.reference "
            f"tokenise prompt {prompt.id} differently ({len(rollouts.prompt_tokens[0])} and "
            f"{len(read[0])} tokens): use models with the same tokenizer"
        )
    width, index = rollouts.mask_PGT.shape[-1], np.arange(rollouts.ended_PG.size)
    if rollouts.turn_PGT is not None:
        turns = split_turns(rollouts, index)
        return turns.by_completion(
            np.concatenate([
                _question_logprobs(policy, turns.rollouts.of_prompt(row), temperature)
                for row in range(turns.count)
            ]),
            (len(index), width),
        )  # fmt: skip
    rows = pack(rollouts, index, policy.pad_token, policy.model.device)
    with torch.inference_mode(), policy.computing():
        logprobs = token_logprobs(policy.model, rows, temperature).double().cpu().numpy()
    return np.pad(logprobs, ((0, 0), (0, width - logprobs.shape[1])))


def _score(
    items: list[tuple[int, Rollouts, Array, Array | None, Array | None]],
    options: PolicyOptions,
    sampler: SamplerOptions,
    budget: StudyBudget,
    stores: Mapping[TokenWeights, PoolStore],
) -> Iterator[WorkCost]:
    """Score and store the completions of each question with each kind of token weights."""
    policy = configured_policy(options)
    sketch, _ = score_sketches(budget, policy)
    for _, rollouts, rewards_N, old_NT, reference_NT in items:
        (prompt,), count = rollouts.prompts, len(rewards_N)
        missing = [x for x, store in stores.items() if not store.has_part(prompt, 0, count)]
        if missing:
            own_NT = _question_logprobs(policy, rollouts, sampler.temperature)
            old_NT = own_NT if old_NT is None else old_NT
            reference_NT = own_NT if reference_NT is None else reference_NT
        for weights in missing:
            assert old_NT is not None and reference_NT is not None
            part = weighted_part(
                policy, rollouts, rewards_N, sampler, sketch, weights, own_NT, old_NT, reference_NT
            )
            stores[weights].write(prompt, 0, part)
        yield WorkCost(rollouts=count * len(stores))


def weighted_part(
    policy: Policy,
    rollouts: Rollouts,
    rewards_N: Array,
    sampler: SamplerOptions,
    sketch: Sketch,
    weights: TokenWeights,
    own_NT: Array,
    old_NT: Array,
    reference_NT: Array,
) -> WeightedPart:
    """Score one question's completions with token weights.

    Args:
        policy: Policy that computes the scores.
        sampler: Settings of the sampler that wrote the completions.
        own_NT, old_NT, reference_NT: Log-probabilities under this policy, under the policy that
            wrote the completions, and under the reference model.
    """
    count = len(rewards_N)
    counts_NT = (rollouts.mask_PGT if rollouts.scored_PGT is None else rollouts.scored_PGT)[0]
    # An overflow is reported below as an error with the cause.
    with np.errstate(over="ignore", invalid="ignore"):
        factors_VT = np.concatenate([
            token_factors(weights, kind, own_NT, old_NT, counts_NT, reference_NT)
            for kind in weights.kinds
        ])  # fmt: skip
    # Vectors in which all factors are 0 have score 0.
    counted = np.flatnonzero(factors_VT.any(axis=1))
    gram_VV = np.zeros((len(factors_VT), len(factors_VT)))
    features_VR = np.zeros((len(factors_VT), sketch.dimension), np.float32)
    if len(counted):
        scores = score_rollouts(
            policy, rollouts, counted % count, sampler.temperature,
            token_weights_BT=factors_VT[counted], gram=True, features=sketch,
        )  # fmt: skip
        assert scores.gram_BB is not None and scores.features_BR is not None
        gram_VV[np.ix_(counted, counted)] = scores.gram_BB.cpu().numpy()
        features_VR[counted] = scores.features_BR.float().cpu().numpy()
    change_NT = np.where(counts_NT, own_NT - old_NT, 0.0)
    total_N = change_NT.sum(axis=1)
    if not np.isfinite(gram_VV).all():
        raise ConfigError(
            f"the importance ratios of completions of {rollouts.prompts[0].id} overflow (log ratio "
            f"up to {total_N.max():.0f}): the policy that wrote them is too far from the policy "
            "that scores them; use an earlier study.scored_by"
        )
    ratio_NT = np.exp(change_NT) * counts_NT
    # Dividing by the largest product avoids overflow.
    scaled_N = np.exp(total_N - total_N.max())
    drift = [
        ratio_NT.sum(), np.square(ratio_NT).sum(), counts_NT.sum(),
        total_N.max(), scaled_N.sum(), np.square(scaled_N).sum(),
        (np.expm1(change_NT) - change_NT).sum(),
    ]  # fmt: skip
    if weights.kl_in == "reward":
        rewards_N = rewards_N - reward_penalty(weights, old_NT, reference_NT, counts_NT)
    cost = question_cost(rollouts, 0)
    unlogged = replace(rollouts, logprobs_PGT=None)
    return WeightedPart(
        **vars(completions_of(policy, unlogged, 0, rewards_N[:, None], sampler, cost)),
        gram_VV=gram_VV,
        features_VR=features_VR,
        drift=np.array(drift, dtype=np.float64),
    )


def _pool_of(pool: ScorePool, weights: TokenWeights, parts: Sequence[WeightedPart]) -> ScorePool:
    """Return the pool with its scores replaced by scores of weighted tokens."""
    features_PVR = np.stack([part.features_VR for part in parts])
    return ScorePool(
        rewards_PN=np.stack([part.rewards_N for part in parts]),
        gram_PNN=np.stack([part.gram_VV for part in parts]),
        lengths_PN=pool.lengths_PN,
        ended_PN=pool.ended_PN,
        features_PNR=features_PVR,
        centred_sums_PR=None,
        kinds=weights.kinds,
    )
