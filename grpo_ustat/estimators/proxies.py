r"""Correlations of cheap proxies with what they stand for, over prompts and over completions.

*Prompts.* VIP and SPEED take p (1-p) of a prompt for the noise of its gradient, or for how much it
says; both are unknown, and a pool estimates them. Errors of estimates pull a correlation to 0, and
push it up where both sides come from the same completions. Halves of a pool are independent given
the prompt; so with unbiased estimates X_1, Y_1 from one half and X_2, Y_2 from the other,

    Cov(X_1, Y_2) = Cov(x, y)          Cov(X_1, X_2) = Var x          over prompts, exactly

and `r = Cov(X_1, Y_2) / sqrt( Cov(X_1, X_2) Cov(Y_1, Y_2) )` is consistent for the correlation of
the true x and y, whatever the errors are (Spearman 1904; `Cov(X_1, X_2) / Var X_1` is the
reliability of half a pool). Covariances are averaged over random halvings.

The same on ranks is not consistent: the mean rank of half a pool is no linear function of the true
rank, above all where many halves have rewards all equal. It is far too large (in simulations .58
for .41, or .23 for -.18, with 16 completions a prompt; see `scripts/benchmarks/proxies.py`), and no
estimate from the pool alone says how much. Proportionality is a claim on values, not on ranks.

*Completions.* Length and squared score norm of a completion are known without error, so here ranks
need no correction. The grade of X is its place in the distribution, `F(X) = P(X' < X) + P(X' =
X)/2`, and Spearman's correlation is that of the grades. With three different units, sgn 0 = 0,

    4 Cov( F(X), G(Y) ) = E[ sgn(X_1 - X_2) sgn(Y_1 - Y_3) ]

so a mean over all triples is unbiased for any number of units (sample ranks have the triples with
2 = 3 too, which pull towards Kendall's tau). With the sign matrices A, B and their row sums a, b
the sum is `T = a'b - sum_ij A_ij B_ij`, and without unit c

    T - a_c b_c + (A b)_c + (B a)_c + 3 sum_j A_cj B_cj

Over all completions the three are of three prompts, one completion each; within a prompt they are
three of its completions, covariances averaged over prompts before the ratio.

Intervals leave out one prompt at a time, on Fisher's scale artanh r: they are for other prompts.
"""

from __future__ import annotations

import math
from typing import NamedTuple

import numpy as np

from grpo_ustat.estimators.halves import (
    LEAST_COMPLETIONS,
    LEAST_PROMPTS,
    group_error,
    halves_of,
)
from grpo_ustat.estimators.intervals import (
    CONFIDENCE,
    UNDETERMINED,
    Interval,
    is_binary,
    jackknife_interval,
)
from grpo_ustat.records import Array, Integers, ScorePool

BLOCK = 64  # prompts whose matrices of signs are there at once
LARGEST_CORRELATION = 0.99  # correlation for Fisher's scale, which has no end at 1


class Covariance(NamedTuple):
    """A covariance over n units, and the same without each of them; of grades four times it."""

    whole: float
    delete_one_n: Array


class ProxyCorrelation(NamedTuple):
    """The correlation of a proxy with a target.

    Attributes:
        units: prompts, completions, or those of one prompt.
        proxy, target: what is compared.
        scale: value or rank.
        correlation: of prompts corrected for attenuation; NaN where the pool cannot say it.
        uncorrected: of prompts the correlation of whole pools' estimates.
        reliability: of half a pool's proxy and target; 1 for completions.
    """

    units: str
    proxy: str
    target: str
    scale: str
    correlation: Interval
    uncorrected: float
    reliability: tuple[float, float]


def proxy_correlations(pool: ScorePool, group_size: int = 8) -> list[ProxyCorrelation]:
    """Every proxy against its target; nothing of fewer than 10 prompts or 6 completions.

    Args:
        pool: N completions of each of P prompts.
        group_size: G; the noise of a prompt is the MSE of leave_one_out with a group of G.
    """
    if len(pool.rewards_PN) < LEAST_PROMPTS or pool.rewards_PN.shape[1] < LEAST_COMPLETIONS:
        return []
    lengths_PN = pool.lengths_PN.astype(float)
    halves, whole = halves_of(pool)
    for part in (halves, whole):
        part["noise"] = group_error(part["first"], part["second"], group_size)
    binary = is_binary(pool.rewards_PN)
    variance = "p(1-p)" if binary else "the variance of rewards"
    noise = f"the noise of a group of {group_size}"
    pairs = {
        ("variance", "noise"): (variance, noise),
        ("length", "noise"): ("mean length", noise),
        ("score", "noise"): ("the mean squared score norm", noise),
        ("variance", "g_sq"): (variance, "the squared length of the gradient"),
    }
    rows = [
        ProxyCorrelation(
            "prompts", *words, "value",
            *corrected_correlation(halves[x], halves[y], whole[x], whole[y]),
        )
        for (x, y), words in pairs.items()
    ]  # fmt: skip
    for units, interval in (
        ("completions", completion_correlation(lengths_PN, pool.sq_norm_PN)),
        ("those of one prompt", within_correlation(lengths_PN, pool.sq_norm_PN)),
    ):
        words = ("length", "the squared score norm")
        rows.append(
            ProxyCorrelation(units, *words, "rank", interval, interval.estimate, (1.0, 1.0))
        )
    return rows


