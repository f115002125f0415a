"""What a study reports: rows of curves, the scaling law, Assumption 2, and a verdict in words."""

from __future__ import annotations

import math
from typing import Any

import numpy as np

from grpo_ustat.config import MseConfig
from grpo_ustat.estimators.intervals import Interval, clustered_mean
from grpo_ustat.records import ScorePool
from grpo_ustat.runs.folder import versions
from grpo_ustat.runs.summary import clipped_warning
from grpo_ustat.study.closed_form import LINEAR, ClosedForm
from grpo_ustat.study.workers import Done

TARGET = "gradient of the expected reward"
HEAVY_SHARE = 0.5  # warn where the loudest 1 % of the completions carry more of sum q than this


def study_result(
    config: MseConfig,
    pool: ScorePool,
    found: ClosedForm,
    curves: list[dict[str, Any]],
    parameters: int,
    of_pool: Done,
    of_replicates: Done,
) -> dict[str, Any]:
    """The content of `result.json`.

    Args:
        config: the study's configuration.
        pool: the scored completions.
        found: their statistics.
        curves: rows of all methods.
        parameters: number of parameters that the scores cover.
        of_pool, of_replicates: what pool and Monte Carlo took.
    """
    spent = of_pool + of_replicates
    metric = _metric(pool, parameters)
    return {
        "curves": curves,
        "scaling": _scaling(found),
        "assumption2": _assumption(found),
        "grad_sq": _gradient(found),
        "metric": metric,
        "policy": _policy(config, pool, of_pool),
        "questions": len(pool.rewards_PN),
        "pool_completions": config.budget.pool_completions,
        "summary": verdict(found, config.baselines, pool.rewards_PN)
        + heavy_warning(metric["top_percent_share"])
        + clipped_warning(of_pool.clipped / of_pool.rollouts, config.max_completion_length),
        "cost": {
            "rollouts": spent.rollouts,
            "tokens": spent.tokens,
            "seconds_generate": spent.seconds_generate,
            "seconds_score": spent.seconds_score,
        },
        "versions": versions(),
    }


def closed_form_rows(config: MseConfig, found: ClosedForm, prompts: int) -> list[dict[str, Any]]:
    """One row per baseline and group size."""
    grad_sq, rows = found["grad_sq_at_hand"], []
    for name in config.baselines:
        for size in config.group_sizes:
            mse = found[f"mse/{name}/{size}"]
            bias2 = grad_sq.estimate / size**2 if name == "group_mean" else 0.0
            shrink = (size - 1) / size if name == "group_mean" else 1.0
            rows.append(
                _row(config, "closed_form", name, size, prompts, mse)
                | {"replicates": None, "bias2": bias2, "variance": mse.estimate - bias2}
                | {"relative_mse": _relative(mse.estimate, grad_sq)}
                | _scale_free((mse.estimate - bias2) / shrink**2, grad_sq)
            )
    return rows


def monte_carlo_rows(config, estimated, found: ClosedForm, prompts: int) -> list[dict[str, Any]]:
    """One row per baseline and group size; intervals are given the questions."""
    grad_sq = found["grad_sq_at_hand"]
    known = _distinct_from_zero(grad_sq)
    return [
        _row(config, "monte_carlo", name, size, prompts, curve.mse)
        | {"interval": "completions", "replicates": curve.replicates}
        | {"bias2": curve.bias2, "variance": curve.variance}
        | {"relative_mse": _relative(curve.mse.estimate, grad_sq)}
        | {"best_scalar_mse": curve.best_scalar_mse if known else None}
        | {"cosine": curve.cosine if known else None}
        for (name, size), curve in estimated.items()
    ]


def _row(config: MseConfig, method: str, name: str, size: int, prompts: int, mse: Interval):
    return {
        "method": method,
        "baseline": name,
        "target": TARGET,
        "setting": "all_questions_once",
        "interval": config.study.interval,
        "group_size": size,
        "num_prompts": prompts,
        "mse": mse.estimate,
        "low": mse.low,
        "high": mse.high,
    }


