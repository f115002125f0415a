r"""C1, C2, C3, G* and the noise scale from the groups of several training steps.

A step's groups give unbiased estimates of C1, C2, C3 and ||grad J||^2 of the policy of that step,
from few prompts: one step's ||grad J||^2 may be negative. So the estimates are averaged over steps,
and everything that is a ratio is a ratio of such means:

    G* = 1 + sqrt(C3 / C1)        n_c(G) = ( G C1 + C2 + C3/(G-1) ) / ||grad J||^2

n_c is the number of rollouts of a step at which the gradient's squared error equals its squared
length: the simple noise scale of McCandlish et al. (2018), counted in rollouts of groups of G. It
is least at G*, `( C1 + C2 + 2 sqrt(C1 C3) ) / ||grad J||^2`. A step of n rollouts has

    E||ghat||^2 = ||grad J||^2 ( 1 + n_c/n )        noise share = n_c / ( n + n_c )

and where the curvature is alike in all directions, a step of the best length gains a share
`n / ( n + n_c )` of what the true gradient gains. So one percent more rollouts makes a step gain
(noise share) percent more: at n_c half a percent, far below it a whole one, far above it nothing.
In tokens a group costs k + G c (its prompt once), so `n_c (k + G c) / G` tokens take the place of
n_c rollouts.

Pairs, G = 2, do not tell C2 and C3 apart, since A_V alone needs three completions; their sum does
with two, and with it the error and the noise scale at G = 2:

    S = C2 + C3 = E[ A_V + D ] = E[ (q + q')(z - z')^2 ] / 2
    E||g||^2 = E[ -(z - z')^2 <s, s'> ] / 2            n_c(2) = ( 2 C1 + S ) / ||grad J||^2

As ||g|| = ||E (z - V) s|| <= E |z - V| ||s||, neither A_V nor D is below ||g||^2. So C3 lies in
[2 E||g||^2, S], and under the paper's Assumption 2 (A_V = D) it is S/2 + E||g||^2: G* has bounds,
and a value under that assumption. Since C1 <= E||g||^2 <= C3/2, G* is never below 1 + sqrt(2), and
groups of 3 have at most the error of pairs, of any policy.

Batches of one group are pooled: a step is then a window of groups that several policies wrote. C2,
C3 and E||g||^2 are each group's own, and so means over these policies; products between groups are
of different policies, of which the later were trained on the earlier groups. See `withheld`.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
from scipy.optimize import brentq  # pyright: ignore[reportUnknownVariableType]
from scipy.special import stdtrit  # pyright: ignore[reportUnknownVariableType]

from grpo_ustat.estimators.group_size import (
    CONSTANTS,
    ONE_SIDED_FACTOR,
    ScalingEstimate,
    best_group_size,
    scaling_estimate,
)
from grpo_ustat.estimators.intervals import (
    CONFIDENCE,
    Interval,
    fieller_set,
    jackknife_interval,
    ratio_interval,
    tails,
    wilson,
)
from grpo_ustat.estimators.moments import norm_moments, shifted_moments
from grpo_ustat.records import Array

LEAST_UNITS = 4  # of which a jackknife leaves one out
UNDETERMINED = Interval(math.nan, math.nan, math.nan)
CONSTANTS_AND_GRADIENT = (*CONSTANTS, "grad_sq")
LEAST_GSTAR = 1 + math.sqrt(2)  # of any policy, since C3 >= 2 C1
LOST = 0.0175  # of a group's E||ghat||^2, by drifting apart by 1 nat; see `withheld`
TOLERABLE_BIAS, MOST_DRIFT = 0.2, 1.0
LEAST_LOG_GAP, MOST_LOG_GAP = math.log(1e-3), math.log(1e6)  # of G - 1, between which one is sought


def noise_scale(
    whole: Mapping[str, Array | float],
    delete_one: Mapping[str, Array],
    group_size: float,
    prompt_cost: float = 0.0,
    completion_cost: float = 1.0,
    level: float = CONFIDENCE,
) -> Interval:
    """n_c(G) with Fieller's interval: no upper end where ||grad J||^2 may be 0.

    An upper end is given where ||grad J||^2 is above 0 at the level .995, two-sided, since it is
    given mostly where ||grad J||^2 came out too large. A lower end without an upper one is given
    mostly where it came out too small, so its critical value is twice as large.

    Args:
        whole: c1, c2, c3, grad_sq.
        delete_one: the same with one unit left out at a time, each [K, n], K independent parts.
        group_size: G > 1; at the estimate of G* the interval is to first order that of the least
            n_c, whose slope in G is 0. NaN gives NaN.
        prompt_cost, completion_cost: k and c; by default the unit is a rollout.
        level: of the interval.

    >>> whole = {"c1": 1.0, "c2": 2.0, "c3": 9.0, "grad_sq": 0.5}
    >>> exact = {name: np.full((1, 4), value) for name, value in whole.items()}
    >>> noise_scale(whole, exact, 4), noise_scale(whole, exact, 4, 8.0, 3.0).estimate
    (Interval(estimate=18.0, low=18.0, high=18.0), 90.0)
    """
    if not math.isfinite(group_size):
        return UNDETERMINED
    unit = completion_cost + prompt_cost / group_size

    def ratio(level: float, factor: float = 1.0) -> Interval:
        return ratio_interval(
            unit * float(_n_mse(whole, group_size)), float(whole["grad_sq"]),
            unit * np.asarray(_n_mse(delete_one, group_size)), delete_one["grad_sq"], level, factor,
        )  # fmt: skip

    high = ratio(1 - (1 - level) / 10).high
    low = ratio(level, 1.0 if math.isfinite(high) else ONE_SIDED_FACTOR).low
    return Interval(ratio(level).estimate, low, high)


def prompt_share(
    scaling: ScalingEstimate, group_size: float, level: float = CONFIDENCE
) -> Interval:
    """G C1 / ( G C1 + C2 + C3/(G-1) ): the share of the noise that comes from which prompts are
    drawn, which no rollouts of the same prompts would average out; within [0, 1].

    Fieller's interval of the odds `G C1 / (C2 + C3/(G-1))`. Prompts that were not drawn add
    `ScalingEstimate.undrawn` to the relative variance of C1 at hypothetical odds.

    Args:
        scaling: C1, C2, C3 with the covariance of their errors.
        group_size: G > 1; NaN gives NaN.
        level: of the interval.

    >>> exact = ScalingEstimate(np.array([1.0, 2.0, 9.0]), np.zeros((3, 3)), 1e9, 1e9)
    >>> round(prompt_share(exact, 4).estimate, 3)
    0.444
    """
    if not math.isfinite(group_size):
        return UNDETERMINED
    c1, c2, c3 = map(float, scaling.constants_3)
    prompts, completions = group_size * c1, c2 + c3 / (group_size - 1)
    if not prompts + completions > 0:
        return Interval(math.nan, 0.0, 1.0)
    share = min(max(prompts / (prompts + completions), 0.0), 1.0)
    if not np.isfinite(scaling.covariance_33).all():
        return UNDETERMINED._replace(estimate=share)
    weights_23 = np.array([[group_size, 0.0, 0.0], [0.0, 1.0, 1 / (group_size - 1)]])
    (above, mixed), (_, below) = weights_23 @ scaling.covariance_33 @ weights_23.T
    below += scaling.undrawn * completions**2
    critical = float(stdtrit(scaling.dof, (1 + level) / 2))
    odds = fieller_set(prompts, completions, (above, mixed, below), critical)
    low, high = (1.0 if math.isinf(x) else x / (1 + x) for x in odds)
    return Interval(share, low, high)


def equal_noise_size(scaling: ScalingEstimate, level: float = CONFIDENCE) -> Interval:
    """G at which as much of the noise comes from which prompts are drawn as from their completions:
    `G C1 = C2 + C3/(G-1)`, with Fieller's set.

    The prompts' share rises with G, so there is one such G > 1, the larger root of
    `C1 G^2 - (C1 + C2) G + C2 - C3`; a G belongs to the set where that does not differ from 0.

    Args:
        scaling: C1, C2, C3 with the covariance of their errors.
        level: of the interval; no upper end where C1 may be 0.

    >>> exact = ScalingEstimate(np.array([1.0, 2.0, 9.0]), np.zeros((3, 3)), 1e9, 1e15)
    >>> [round(x, 3) for x in equal_noise_size(exact)]  # 4.541 = 2 + 9/3.541
    [4.541, 4.541, 4.541]
    """
    c1, c2, c3 = map(float, scaling.constants_3)
    if not (np.isfinite(scaling.covariance_33).all() and c1 > 0 and c2 + c3 > 0):
        return UNDETERMINED
    half = (c1 + c2) / 2
    size = (half + math.sqrt(max(half**2 - c1 * (c2 - c3), 0.0))) / c1
    critical = float(stdtrit(scaling.dof, (1 + level) / 2))

    def outside(log_gap: float, side: int) -> float:
        """Above 0 where the shares differ significantly at G = 1 + exp(log_gap)."""
        gap = math.exp(log_gap)
        weights_3 = np.array([(1 + gap) * gap, -gap, -1.0])
        variance = float(weights_3 @ scaling.covariance_33 @ weights_3)
        variance += scaling.undrawn * (gap * c2 + c3) ** 2
        error = math.sqrt(max(variance, 0.0))
        return side * float(weights_3 @ scaling.constants_3) - critical * error

    ends: list[float] = []
    for side, far in ((-1, LEAST_LOG_GAP), (1, MOST_LOG_GAP)):
        near = math.log(size - 1)
        if outside(near, side) >= 0:  # no error
            ends.append(size)
        elif outside(far, side) <= 0:
            ends.append(1.0 if side < 0 else math.inf)
        else:
            ends.append(1 + math.exp(brentq(outside, min(near, far), max(near, far), (side,))))
    return Interval(size, *ends)


def noise_share(scale: Interval, rollouts: float) -> Interval:
    """n_c / (n + n_c): the share of E||ghat||^2 that is noise, from n_c or its interval.

    >>> noise_share(Interval(300.0, 100.0, math.inf), 100.0)
    Interval(estimate=0.75, low=0.5, high=1.0)
    """
    return Interval(*(1.0 if math.isinf(x) else x / (rollouts + x) for x in scale))


def noise_of_steps(values_4S: Array, group_size: float) -> Interval:
    """n_c(G) of the policies of some steps together, jackknifed over steps.

    Args:
        values_4S: unbiased estimates of C1, C2, C3 and ||grad J||^2 of each of S >= 2 steps, which
            share no completions.
        group_size: G > 1.
    """
    delete_one_4S = (values_4S.sum(axis=1, keepdims=True) - values_4S) / (values_4S.shape[1] - 1)
    names: tuple[str, ...] = CONSTANTS_AND_GRADIENT
    whole: dict[str, float] = dict(zip(names, map(float, values_4S.mean(axis=1)), strict=True))
    delete_one: dict[str, Array] = {
        name: one[None] for name, one in zip(names, delete_one_4S, strict=True)
    }
    return noise_scale(whole, delete_one, group_size)


class GroupTerms(NamedTuple):
    """What the P groups of one step add to the constants, arrays of shape [P].

    Attributes:
        g_sq_P: ||g||^2.
        first_order_P: A_V - ||g||^2, whose mean is C2; of pairs (A_V + D)/2 - ||g||^2.
        second_order_P: D + ||g||^2, whose mean is C3; of pairs (A_V + D)/2 + ||g||^2. Only the sum
            of the two is that of pairs whatever they are from, each alone under Assumption 2.
        others_P: sum of <ghat_x, ghat_y> over the other groups y.
        norm_P: mean of the squared score norms, NaN where the group has zero variance.
    """

    g_sq_P: Array
    first_order_P: Array
    second_order_P: Array
    others_P: Array
    norm_P: Array


def group_terms(
    rewards_PG: Array,
    sq_norm_PG: Array,
    gradient_gram_PP: Array,
    score_gram_PGG: Array | None = None,
) -> GroupTerms:
    """The terms of P >= 2 groups of G >= 2 completions.

    A group of equal rewards adds 0 to every term whatever its scores are, so it needs none.

    Args:
        rewards_PG: rewards.
        sq_norm_PG: squared score norms; any number in groups of equal rewards.
        gradient_gram_PP: <ghat_x, ghat_y> of the groups' leave-one-out gradients.
        score_gram_PGG: <s_i, s_j>, where the scores may have a mean other than 0; of groups of at
            least 4, fewer do not tell it apart. None: it is 0.

    Raises:
        ValueError: fewer than 2 groups, or groups of 1 completion.
    """
    if len(rewards_PG) < 2:
        raise ValueError(f"||grad J||^2 needs at least 2 groups, got {len(rewards_PG)}")
    own_P = np.diagonal(gradient_gram_PP)
    if rewards_PG.shape[1] == 2:
        # (A_V + D)/2; ||ghat||^2 less it is -(z - z')^2 <s, s'> / 2
        half_P = sq_norm_PG.sum(axis=1) * (rewards_PG[:, 0] - rewards_PG[:, 1]) ** 2 / 4
        g_sq_P, a_v_P, d_P, m0_P = own_P - half_P, half_P, half_P, sq_norm_PG.mean(axis=1)
    elif score_gram_PGG is not None and rewards_PG.shape[1] >= 4:
        a_v_P, d_P, g_sq_P = shifted_moments(rewards_PG, score_gram_PGG)
        m0_P = sq_norm_PG.mean(axis=1)
    else:
        moments = norm_moments(sq_norm_PG, rewards_PG, own_P)
        g_sq_P, a_v_P, d_P, m0_P = moments.g_sq, moments.a_v, moments.d, moments.m0
    varied_P = (rewards_PG != rewards_PG[:, :1]).any(axis=1)
    return GroupTerms(
        np.where(varied_P, g_sq_P, 0.0),
        np.where(varied_P, a_v_P - g_sq_P, 0.0),
        np.where(varied_P, d_P + g_sq_P, 0.0),
        np.where(varied_P, gradient_gram_PP.sum(axis=1) - own_P, 0.0),
        np.where(varied_P, m0_P, np.nan),
    )


@dataclass(frozen=True)
class NoiseEstimate:
    """Averages over K steps (batches, or windows of batches) of P groups each, with intervals.

    Attributes:
        intervals: c1, c2, c3, grad_sq, gstar, noise_scale (at the group size in use),
            noise_scale_best (at G*), prompt_share (at the group size in use) and zero_variance,
            each with its 95 % interval; the ends are NaN where there are fewer than 4 groups a step
            and fewer than 4 steps. Of pairs, c2, c3, noise_scale_best and the estimate of gstar are
            NaN; instead there are c2_plus_c3, gstar_least and gstar_most (the bounds of G*),
            gstar_assumption2 (its value under Assumption 2), and gstar goes from the low end of the
            one bound to the high end of the other.
        scaling: C1, C2, C3 with the covariance of their errors; of pairs under Assumption 2.
        heavy: whether intervals are likely to cover less than 90 %, see `intervals.Tails`.
        assumption2: whether C2 and C3 of `scaling` rest on Assumption 2, as those of pairs do.
    """

    intervals: Mapping[str, Interval]
    scaling: ScalingEstimate
    heavy: bool
    assumption2: bool = False

    def as_result(self) -> dict[str, Any]:
        """C1, C2, C3, their covariance and G* as `result.json` of a study has them; of pairs those
        under Assumption 2.
        """
        ends = ("", "_low", "_high")
        name = "gstar_assumption2" if self.assumption2 else "gstar"
        values = zip(ends, self.intervals[name], strict=True)
        return {
            **dict(zip(CONSTANTS, map(float, self.scaling.constants_3), strict=True)),
            "covariance": self.scaling.covariance_33,
            "dof": self.scaling.dof,
            "prompts": self.scaling.prompts,
            **{f"gstar{end}": float(x) if math.isfinite(x) else None for end, x in values},
        }


def noise_estimate(steps: Sequence[GroupTerms], group_size: int) -> NoiseEstimate:
    """C1, C2, C3, ||grad J||^2, G* and the noise scale of the policies of some steps together.

    Steps count equally. Intervals leave out one group at a time, each step an independent part;
    where steps have fewer than 4 groups, or not equally many, one step at a time. Of windows too:
    in simulated training that covers .93 to .98, with fewer windows than leaving out one would need
    and in shorter intervals (`scripts/benchmarks/interval_coverage.py --windows`).

    Args:
        steps: of each step, or window of batches, its groups' terms.
        group_size: G >= 2, in use.
    """
    each_K = [_estimates(step) for step in steps]
    whole = {
        name: float(np.mean([estimates[name] for estimates in each_K]))
        for name in CONSTANTS_AND_GRADIENT
    }
    delete_one = _delete_one(steps, each_K, whole)
    best = float(best_group_size(whole["c1"], whole["c2"], whole["c3"]))
    zero_variance = float(np.mean([np.isnan(step.norm_P).mean() for step in steps]))
    intervals = {
        name: UNDETERMINED._replace(estimate=whole[name]) for name in CONSTANTS_AND_GRADIENT
    }
    intervals["gstar"] = UNDETERMINED._replace(estimate=best)
    groups = sum(len(step.norm_P) for step in steps)
    intervals["zero_variance"] = wilson(zero_variance * groups, groups)
    sizes = {"noise_scale": float(group_size), "noise_scale_best": best}
    constants_3 = np.array([whole[name] for name in CONSTANTS])
    if delete_one is None:
        for name, size in sizes.items():
            error, length = _n_mse(whole, size), whole["grad_sq"]
            ratio = float(error / length) if length > 0 else math.nan
            intervals[name] = UNDETERMINED._replace(estimate=ratio)
        unknown_33 = np.full((3, 3), np.nan)
        scaling, heavy = ScalingEstimate(constants_3, unknown_33, 1.0, groups), True
    else:
        scaling = scaling_estimate(whole, delete_one, groups)
        for name in CONSTANTS_AND_GRADIENT:
            intervals[name] = jackknife_interval(whole[name], delete_one[name])
        if not all((delete_one[name] == whole[name]).all() for name in CONSTANTS):
            intervals["gstar"] = scaling.group_size_interval()
        for name, size in sizes.items():
            intervals[name] = noise_scale(whole, delete_one, size)
        norms = np.concatenate([step.norm_P[~np.isnan(step.norm_P)] for step in steps])
        leading = [delete_one["c2"], delete_one["c3"]]
        heavy = len(norms) < LEAST_UNITS or tails(norms[None], leading).heavy
    intervals["prompt_share"] = prompt_share(scaling, float(group_size))
    if group_size == 2:
        intervals |= _identified_by_pairs(whole, delete_one, intervals["gstar"], groups)
    return NoiseEstimate(intervals, scaling, heavy, assumption2=group_size == 2)


def _identified_by_pairs(
    whole: Mapping[str, float],
    delete_one: Mapping[str, Array] | None,
    gstar: Interval,
    pairs: int,
) -> dict[str, Interval]:
    """What pairs say of C2, C3 and G*: their sum, bounds, and G* under Assumption 2.

    The interval of G* goes from the low end of its lower bound to the high end of its upper one. It
    missed G* in 3.9 % or less of the samples that gave it two ends, the interval under Assumption 2
    the value there in up to a third of those, where few did (20 to 2560 pairs, the populations of
    `scripts/benchmarks/decisions.py`, in which the assumption nearly holds): no decision rests
    on the latter.

    Args:
        whole, delete_one: c1, c2, c3, grad_sq as of `noise_estimate`, C2 and C3 under Assumption 2.
        gstar: from these.
        pairs: how many.
    """
    unknown = ("c2", "c3", "noise_scale_best")
    found: dict[str, Interval] = dict.fromkeys(unknown, UNDETERMINED)
    found["gstar_assumption2"] = gstar
    bounds = {"gstar_least": ("c1", "grad_sq", 2), "gstar_most": ("c2", "c3", 1)}
    for name, (one, other, times) in bounds.items():  # C3 is so many times their sum
        constants = {**whole, "c3": times * (whole[one] + whole[other])}
        best = best_group_size(constants["c1"], constants["c2"], constants["c3"])
        found[name] = UNDETERMINED._replace(estimate=float(best))
        if delete_one is not None and not math.isnan(gstar.low):
            without = {**delete_one, "c3": times * (delete_one[one] + delete_one[other])}
            found[name] = scaling_estimate(constants, without, pairs).group_size_interval()
    low = max(found["gstar_least"].low, LEAST_GSTAR)
    found["gstar"] = Interval(math.nan, low, found["gstar_most"].high)
    found["c2_plus_c3"] = UNDETERMINED._replace(estimate=whole["c2"] + whole["c3"])
    if delete_one is not None:
        without_2 = delete_one["c2"] + delete_one["c3"]
        found["c2_plus_c3"] = jackknife_interval(whole["c2"] + whole["c3"], without_2)
    return found


def policy_drift(before_GT: Array, after_GT: Array) -> float:
    """KL divergence in nats a completion, from log-probabilities of completions that the policy
    before wrote: the mean of sum_t ( exp(d) - 1 - d ), d = after - before, unbiased and never
    negative.

    Args:
        before_GT, after_GT: of each token under the two policies; equal on padding.

    >>> round(policy_drift(np.log([[0.5], [0.5]]), np.log([[0.8], [0.2]])), 6)
    0.223144
    """
    change_GT = np.asarray(after_GT, float) - before_GT
    return float((np.expm1(change_GT) - change_GT).sum(axis=1).mean())


def withheld(estimate: NoiseEstimate, group_size: int, drift: float) -> dict[str, str]:
    """The names of intervals that windows of drifting policies do not say, each with the reason.

    Products between a window's groups come out too small, since what a group asks for is in part
    done by the update on it before the later ones are drawn; C1 comes out too large by as much.
    Measured (docs/benchmarks.md) it was `.0175 sqrt(drift) E||ghat||^2` at most, of one group, up
    to 1 nat: little beside C1, much beside a small ||grad J||^2. Either is withheld, with what is
    made of it, where this is over a fifth of the estimate and of its half-width; of C1 a fifth
    takes 9 % off G* - 1. Above 1 nat all are.

    Args:
        estimate: from windows.
        group_size: G, in use.
        drift: `policy_drift` from the first policy of a window to its last, of a group of the first
            whose rewards differ: the completions of such a group move most.
    """
    length = (
        estimate.intervals["grad_sq"].estimate + estimate.scaling.n_mse(group_size) / group_size
    )
    lost = LOST * math.sqrt(drift) * length
    bound = [name for name in estimate.intervals if name.startswith("gstar")]
    found: dict[str, str] = {}
    for name, word, others in (
        ("grad_sq", "small", ("noise_scale", "noise_scale_best")),
        ("c1", "large", ("prompt_share", *bound)),
    ):
        value, _, high = estimate.intervals[name]
        if drift > MOST_DRIFT or lost > TOLERABLE_BIAS * np.fmax(value, high - value):
            reason = (
                f"the policy moved {drift:.2g} nats a completion within a window, so {name} may "
                f"be too {word} by {lost:.2g}"
            )
            found |= dict.fromkeys((name, *others), reason)
    return found


def _n_mse(constants: Mapping[str, Any], size: float) -> Any:
    """G C1 + C2 + C3/(G-1): n times the error of a step of n rollouts."""
    return size * constants["c1"] + constants["c2"] + constants["c3"] / (size - 1)


def _estimates(step: GroupTerms) -> dict[str, float]:
    """C1, C2, C3 and ||grad J||^2, estimated from one step's groups."""
    count = len(step.g_sq_P)
    grad_sq = float(step.others_P.sum()) / (count * (count - 1))
    return {
        "c1": float(step.g_sq_P.mean()) - grad_sq,
        "c2": float(step.first_order_P.mean()),
        "c3": float(step.second_order_P.mean()),
        "grad_sq": grad_sq,
    }


