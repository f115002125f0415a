r"""Exact mean and variance of a gradient estimate from completions of another policy.

For one prompt the estimate is

    N = 1/G sum_i { A_i w_i + a_i }      A_i = (z_i - mean of the group's others) / d(std)

Here std is the standard deviation of the group's rewards z, with divisor G-1, and d is a function
of std; see `Normalisation`. Each completion has two arbitrary vectors, w and a. All expectations
are under the policy that wrote the completions.

If there is no normalisation (d = 1) and the vectors w have mean zero, as scores do, N has the
Hoeffding decomposition of the U-statistic (paper, Lemma 1). The vectors a are averaged without an
advantage and contribute only to the first-order part. With mu = E[w z],

    mean        mu + E a
    variance    ( E||w (z - V) + a||^2 - ||mu + E a||^2 ) / G
                + ( E||w||^2 sigma^2 + ||mu||^2 ) / ( G (G-1) )

The vectors w have mean zero also with importance ratios. This is true of `sum_t rho_t grad log
pi(y_t)`, with token ratios, and of `rho grad log pi(y)`, with completion ratios.

With normalisation, A_i depends on the other completions of the group only through `sum z` and
`sum z^2`. For rewards on a grid, z = minimum + step j, the joint law of `(sum j, sum j^2)` of n
completions is the n-fold convolution of the law of a single completion, computed by Fourier
transform. Then

    E N        = E[ w E(A | z) + a ]
    E||N||^2   = 1/G E||A w + a||^2 + (1 - 1/G) E< A w + a, A' w' + a' >

need only the moments of A given z, and the joint moments of A and A' given z and z'. If rejected
groups are redrawn, all expectations are conditional on acceptance of the group. As G grows, with mu
= E[w z], the central moments mu_k of z, sigma = std of z and d(std) = std,

    G (E N - mu/sigma - E a) -> -( E[w (z-V)^3] - mu sigma^2 ) / (2 sigma^3)
                                + 3 mu (mu_4 - sigma^4) / (8 sigma^5)
    G tr Cov N               -> E|| (w (z-V) - mu)/sigma - mu ((z-V)^2 - sigma^2)/(2 sigma^3)
                                    + a - E a ||^2

If the estimate is divided by sigma instead of std, its limit variance has only the first and the
last of these terms, and its limit bias is 0.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial

import numpy as np
from scipy import fft

from grpo_ustat.records import Array, Integers, Mask

NORMALISATIONS = ("none", "sigma", "group_std", "group_std_floor", "group_std_redrawn")
# A mean counts as 0 if its norm, relative to the root mean square norm, is below this value.
MEAN_ROUNDING = 1e-9
# A reward counts as lying on the grid if its distance from the grid, in steps, is below this value.
GRID_ROUNDING = 1e-9


@dataclass(frozen=True)
class EstimateMoments:
    """Mean and variance of an estimate for each prompt, at one group size."""

    mean_PD: Array
    # Trace of the covariance of the estimate given the prompt.
    within_P: Array

    def variance(self, num_prompts: int) -> float:
        """Return the trace of the estimate's covariance for B prompts drawn independently."""
        between_P = np.square(self.mean_PD - self.mean_PD.mean(axis=0)).sum(axis=1)
        return float((between_P + self.within_P).mean() / num_prompts)


@dataclass(frozen=True)
class GroupMoments:
    """Mean and variance of the estimate for each prompt, as functions of the group size."""

    mean_PD: Array
    # Coefficient of 1/G in the variance.
    first_P: Array
    # Coefficient of 1/(G (G-1)) in the variance.
    second_P: Array

    def at(self, group_size: int) -> EstimateMoments:
        """Return the moments of the estimate from groups of G completions."""
        within_P = self.first_P / group_size + self.second_P / (group_size * (group_size - 1))
        return EstimateMoments(self.mean_PD, within_P)


def outcome_mean(probability_PY: Array, values: Array) -> Array:
    """Return the mean over outcomes of values [P, Y, ...], with shape [P, ...]."""
    return np.einsum("py,py...->p...", probability_PY, values)


