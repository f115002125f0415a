r"""Scaling law from groups of completions, for sampled prompts or for several training steps.

The groups of a step give unbiased estimates of C1, C2, C3 and ||grad J||^2 for the policy of that
step; `scaling` and `moments` define the symbols. A step has few prompts, so the estimate of
||grad J||^2 can be negative. Therefore the estimates are averaged over steps before ratios are
computed.

**Pairs.** Groups of two completions ("pairs") do not identify C2 and C3, because an unbiased
estimate of A_V needs three completions. The sum of C2 and C3 can be estimated from two completions,
with squared score norms q and q', rewards z and z', and scores s and s'. The sum determines the
error and the noise scale at G = 2:

    S = C2 + C3 = E[ A_V + D ] = E[ (q + q')(z - z')^2 ] / 2
    E||g||^2 = E[ -(z - z')^2 <s, s'> ] / 2            n_c(2) = ( 2 C1 + S ) / ||grad J||^2

Pairs also bound G*. Because ||g|| = ||E (z - V) s|| <= E |z - V| ||s||, A_V and D are both at least
||g||^2. C3 is therefore in [2 E||g||^2, S]. Under the paper's Assumption 2 (A_V = D), C3 is
S/2 + E||g||^2. The bounds on C3 imply bounds on G*, and Assumption 2 implies a value of G*. For any
policy, C1 <= E||g||^2 <= C3/2. Therefore G* is at least 1 + sqrt(2), and at the same number of
rollouts the error with groups of 3 is at most the error with pairs.

**Windows.** An estimate of ||grad J||^2 needs at least two groups. If each batch has only one
group, the groups of several successive batches form a window, which takes the place of the step.
These groups were sampled from successive policies. C2, C3 and E||g||^2 are computed within groups,
so they are means over these policies. Products between groups, however, combine different policies,
and the later policies were trained on the earlier groups. ||grad J||^2 is therefore underestimated,
and C1 is overestimated by the same amount.
"""

from __future__ import annotations

import math
import warnings
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from grpo_ustat.estimators.intervals import (
    MIN_UNITS,
    UNDETERMINED,
    Interval,
    Tails,
    heavy_text,
    tails,
    wilson,
)
from grpo_ustat.estimators.moments import norm_moments, shifted_moments
from grpo_ustat.estimators.scaling import C1, C2, C3, GRAD_SQ, MIN_GSTAR, ScalingLaw
from grpo_ustat.records import Array


class GroupTerms(NamedTuple):
    """Contributions of the P groups of one step to the constants, [P] each."""

    # ||g||^2.
    g_sq_P: Array
    # A_V - ||g||^2, whose mean is C2. For pairs, it is (A_V + D)/2 - ||g||^2, whose mean is C2 only
    # under Assumption 2.
    first_order_P: Array
    # D + ||g||^2, whose mean is C3. For pairs, it is (A_V + D)/2 + ||g||^2, whose mean is C3 only
    # under Assumption 2. The mean of `first_order_P` + `second_order_P` is always C2 + C3.
    second_order_P: Array
    # Sum of <ghat_x, ghat_y> over the other groups y, where ghat_x is the gradient estimate of
    # group x.
    others_P: Array
    # Mean of the squared score norms; NaN if the group has zero variance.
    norm_P: Array

    @property
    def constants_4(self) -> Array:
        """Estimates of C1, C2, C3 and ||grad J||^2 from all groups."""
        return _constants(np.stack(self[:4]).sum(axis=1), len(self.g_sq_P))

    @property
    def without_each_4P(self) -> Array:
        """Estimates of C1, C2, C3 and ||grad J||^2 with each group left out in turn, [4, P]."""
        terms_4P = np.stack(self[:4])
        # Each product of two groups is counted in the sums of both groups.
        own_4P = np.stack([*self[:3], 2 * self.others_P])
        return _constants(terms_4P.sum(axis=1, keepdims=True) - own_4P, len(self.g_sq_P) - 1)


def _constants(sums_4: Array, count: int) -> Array:
    """Compute C1, C2, C3 and ||grad J||^2 from sums of the terms of `count` groups, elementwise."""
    g_sq, c2, c3 = sums_4[:3] / count
    grad_sq = sums_4[3] / (count * (count - 1))
    return np.stack([g_sq - grad_sq, c2, c3, grad_sq])


def group_terms(
    rewards_PG: Array,
    sq_norm_PG: Array,
    gradient_gram_PP: Array,
    score_gram_PGG: Array | None = None,
) -> GroupTerms:
    """Compute the terms of P >= 2 groups of G >= 2 completions.

    All terms of a group with equal rewards are 0, so its scores are not needed.

    Args:
        rewards_PG: rewards.
        sq_norm_PG: squared score norms. The values of groups with equal rewards are not used.
        gradient_gram_PP: inner products <ghat_x, ghat_y> of the groups' leave-one-out gradients.
        score_gram_PGG: inner products <s_i, s_j> of the scores of a group, needed if the expected
            score may differ from 0; None if it is 0. The products are used only for groups of at
            least 4, because fewer completions do not identify the expected score.

    Raises:
        ValueError: there are fewer than 2 groups or fewer than 2 completions per group.
    """
    if len(rewards_PG) < 2:
        raise ValueError(f"||grad J||^2 needs at least 2 groups, got {len(rewards_PG)}")
    own_P = np.diagonal(gradient_gram_PP)
    if rewards_PG.shape[1] == 2:
        # `half_P` is (A_V + D)/2, and ||ghat||^2 minus `half_P` is -(z - z')^2 <s, s'> / 2.
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


