r"""Moments of losses whose row weights depend on the whole batch, estimated from random batches.

Such a loss *couples* the prompts of a batch. The batches are drawn from the stored completions of a
pool. A draw consists of two batches without common prompts. Each batch has B prompts, and a group
of G completions of each prompt. Let ghat and ghat' be the updates of the two batches, and g_y the
gradient estimates of the prompts in neither batch. The unbiased estimates of the moments are

    E||ghat||^2        ||ghat||^2, from Gram matrices within prompts and sketches between prompts
    ||E ghat||^2       <ghat, ghat'>
    <E ghat, grad J>   <ghat, mean of g_y>

With few batches, these estimates have large errors. Therefore only the effect of the coupling is
estimated from draws. The additive loss is the same loss without the coupling, and its moments are
known from all groups (`estimators.group_terms`). On each drawn batch, the update of the additive
loss times the best-fitting factor alpha serves as the control variate. The draws give the mean
difference between the moments of the loss and the moments of the control variate. This difference
is added to the moments of the control variate over all groups.

In the jackknife, the value without a prompt is the mean over the draws that do not contain this
prompt, because these are draws from the other prompts.

If the loss replaces groups with equal rewards, prompts are tried until B of them have a group with
unequal rewards. Prompts whose groups were replaced also count as part of the draw, so the mean of
g_y includes only prompts that were not tried.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

import numpy as np

from grpo_ustat.draws import generator
from grpo_ustat.estimators.baselines import BASELINES
from grpo_ustat.estimators.efficiency import UpdateMoments
from grpo_ustat.estimators.group_terms import context_of
from grpo_ustat.estimators.row_weights import (
    COUPLED,
    Loss,
    RowFilter,
    mixed_groups,
    row_weights,
)
from grpo_ustat.records import Array, Integers, Mask, ScorePool

# A draw requires this many times the B questions of a batch: two batches of B questions, and at
# least B questions outside both batches.
QUESTIONS_A_PROMPT = 3


@dataclass(frozen=True)
class Batch:
    """One of the two batches of a draw."""

    prompt_B: Integers
    # Index of each completion of a group in the pool of its prompt.
    place_BG: Integers
    # Order of the rows before they are split into micro-batches.
    order_N: Integers
    # All prompts that were tried: those of the batch, and those whose groups were replaced.
    tried: Integers


def additive_part(loss: Loss, group_size: int) -> Loss:
    """Return the loss without the parts that couple prompts.

    If the loss replaces groups with equal rewards, the result replaces them too.
    """
    baseline, options = loss.baseline, loss.options
    if baseline == "gdpo":
        # Unlike gdpo, group_std uses only the weighted sum of the reward functions.
        baseline = "group_std"
    elif BASELINES[baseline].couples_prompts:
        baseline, options = "group_mean" if group_size > 1 else "none", {}
    loss_type = "sum" if loss.loss_type in COUPLED else loss.loss_type
    return replace(
        loss, baseline=baseline, options=options, loss_type=loss_type, micro_batch_size=None,
        rows=RowFilter(loss.rows.zero_variance_groups) if loss.rows.replaces else RowFilter(),
    )  # fmt: skip


def prompts_needed(prompts: int, kept: float = 1.0) -> int:
    """Return how many questions are needed to draw two batches of B prompts each.

    Args:
        prompts: number of prompts in a batch, B.
        kept: share of groups that are not replaced, K. On average, 1/K questions are tried for each
            prompt of a batch.

    >>> prompts_needed(16), prompts_needed(16, 0.5)
    (48, 96)
    """
    return math.ceil(QUESTIONS_A_PROMPT * prompts / kept)


def drawn_batches(
    questions: int, completions: int, prompts: int, group_size: int, draws: int, seed: int
) -> Iterator[tuple[Batch, Batch]]:
    """Yield draws of two batches without common prompts; equal arguments give equal draws.

    Args:
        questions, completions: number of questions in the pool, and of completions per question.
        prompts: number of prompts per batch, B.
        group_size: group size, G.
        draws: number of draws.
        seed: seed of the draws.
    """
    for draw in range(draws):
        rng = generator(seed, "losses", draw, str(group_size))
        order_M = rng.permutation(questions)[: 2 * prompts]
        place_MN = rng.permuted(np.tile(np.arange(completions), (2 * prompts, 1)), axis=1)
        first, second = (
            Batch(
                order_M[half], place_MN[half, :group_size], rng.permutation(prompts * group_size),
                order_M[half],
            )
            for half in (slice(prompts), slice(prompts, None))
        )  # fmt: skip
        yield first, second


def drawn_mixed_batches(
    rewards_PN: Array, prompts: int, group_size: int, draws: int, seed: int
) -> Iterator[tuple[Batch, Batch]]:
    """Yield draws of two batches of mixed groups, that is, groups with unequal rewards.

    Equal arguments give equal draws. Each prompt is tried at most once in a draw. Because prompts
    and their groups are independent, the mixed groups have the same distribution for any number of
    tries: the distribution of groups given that their rewards are unequal. A draw with too few
    mixed groups is repeated, which does not change this distribution.

    Args:
        rewards_PN: rewards of the pool.
        prompts, group_size, draws, seed: see `drawn_batches`.
    """
    questions, completions = rewards_PN.shape
    place_N = np.arange(completions, dtype=np.int64)
    for draw in range(draws):
        rng = generator(seed, "mixed losses", draw, str(group_size))
        while True:
            order_P = rng.permutation(questions)
            place_PN = rng.permuted(np.tile(place_N, (questions, 1)), axis=1)
            place_PG = place_PN[:, :group_size]
            mixed = np.flatnonzero(mixed_groups(rewards_PN[order_P[:, None], place_PG]))
            # At least two prompts must remain untried, so that one remains when the jackknife
            # leaves out the other.
            if len(mixed) >= 2 * prompts and mixed[2 * prompts - 1] < questions - 2:
                break
        ends = 0, mixed[prompts - 1] + 1, mixed[2 * prompts - 1] + 1
        first, second = (
            Batch(
                order_P[members], place_PG[members], rng.permutation(prompts * group_size),
                order_P[ends[half] : ends[half + 1]],
            )
            for half, members in enumerate((mixed[:prompts], mixed[prompts : 2 * prompts]))
        )  # fmt: skip
        yield first, second


def coupled_moments(
    pool: ScorePool,
    gradient_PR: Array,
    losses: Sequence[Loss],
    additive: Sequence[UpdateMoments],
    draws: Sequence[tuple[Batch, Batch]],
) -> list[UpdateMoments]:
    """Estimate the moments of the updates of losses that couple prompts, from the same draws.

    Args:
        pool: scored completions.
        gradient_PR: sketch of each prompt's gradient, estimated from the pool.
        losses: losses that couple prompts.
        additive: moments of the `additive_part` of each loss, for the B and G of the draws.
        draws: pairs of batches from `drawn_batches`, or from `drawn_mixed_batches` if the losses
            replace groups.
    """
    questions, group_size = len(pool.rewards_PN), draws[0][0].place_BG.shape[1]
    both = [*losses, *(additive_part(loss, group_size) for loss in losses)]
    inside_DP = np.zeros((len(draws), 2, questions), dtype=bool)
    energy = np.zeros((2, len(losses), len(draws), 2))
    between = np.zeros((2, len(losses), len(draws)))
    along_DP = np.zeros((2, len(losses), len(draws), questions))
    products, squares = np.zeros(len(losses)), np.zeros(len(losses))
    for draw, batches in enumerate(draws):
        updates: list[Array] = []
        for which, batch in enumerate(batches):
            inside_DP[draw, which, batch.tried] = True
            weights = np.array([_weights(pool, loss, batch) for loss in both])
            weights = weights.reshape(2, len(losses), *weights.shape[1:])
            products += (weights[0] * weights[1]).sum(axis=(1, 2))
            squares += np.square(weights[1]).sum(axis=(1, 2))
            energy[:, :, draw, which], update = _update(pool, batch, weights)
            updates.append(update)
        between[:, :, draw] = (updates[0] * updates[1]).sum(axis=-1)
        along_DP[:, :, draw] = (updates[0] + updates[1]) / 2 @ gradient_PR.T
    lacks_DP: Mask = np.logical_not(inside_DP.reshape(-1, questions))
    outside_DP: Mask = np.logical_not(inside_DP.any(axis=1))
    moments: list[UpdateMoments] = []
    # If no drawn group has unequal rewards, the additive part is 0 in every draw, and alpha is 0.
    alphas = np.divide(products, squares, out=np.zeros(len(losses)), where=squares > 0)
    for number, (alpha, plain) in enumerate(zip(alphas, additive, strict=True)):
        energy_change = energy[0, number] - alpha**2 * energy[1, number]
        pair = between[0, number] - alpha**2 * between[1, number]
        toward = along_DP[0, number] - alpha * along_DP[1, number]
        energy_change_D = _mean_and_without(energy_change.ravel(), lacks_DP)
        moments.append(
            UpdateMoments(
                energy_D=alpha**2 * plain.energy_D + energy_change_D,
                mean_sq_D=alpha**2 * plain.mean_sq_D + _mean_and_without(pair, outside_DP),
                cross_D=alpha * plain.cross_D + _toward_others(toward, outside_DP),
                scale=None,
            )
        )
    return moments


def _weights(pool: ScorePool, loss: Loss, batch: Batch) -> Array:
    """Compute the row weights of a batch, [B, V].

    V is the number of vectors of a group: for each kind of vector, one for each completion.
    """
    rows = batch.prompt_B[:, None], batch.place_BG
    rewards_BG = pool.rewards_PN[rows]
    ended_BG = None if pool.ended_PN is None else pool.ended_PN[rows]
    context = context_of(pool, *rows)
    return np.concatenate(
        list(row_weights(loss, rewards_BG, context, ended_BG, batch.order_N)), axis=1
    )


def _update(pool: ScorePool, batch: Batch, weights: Array) -> tuple[Array, Array]:
    """Compute the squared norm and the sketch of an update.

    Args:
        pool: scored pool.
        batch: completions of the update.
        weights: one or several sets of row weights, [..., B, V]; see `_weights`.

    Returns:
        ||ghat||^2 for each set of weights, [...], and the sketch of ghat, [..., R].
    """
    completions = pool.rewards_PN.shape[1]
    place_BV = np.concatenate(
        [batch.place_BG + kind * completions for kind in range(len(pool.kinds))], axis=1
    )
    features_BVR = pool.features_PNR[batch.prompt_B[:, None], place_BV]
    gram_BVV = pool.gram_PNN[batch.prompt_B[:, None, None], place_BV[:, :, None], place_BV[:, None]]
    by_prompt_BWV = np.moveaxis(weights, -2, 0).reshape(len(place_BV), -1, weights.shape[-1])
    sketch_BWR = by_prompt_BWV.astype(np.float32) @ features_BVR
    sketch = np.moveaxis(sketch_BWR, 0, -2).reshape(*weights.shape[:-1], -1).astype(np.float64)
    within = np.einsum("...bv,bvu,...bu->...", weights, gram_BVV, weights, optimize=True)
    total = sketch.sum(axis=-2)
    between = np.square(total).sum(axis=-1) - np.square(sketch).sum(axis=(-2, -1))
    return within + between, total


def _mean_and_without(values_D: Array, lacks_DP: Mask) -> Array:
    """Return the mean over all draws, then the means over the draws without each prompt, [1 + P].

    Args:
        values_D: value of each of D draws.
        lacks_DP: True if the draw does not contain the prompt.
    """
    return _without_drawing_noise(values_D, values_D @ lacks_DP, lacks_DP)


def _toward_others(along_DP: Array, outside_DP: Mask) -> Array:
    """Return the mean product of updates with the gradients of prompts in neither batch, [1 + P].

    The first value uses all prompts, and each of the other P values leaves out one prompt.

    Args:
        along_DP: inner product of the update in draw d with the gradient of prompt p.
        outside_DP: True if the prompt is in neither batch of the draw.
    """
    outside = along_DP * outside_DP
    total_D, count_D = outside.sum(axis=1), outside_DP.sum(axis=1)
    without_DP = (total_D[:, None] - outside) / (count_D[:, None] - 1)
    return _without_drawing_noise(
        total_D / count_D, (without_DP * outside_DP).sum(axis=0), outside_DP
    )


def _without_drawing_noise(values_D: Array, sums_P: Array, lacks_DP: Mask) -> Array:
    """Return a mean over draws, then the mean without each prompt for the jackknife, [1 + P].

    Without a prompt, fewer draws remain, so the mean changes even if the prompt has no influence.
    Let v be the variance of one draw's value, D the number of draws, and D_x the number of draws
    that do not contain prompt x. On average, the smaller number of draws adds `v (1/D_x - 1/D)` to
    the squared change of the mean. The changes are therefore shrunk. The sum of their squares,
    which is the jackknife variance, is then the variance due to prompts plus v/D, the variance due
    to the draws.

    Args:
        values_D: value of every draw.
        sums_P: for each prompt, the sum of the values over the draws that do not contain it.
        lacks_DP: True if the draw does not contain the prompt. If a prompt is in every draw, the
            mean without it is set to the mean over all draws.
    """
    mean, variance, count = values_D.mean(), values_D.var(ddof=1), len(values_D)
    lacks_P = lacks_DP.sum(axis=0)
    change_P = np.where(lacks_P > 0, sums_P / np.maximum(lacks_P, 1) - mean, 0.0)
    noise = variance * (1 / np.maximum(lacks_P, 1) - 1 / count).sum()
    total = np.square(change_P).sum()
    share = (max(0.0, total - noise) + variance / count) / total if total > 0 else 1.0
    return np.concatenate([[mean], mean + np.sqrt(min(1.0, share)) * change_P])
