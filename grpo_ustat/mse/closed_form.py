r"""From a score pool to curves, scaling law and Assumption 2, each with its interval.

Every statistic is a function of means over questions of unbiased per-question moments and of
`S = sum_{x != y} <ghat_x, ghat_y>`, inner products of different questions' pool gradients:

    ||grad J||^2 = 1/m^2 ( sum_x ||g_x||^2 + S )

Intervals given the questions leave out one completion of one question at a time (delete-one
jackknife; the variances of independent questions add up), intervals over questions one question at
a time. Never a bootstrap over completions: its duplicates turn U-statistics into V-statistics.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, fields

import numpy as np

from grpo_ustat.estimators.intervals import (
    Interval,
    jackknife_variance,
    pooled_dof,
    positive_interval,
    t_interval,
)
from grpo_ustat.estimators.moments import (
    Moments,
    covariance_excess,
    deleted_moments,
    pool_moments,
)
from grpo_ustat.estimators.scaling import best_group_size
from grpo_ustat.estimators.settings import decompose
from grpo_ustat.records import ScorePool

Numbers = dict[str, np.ndarray]
GRID = (2, 3, 4, 5, 6, 8, 10, 12, 16, 20, 24, 32, 48, 64, 96, 128, 192, 256)  # n MSE(n/G, G) there


@dataclass(frozen=True)
class Row:
    """One point of a curve.

    Attributes:
        baseline, group_size: the estimator.
        setting: how questions are drawn, `num_prompts` of them.
    """

    baseline: str
    group_size: int
    setting: str
    num_prompts: int

    @property
    def key(self) -> str:
        """Its name among the statistics."""
        return f"mse/{self.baseline}/{self.group_size}/{self.setting}/{self.num_prompts}"


@dataclass(frozen=True)
class Asked:
    """What to compute.

    Attributes:
        rows: points of curves.
        options: of the baselines, by name.
        questions: m of the whole pool.
        sample: whether the questions are a sample: C1 and ||grad J||^2 are then the population's,
            C1 with divisor m - 1 and ||grad J||^2 without the C1/m that the sample's mean adds.
        costs: (prompt, completion) costs by name, for the best group size at a fixed budget.
    """

    rows: list[Row]
    options: Mapping[str, Mapping[str, float]]
    questions: int
    sample: bool
    costs: Mapping[str, tuple[float, float]]


@dataclass(frozen=True)
class ClosedForm:
    """All statistics of a pool by name, each with its interval; plain numbers beside them.

    Attributes:
        statistics: see `_statistics`; `mse/...` are the curves' points, see `Row.key`.
        parts: (bias^2, variance, E||T||^2, <E T, tau>, ||tau||^2) of every row; tau is grad J, in
            the setting one_question each question's own gradient, averaged over questions.
    """

    statistics: dict[str, Interval]
    parts: dict[Row, tuple[float, ...]]

    def __getitem__(self, name: str) -> Interval:
        return self.statistics[name]


def closed_form(pool: ScorePool, asked: Asked, interval: str) -> ClosedForm:
    """Every statistic of the pool.

    Args:
        pool: N >= 4 completions of each of m questions.
        asked: see `Asked`.
        interval: `completions`, given the questions, or `questions`, as a sample of questions.
    """
    full = _per_question(pool, asked, pool_moments(pool.rewards_PN, pool.gram_PNN))
    means = {name: values.mean() for name, values in full.items()}
    gradients_PR = pool.gradients_PR
    total_R = gradients_PR.sum(axis=0)
    with_others_P = gradients_PR @ total_R - np.square(gradients_PR).sum(axis=1)
    count = asked.questions
    estimates = _statistics(means, with_others_P.sum() / count**2, count, asked)
    if interval == "questions":
        spread = _over_questions(full, with_others_P, asked)
    else:
        spread = _given_questions(pool, full, means, with_others_P, asked)
    found = {
        name: (positive_interval if "mse/" in name else t_interval)(float(value), *spread[name])
        for name, value in estimates.items()
    }
    for name in [name for name in found if name.startswith("log_")]:
        found[name.removeprefix("log_")] = _on_log_scale(found.pop(name), found)
    found["gstar"] = Interval(*(1 + x for x in found["gstar_paper"]))
    found["crossover"] = _crossover(found["vanilla_excess"])
    return ClosedForm(found, _parts(means, estimates, asked))


def _per_question(pool: ScorePool, asked: Asked, moments: Moments) -> Numbers:
    """Unbiased per-question quantities, [m]; all that means are taken of."""
    values = {f.name: getattr(moments, f.name) for f in fields(moments)}
    values["excess"] = covariance_excess(pool.sq_norm_PN, pool.rewards_PN)
    return values | _fixed_baselines(pool, asked, moments)


def _fixed_baselines(pool: ScorePool, asked: Asked, moments: Moments) -> Numbers:
    """A_b of constant, ReMax and running mean: baselines that one completion hardly moves."""
    shape = (-1,) + (1,) * (moments.m0.ndim - 1)
    known = {"remax": pool.greedy_P}
    if "constant" in asked.options:
        known["constant"] = np.full(len(pool.rewards_PN), asked.options["constant"]["value"])
    names = {row.baseline for row in asked.rows}
    result = {}
    for name in names & set(known):
        b = known[name].reshape(shape)
        result[f"a_{name}"] = moments.a_0 - 2 * b * moments.m1 + b * b * moments.m0
    if "running_mean" in names:
        result["a_running_mean"] = _running_mean(pool.rewards_PN, moments, shape)
    return result


def _running_mean(rewards_PN: np.ndarray, moments: Moments, shape: tuple[int, ...]) -> np.ndarray:
    """A_b of b = mean over questions of V, where a running mean settles at a fixed policy.

    With o the part of b from the other questions, `b = o + V/m`: products with this question's own
    V are those of its moments, and the variance of o's estimate is taken off its square. Leaving
    completions out leaves o as it is.
    """
    count, size = rewards_PN.shape
    means_P, noise_P = rewards_PN.mean(axis=1), rewards_PN.var(axis=1, ddof=1) / size
    o = ((means_P.sum() - means_P) / count).reshape(shape)
    noise = ((noise_P.sum() - noise_P) / count**2).reshape(shape)
    v_m0 = moments.m1 - moments.cov_qz
    first = o * moments.m1 + moments.v_m1 / count
    second = (o * o - noise) * moments.m0 + 2 * o * v_m0 / count + moments.v2_m0 / count**2
    return moments.a_0 - 2 * first + second


def _statistics(means: Numbers, between, count: int, asked: Asked) -> Numbers:
    """All statistics, elementwise in `means` and `between` = S/m^2."""
    grad_sq = means["g_sq"] / count + between
    c1 = means["g_sq"] - grad_sq
    at_hand = grad_sq
    if asked.sample:
        c1 = c1 * count / max(1, count - 1)
        grad_sq = means["g_sq"] - c1
        at_hand = grad_sq + c1 / asked.questions
    c2, c3 = means["a_v"] - means["g_sq"], means["d"] + means["g_sq"]
    spread = means["var_q"] * means["var_z"]
    with np.errstate(invalid="ignore", divide="ignore"):
        result = {
            "grad_sq": grad_sq, "grad_sq_at_hand": at_hand, "g_sq": means["g_sq"],
            "c1": c1, "c2": c2, "c3": c3,
            "a0": means["a_0"], "a_v": means["a_v"], "a_bstar": means["a_v"] - means["excess"],
            "av_minus_abstar": means["excess"], "av_minus_a0": means["a_v"] - means["a_0"],
            "corr": means["cov_qz"] / np.sqrt(np.where(spread > 0, spread, np.nan)),
            "vanilla_excess": np.where(c3 > 0, (means["a_0"] - means["a_v"]) / c3, np.nan),
            "log_gstar_paper": 0.5 * np.log(np.where((c1 > 0) & (c3 > 0), c3 / c1, np.nan)),
        }  # fmt: skip
        for name, cost in asked.costs.items():
            best = best_group_size(c1, c2, c3, *cost)
            result[f"log_gstar_{name}"] = np.log(best)
    for size in GRID:
        result[f"n_mse/{size}"] = size * c1 + c2 + c3 / (size - 1)
    for row in asked.rows:
        result[row.key] = _row(row, means, grad_sq, at_hand, asked)[0]
    return result


def _row(row: Row, means: Numbers, grad_sq, at_hand, asked: Asked):
    """Mean squared error, bias^2, variance, E||T||^2, <E T, tau> and ||tau||^2 of one row."""
    second, shrink, size = 0.0, 1.0, row.group_size
    if row.baseline in ("leave_one_out", "group_mean"):
        second = (means["d"] + means["g_sq"]) / (size * (size - 1))
    if row.baseline == "group_mean":
        shrink = (size - 1) / size
    e = means["g_sq"] + (_a(row.baseline, means) - means["g_sq"]) / size + second
    target = grad_sq if row.setting == "with_replacement" else at_hand
    if row.setting == "one_question":
        target = means["g_sq"]
    mse, bias2, variance = decompose(
        row.setting, row.num_prompts, asked.questions,
        shrink**2 * e, shrink**2 * means["g_sq"],
        shrink**2 * target, shrink * target, target,
    )  # fmt: skip
    return mse, bias2, variance, variance + shrink**2 * target, shrink * target, target


def _a(baseline: str, means: Numbers):
    """Mean over questions of A_b = E[q (z - b)^2]; leave-one-out has the oracle's first order."""
    known = {
        "none": "a_0", "oracle": "a_v", "leave_one_out": "a_v", "group_mean": "a_v",
    }  # fmt: skip
    if baseline == "optimal":
        return means["a_v"] - means["excess"]
    return means[known.get(baseline, f"a_{baseline}")]


