r"""Unequal group sizes: how a plan changes the error at a fixed number of rollouts.

A plan assigns a group size G_x to each of m prompts. The gradient estimate is the mean over groups
of their leave-one-out gradients. It is unbiased for any G_x >= 2, and its error given the prompts
is

    1/m^2 sum_x e_x(G_x)        e_x(G) = A_x/G + B_x / (G (G-1))

with `A = A_V - ||g||^2`, `B = D + ||g||^2` (`estimators.moments`). If A, B >= 0, every e_x is
convex, and one more completion of prompt x saves `A/(G (G+1)) + 2 B/((G-1) G (G+1))`. To minimise
the sum at a fixed total, start with G_x = 2 and repeatedly add the completion with the largest
saving. This greedy method is exact because the savings of a prompt decrease with G. For large G it
gives Neyman's (1934) allocation, `G_x ~ sqrt(A_x)`.

A_x and B_x are unknown. If a plan were made and judged with the same completions, it would appear
to save too much, because it would be fitted to their sampling errors. Therefore the plan is made
from one half of the pool and judged on the other half. The halves are then swapped, and the
procedure is repeated over random halvings. The estimates of the judging half are unbiased and
independent of the plan. The saving of the best plan for known A and B has two bounds. It is at
least the saving of a held-out plan, and at most about the in-sample saving of the plan from the
full pool.

Plans are computed from estimates on half of the pool:

    measured noise             estimated A and B, with negative estimates set to 0
    p(1-p)                     savings p (1-p) / ((G-1) G), from the RLOO variance p (1-p)/(G-1)
                               in VIP (2602.01601); uses the measured p instead of VIP's
                               Gaussian process
    shrunken p(1-p)            as above, with E[p (1-p) | counts] for p ~ Beta(a, b) over prompts
    shrunken ... x score norm  as above, times the mean squared score norm
    Knapsack RL                value p (1-p)^2 (1 - p^G - (1-p)^G) with the measured p, as in the
                               public code of 2509.25849 but without its fallback
    G = 2 for zero-variance prompts
                               G = 2 for a prompt if all its rewards in the half are equal; the
                               other prompts share the remaining completions equally

Reinforce-Ada (2510.04996) is not compared. This method samples until a prompt has enough right
answers and estimates the gradient of a different objective, so the error above does not apply to
it.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np

from grpo_ustat.estimators.halves import (
    MIN_COMPLETIONS,
    MIN_PROMPTS,
    group_error,
    halves_of,
)
from grpo_ustat.estimators.intervals import (
    CONFIDENCE,
    UNDETERMINED,
    Interval,
    is_binary,
    jackknife_interval,
)
from grpo_ustat.records import Array, ScorePool

# Smallest group size for which leave_one_out is defined.
MIN_GROUP_SIZE = 2
HALVINGS = 4
MEAN_SIZES = (4, 8, 16)
MEASURED_NOISE = "measured noise"
# Largest group size in a plan divided by the mean group size.
MAX_TIMES_MEAN = 16


@dataclass(frozen=True)
class AllocationSaving:
    """Effect of a plan on the error at a fixed number of rollouts."""

    plan: str
    # Mean group size.
    group_size: int
    # Error of the plan divided by the error of equal groups, minus 1. The plan is made from one
    # half of the pool and judged on the other half. The intervals are for new prompts. They are
    # simultaneous over all plans with the same mean group size.
    change: Interval
    # Value of `change` if the plan is both made from and judged on the full pool. None for plans
    # other than `MEASURED_NOISE`, or if the error of equal groups is not positive.
    in_sample: float | None


def allocate(savings: Callable[[Array], Array], count: int, total: int) -> Array:
    """Return the group sizes that maximise the total saving, chosen greedily, [P].

    Args:
        savings: function that maps group sizes, [1, K], to the savings from one more completion of
            each prompt, [P, K]. The savings must decrease with the group size. If savings are
            equal, the smallest group grows first.
        count: number of prompts, P.
        total: sum of the group sizes, at least 2 P.

    Raises:
        ValueError: `total` is less than 2 completions per prompt.

    >>> noise_P1 = np.array([[9.0], [1.0], [1.0]])
    >>> allocate(lambda sizes: noise_P1 / (sizes * (sizes + 1)), 3, 15).tolist()
    [9.0, 3.0, 3.0]
    """
    if total < MIN_GROUP_SIZE * count:
        raise ValueError(
            f"{total} completions for {count} prompts: use at least {MIN_GROUP_SIZE * count}"
        )
    sizes_P, more = np.full(count, float(MIN_GROUP_SIZE)), total - MIN_GROUP_SIZE * count
    if not more:
        return sizes_P
    most = MAX_TIMES_MEAN * (total // count)
    saved_PK = savings(np.arange(MIN_GROUP_SIZE, most, dtype=float)[None])
    least = np.partition(saved_PK, saved_PK.size - more, axis=None)[saved_PK.size - more]
    sizes_P += (saved_PK > least).sum(axis=1)
    equal = np.flatnonzero(least == saved_PK.T)[: total - int(sizes_P.sum())]
    return sizes_P + np.bincount(equal % count, minlength=count)


def allocation_savings(
    pool: ScorePool, group_sizes: Sequence[int] = MEAN_SIZES
) -> list[AllocationSaving]:
    """Estimate the effect of every plan; [] if there are too few prompts or completions.

    Args:
        pool: pool of N completions for each of P prompts. The result is [] if P < 10 or N < 6.
            Plans that use p are computed only if all rewards are 0 or 1.
        group_sizes: mean group sizes, each at least 3.
    """
    count, size = pool.rewards_PN.shape
    if count < MIN_PROMPTS or size < MIN_COMPLETIONS:
        return []
    halves, full_pool = halves_of(pool)
    binary = is_binary(pool.rewards_PN)
    rows: list[AllocationSaving] = []
    for group_size in group_sizes:
        total, equal_P = group_size * count, np.zeros(count)
        errors_by_plan: dict[str, Array] = {}
        for s, (plans, judges) in itertools.product(range(HALVINGS), ((0, 1), (1, 0))):
            half = {name: values[plans, s] for name, values in halves.items()}
            first_P, second_P = halves["first"][judges, s], halves["second"][judges, s]
            equal_P += group_error(first_P, second_P, group_size)
            for name, savings in plans_of(half, size // 2, binary).items():
                sizes_P = allocate(savings, count, total)
                errors_P = group_error(first_P, second_P, sizes_P)
                errors_by_plan[name] = errors_by_plan.get(name, 0.0) + errors_P
        in_sample_sizes_P = allocate(
            plans_of(full_pool, size, binary)[MEASURED_NOISE], count, total
        )
        in_sample_error, equal_error = (
            float(group_error(full_pool["first"], full_pool["second"], sizes).sum())
            for sizes in (in_sample_sizes_P, group_size)
        )
        for name, errors_P in errors_by_plan.items():
            in_sample = (
                in_sample_error / equal_error - 1
                if name == MEASURED_NOISE and equal_error > 0
                else None
            )
            rows.append(
                AllocationSaving(
                    name, group_size, _change(errors_P, equal_P, len(errors_by_plan)), in_sample
                )
            )
    return rows


def _change(planned_P: Array, equal_P: Array, plans: int) -> Interval:
    """Return the ratio of the two sums minus 1, with a delete-one-prompt jackknife interval.

    The confidence level is Bonferroni-corrected for the number of plans.
    """
    if not (equal_P.sum() - equal_P > 0).all():
        return UNDETERMINED
    ratio = planned_P.sum() / equal_P.sum()
    delete_one_P = (planned_P.sum() - planned_P) / (equal_P.sum() - equal_P)
    level = 1 - (1 - CONFIDENCE) / plans
    interval = jackknife_interval(float(ratio), delete_one_P[None], level, positive=True)
    return Interval(*(x - 1 for x in interval))


def plans_of(
    half: dict[str, Array], size: int, binary: bool
) -> dict[str, Callable[[Array], Array]]:
    """Return each plan's savings function, computed from estimates on half of a pool.

    Args:
        half: estimates by name from `halves_of`, each of shape [P].
        size: number of completions per prompt from which the estimates were computed.
        binary: True if all rewards are 0 or 1.
    """
    columns = {name: values_P[:, None] for name, values_P in half.items()}
    first, second = (np.maximum(columns[name], 0.0) for name in ("first", "second"))
    p, variance, score = columns["value"], columns["variance"], columns["score"]

    def measured(sizes: Array) -> Array:
        pair = sizes * (sizes + 1)
        return first / pair + 2 * second / ((sizes - 1) * pair)

    def variance_plan(noise: Array) -> Callable[[Array], Array]:
        return lambda sizes: noise / ((sizes - 1) * sizes)

    plans = {
        MEASURED_NOISE: measured,
        "p(1-p)" if binary else "variance of rewards": variance_plan(variance),
        "G = 2 for zero-variance prompts": variance_plan((variance > 0).astype(float)),
    }
    if binary:
        shrunken = shrunken_variance(half["value"] * size, size)[:, None]
        plans["shrunken p(1-p)"] = variance_plan(shrunken)
        plans["shrunken p(1-p) x score norm"] = variance_plan(shrunken * score)
        plans["Knapsack RL"] = lambda sizes: (
            p * (1 - p) ** 2 * (p**sizes * (1 - p) + (1 - p) ** sizes * p)
        )
    return plans


def shrunken_variance(successes_P: Array, size: int) -> Array:
    """Return E[p (1-p) | counts] for p ~ Beta(a, b) over prompts; a and b are fitted by moments.

    Args:
        successes_P: number of right completions of each prompt.
        size: number of completions per prompt, n.

    >>> shrunken_variance(np.array([0.0, 4.0, 4.0, 8.0]), 8).round(3).tolist()
    [0.034, 0.224, 0.224, 0.034]
    """
    share_P = successes_P / size
    mean = float(share_P.mean())
    within = float((share_P * (1 - share_P)).mean()) / (size - 1)
    between = max(float(share_P.var(ddof=1)) - within, 1e-6)
    # Sum of the Beta parameters, a + b.
    weight = max(mean * (1 - mean) / between - 1, 1e-3)
    a_P, b_P = mean * weight + successes_P, (1 - mean) * weight + size - successes_P
    sum_P = a_P + b_P
    return a_P * b_P / (sum_P * (sum_P + 1))
