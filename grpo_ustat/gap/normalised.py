r"""Exact effect of division by the group's standard deviation for 0/1 rewards (Lemma 11).

Completion i of a prompt has the score s_i (the gradient of its log-probability) and the reward z_i.
The mean reward of the group's other completions is zbar_{-i}. The prompt has the expected reward V,
the variance sigma^2 = V (1 - V) and the gradient g = E[s z]. Two estimates are compared:

    N = 1/G sum_i s_i (z_i - zbar_{-i}) / (std + epsilon)
    U = 1/G sum_i s_i (z_i - zbar_{-i}) / sigma

N divides by std, the standard deviation of the group's rewards with divisor G-1. U divides by the
exact sigma and is the U-statistic with kernel h / sigma.

If a group has n right answers, `std^2 = n (G-n) / (G (G-1))`. Given n, the scores are independent.
The score of a right answer has mean g / V and covariance trace t_1. The score of a wrong answer has
mean -g / (1-V) and covariance trace t_0. Hence, given n,

    E[sigma U | n] = std^2 g / sigma^2
    tr Cov(sigma U | n) = ( (G-n)^2 n t_1 + n^2 (G-n) t_0 ) / (G (G-1))^2

Exact moments are therefore binomial sums over n. At epsilon = 0, with v = sigma^2 and the fourth
central moment mu_4 of the rewards, the following limits hold as G grows:

    G Var U -> within + 4 shift      within = ( (1-V)^2 V t_1 + V^2 (1-V) t_0 ) / v
    G Var N -> within +   shift      shift  = ||g||^2 (1 - 4v) / (4 v^2)
    G E||N - U||^2 ->     shift             = ||g||^2 (mu_4 - sigma^4) / (4 sigma^6)
    G (E N - g/sigma) -> -g (1 - 4v) / (8 v^(3/2))

In the limit the mean squared difference between N and U is therefore at most a quarter of the
variance of U, and the variance of N is at most the variance of U.

Averaging over prompts reduces the variance but not the bias. Let b_x be the last limit above for
prompt x, `b = E b_x` its mean over prompts, tau = E[g/sigma], and C1 the variance of g/sigma over
prompts. With n = B G rollouts, the mean squared errors are

    MSE_N = ||b||^2 / G^2 + ( G C1 + 2 Cov(g/sigma, b_X) + within + shift ) / n + ...
    MSE_U =                 ( G C1                       + within + 4 shift ) / n + ...

Moreover `E <g/sigma, b_X> = -shift / 2`. To leading order in 1/G, N therefore has the smaller error
if `n ||b||^2 / G^2 < 4 shift + 2 <tau, b>`. The best group size of N grows with n, like
`( 2 ||b||^2 n / C1 )^(1/3)`.

If the baseline is the mean of the whole group instead of zbar_{-i}, N is multiplied by (G-1)/G.
This adds -g/sigma to b_x, so that `b_x = -g (1 + 4v) / (8 v^(3/2))`.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from scipy import stats

from grpo_ustat.records import Array

# A probability this close to 0 or 1 differs from it only by rounding.
ZERO_VARIANCE_CHANCE = 1e-12


@dataclass(frozen=True)
class RightAndWrong:
    """Moments of the scores and 0/1 rewards of each prompt, each [P].

    The errors of N and U are computed from these moments.
    """

    # Expected reward, V.
    value: Array
    # Squared norm of the gradient, ||g||^2.
    g_sq: Array
    # Trace t_1 of the score's covariance given reward 1.
    right: Array
    # Trace t_0 of the score's covariance given reward 0.
    wrong: Array

    @property
    def var_z(self) -> Array:
        """Variance of the rewards, sigma^2 = V (1 - V)."""
        return self.value * (1 - self.value)

    @property
    def within(self) -> Array:
        """Limit of G times the expected variance of N given the rewards; it is the same for U."""
        v, p = self.var_z, self.value
        return ((1 - p) ** 2 * p * self.right + p**2 * (1 - p) * self.wrong) / v

    @property
    def shift(self) -> Array:
        """Limit of `G E||N - U||^2` at epsilon = 0; the limit is 0 if V = 1/2 or g = 0."""
        return self.g_sq * (1 - 4 * self.var_z) / (4 * self.var_z**2)

    @property
    def bias(self) -> Array:
        """Limit of `G ||E N - g / sigma||` at epsilon = 0."""
        return np.sqrt(self.g_sq) * (1 - 4 * self.var_z) / (8 * self.var_z**1.5)

    def floor(self, epsilon: float) -> Array:
        """Return the limit of `E||N - U||^2` at a fixed epsilon.

        The limit is `||g||^2 (1/(sigma+eps) - 1/sigma)^2`.

        >>> float(RightAndWrong(*np.full((4, 1), 0.5)).floor(0.5)[0])
        0.5
        """
        sigma = np.sqrt(self.var_z)
        return self.g_sq * (1 / (sigma + epsilon) - 1 / sigma) ** 2


@dataclass(frozen=True)
class NormalisedMoments:
    """Exact moments of N and U at one group size, each [P]."""

    # E||N - U||^2.
    difference: Array
    # tr Cov N.
    variance: Array
    # tr Cov U.
    plain_variance: Array
    # Signed bias `<E N - g/sigma, g> / ||g||`; negative if E N is shorter than g/sigma.
    bias: Array


def right_and_wrong(probability_PY: Array, score_PYK: Array, reward_PY: Array) -> RightAndWrong:
    """Compute the moments of every prompt of an enumerable policy.

    Args:
        probability_PY: probability of each of the Y outcomes (possible completions) of a prompt.
        score_PYK: score of each outcome, for K parameters.
        reward_PY: reward of each outcome, 0 or 1.

    Raises:
        ValueError: If a reward is not 0 or 1, or if the rewards of a prompt are all equal.
    """
    assert score_PYK.shape[:2] == probability_PY.shape == reward_PY.shape
    if not np.isin(reward_PY, (0, 1)).all():
        odd = reward_PY[~np.isin(reward_PY, (0, 1))][0]
        raise ValueError(f"exact normalised moments need 0/1 rewards, got {odd}: round the rewards")
    value_P = (probability_PY * reward_PY).sum(axis=1)
    for prompt in np.flatnonzero(
        (value_P < ZERO_VARIANCE_CHANCE) | (value_P > 1 - ZERO_VARIANCE_CHANCE)
    ):
        raise ValueError(
            f"prompt {prompt} has V={value_P[prompt]}, so sigma is 0 and every group has zero "
            "variance: remove the prompt"
        )
    g_PK = np.einsum("py,pyk->pk", probability_PY * reward_PY, score_PYK)
    traces: list[Array] = []
    for indicator_PY, chance_P in ((reward_PY, value_P), (1 - reward_PY, 1 - value_P)):
        law_PY = probability_PY * indicator_PY / chance_P[:, None]
        mean_PK = np.einsum("py,pyk->pk", law_PY, score_PYK)
        centred_PYK = score_PYK - mean_PK[:, None]
        traces.append((law_PY * np.square(centred_PYK).sum(axis=2)).sum(axis=1))
    right_P, wrong_P = traces
    return RightAndWrong(value_P, np.square(g_PK).sum(axis=1), right_P, wrong_P)


def mean_weight(value: Array, group_size: int, epsilon: float) -> Array:
    """Return the factor w in `E N = w grad V`, the expectation of the normalised estimate.

    The factor is `w = E[ std^2 / (std + epsilon) ] / sigma^2` and depends only on V.

    Args:
        value: expected rewards V, as an array of any shape.
        group_size: number of completions per prompt, G >= 2.
        epsilon: constant added to std.

    >>> float(mean_weight(np.array(0.5), 4096, 0.0).round(2))  # 1 / sigma
    2.0
    """
    n = np.arange(1, group_size)
    std_n = np.sqrt(n * (group_size - n) / (group_size * (group_size - 1)))
    law = np.asarray(stats.binom.pmf(n, group_size, value[..., None]))
    return (law * std_n**2 / (std_n + epsilon)).sum(axis=-1) / (value * (1 - value))


def normalised_moments(
    moments: RightAndWrong, group_size: int, epsilon: float
) -> NormalisedMoments:
    """Compute exact moments of N and U by a sum over the number of right answers in a group.

    Args:
        moments: moments of each prompt's scores and rewards.
        group_size: number of completions per prompt, G >= 2.
        epsilon: constant added to std.

    >>> coin = RightAndWrong(*(np.array([x]) for x in (0.5, 0.25, 0.0, 0.0)))
    >>> pair = normalised_moments(coin, 2, 0.0)  # s = +-1; U is 0 or 2, N 0 or sqrt 2
    >>> [round(float(x[0]), 4) for x in (pair.difference, pair.variance, pair.plain_variance)]
    [0.1716, 0.5, 1.0]
    """
    size, n = group_size, np.arange(group_size + 1.0)
    law_Pn = np.asarray(stats.binom.pmf(n, size, moments.value[:, None]))
    sigma_P1 = np.sqrt(moments.var_z)[:, None]
    var_n = n * (size - n) / (size * (size - 1))
    own_n = np.where(var_n > 0, 1 / (np.sqrt(np.where(var_n > 0, var_n, 1)) + epsilon), 0)
    mean_sq_Pn = moments.g_sq[:, None] * (var_n / sigma_P1**2) ** 2
    right_Pn = (size - n) ** 2 * n * moments.right[:, None]
    wrong_Pn = n**2 * (size - n) * moments.wrong[:, None]
    second_Pn = mean_sq_Pn + (right_Pn + wrong_Pn) / (size * (size - 1)) ** 2

    def second(factor_Pn: Array) -> Array:
        return (law_Pn * factor_Pn**2 * second_Pn).sum(axis=1)

    norm_P, sigma_P = np.sqrt(moments.g_sq), sigma_P1[:, 0]
    mean_P = norm_P * mean_weight(moments.value, size, epsilon)
    return NormalisedMoments(
        difference=second(own_n - 1 / sigma_P1),
        variance=second(own_n) - mean_P**2,
        plain_variance=second(1 / sigma_P1) - moments.g_sq / sigma_P**2,
        bias=mean_P - norm_P / sigma_P,
    )
