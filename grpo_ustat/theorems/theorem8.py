"""Theorem 8: the law of T times the gap against its mixture of chi-squares."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np
from scipy import stats

from grpo_ustat.estimators.gap import limit_weights, mixture_cdf, mixture_quantiles
from grpo_ustat.policy.beds import Bed
from grpo_ustat.theorems.algorithm1 import Estimator, Paths
from grpo_ustat.theorems.finding import Claim, Curve, Finding, Panel, decided
from grpo_ustat.theorems.jobs import LEVEL, Job, Rate, mean_interval, simulated
from grpo_ustat.theorems.limits import settled
from grpo_ustat.theorems.truth import bed_facts, noise

STATEMENT = (
    "With eta_t = c/t and a flat set of maximisers, T (J* - J(theta_T)) converges in law to "
    "sum_j w_j chi2_1; the weights come from the curvature and from the covariance of the gradient "
    "estimator at the limit."
)
QUANTILES = (np.arange(40) + 0.5) / 40


def theorem8(
    bed: Bed,
    estimators: Sequence[Estimator],
    rate: Rate,
    steps: Sequence[int],
    replicates: int,
    seed: int,
    workers: int,
) -> Finding:
    """Run every estimator and compare the law of (T + offset) times the gap with its limit.

    Args:
        bed: the policy.
        estimators: each has a limit of its own.
        rate: c / (t + offset), 2 c times the smallest curvature above 1.
        steps: T, ascending; the verdict is that of the last.
        replicates, seed, workers: see `simulated`.
    """
    jobs = [Job(one, rate, tuple(steps)) for one in estimators]
    paths, drawn = simulated(jobs, bed, replicates, seed, workers)
    claims, rows, panels = [], [], []
    for one, path in zip(estimators, paths, strict=True):
        weights = limit_weights(bed.curvature_KK, noise(bed, bed.best_K, one), rate.value)
        mine = _rows(one, path, rate, weights)
        rows += mine
        claims += _claims(one, mine, path, rate, weights)
        panels.append(_panel(one, path, rate, weights))
    left = sum(int((path.left_R > 0).sum()) for path in paths)
    inside = sum(claim.verdict == "agrees" for claim in claims)
    return Finding(
        statement=STATEMENT,
        bed=bed_facts(bed),
        claims=claims,
        panels=panels,
        rows=rows,
        answer=f"{inside} of {len(claims)} comparisons with the limit agree at T = {steps[-1]}.",
        notes=[
            f"{left} of {replicates * len(jobs)} replicates left the sublevel set at some step",
            f"the gap is scaled by T + {rate.offset}, which has the same limit as T",
            "the distribution function of the mixture is gx2's, Ruben's method",
        ],
        rollouts=drawn,
    )


def name_of(one: Estimator) -> str:
    """An estimator with its batch."""
    return f"{one.name}, B = {one.num_prompts}, G = {one.group_size}"


def scaled(path: Paths, rate: Rate, place: int) -> np.ndarray:
    """(T + offset) times the gap, of every replicate."""
    return (path.steps_S[place] + rate.offset) * path.gap_SR[place]


def ks_distance(values_R: np.ndarray, weights: np.ndarray) -> float:
    """Kolmogorov-Smirnov distance of the values from the mixture."""
    ranked = np.sort(values_R)
    below = mixture_cdf(weights, ranked)
    count = len(ranked)
    above = np.arange(1, count + 1) / count
    return float(max((above - below).max(), (below - above + 1 / count).max()))


def _rows(one: Estimator, path: Paths, rate: Rate, weights: np.ndarray) -> list[dict]:
    band = float(stats.kstwo.ppf(LEVEL, path.gap_SR.shape[1]))
    rows = []
    for place, step in enumerate(path.steps_S):
        values_R = scaled(path, rate, place)
        mean, low, high = mean_interval(values_R)
        rows.append(
            {"estimator": one.name, "num_prompts": one.num_prompts, "group_size": one.group_size}
            | {"step": int(step), "mean": mean, "low": low, "high": high}
            | {"predicted_mean": float(weights.sum()), "ks": ks_distance(values_R, weights)}
            | {"ks_band": band, "weights": " ".join(f"{w:.6g}" for w in weights)}
            | {"replicates": len(values_R)}
        )
    return rows


def _claims(one, rows: list[dict], path: Paths, rate: Rate, weights: np.ndarray) -> list[Claim]:
    last, size = rows[-1], path.gap_SR.shape[1]
    before = rows[-2] if len(rows) > 1 else None
    agrees = nearing(last, before, lambda row: row["ks"], last["ks_band"])
    at = f"at T = {last['step']}, {size} replicates"
    ks = Claim(
        f"{name_of(one)}: Kolmogorov-Smirnov distance from the mixture",
        f"<= {last['ks_band']:.4f}", last["ks"], None, None, decided(agrees),
        f"{LEVEL:.0%} band of the null, {at}; outside it but falling with T is not decided",
    )  # fmt: skip
    half = (last["high"] - last["low"]) / 2 / last["predicted_mean"]
    ratio = [last[key] / last["predicted_mean"] for key in ("mean", "low", "high")]
    near = nearing(last, before, lambda row: abs(row["mean"] / row["predicted_mean"] - 1), half)
    mean = Claim(
        f"{name_of(one)}: mean of the scaled gap over the sum of the weights", 1.0, *ratio,
        decided(near), f"{LEVEL:.0%} interval, {at}; outside it but nearing 1 with T: not decided",
    )  # fmt: skip
    return [ks, mean]


def nearing(
    last: dict, before: dict | None, distance: Callable[[dict], float], tolerance: float
) -> bool | None:
    """Whether a limit is reached; not decided while distances fall at least like T^(-1/4).

    Args:
        last, before: rows with their `step`; without an earlier one nothing is known to fall.
        distance: of a row from the limit.
        tolerance: of the last.
    """
    if before is None:
        return settled(distance(last), 0.0, tolerance)
    closer = (before["step"] / last["step"]) ** 0.25
    return settled(distance(last), distance(before), tolerance, closer)


def _panel(one: Estimator, path: Paths, rate: Rate, weights: np.ndarray) -> Panel:
    """Quantiles against quantiles, with intervals of order statistics."""
    expected, ranked = mixture_quantiles(weights, QUANTILES), np.sort(scaled(path, rate, -1))
    count = len(ranked)
    ends = [stats.binom.ppf(p, count, QUANTILES) for p in ((1 - LEVEL) / 2, (1 + LEVEL) / 2)]
    low, high = (ranked[np.clip(end.astype(int), 0, count - 1)] for end in ends)
    points = np.quantile(ranked, QUANTILES)
    curves = [
        Curve("measured", *map(list, (expected, points, low, high))),
        Curve("as predicted", list(expected), list(expected), predicted=True),
    ]
    title = f"{name_of(one)}, T = {path.steps_S[-1]}"
    return Panel(title, "quantile of the mixture", "quantile of T x gap", curves, "xy")
