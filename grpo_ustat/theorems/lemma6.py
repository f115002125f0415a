"""Lemma 6: the mean gap of Algorithm 1 against its recursion and its bounds."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from scipy import stats

from grpo_ustat.estimators.gap import decaying_bound, quadratic_recursion, recursion
from grpo_ustat.policy.beds import Bed, Coins
from grpo_ustat.theorems.algorithm1 import Estimator, Paths
from grpo_ustat.theorems.finding import Claim, Curve, Finding, Panel, decided
from grpo_ustat.theorems.jobs import LEVEL, Job, Rate, mean_interval, simulated, spaced
from grpo_ustat.theorems.truth import bed_facts, largest_error, noise, noise_everywhere

LARGE = 1.1  # the recursion's bound over that of order 1/T, below which T counts as large
STATEMENT = (
    "If J is L-smooth and satisfies a Polyak-Lojasiewicz inequality with mu, and the gradient's "
    "mean squared error is at most s2, the mean gap J* - J of Algorithm 1 obeys a linear "
    "recursion: for a constant learning rate it is below the recursion's solution at every T, for "
    "c/t below a constant over T when T is large."
)


def lemma6(
    bed: Bed,
    estimators: Sequence[Estimator],
    rates: Sequence[Rate],
    steps: int,
    replicates: int,
    seed: int,
    workers: int,
) -> Finding:
    """Run every estimator at every learning rate, and hold the mean gap against the bounds.

    Args:
        bed: with mu and L of its sublevel set.
        estimators, rates: all pairs are run.
        steps: T.
        replicates, seed, workers: see `simulated`.
    """
    kept = spaced(steps)
    both = tuple(sorted({0, *kept, *(s + 1 for s in kept)}))  # and one step after each
    jobs = [Job(one, rate, both) for rate in rates for one in estimators]
    paths, drawn = simulated(jobs, bed, replicates, seed, workers)
    claims, rows = [], []
    for job, path in zip(jobs, paths, strict=True):
        bound, error = _bounds(bed, job, path)
        rows += _rows(bed, job, path, kept, bound, error)
        claims += _claims(bed, job, path, kept, bound, error)
    left = sum(int((path.left_R > 0).sum()) for path in paths)
    notes = [
        f"{left} of {replicates * len(jobs)} replicates left the sublevel set at some step; they "
        "stay in every mean",
        "s2 is the largest error on the sublevel set, so the bounds are as loose as errors differ "
        "there",
    ]
    held = sum(claim.verdict == "agrees" for claim in claims)
    return Finding(
        statement=STATEMENT,
        bed=bed_facts(bed),
        claims=claims,
        panels=[_panel(rate, rows) for rate in rates],
        rows=rows,
        answer=f"{held} of {len(claims)} predictions of the recursion and its bounds agree.",
        notes=notes,
        rollouts=drawn,
    )


def _bounds(bed: Bed, job: Job, path: Paths) -> tuple[np.ndarray, float]:
    """The recursion's bound after 0 ... T steps, and s2."""
    mu, smoothness = bed.constants
    error = largest_error(bed, job.estimator)
    rates_T = job.rate.values(path.steps_S[-1])
    return recursion(float(path.gap_SR[0, 0]), mu, smoothness, error, rates_T), error


def _rows(bed: Bed, job: Job, path: Paths, kept: list[int], bound, error) -> list[dict]:
    rates_T, first = job.rate.values(path.steps_S[-1]), bed.start_K - bed.best_K
    sigma = noise(bed, bed.best_K, job.estimator)
    model = quadratic_recursion(first, bed.curvature_KK, sigma, rates_T)
    rows = []
    for step in kept:
        gap_R = path.gap_SR[list(path.steps_S).index(step)]
        mean, low, high = mean_interval(gap_R)
        rows.append(
            {"estimator": job.estimator.name, "group_size": job.estimator.group_size}
            | {"num_prompts": job.estimator.num_prompts, "rate": job.rate.name, "step": step}
            | {"gap": mean, "low": low, "high": high, "bound": float(bound[step])}
            | {"quadratic_model": float(model[step]), "s2": error, "replicates": len(gap_R)}
            | {"left": int(((path.left_R > 0) & (path.left_R <= step)).sum())}
        )
    return rows