def corrected_correlation(
    x_2SP: Array, y_2SP: Array, x_P: Array, y_P: Array, level: float = CONFIDENCE
) -> tuple[Interval, float, tuple[float, float]]:
    """The correlation over prompts corrected for attenuation, that of whole pools' estimates, and
    the reliabilities of half a pool.

    Args:
        x_2SP, y_2SP: unbiased estimates from the two halves of each of S halvings.
        x_P, y_P: the same from whole pools.
        level: of the interval.
    """
    xy = linear_covariance(np.concatenate(x_2SP), np.concatenate(y_2SP[::-1]))
    xx, yy = linear_covariance(*x_2SP), linear_covariance(*y_2SP)
    whole = [linear_covariance(x[None], y[None]) for x, y in ((x_P, y_P), (x_P, x_P), (y_P, y_P))]
    own_x, own_y = (float(part.var(axis=2, ddof=1).mean()) for part in (x_2SP, y_2SP))
    reliability = (_ratio(xx.whole, own_x), _ratio(yy.whole, own_y))
    return (
        correlation(xy, xx, yy, level),
        correlation(whole[0], whole[1], whole[2]).estimate,
        reliability,
    )


def completion_correlation(x_PN: Array, y_PN: Array) -> Interval:
    """Spearman's correlation over completions of all prompts; both sides without error."""
    covariances: list[Covariance] = []
    for first_PN, second_PN in ((x_PN, y_PN), (x_PN, x_PN), (y_PN, y_PN)):
        parts = [
            grade_covariance(x_P, y_P) for x_P, y_P in zip(first_PN.T, second_PN.T, strict=True)
        ]
        whole = float(np.mean([part.whole for part in parts]))
        covariances.append(
            Covariance(whole, np.mean([part.delete_one_n for part in parts], axis=0))
        )
    xy, xx, yy = covariances
    return correlation(xy, xx, yy)


def within_correlation(x_PN: Array, y_PN: Array) -> Interval:
    """Spearman's correlation over the N >= 4 completions of one prompt, covariances averaged over
    prompts; both sides without error.
    """
    xy, xx, yy = within_covariances(x_PN, y_PN)
    return correlation(xy, xx, yy)


def within_covariances(x_PN: Array, y_PN: Array) -> list[Covariance]:
    """Those of grades of x and y, of x and of y, that `within_correlation` is made of."""
    covariances: list[Covariance] = []
    for first_PN, second_PN in ((x_PN, y_PN), (x_PN, x_PN), (y_PN, y_PN)):
        each_P = _within_prompts(first_PN, second_PN)
        delete_one_P = (each_P.sum() - each_P) / (len(each_P) - 1)
        covariances.append(Covariance(float(each_P.mean()), delete_one_P))
    return covariances


def linear_covariance(x_KP: Array, y_KP: Array) -> Covariance:
    """The covariance over P >= 3 prompts, averaged over K pairs of estimates.

    >>> value, without = linear_covariance(np.array([[0.0, 1.0, 5.0]]), np.array([[0.0, 1.0, 2.0]]))
    >>> value, without.round(6).tolist()
    (2.5, [2.0, 5.0, 0.5])
    """
    count = x_KP.shape[1]
    x_KP = x_KP - x_KP.mean(axis=1, keepdims=True)
    y_KP = y_KP - y_KP.mean(axis=1, keepdims=True)
    product_P = (x_KP * y_KP).mean(axis=0)
    total = product_P.sum()
    without_P = (total - count / (count - 1) * product_P) / (count - 2)
    return Covariance(float(total / (count - 1)), without_P)


