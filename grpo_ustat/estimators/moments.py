r"""Closed forms for the mean squared error of a prompt's gradient estimate (paper, Theorem 2).

For a completion of one prompt, let z be the reward, s the score (the gradient of the
log-probability) and q = ||s||^2. For the prompt, let V = E z, sigma^2 = Var z and g = E[s z], the
gradient of V. The moments of the prompt are

    M_k = E[q z^k]     A_b = E[q (z - b)^2] = M_2 - 2 b M_1 + b^2 M_0     D = M_0 sigma^2

The mean squared error of the estimate from one group of G completions is, for three baselines,

    none             ( A_0 - ||g||^2 ) / G
    oracle           ( A_V - ||g||^2 ) / G
    leave_one_out    ( A_V - ||g||^2 ) / G  +  ( D + ||g||^2 ) / ( G (G-1) )

The three errors are linear in (A_0, A_V, D, ||g||^2). Each of these four numbers has an unbiased
estimator, computed from the rewards of N >= 3 completions of the prompt (its pool) and the Gram
matrix of their scores.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np

from grpo_ustat.estimators.intervals import Interval, jackknife_interval
from grpo_ustat.records import Array

# Half-width of a 99.9 % interval divided by the half-width of a 95 % interval; see `is_correlated`.
CORRELATION_MARGIN = 1.68
# `covariance_excess` divides by a mean of squared norms. The divisor is at least this fraction of
# the largest squared norm, because a smaller mean is a rounding error.
ROUNDING = 1e-12


@dataclass(frozen=True)
class Moments:
    """Moments of each prompt, [P], as exact values or unbiased estimates."""

    # E q.
    m0: Array
    # E[q z].
    m1: Array
    # V = E z.
    value: Array
    # E[q z^2], which is A_b at b = 0.
    a_0: Array
    # E[q (z - V)^2].
    a_v: Array
    # V M_1.
    v_m1: Array
    # V^2 M_0.
    v2_m0: Array
    # M_0 sigma^2.
    d: Array
    # ||g||^2.
    g_sq: Array
    # Cov(q, z) = M_1 - V M_0.
    cov_qz: Array
    # Var q.
    var_q: Array
    # sigma^2.
    var_z: Array

    def mse(self, baseline: str, group_size: int) -> Array:
        """Compute the MSE of the gradient estimate from one group with the given baseline, [P]."""
        if baseline == "none":
            return (self.a_0 - self.g_sq) / group_size
        first_order = (self.a_v - self.g_sq) / group_size
        if baseline == "oracle":
            return first_order
        if baseline == "leave_one_out":
            return first_order + (self.d + self.g_sq) / (group_size * (group_size - 1))
        raise ValueError(f"no closed form for baseline {baseline}: use none, leave_one_out, oracle")


def centred(rewards: Array) -> Array:
    """Subtract the mean over the last axis from rewards; return exactly 0 if all are equal.

    The first reward is subtracted before the mean is computed. A large constant in all rewards
    therefore does not reduce the precision.

    >>> centred(np.array([1e9, 1e9 + 1])).tolist()
    [-0.5, 0.5]
    """
    change = rewards - rewards[..., :1]
    return change - change.mean(axis=-1, keepdims=True)


def pool_gradient_weights(rewards_PN: Array) -> Array:
    """Return the weights w of a pool's leave-one-out gradient `ghat_N = sum_i w_i s_i`, [P, N]."""
    return centred(rewards_PN) / (rewards_PN.shape[-1] - 1)


def exact_moments(q_PY: Array, z_PY: Array, p_PY: Array, g_sq_P: Array) -> Moments:
    """Compute the exact moments of a policy for which all Y outcomes of a prompt can be listed.

    Args:
        q_PY: squared score norms of the outcomes.
        z_PY: rewards of the outcomes.
        p_PY: probabilities of the outcomes.
        g_sq_P: ||g||^2 of each prompt.
    """

    def mean(values_PY: Array) -> Array:
        return (p_PY * values_PY).sum(axis=-1)

    m0, value = mean(q_PY), mean(z_PY)
    deviation_PY = z_PY - value[:, None]
    var_z = mean(deviation_PY**2)
    return Moments(
        m0=m0,
        m1=mean(q_PY * z_PY),
        value=value,
        a_0=mean(q_PY * z_PY**2),
        a_v=mean(q_PY * deviation_PY**2),
        v_m1=value * mean(q_PY * z_PY),
        v2_m0=value**2 * m0,
        d=m0 * var_z,
        g_sq=g_sq_P,
        cov_qz=mean(q_PY * deviation_PY),
        var_q=mean((q_PY - m0[:, None]) ** 2),
        var_z=var_z,
    )


