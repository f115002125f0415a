"""Replay of one question under a rule that treats questions apart, whole and leave-one-out.

Every mean over draws is taken a second time for each completion i over the draws that left i out
of their groups, with i left out of their rest too: the very statistic of the pool without i, for
the delete-one jackknife. With u = K w the products of an estimate with all scores, deleting a
completion from the rest's gradient costs O(1).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np

from grpo_ustat.estimators.baselines import BASELINES, advantages
from grpo_ustat.estimators.moments import covariance_excess, deleted_moments, pool_moments
from grpo_ustat.records import BaselineContext, ScorePool
from grpo_ustat.study.groups import (
    masked_mean,
    outside,
    rest_gradient,
    rest_gradient_without,
    scattered,
)

FROM_REST = {"value_P", "optimal_P", "running"}  # what a rule takes from outside its group


@dataclass(frozen=True)
class Measured:
    """One question under one rule and group size; `_N` the same without completion i.

    Attributes:
        e, e_N: E||ghat||^2, less the price of an estimated baseline.
        p, p_N: ||E ghat||^2; 0 where there is no room for two groups.
        c, c_N: <E ghat, g>.
        mean_N, mean_NN: weights of E ghat in the pool's scores.
        slope: d e / d b, of rules whose b comes from other questions too; else 0.
    """

    e: float
    p: float
    c: float
    e_N: np.ndarray
    p_N: np.ndarray
    c_N: np.ndarray
    mean_N: np.ndarray
    mean_NN: np.ndarray
    slope: float = 0.0


@dataclass(frozen=True)
class _Learned:
    """A baseline taken from the rest: b of every draw, and what leaving i out adds to it."""

    b_R: np.ndarray
    shift_RN: np.ndarray


class Facts:
    """A pool's moments, of every question [P] and without every completion [P, N].

    Args:
        pool: N >= 4 completions of each of P questions.
    """

    def __init__(self, pool: ScorePool):
        self.pool = pool
        self.whole = pool_moments(pool.rewards_PN, pool.gram_PNN)
        self.without = deleted_moments(pool.rewards_PN, pool.gram_PNN)


def weights_without(rewards_N: np.ndarray) -> np.ndarray:
    """Row i: weights of the leave-one-out gradient of the pool without completion i, [N, N]."""
    count = len(rewards_N) - 1
    total_N1 = (rewards_N.sum() - rewards_N)[:, None]
    return (count * rewards_N - total_N1) * (1 - np.eye(count + 1)) / (count * (count - 1))


def others_of(count: int) -> np.ndarray:
    """Row i: all indices but i, [N, N - 1]."""
    return np.nonzero(~np.eye(count, dtype=bool))[1].reshape(count, count - 1)


def measure(
    facts: Facts, x: int, name: str, options: Mapping[str, float], order_RN: np.ndarray, size: int
) -> Measured:
    """One rule on the draws of question x.

    With w the weights of group A's estimate, w_B those of a disjoint group's and r the rest's
    leave-one-out weights, the means over the draws of

        e = w'K w - price     p = w'K w_B     c = w'K r

    are unbiased: A, B and the rest are independent samples given the question.
    """
    z_N, gram_NN = facts.pool.rewards_PN[x], facts.pool.gram_PNN[x]
    rest_RN, needs = outside(order_RN, size), BASELINES[name].needs
    learned = _learned(facts, x, needs, rest_RN)
    weights_RN = _weights(facts, x, name, options, order_RN[:, :size], learned)
    toward_RN = weights_RN @ gram_NN
    price, price_N = _price(facts, x, needs, z_N.size - size, size)
    e_N, c_N, mean_NN, slope = _without_each(z_N, gram_NN, rest_RN, weights_RN, toward_RN, learned)
    p, p_N = _mean_sq(facts, x, name, options, order_RN, toward_RN, size)
    return Measured(
        e=float((weights_RN * toward_RN).sum(axis=1).mean() - price),
        p=p,
        c=float(rest_gradient(toward_RN, z_N, rest_RN).mean()),
        e_N=e_N - price_N,
        p_N=p_N,
        c_N=c_N,
        mean_N=weights_RN.mean(axis=0),
        mean_NN=mean_NN,
        slope=slope,
    )


def _without_each(
    z_N, gram_NN, rest_RN, weights_RN, toward_RN, learned: _Learned | None
) -> tuple[np.ndarray, np.ndarray, np.ndarray, float]:
    """(e_N before its price, c_N, mean_NN, slope) over the draws that left completion i out.

    The estimate is linear in b: without i in the rest, b and all that holds it move with it.
    """
    e_RN = np.broadcast_to((weights_RN * toward_RN).sum(axis=1)[:, None], rest_RN.shape)
    c_RN = rest_gradient_without(toward_RN, z_N, rest_RN)
    total_NN, slope = rest_RN.T @ weights_RN, 0.0
    if learned is not None:
        inside_RN, shift_RN = 1 - rest_RN, learned.shift_RN
        per_b_RN = inside_RN / inside_RN.sum(axis=1, keepdims=True)
        toward_b_RN = per_b_RN @ gram_NN
        slope_R1 = -2 * (per_b_RN * toward_RN).sum(axis=1, keepdims=True)
        curve_R1 = (per_b_RN * toward_b_RN).sum(axis=1, keepdims=True)
        e_RN = e_RN + shift_RN * (slope_R1 + shift_RN * curve_R1)
        c_RN = c_RN - shift_RN * rest_gradient_without(toward_b_RN, z_N, rest_RN)
        total_NN -= (rest_RN * shift_RN).T @ per_b_RN
        slope = float(slope_R1.mean())
    mean_NN = total_NN / np.maximum(rest_RN.sum(axis=0), 1)[:, None]
    return masked_mean(rest_RN, e_RN), masked_mean(rest_RN, c_RN), mean_NN, slope


def room_for_two(name: str, size: int, count: int) -> bool:
    """Whether the pool holds the two disjoint groups that a biased rule's ||E ghat||^2 needs."""
    return BASELINES[name].unbiased or 2 * size <= count