def _distinct_from_zero(grad_sq: Interval) -> bool:
    return grad_sq.low > 0


def _relative(mse: float, grad_sq: Interval) -> float | None:
    return mse / grad_sq.estimate if _distinct_from_zero(grad_sq) else None


def _scale_free(unbiased_mse: float, grad_sq: Interval) -> dict[str, float | None]:
    """Best multiple of the estimate, and its cosine with the truth, from its unbiased multiple."""
    energy = unbiased_mse + grad_sq.estimate
    if not _distinct_from_zero(grad_sq) or energy <= 0:
        return {"best_scalar_mse": None, "cosine": None}
    return {
        "best_scalar_mse": unbiased_mse * grad_sq.estimate / energy,
        "cosine": math.sqrt(grad_sq.estimate / energy),
    }


def _triple(name: str, interval: Interval) -> dict[str, float | None]:
    """`name`, `name_low`, `name_high`; null where not a finite number."""
    keys = (name, f"{name}_low", f"{name}_high")
    return {k: x if math.isfinite(x) else None for k, x in zip(keys, interval, strict=True)}


def _clip(interval: Interval, low: float, high: float) -> Interval:
    """The part of an interval that the quantity can reach."""
    return Interval(*(min(max(x, low), high) if math.isfinite(x) else x for x in interval))


def _gradient(found: ClosedForm) -> dict[str, Any]:
    result: dict[str, Any] = _triple("grad_sq", found["grad_sq"])
    if not _distinct_from_zero(found["grad_sq_at_hand"]):
        result["reason"] = (
            "||grad J||^2 is not distinguishable from 0: relative_mse, best_scalar_mse and cosine "
            "are null"
        )
    return result


def _scaling(found: ClosedForm) -> dict[str, Any]:
    result: dict[str, Any] = {}
    for name in ("c1", "c2", "c3", "gstar", "gstar_paper"):
        result |= _triple(name, found[name])
    if result["gstar_low"] is None:
        result["reason"] = "C1 or C3 is not distinguishable from 0: G* has no finite interval"
    return result


def _assumption(found: ClosedForm) -> dict[str, Any]:
    result: dict[str, Any] = {n: found[n].estimate for n in ("a0", "a_v", "a_bstar")}
    result |= _triple("corr", _clip(found["corr"], -1, 1))
    for name in ("av_minus_abstar", "av_minus_a0"):
        result |= _triple(name, found[name])
    result |= _triple("crossover_group_size", found["crossover"])
    if result["corr"] is None:
        result["reason"] = "all rewards of a question are equal: no covariance with the reward"
    elif found["av_minus_a0"].low > 0:
        result["reason"] = "A_0 < A_V: GRPO never passes vanilla"
    elif result["crossover_group_size_high"] is None:
        result["reason"] = "A_0 - A_V is not distinguishable from 0: no finite crossover interval"
    return result


