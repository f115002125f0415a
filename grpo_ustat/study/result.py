"""What a study reports: rows of curves, the scaling law, Assumption 2, policy and cost."""

from __future__ import annotations

import math
from typing import Any

import numpy as np

from grpo_ustat.config import MseConfig
from grpo_ustat.estimators.baselines import BASELINES
from grpo_ustat.estimators.intervals import Interval, clustered_mean
from grpo_ustat.estimators.scaling import ScalingLaw
from grpo_ustat.estimators.ustatistic import silent_share
from grpo_ustat.records import ScorePool
from grpo_ustat.runs.folder import versions
from grpo_ustat.runs.summary import clipped_warning
from grpo_ustat.study.closed_form import GRID, Asked, ClosedForm, Row
from grpo_ustat.study.pool import ModelFacts
from grpo_ustat.study.verdict import heavy_warning, verdict
from grpo_ustat.study.workers import Done
from grpo_ustat.study_checks import CLOSED_FORMS

TARGETS = {
    "expected_reward": "gradient of the expected reward",
    "arcsin": "gradient of E[2 arcsin sqrt V] (plug-in)",
    "log_value": "gradient of E[log V] (plug-in)",
}


def points(config: MseConfig, questions: int) -> list[tuple[str, int]]:
    """(setting, number of questions a batch) of every curve."""
    found = []
    for setting in config.study.settings:
        if setting in ("with_replacement", "without_replacement"):
            found += [(setting, count) for count in config.study.num_prompts]
        else:
            found.append((setting, questions if setting == "all_questions_once" else 1))
    return found