def _delete_one(
    steps: Sequence[GroupTerms], each_K: Sequence[Mapping[str, float]], whole: Mapping[str, float]
) -> dict[str, Array] | None:
    """The averages with one unit left out, each [K, n]; None where there are too few units."""
    counts, number = {len(step.g_sq_P) for step in steps}, len(steps)
    if len(counts) == 1 and min(counts) >= LEAST_UNITS:
        parts = [_without_each(step) for step in steps]
        return {
            name: np.stack([
                whole[name] + (part[name] - estimates[name]) / number
                for part, estimates in zip(parts, each_K, strict=True)
            ])
            for name in CONSTANTS_AND_GRADIENT
        }  # fmt: skip
    if number < LEAST_UNITS:
        return None
    return {
        name: np.array([[
            (number * whole[name] - estimates[name]) / (number - 1) for estimates in each_K
        ]])
        for name in CONSTANTS_AND_GRADIENT
    }  # fmt: skip


def _without_each(step: GroupTerms) -> dict[str, Array]:
    """See `_estimates`, without each of the step's groups in turn, [P]."""
    rest = len(step.g_sq_P) - 1
    means = [(x.sum() - x) / rest for x in step[:3]]
    grad_sq_P = (step.others_P.sum() - 2 * step.others_P) / (rest * (rest - 1))
    return {"c1": means[0] - grad_sq_P, "c2": means[1], "c3": means[2], "grad_sq": grad_sq_P}