def pool_moments(rewards_PN: Array, gram_PNN: Array) -> Moments:
    """Estimate the moments without bias from the rewards and Gram matrix of each prompt's pool.

    Args:
        rewards_PN: rewards of the completions, float64.
        gram_PNN: inner products of the scores of a prompt's completions, float64.

    Raises:
        ValueError: N < 3.
    """
    assert gram_PNN.shape == (*rewards_PN.shape, rewards_PN.shape[-1])
    weights_PN = pool_gradient_weights(rewards_PN)
    ghat_sq_P = np.einsum("pi,pij,pj->p", weights_PN, gram_PNN, weights_PN, optimize=True)
    return norm_moments(np.diagonal(gram_PNN, axis1=1, axis2=2), rewards_PN, ghat_sq_P)


def norm_moments(q_PN: Array, rewards_PN: Array, ghat_sq_P: Array) -> Moments:
    """Estimate the moments of `pool_moments` from squared norms of scores and of pool gradients.

    The pool gradient ghat_N is the leave-one-out gradient estimate from all N completions. Products
    of expectations are estimated by sums over distinct completions. These sums are computed from
    power sums such as Sqz, the sum of q z over the completions. With
    `(N)_k = N (N-1) .. (N-k+1)`, the estimates are

        V M_1   = ( Sz Sqz - Sqzz ) / (N)_2
        V^2 M_0 = ( Sz^2 Sq - Szz Sq - 2 Sz Sqz + 2 Sqzz ) / (N)_3
        W M_0   = ( Szz Sq - Sqzz ) / (N)_2,   W = E z^2
        ||g||^2 = ( ||ghat_N||^2 - A_V / N - D / (N (N-1)) ) / ( 1 - 1/N + 1 / (N (N-1)) )

    The sums use rewards minus their mean, for precision. At the end, the moments that depend on
    this shift are converted to the original rewards.

    Args:
        q_PN: squared score norms, float64.
        rewards_PN: rewards, float64.
        ghat_sq_P: ||ghat_N||^2 of each prompt's pool.

    Raises:
        ValueError: N < 3; products of three expectations need three distinct completions.
    """
    n = rewards_PN.shape[-1]
    if n < 3:
        raise ValueError(f"unbiased moments need at least 3 completions per prompt, got {n}")
    z_PN = centred(rewards_PN)
    sums = {k: x.sum(-1) for k, x in _powers(q_PN, z_PN).items()}
    return _shifted(_moments_of_sums(n, sums, ghat_sq_P), rewards_PN.mean(axis=-1))


def shifted_moments(rewards_PN: Array, gram_PNN: Array) -> tuple[Array, Array, Array]:
    r"""Estimate A_V, D and ||g||^2 for scores minus their expectation, [P] each.

    Use this function if the expectation of the scores is not 0. `norm_moments` would then be
    biased, because its squared norms include the expected score. The estimates here are unbiased
    for any expected score. The weights of the pool gradient ghat sum to 0, so neither ghat nor its
    error depends on the expected score. The function writes ghat as the mean over pairs of the
    kernel `h_ij = (z_i - z_j)(s_i - s_j) / 2` (Hoeffding 1948), for which

        E||h_12||^2 = (A_V + D)/2 + ||g||^2     E<h_12, h_13> = (A_V + 3 ||g||^2)/4
        E<h_12, h_34> = ||g||^2

    Args:
        rewards_PN: rewards, float64.
        gram_PNN: inner products of the scores, float64.

    Raises:
        ValueError: N < 4; two disjoint pairs are needed.
    """
    n = rewards_PN.shape[-1]
    if n < 4:
        raise ValueError(
            f"scores with a nonzero mean need at least 4 completions per prompt, got {n}"
        )
    z = rewards_PN - rewards_PN.mean(-1, keepdims=True)
    gram = gram_PNN - gram_PNN.mean(-1, keepdims=True)
    gram = gram - gram.mean(-2, keepdims=True)
    q = np.diagonal(gram, axis1=1, axis2=2)
    # ||sum z s||^2.
    sum_sq = np.einsum("pi,pij,pj->p", z, gram, z, optimize=True)
    distances = q[:, :, None] + q[:, None, :] - 2 * gram
    same = ((z[:, :, None] - z[:, None, :]) ** 2 * distances).sum((-1, -2)) / 4
    shared = (n * n * (z * z * q).sum(-1) + 3 * n * sum_sq) / 4 - same
    disjoint = n * n * sum_sq - 4 * shared - 2 * same
    pairs, triples = n * (n - 1), n * (n - 1) * (n - 2)
    g_sq = disjoint / (triples * (n - 3))
    a_v = 4 * shared / triples - 3 * g_sq
    return a_v, 2 * same / pairs - 2 * g_sq - a_v, g_sq


