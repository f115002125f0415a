r"""Replay of rules that couple the questions of a batch: all questions' groups at once.

A draw takes a group A from every question, a batch of questions, and the rule's advantages of that
batch. With w_x the weights of the batch's estimate `T_A = sum_x F_x' w_x` in question x's scores,
`v_x = F_x' w_x` and K_x the Gram matrix,

    ||T_A||^2 = sum_x w_x' K_x w_x + ||sum_x v_x||^2 - sum_x ||v_x||^2

exactly within questions and unbiased between them; likewise <T_A, T_B> with disjoint groups B, and
<T_A, grad J> with the gradient of the completions outside every question's A: advantages depend on
all questions' groups, so all groups must be kept out.

Intervals come from random groups: the pool is split into disjoint sub-pools of every question, each
a study of its own; the t interval of their mean also covers the noise of the draws.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace

import numpy as np

from grpo_ustat.draws import generator
from grpo_ustat.estimators.baselines import BASELINES, advantages
from grpo_ustat.estimators.intervals import Interval, t_interval
from grpo_ustat.estimators.minibatch import scale_free
from grpo_ustat.estimators.moments import pool_gradient_weights, pool_moments
from grpo_ustat.mse.replay_draws import LEAST_OUTSIDE, draw_orders, rest_mask, rest_weights, scatter
from grpo_ustat.records import Array, BaselineContext, Integers, Mask, ScorePool

MOST_DRAWS = 1000  # of all sub-pools together; each draw averages over all questions
MOST_PARTS = 5  # beyond, sub-pools are small, their errors skewed and the interval too short


Row = tuple[str, str, int | None, int, Interval, float, float, float | None, float | None]


@dataclass(frozen=True)
class _SubPoolEstimate:
    """Estimates from one sub-pool of the moments of the batch's estimate T.

    Attributes:
        energy: E||T||^2.
        cross: <E T, grad J>.
        target_sq: ||grad J||^2.
        mean_sq: ||E T||^2; NaN where the sub-pool has no room for two disjoint groups.
    """

    energy: float
    cross: float
    target_sq: float
    mean_sq: float

    @property
    def mse(self) -> float:
        """E||T - grad J||^2."""
        return self.energy - 2 * self.cross + self.target_sq

    @property
    def bias2(self) -> float:
        """||E T - grad J||^2."""
        return self.mean_sq - 2 * self.cross + self.target_sq


def replay_coupled(
    pool: ScorePool,
    name: str,
    options: Mapping[str, float],
    size: int,
    settings: list[tuple[str, int | None]],
    draws: int,
    seed: int,
    interval: str,
) -> Iterator[Row]:
    """Rows (target, setting, B, draws, mse, bias2, variance, cosine, best_scalar_mse) of a coupled
    rule.

    The target is `expected_reward`, and of a rule with a limit of its own also `own_mean`: its
    error there is the variance, and its cosine that of T and E T. The interval is given the
    questions; as a sample of questions the error of a rule that couples all of them cannot be
    jackknifed, and its interval is NaN.

    Args:
        pool: N >= G + 3 completions of each question.
        name: of the rule.
        options: of the rule.
        size: G.
        settings: `all_questions_once` or `without_replacement` with its B.
        draws: how many are wanted; at most `MOST_DRAWS` are made.
        seed: of the draws.
        interval: `completions` or `questions`.
    """
    draws = min(draws, MOST_DRAWS)
    count, unbiased = pool.rewards_PN.shape[1], BASELINES[name].unbiased
    room_for_one, room_for_two = size + LEAST_OUTSIDE, max(2 * size, size + LEAST_OUTSIDE)
    split_for_two = not unbiased and count >= 2 * room_for_two
    sub_pools = _sub_pools(pool, room_for_two if split_for_two else room_for_one)
    for setting, num_prompts in settings:
        batch = num_prompts if setting == "without_replacement" else len(pool.rewards_PN)
        assert batch is not None  # `without_replacement` has its B
        estimates = [
            _sub_pool_estimate(
                sub_pool, part, name, options, size, batch, -(-draws // len(sub_pools)), seed
            )
            for part, sub_pool in enumerate(sub_pools)
        ]
        # bias^2 needs room for two groups, which sub-pools for one group may not have
        bias_estimates = estimates
        if not unbiased and not split_for_two and count // room_for_one >= 2:
            bias_estimates = [_sub_pool_estimate(pool, 0, name, options, size, batch, draws, seed)]
        errors = [estimate.mse for estimate in estimates]
        variance = math.nan
        if len(errors) > 1 and interval == "completions":
            variance = float(np.var(errors, ddof=1) / len(errors))
        mse = t_interval(float(np.mean(errors)), variance, max(len(errors) - 1, 1))
        bias2 = 0.0 if unbiased else float(np.mean([x.bias2 for x in bias_estimates]))
        energy, cross, target_sq = (
            float(np.mean([getattr(estimate, key) for estimate in estimates]))
            for key in ("energy", "cross", "target_sq")
        )
        parts = mse, bias2, mse.estimate - bias2
        batches = setting, num_prompts, draws
        yield "expected_reward", *batches, *parts, *scale_free(energy, cross, target_sq)
        if BASELINES[name].target == "expected_reward" or count < room_for_two:
            continue
        energies, squares = (
            np.array([getattr(x, key) for x in bias_estimates]) for key in ("energy", "mean_sq")
        )
        variances = energies - squares
        variance = math.nan
        if len(variances) > 1 and interval == "completions":
            variance = float(np.var(variances, ddof=1) / len(variances))
        mse = t_interval(float(variances.mean()), variance, max(len(variances) - 1, 1))
        energy, mean_sq = float(energies.mean()), float(squares.mean())
        parts = mse, 0.0, mse.estimate
        yield "own_mean", *batches, *parts, *scale_free(energy, mean_sq, mean_sq)


def _sub_pools(pool: ScorePool, room: int) -> list[ScorePool]:
    """Disjoint sub-pools of at least `room` completions of every question."""
    count = pool.rewards_PN.shape[1]
    cuts = np.array_split(np.arange(count), max(1, min(count // room, MOST_PARTS)))
    return [
        replace(
            pool,
            rewards_PN=pool.rewards_PN[:, cut],
            gram_PNN=pool.gram_PNN[:, cut[:, None], cut],
            lengths_PN=pool.lengths_PN[:, cut],
            features_PNR=pool.features_PNR[:, cut],
            rewards_PNF=None if pool.rewards_PNF is None else pool.rewards_PNF[:, cut],
        )
        for cut in cuts
    ]


def _sub_pool_estimate(
    pool: ScorePool,
    part: int,
    name: str,
    options: Mapping[str, float],
    size: int,
    batch: int,
    draws: int,
    seed: int,
) -> _SubPoolEstimate:
    """Replay sub-pool number `part` in batches of `batch` questions."""
    questions, count = pool.rewards_PN.shape
    order_PRN = np.array([draw_orders(seed, part, x, draws, count) for x in range(questions)])
    rng = generator(seed, "replay_questions", part, str(batch))
    places_RP = np.tile(np.arange(questions), (draws, 1))
    batch_RP, other_batch_RP = (rng.permuted(places_RP, axis=1) < batch for _ in range(2))
    first_PRG, second_PRG = order_PRN[..., :size], order_PRN[..., size : 2 * size]
    own_PRG = _advantages(pool, name, options, first_PRG, batch_RP) / (batch * size)
    other_PRG = None
    if not BASELINES[name].unbiased and 2 * size <= count:
        other_PRG = _advantages(pool, name, options, second_PRG, other_batch_RP) / (batch * size)
    energy, cross, mean_sq = _InnerProduct(), _InnerProduct(), _InnerProduct()
    for x in range(questions):
        gram_NN, features_NR = pool.gram_PNN[x], pool.features_PNR[x]
        own_RN = scatter(own_PRG[x], first_PRG[x], count)
        rest_RN = rest_weights(pool.rewards_PN[x], rest_mask(order_PRN[x], size)) / questions
        toward_RN, own_RR = own_RN @ gram_NN, own_RN @ features_NR
        energy.add(toward_RN, own_RN, own_RR, own_RR)
        cross.add(toward_RN, rest_RN, own_RR, rest_RN @ features_NR)
        if other_PRG is not None:
            other_RN = scatter(other_PRG[x], second_PRG[x], count)
            mean_sq.add(toward_RN, other_RN, own_RR, other_RN @ features_NR)
    # ||grad J||^2: exact within questions, features between them
    weights_PN = pool_gradient_weights(pool.rewards_PN)
    gradient_PR = np.array([w @ f for w, f in zip(weights_PN, pool.features_PNR, strict=True)])
    between = np.square(gradient_PR.sum(axis=0)).sum() - np.square(gradient_PR).sum()
    within = pool_moments(pool.rewards_PN, pool.gram_PNN).g_sq.sum()
    return _SubPoolEstimate(
        energy=energy.mean,
        cross=cross.mean,
        target_sq=float(within + between) / questions**2,
        mean_sq=math.nan if other_PRG is None else mean_sq.mean,
    )


class _InnerProduct:
    """Accumulates <sum_x a_x, sum_x b_x> of every draw: within questions from Gram matrices,
    between questions from features.
    """

    def __init__(self):
        self.within: Array = np.zeros(())
        self.left: Array = np.zeros(())
        self.right: Array = np.zeros(())

    def add(self, toward_RN: Array, weights_RN: Array, left_RR: Array, right_RR: Array) -> None:
        """Add one question: K a and b in its pool, and the features of a and of b."""
        exact_R = (toward_RN * weights_RN).sum(axis=1)
        self.within = self.within + exact_R - (left_RR * right_RR).sum(axis=1)
        self.left, self.right = self.left + left_RR, self.right + right_RR

    @property
    def mean(self) -> float:
        """The inner product's mean over the draws."""
        return float((self.within + (self.left * self.right).sum(axis=1)).mean())


