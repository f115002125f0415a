r"""Correlations between gradient noise and its proxies, over prompts and over completions.

A proxy is a quantity that is cheaper to compute than the noise and is used in its place.

**Over prompts.** VIP and SPEED use p (1-p), where p is the success rate of a prompt, as a proxy for
the noise of the prompt's gradient or for the information in this gradient. Let x be the true proxy
of a prompt and y the true noise. The completions of a prompt give only estimates of x and y. Errors
of these estimates move their correlation towards 0, or upwards if both are computed from the same
completions. To avoid this, the completions are divided into two halves, which are independent given
the prompt. With unbiased estimates X_1, Y_1 from one half and X_2, Y_2 from the other half, the
covariances over prompts are exactly

    Cov(X_1, Y_2) = Cov(x, y)          Cov(X_1, X_2) = Var x

Therefore `r = Cov(X_1, Y_2) / sqrt( Cov(X_1, X_2) Cov(Y_1, Y_2) )` is consistent for the
correlation of x and y, for any size of the errors (Spearman 1904). Covariances are averaged over
random halvings. Values are used and not ranks, for two reasons. The same formula on ranks is not
consistent, because the mean rank from half of the completions is not a linear function of the true
rank. And the claim that the proxy is proportional to the noise concerns values.

**Over completions.** The length and the squared score norm of a completion are known without
errors, so ranks need no correction. The grade of X is its position in the distribution,
`F(X) = P(X' < X) + P(X' = X)/2`. Spearman's correlation of X and Y is the correlation of the grades
F(X) and G(Y). With three different completions of a prompt, and sgn 0 = 0,

    4 Cov( F(X), G(Y) ) = E[ sgn(X_1 - X_2) sgn(Y_1 - Y_3) ]

The mean over all triples is therefore unbiased for any number of completions. (Sample ranks would
also include triples whose second and third completions are the same. These triples move the result
towards Kendall's tau.) Let A_ij = sgn(X_i - X_j) and B_ij = sgn(Y_i - Y_j) be sign matrices, and a
and b their row sums. The sum over triples is then `a'b - sum_ij A_ij B_ij`. Covariances are
averaged over prompts before the ratio is taken.

Intervals include the random choice of prompts. They use the jackknife over prompts on Fisher's
scale, artanh r.
"""

from __future__ import annotations

import math
from typing import NamedTuple

import numpy as np

from grpo_ustat.estimators.intervals import (
    CONFIDENCE,
    UNDETERMINED,
    Interval,
    jackknife_interval,
)
from grpo_ustat.records import Array

# Number of prompts whose sign matrices are kept in memory at the same time.
BLOCK = 64
# Largest |r| for which Fisher's scale is used, because artanh r is infinite at r = 1.
MAX_CORRELATION = 0.99


class Covariance(NamedTuple):
    """Covariance over n prompts, and the covariance without each prompt in turn.

    For grades, all values are 4 times the covariance.
    """

    value: float
    delete_one_n: Array


def corrected_correlation(x_2SP: Array, y_2SP: Array, level: float = CONFIDENCE) -> Interval:
    """Estimate the correlation over prompts, corrected for the errors in the estimates of x and y.

    Args:
        x_2SP, y_2SP: unbiased estimates of x and y from each of the two halves, for S random
            halvings and P prompts.
        level: confidence level.
    """
    xy = linear_covariance(np.concatenate(x_2SP), np.concatenate(y_2SP[::-1]))
    return correlation(xy, linear_covariance(*x_2SP), linear_covariance(*y_2SP), level)


def within_correlation(x_PN: Array, y_PN: Array, level: float = CONFIDENCE) -> Interval:
    """Estimate Spearman's correlation within prompts, over N >= 4 completions per prompt.

    Covariances are averaged over prompts.

    Args:
        x_PN, y_PN: values of each completion, known without errors.
        level: confidence level.
    """

    def covariance(first_PN: Array, second_PN: Array) -> Covariance:
        each_P = grade_covariances(first_PN, second_PN)
        return Covariance(float(each_P.mean()), (each_P.sum() - each_P) / (len(each_P) - 1))

    xy, xx, yy = covariance(x_PN, y_PN), covariance(x_PN, x_PN), covariance(y_PN, y_PN)
    return correlation(xy, xx, yy, level)


def linear_covariance(x_KP: Array, y_KP: Array) -> Covariance:
    """Compute the covariance of x and y over P >= 3 prompts, averaged over K pairs of estimates.

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


def grade_covariances(x_PN: Array, y_PN: Array) -> Array:
    """Average `sgn(X_1 - X_2) sgn(Y_1 - Y_3)` over all triples of a prompt's completions, [P].

    Each prompt has N >= 4 completions.

    >>> grade_covariances(np.arange(5.0)[None], np.arange(5.0)[None]).round(6).tolist()
    [0.333333]
    """
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


def correlation(
    xy: Covariance, xx: Covariance, yy: Covariance, level: float = CONFIDENCE
) -> Interval:
    """Return the correlation xy / sqrt(xx yy) with a jackknife interval within [-1, 1].

    The interval is computed on Fisher's scale. It is computed on the scale of r if the correlation,
    also without one of the prompts, reaches .99 in absolute value. The result is NaN if xx or yy,
    also without one of the prompts, is not positive, because x or y then does not distinguish the
    prompts.

    Args:
        xy: covariance of x and y.
        xx, yy: variances of x and y.
        level: confidence level.
    """
    variances = np.concatenate([[xx.value, yy.value], xx.delete_one_n, yy.delete_one_n])
    if not (variances > 0).all():
        return UNDETERMINED
    ratio = xy.value / math.sqrt(xx.value * yy.value)
    delete_one_n = xy.delete_one_n / np.sqrt(xx.delete_one_n * yy.delete_one_n)
    if max(abs(ratio), np.abs(delete_one_n).max()) < MAX_CORRELATION:
        scaled = jackknife_interval(math.atanh(ratio), np.arctanh(delete_one_n)[None], level)
        return Interval(*map(math.tanh, scaled))
    plain = jackknife_interval(ratio, delete_one_n[None], level)
    return Interval(*(min(max(x, -1.0), 1.0) for x in plain))