def grade_covariance(x_n: Array, y_n: Array) -> Covariance:
    """`E[ sgn(X_1 - X_2) sgn(Y_1 - Y_3) ]` over all triples of n >= 4 units.

    >>> value, without = grade_covariance(np.arange(5.0), np.arange(5.0))
    >>> round(value, 6), without.round(6).tolist()  # 1/3, as of any continuous variable
    (0.333333, [0.333333, 0.333333, 0.333333, 0.333333, 0.333333])
    """
    n = len(x_n)
    level_x_n, level_y_n = (np.unique(x, return_inverse=True)[1] for x in (x_n, y_n))
    a_n, b_n = (_sign_sums(x, np.ones(n)) for x in (level_x_n, level_y_n))
    same_n = concordance(level_x_n, level_y_n)
    total = a_n @ b_n - same_n.sum()
    without_n = total - a_n * b_n + 3 * same_n
    without_n += _sign_sums(level_x_n, b_n) + _sign_sums(level_y_n, a_n)
    triples = n * (n - 1) * (n - 2)
    return Covariance(float(total / triples), without_n / (triples * (n - 3) / n))


def _within_prompts(x_PN: Array, y_PN: Array) -> Array:
    """The covariance of grades within each prompt, as of `grade_covariance`, [P]."""
    each: list[Array] = []
    for first in range(0, len(x_PN), BLOCK):
        x_BNN, y_BNN = (
            np.sign(part[:, :, None] - part[:, None])
            for part in (x_PN[first : first + BLOCK], y_PN[first : first + BLOCK])
        )
        products_B = (x_BNN.sum(axis=2) * y_BNN.sum(axis=2)).sum(axis=1)
        each.append(products_B - (x_BNN * y_BNN).sum(axis=(1, 2)))
    n = x_PN.shape[1]
    return np.concatenate(each) / (n * (n - 1) * (n - 2))


def _sign_sums(rank_n: Integers, weights_n: Array) -> Array:
    """`sum_j sgn(rank_i - rank_j) w_j`."""
    totals = np.bincount(rank_n, weights_n)
    below = np.cumsum(totals) - totals
    return (2 * below + totals - totals.sum())[rank_n]


def concordance(x_n: Integers, y_n: Integers) -> Array:
    """`sum_j sgn(x_i - x_j) sgn(y_i - y_j)` for every unit i, in O(n log^2 n) time and O(n) memory.

    >>> concordance(np.array([1, 1, 2, 3]), np.array([5, 4, 4, 6])).tolist()
    [0.0, 1.0, 0.0, 3.0]
    """
    n = len(x_n)
    order = np.lexsort((y_n, x_n))
    x_n, y_n, place_n = x_n[order], y_n[order], np.arange(n)
    # units of the same y that come earlier, then all of no larger y that do
    by_y = np.argsort(y_n, kind="stable")
    equal_n, smaller_n = np.zeros(n, dtype=np.int64), np.zeros(n, dtype=np.int64)
    equal_n[by_y] = place_n - np.searchsorted(y_n[by_y], y_n[by_y])
    rank_n = np.argsort(by_y)
    for level in range(n.bit_length()):  # pairs in the two halves of a block of 2^(level + 1)
        block_n = place_n >> (level + 1)
        merged = np.lexsort((rank_n, block_n))
        right = (merged >> level) & 1 == 1
        left_before = np.cumsum(~right) - (block_n[merged] << level)
        smaller_n[merged[right]] += left_before[right]
    earlier_n = 2 * smaller_n - equal_n - place_n  # sum of sgn(y_i - y_j) over these
    pair_n = np.unique(np.stack([x_n, y_n]), axis=1, return_inverse=True)[1].reshape(-1)
    tied_n = np.bincount(x_n)[x_n] - np.bincount(pair_n)[pair_n]  # of the same x, of another y
    signs_n = np.empty(n)
    signs_n[order] = 2 * earlier_n - tied_n - _sign_sums(y_n, np.ones(n))
    return signs_n


def correlation(
    xy: Covariance, xx: Covariance, yy: Covariance, level: float = CONFIDENCE
) -> Interval:
    """xy / sqrt(xx yy) with its jackknife interval on Fisher's scale, within [-1, 1].

    From .99 on the interval is that of r itself. NaN where xx or yy is not positive, with one unit
    left out or none: then that side does not tell the units apart.
    """
    variances = np.concatenate([[xx.whole, yy.whole], xx.delete_one_n, yy.delete_one_n])
    if not (variances > 0).all():
        return UNDETERMINED
    ratio = xy.whole / math.sqrt(xx.whole * yy.whole)
    delete_one_n = xy.delete_one_n / np.sqrt(xx.delete_one_n * yy.delete_one_n)
    if max(abs(ratio), np.abs(delete_one_n).max()) < LARGEST_CORRELATION:
        scaled = jackknife_interval(math.atanh(ratio), np.arctanh(delete_one_n)[None], level)
        return Interval(*map(math.tanh, scaled))
    plain = jackknife_interval(ratio, delete_one_n[None], level)
    return Interval(*(min(max(x, -1.0), 1.0) for x in plain))


def _ratio(above: float, below: float) -> float:
    return above / below if below > 0 else math.nan
