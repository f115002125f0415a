"""Theorem 7: the best group size at a fixed number of rollouts."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from itertools import product
from typing import Any

import numpy as np
from scipy.optimize import minimize_scalar

from grpo_ustat.config.gap import Theorem7Config
from grpo_ustat.estimators.scaling import ScalingLaw
from grpo_ustat.gap.claims import enumerated_claim, mean_interval, mean_p_value, tested_claim
from grpo_ustat.gap.convergence import quadratic_recursion, recursion
from grpo_ustat.gap.evidence import Evidence, Panel, Series, columns_of, rows_of
from grpo_ustat.gap.exact import noise, scaling_at
from grpo_ustat.gap.problems import Problem
from grpo_ustat.gap.simulate import Estimator, Rate, Simulation, Trajectories
from grpo_ustat.gap.simulated import learning_rates, simulated
from grpo_ustat.runs.claims import FAMILY_ERROR, Claim, comma_list
from grpo_ustat.runs.record import AGREES, OPEN

STATEMENT = (
    "At n = B G rollouts per step, or n = B G T in total, the bounds on the gap depend on B and G "
    "only through (G C1 + C2 + C3/G) / (B G), which bounds the gradient's mean squared error. For "
    "every n, number of steps and learning rate the bounds are therefore smallest at G* = "
    "sqrt(C3/C1). With the exact last term, C3/(G-1), they are smallest at G* = 1 + sqrt(C3/C1) "
    "(our result)."
)
CHOICE_MEANINGS = {
    "paper": "G nearest to the paper's G* = sqrt(C3/C1)",
    "bounds": "G nearest to our exact G* = 1 + sqrt(C3/C1)",
    "recursion": "best G of our quadratic recursion",
}
# A numerical minimiser agrees with the formula if their relative distance is below this value.
MINIMISER_TOLERANCE = 1e-4

# One cell of the experiment's grid: a learning rate, a number of rollouts per step n, and a number
# of steps T. In each cell all group sizes G are compared.
GridPoint = tuple[Rate, int, int]
# Gaps J* - J of all R replicates for each G.
Gaps = dict[int, np.ndarray]


def plan(design: Theorem7Config) -> list[Simulation]:
    """Plan GRPO at every learning rate, every n and every G that divides n.

    The numbers of rollouts per step, n, are those of the configuration, and each configured total
    n T divided by each number of steps T.
    """
    batches = [(n, tuple(design.steps)) for n in design.rollouts]
    batches += [(total // step, (step,)) for total in design.totals for step in design.steps]
    return [
        Simulation(Estimator("leave_one_out", n // size, size), rate, record)
        for rate in learning_rates(design)
        for n, record in batches
        for size in design.group_sizes
        if n % size == 0
    ]


def judge(problem: Problem, design: Theorem7Config, runs: Sequence[Trajectories]) -> Evidence:
    """Compare the measured best G with the predicted one, for each learning rate, n and T."""
    cells: dict[GridPoint, Gaps] = {}
    for run in runs:
        for place, step in enumerate(run.simulation.steps):
            point = run.rate, run.estimator.rollouts, step
            cells.setdefault(point, {})[run.estimator.group_size] = run.gap_SR[place]
    best = {point: may_be_best(gaps) for point, gaps in cells.items()}
    theories = {point: predicted_sizes(problem, point, list(gaps)) for point, gaps in cells.items()}
    claims = [*_bound_claims(problem, list(cells)), *_cell_claims(cells, best, theories)]
    rates = list(dict.fromkeys(run.rate for run in runs))
    for total, rate in product(design.totals, rates):
        claims.append(total_claim(total, rate, cells, theories, design.steps))
    rows, series = [], []
    for point, gaps in cells.items():
        (rate, n, step), sizes = point, sorted(gaps)
        measured = [mean_interval(gaps[size]) for size in sizes]
        model = [
            model_gap(problem, Estimator("leave_one_out", n // size, size), rate, step)
            for size in sizes
        ]
        columns = {"group_size": sizes, "num_prompts": [n // size for size in sizes]}
        columns |= columns_of("gap", measured) | {"quadratic_model": model}
        columns |= {"best": [size in best[point] for size in sizes]} | {
            f"best_by_{kind}": [size == choice for size in sizes]
            for kind, choice in theories[point].items()
        }
        same = {"rate": rate.name, "rollouts": n, "step": step, "total": n * step}
        rows += rows_of(same | {"replicates": design.replicates}, columns)
        if n == max(design.rollouts, default=n):
            series.append(Series(f"{rate.name}, n = {n}, T = {step}", sizes, measured, model))
    panel = Panel("group size G", "mean gap (line: recursion)", series)
    return Evidence(claims, panel, rows)


def p_value_of_best(gaps: Mapping[Any, np.ndarray], choice: Any) -> float:
    """Return the p-value of the hypothesis that `choice` has the smallest mean gap.

    `choice` is compared with every other key by a one-sided paired t test, with Bonferroni's
    correction. The tests are paired, because replicates with the same number use the same random
    numbers.

    Args:
        gaps: gaps of all replicates. The keys are values of G, or pairs (T, G).
        choice: key whose mean gap may be the smallest.
    """
    others = [gap_R for other, gap_R in gaps.items() if other != choice]
    p_values = (mean_p_value(gaps[choice] - gap_R, above=True) for gap_R in others)
    return min(1.0, len(others) * min(p_values))


def may_be_best(gaps: Gaps) -> set[int]:
    """Return the group sizes that may have the smallest mean gap.

    These are the sizes that `p_value_of_best` does not reject at level 5 %.
    """
    return {size for size in gaps if p_value_of_best(gaps, size) > FAMILY_ERROR}


def p_value_of_all(cells: dict[GridPoint, Gaps], sizes: dict[GridPoint, int]) -> float:
    """Return the p-value of the hypothesis that the G in `sizes` is best in every cell.

    The correction over cells is Bonferroni's, which is valid although cells share random numbers.
    """
    p_values = [p_value_of_best(cells[key], size) for key, size in sizes.items()]
    return min(1.0, len(p_values) * min(p_values))


def predicted_sizes(problem: Problem, point: GridPoint, sizes: Sequence[int]) -> dict[str, int]:
    """Return the best G in a cell according to each theory, keyed as in `CHOICE_MEANINGS`."""
    rate, n, step = point
    law = scaling_at(problem, problem.best_K)
    model = {
        g: model_gap(problem, Estimator("leave_one_out", n // g, g), rate, step) for g in sizes
    }
    return {
        "paper": min(sizes, key=lambda g: paper_error(law, g)),
        "bounds": law.least(sizes),
        "recursion": min(sizes, key=lambda g: model[g]),
    }


def paper_error(law: ScalingLaw, size: float) -> float:
    """Return n times the paper's bound on the mean squared error of the gradient at G."""
    return size * law.c1 + law.c2 + law.c3 / size