class HeavyTails(UserWarning):
    """Warning that the intervals' coverage is probably below their level; see `Tails.heavy`."""


def scaling_from_arrays(
    rewards_PN: Array, sq_norm_PN: Array, gradient_gram_PP: Array
) -> dict[str, Interval]:
    """Estimate C1, C2, C3, G* and the paper's sqrt(C3/C1) from arrays, with intervals over prompts.

    The prompts are treated as a sample from a population. C1 is the variance in this population,
    estimated with divisor P - 1. The jackknife leaves out one prompt at a time. The interval of G*
    comes from `ScalingLaw.gstar` and has no upper end if the data do not decide on a group size.

    Args:
        rewards_PN: rewards of N >= 3 completions for each of P >= 4 prompts.
        sq_norm_PN: squared score norms of the completions.
        gradient_gram_PP: inner products <ghat_x, ghat_y> of the prompts' leave-one-out gradients
            `ghat_x = 1/N sum_i s_i (z_i - mean of the others)`.

    Raises:
        ValueError: the shapes do not match, there are fewer than 4 prompts or 3 completions, or a
            number is not finite.

    Warns:
        HeavyTails: a few prompts dominate the estimates, so the intervals are probably too short.
    """
    law, sample_tails = law_of_prompts(rewards_PN, sq_norm_PN, gradient_gram_PP)
    if sample_tails.heavy:
        warnings.warn(heavy_text(sample_tails, "prompts"), HeavyTails, stacklevel=2)
    best = law.gstar()
    return {
        "c1": law.linear(C1),
        "c2": law.linear(C2),
        "c3": law.linear(C3),
        "gstar": best,
        "gstar_paper": Interval(*(x - 1 for x in best)),
    }


def law_of_prompts(
    rewards_PN: Array, sq_norm_PN: Array, gradient_gram_PP: Array
) -> tuple[ScalingLaw, Tails]:
    """Compute the scaling law for `scaling_from_arrays`, and measure if its sample has heavy tails.

    The arguments and errors are those of `scaling_from_arrays`.
    """
    count, completions = rewards_PN.shape
    if rewards_PN.shape != sq_norm_PN.shape or gradient_gram_PP.shape != (count, count):
        raise ValueError(
            f"shapes {rewards_PN.shape}, {sq_norm_PN.shape}, {gradient_gram_PP.shape}: with P "
            "prompts and N completions per prompt, they must be [P, N], [P, N] and [P, P]"
        )
    if count < MIN_UNITS:
        raise ValueError(f"intervals over prompts need at least 4 prompts, got {count}")
    if completions < 3:
        raise ValueError(f"C2 and C3 need at least 3 completions per prompt, got {completions}")
    for name, values in (
        ("rewards_PN", rewards_PN),
        ("sq_norm_PN", sq_norm_PN),
        ("gradient_gram_PP", gradient_gram_PP),
    ):
        if not np.isfinite(values).all():
            raise ValueError(
                f"{name} is not finite everywhere: leave out prompts with NaN or infinity"
            )
    terms = group_terms(rewards_PN.astype(float), sq_norm_PN.astype(float), gradient_gram_PP)
    delete_one_41P = terms.without_each_4P[:, None]
    law = ScalingLaw.jackknifed(terms.constants_4, delete_one_41P, count)
    return law, tails(sq_norm_PN.mean(axis=1)[None], delete_one_41P[1:3])


@dataclass(frozen=True)
class NoiseEstimate:
    """Averages over K steps (batches, or windows of batches) with P groups each, with intervals."""

    # Intervals by name: those of `ScalingLaw.intervals` at the current group size, and
    # `zero_variance`, the share of zero-variance groups. The ends are NaN if there are fewer than 4
    # groups per step and also fewer than 4 steps.
    # Pairs have additional entries: `c2_plus_c3`, the bounds `gstar_least` and `gstar_most` of G*,
    # and `gstar_assumption2`, the value of G* under Assumption 2. For pairs, `c2`, `c3`,
    # `noise_scale_best` and the estimate of `gstar` are NaN; the interval of `gstar` extends from
    # the lower end of `gstar_least` to the upper end of `gstar_most`.
    intervals: Mapping[str, Interval]
    # C1, C2, C3 and ||grad J||^2. For pairs, C2 and C3 rely on Assumption 2.
    law: ScalingLaw
    # True if the coverage of 95 % intervals is probably below 90 %; see `intervals.Tails`.
    heavy: bool
    # True if C2 and C3 of `law` rely on Assumption 2, as they do for pairs.
    assumption2: bool = False


