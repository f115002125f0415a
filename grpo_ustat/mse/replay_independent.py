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
from grpo_ustat.estimators.moments import covariance_excess, delete_one_moments, pool_moments
from grpo_ustat.mse.replay_draws import (
    delete_one_rest_gradient,
    masked_mean,
    rest_gradient,
    rest_mask,
    scatter,
)
from grpo_ustat.records import Array, BaselineContext, Integers, ScorePool

OUTSIDE_FIELDS = {"value_P", "optimal_P", "running"}  # what a rule takes from outside its group


@dataclass(frozen=True)
class QuestionStats:
    """Statistics of one question under one rule and group size; those with `_N` are without
    completion i.

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
    e_N: Array
    p_N: Array
    c_N: Array
    mean_N: Array
    mean_NN: Array
    slope: float = 0.0


@dataclass(frozen=True)
class _RestBaseline:
    """A baseline estimated from the rest: b of every draw, and its change when completion i is left
    out.
    """

    b_R: Array
    shift_RN: Array


class PoolMoments:
    """A pool with the moments of its questions.

    Args:
        pool: N >= 4 completions of each of P questions.

    Attributes:
        pool: the pool itself.
        whole: the moments of every question's whole pool, [P].
        delete_one: the same with each completion left out in turn, [P, N].
    """

    def __init__(self, pool: ScorePool):
        self.pool = pool
        self.whole = pool_moments(pool.rewards_PN, pool.gram_PNN)
        self.delete_one = delete_one_moments(pool.rewards_PN, pool.gram_PNN)


def delete_one_weights(rewards_N: Array) -> Array:
    """Row i: weights of the leave-one-out gradient of the pool without completion i, [N, N]."""
    count = len(rewards_N) - 1
    total_N1 = (rewards_N.sum() - rewards_N)[:, None]
    return (count * rewards_N - total_N1) * (1 - np.eye(count + 1)) / (count * (count - 1))


def question_stats(
    moments: PoolMoments,
    x: int,
    name: str,
    options: Mapping[str, float],
    order_RN: Integers,
    size: int,
) -> QuestionStats:
    """The statistics of one rule on the draws of question x.

    With w the weights of group A's estimate, w_B those of a disjoint group's and r the rest's
    leave-one-out weights, the means over the draws of

        e = w'K w - price     p = w'K w_B     c = w'K r

    are unbiased: A, B and the rest are independent samples given the question.
    """
    z_N, gram_NN = moments.pool.rewards_PN[x], moments.pool.gram_PNN[x]
    rest_RN, needs = rest_mask(order_RN, size), BASELINES[name].needs
    rest_baseline = _baseline_of_rest(moments, x, needs, rest_RN)
    weights_RN = _weights(moments, x, name, options, order_RN[:, :size], rest_baseline)
    toward_RN = weights_RN @ gram_NN
    price, price_N = _price(moments, x, needs, z_N.size - size, size)
    e_N, c_N, mean_NN, slope = _delete_one_stats(
        z_N, gram_NN, rest_RN, weights_RN, toward_RN, rest_baseline
    )
    count = order_RN.shape[1]
    p, p_N = 0.0, np.zeros(count)
    # p stays 0 for unbiased rules, of which it follows from c and g
    if not BASELINES[name].unbiased and room_for_two(name, size, count):
        other_RN = _weights(moments, x, name, options, order_RN[:, size : 2 * size], None)
        both_R = (toward_RN * other_RN).sum(axis=1)
        p = float(both_R.mean())
        if 2 * size != count:  # else no draw leaves a completion out of both groups
            p_N = masked_mean(rest_mask(order_RN, 2 * size), both_R)
    return QuestionStats(
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


def _delete_one_stats(
    z_N: Array,
    gram_NN: Array,
    rest_RN: Array,
    weights_RN: Array,
    toward_RN: Array,
    rest_baseline: _RestBaseline | None,
) -> tuple[Array, Array, Array, float]:
    """(e_N before its price, c_N, mean_NN, slope) over the draws that left completion i out.

    The estimate is linear in b: without i in the rest, b and all that holds it move with it.
    """
    e_RN = np.broadcast_to((weights_RN * toward_RN).sum(axis=1)[:, None], rest_RN.shape)
    c_RN = delete_one_rest_gradient(toward_RN, z_N, rest_RN)
    total_NN, slope = rest_RN.T @ weights_RN, 0.0
    if rest_baseline is not None:
        inside_RN, shift_RN = 1 - rest_RN, rest_baseline.shift_RN
        per_b_RN = inside_RN / inside_RN.sum(axis=1, keepdims=True)
        toward_b_RN = per_b_RN @ gram_NN
        slope_R1 = -2 * (per_b_RN * toward_RN).sum(axis=1, keepdims=True)
        curve_R1 = (per_b_RN * toward_b_RN).sum(axis=1, keepdims=True)
        e_RN = e_RN + shift_RN * (slope_R1 + shift_RN * curve_R1)
        c_RN = c_RN - shift_RN * delete_one_rest_gradient(toward_b_RN, z_N, rest_RN)
        total_NN -= (rest_RN * shift_RN).T @ per_b_RN
        slope = float(slope_R1.mean())
    mean_NN = total_NN / np.maximum(rest_RN.sum(axis=0), 1)[:, None]
    return masked_mean(rest_RN, e_RN), masked_mean(rest_RN, c_RN), mean_NN, slope


def room_for_two(name: str, size: int, count: int) -> bool:
    """Whether the pool holds the two disjoint groups that a biased rule's ||E ghat||^2 needs."""
    return BASELINES[name].unbiased or 2 * size <= count


