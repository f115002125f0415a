"""Theorem 8: comparison of the law of T times the gap with its limit, a mixture of chi-squares.

The gap is J* - J after T steps. Its law is estimated from many simulated trainings (replicates).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np
from scipy import stats

from grpo_ustat.config.gap import Theorem8Config
from grpo_ustat.estimators.intervals import CONFIDENCE, Interval
from grpo_ustat.gap.claims import mean_interval, replicates_converge, tested_claim
from grpo_ustat.gap.convergence import limit_weights, mixture_cdf, mixture_quantiles
from grpo_ustat.gap.evidence import Evidence, Panel, Series, columns_of, rows_of
from grpo_ustat.gap.exact import noise_everywhere
from grpo_ustat.gap.problems import Problem
from grpo_ustat.gap.simulate import Estimator, Rate, Simulation, Trajectories
from grpo_ustat.gap.simulated import learning_rates, simulated
from grpo_ustat.runs.claims import Claim
from grpo_ustat.terminal.streams import percentage

STATEMENT = (
    "With learning rates eta_t = c/t and a flat set of maximisers, T (J* - J(theta_T)) converges "
    "in law to sum_j w_j chi2_1. The weights w_j depend on the curvature of J and on the "
    "covariance of the gradient estimator at the limit of theta. If the weights vary along the "
    "flat set, this is the law given the limit that training reaches."
)
QUANTILES = (np.arange(40) + 0.5) / 40
# Number of points between which quantiles are interpolated if the replicates have different limits.
LIMIT_POINTS = 2000
# Name of the alternative hypothesis that all replicates have the same law.
ONE_LAW = "the mean weights for all replicates"
# Multiples of the predicted weights. They are tested as well, to show which other weights the data
# reject.
OTHER_WEIGHTS = (0.5, 0.8, 0.9, 0.95, 1.05, 1.1, 1.25, 2.0)


def plan(design: Theorem8Config) -> list[Simulation]:
    """Plan simulations without a baseline, with GRPO at every G, and with the oracle's baseline.

    These estimators have different limit laws.
    """
    first, (rate,) = design.group_sizes[0], learning_rates(design)
    baselines = [("none", first), *(("leave_one_out", size) for size in design.group_sizes)]
    baselines.append(("oracle", first))
    return [
        Simulation(Estimator(name, design.rollouts // size, size), rate, tuple(design.steps))
        for name, size in baselines
    ]


def judge(problem: Problem, design: Theorem8Config, runs: Sequence[Trajectories]) -> Evidence:
    """Compare the law of (T + offset) times the gap, at the last T, with the limit law.

    If curvature or noise differ between the maximisers of J, each replicate is compared with the
    limit law at the maximiser that it approaches. This maximiser is estimated from the last step,
    with an error of O(T^(-1/2)). The distribution function of the limit law then turns each
    replicate's scaled gap into a value between 0 and 1, its probability integral transform. If the
    theorem holds, these values are uniformly distributed.
    """
    claims, rows, series = [], [], []
    for run in runs:
        weights_KR = limit_weights_at(problem, run.estimator, run.rate, run.u_SKR[-1])
        claims += [_law_claim(run, weights_KR), _mean_claim(run, weights_KR)]
        if weights_KR.shape[1] > 1:
            claims.append(_trend_claim(problem, run, weights_KR))
        gaps_SR = [run.scaled_gap(place) for place in range(len(run.steps_S))]
        same = {
            "predicted_mean": float(weights_KR.sum(axis=0).mean()),
            "ks_band": float(stats.kstwo.ppf(CONFIDENCE, run.replicates)),
            "mean_weights": " ".join(f"{w:.6g}" for w in weights_KR.mean(axis=1)),
        }
        distances = [ks_distance(limit_cdf(weights_KR, gap_R))[0] for gap_R in gaps_SR]
        columns = {"step": run.steps_S, "ks": distances}
        columns |= columns_of("mean", [mean_interval(gap_R) for gap_R in gaps_SR])
        rows += rows_of(run.columns | same, columns)
        series.append(_quantiles(run, weights_KR))
    return Evidence(claims, Panel("quantile of the limit law", "quantile of T x gap", series), rows)


def label_of(estimator: Estimator) -> str:
    """Return a label with the estimator's name, B and G."""
    return f"{estimator.name}, B = {estimator.num_prompts}, G = {estimator.group_size}"


def limit_weights_at(
    problem: Problem, estimator: Estimator, rate: Rate, u_KR: np.ndarray
) -> np.ndarray:
    """Return the weights w_j of each replicate's limit law.

    Args:
        problem: test problem whose curvature and noise are enumerated at each limit.
        estimator: gradient estimator.
        rate: learning rate, c / (t + offset).
        u_KR: coordinates of the R replicates.

    Returns:
        Weights with one row per weight and one column per replicate. There is only one column if J
        has a single maximiser, so that all replicates have the same limit law.
    """
    limit_KR, k = problem.limits(u_KR), problem.curved
    sigma_KKR = noise_everywhere(problem, limit_KR, estimator)
    weights = [
        limit_weights(problem.curvature_at(limit_K)[:k, :k], sigma_KKR[:k, :k, r], rate.value)
        for r, limit_K in enumerate(limit_KR.T)
    ]
    return np.array(weights).T