def _metric(pool: ScorePool, parameters: int) -> dict[str, Any]:
    """What was measured in, and how heavy its tails are over all completions."""
    q = np.sort(pool.sq_norm_PN.ravel())[::-1]
    top = q[: max(1, len(q) // 100)].sum()
    return {
        "parameters": parameters,
        "norm": "Euclidean over all trainable parameters",
        "effective_sample_size": float(q.sum() ** 2 / np.square(q).sum()) if q.any() else 0.0,
        "top_percent_share": float(top / q.sum()) if q.any() else 0.0,
    }


def _policy(config: MseConfig, pool: ScorePool, of_pool: Done) -> dict[str, Any]:
    return {
        "name": config.model.name,
        **_triple("accuracy", _clip(clustered_mean(pool.rewards_PN), 0, 1)),
        "mean_length": float(pool.lengths_PN.mean()),
        "clipped_ratio": of_pool.clipped / of_pool.rollouts,
    }


def heavy_warning(top_percent_share: float) -> str:
    """A sentence where a few completions decide the sums: intervals promise nothing there."""
    if top_percent_share <= HEAVY_SHARE:
        return ""
    return (
        f" WARNING: the loudest 1 % of the completions carry {top_percent_share:.0%} of the sum of "
        "squared score norms: raise budget.pool_completions, intervals are too short here."
    )


def verdict(found: ClosedForm, baselines: list[str], rewards_PN: np.ndarray) -> str:
    """In words: whether Assumption 2 holds, which ordering follows, which G is best."""
    if (rewards_PN == rewards_PN[:, :1]).all():
        return _without_signal(rewards_PN)
    parts = [_assumption_sentence(found), _ordering_sentence(found)]
    unbiased = [name for name in baselines if name in LINEAR]
    if len(unbiased) > 1:
        parts.append(_best_sentence(found, unbiased))
    best = found["gstar"]
    if math.isfinite(best.low):
        parts.append(f"G* = {best.estimate:.1f} [{best.low:.1f}, {best.high:.1f}].")
    else:
        parts.append("G* has no finite interval: C1 or C3 is not distinguishable from 0.")
    return " ".join(parts)


def _without_signal(rewards_PN: np.ndarray) -> str:
    if not rewards_PN.any():
        return (
            "Every completion got reward 0, so there is no gradient to estimate: check the prompt, "
            "max_completion_length and the answer format."
        )
    return (
        "All completions of a question got the same reward: any baseline that learns it has no "
        "error, vanilla alone is noisy. Choose questions that are sometimes right."
    )


def _assumption_sentence(found: ClosedForm) -> str:
    corr = found["corr"]
    gain = found["av_minus_abstar"]
    share = f"{gain.estimate / found['a_v'].estimate:.0%}" if gain.low > 0 else "an undecided share"
    if not math.isfinite(corr.low):
        return f"corr(q, Z) = {corr.estimate:.3f}, without an interval from so few completions."
    shown = f"corr(q, Z) = {corr.estimate:.3f} [{max(corr.low, -1):.3f}, {min(corr.high, 1):.3f}]"
    if corr.low <= 0 <= corr.high:
        return f"{shown}: Assumption 2 (squared score norm and reward uncorrelated) is not refuted."
    loud = "wrong" if corr.estimate < 0 else "right"
    return (
        f"{shown}: Assumption 2 fails, {loud} answers carry the larger scores; the best "
        f"prompt-only baseline E[q Z]/E[q] would take {share} off the oracle's A_V."
    )


def _ordering_sentence(found: ClosedForm) -> str:
    difference, cross = found["av_minus_a0"], found["crossover"]
    values = f"A_0 = {found['a0'].estimate:.0f}, A_V = {found['a_v'].estimate:.0f}"
    if difference.high < 0:
        high = f"{cross.high:.1f}" if math.isfinite(cross.high) else "infinity"
        return (
            f"{values}: the paper's ordering, the oracle beats vanilla at every G and GRPO beats "
            f"vanilla from G > {cross.estimate:.1f} [{cross.low:.1f}, {high}] on."
        )
    if difference.low > 0:
        return (
            f"{values}: the paper's ordering is reversed, vanilla beats the oracle and GRPO at "
            "every G."
        )
    return (
        f"{values}: which of vanilla and the oracle is better is not decided by this pool "
        f"(A_V - A_0 in [{difference.low:.0f}, {difference.high:.0f}])."
    )


def _best_sentence(found: ClosedForm, unbiased: list[str]) -> str:
    """The unbiased baseline of smallest error at each group size, by point estimate."""
    sizes = sorted({int(name.rpartition("/")[2]) for name in found.statistics if "mse/" in name})
    best = {g: min(unbiased, key=lambda b: found[f"mse/{b}/{g}"].estimate) for g in sizes}
    groups = [
        f"{name} at G = {', '.join(str(g) for g in sizes if best[g] == name)}"
        for name in dict.fromkeys(best.values())
    ]
    found_best = "; ".join(groups)
    return f"Smallest closed-form error of an unbiased baseline, by point estimate: {found_best}."