def group_moments(
    probability_PY: Array,
    weight_PYD: Array,
    reward_PY: Array,
    beside_PYD: Array | float = 0.0,
) -> GroupMoments:
    """Compute the exact moments of the estimate by summing over all Y outcomes of each prompt.

    Args:
        probability_PY: probabilities of the outcomes under the sampling policy.
        weight_PYD: vector w of each outcome.
        reward_PY: rewards, z.
        beside_PYD: vectors a, which are added without an advantage.

    Raises:
        ValueError: If the mean of w is not zero.

    >>> w = np.array([[[1.0], [-1.0]]])
    >>> moments = group_moments(np.full((1, 2), 0.5), w, np.array([[1.0, 0.0]]))
    >>> moments.mean_PD.item(), moments.first_P.item(), moments.second_P.item()
    (0.5, 0.0, 0.5)
    >>> moments.at(2).variance(1)
    0.25
    """
    assert weight_PYD.shape[:2] == probability_PY.shape == reward_PY.shape

    mean = partial(outcome_mean, probability_PY)

    def sq(vectors: Array) -> Array:
        return np.square(vectors).sum(axis=-1)

    norm_P, offset_P = np.sqrt(mean(sq(weight_PYD))), np.sqrt(sq(mean(weight_PYD)))
    if (offset_P > MEAN_ROUNDING * norm_P).any():
        raise ValueError(f"the mean of the weights has norm {offset_P.max():.3g}, which must be 0")
    centred_PY1 = (reward_PY - mean(reward_PY)[:, None])[..., None]
    own_PYD = weight_PYD * centred_PY1
    mean_PD = mean(own_PYD + beside_PYD)
    return GroupMoments(
        mean_PD=mean_PD,
        first_P=mean(sq(own_PYD + beside_PYD)) - sq(mean_PD),
        second_P=norm_P**2 * mean(np.square(centred_PY1[..., 0])) + sq(mean(own_PYD)),
    )


@dataclass(frozen=True)
class Normalisation:
    """Divisor of leave-one-out advantages; the advantages of a zero-variance group are 0."""

    # Kind of divisor. `none`: 1; `sigma`: exact standard deviation of the prompt's rewards;
    # `group_std`: std + epsilon; `group_std_floor`: max(std, floor); `group_std_redrawn`: std, with
    # groups redrawn until std >= floor.
    kind: str = "none"
    # Constant added to the group's standard deviation.
    epsilon: float = 0.0
    # Lower bound on the group's standard deviation; positive.
    floor: float = 0.0

    def factor(self, std: Array) -> Array:
        """Return 1/d for the kinds that divide by the group's std; 0 for a zero-variance group.

        >>> Normalisation("group_std", epsilon=0.5).factor(np.array([0.0, 0.5])).tolist()
        [0.0, 1.0]
        """
        divisor = std + self.epsilon
        if self.kind == "group_std_floor":
            divisor = np.maximum(std, self.floor)
        if self.kind == "group_std_redrawn":
            divisor = std
        return np.where(std > 0, 1 / np.where(std > 0, divisor, 1.0), 0.0)

    def accepts(self, std: Array) -> Mask:
        """Return True for groups that are used and False for groups that must be redrawn."""
        return std >= self.floor if self.kind == "group_std_redrawn" else np.full(std.shape, True)


@dataclass(frozen=True)
class AdvantageMoments:
    """Moments of one prompt's advantages, conditional on the K levels of its rewards.

    Every expectation includes the factor 1{group accepted} / P(group accepted).
    """

    # Index of each outcome's reward among the K levels.
    level_Y: Integers
    # Probability that a group is accepted.
    acceptance: float
    # E[1], E[A], E[A^2] given the completion's level.
    zeroth_K: Array
    first_K: Array
    second_K: Array
    # E[1], E[A], E[A A'] given the levels of the completion and of a second completion in the
    # group.
    zeroth_KK: Array
    first_KK: Array
    cross_KK: Array


