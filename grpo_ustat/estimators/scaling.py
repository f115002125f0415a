r"""The minibatch error and the group size that minimises it (paper, Proposition 3, section 6).

For B prompts drawn independently, G completions each, leave-one-out baseline:

    MSE(B, G) = 1/B { C1 + C2/G + C3/(G (G-1)) }
    C1 = tr Cov g(X)    C2 = E[ A_V - ||g||^2 ]    C3 = E[ D + ||g||^2 ]

At a fixed number of rollouts n = B G this is `1/n { G C1 + C2 + C3/(G-1) }`, smallest at
`G* = 1 + sqrt(C3/C1)` whatever n; the paper, with C3/G as the last term, has `sqrt(C3/C1)`. At a
fixed cost K = B (k + G c), k spent once per prompt and c per completion, the error is
`(k + G c)/K { C1 + C2/G + C3/(G (G-1)) }`: its minimum does not depend on K either.
"""

from __future__ import annotations

import math
import warnings
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import NamedTuple

import numpy as np
from scipy.optimize import brentq  # pyright: ignore[reportUnknownVariableType]
from scipy.special import fdtri, stdtrit  # pyright: ignore[reportUnknownVariableType]

from grpo_ustat.estimators.intervals import (
    CONFIDENCE,
    LEAST_CARRIERS,
    LEAST_EFFECTIVE,
    Interval,
    Tails,
    fieller_set,
    jackknife_interval,
    pooled_dof,
    tails,
)
from grpo_ustat.estimators.moments import Moments, norm_moments
from grpo_ustat.records import Array

CONSTANTS = ("c1", "c2", "c3")
LARGEST_GROUP_SIZE = 1e6  # group sizes are looked for up to here
SMALLEST_GAP = 1e-3  # and from 1 + this on
SMALLEST_CONSTANT = np.finfo(float).tiny ** 0.5
WHOLE_GROUPS = 8  # of which the rollouts are a multiple where nothing else divides them
ROOT_POINTS = 200  # between which a root is looked for
ONE_SIDED_FACTOR = 2.0  # times the critical value, of a lower end without an upper one
MOST_PROMPTS = 1e7  # that a study is said to need