def _parts(means: Numbers, estimates: Numbers, asked: Asked) -> dict[Row, tuple[float, ...]]:
    levels = (estimates["grad_sq"], estimates["grad_sq_at_hand"])
    return {row: tuple(map(float, _row(row, means, *levels, asked)[1:])) for row in asked.rows}


def _given_questions(
    pool: ScorePool, full: Numbers, means: Numbers, with_others_P, asked: Asked
) -> dict[str, tuple[float, float]]:
    """(variance, degrees of freedom) of every statistic, completions left out one at a time."""
    count, size = pool.rewards_PN.shape
    moments = deleted_moments(pool.rewards_PN, pool.gram_PNN)
    deleted = {f.name: getattr(moments, f.name) for f in fields(moments)}
    deleted["excess"] = np.stack(
        [
            covariance_excess(np.delete(pool.sq_norm_PN, i, 1), np.delete(pool.rewards_PN, i, 1))
            for i in range(size)
        ],
        axis=1,
    )
    deleted |= _fixed_baselines(pool, asked, moments)
    moved = {name: means[name] + (deleted[name] - full[name][:, None]) / count for name in deleted}
    between = (with_others_P.sum() + 2 * _change_between(pool)) / count**2
    found = _statistics(moved, between, count, asked)
    result = {}
    for name, values_PN in found.items():
        variances_P = jackknife_variance(values_PN, axis=1)
        result[name] = float(variances_P.sum()), pooled_dof(variances_P, size - 1)
    return result