def advantage_moments(
    probability_Y: Array, reward_Y: Array, group_size: int, normalisation: Normalisation
) -> AdvantageMoments:
    """Compute the moments of one prompt's advantages in groups of G.

    The law of the sums over the group's other completions is enumerated.

    Args:
        probability_Y: probabilities of the outcomes under the sampling policy.
        reward_Y: rewards of the outcomes, which must lie on a grid.
        group_size: number of completions per prompt, G >= 2.
        normalisation: normalisation that divides by the group's standard deviation.

    Raises:
        ValueError: If the rewards are all equal or not on a grid, or if no group is accepted.

    >>> coin = np.array([0.5, 0.5]), np.array([1.0, 0.0])
    >>> moments = advantage_moments(*coin, 2, Normalisation("group_std"))
    >>> moments.level_Y.tolist(), moments.first_K.round(4).tolist()  # A = 0 or +-sqrt 2
    ([1, 0], [-0.7071, 0.7071])
    """
    level_Y, grid_K, step = _reward_grid(reward_Y)
    chance_K: Array = np.bincount(level_Y, weights=probability_Y).astype(np.float64)

    def group_law(own_1: Array, own_2: Array, others: int) -> tuple[Mask, Array, Array, Array]:
        """Describe groups in which given completions have sums `own_1` of j and `own_2` of j^2.

        Return acceptance, advantage scale and sum of all j, each [given sums, sums of the other
        completions], and the probabilities of the other completions' sums.
        """
        law, sum_1, sum_2 = _law_of_sums(chance_K, grid_K, others)
        sum_1, sum_2 = sum_1 + own_1[:, None], sum_2 + own_2[:, None]
        std = step * np.sqrt((group_size * sum_2 - sum_1**2) / (group_size * (group_size - 1)))
        return (
            normalisation.accepts(std),
            normalisation.factor(std) * step / (group_size - 1),
            sum_1,
            law,
        )

    accepted, scale, sum_1, law = group_law(grid_K, grid_K**2, group_size - 1)
    advantage = scale * (group_size * grid_K[:, None] - sum_1)
    zeroth_K, first_K, second_K = ((accepted * x) @ law for x in (1.0, advantage, advantage**2))
    acceptance = float(chance_K @ zeroth_K)
    if not acceptance > 0:
        raise ValueError(
            f"no group of {group_size} has a std of at least {normalisation.floor}: lower the floor"
        )
    level, other = np.repeat(grid_K, len(grid_K)), np.tile(grid_K, len(grid_K))
    accepted, scale, sum_1, law = group_law(level + other, level**2 + other**2, group_size - 2)
    first, second = (scale * (group_size * x[:, None] - sum_1) for x in (level, other))
    shape = len(grid_K), len(grid_K)
    zeroth_KK, first_KK, cross_KK = (
        ((accepted * x) @ law).reshape(shape) / acceptance for x in (1.0, first, first * second)
    )
    return AdvantageMoments(
        level_Y=level_Y,
        acceptance=acceptance,
        zeroth_K=zeroth_K / acceptance,
        first_K=first_K / acceptance,
        second_K=second_K / acceptance,
        zeroth_KK=zeroth_KK,
        first_KK=first_KK,
        cross_KK=cross_KK,
    )


def _reward_grid(reward_Y: Array) -> tuple[Integers, Array, float]:
    """Return each reward's level, the levels j on the grid `minimum + step j`, and the step.

    Raises:
        ValueError: If the rewards are all equal or not on a grid.
    """
    levels, level_Y = np.unique(reward_Y, return_inverse=True)
    if len(levels) < 2:
        raise ValueError(
            f"all rewards are {levels[0]}, so every group has zero variance: remove the prompt"
        )
    step = float(np.diff(levels).min())
    steps_K = (levels - levels[0]) / step
    grid_K = steps_K.round()
    if np.abs(steps_K - grid_K).max() > GRID_ROUNDING:
        raise ValueError(f"rewards {levels.tolist()} are not evenly spaced: round them to a grid")
    return level_Y, grid_K, step


def _law_of_sums(chance_K: Array, grid_K: Array, count: int) -> tuple[Array, Array, Array]:
    """Return the probability, sum j and sum j^2 of every possible pair of sums, each [S].

    Args:
        chance_K: probabilities of the levels of one completion.
        grid_K: levels, integers j.
        count: number of completions over which the sums run; if 0, the sums are empty and have
            probability 1.
    """
    if count == 0:
        return np.ones(1), np.zeros(1), np.zeros(1)
    most = int(grid_K[-1])
    shape = count * most + 1, count * most**2 + 1
    padded = tuple(fft.next_fast_len(size, real=True) for size in shape)
    single = np.zeros(padded)
    single[grid_K.astype(int), (grid_K**2).astype(int)] = chance_K
    law = fft.irfft2(fft.rfft2(single) ** count, padded)[: shape[0], : shape[1]]
    sum_1, sum_2 = np.indices(shape)
    # Pairs that cannot occur have a nonzero probability only because of rounding.
    possible = (sum_1 <= sum_2) & (sum_1**2 <= count * sum_2) & (law > 0)
    return law[possible], sum_1[possible].astype(float), sum_2[possible].astype(float)


