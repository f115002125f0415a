r"""Exact mean and variance of a gradient estimate from completions of another policy.

For one prompt the estimate is

    N = 1/G sum_i { A_i w_i + a_i }      A_i = (z_i - mean of the group's others) / d(std)

Here z_i is the reward of completion i, and A_i is its advantage. The standard deviation std of the
group's rewards has the divisor G-1, and d is a function of std; see `Normalisation`. The vectors
w_i and a_i are arbitrary: w_i is multiplied by the advantage (for example a score, the gradient of
the log-probability), and a_i is not (for example the gradient of a KL penalty). All expectations
are under the policy that sampled the completions. V and sigma are the mean and the standard
deviation of z.

Without normalisation (d = 1), and if the vectors w have mean zero, as scores do, N has the
Hoeffding decomposition of the U-statistic (paper, Lemma 1). The vectors a contribute only to the
first-order part of this decomposition. With mu = E[w z],

    mean        mu + E a
    variance    ( E||w (z - V) + a||^2 - ||mu + E a||^2 ) / G
                + ( E||w||^2 sigma^2 + ||mu||^2 ) / ( G (G-1) )

With importance ratios, the vectors w also have mean zero. They are `sum_t rho_t grad log pi(y_t)`
with token ratios, and `rho grad log pi(y)` with completion ratios.

With normalisation, A_i depends on the other completions of the group only through `sum z` and
`sum z^2`. The rewards must lie on a grid, z = minimum + step j with integers j. The joint law of
`(sum j, sum j^2)` of n completions is then the n-fold convolution of the law of one completion, and
is computed by Fourier transform. It gives the moments of A given z, and the joint moments of the
advantages A and A' of two completions given their rewards z and z'. From them follow

    E N        = E[ w E(A | z) + a ]
    E||N||^2   = 1/G E||A w + a||^2 + (1 - 1/G) E< A w + a, A' w' + a' >

If rejected groups are redrawn, all expectations are conditional on acceptance of the group.

For d(std) = std, the following limits hold as G grows, where mu_4 is the fourth central moment of
z:

    G (E N - mu/sigma - E a) -> -( E[w (z-V)^3] - mu sigma^2 ) / (2 sigma^3)
                                + 3 mu (mu_4 - sigma^4) / (8 sigma^5)
    G tr Cov N               -> E|| (w (z-V) - mu)/sigma - mu ((z-V)^2 - sigma^2)/(2 sigma^3)
                                    + a - E a ||^2

If the advantages are divided by the exact sigma instead of std, the first limit is 0, and the
second contains only the terms `(w (z-V) - mu)/sigma` and `a - E a`.

In the names of arrays, Y is the number of possible completions (outcomes) of a prompt, D the length
of the vectors, and K the number of reward levels.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial

import numpy as np
from scipy import fft

from grpo_ustat.records import Array, Integers, Mask

NORMALISATIONS = ("none", "sigma", "group_std", "group_std_floor", "group_std_redrawn")
# The mean of vectors counts as 0 if its norm is below this fraction of their root mean square norm.
MEAN_ROUNDING = 1e-9
# A reward counts as lying on the grid if it is at most this fraction of a step away from the grid.
GRID_ROUNDING = 1e-9


@dataclass(frozen=True)
class EstimateMoments:
    """Mean and variance of an estimate for each prompt, at one group size."""

    mean_PD: Array
    # Trace of the covariance of the estimate from one group of the prompt.
    within_P: Array

    def variance(self, num_prompts: int) -> float:
        """Return the trace of the covariance of the mean estimate over B random prompts."""
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
    """Return the expectation over the outcomes of values [P, Y, ...], as an array [P, ...]."""
    return np.einsum("py,py...->p...", probability_PY, values)


def group_moments(
    probability_PY: Array,
    weight_PYD: Array,
    reward_PY: Array,
    beside_PYD: Array | float = 0.0,
) -> GroupMoments:
    """Compute the exact moments of the estimate without normalisation.

    The expectations are sums over all outcomes of each prompt.

    Args:
        probability_PY: probabilities of the outcomes under the sampling policy.
        weight_PYD: vector w of each outcome.
        reward_PY: reward z of each outcome.
        beside_PYD: vector a of each outcome, which is not multiplied by the advantage.

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
    """Divisor d of leave-one-out advantages; the advantages of a zero-variance group are 0."""

    # Kind of divisor, where std is the standard deviation of the group's rewards:
    # - `none`: 1
    # - `sigma`: exact standard deviation of the prompt's rewards
    # - `group_std`: std + epsilon
    # - `group_std_floor`: max(std, floor)
    # - `group_std_redrawn`: std; a group with std < floor is sampled again
    kind: str = "none"
    # Constant that `group_std` adds to std.
    epsilon: float = 0.0
    # Smallest std of the two last kinds, which need a positive value.
    floor: float = 0.0

    def factor(self, std: Array) -> Array:
        """Return 1/d for each group, or 0 for a zero-variance group.

        The kind must be one that divides by the group's standard deviation `std`.

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
        """Return for each group True if it is used, and False if it must be sampled again."""
        return std >= self.floor if self.kind == "group_std_redrawn" else np.full(std.shape, True)


@dataclass(frozen=True)
class AdvantageMoments:
    """Moments of one prompt's advantages, given the level of the reward; there are K levels.

    Every expectation includes the factor 1{group accepted} / P(group accepted). It differs from 1
    only if rejected groups are redrawn.
    """

    # Index of each outcome's reward among the K levels.
    level_Y: Integers
    # Probability that a group is accepted.
    acceptance: float
    # E[1], E[A] and E[A^2], given the reward level of the completion.
    zeroth_K: Array
    first_K: Array
    second_K: Array
    # E[1], E[A] and E[A A'], given the reward levels of two completions of a group with advantages
    # A and A'.
    zeroth_KK: Array
    first_KK: Array
    cross_KK: Array


def advantage_moments(
    probability_Y: Array, reward_Y: Array, group_size: int, normalisation: Normalisation
) -> AdvantageMoments:
    """Compute the exact moments of one prompt's advantages in groups of G.

    An advantage depends on the group's other completions through the sums of their rewards and
    squared rewards. All values of these sums are enumerated.

    Args:
        probability_Y: probabilities of the outcomes under the sampling policy.
        reward_Y: rewards of the outcomes, which must lie on a grid.
        group_size: number of completions per prompt, G >= 2.
        normalisation: divisor of the advantages; its kind must use the group's standard deviation.

    Raises:
        ValueError: If the rewards are all equal or not on a grid, or if every group is rejected.

    >>> coin = np.array([0.5, 0.5]), np.array([1.0, 0.0])
    >>> moments = advantage_moments(*coin, 2, Normalisation("group_std"))
    >>> moments.level_Y.tolist(), moments.first_K.round(4).tolist()  # A = 0 or +-sqrt 2
    ([1, 0], [-0.7071, 0.7071])
    """
    level_Y, grid_K, step = _reward_grid(reward_Y)
    chance_K: Array = np.bincount(level_Y, weights=probability_Y).astype(np.float64)

    def group_law(own_1: Array, own_2: Array, others: int) -> tuple[Mask, Array, Array, Array]:
        """Describe the groups that contain some given completions.

        Args:
            own_1: sum of the levels j of the given completions, one entry per case.
            own_2: sum of j^2 of the given completions, one entry per case.
            others: number of the group's other completions.

        Returns:
            Whether the group is accepted, the factor of its advantages, and the sum of all its j,
            each as an array [cases, possible sums of the other completions]. The last array has the
            probabilities of these possible sums.
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
    """Find the grid `minimum + step j` on which the rewards lie.

    Returns:
        Index of each outcome's reward among the K distinct rewards, the integer j of each distinct
        reward, and the step.

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
    """Return the joint law of `sum j` and `sum j^2` over several completions.

    Args:
        chance_K: probability of each level for one completion.
        grid_K: integer j of each level.
        count: number of completions over which the sums run. For 0, both sums are 0.

    Returns:
        Probability, `sum j` and `sum j^2` of every possible pair of sums, each [S] for S pairs.
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
    # Because of rounding, pairs that cannot occur have tiny nonzero probabilities.
    possible = (sum_1 <= sum_2) & (sum_1**2 <= count * sum_2) & (law > 0)
    return law[possible], sum_1[possible].astype(float), sum_2[possible].astype(float)