def _weights(
    moments: PoolMoments,
    x: int,
    name: str,
    options: Mapping[str, float],
    index_RG: Integers,
    rest_baseline: _RestBaseline | None,
) -> Array:
    """Weights of the groups' estimates in the pool's scores, [R, N]: draws stand for prompts."""
    pool, (draws, size) = moments.pool, index_RG.shape
    b_R = None if rest_baseline is None else rest_baseline.b_R
    context = BaselineContext(
        value_P=b_R,
        optimal_P=b_R,
        running=None if b_R is None else b_R[:, None],
        lengths_PG=pool.lengths_PN[x][index_RG],
        greedy_P=None if pool.greedy_P is None else np.full(draws, pool.greedy_P[x]),
        rewards_PGF=None if pool.rewards_PNF is None else pool.rewards_PNF[x][index_RG],
        reward_weights_F=pool.reward_weights_F,
    )
    advantage_RG = advantages(name, pool.rewards_PN[x][index_RG], context, options)
    return scatter(advantage_RG / size, index_RG, pool.rewards_PN.shape[1])


def _baseline_of_rest(
    moments: PoolMoments, x: int, needs: frozenset[str], rest_RN: Array
) -> _RestBaseline | None:
    """The baseline that a rule takes from the rest of each draw, None for rules that take none.

    It is the rest's mean reward, an estimate of V, for b* as well, see `_price`. A running mean has
    settled at the mean reward of all questions, this one's from the rest.
    """
    if not needs & OUTSIDE_FIELDS:
        return None
    z_N, count = moments.pool.rewards_PN[x], len(moments.pool.rewards_PN)
    rest_R1, total_R1 = rest_RN.sum(axis=1, keepdims=True), (rest_RN @ z_N)[:, None]
    b_R1 = total_R1 / rest_R1
    shift_RN = (total_R1 - z_N) / (rest_R1 - 1) - b_R1
    if "running" in needs:
        others = moments.whole.value.sum() - moments.whole.value[x]
        b_R1, shift_RN = (others + b_R1) / count, shift_RN / count
    return _RestBaseline(b_R1[:, 0], shift_RN)


def _price(
    moments: PoolMoments, x: int, needs: frozenset[str], rest: int, size: int
) -> tuple[float, Array]:
    """What estimating b adds to e, whole and without each completion [N].

    V from n completions outside the group adds `M_0 Var(V) / G = D / (n G)` exactly. b* = M_1/M_0
    from as few would add far more where score norms are skewed: as the error of a baseline that
    reads the question alone depends on it by `A_b / G` only, and A_{b*} = A_V - Cov(q, z)^2 / M_0,
    `optimal` is replayed with V and the difference taken off, which leaves a bias of O(1/N^2).
    """
    count, length = moments.pool.rewards_PN.shape
    whole, delete_one, others = moments.whole, moments.delete_one, 0.0
    if needs & {"value_P", "optimal_P"}:
        own, own_N = whole.d[x], delete_one.d[x]
    elif "running" in needs:
        own, own_N = whole.d[x] / count**2, delete_one.d[x] / count**2
        others = (whole.var_z.sum() - whole.var_z[x]) / (length * count**2)
    else:
        return 0.0, np.zeros(length)
    price, price_N = (
        own / rest + others * whole.m0[x],
        own_N / (rest - 1) + others * delete_one.m0[x],
    )
    if "optimal_P" in needs:
        q_N, z_N = moments.pool.sq_norm_PN[x], moments.pool.rewards_PN[x]
        others_NM = np.nonzero(~np.eye(length, dtype=bool))[1].reshape(length, length - 1)
        price, price_N = (
            price + covariance_excess(q_N, z_N),
            price_N + covariance_excess(q_N[others_NM], z_N[others_NM]),
        )
    return float(price) / size, price_N / size