def _advantages(
    pool: ScorePool,
    name: str,
    options: Mapping[str, float],
    index_PRG: Integers,
    batch_RP: Mask,
) -> Array:
    """Advantages of every draw's batch, [P, R, G]; zero for questions outside it.

    A study has no past: `ebpo` has that of its first step, which is none.
    """
    rewards_RPG, lengths_RPG = (
        np.take_along_axis(x[:, None, :], index_PRG, axis=2).transpose(1, 0, 2)
        for x in (pool.rewards_PN, pool.lengths_PN)
    )
    advantages_RPG, rewards_PGF = np.zeros(rewards_RPG.shape), None
    for r, batch_P in enumerate(batch_RP):
        if pool.rewards_PNF is not None:
            index_PG1 = index_PRG[batch_P, r, :, None]
            rewards_PGF = np.take_along_axis(pool.rewards_PNF[batch_P], index_PG1, axis=1)
        context = BaselineContext(
            lengths_PG=lengths_RPG[r, batch_P],
            history=np.zeros((2, 3)),
            rewards_PGF=rewards_PGF,
            reward_weights_F=pool.reward_weights_F,
        )
        advantages_RPG[r, batch_P] = advantages(name, rewards_RPG[r, batch_P], context, options)
    return advantages_RPG.transpose(1, 0, 2)