def limit_cdf(weights_KR: np.ndarray, values_R: np.ndarray) -> np.ndarray:
    """Return P(sum_j w_j chi2_1 <= x) for a value x of each replicate.

    Args:
        weights_KR: weights from `limit_weights_at`, which can differ between replicates.
        values_R: values x. The last axis of this array runs over replicates.

    Raises:
        ValueError: If the weights differ between replicates and each replicate has several weights.
    """
    if weights_KR.shape[1] == 1:
        return mixture_cdf(weights_KR[:, 0], values_R)
    if len(weights_KR) > 1:
        raise ValueError(
            f"limits that differ between replicates have {len(weights_KR)} weights each, but only "
            "1 is supported: use a problem with a unique limit or a single curved coordinate"
        )
    return stats.chi2.cdf(values_R / weights_KR[0], 1)


def ks_distance(uniform_R: np.ndarray) -> tuple[float, float]:
    """Return the Kolmogorov-Smirnov distance of values from the uniform law.

    The second result is the value at which the distance is largest.

    >>> round(ks_distance(np.array([0.1, 0.2, 0.9]))[0], 6), ks_distance(np.array([0.5]))
    (0.466667, (0.5, 0.5))
    """
    test = stats.kstest(uniform_R, "uniform")
    return float(test.statistic), float(test.statistic_location)


def ks_p_value(uniform_R: np.ndarray) -> float:
    """Return the exact p-value of the hypothesis that continuous values are uniform."""
    return float(stats.kstwo.sf(ks_distance(uniform_R)[0], len(uniform_R)))


def mean_law_p_value(ratio_R: np.ndarray, weights_KR: np.ndarray) -> float:
    """Return the two-sided p-value of a mean of values with law `sum_j w_j chi2_1 / sum_j w_j`.

    The sum over replicates has a skewed law. It is approximated by a chi-square law with the same
    first three cumulants (Hall 1983, Buckley-Eagleson 1988), which is exact for a single weight.
    Student's t would be inaccurate in the tails, which matter for Holm's correction.

    Args:
        ratio_R: scaled gap of each replicate divided by the sum of its weights.
        weights_KR: weights from `limit_weights_at`.
    """
    share_KR = np.broadcast_to(weights_KR / weights_KR.sum(axis=0), (len(weights_KR), ratio_R.size))
    first, second, third = (
        scale * np.power(share_KR, k).sum() for k, scale in ((1, 1), (2, 2), (3, 8))
    )
    dof = 8 * second**3 / third**2
    total = (ratio_R.sum() - first) * np.sqrt(2 * dof / second) + dof
    return float(2 * min(stats.chi2.cdf(total, dof), stats.chi2.sf(total, dof)))


def _law_claim(run: Trajectories, weights_KR: np.ndarray) -> Claim:
    """Make a claim that the scaled gap at the last step has the limit law.

    A rejected claim is undecided if the observed law approaches the limit law as T grows.
    """
    last_R, one_limit = run.scaled_gap(-1), weights_KR.shape[1] == 1
    # Multiplying the weights by a factor is equivalent to dividing x by it.
    shares_F = np.array([1.0, *OTHER_WEIGHTS])
    uniform_R, *others_FR = limit_cdf(weights_KR, last_R / shares_F[:, None])
    alternatives = {
        f"weights x {share}": ks_p_value(other_R)
        for share, other_R in zip(OTHER_WEIGHTS, others_FR, strict=True)
    }
    if not one_limit:
        alternatives[ONE_LAW] = ks_p_value(limit_cdf(_mean_weights(weights_KR), last_R))
    distance, level = ks_distance(uniform_R)
    nearing = _nearing(run, lambda gap_R: (limit_cdf(weights_KR, gap_R) <= level) - level)
    kind = "from the limit law"
    if not one_limit:
        kind = "of the probability integral transform from the uniform law"
    return tested_claim(
        f"{label_of(run.estimator)}: Kolmogorov-Smirnov distance {kind}",
        f"<= {stats.kstwo.ppf(CONFIDENCE, len(last_R)):.3g}",
        distance,
        f"{percentage(CONFIDENCE)} band under the limit law, {_sample(run)}",
        ks_p_value(uniform_R),
        alternatives=alternatives,
        nearing=nearing,
    )