def estimate_moments(
    moments: Sequence[AdvantageMoments],
    probability_PY: Array,
    weight_PYD: Array,
    group_size: int,
    beside_PYD: Array | float = 0.0,
) -> EstimateMoments:
    """Compute the estimate's exact mean and variance; shapes are as in `group_moments`.

    Args:
        moments: moments of each prompt's advantages, from `advantage_moments`. probability_PY:
            probabilities of the outcomes from which `moments` were computed. weight_PYD: vectors w.
            beside_PYD: vectors a.
    """
    beside_PYD = np.broadcast_to(beside_PYD, weight_PYD.shape)
    means: list[Array] = []
    variances: list[float] = []
    for moment, probability_Y, weight_YD, beside_YD in zip(
        moments, probability_PY, weight_PYD, beside_PYD, strict=True
    ):
        levels_K1 = np.arange(len(moment.zeroth_K))[:, None]
        chance_KY = (moment.level_Y == levels_K1) * probability_Y
        weight_KD, beside_KD = chance_KY @ weight_YD, chance_KY @ beside_YD
        mean_D = moment.first_K @ weight_KD + moment.zeroth_K @ beside_KD
        squares = (
            moment.second_K @ chance_KY @ np.square(weight_YD).sum(axis=1)
            + 2 * moment.first_K @ chance_KY @ (weight_YD * beside_YD).sum(axis=1)
            + moment.zeroth_K @ chance_KY @ np.square(beside_YD).sum(axis=1)
        )
        products = (
            (moment.cross_KK * (weight_KD @ weight_KD.T)).sum()
            + 2 * (moment.first_KK * (weight_KD @ beside_KD.T)).sum()
            + (moment.zeroth_KK * (beside_KD @ beside_KD.T)).sum()
        )
        second = squares / group_size + (1 - 1 / group_size) * products
        means.append(mean_D)
        variances.append(second - mean_D @ mean_D)
    return EstimateMoments(np.array(means), np.array(variances))


@dataclass(frozen=True)
class LargeGroups:
    """Limits as G grows, for each prompt."""

    # Limit of G times the bias relative to mu/sigma + E a.
    bias_PD: Array
    # Limit of G times the trace of the covariance.
    variance_P: Array
    # Limit of the same quantity for the U-statistic, which is divided by sigma.
    sigma_variance_P: Array


def large_groups(
    probability_PY: Array,
    weight_PYD: Array,
    reward_PY: Array,
    beside_PYD: Array | float = 0.0,
) -> LargeGroups:
    """Compute the limits for d(std) = std by the delta method; shapes as in `group_moments`.

    Args:
        probability_PY: probabilities of the outcomes under the sampling policy.
        weight_PYD: vectors w.
        reward_PY: rewards, z.
        beside_PYD: vectors a.
    """
    mean = partial(outcome_mean, probability_PY)
    centred_PY = reward_PY - mean(reward_PY)[:, None]
    sigma_P = np.sqrt(mean(centred_PY**2))
    mu_PD = mean(centred_PY[..., None] * weight_PYD)
    third_PD = mean((centred_PY**3)[..., None] * weight_PYD)
    kurtosis_P = mean(centred_PY**4) / sigma_P**4 - 1
    bias_PD = (
        -(third_PD / sigma_P[:, None] ** 3 - mu_PD / sigma_P[:, None]) / 2
        + 3 * mu_PD * (kurtosis_P / sigma_P)[:, None] / 8
    )
    sigma = sigma_P[:, None, None]
    beside_PYD = np.broadcast_to(beside_PYD, weight_PYD.shape)
    plain_PYD = (centred_PY[..., None] * weight_PYD - mu_PD[:, None]) / sigma
    plain_PYD = plain_PYD + beside_PYD - mean(beside_PYD)[:, None]
    shift_PY = np.square(centred_PY / sigma_P[:, None]) - 1
    own_PYD = plain_PYD - mu_PD[:, None] * shift_PY[..., None] / (2 * sigma)
    variance_P, sigma_variance_P = (mean(np.square(x).sum(axis=-1)) for x in (own_PYD, plain_PYD))
    return LargeGroups(bias_PD, variance_P, sigma_variance_P)