def estimate_moments(
    moments: Sequence[AdvantageMoments],
    probability_PY: Array,
    weight_PYD: Array,
    group_size: int,
    beside_PYD: Array | float = 0.0,
) -> EstimateMoments:
    """Compute the exact mean and variance of the normalised estimate.

    Args:
        moments: moments of each prompt's advantages, from `advantage_moments`.
        probability_PY: probabilities of the outcomes from which `moments` were computed.
        weight_PYD: vector w of each outcome.
        group_size: number of completions per prompt, G, for which `moments` were computed.
        beside_PYD: vector a of each outcome, which is not multiplied by the advantage.
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
    """Limits of each prompt's bias and variance as G grows; see the head of the module."""

    # Limit of G (E N - mu/sigma - E a), the scaled bias.
    bias_PD: Array
    # Limit of G times the trace of the estimate's covariance.
    variance_P: Array
    # The same limit as `variance_P` for advantages that are divided by the exact sigma.
    sigma_variance_P: Array


def large_groups(
    probability_PY: Array,
    weight_PYD: Array,
    reward_PY: Array,
    beside_PYD: Array | float = 0.0,
) -> LargeGroups:
    """Compute the limits for d(std) = std by the delta method.

    Args:
        probability_PY: probabilities of the outcomes under the sampling policy.
        weight_PYD: vector w of each outcome.
        reward_PY: reward z of each outcome.
        beside_PYD: vector a of each outcome, which is not multiplied by the advantage.
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
