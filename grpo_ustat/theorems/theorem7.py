"""Theorem 7: the group size that is best at a fixed number of rollouts."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import product

import numpy as np
from scipy import stats

from grpo_ustat.estimators.gap import quadratic_recursion
from grpo_ustat.policy.beds import Bed
from grpo_ustat.theorems.algorithm1 import Estimator
from grpo_ustat.theorems.finding import Claim, Curve, Finding, Panel, decided
from grpo_ustat.theorems.jobs import LEVEL, Job, Rate, mean_interval, simulated
from grpo_ustat.theorems.truth import bed_facts, limit_weighting, noise, scaling_at

STATEMENT = (
    "At n = B G rollouts per step the bounds on the gap depend on B and G through the gradient's "
    "mean squared error alone, (G C1 + C2 + C3/(G-1)) / n, so the best group size is "
    "G* = 1 + sqrt(C3/C1) whatever n, the number of steps and the learning rate."
)
ROUNDING = 1e-9


def theorem7(
    bed: Bed,
    budgets: Sequence[int],
    group_sizes: Sequence[int],
    rates: Sequence[Rate],
    steps: Sequence[int],
    replicates: int,
    seed: int,
    workers: int,
) -> Finding:
    """Run GRPO at every n, G and rate; compare the best G of each n, T and rate with theory's.

    Args:
        bed: the policy.
        budgets: n.
        group_sizes: G, of which those count that divide n.
        rates: learning rates.
        steps: T at which the gap is compared.
        replicates, seed, workers: see `simulated`.
    """
    jobs = [
        Job(Estimator("leave_one_out", n // size, size), rate, tuple(steps))
        for rate in rates
        for n in budgets
        for size in group_sizes
        if n % size == 0
    ]
    paths, drawn = simulated(jobs, bed, replicates, seed, workers)
    cells = {}
    for job, path in zip(jobs, paths, strict=True):
        for place, step in enumerate(steps):
            key = job.rate, job.estimator.rollouts, step
            cells.setdefault(key, {})[job.estimator.group_size] = path.gap_SR[place]
    rows, best = [], {}
    for key, gaps in cells.items():
        best[key] = _best(gaps)
        rows += _rows(bed, key, gaps, best[key])
    claims = _claims(bed, group_sizes, best)
    return Finding(
        statement=STATEMENT,
        bed=bed_facts(bed),
        claims=claims,
        panels=_panels(rows, sorted({min(steps), max(steps)})),
        rows=rows,
        answer=_answer(claims),
        notes=_notes(bed, rates, best),
        rollouts=drawn,
    )


def _best(gaps: dict[int, np.ndarray]) -> set[int]:
    """The group sizes whose mean gap is not distinguishable from the smallest.

    Differences are paired: replicates of the same number start from the same random numbers.
    """
    lowest = min(gaps, key=lambda size: gaps[size].mean())
    others = {size: gap_R - gaps[lowest] for size, gap_R in gaps.items() if size != lowest}
    alike = {size for size, x in others.items() if mean_interval(x, len(others)).low <= 0}
    return {lowest} | alike


def predicted(bed: Bed, key: tuple, sizes: Sequence[int]) -> dict[str, int]:
    """The G that each theory takes to be best at (rate, n, T): the bounds by the trace of the
    noise, the limit by its weights, the recursion of the quadratic model by its own gap.
    """
    rate, n, step = key
    traces = scaling_at(bed, bed.best_K)
    found = {"bounds": min(sizes, key=lambda g: traces.mse(n // g, g))}
    if rate.kind == "decaying":
        limit = scaling_at(bed, bed.best_K, limit_weighting(bed.curvature_KK, rate.value))
        found["limit"] = min(sizes, key=lambda g: limit.mse(n // g, g))
    model = {g: _model(bed, Estimator("leave_one_out", n // g, g), rate, step) for g in sizes}
    return found | {"recursion": min(model, key=model.get)}


def _model(bed: Bed, one: Estimator, rate: Rate, step: int) -> float:
    first, sigma = bed.start_K - bed.best_K, noise(bed, bed.best_K, one)
    return float(quadratic_recursion(first, bed.curvature_KK, sigma, rate.values(step))[-1])


def _rows(bed: Bed, key: tuple, gaps: dict[int, np.ndarray], best: set[int]) -> list[dict]:
    rate, n, step = key
    foreseen = predicted(bed, key, list(gaps))
    rows = []
    for size, gap_R in sorted(gaps.items()):
        mean, low, high = mean_interval(gap_R)
        one = Estimator("leave_one_out", n // size, size)
        rows.append(
            {"rate": rate.name, "rollouts": n, "step": step, "group_size": size}
            | {"num_prompts": n // size, "gap": mean, "low": low, "high": high}
            | {"quadratic_model": _model(bed, one, rate, step), "best": size in best}
            | {"best_by_bounds": size == foreseen["bounds"]}
            | {"best_by_recursion": size == foreseen["recursion"], "replicates": len(gap_R)}
        )
    return rows


def _claims(bed: Bed, sizes: Sequence[int], best: dict[tuple, set[int]]) -> list[Claim]:
    clear = {key: found for key, found in best.items() if len(found) < len(_sizes(key, sizes))}
    how = (
        f"cells (n, T, rate) in which some G is distinguishable from the best: {len(clear)} of "
        f"{len(best)}; paired, {LEVEL:.0%} in each, Bonferroni over G"
    )
    claims = []
    kinds = {"bounds": "G* of the bounds", "recursion": "best G of the quadratic recursion"}
    for kind, words in kinds.items():
        hits = sum(
            predicted(bed, key, _sizes(key, sizes))[kind] in found for key, found in clear.items()
        )
        claims.append(_share(f"cells whose best G may be the {words}", hits, len(clear), how))
    common = set.intersection(*clear.values()) if clear else set()
    words = ", ".join(map(str, sorted(common))) or "none"
    claims.append(
        Claim(
            f"group sizes that may be best in every cell: {words}", ">= 1", len(common),
            None, None, decided(bool(common) if clear else None), how,
        )
    )  # fmt: skip
    return claims


def _share(what: str, hits: int, count: int, how: str) -> Claim:
    """All of them, if theory is right and each cell errs with 5 %: a binomial bar.

    Cells of one rate and n share replicates, so they err together and the bar is a rough one.
    """
    if not count:
        return Claim(what, "all", 0, None, None, decided(None), how)
    least = int(stats.binom.ppf(1 - LEVEL + ROUNDING, count, LEVEL))
    said = f"{how}; {least} hits of {count} are enough, as each cell may err"
    return Claim(what, f">= {least} of {count}", hits, None, None, decided(hits >= least), said)


def _sizes(key: tuple, sizes: Sequence[int]) -> list[int]:
    return [size for size in sizes if key[1] % size == 0]


def _answer(claims: list[Claim]) -> str:
    bounds, model, common = claims
    return (
        f"G* of the bounds may be best in {bounds.measured:.0f} cells (asked: {bounds.predicted}), "
        f"the recursion's best G in {model.measured:.0f}; {common.what}."
    )


def _notes(bed: Bed, rates: Sequence[Rate], best: dict[tuple, set[int]]) -> list[str]:
    start, end = (scaling_at(bed, u).best_group_size for u in (bed.start_K, bed.best_K))
    notes = [
        f"G* of C1 and C3 at the start: {start:.2f}, at the maximum: {end:.2f}",
        "the bounds weigh all directions of the noise alike, the gap weighs them by curvature: "
        "where both are not proportional the best G depends on the learning rate",
    ]
    for rate in rates:
        if rate.kind == "decaying":
            law = scaling_at(bed, bed.best_K, limit_weighting(bed.curvature_KK, rate.value))
            notes.append(f"G* weighted as the limit of {rate.name} does: {law.best_group_size:.2f}")
    for (rate, n, step), found in best.items():
        words = ", ".join(map(str, sorted(found)))
        notes.append(f"{rate.name}, n = {n}, T = {step}: best or not distinguishable: G = {words}")
    return notes


def _panels(rows: list[dict], steps: Sequence[int]) -> list[Panel]:
    """The gap against G, a panel for each rate and T."""
    panels = []
    for rate, step in product(dict.fromkeys(row["rate"] for row in rows), steps):
        curves = []
        mine = [row for row in rows if (row["rate"], row["step"]) == (rate, step)]
        for n in dict.fromkeys(row["rollouts"] for row in mine):
            own = [row for row in mine if row["rollouts"] == n]
            x, y, low, high, model = (
                [row[key] for row in own]
                for key in ("group_size", "gap", "low", "high", "quadratic_model")
            )
            curves.append(Curve(f"n = {n}", x, y, low, high))
            curves.append(Curve(f"n = {n}", x, model, predicted=True))
        title = f"{rate}, T = {step}"
        panels.append(Panel(title, "group size G", "mean gap (line: recursion)", curves, "xy"))
    return panels
