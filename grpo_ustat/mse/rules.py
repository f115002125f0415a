r"""The error of any rule's update of n rollouts, for new questions: no closed form is needed.

A rule is the loss whose rows weigh 1/n, so that the moments of its update ghat are those of
`estimators.losses`: over all groups of G of the pool where their levels can be counted, over drawn
groups else, over drawn batches of rules that couple the questions of a batch. With B = n / G
questions drawn independently,

    MSE = E||ghat||^2 - 2 <E ghat, grad J> + ||grad J||^2

in which products of means are those of different questions, so that the number and its interval
are of the population that the questions are a sample of.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from grpo_ustat.estimators.intervals import Interval, jackknife_interval
from grpo_ustat.estimators.losses import LossRow, draws_behind, loss_moments, refusal
from grpo_ustat.estimators.row_weights import Loss
from grpo_ustat.estimators.worth import UpdateMoments, without
from grpo_ustat.records import Array, ScorePool
from grpo_ustat.runs.study_parts import NotMeasured


@dataclass(frozen=True)
class RuleError:
    """The error of a rule's update at one group size."""

    baseline: str
    group_size: int
    # With its interval for new questions; `bias2` and `variance` are its parts.
    mse: Interval
    bias2: float
    variance: float
    # E||ghat||^2, <E ghat, grad J> and ||grad J||^2.
    energy: float
    cross: float
    target_sq: float
    # Groups drawn of each question, or pairs of batches; None where all groups count.
    draws: int | None


def rule_errors(
    pool: ScorePool,
    rules: Mapping[str, Mapping[str, float]],
    group_sizes: Sequence[int],
    rollouts: int,
    draws: int,
    seed: int,
) -> tuple[list[RuleError], list[NotMeasured]]:
    """Compute the errors of rules at every G, and list those that a pool does not tell.

    Args:
        rules: options by rule.
        rollouts: n of an update.
        draws: pairs of batches behind rules that couple the questions of a batch.
    """
    losses = [Loss(name, name, options, "sum", 1) for name, options in rules.items()]
    rows = [LossRow(loss, size, rollouts, None) for loss in losses for size in group_sizes]
    rows = [replace(x, reason=refusal(pool, x.loss, x.group_size, rollouts)) for x in rows]
    absent = [
        NotMeasured(baseline=row.loss.rule, group_size=row.group_size, reason=row.reason.line)
        for row in rows
        if row.reason is not None
    ]
    measured = {
        loss: [row.group_size for row in rows if row.loss is loss and row.reason is None]
        for loss in losses
    }
    moments, signal_D = loss_moments(pool, measured, rollouts, draws, seed)
    errors = [
        _rule_error(
            loss, size, moments[loss, size], signal_D, pool.metrics,
            draws_behind(pool, loss, size, draws),
        )
        for loss, sizes in measured.items()
        for size in sizes
    ]  # fmt: skip
    return errors, absent


def _rule_error(
    loss: Loss,
    group_size: int,
    moments: UpdateMoments,
    signal_D: Array,
    metrics: int,
    draws: int | None,
) -> RuleError:
    mse_D = moments.energy_D - 2 * moments.cross_D + signal_D
    variance = float(moments.energy_D[0] - moments.mean_sq_D[0])
    return RuleError(
        baseline=loss.rule,
        group_size=group_size,
        mse=jackknife_interval(float(mse_D[0]), without(mse_D, metrics), positive=True),
        bias2=float(mse_D[0]) - variance,
        variance=variance,
        energy=float(moments.energy_D[0]),
        cross=float(moments.cross_D[0]),
        target_sq=float(signal_D[0]),
        draws=draws,
    )