def asked_of(config: MseConfig, pool: ScorePool, facts: ModelFacts, spent: Done) -> Asked:
    """What the closed forms are asked for; `spent` is what the pool took."""
    each = (spent.seconds_generate + spent.seconds_score) / spent.rollouts
    questions = len(pool.rewards_PN)
    rows = [
        Row(name, size, *point)
        for point in points(config, questions)
        for name in config.baselines
        if name in CLOSED_FORMS
        for size in config.group_sizes
    ]
    return Asked(
        rows=rows,
        options={name: config.rules[name].options for name in config.baselines},
        questions=questions,
        sample=config.study.interval == "questions",
        costs={
            "tokens": (facts.prompt_tokens, float(pool.lengths_PN.mean())),
            "seconds": (facts.prompt_seconds, each),
        },
    )


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
    metric = _metric(config, pool, parameters)
    return {
        "curves": curves,
        "scaling": _scaling(found),
        "assumption2": _assumption(found, pool),
        "grad_sq": _gradient(found),
        "metric": metric,
        "policy": _policy(config, pool, of_pool),
        "questions": len(pool.rewards_PN),
        "pool_completions": pool.rewards_PN.shape[1],
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


def closed_form_rows(config: MseConfig, found: ClosedForm, rows: list[Row]) -> list[dict[str, Any]]:
    """One row per baseline, group size and setting."""
    grad_sq = found["grad_sq_at_hand"]
    result = []
    for row in rows:
        bias2, variance, energy, cross = found.parts[row.key]
        point = (row.setting, row.num_prompts)
        result.append(
            _row(config, "closed_form", row.baseline, row.group_size, point, found[row.key])
            | {"replicates": None, "bias2": bias2, "variance": variance}
            | {"relative_mse": _relative(found[row.key].estimate, grad_sq)}
            | _scale_free(energy, cross, grad_sq)
        )
    return result


def replayed_rows(config: MseConfig, replayed, found: ClosedForm, questions: int) -> list[dict]:
    """One row per rule, group size, setting and target; judged also against a rule's own target."""
    known = _distinct_from_zero(found["grad_sq_at_hand"])
    result = []
    for point in replayed:
        count = {"all_questions_once": questions, "one_question": 1}.get(
            point.setting, point.num_prompts
        )
        row = _row(config, "replay", point.baseline, point.group_size, (point.setting, count),
                   point.mse)  # fmt: skip
        of_reward = point.target == "expected_reward"
        relative = _relative(point.mse.estimate, found["grad_sq_at_hand"]) if of_reward else None
        result.append(
            row
            | {"target": TARGETS[point.target], "replicates": point.draws}
            | {"bias2": _finite(point.bias2), "variance": _finite(point.variance)}
            | {"relative_mse": relative}
            | {"best_scalar_mse": point.best_scalar_mse if known else None}
            | {"cosine": point.cosine if known else None}
        )
    return result


def monte_carlo_rows(config, estimated, found: ClosedForm, prompts: int) -> list[dict[str, Any]]:
    """One row per baseline and group size; intervals are given the questions."""
    grad_sq = found["grad_sq_at_hand"]
    known = _distinct_from_zero(grad_sq)
    point = ("all_questions_once", prompts)
    return [
        _row(config, "monte_carlo", name, size, point, curve.mse)
        | {"interval": "completions", "replicates": curve.replicates}
        | {"bias2": curve.bias2, "variance": curve.variance}
        | {"relative_mse": _relative(curve.mse.estimate, grad_sq)}
        | {"best_scalar_mse": curve.best_scalar_mse if known else None}
        | {"cosine": curve.cosine if known else None}
        for (name, size), curve in estimated.items()
    ]


def _row(config: MseConfig, method: str, name: str, size: int, point: tuple, mse: Interval):
    return {
        "method": method,
        "baseline": name,
        "target": TARGETS["expected_reward"],
        "setting": point[0],
        "interval": config.study.interval,
        "group_size": size,
        "num_prompts": point[1],
        "unbiased": BASELINES[name].unbiased,
        "mse": _finite(mse.estimate),
        "low": _finite(mse.low),
        "high": _finite(mse.high),
    }


def _finite(value: float | None) -> float | None:
    return value if value is not None and math.isfinite(value) else None


def _distinct_from_zero(grad_sq: Interval) -> bool:
    return grad_sq.low > 0


def _relative(mse: float, grad_sq: Interval) -> float | None:
    return mse / grad_sq.estimate if _distinct_from_zero(grad_sq) else None


def _scale_free(energy: float, cross: float, grad_sq: Interval) -> dict[str, float | None]:
    """Best multiple of the estimate, and its cosine with the truth; shrinking changes neither."""
    if not _distinct_from_zero(grad_sq) or energy <= 0:
        return {"best_scalar_mse": None, "cosine": None}
    return {
        "best_scalar_mse": grad_sq.estimate - cross**2 / energy,
        "cosine": cross / math.sqrt(energy * grad_sq.estimate),
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
    for name in ("c1", "c2", "c3", "gstar", "gstar_paper", "gstar_tokens", "gstar_seconds"):
        result |= _triple(name, found[name])
    law = ScalingLaw(*(found[name].estimate for name in ("c1", "c2", "c3")))
    if result["gstar"] is not None:
        result["best_divisor"] = {str(n): law.best_divisor(n) for n in (256, 1024, 2048, 4096)}
    result["curve"] = [
        {"group_size": size}
        | dict(zip(("n_mse", "low", "high"), found[f"n_mse/{size}"], strict=True))
        for size in GRID
    ]
    if result["gstar_low"] is None:
        result["reason"] = "C1 or C3 is not distinguishable from 0: G* has no finite interval"
    return result


def _assumption(found: ClosedForm, pool: ScorePool) -> dict[str, Any]:
    result: dict[str, Any] = {n: found[n].estimate for n in ("a0", "a_v", "a_bstar")}
    result |= _triple("corr", _clip(found["corr"], -1, 1))
    for name in ("av_minus_abstar", "av_minus_a0"):
        result |= _triple(name, found[name])
    result |= _triple("crossover_group_size", found["crossover"])
    cross = found["crossover"].estimate
    size = pool.rewards_PN.shape[1]
    at = math.ceil(cross) if math.isfinite(cross) else math.inf
    result["silent_share_at_crossover"] = (
        float(silent_share(pool.rewards_PN, at).mean()) if 2 <= at <= size else None
    )
    if result["corr"] is None:
        result["reason"] = "all rewards of a question are equal: no covariance with the reward"
    elif found["av_minus_a0"].low > 0:
        result["reason"] = "A_0 < A_V: GRPO never passes vanilla"
    elif result["crossover_group_size_high"] is None:
        result["reason"] = "A_0 - A_V is not distinguishable from 0: no finite crossover interval"
    return result


def _metric(config: MseConfig, pool: ScorePool, parameters: int) -> dict[str, Any]:
    """What was measured in, and how heavy its tails are over all completions."""
    q = np.sort(pool.sq_norm_PN.ravel())[::-1]
    top = q[: max(1, len(q) // 100)].sum()
    return {
        "parameters": parameters,
        "norm": "Euclidean over all trainable parameters",
        "between_questions": "exact"
        if parameters <= config.budget.gradient_sketch
        else f"unbiased sketch of {config.budget.gradient_sketch} numbers",
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
