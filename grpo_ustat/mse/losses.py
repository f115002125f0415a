"""What a rollout of each loss is worth, from a scored pool: no further pass of the model."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np

from grpo_ustat.estimators.baselines import BASELINES
from grpo_ustat.estimators.group_terms import GroupTerms, LevelSums, drawn_terms, has_levels
from grpo_ustat.estimators.moments import pool_gradient_weights
from grpo_ustat.estimators.row_weights import Loss
from grpo_ustat.estimators.worth import (
    Worth,
    alike,
    loss_error,
    product_of_means,
    update_moments,
    worth,
)
from grpo_ustat.mse.coupled_losses import (
    additive_part,
    coupled_moments,
    drawn_batches,
    most_prompts,
)
from grpo_ustat.records import Array, ScorePool
from grpo_ustat.rollout.draws import generator

LEAST_QUESTIONS = 4  # of which a delete-one interval can be made
UNBIASED = Loss("leave_one_out", "leave_one_out", {}, "sum", 1)
FROM_A_POOL = {"lengths_PG"}  # what a rule may read of a row besides its reward
DRAWN_GROUPS = 64  # of each question, of a rule whose groups cannot be counted by levels


@dataclass(frozen=True)
class LossRow:
    """A loss at one group size.

    Attributes:
        loss: which.
        group_size: G.
        worth: None where `reason` says why it is not measured.
        best: whether this G is the best of the measured ones for the loss at this n.
        alike: whether it is not significantly worse than the best.
        reason: of an absent worth.
    """

    loss: Loss
    group_size: int
    worth: Worth | None
    best: bool = False
    alike: bool = False
    reason: str | None = None


def loss_worths(
    pool: ScorePool,
    losses: Sequence[Loss],
    group_sizes: Sequence[int],
    rollouts: int,
    draws: int,
    seed: int,
) -> list[LossRow]:
    """What a rollout of each loss is worth at each G, for new questions, see `estimators.worth`.

    Args:
        pool: N scored completions of each of 4 questions or more.
        losses: which.
        group_sizes: every G.
        rollouts: n of an update.
        draws: pairs of batches behind losses that couple their rows.
        seed: of draws.
    """
    measured = _Measured(pool, rollouts, draws, seed)
    unbiased = {
        size: rollouts * measured.errors([UNBIASED], size)[0].error_D
        for size in group_sizes
        if measured.refusal(UNBIASED, size) is None
    }
    rows: list[LossRow] = []
    for loss in losses:
        rows += [
            LossRow(loss, size, None, reason=reason)
            for size in group_sizes
            if (reason := measured.refusal(loss, size)) is not None
        ]
    least_D = min(unbiased.values(), key=lambda values_D: values_D[0], default=None)
    if least_D is None:
        return rows
    found = {}
    for size in unbiased:
        own = [loss for loss in losses if measured.refusal(loss, size) is None]
        errors = measured.errors(own, size)
        found |= {(loss.name, size): error for loss, error in zip(own, errors, strict=True)}
    for loss in losses:
        own = {size: found[loss.name, size] for size in unbiased if (loss.name, size) in found}
        if not own:
            continue
        best, others = alike({size: x.error_D for size, x in own.items()}, pool.metrics)
        rows += [
            LossRow(
                loss,
                size,
                worth(error, unbiased[size], least_D, rollouts, pool.metrics),
                best=size == best,
                alike=size in others,
            )
            for size, error in own.items()
        ]
    return sorted(rows, key=lambda row: (losses.index(row.loss), row.group_size))