def model_gap(problem: Problem, estimator: Estimator, rate: Rate, step: int) -> float:
    """Return the mean gap after `step` steps according to `quadratic_recursion`."""
    first, sigma = problem.start_K - problem.best_K, noise(problem, problem.best_K, estimator)
    return float(quadratic_recursion(first, problem.curvature_KK, sigma, rate.values(step))[-1])


def smallest_bound(
    problem: Problem, law: ScalingLaw, error: Callable[[ScalingLaw, float], float], point: GridPoint
) -> float:
    """Return the G, not necessarily an integer, at which the bound of Lemma 6 is smallest.

    Args:
        problem: test problem, which defines mu and L.
        law: scaling law that contains C1, C2 and C3.
        error: function that returns n times the mean squared error of the gradient at G.
        point: learning rate, n and T of the bound.
    """
    rate, n, step = point
    first = float(problem.gap(problem.start_K[:, None])[0])

    def bound(log_size: float) -> float:
        s2 = error(law, np.exp(log_size)) / n
        return float(recursion(first, *problem.constants, s2, rate.values(step))[-1])

    ends = np.log(1 + 1e-3), np.log(1e4)
    return float(np.exp(minimize_scalar(bound, ends, method="bounded", bounds=ends).x))


def _bound_claims(problem: Problem, points: Sequence[GridPoint]) -> list[Claim]:
    """Make claims about the G that minimises the bounds of Lemma 6, which the theorem predicts."""
    law = scaling_at(problem, problem.best_K)
    root = float(np.sqrt(law.c3 / law.c1))
    forms = {
        "the paper's last term C3/G": (paper_error, root),
        "the exact last term C3/(G-1) (ours)": (ScalingLaw.n_mse, 1 + root),
    }
    claims = []
    for words, (error, gstar) in forms.items():
        minimisers = [smallest_bound(problem, law, error, point) for point in points]
        furthest = max(minimisers, key=lambda size: abs(size / gstar - 1))
        claims.append(
            enumerated_claim(
                what=f"G at which the bound is smallest, with {words}: the value furthest from G* "
                "over all (n, T, rate)",
                predicted=gstar,
                measured=furthest,
                agrees=abs(furthest / gstar - 1) < MINIMISER_TOLERANCE,
                how=f"Lemma 6's recursion minimised over real G in {len(points)} cells; agrees if "
                f"the relative distance is below {MINIMISER_TOLERANCE:g}. Only the algebra is "
                "tested: C1, C2 and C3 in s2 are values at the maximum instead of suprema over a "
                "path, and the bound depends on G only through s2",
            )
        )
    return claims