def _claims(bed: Bed, job: Job, path: Paths, kept: list[int], bound, error) -> list[Claim]:
    name = f"{job.estimator.name}, {job.rate.name}"
    found = [_under(f"{name}: mean gap over the recursion, largest of all T", path, bound, kept)]
    if job.rate.kind == "decaying":
        mu, smoothness = bed.constants
        steps = np.arange(len(bound)) + job.rate.offset
        limit = np.full(len(bound), np.inf)
        limit[1:] = decaying_bound(mu, smoothness, error, job.rate.value, steps[1:])
        what = f"{name}: mean gap over the bound of order 1/T, at T = {kept[-1]}"
        large = bound[kept[-1]] <= LARGE * limit[kept[-1]]
        found.append(_under(what, path, limit, kept[-1:], large))
    if isinstance(bed, Coins):
        found.append(_follows(bed, job, path, kept))
    return found


def _under(what: str, path: Paths, bound: np.ndarray, steps: list[int], holds=True) -> Claim:
    """The largest ratio of mean and bound, with intervals that hold together.

    Where theory does not say yet that the bound `holds`, as of 1/T while T is small, a mean above
    it decides nothing.
    """
    places = [list(path.steps_S).index(step) for step in steps]
    intervals = [mean_interval(path.gap_SR[place], among=len(steps)) for place in places]
    ratios = np.array([np.array(x) / bound[s] for x, s in zip(intervals, steps, strict=True)])
    mean, low, high = ratios[ratios[:, 0].argmax()]
    agrees = True if ratios[:, 2].max() <= 1 else False if ratios[:, 1].max() > 1 else None
    agrees = None if agrees is False and not holds else agrees
    how = f"{LEVEL:.0%} intervals over {path.gap_SR.shape[1]} replicates"
    how += f", {len(steps)} steps at once (Bonferroni)" if len(steps) > 1 else ""
    how += "" if holds else "; T is too small for this bound: the recursion's own is above it"
    return Claim(what, "<= 1", float(mean), float(low), float(high), decided(agrees), how)


def _follows(bed: Coins, job: Job, path: Paths, kept: list[int]) -> Claim:
    """J is exactly quadratic, so `E[Delta_{t+1} | theta_t]` is known for every replicate's theta_t;
    what is left over has mean zero, and no correlation between steps.
    """
    rates_T, places = job.rate.values(path.steps_S[-1]), list(path.steps_S)
    scores = []
    for step in kept:
        here_KR, eta = path.u_SKR[places.index(step)], rates_T[step]
        u_KR = here_KR - bed.best_K[:, None]
        sigma_KR = np.einsum("kkr->kr", noise_everywhere(bed, here_KR, job.estimator))
        keeps = np.square(1 - eta * bed.lambda_K)[:, None]
        expected_R = (bed.lambda_K[:, None] * (keeps * u_KR**2 + eta**2 * sigma_KR)).sum(axis=0) / 2
        left_R = path.gap_SR[places.index(step + 1)] - expected_R
        scores.append(left_R.mean() / (left_R.std(ddof=1) / np.sqrt(len(left_R))))
    total, count = float(np.square(scores).sum()), len(scores)
    low, high = stats.chi2.ppf([(1 - LEVEL) / 2, (1 + LEVEL) / 2], count)
    name = f"{job.estimator.name}, {job.rate.name}"
    return Claim(
        what=f"{name}: E[gap of the next step | now] as the exact recursion has it, chi-square of "
        f"{count} steps",
        predicted=f"in [{low:.1f}, {high:.1f}]",
        measured=total,
        low=None,
        high=None,
        verdict=decided(bool(total <= high)),
        how=f"chi-square, {LEVEL:.0%}, {path.gap_SR.shape[1]} replicates; too small is no fault",
    )


def _panel(rate: Rate, rows: list[dict]) -> Panel:
    curves = []
    for name in dict.fromkeys(row["estimator"] for row in rows):
        mine = [row for row in rows if (row["estimator"], row["rate"]) == (name, rate.name)]
        x = [row["step"] for row in mine]
        ends = [[row[end] for row in mine] for end in ("low", "high")]
        curves.append(Curve(name, x, [row["gap"] for row in mine], *ends))
        curves.append(Curve(name, x, [row["quadratic_model"] for row in mine], predicted=True))
        curves.append(Curve(name, x, [row["bound"] for row in mine], bound=True))
    label = "mean gap (line: quadratic recursion, dashes: bound)"
    return Panel(rate.name, "step T", label, curves, "xy")
