"""From a score pool to curves, scaling law and Assumption 2, each with its interval.

Every question is used once and its estimates are averaged (the paper's Figure 4): for unbiased
baselines `MSE = 1/P^2 sum_x MSE_x(G)`; the group mean is c = (G-1)/G times leave-one-out, so its
MSE is `c^2 MSE_loo + ||grad J||^2 / G^2`.

Intervals given the questions delete one completion of a question at a time for what is linear in
per-question moments, and one block of every question's completions for the rest; as a sample of
questions they delete a block of questions. Never a bootstrap over completions: its duplicates turn
the U-statistics into V-statistics.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np

from grpo_ustat.estimators.intervals import Interval, jackknife_variance, pooled_dof, t_interval
from grpo_ustat.estimators.moments import Moments, objective_grad_sq, pool_moments
from grpo_ustat.estimators.scaling import scaling_law
from grpo_ustat.records import ScorePool

LINEAR = ("none", "leave_one_out", "oracle")


@dataclass(frozen=True)
class ClosedForm:
    """All statistics of a pool by name, each with its interval; `mse/<baseline>/<G>` the curves."""

    statistics: dict[str, Interval]

    def __getitem__(self, name: str) -> Interval:
        return self.statistics[name]


def closed_form(
    pool: ScorePool, baselines: list[str], group_sizes: list[int], interval: str
) -> ClosedForm:
    """Every statistic of the pool.

    Args:
        pool: N >= 4 completions of each of P prompts.
        baselines: any of none, leave_one_out, group_mean, oracle.
        group_sizes: every G.
        interval: `completions`, given the prompts, or `questions`, as a sample of prompts.
    """
    measure = _Measure(baselines, group_sizes, len(pool.rewards_PN), interval == "questions")
    full = measure(pool.rewards_PN, pool.gram_PNN, pool.grad_sq)
    deleted = [measure(*view) for view in _views(pool, interval)]
    result = {}
    for name, estimate in full.items():
        values_K = np.array([statistics[name] for statistics in deleted])
        result[name] = t_interval(estimate, float(jackknife_variance(values_K)), len(deleted) - 1)
    result["gstar_paper"], result["gstar"] = _best_group_size(full, deleted, result)
    result["crossover"] = _crossover(result["vanilla_excess"])
    if interval == "completions":
        result |= _delete_one(pool, baselines, group_sizes)
    return ClosedForm(result)


def _views(pool: ScorePool, interval: str) -> Iterator[tuple[np.ndarray, np.ndarray, float]]:
    """(rewards, Gram matrices, ||pooled gradient||^2) with one block left out at a time."""
    if interval == "questions":
        count = len(pool.rewards_PN)
        pairs = zip(pool.prompt_blocks_K, pool.grad_sq_without_prompts_K, strict=True)
        for block, grad_sq in pairs:
            kept = np.delete(np.arange(count), block)
            yield pool.rewards_PN[kept], pool.gram_PNN[kept], float(grad_sq)
        return
    for block, grad_sq in zip(pool.completion_blocks_K, pool.grad_sq_without_K, strict=True):
        yield *_without(pool, block), float(grad_sq)


def _without(pool: ScorePool, block: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    kept = np.delete(np.arange(pool.rewards_PN.shape[1]), block)
    return pool.rewards_PN[:, kept], pool.gram_PNN[:, kept[:, None], kept]


@dataclass(frozen=True)
class _Measure:
    """All statistics of a pool, or of a part of it.

    Attributes:
        baselines, group_sizes: of the curves.
        prompts: P of the whole pool, the number that the curves average over.
        sample: whether the prompts are a sample: C1 and ||grad J||^2 are then the population's,
            C1 with divisor P - 1 and ||grad J||^2 without the C1/P that the sample's mean adds.
    """

    baselines: list[str]
    group_sizes: list[int]
    prompts: int
    sample: bool

    def __call__(self, rewards_PN, gram_PNN, pooled_sq: float) -> dict[str, float]:
        moments = pool_moments(rewards_PN, gram_PNN)
        count, size = rewards_PN.shape
        grad_sq = objective_grad_sq(pooled_sq, moments, size)
        law = scaling_law(moments, grad_sq)
        c1, at_hand = law.c1, grad_sq
        if self.sample:
            c1 = law.c1 * count / (count - 1)
            grad_sq -= law.c1 / (count - 1)
            at_hand = grad_sq + c1 / self.prompts
        result = {"grad_sq": grad_sq, "grad_sq_at_hand": at_hand}
        result |= {"c1": c1, "c2": law.c2, "c3": law.c3}
        result |= _assumption(moments, rewards_PN, np.diagonal(gram_PNN, axis1=1, axis2=2))
        result["vanilla_excess"] = -result["av_minus_a0"] / law.c3 if law.c3 > 0 else math.nan
        for baseline in self.baselines:
            for group_size in self.group_sizes:
                mse = self._mse(moments, at_hand, baseline, group_size)
                result[f"mse/{baseline}/{group_size}"] = mse
        return result

    def _mse(self, moments: Moments, grad_sq: float, baseline: str, group_size: int) -> float:
        if baseline in LINEAR:
            return float(moments.mse(baseline, group_size).mean() / self.prompts)
        shrink = (group_size - 1) / group_size
        leave_one_out = self._mse(moments, grad_sq, "leave_one_out", group_size)
        return shrink**2 * leave_one_out + grad_sq / group_size**2


def _assumption(moments: Moments, z_PN: np.ndarray, q_PN: np.ndarray) -> dict[str, float]:
    """What decides the ordering: how score norm and reward go together given the question."""
    spread = math.sqrt(moments.var_q.mean() * moments.var_z.mean())
    a_0, a_v = float(moments.a_0.mean()), float(moments.a_v.mean())
    excess = float(_excess(q_PN, z_PN).mean())
    return {
        "corr": float(moments.cov_qz.mean()) / spread if spread > 0 else math.nan,
        "a0": a_0,
        "a_v": a_v,
        "a_bstar": a_v - excess,
        "av_minus_abstar": excess,
        "av_minus_a0": a_v - a_0,
    }


def _excess(q_PN: np.ndarray, z_PN: np.ndarray) -> np.ndarray:
    """A_V - A_{b*} = Cov(q, z)^2 / M_0 of each prompt, bias-corrected by the jackknife.

    The plug-in is never negative and its bias is of order 1/N; `N theta - (N-1) mean theta_{-i}`
    removes that order, and may be negative.
    """
    count = q_PN.shape[1]

    def plug_in(sum_q, sum_z, sum_qz, n):
        covariance = (sum_qz - sum_q * sum_z / n) / (n - 1)
        return covariance**2 * n / np.maximum(sum_q, np.finfo(float).tiny)

    values = (q_PN, z_PN, q_PN * z_PN)
    sums = [x.sum(axis=1, keepdims=True) for x in values]
    rest = [s - x for s, x in zip(sums, values, strict=True)]
    whole_P = plug_in(*sums, count)[:, 0]
    return count * whole_P - (count - 1) * plug_in(*rest, count - 1).mean(axis=1)


def _delete_one(
    pool: ScorePool, baselines: list[str], group_sizes: list[int]
) -> dict[str, Interval]:
    """Delete-one jackknife of each question; the variances of independent questions add up."""
    count, size = pool.rewards_PN.shape
    full = pool_moments(pool.rewards_PN, pool.gram_PNN)
    deleted = [pool_moments(*_without(pool, np.array([i]))) for i in range(size)]
    result = {}
    for baseline in (b for b in baselines if b in LINEAR):
        for group_size in group_sizes:
            values_NP = np.array([moments.mse(baseline, group_size) for moments in deleted])
            variances_P = jackknife_variance(values_NP, axis=0)
            result[f"mse/{baseline}/{group_size}"] = t_interval(
                full.mse(baseline, group_size).mean() / count,
                variances_P.sum() / count**4,
                pooled_dof(variances_P, size - 1),
            )
    return result


def _best_group_size(full: dict, deleted: list[dict], found: dict) -> tuple[Interval, Interval]:
    """sqrt(C3/C1) and 1 + it, interval on the log scale; none unless both are surely positive."""
    logs = [_log_ratio(statistics) for statistics in [full, *deleted]]
    estimate = math.exp(logs[0]) if math.isfinite(logs[0]) else math.nan
    positive = found["c1"].low > 0 and found["c3"].low > 0
    if not (positive and all(map(math.isfinite, logs))):
        paper = Interval(estimate, math.nan, math.nan)
    else:
        variance = float(jackknife_variance(np.array(logs[1:])))
        paper = Interval(*map(math.exp, t_interval(logs[0], variance, len(deleted) - 1)))
    return paper, Interval(*(1 + x for x in paper))


def _log_ratio(statistics: dict[str, float]) -> float:
    """The logarithm of sqrt(C3/C1); NaN where it is undefined."""
    c1, c3 = statistics["c1"], statistics["c3"]
    return 0.5 * math.log(c3 / c1) if c1 > 0 and c3 > 0 else math.nan


def _crossover(excess: Interval) -> Interval:
    """1 + C3 / (A_0 - A_V) from the interval of its inverse; infinite where A_0 - A_V may be 0."""

    def at(x: float) -> float:
        return 1 + 1 / x if x > 0 else math.inf

    return Interval(at(excess.estimate), at(excess.high), at(excess.low))
