r"""Error of an update of n rollouts with any baseline, with intervals for new questions.

The update ghat consists of B = n / G independently drawn questions with groups of G. Its error is

    MSE = E||ghat||^2 - 2 <E ghat, grad J> + ||grad J||^2

A baseline is treated as a loss whose rows all have weight 1/n. `estimators.losses` then gives the
moments in this formula. For many baselines they are means over all groups of G in the pool. For
other baselines they are means over randomly drawn groups. For baselines whose advantages depend on
the whole batch, they are means over randomly drawn batches.

Products of means use pairs of different questions, so the MSE and its interval apply to the
population from which the questions are sampled.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace

from grpo_ustat.estimators.efficiency import UpdateMoments, without
from grpo_ustat.estimators.intervals import jackknife_interval
from grpo_ustat.estimators.losses import LossRow, draws_behind, loss_moments, refusal
from grpo_ustat.estimators.minibatch import GradientError, scale_free
from grpo_ustat.estimators.row_weights import Loss
from grpo_ustat.records import Array, ScorePool


def baseline_rows(
    pool: ScorePool,
    baselines: Mapping[str, Mapping[str, float]],
    group_sizes: Sequence[int],
    rollouts: int,
) -> list[LossRow]:
    """Return a row for each baseline and G; it gives the reason if it cannot be measured.

    Args:
        pool: scored pool.
        baselines: options of each baseline, by name.
        group_sizes: group sizes, G.
        rollouts: number of rollouts per update, n.
    """
    losses = [Loss(name, name, options, "sum", 1) for name, options in baselines.items()]
    rows = [LossRow(loss, size, rollouts, None) for loss in losses for size in group_sizes]
    return [replace(x, reason=refusal(pool, x.loss, x.group_size, rollouts)) for x in rows]


def baseline_errors(
    pool: ScorePool,
    baselines: Mapping[str, Mapping[str, float]],
    group_sizes: Sequence[int],
    rollouts: int,
    draws: int,
    seed: int,
) -> dict[tuple[str, int], GradientError]:
    """Compute the errors of all baselines that can be measured, by baseline and G.

    Args:
        pool, baselines, group_sizes, rollouts: see `baseline_rows`.
        draws: number of pairs of random batches, for baselines whose advantages depend on the whole
            batch.
        seed: seed of the random draws.
    """
    measured: dict[Loss, list[int]] = {}
    for row in baseline_rows(pool, baselines, group_sizes, rollouts):
        sizes = measured.setdefault(row.loss, [])
        if row.reason is None:
            sizes.append(row.group_size)
    moments, signal_D = loss_moments(pool, measured, rollouts, draws, seed)
    return {
        (loss.baseline, size): _baseline_error(
            moments[loss, size], signal_D, draws_behind(pool, loss, size, draws)
        )
        for loss, sizes in measured.items()
        for size in sizes
    }


def _baseline_error(moments: UpdateMoments, signal_D: Array, draws: int | None) -> GradientError:
    mse_D = moments.energy_D - 2 * moments.cross_D + signal_D
    energy, cross, target_sq = (
        float(x_D[0]) for x_D in (moments.energy_D, moments.cross_D, signal_D)
    )
    variance = energy - float(moments.mean_sq_D[0])
    cosine, best = scale_free(energy, cross, target_sq)
    return GradientError(
        mse=jackknife_interval(float(mse_D[0]), without(mse_D), positive=True),
        bias2=float(mse_D[0]) - variance,
        variance=variance,
        cosine=cosine,
        best_scalar_mse=best,
        draws=draws,
    )
