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
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from grpo_ustat.estimators.group_size import scaling_estimate
from grpo_ustat.estimators.intervals import (
    LEAST_CARRIERS,
    LEAST_EFFECTIVE,
    Interval,
    Tails,
    jackknife_interval,
    tails,
)
from grpo_ustat.estimators.moments import Moments, norm_moments
from grpo_ustat.records import Array

# A number of rollouts that nothing divides is replaced by the next multiple of this.
WHOLE_GROUPS = 8


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
    out one prompt at a time; that of G*, `ScalingEstimate.group_size_interval`, has no upper end
    where it is not decided.

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
    best = scaling_estimate(whole, delete_one, count).group_size_interval()
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