def _change_between(pool: ScorePool) -> np.ndarray:
    """<ghat_x without i - ghat_x, sum_{y != x} ghat_y>, [m, N], from the completions' sketches."""
    z, features = pool.rewards_PN, pool.features_PNR.astype(np.float64)
    n = z.shape[1]
    sz = z.sum(axis=1, keepdims=True)
    weights = (n * z - sz) / (n * (n - 1))
    own_PR = np.einsum("pn,pnr->pr", weights, features)
    products = np.einsum("pnr,pr->pn", features, own_PR.sum(axis=0) - own_PR)
    a, b = (z * products).sum(axis=1, keepdims=True), products.sum(axis=1, keepdims=True)
    left = (n - 1) * (a - z * products) - (sz - z) * (b - products)
    return left / ((n - 1) * (n - 2)) - (weights * products).sum(axis=1, keepdims=True)


def _over_questions(full: Numbers, with_others_P, asked: Asked) -> dict[str, tuple[float, float]]:
    """(variance, degrees of freedom) of every statistic, questions left out one at a time."""
    count = asked.questions
    means = {name: (x.sum() - x) / (count - 1) for name, x in full.items()}
    between = (with_others_P.sum() - 2 * with_others_P) / (count - 1) ** 2
    found = _statistics(means, between, count - 1, asked)
    return {name: (float(jackknife_variance(x)), count - 1) for name, x in found.items()}


def _on_log_scale(logs: Interval, found: dict[str, Interval]) -> Interval:
    """Back from logarithms; no interval unless C1 and C3 are both surely positive."""
    sure = found["c1"].low > 0 and found["c3"].low > 0
    low, high = (logs.low, logs.high) if sure else (math.nan, math.nan)
    return Interval(*(math.exp(x) for x in (logs.estimate, low, high)))


def _crossover(excess: Interval) -> Interval:
    """1 + C3 / (A_0 - A_V) from the interval of its inverse; infinite where A_0 - A_V may be 0."""

    def at(x: float) -> float:
        return 1 + 1 / x if x > 0 else math.inf

    return Interval(at(excess.estimate), at(excess.high), at(excess.low))