def _shifted(moments: Moments, shift: Array) -> Moments:
    """Return the moments after a constant is added to the rewards of each prompt.

    Args:
        moments: moments of the original rewards.
        shift: constant for each prompt.
    """
    # This estimate of V M_0 is unbiased, because it uses pairs of different completions.
    v_m0 = moments.m1 - moments.cov_qz
    return replace(
        moments,
        m1=moments.m1 + shift * moments.m0,
        value=moments.value + shift,
        a_0=moments.a_0 + 2 * shift * moments.m1 + shift**2 * moments.m0,
        v_m1=moments.v_m1 + shift * (v_m0 + moments.m1) + shift**2 * moments.m0,
        v2_m0=moments.v2_m0 + 2 * shift * v_m0 + shift**2 * moments.m0,
    )


def _powers(q: Array, z: Array) -> dict[str, Array]:
    """Compute the summands of the power sums that the moments need.

    Each array has the shape of q and z; the name "qz" means q times z.
    """
    return {"q": q, "z": z, "zz": z * z, "qz": q * z, "qzz": q * z * z, "qq": q * q}


def _moments_of_sums(n: int, sums: dict[str, Array], ghat_sq: Array) -> Moments:
    """Estimate the moments of n completions from their power sums; see `norm_moments`."""
    sq, sz, szz, sqz, sqzz, sqq = (sums[k] for k in ("q", "z", "zz", "qz", "qzz", "qq"))
    pairs, triples = n * (n - 1), n * (n - 1) * (n - 2)
    v_m1 = (sz * sqz - sqzz) / pairs
    v2_m0 = (sz * sz * sq - szz * sq - 2 * sz * sqz + 2 * sqzz) / triples
    w_m0 = (szz * sq - sqzz) / pairs
    a_v, d = sqzz / n - 2 * v_m1 + v2_m0, w_m0 - v2_m0
    return Moments(
        m0=sq / n,
        m1=sqz / n,
        value=sz / n,
        a_0=sqzz / n,
        a_v=a_v,
        v_m1=v_m1,
        v2_m0=v2_m0,
        d=d,
        g_sq=(ghat_sq - a_v / n - d / pairs) / (1 - 1 / n + 1 / pairs),
        cov_qz=(sqz - sz * sq / n) / (n - 1),
        var_q=(sqq - sq * sq / n) / (n - 1),
        var_z=(szz - sz * sz / n) / (n - 1),
    )


def covariance_excess(q: Array, z: Array) -> Array:
    """Estimate A_V - A_{b*} = Cov(q, z)^2 / M_0 over the last axis.

    This is how much the best baseline b* = E[q z]/E[q] of a prompt reduces A_b compared with b = V.
    The estimate divides a U-statistic, which is unbiased for Cov(q, z)^2, by the mean of q. A
    jackknife removes the bias of order 1/N. If q and z are independent, the expectation of the
    result is exactly 0, because the U-statistic has expectation 0 for any values of q. If they are
    dependent, the result is consistent but biased, because the denominator is estimated. The bias
    is of order 1/N^2. It is directed towards 0 if the largest q dominate. The result can be
    negative, and it is NaN for fewer than 5 completions.
    """
    count = q.shape[-1]
    if count < 5:
        return np.full(q.shape[:-1], np.nan)
    floor = np.maximum(ROUNDING * q.max(axis=-1, keepdims=True), np.finfo(float).tiny)
    total = q.sum(axis=-1, keepdims=True)
    powers = _centred_powers(q, z)
    sums = {name: x.sum(axis=-1, keepdims=True) for name, x in powers.items()}
    excess = _squared_covariance(count, sums) / np.maximum(total / count, floor)
    delete_one_sums = {name: sums[name] - powers[name] for name in sums}
    delete_one_mean = np.maximum((total - q) / (count - 1), floor)
    delete_one = _squared_covariance(count - 1, delete_one_sums) / delete_one_mean
    return count * excess[..., 0] - (count - 1) * delete_one.mean(axis=-1)


