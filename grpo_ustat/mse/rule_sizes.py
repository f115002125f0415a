r"""The best group size of any rule at n rollouts, from its replayed errors.

At n = B G rollouts, questions drawn independently, a rule's error at G is

    MSE_n(G) = bias^2(G) + v(G) G / n
    bias^2 = ||mu - tau||^2          v = mean_x E||ghat_x||^2 - ||mu||^2

with v the variance of one group. For an unbiased rule the minimum does not depend on n. A rule
whose bias falls like b/G (see `gap.estimate_moments.large_groups`) keeps it whatever the
number of prompts: then `G v(G) = G C1 + O(1)`, C1 the spread of the questions' means, and the
minimum grows,

    G*(n) -> ( 2 ||b||^2 n / C1 )^(1/3)

The best multiple of the estimate has the error `||tau||^2 - <mu, tau>^2 / (||mu||^2 + v G / n)`,
which only the part of b across tau keeps from 0.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from grpo_ustat.estimators.baselines import BASELINES
from grpo_ustat.estimators.intervals import Interval, jackknife_interval, ratio_interval
from grpo_ustat.records import Array
from grpo_ustat.runs.study_parts import BestSize, RuleSizes

ROLLOUTS = (64, 256, 1024, 4096, 16384, 65536)
MEASURES = ("mse", "best_scalar")


@dataclass(frozen=True)
class RuleLaw:
    """What a rule's error at one G is made of, by leave-one-out estimates with intervals.

    Attributes:
        baseline, group_size, target: of the rule, its G, what it is judged against.
        whole_5: bias^2, v, C1 (the spread of the questions' means), <mu, tau> and ||tau||^2.
        delete_one_5Kn: the same with one of a part's n units left out, K independent parts.
    """

    baseline: str
    group_size: int
    target: str
    whole_5: Array
    delete_one_5Kn: Array

    def error(self, parts_5: Array, rollouts: float, measure: str) -> Array:
        """The error at n rollouts, elementwise.

        Args:
            parts_5: `whole_5` or `delete_one_5Kn`.
            rollouts: n.
            measure: `mse`, or `best_scalar`, NaN where ||T||^2 is not estimated above 0.
        """
        bias2, one, _, cross, target_sq = parts_5
        noise = one * self.group_size / rollouts
        if measure == "mse":
            return bias2 + noise
        energy = bias2 + 2 * cross - target_sq + noise
        return target_sq - np.square(cross) / np.where(energy > 0, energy, np.nan)


def growth(law: RuleLaw) -> Interval:
    """`2 b^2 / C1` with `b^2 = G^2 bias^2`, whose product with n has the cube root G*(n) for large
    n; Fieller's interval.
    """
    square = 2.0 * law.group_size**2
    return ratio_interval(
        square * float(law.whole_5[0]), float(law.whole_5[2]),
        square * law.delete_one_5Kn[0], law.delete_one_5Kn[2],
    )  # fmt: skip


def best_sizes(laws: Sequence[RuleLaw], measure: str) -> list[BestSize]:
    """Best sizes of one rule against one target, at each n: the best of the measured G, and which
    others are not significantly worse.

    A G is worse where the paired interval of its error less that of the best one is above 0, the
    level shared among the sizes (Bonferroni). The best one is chosen by the same data.

    Args:
        laws: of the measured G.
        measure: see `RuleLaw.error`.

    Returns:
        Rows by n, their errors unbiased and so perhaps below 0; B = n / G need not be whole. An n
        below the second G has no row.
    """
    rows = []
    for rollouts in ROLLOUTS:
        own = [law for law in laws if law.group_size <= rollouts]
        errors = [float(law.error(law.whole_5, rollouts, measure)) for law in own]
        usable = [x for x in zip(errors, own, strict=True) if math.isfinite(x[0])]
        if len(usable) < 2:
            continue
        least, best = min(usable, key=lambda pair: pair[0])
        replicates = best.error(best.delete_one_5Kn, rollouts, measure)
        alike = [best.group_size]
        for error, law in usable:
            if law is best:
                continue
            others = law.error(law.delete_one_5Kn, rollouts, measure)
            level = 1 - 0.05 / (len(usable) - 1)
            difference = jackknife_interval(error - least, others - replicates, level)
            if not difference.low > 0:
                alike.append(law.group_size)
        errors_by_size = {str(law.group_size): error for error, law in usable}
        rows.append(
            BestSize(
                n=rollouts, group_size=best.group_size, alike=sorted(alike), errors=errors_by_size
            )
        )
    return rows


def rule_sizes(laws: Sequence[RuleLaw]) -> list[RuleSizes]:
    """G*(n) of every rule against each of its targets, for `result.json`.

    Of a rule whose mean goes elsewhere as G grows the error against g is mostly its length: there
    the best multiple has a row, the estimate itself has none.
    """
    rows = []
    for baseline, target in dict.fromkeys((law.baseline, law.target) for law in laws):
        own = [law for law in laws if (law.baseline, law.target) == (baseline, target)]
        own = [law for law in own if np.isfinite(law.delete_one_5Kn[:2]).all()]
        if len(own) < 2:
            continue
        rate = growth(max(own, key=lambda law: law.group_size))
        elsewhere = target == "expected_reward" != BASELINES[baseline].target
        for measure in MEASURES[1:] if elsewhere else MEASURES:
            sizes = best_sizes(own, measure)
            if len(sizes) < 2:
                continue
            first, last = set(sizes[0].alike), set(sizes[-1].alike)
            rows.append(
                RuleSizes(
                    baseline=baseline,
                    target=target,
                    measure=measure,
                    sizes=sizes,
                    grows=max(first) < min(last),
                    growth=rate if measure == "mse" else None,
                )
            )
    return rows
