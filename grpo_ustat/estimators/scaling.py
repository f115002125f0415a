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
from dataclasses import dataclass

import numpy as np

from grpo_ustat.estimators.intervals import Interval, jackknife_variance, t_interval
from grpo_ustat.estimators.moments import Moments, norm_moments

LARGEST = 1e6  # group sizes are looked for up to here


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


def best_group_size(c1, c2, c3, prompt_cost: float = 0.0, completion_cost: float = 1.0):
    """The G > 1 that minimises the error at a fixed cost, elementwise; NaN where there is none.

    Args:
        c1, c2, c3: constants, arrays of one shape.
        prompt_cost: k, shared by a prompt's group (reading it).
        completion_cost: c, of each completion.

    >>> float(best_group_size(1.0, 2.0, 9.0)), float(best_group_size(1.0, 2.0, 9.0, 10.0).round(2))
    (4.0, 7.77)
    """
    c1, c2, c3 = (np.asarray(x, dtype=float) for x in (c1, c2, c3))
    usable = (c1 > 0) & (c3 > 0)
    if prompt_cost == 0:
        return 1 + np.sqrt(np.where(usable, c3, np.nan) / np.where(usable, c1, np.nan))
    k, c = prompt_cost, completion_cost

    def slope(g):
        """Of the error in G, times a positive factor; increasing where c2 >= 0."""
        pair = g * (g - 1)
        return c * c1 - k * c2 / g**2 - c * c3 / (g - 1) ** 2 - k * c3 * (2 * g - 1) / pair**2

    low, high = np.full(c1.shape, 1 + 1e-6), np.full(c1.shape, LARGEST)
    for _ in range(80):
        middle = 1 + np.sqrt((low - 1) * (high - 1))
        falls = slope(middle) < 0
        low, high = np.where(falls, middle, low), np.where(falls, high, middle)
    return np.where(usable & (c2 >= 0), high, np.nan)


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


def scaling_from_arrays(
    rewards_PN: np.ndarray, sq_norm_PN: np.ndarray, gradient_gram_PP: np.ndarray
) -> dict[str, Interval]:
    """C1, C2, C3, G* and the paper's sqrt(C3/C1) from plain arrays, intervals over prompts.

    C1 is that of the population that the P prompts are a sample of (divisor P - 1). Intervals leave
    out one prompt at a time; those of G* are made on the log scale, and are NaN unless C1 and C3
    are both surely positive.

    Args:
        rewards_PN: rewards of N >= 3 completions of each of P >= 4 prompts.
        sq_norm_PN: their squared score norms.
        gradient_gram_PP: <ghat_x, ghat_y> of the prompts' leave-one-out gradients
            `ghat_x = 1/N sum_i s_i (z_i - mean of the others)`.

    Raises:
        ValueError: the shapes do not match, or there are fewer than 4 prompts.
    """
    count = len(rewards_PN)
    if rewards_PN.shape != sq_norm_PN.shape or gradient_gram_PP.shape != (count, count):
        raise ValueError(
            f"shapes {rewards_PN.shape}, {sq_norm_PN.shape}, {gradient_gram_PP.shape}: use [P, N], "
            "[P, N], [P, P]"
        )
    if count < 4:
        raise ValueError(f"intervals over prompts need at least 4 prompts, got {count}")
    own_P = np.diagonal(gradient_gram_PP)
    moments = norm_moments(sq_norm_PN.astype(float), rewards_PN.astype(float), own_P)
    with_others_P = gradient_gram_PP.sum(axis=1) - own_P
    values = np.stack([moments.g_sq, moments.a_v - moments.g_sq, moments.d + moments.g_sq])
    whole = _constants(values.sum(axis=1), with_others_P.sum(), count)
    without = _constants(
        values.sum(axis=1)[:, None] - values, with_others_P.sum() - 2 * with_others_P, count - 1
    )
    found = {
        name: t_interval(float(whole[name]), float(jackknife_variance(without[name])), count - 1)
        for name in whole
    }
    logs = found.pop("log_gstar_paper")
    sure = found["c1"].low > 0 and found["c3"].low > 0
    paper = [math.exp(x) if sure or i == 0 else math.nan for i, x in enumerate(logs)]
    return found | {"gstar_paper": Interval(*paper), "gstar": Interval(*(1 + x for x in paper))}


def _constants(sums, between, count: int) -> dict[str, np.ndarray]:
    """Elementwise in the sums over prompts of (||g||^2, C2's, C3's terms) and S."""
    g_sq, c2, c3 = (x / count for x in sums)
    grad_sq = g_sq / count + between / count**2
    c1 = (g_sq - grad_sq) * count / (count - 1)
    with np.errstate(invalid="ignore"):
        logs = 0.5 * np.log(np.where((c1 > 0) & (c3 > 0), c3 / np.where(c1 > 0, c1, 1), np.nan))
    return {"c1": c1, "c2": c2, "c3": c3, "log_gstar_paper": logs}


def correlation(moments: Moments) -> Interval:
    """corr(q, Z) = E Cov(q, Z | X) / sqrt(E Var(q | X) E Var(Z | X)), interval over prompts.

    Negative where wrong answers carry the larger scores; 0 is the paper's Assumption 2. The ratio
    of unbiased means is itself biased of order 1/P. NaN where q or Z do not vary within prompts.

    Args:
        moments: of at least 2 prompts.
    """
    parts_KP = np.stack([moments.cov_qz, moments.var_q, moments.var_z])
    count, total_K = parts_KP.shape[1], parts_KP.sum(axis=1)

    def ratio(covariance, var_q, var_z):
        spread = var_q * var_z
        return covariance / np.sqrt(np.where(spread > 0, spread, np.nan))

    deleted_P = ratio(*(total_K[:, None] - parts_KP))
    return t_interval(float(ratio(*total_K)), float(jackknife_variance(deleted_P)), count - 1)