@dataclass(frozen=True)
class ScalingLaw:
    """The three constants.

    >>> law = ScalingLaw(c1=1.0, c2=2.0, c3=9.0)
    >>> law.mse(num_prompts=8, group_size=4), law.best_group_size, law.best_divisor(48)
    (0.28125, 4.0, 4)
    """

    c1: float
    c2: float
    c3: float

    def mse(self, num_prompts: int, group_size: int) -> float:
        """Predicted MSE(B, G), prompts drawn independently."""
        second = self.c3 / (group_size * (group_size - 1))
        return (self.c1 + self.c2 / group_size + second) / num_prompts

    @property
    def best_group_size(self) -> float:
        """G* = 1 + sqrt(C3 / C1); NaN where an estimate of C1 or C3 is not positive."""
        return 1 + self.paper_group_size

    @property
    def paper_group_size(self) -> float:
        """sqrt(C3 / C1), the paper's form."""
        if self.c1 <= 0 or self.c3 <= 0:
            return math.nan
        return math.sqrt(self.c3 / self.c1)

    def best_divisor(self, rollouts: int) -> int:
        """The G >= 2 that divides n and has the smallest predicted error at that n.

        Raises:
            ValueError: n < 2.
        """
        if rollouts < 2:
            raise ValueError(f"rollouts={rollouts}: leave-one-out needs at least 2")
        sizes = [g for g in range(2, rollouts + 1) if rollouts % g == 0]
        return min(sizes, key=lambda g: self.mse(rollouts // g, g))


def divisible_rollouts(rollouts: int) -> int:
    """n, or the next multiple of 8 where n is prime: its one group would be a whole step.

    >>> divisible_rollouts(10), divisible_rollouts(97), divisible_rollouts(2)
    (10, 104, 8)
    """
    if any(rollouts % size == 0 for size in range(2, rollouts)):
        return rollouts
    return math.ceil(rollouts / WHOLE_GROUPS) * WHOLE_GROUPS


def best_group_size(
    c1: Array | float,
    c2: Array | float,
    c3: Array | float,
    prompt_cost: float = 0.0,
    completion_cost: float = 1.0,
) -> Array:
    """The G > 1 that minimises the error at a fixed cost, elementwise; NaN where there is none.

    Args:
        c1, c2, c3: constants, arrays of one shape.
        prompt_cost: k, shared by a prompt's group (reading it).
        completion_cost: c, of each completion.

    >>> float(best_group_size(1.0, 2.0, 9.0)), float(best_group_size(1.0, 2.0, 9.0, 10.0).round(2))
    (4.0, 7.77)
    """
    c1, c2, c3 = np.asarray(c1, float), np.asarray(c2, float), np.asarray(c3, float)
    usable = (c1 > 0) & (c3 > 0)
    if prompt_cost == 0:
        return 1 + np.sqrt(np.where(usable, c3, np.nan) / np.where(usable, c1, np.nan))
    low, high = np.full(c1.shape, 1 + 1e-6), np.full(c1.shape, LARGEST_GROUP_SIZE)
    for _ in range(80):
        middle = 1 + np.sqrt((low - 1) * (high - 1))
        weight_1, weight_2, weight_3 = _slope_weights(middle, prompt_cost, completion_cost)
        falls = weight_1 * c1 + weight_2 * c2 + weight_3 * c3 < 0
        low, high = np.where(falls, middle, low), np.where(falls, high, middle)
    return np.where(usable & (c2 >= 0), high, np.nan)


def _slope_weights(g: Array, k: float, c: float) -> tuple[Array, Array, Array]:
    """Weights of C1, C2, C3 in the derivative by G of K times the error at a fixed cost K.

    `(k + G c) { C1 + C2/G + C3/(G (G-1)) }` has the derivative
    `c C1 - k C2/G^2 - { c/(G-1)^2 + k (2G-1)/(G (G-1))^2 } C3`, increasing in G where C2, C3 >= 0.
    """
    return (
        np.full_like(g, c),
        -k / g**2,
        -c / (g - 1) ** 2 - k * (2 * g - 1) / (g * (g - 1)) ** 2,
    )


def widening(prompts: int, completions: int) -> float:
    """The factor on standard errors of C1, C2 and C3 with which an answer that is given holds.

    A best G is named only where C1 is significantly above 0. In a small study that happens mostly
    where C1 came out too large, so of the plain 95 % intervals that are given up to half are wrong
    (of the 4 % of studies with 8 prompts of 8 completions that would name one, where G* is 5.5).
    With the critical value `t + 16/m^1.5 + 3500/(m N^2)` in place of Student's t 5.7 % or less of
    those given are wrong, for populations with G* of 3.1, 5.5, also with heavy tails, and 8.8 and 8
    to 100 prompts of 8 to 64 completions, wherever one study in 500 or more gives one. Its two
    terms were fitted to these, by `scripts/benchmarks/decisions.py`, whose table is in
    docs/benchmarks.md; 500 prompts of 32 completions have 1.004.

    Args:
        prompts: m, all that the estimates are from, at least 2.
        completions: N of each, of a training step G.
    """
    critical = _student(prompts - 1)
    return (critical + 16 / prompts**1.5 + 3500 / (prompts * completions**2)) / critical


def _student(dof: float, level: float = CONFIDENCE) -> float:
    return float(stdtrit(dof, (1 + level) / 2))


class ScalingEstimate(NamedTuple):
    """Estimates of C1, C2, C3 with what is known of their errors, to compare group sizes by.

    Attributes:
        constants_3: C1, C2, C3.
        covariance_33: of their errors, times the square of `widening`.
        dof: degrees of freedom of that covariance.
    """

    constants_3: Array
    covariance_33: Array
    dof: float

    def n_mse(self, group_size: float) -> float:
        """n MSE(n/G, G) = G C1 + C2 + C3/(G-1), the same for every number of rollouts n."""
        return float(self.constants_3 @ _n_mse_weights(group_size))

    def best_of(self, sizes: Sequence[int]) -> int:
        """The group size of smallest estimated error at a fixed number of rollouts."""
        return min(sizes, key=self.n_mse)

    def extra_error(self, group_size: float, reference: int, level: float = CONFIDENCE) -> Interval:
        """MSE(n/G, G) / MSE(n/R, R) - 1 at a fixed number of rollouts n, G against R.

        The interval is paired, since both errors come from the same completions: it is Fieller's
        (1954) set of the ratios r at which `f(G) - r f(R)`, f = n MSE, does not differ
        significantly from 0. It needs no logarithm, which is wrong where C1 is known badly. Such
        differences, for all G and R, span two dimensions (the ratio does not change where C1, C2,
        C3 are multiplied by one number), so Scheffe's (1953) critical value `sqrt(2 F(2, dof))`
        makes all intervals hold together, at every G, also for a reference that the same data
        chose. The ratio of unbiased estimates itself is biased of order 1/prompts.

        Returns:
            NaN where the estimate of either error is not positive; a width of 0 where G = R.
        """
        own, other = self.n_mse(group_size), self.n_mse(reference)
        if not (own > 0 and other > 0):
            return Interval(math.nan, math.nan, math.nan)
        if group_size == reference:
            return Interval(0.0, 0.0, 0.0)
        weights_23 = np.stack([_n_mse_weights(group_size), _n_mse_weights(reference)])
        (of_own, mixed), (_, of_other) = weights_23 @ self.covariance_33 @ weights_23.T
        if not math.isfinite(of_own):
            return Interval(own / other - 1, math.nan, math.nan)
        critical = math.sqrt(2 * float(fdtri(2, self.dof, level)))
        low, high = fieller_set(own, other, (of_own, mixed, of_other), critical)
        return Interval(own / other - 1, low - 1, high - 1)

    def prompts_for_best_size(self, prompts: int, completions: int) -> tuple[int, float]:
        """About how many prompts, from so many to so many, would give G* an interval with two ends.

        It has them where C1 and C3 are above 0 by the critical value of `widening`. Standard errors
        fall as the square root of the number of prompts. The lower end is where that would happen
        in half of the studies if C1 and C3 were larger by 2 of their standard errors; the upper
        one where it would in 95 % if they were smaller by .4 of the critical value, which is not
        known where they may then be 0. Of follow-up studies with the upper number .9 or more were
        decided wherever one pilot study in 100 or more says one (`scripts/benchmarks/decisions.py`,
        populations as for `widening`, pilots of 8 to 60 prompts).

        Args:
            prompts: how many there are now.
            completions: of each.

        Returns:
            At least `prompts`; the upper end is infinite where it is not known, as where the
            covariance is not.
        """
        if not np.isfinite(self.covariance_33).all():
            return prompts, math.inf
        factor = widening(prompts, completions)
        errors_2 = np.sqrt(np.diagonal(self.covariance_33)[[0, 2]]) / factor
        constants_2 = self.constants_3[[0, 2]]
        optimistic_2 = np.maximum(constants_2, 0) + 2.0 * errors_2
        pessimistic_2 = constants_2 - 0.4 * factor * _student(prompts - 1) * errors_2

        def needed(ratio: float, margin: float) -> float:
            """Prompts at which a constant `ratio` standard errors above 0 now is decided."""

            def excess(log_count: float) -> float:
                count = math.exp(log_count)
                critical = _student(count - 1) * widening(round(count), completions)
                return ratio * math.sqrt(count / prompts) - critical - margin

            first, last = math.log(prompts), math.log(MOST_PROMPTS)
            if excess(first) >= 0:
                return prompts
            return math.exp(brentq(excess, first, last)) if excess(last) > 0 else math.inf

        low = max(needed(float(x), 0.0) for x in optimistic_2 / errors_2)
        high = max(needed(float(x), 1.64) for x in pessimistic_2 / errors_2)
        return math.floor(low) if math.isfinite(low) else prompts, high


def _n_mse_weights(group_size: float) -> Array:
    """Weights of C1, C2 and C3 in n MSE(n/G, G)."""
    return np.array([group_size, 1.0, 1 / (group_size - 1)])


def scaling_estimate(
    whole: Mapping[str, Array | float], delete_one: Mapping[str, Array], factor: float
) -> ScalingEstimate:
    """C1, C2, C3 with the jackknife covariance of their errors.

    Args:
        whole: c1, c2, c3.
        delete_one: the same with one unit left out at a time, each [K, n], see
            `group_size_interval`. The degrees of freedom are Welch & Satterthwaite's for the sum of
            K parts, the least of the three constants'.
        factor: on standard errors, see `widening`.
    """
    covariance_K33 = _jackknife_covariance(delete_one)
    count = delete_one["c1"].shape[1]
    variance_K3 = np.diagonal(covariance_K33, axis1=1, axis2=2)
    dof = min(pooled_dof(variance_K, count - 1) for variance_K in variance_K3.T)
    constants_3 = np.array([float(whole[name]) for name in CONSTANTS])
    return ScalingEstimate(constants_3, factor**2 * covariance_K33.sum(axis=0), dof)


def _jackknife_covariance(delete_one: Mapping[str, Array]) -> Array:
    """Covariance of (C1, C2, C3) from each of K independent parts of n units, [K, 3, 3]."""
    change = np.stack(
        [delete_one[x] - delete_one[x].mean(axis=1, keepdims=True) for x in CONSTANTS]
    )
    count = change.shape[2]
    return (count - 1) / count * np.einsum("akn,bkn->kab", change, change)


def group_size_interval(
    whole: Mapping[str, Array | float],
    delete_one: Mapping[str, Array],
    factor: float,
    prompt_cost: float = 0.0,
    completion_cost: float = 1.0,
    level: float = CONFIDENCE,
) -> Interval:
    """The best group size at a fixed cost with the set of group sizes that the data allow.

    The set is Fieller's (1954): G belongs to it where the slope of the error at G, which is linear
    in (C1, C2, C3), does not differ significantly from 0; at no prompt cost this is the set of the
    ratio C3/C1. It needs no logarithm and no positive estimate, and it is honest about what is not
    known: where C1 may be 0 it is [low, infinity), where C3 may be 0 too [1, infinity).

    A lower end without an upper one is given mostly where C1 came out too small and the end too
    high, so its critical value is twice as large, unless `factor` is 1.

    The estimate is the plug-in, NaN where C1 or C3 is not positive. It is too large on average,
    since `1 + sqrt(C3/C1)` is convex in C1, by 1 % or less where C1 is known well; where it is
    known badly an interval with two ends is given mostly where C1 came out too large and G* too
    small. A correction by the jackknife would lower it in both.

    Args:
        whole: c1, c2, c3.
        delete_one: the same with one unit left out at a time, each [K, n]: K independent parts of
            n units each (K = 1 where prompts are left out).
        factor: on standard errors, `widening` of the sample, with which an interval of two ends
            holds also where it is given rarely; 1 where it is drawn whatever it is.
        prompt_cost, completion_cost: see `best_group_size`.
        level: coverage.

    Returns:
        `low` and `high` are both infinite where C1 is significantly below 0, which is an error of
        the sample: then no group size is allowed.
    """
    cost = prompt_cost, completion_cost
    plain = float(best_group_size(whole["c1"], whole["c2"], whole["c3"], *cost))
    count = delete_one["c1"].shape[1]
    covariance_K33 = factor**2 * _jackknife_covariance(delete_one)
    if not np.isfinite(covariance_K33).all() or not covariance_K33.any():
        return Interval(plain, math.nan, math.nan)

    def excess(log_gap: Array | np.float64, end: float) -> Array:
        """Slope over its standard error plus `end` times the critical value, at G."""
        weights_3G = np.stack(_slope_weights(1 + np.exp(log_gap), *cost))
        parts_K3G = covariance_K33 @ weights_3G
        variance_KG = np.maximum((parts_K3G * weights_3G).sum(axis=1), SMALLEST_CONSTANT)
        variance_G = variance_KG.sum(axis=0)
        dof_G = (count - 1) * variance_G**2 / np.square(variance_KG).sum(axis=0)
        limit_G: Array = np.asarray(stdtrit(dof_G, (1 + level) / 2))  # pyright: ignore[reportUnknownArgumentType]
        constants = np.array([whole[x] for x in CONSTANTS])
        return constants @ weights_3G / np.sqrt(variance_G) + end * limit_G

    high = 1 + _last_root(partial(excess, end=-1.0))
    sure = 1.0 if math.isfinite(high) or factor == 1 else ONE_SIDED_FACTOR
    low = 1 + _first_root(partial(excess, end=sure))
    return Interval(plain, low, high)


def _first_root(function: Callable[[Array | np.float64], Array]) -> float:
    """G - 1 where `function` of log(G - 1) first rises above 0; 0 or infinite at the ends."""
    log_gap = np.log(np.geomspace(SMALLEST_GAP, LARGEST_GROUP_SIZE, ROOT_POINTS))
    above = function(log_gap) > 0
    if above[0]:
        return 0.0
    after = int(above.argmax())
    return math.exp(_root(function, log_gap[after - 1], log_gap[after])) if after else math.inf


def _last_root(function: Callable[[Array | np.float64], Array]) -> float:
    """G - 1 where `function` of log(G - 1) rises above 0 for good; 0 or infinite at the ends."""
    log_gap = np.log(np.geomspace(SMALLEST_GAP, LARGEST_GROUP_SIZE, ROOT_POINTS))
    below = function(log_gap) <= 0
    if below[-1]:
        return math.inf
    after = ROOT_POINTS - int(below[::-1].argmax())
    return math.exp(_root(function, log_gap[after - 1], log_gap[after])) if below.any() else 0.0


def _root(function: Callable[[Array | np.float64], Array], low: float, high: float) -> float:
    """The root of `function` between two points where its signs differ."""
    return brentq(lambda x: float(function(np.float64(x))), low, high)


def scaling_law(moments: Moments, grad_sq: float) -> ScalingLaw:
    """C1, C2, C3 of the prompts at hand (C1 with divisor P), from unbiased estimates.

    Args:
        moments: per-prompt moments.
        grad_sq: ||grad J||^2 of the same prompts.
    """
    return ScalingLaw(
        c1=float(moments.g_sq.mean() - grad_sq),
        c2=float((moments.a_v - moments.g_sq).mean()),
        c3=float((moments.d + moments.g_sq).mean()),
    )


class HeavyTails(UserWarning):
    """Intervals are likely to cover less than they say, see `intervals.Tails.heavy`."""


class PromptScaling(NamedTuple):
    """C1, C2, C3, gstar and gstar_paper by name, and the tails of the prompts they come from."""

    constants: dict[str, Interval]
    tails: Tails


def scaling_from_arrays(
    rewards_PN: Array, sq_norm_PN: Array, gradient_gram_PP: Array
) -> dict[str, Interval]:
    """C1, C2, C3, G* and the paper's sqrt(C3/C1) from plain arrays, intervals over prompts.

    C1 is that of the population that the P prompts are a sample of (divisor P - 1). Intervals leave
    out one prompt at a time; that of G* is `group_size_interval`: no upper end where C1 may be 0.

    Args:
        rewards_PN: rewards of N >= 3 completions of each of P >= 4 prompts.
        sq_norm_PN: their squared score norms.
        gradient_gram_PP: <ghat_x, ghat_y> of the prompts' leave-one-out gradients
            `ghat_x = 1/N sum_i s_i (z_i - mean of the others)`.

    Raises:
        ValueError: the shapes do not match, there are fewer than 4 prompts, or a number is not
            finite.

    Warns:
        HeavyTails: a few prompts decide, the intervals are too short.
    """
    scaling = prompt_scaling(rewards_PN, sq_norm_PN, gradient_gram_PP)
    if scaling.tails.heavy:
        warnings.warn(heavy_text(scaling.tails, "prompts"), HeavyTails, stacklevel=2)
    return scaling.constants


def heavy_text(sample_tails: Tails, units: str) -> str:
    """What is wrong with a sample of heavy tails, in a sentence that names no remedy.

    Args:
        sample_tails: see `intervals.tails`.
        units: what the sample is made of, in the plural.

    >>> heavy_text(Tails(16.0, 5.0), "questions").split(": ")[1]
    'their mean squared score norm is known to +- 25 % (11 % is needed)'
    """
    size, carriers = sample_tails
    reasons: list[str] = []
    if size < LEAST_EFFECTIVE:
        known, needed = 1 / math.sqrt(size), 1 / math.sqrt(LEAST_EFFECTIVE)
        reasons.append(
            f"their mean squared score norm is known to +- {known:.0%} ({needed:.0%} is needed)"
        )
    if carriers < LEAST_CARRIERS:
        reasons.append(f"{carriers:.1f} of them decide a standard error ({LEAST_CARRIERS} needed)")
    reason = ", and ".join(reasons).replace("%", " %")
    return f"95 % intervals may cover less than 90 % with so few {units}: {reason}"


def prompt_scaling(rewards_PN: Array, sq_norm_PN: Array, gradient_gram_PP: Array) -> PromptScaling:
    """Constants as of `scaling_from_arrays`, with the tails returned and not warned of."""
    count = len(rewards_PN)
    if rewards_PN.shape != sq_norm_PN.shape or gradient_gram_PP.shape != (count, count):
        raise ValueError(
            f"shapes {rewards_PN.shape}, {sq_norm_PN.shape}, {gradient_gram_PP.shape}: use [P, N], "
            "[P, N], [P, P]"
        )
    if count < 4:
        raise ValueError(f"intervals over prompts need at least 4 prompts, got {count}")
    for name, values in (
        ("rewards_PN", rewards_PN),
        ("sq_norm_PN", sq_norm_PN),
        ("gradient_gram_PP", gradient_gram_PP),
    ):
        if not np.isfinite(values).all():
            raise ValueError(f"{name} is not finite everywhere: leave such prompts out")
    own_P = np.diagonal(gradient_gram_PP)
    moments = norm_moments(sq_norm_PN.astype(float), rewards_PN.astype(float), own_P)
    with_others_P = gradient_gram_PP.sum(axis=1) - own_P
    values = np.stack([moments.g_sq, moments.a_v - moments.g_sq, moments.d + moments.g_sq])
    whole = _constants(values.sum(axis=1), with_others_P.sum(), count)
    without = _constants(
        values.sum(axis=1)[:, None] - values, with_others_P.sum() - 2 * with_others_P, count - 1
    )
    delete_one = {name: x[None] for name, x in without.items()}
    constants = {name: jackknife_interval(float(whole[name]), delete_one[name]) for name in whole}
    best = group_size_interval(whole, delete_one, widening(*rewards_PN.shape))
    constants |= {"gstar": best, "gstar_paper": Interval(*(x - 1 for x in best))}
    leading = [delete_one["c2"], delete_one["c3"]]
    return PromptScaling(constants, tails(moments.m0[None], leading))


def _constants(sums_3: Array, between: Array, count: int) -> dict[str, Array]:
    """C1, C2 and C3, elementwise in the sums that they are made of.

    Args:
        sums_3: sums over prompts of ||g||^2 and of the terms of C2 and C3, [3, ...].
        between: S, the sum of <ghat_x, ghat_y> over ordered pairs of different prompts, [...].
        count: how many prompts are behind them.
    """
    g_sq, c2, c3 = sums_3 / count
    grad_sq = g_sq / count + between / count**2
    return {"c1": (g_sq - grad_sq) * count / (count - 1), "c2": c2, "c3": c3}


def correlation(moments: Moments) -> Interval:
    """corr(q, Z) = E Cov(q, Z | X) / sqrt(E Var(q | X) E Var(Z | X)), interval over prompts.

    Negative where wrong answers carry the larger scores; 0 is the paper's Assumption 2. The ratio
    of unbiased means is itself biased of order 1/P. NaN where q or Z do not vary within prompts.

    Args:
        moments: of at least 2 prompts.
    """
    parts_KP = np.stack([moments.cov_qz, moments.var_q, moments.var_z])
    total_K = parts_KP.sum(axis=1)

    def ratio(covariance: Array, var_q: Array, var_z: Array) -> Array:
        spread = var_q * var_z
        return covariance / np.sqrt(np.where(spread > 0, spread, np.nan))

    delete_one_P = ratio(*(total_K[:, None] - parts_KP))
    return jackknife_interval(float(ratio(*total_K)), delete_one_P[None])