def _cell_claims(
    cells: dict[GridPoint, Gaps],
    best: dict[GridPoint, set[int]],
    theories: dict[GridPoint, dict[str, int]],
) -> list[Claim]:
    """Make claims about the G with the smallest mean gap in each cell, which was simulated."""
    clear = [point for point, gaps in cells.items() if len(best[point]) < len(gaps)]
    how = (
        f"in {len(clear)} of {len(cells)} cells (n, T, rate) some G is significantly worse than "
        "the best; paired t tests with Bonferroni's correction over the other G and, for the "
        "p-value, over cells"
    )
    common = sorted(set.intersection(*(set(gaps) for gaps in cells.values())))
    constant = {
        size: p_value_of_all(cells, {point: size for point in cells})  # noqa: C420
        for size in common
    }
    verdict = AGREES if clear else OPEN
    claims = []
    for kind, words in CHOICE_MEANINGS.items():
        sizes = {point: theory[kind] for point, theory in theories.items()}
        others = {x: p for x, p in constant.items() if set(sizes.values()) != {x}}
        claims.append(
            tested_claim(
                "number of (n, T, rate) cells in which the mean gap may be smallest at the "
                f"{words}",
                f"{len(clear)} of {len(clear)}",
                sum(sizes[point] in best[point] for point in clear),
                f"{how}; G = {comma_list(sorted(set(sizes.values())))}",
                p_value_of_all(cells, sizes),
                alternatives={f"G = {size} in all cells": p for size, p in others.items()},
                verdict=verdict,
            )
        )
    if not common:
        return claims
    everywhere = [size for size in common if all(size in sizes for sizes in best.values())]
    claim = tested_claim(
        f"group sizes that may be best in every cell: {comma_list(everywhere) or 'none'}",
        ">= 1",
        len(everywhere),
        f"{how}; the p-value is the largest over all G",
        max(constant.values()),
        verdict=verdict,
    )
    severity = f"{len(everywhere)} of {len(common)} group sizes may be best in every cell"
    return [*claims, replace(claim, severity=severity)]


def total_claim(
    total: int,
    rate: Rate,
    cells: dict[GridPoint, Gaps],
    theories: dict[GridPoint, dict[str, int]],
    steps: Sequence[int],
) -> Claim:
    """Make a claim that, at a fixed total n T, the mean gap is smallest at the G nearest to G*.

    All pairs (T, G) with this total are compared.

    Args:
        total: total number of rollouts, n T.
        rate: learning rate.
        cells: gaps of all replicates, for each cell and G.
        theories: best G according to each theory, for each cell.
        steps: numbers of steps T among which the total is compared.
    """
    points = {step: (rate, total // step, step) for step in steps}
    gaps = {(step, size): x for step, point in points.items() for size, x in cells[point].items()}
    lowest = min(gaps, key=lambda pair: gaps[pair].mean())
    p_values = {pair: p_value_of_best(gaps, pair) for pair in gaps}
    sizes = sorted({size for _, size in gaps})
    by_size = {g: max(p for (_, size), p in p_values.items() if size == g) for g in sizes}
    nearest = {step: theories[point]["paper"] for step, point in points.items()}
    expected = nearest[lowest[0]]
    return tested_claim(
        f"{rate.name}, n T = {total} in total: G of the pair (T, G) with the smallest mean gap",
        float(expected),
        lowest[1],
        f"smallest at T = {lowest[0]}, B = {total // lowest[0] // lowest[1]}; paired t tests "
        f"of every pair (T, G) against all others (Bonferroni over {len(gaps) - 1}); the p-value "
        "is the largest over T, where each T is paired with the G nearest to the paper's G*",
        max(p_values[pair] for pair in nearest.items()),
        alternatives={f"G = {size}": p for size, p in by_size.items() if size != expected},
        verdict=AGREES if any(p <= FAMILY_ERROR for p in by_size.values()) else OPEN,
    )


THEOREM = simulated(STATEMENT, plan, judge)