def _mean_claim(run: Trajectories, weights_KR: np.ndarray) -> Claim:
    """Make a claim that the scaled gap at the last step has the mean of the limit law.

    A rejected claim is undecided if the observed mean approaches the predicted mean as T grows.
    """
    last_R, sums_R = run.scaled_gap(-1), weights_KR.sum(axis=0)
    ratio_R = last_R / sums_R
    alternatives = {
        f"weights x {share}": mean_law_p_value(ratio_R / share, weights_KR)
        for share in OTHER_WEIGHTS
    }
    if weights_KR.shape[1] > 1:
        mean_K1 = _mean_weights(weights_KR)
        alternatives[ONE_LAW] = mean_law_p_value(last_R / mean_K1.sum(), mean_K1)
    return tested_claim(
        f"{label_of(run.estimator)}: mean of the scaled gap divided by the sum of the weights",
        1.0,
        mean_interval(ratio_R),
        f"{percentage(CONFIDENCE)} Student's t interval; the p-value is computed from an "
        f"approximation of the limit law of the mean; {_sample(run)}",
        mean_law_p_value(ratio_R, weights_KR),
        alternatives=alternatives,
        nearing=_nearing(run, lambda gap_R: gap_R / sums_R - 1),
    )


def _sample(run: Trajectories) -> str:
    return (
        f"at T = {run.steps_S[-1]}, {run.replicates} replicates; a rejected claim is undecided if "
        "the distance falls significantly, at least as fast as T^(-1/4)"
    )


def _nearing(run: Trajectories, distance: Callable[[np.ndarray], np.ndarray]) -> bool:
    """Return True if the mean distance falls significantly between the last two recorded steps.

    Args:
        run: trajectories.
        distance: function that returns each replicate's distance from the prediction, given the
            scaled gaps.
    """
    if len(run.steps_S) < 2:
        return False
    before_R, last_R = (distance(run.scaled_gap(place)) for place in (-2, -1))
    return replicates_converge(last_R, before_R, int(run.steps_S[-1]), int(run.steps_S[-2]))


def _mean_weights(weights_KR: np.ndarray) -> np.ndarray:
    """Return the mean weights over replicates, [K, 1], for the alternative hypothesis `ONE_LAW`."""
    return weights_KR.mean(axis=1, keepdims=True)


def _trend_claim(problem: Problem, run: Trajectories, weights_KR: np.ndarray) -> Claim:
    """Make a claim that a replicate's probability integral transform does not depend on its limit.

    If the theorem holds, the transform is uniform for every limit that a replicate can reach.
    """
    last_R = run.scaled_gap(-1)
    along_R = problem.limits(run.u_SKR[-1])[problem.curved]
    trend = stats.spearmanr(along_R, limit_cdf(weights_KR, last_R))
    of_one_law = stats.spearmanr(along_R, limit_cdf(_mean_weights(weights_KR), last_R))
    correlation = float(trend.statistic)
    # Half-width of the interval on the scale of Fisher's z.
    half = stats.norm.ppf((1 + CONFIDENCE) / 2) / np.sqrt(len(last_R) - 3)
    low, high = (float(np.tanh(np.arctanh(correlation) + side * half)) for side in (-1, 1))
    return tested_claim(
        f"{label_of(run.estimator)}: rank correlation of the limit's coordinate w with the "
        "probability integral transform",
        0.0,
        Interval(correlation, low, high),
        f"Spearman, {percentage(CONFIDENCE)} interval by Fisher's z, {len(last_R)} replicates, "
        f"T = {run.steps_S[-1]}",
        float(trend.pvalue),
        alternatives={ONE_LAW: float(of_one_law.pvalue)},
    )


def _quantiles(run: Trajectories, weights_KR: np.ndarray) -> Series:
    """Return measured quantiles, with intervals, against predicted quantiles."""
    sorted_R = np.sort(run.scaled_gap(-1))
    limit, count = limit_quantiles(weights_KR, 2 * sorted_R[-1]), len(sorted_R)
    ends = ((1 - CONFIDENCE) / 2, (1 + CONFIDENCE) / 2)
    ranks = np.array([stats.binom.ppf(p, count, QUANTILES) for p in ends]).astype(int)
    ends_2Q = sorted_R[np.clip(ranks, 0, count - 1)]
    measured = np.array([np.quantile(sorted_R, QUANTILES), *ends_2Q]).T
    return Series(label_of(run.estimator), limit, measured, limit)


def limit_quantiles(weights_KR: np.ndarray, top: float) -> np.ndarray:
    """Return the quantiles of the limit law at the levels `QUANTILES`.

    If replicates have different limit laws, the quantiles are those of the average law.

    Args:
        weights_KR: weights from `limit_weights_at`.
        top: value above all quantiles.
    """
    if weights_KR.shape[1] == 1:
        return mixture_quantiles(weights_KR[:, 0], QUANTILES)
    grid = top * np.linspace(0, 1, LIMIT_POINTS) ** 3
    cdf = np.array([limit_cdf(weights_KR, x).mean() for x in grid])
    return np.interp(QUANTILES, cdf, grid)


THEOREM = simulated(STATEMENT, plan, judge)