def _mean_sq(
    facts, x, name, options, order_RN: np.ndarray, toward_RN: np.ndarray, size: int
) -> tuple[float, np.ndarray]:
    """||E ghat||^2 from pairs of disjoint groups; of unbiased rules it follows from c and g."""
    count = order_RN.shape[1]
    if BASELINES[name].unbiased or not room_for_two(name, size, count):
        return 0.0, np.zeros(count)
    other_RN = _weights(facts, x, name, options, order_RN[:, size : 2 * size], None)
    both_R = (toward_RN * other_RN).sum(axis=1)
    left = 2 * size < count
    p_N = masked_mean(outside(order_RN, 2 * size), both_R) if left else np.zeros(count)
    return float(both_R.mean()), p_N


def _weights(facts, x, name, options, index_RG, learned: _Learned | None) -> np.ndarray:
    """Weights of the groups' estimates in the pool's scores, [R, N]: draws stand for prompts."""
    pool, (draws, size) = facts.pool, index_RG.shape
    b_R = None if learned is None else learned.b_R
    context = BaselineContext(
        value_P=b_R,
        optimal_P=b_R,
        running=None if b_R is None else b_R[:, None],
        lengths_PG=pool.lengths_PN[x][index_RG],
        greedy_P=None if pool.greedy_P is None else np.full(draws, pool.greedy_P[x]),
    )
    advantage_RG = advantages(name, pool.rewards_PN[x][index_RG], context, options)
    return scattered(advantage_RG / size, index_RG, pool.rewards_PN.shape[1])


def _learned(facts: Facts, x: int, needs: frozenset[str], rest_RN: np.ndarray) -> _Learned | None:
    """V(x): the mean reward of the rest, for b* as well, see `_price`.

    A running mean has settled at the mean reward of all questions, this one's from the rest.
    """
    if not needs & FROM_REST:
        return None
    z_N, count = facts.pool.rewards_PN[x], len(facts.pool.rewards_PN)
    rest_R1, total_R1 = rest_RN.sum(axis=1, keepdims=True), (rest_RN @ z_N)[:, None]
    b_R1 = total_R1 / rest_R1
    shift_RN = (total_R1 - z_N) / (rest_R1 - 1) - b_R1
    if "running" in needs:
        others = facts.whole.value.sum() - facts.whole.value[x]
        b_R1, shift_RN = (others + b_R1) / count, shift_RN / count
    return _Learned(b_R1[:, 0], shift_RN)


def _price(
    facts: Facts, x: int, needs: frozenset[str], rest: int, size: int
) -> tuple[float, np.ndarray]:
    """What estimating b adds to e, whole and without each completion.

    V from n completions outside the group adds `M_0 Var(V) / G = D / (n G)` exactly. b* = M_1/M_0
    from as few would add far more where score norms are skewed: as the error of a baseline that
    reads the question alone depends on it by `A_b / G` only, and A_{b*} = A_V - Cov(q, z)^2 / M_0,
    `optimal` is replayed with V and the difference taken off, which leaves a bias of O(1/N^2).
    """
    count, length = facts.pool.rewards_PN.shape
    whole, without, others = facts.whole, facts.without, 0.0
    if needs & {"value_P", "optimal_P"}:
        own, own_N = whole.d[x], without.d[x]
    elif "running" in needs:
        own, own_N = whole.d[x] / count**2, without.d[x] / count**2
        others = (whole.var_z.sum() - whole.var_z[x]) / (length * count**2)
    else:
        return 0.0, np.zeros(length)
    price, price_N = own / rest + others * whole.m0[x], own_N / (rest - 1) + others * without.m0[x]
    if "optimal_P" in needs:
        q_N, z_N, kept = facts.pool.sq_norm_PN[x], facts.pool.rewards_PN[x], others_of(length)
        price, price_N = (
            price + covariance_excess(q_N, z_N),
            price_N + covariance_excess(q_N[kept], z_N[kept]),
        )
    return float(price) / size, price_N / size