def noise_estimate(steps: Sequence[GroupTerms], group_size: int) -> NoiseEstimate:
    """Estimate the constants, G* and the noise scale, averaged over the policies of several steps.

    All steps have equal weight. The jackknife leaves out one group at a time and treats the steps
    as independent. If steps have fewer than 4 groups or unequal numbers of groups, the jackknife
    leaves out one step at a time. Windows are treated in the same way as steps, although their
    groups come from successive policies. In simulated training, the coverage of the intervals is
    still .93 to .98 if one group of a window is left out at a time. To leave out one window at a
    time would give longer intervals and need more windows (simulated at commit ebbcb118).

    Args:
        steps: terms of the groups of each step, or of each window of batches.
        group_size: current group size G, at least 2.
    """
    norms_P = np.concatenate([step.norm_P for step in steps])
    whole_4, delete_one_4Kn = _averages(steps)
    law = ScalingLaw.jackknifed(whole_4, delete_one_4Kn, len(norms_P))
    heavy, varied_P = True, norms_P[~np.isnan(norms_P)]
    if law.has_errors and len(varied_P) >= MIN_UNITS:
        heavy = tails(varied_P[None], delete_one_4Kn[1:3]).heavy
    share = float(np.mean([np.isnan(step.norm_P).mean() for step in steps]))
    intervals = law.intervals(group_size)
    intervals["zero_variance"] = wilson(share * len(norms_P), len(norms_P))
    if group_size == 2:
        intervals |= _identified_by_pairs(law, intervals["gstar"])
    return NoiseEstimate(intervals, law, heavy, assumption2=group_size == 2)


def _averages(steps: Sequence[GroupTerms]) -> tuple[Array, Array]:
    """Return C1, C2, C3 and ||grad J||^2 averaged over steps, also for the jackknife.

    Returns:
        The averages, [4]. The averages with one unit left out, [4, K, n]: with n groups as units in
        each of K steps, or with n steps as units and K = 1. They are NaN if there are too few units
        for a jackknife.
    """
    values_4K = np.stack([step.constants_4 for step in steps], axis=1)
    whole_4 = values_4K.mean(axis=1)
    counts, number = {len(step.g_sq_P) for step in steps}, len(steps)
    if len(counts) == 1 and min(counts) >= MIN_UNITS:
        without_4KP = np.stack([step.without_each_4P for step in steps], axis=1)
        change_4KP = (without_4KP - values_4K[:, :, None]) / number
        return whole_4, whole_4[:, None, None] + change_4KP
    if number >= MIN_UNITS:
        return whole_4, ((number * whole_4[:, None] - values_4K) / (number - 1))[:, None]
    return whole_4, np.full((4, 1, 2), math.nan)


def _identified_by_pairs(law: ScalingLaw, gstar: Interval) -> dict[str, Interval]:
    """Return the estimates that pairs allow: C2 + C3, bounds of G*, and G* under Assumption 2.

    The interval of G* extends from the lower end of the lower bound's interval to the upper end of
    the upper bound's interval. Both kinds of interval were simulated with 20 to 2560 pairs from the
    populations in `scripts/benchmarks/populations.py`, which nearly satisfy Assumption 2. The
    interval of G* missed the true value in at most 3.9 % of the samples in which both ends were
    finite. The interval under Assumption 2 missed the true value in up to a third of the samples in
    which both of its ends were finite; where this rate was so high, few samples had two finite
    ends. Therefore no decision uses the interval under Assumption 2.

    Args:
        law: scaling law of the pairs, under Assumption 2.
        gstar: interval of G* from that law.
    """
    unknown = ("c2", "c3", "noise_scale_best")
    estimates: dict[str, Interval] = dict.fromkeys(unknown, UNDETERMINED)
    estimates |= gstar_bounds(law, C2 + C3, not math.isnan(gstar.low))
    return estimates | {"gstar_assumption2": gstar, "c2_plus_c3": law.linear(C2 + C3)}


def gstar_bounds(law: ScalingLaw, most_c3_4: Array, has_ends: bool = True) -> dict[str, Interval]:
    """Return bounds of G* for data that bound C3 but do not estimate it.

    For any policy, C3 is at least 2 E||g_x||^2 = 2 (C1 + ||grad J||^2). The entry `gstar_least` is
    G* at this bound, and `gstar_most` is G* at the upper bound of C3. The interval `gstar` extends
    from the lower end of `gstar_least` to the upper end of `gstar_most`. It has no estimate.

    Args:
        law: scaling law with valid C1 and ||grad J||^2.
        most_c3_4: upper bound of C3, as weights of C1, C2, C3 and ||grad J||^2.
        has_ends: False if the errors of the law are unknown.
    """
    bounds: dict[str, Interval] = {}
    for name, c3_4 in {"gstar_least": 2 * (C1 + GRAD_SQ), "gstar_most": most_c3_4}.items():
        bound = law.with_c3(c3_4)
        estimate = UNDETERMINED._replace(estimate=bound.best_size())
        bounds[name] = bound.gstar() if has_ends else estimate
    low = max(bounds["gstar_least"].low, MIN_GSTAR)
    return bounds | {"gstar": Interval(math.nan, low, bounds["gstar_most"].high)}