def _centred_powers(q: Array, z: Array) -> dict[str, Array]:
    """Compute the summands of the power sums of q and z minus their sample means."""
    q, z = q - q.mean(axis=-1, keepdims=True), z - z.mean(axis=-1, keepdims=True)
    powers = _powers(q, z)
    return powers | {"qqz": q * powers["qz"], "qqzz": powers["qz"] ** 2}


def _squared_covariance(n: int, sums: dict[str, Array]) -> Array:
    """Compute the U-statistic for Cov(q, z)^2 from power sums of q and z.

    The result does not depend on constants subtracted from q and z before the sums are formed. For
    precision, these constants should be near the means.

    `Cov = M_1 - V M_0`, so the square is `M_1^2 - 2 M_1 V M_0 + V^2 M_0^2`. Each product of
    expectations is estimated by a mean over distinct completions (Hoeffding 1948). The last product
    needs four distinct completions.
    """
    a, b = sums["q"] / n, sums["z"] / n
    c = sums["qz"] - n * a * b
    qq, zz = sums["qq"] - n * a * a, sums["zz"] - n * b * b
    qqzz = (
        sums["qqzz"] - 2 * b * sums["qqz"] - 2 * a * sums["qzz"] + b * b * sums["qq"]
        + a * a * sums["zz"] + 4 * a * b * sums["qz"] - 3 * n * a * a * b * b
    )  # fmt: skip
    pairs = n * (n - 1)
    triples = pairs * (n - 2)
    # The three terms are M_1^2, M_1 V M_0 and V^2 M_0^2.
    same = (c * c - qqzz) / pairs
    mixed = (2 * qqzz - c * c) / triples
    disjoint = (2 * c * c - 6 * qqzz + qq * zz) / (triples * (n - 3))
    return same - 2 * mixed + disjoint


def correlation(moments: Moments) -> Interval:
    """Estimate corr(q, Z), with an interval over prompts.

    The correlation is E Cov(q, Z | X) / sqrt(E Var(q | X) E Var(Z | X)), where X is the prompt, q
    the squared score norm and Z the reward. It is negative if wrong answers have larger score norms
    than right answers, and 0 under the paper's Assumption 2. The three means over prompts are
    estimated without bias, but the ratio has a bias of order 1/P. The result is NaN if q or Z does
    not vary within prompts.

    Args:
        moments: moments of at least 2 prompts.
    """
    parts_KP = np.stack([moments.cov_qz, moments.var_q, moments.var_z])
    total_K = parts_KP.sum(axis=1)

    def ratio(covariance: Array, var_q: Array, var_z: Array) -> Array:
        spread = var_q * var_z
        return covariance / np.sqrt(np.where(spread > 0, spread, np.nan))

    delete_one_P = ratio(*(total_K[:, None] - parts_KP))
    return jackknife_interval(float(ratio(*total_K)), delete_one_P[None])


def refutes_assumption2(share: Interval, corr: Interval) -> bool:
    """Return True if the data refute Assumption 2.

    Assumption 2 states that, given the prompt, squared score norm and reward are uncorrelated.

    Two tests can refute it:

    1. The share `E[Cov(q, Z | X)^2 / M_0] / A_V` is significantly positive. It is the share of A_V
       that the best prompt-only baseline removes. Covariances of opposite sign cancel in
       corr(q, Z), but not in this share.
    2. The correlation corr(q, Z) differs significantly from 0. In small samples, it can be
       significant even if the share is not. With heavy tails, the 95 % interval of corr(q, Z)
       wrongly excludes 0 in 5 to 17 % of samples. Therefore this interval must exclude 0 by a
       margin (`CORRELATION_MARGIN`).

    The rate of false refutations was simulated with 8 to 32 completions per question, light to
    heavy tails, and 300 samples per case. If the assumption is true for every prompt, the result is
    True in at most 5 % of the samples with 12 to 60 questions, and in 2 to 9 % with 4 or 6.

    Args:
        share: (A_V - A_b*) / A_V with its 95 % interval over prompts.
        corr: corr(q, Z), averaged over prompts, with its 95 % interval.
    """
    return share.low > 0 or is_correlated(corr)


def is_correlated(corr: Interval) -> bool:
    """Return True if the 99.9 % interval, computed from the 95 % interval `corr`, excludes 0."""
    return bool(abs(corr.estimate) > CORRELATION_MARGIN * (corr.high - corr.estimate))
