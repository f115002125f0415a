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
from collections.abc import Mapping
from dataclasses import dataclass, replace

import numpy as np

from grpo_ustat.estimators.baselines import BASELINES, advantages
from grpo_ustat.estimators.intervals import Interval, t_interval
from grpo_ustat.estimators.moments import pool_gradient_weights, pool_moments
from grpo_ustat.estimators.settings import scale_free
from grpo_ustat.records import BaselineContext, ScorePool
from grpo_ustat.rollout.draws import generator
from grpo_ustat.study.groups import LEAST_REST, orders, outside, rest_weights, scattered

MOST_DRAWS = 1000  # of all sub-pools together; each draw averages over all questions
MOST_PARTS = 5  # beyond, sub-pools are small, their errors skewed and the interval too short


@dataclass(frozen=True)
class _Found:
    """Estimates of one sub-pool: E||T||^2, <E T, grad J>, ||grad J||^2 and ||E T||^2 or NaN."""

    energy: float
    cross: float
    target_sq: float
    mean_sq: float

    @property
    def mse(self) -> float:
        return self.energy - 2 * self.cross + self.target_sq

    @property
    def bias2(self) -> float:
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
):
    """Rows (setting, B, draws, mse, bias2, variance, cosine, best_scalar_mse) of a coupled rule.

    The interval is given the questions; as a sample of questions the error of a rule that couples
    all of them cannot be jackknifed, and its interval is NaN.

    Args:
        pool: N >= G + 3 completions of each question.
        name, options: of the rule.
        size: G.
        settings: `all_questions_once` or `without_replacement` with its B.
        draws: asked for; at most `MOST_DRAWS` are made.
        seed: of the draws.
        interval: `completions` or `questions`.
    """
    for setting, num_prompts in settings:
        batch = num_prompts if setting == "without_replacement" else len(pool.rewards_PN)
        used = min(draws, MOST_DRAWS)
        found, split = _estimates(pool, name, options, size, batch, used, seed)
        mse = _over_parts([part.mse for part in found], interval)
        bias2 = 0.0 if BASELINES[name].unbiased else float(np.mean([x.bias2 for x in split]))
        energy, cross, target_sq = (
            float(np.mean([getattr(part, key) for part in found]))
            for key in ("energy", "cross", "target_sq")
        )
        parts = mse, bias2, mse.estimate - bias2
        yield setting, num_prompts, used, *parts, *scale_free(energy, cross, target_sq)


def _over_parts(values: list[float], interval: str) -> Interval:
    count = len(values)
    known = count > 1 and interval == "completions"
    variance = float(np.var(values, ddof=1) / count) if known else math.nan
    return t_interval(float(np.mean(values)), variance, max(count - 1, 1))


def _estimates(pool, name, options, size, batch, draws, seed) -> tuple[list[_Found], list[_Found]]:
    """Of the sub-pools for the mse, and of those for bias2, which need room for two groups."""
    count, two = pool.rewards_PN.shape[1], max(2 * size, size + LEAST_REST)
    one = size + LEAST_REST
    unbiased = BASELINES[name].unbiased
    room = two if count >= 2 * two and not unbiased else one
    found = [
        _measure(part, s, name, options, size, batch, -(-draws // len(parts)), seed)
        for parts in [_parts(pool, room)]
        for s, part in enumerate(parts)
    ]
    if unbiased or room == two or count // one < 2:
        return found, found
    return found, [_measure(pool, 0, name, options, size, batch, draws, seed)]


def _parts(pool: ScorePool, room: int) -> list[ScorePool]:
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
        )
        for cut in cuts
    ]


def _measure(pool: ScorePool, part: int, name, options, size, batch, draws, seed) -> _Found:
    questions, count = pool.rewards_PN.shape
    order_PRN = np.array([orders(seed, part, x, draws, count) for x in range(questions)])
    rng = generator(seed, "replay_questions", part, str(batch))
    chosen_2RP = np.array([_batches(rng, draws, questions, batch) for _ in range(2)])
    first_PRG, second_PRG = order_PRN[..., :size], order_PRN[..., size : 2 * size]
    own_PRG = _advantages(pool, name, options, first_PRG, chosen_2RP[0]) / (batch * size)
    two = not BASELINES[name].unbiased and 2 * size <= count
    other_PRG = np.zeros_like(own_PRG)
    if two:
        other_PRG = _advantages(pool, name, options, second_PRG, chosen_2RP[1]) / (batch * size)
    energy, cross, mean_sq = _Product(), _Product(), _Product()
    for x in range(questions):
        gram_NN, features_NR = pool.gram_PNN[x], pool.features_PNR[x]
        own_RN = scattered(own_PRG[x], first_PRG[x], count)
        rest_RN = rest_weights(pool.rewards_PN[x], outside(order_PRN[x], size)) / questions
        toward_RN, own_RR = own_RN @ gram_NN, own_RN @ features_NR
        energy.add(toward_RN, own_RN, own_RR, own_RR)
        cross.add(toward_RN, rest_RN, own_RR, rest_RN @ features_NR)
        if two:
            other_RN = scattered(other_PRG[x], second_PRG[x], count)
            mean_sq.add(toward_RN, other_RN, own_RR, other_RN @ features_NR)
    target_sq = _grad_sq(pool)
    return _Found(energy.mean, cross.mean, target_sq, mean_sq.mean if two else math.nan)


class _Product:
    """<sum_x a_x, sum_x b_x> of every draw: Gram matrices within questions, features between."""

    def __init__(self):
        self.within, self.left, self.right = 0.0, 0.0, 0.0

    def add(self, toward_RN, weights_RN, left_RR, right_RR) -> None:
        """One question: K a and b in its pool, and the features of a and of b."""
        exact_R = (toward_RN * weights_RN).sum(axis=1)
        self.within = self.within + exact_R - (left_RR * right_RR).sum(axis=1)
        self.left, self.right = self.left + left_RR, self.right + right_RR

    @property
    def mean(self) -> float:
        """Over the draws."""
        return float((self.within + (self.left * self.right).sum(axis=1)).mean())


def _batches(rng: np.random.Generator, draws: int, questions: int, batch: int) -> np.ndarray:
    """The questions of every draw's batch, bool [draws, questions]."""
    order = rng.permuted(np.tile(np.arange(questions), (draws, 1)), axis=1)
    return order < batch


def _advantages(pool, name, options, index_PRG: np.ndarray, chosen_RP: np.ndarray) -> np.ndarray:
    """Advantages of every draw's batch, [P, R, G]; zero for questions outside it."""
    rewards_RPG, lengths_RPG = (
        np.take_along_axis(x[:, None, :], index_PRG, axis=2).transpose(1, 0, 2)
        for x in (pool.rewards_PN, pool.lengths_PN)
    )
    result = np.zeros(rewards_RPG.shape)
    for r, mine in enumerate(chosen_RP):
        context = BaselineContext(lengths_PG=lengths_RPG[r, mine])
        result[r, mine] = advantages(name, rewards_RPG[r, mine], context, options)
    return result.transpose(1, 0, 2)


def _grad_sq(pool: ScorePool) -> float:
    """||grad J||^2: exact within questions, features between them."""
    weights_PN = pool_gradient_weights(pool.rewards_PN)
    gradient_PR = np.array([w @ f for w, f in zip(weights_PN, pool.features_PNR, strict=True)])
    between = np.square(gradient_PR.sum(axis=0)).sum() - np.square(gradient_PR).sum()
    within = pool_moments(pool.rewards_PN, pool.gram_PNN).g_sq.sum()
    return float(within + between) / len(weights_PN) ** 2
