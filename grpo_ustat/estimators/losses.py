"""Relative efficiency of losses, computed from a scored pool without running the model."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple

import numpy as np

from grpo_ustat.draws import generator
from grpo_ustat.estimators.baselines import BASELINES, OF_THE_BATCH
from grpo_ustat.estimators.coupled_losses import (
    additive_part,
    coupled_moments,
    drawn_batches,
    drawn_mixed_batches,
    prompts_needed,
)
from grpo_ustat.estimators.efficiency import (
    LossError,
    RelativeEfficiency,
    UpdateMoments,
    best_sizes,
    loss_error,
    product_of_means,
    relative_efficiency,
    update_moments,
)
from grpo_ustat.estimators.group_terms import (
    GroupTerms,
    LevelSums,
    drawn_terms,
    has_levels,
    is_linear,
    linear_terms,
    with_control,
)
from grpo_ustat.estimators.intervals import Interval, clustered_wilson
from grpo_ustat.estimators.moments import pool_gradient_weights
from grpo_ustat.estimators.row_weights import Loss, RowFilter
from grpo_ustat.estimators.token_weights import TokenWeights
from grpo_ustat.estimators.ustatistic import zero_variance_share
from grpo_ustat.records import MIN_QUESTIONS, Array, ScorePool

UNBIASED = Loss("leave_one_out", "leave_one_out", {}, "sum", 1)
# Fields that a baseline can read only if the pool has several reward functions.
OF_FUNCTIONS = {"rewards_PGF", "reward_weights_F"}
# Fields that a baseline can read from any pool.
FROM_A_POOL = OF_THE_BATCH - OF_FUNCTIONS
# Number of random groups per question if the groups of a pool cannot all be enumerated.
DRAWN_GROUPS = 256


class Refusal(NamedTuple):
    """Reason why a loss cannot be measured on a pool at a group size."""

    # Name of the condition in `refusal` that is not satisfied: "questions", "baseline reads more",
    # "baseline remembers", "baseline's groups", "completions", "no multiple", "mixed questions",
    # "micro-batches", "baseline's prompts" or "coupled questions".
    kind: str
    # One line for users: the reason, and where possible the setting that would avoid it.
    line: str
    # Required and available number, for example of questions; both are 0 if the condition does not
    # count anything.
    needed: int = 0
    available: int = 0


@dataclass(frozen=True)
class LossRow:
    """Relative efficiency of a loss at one group size."""

    loss: Loss
    # Group size, G.
    group_size: int
    # Number of rollouts per update, n.
    rollouts: int
    # None if the efficiency cannot be measured; see `reason`.
    efficiency: RelativeEfficiency | None
    # True if this G has the smallest estimated error of the measured group sizes of this loss.
    best: bool = False
    # True if the error at this G is not significantly larger than the smallest error.
    may_be_best: bool = False
    # Reason why the efficiency cannot be measured; None if it can.
    reason: Refusal | None = None
    # Share K of generated groups that are not replaced; None if the loss does not replace groups.
    kept: Interval | None = None


def loss_efficiencies(
    pool: ScorePool,
    losses: Sequence[Loss],
    group_sizes: Sequence[int],
    rollouts: int,
    draws: int,
    seed: int,
    weighted: Mapping[TokenWeights, ScorePool] | None = None,
) -> list[LossRow]:
    """Estimate the relative efficiency of each loss at each G; intervals apply to new questions.

    `estimators.efficiency` defines the relative efficiency.

    Args:
        pool: N scored completions for each of at least 4 questions. The gradient and the error of
            the unbiased loss are also estimated from this pool.
        losses: losses to measure.
        group_sizes: group sizes G to measure.
        rollouts: number of rollouts per update, n.
        draws: number of pairs of random batches, for losses whose row weights depend on the whole
            batch.
        seed: seed of the random draws.
        weighted: pools of the same questions that were scored with token weights, keyed by these
            weights; needed for losses with token weights.
    """
    weighted = weighted or {}
    refusals = {
        (loss, size): refusal(_pool_of(loss, pool, weighted), loss, size, rollouts)
        for loss in losses
        for size in group_sizes
    }
    sizes = [size for size in group_sizes if refusal(pool, UNBIASED, size, rollouts) is None]
    measured = {loss: [size for size in sizes if refusals[loss, size] is None] for loss in losses}
    errors: dict[tuple[Loss, int], LossError] = {}
    if sizes:
        measured_too = {UNBIASED: sizes} | measured
        errors = loss_errors(pool, measured_too, rollouts, draws, seed, weighted)
    unbiased = {size: errors[UNBIASED, size].error_D for size in sizes}
    rows = [
        LossRow(loss, size, rollouts, None, reason=reason)
        for (loss, size), reason in refusals.items()
        if reason is not None
    ]
    for loss, measured_sizes in measured.items():
        if not measured_sizes:
            continue
        best, others = best_sizes({x: errors[loss, x].error_D for x in measured_sizes})
        rows += [
            LossRow(
                loss,
                size,
                rollouts,
                relative_efficiency(errors[loss, size], size, unbiased),
                best=size == best,
                may_be_best=size in others,
                kept=kept_share(_pool_of(loss, pool, weighted), size)
                if loss.rows.replaces
                else None,
            )
            for size in measured_sizes
        ]
    return sorted(rows, key=lambda row: (losses.index(row.loss), row.group_size))


def loss_errors(
    pool: ScorePool,
    measured: Mapping[Loss, Sequence[int]],
    rollouts: int,
    draws: int,
    seed: int,
    weighted: Mapping[TokenWeights, ScorePool] | None = None,
) -> dict[tuple[Loss, int], LossError]:
    """Estimate the error of an update of n rollouts, by loss and G.

    Args:
        pool: scored pool.
        measured: group sizes G by loss; `refusal` must return None for each pair.
        rollouts, draws, seed, weighted: see `loss_efficiencies`.
    """
    moments, signal_D = loss_moments(pool, measured, rollouts, draws, seed, weighted)
    return {key: loss_error(of_update, signal_D) for key, of_update in moments.items()}


def loss_moments(
    pool: ScorePool,
    measured: Mapping[Loss, Sequence[int]],
    rollouts: int,
    draws: int,
    seed: int,
    weighted: Mapping[TokenWeights, ScorePool] | None = None,
) -> tuple[dict[tuple[Loss, int], UpdateMoments], Array]:
    """Estimate the moments of an update of n rollouts, by loss and G.

    Args:
        pool, measured, rollouts, draws, seed, weighted: see `loss_errors`.

    Returns:
        The moments by loss and G. ||grad J||^2, estimated from all prompts and without each prompt
        in turn, [D].
    """
    weighted = weighted or {}
    questions, completions = pool.rewards_PN.shape
    weights_PN = pool_gradient_weights(pool.rewards_PN)
    gradient_PR = np.einsum("pn,pnr->pr", weights_PN, pool.features_PNR, optimize=True)
    moments: dict[tuple[Loss, int], UpdateMoments] = {}
    sums: dict[_LengthKind, LevelSums] = {}
    # `sums` caches the sums by reward level for one kind of length factor. The losses are sorted so
    # that losses with the same kind follow each other.
    for loss in sorted(measured, key=lambda loss: repr(_length_kind(additive_part(loss, 2)))):
        own_pool = _pool_of(loss, pool, weighted)
        for size in measured[loss]:
            moments[loss, size] = update_moments(
                _terms(own_pool, additive_part(loss, size), size, sums, seed, pool), gradient_PR,
                rollouts / size, None if loss.couples_prompts else loss.scale(size),
            )  # fmt: skip
    # Losses that can use the same random batches are measured together.
    coupled: dict[tuple[int, bool, TokenWeights | None], list[Loss]] = {}
    for loss, size in moments:
        if loss.couples_prompts:
            coupled.setdefault((size, loss.rows.replaces, loss.tokens), []).append(loss)
    for (size, replaces, _), sharing in coupled.items():
        prompts, own_pool = rollouts // size, _pool_of(sharing[0], pool, weighted)
        batches = drawn_batches(questions, completions, prompts, size, draws, seed)
        if replaces:
            batches = drawn_mixed_batches(own_pool.rewards_PN, prompts, size, draws, seed)
        parts = [moments[loss, size] for loss in sharing]
        updates = coupled_moments(own_pool, gradient_PR, sharing, parts, list(batches))
        moments |= zip([(loss, size) for loss in sharing], updates, strict=True)
    return moments, product_of_means(gradient_PR, gradient_PR)


def refusal(pool: ScorePool, loss: Loss, group_size: int, rollouts: int) -> Refusal | None:
    """Return the reason why a loss cannot be measured on a pool at G; None if it can be."""
    questions, completions = pool.rewards_PN.shape
    baseline, prompts = BASELINES[loss.baseline], rollouts // group_size
    named = f"baseline {loss.baseline}"
    if questions < MIN_QUESTIONS:
        few = "1 question is" if questions == 1 else f"{questions} questions are"
        line = f"{few} too few for an interval: use at least study.questions={MIN_QUESTIONS}"
        return Refusal("questions", line, MIN_QUESTIONS, questions)
    missing = baseline.needs - FROM_A_POOL
    if missing - (OF_FUNCTIONS if pool.reward_weights_F is not None else set()):
        line = f"{named} reads {', '.join(sorted(missing))}, which a pool of one policy lacks"
        return Refusal("baseline reads more", line)
    if baseline.only_trains:
        line = f"{named} uses past batches, which a pool does not have"
        return Refusal("baseline remembers", line)
    if group_size < baseline.min_group_size:
        line = f"{named} needs groups of {baseline.min_group_size} or more"
        return Refusal("baseline's groups", line, baseline.min_group_size, group_size)
    if group_size > completions:
        line = (
            f"groups of {group_size} need {group_size} completions per question, but the pool has "
            f"{completions}: use budget.pool_completions={group_size}, or log larger groups"
        )
        return Refusal("completions", line, group_size, completions)
    if rollouts % group_size:
        line = f"study.rollouts={rollouts} is not a multiple of the group size {group_size}"
        return Refusal("no multiple", line)
    kept = 1.0
    if loss.rows.replaces:
        kept_P = 1 - zero_variance_share(pool.rewards_PN, group_size)
        mixed, kept = int((kept_P > 0).sum()), float(kept_P.mean())
        if mixed < MIN_QUESTIONS:
            line = (
                f"{mixed} questions can have groups of {group_size} with unequal rewards, but at "
                f"least {MIN_QUESTIONS} such questions are needed"
            )
            return Refusal("mixed questions", line, MIN_QUESTIONS, mixed)
    if not loss.couples_prompts:
        return None
    if loss.micro_batch_size is not None and rollouts % loss.micro_batch_size:
        line = f"{rollouts} rollouts cannot be split into micro-batches of {loss.micro_batch_size}"
        return Refusal("micro-batches", line)
    if prompts < baseline.min_prompts:
        line = (
            f"{named} needs {baseline.min_prompts} prompts in an update, but "
            f"study.rollouts={rollouts} in groups of {group_size} gives {prompts}"
        )
        return Refusal("baseline's prompts", line, baseline.min_prompts, prompts)
    needed = prompts_needed(prompts, kept)
    if needed > questions:
        line = (
            f"row weights depend on all {prompts} questions of an update, and a measurement with "
            f"such updates needs {needed} questions, got {questions}: use "
            f"study.questions={needed}"
        )
        return Refusal("coupled questions", line, needed, questions)
    return None


def kept_share(pool: ScorePool, group_size: int) -> Interval:
    """Estimate K, the share of groups of G with unequal rewards, with its interval."""
    most = pool.rewards_PN.shape[1] // group_size
    return clustered_wilson(1 - zero_variance_share(pool.rewards_PN, group_size), most)


def draws_behind(pool: ScorePool, loss: Loss, group_size: int, draws: int) -> int | None:
    """Return the number of random draws behind the moments of a loss; None if all groups are used.

    If the row weights of the loss depend on the whole batch, a draw is a pair of batches. For other
    losses, a draw is one group from each question.

    Args:
        pool, loss, group_size: see `refusal`.
        draws: see `loss_moments`.
    """
    if loss.couples_prompts:
        return draws
    return None if has_levels(pool, loss.baseline, group_size) or is_linear(loss) else DRAWN_GROUPS


def _pool_of(loss: Loss, pool: ScorePool, weighted: Mapping[TokenWeights, ScorePool]) -> ScorePool:
    """Return the pool that was scored with the token weights of a loss."""
    return pool if loss.tokens is None else weighted[loss.tokens]


_LengthKind = tuple[str, int, bool, TokenWeights | None]


def _length_kind(loss: Loss) -> _LengthKind:
    """Return the settings of a loss that determine its `LevelSums`."""
    cut = loss.mask_truncated_completions
    return loss.loss_type, loss.max_completion_length, cut, loss.tokens


def _terms(
    pool: ScorePool,
    loss: Loss,
    group_size: int,
    sums: dict[_LengthKind, LevelSums],
    seed: int,
    unweighted: ScorePool,
) -> GroupTerms:
    """Compute the terms of a loss whose row weights depend only on their own group.

    Args:
        pool: completions scored with the token weights of the loss.
        loss: loss.
        group_size: group size, G.
        sums: cache of the sums for the last kind of length factor; updated in place.
        seed: seed of the random groups.
        unweighted: pool scored without token weights. If groups are drawn at random, the loss with
            the unbiased baseline on this pool serves as the control variate.
    """
    if has_levels(pool, loss.baseline, group_size):
        key = _length_kind(loss)
        if key not in sums:
            # The cache keeps a single entry, because an entry for many questions takes gigabytes.
            sums.clear()
            sums[key] = LevelSums(pool, loss.length_factors(pool.lengths_PN, pool.ended_PN))
        return sums[key].terms(
            loss.baseline, loss.options, group_size, loss.rows.replaces, loss.beta
        )
    if is_linear(loss):
        return linear_terms(pool, loss, group_size)
    questions, completions = pool.rewards_PN.shape
    # All losses use the same drawn groups, and the groups at a smaller G are subsets of the groups
    # at a larger G.
    rng = generator(seed, "groups")
    place_N = np.arange(completions, dtype=np.int64)
    place_PDN = rng.permuted(np.tile(place_N, (questions, DRAWN_GROUPS, 1)), axis=2)
    place_PDG = place_PDN[..., :group_size]
    drawn = drawn_terms(pool, loss, place_PDG)
    if group_size < BASELINES[UNBIASED.baseline].min_group_size:
        return drawn
    plain = replace(loss, baseline=UNBIASED.baseline, options={}, rows=RowFilter(), tokens=None)
    control = drawn_terms(unweighted, plain, place_PDG)
    return with_control(drawn, control, linear_terms(unweighted, plain, group_size))
