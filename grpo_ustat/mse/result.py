"""What a study reports: rows of curves, the scaling law, Assumption 2, policy and cost."""

from __future__ import annotations

import math
from typing import Any

import numpy as np

from grpo_ustat.config import MseConfig
from grpo_ustat.estimators.baselines import BASELINES
from grpo_ustat.estimators.intervals import Interval, clustered_mean
from grpo_ustat.estimators.scaling import ScalingLaw
from grpo_ustat.estimators.settings import scale_free
from grpo_ustat.estimators.ustatistic import silent_share
from grpo_ustat.records import ScorePool
from grpo_ustat.runs.folder import versions
from grpo_ustat.runs.summary import clipped_warning, unjudged_warning
from grpo_ustat.study.closed_form import GRID, Asked, ClosedForm, Row
from grpo_ustat.study.pool import ModelFacts
from grpo_ustat.study.replay import Replayed
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
        + clipped_warning(
            "pool's", of_pool.clipped / of_pool.rollouts, config.max_completion_length
        )
        + unjudged_warning(spent.timeouts, spent.failures, spent.rollouts),
        "cost": {
            "rollouts": spent.rollouts,
            "tokens": spent.tokens,
            "judge_timeouts": spent.timeouts,
            "judge_failures": spent.failures,
            "seconds_generate": spent.seconds_generate,
            "seconds_score": spent.seconds_score,
        },
        "versions": versions(),
    }


def closed_form_rows(config: MseConfig, found: ClosedForm) -> list[dict[str, Any]]:
    """One row per baseline, group size and setting."""
    result = []
    for row, (bias2, variance, energy, cross, target_sq) in found.parts.items():
        point, mse = (row.setting, row.num_prompts), found[row.key]
        result.append(
            _row(config, "closed_form", row.baseline, row.group_size, point, mse)
            | {"replicates": None, "bias2": bias2, "variance": variance}
            | _comparable(mse, *scale_free(energy, cross, target_sq), _target_sq(found, *point))
        )
    return result


def replayed_rows(config: MseConfig, replayed: list[Replayed], found: ClosedForm) -> list[dict]:
    """One row per rule, group size, setting and target; judged also against a rule's own target."""
    result = []
    for x in replayed:
        point = (x.setting, x.num_prompts)
        target_sq = _target_sq(found, *point) if x.target == "expected_reward" else None
        result.append(
            _row(config, "replay", x.baseline, x.group_size, point, x.mse)
            | {"target": TARGETS[x.target], "replicates": x.draws}
            | {"bias2": _finite(x.bias2), "variance": _finite(x.variance)}
            | _comparable(x.mse, x.cosine, x.best_scalar_mse, target_sq)
        )
    return result


def monte_carlo_rows(config, estimated, found: ClosedForm, prompts: int) -> list[dict[str, Any]]:
    """One row per baseline and group size; intervals are given the questions."""
    point = ("all_questions_once", prompts)
    target_sq = _target_sq(found, *point)
    return [
        _row(config, "monte_carlo", name, size, point, x.mse)
        | {"interval": "completions", "replicates": x.replicates}
        | {"bias2": x.bias2, "variance": x.variance}
        | _comparable(x.mse, x.cosine, x.best_scalar_mse, target_sq)
        for (name, size), x in estimated.items()
    ]


def _target_sq(found: ClosedForm, setting: str, num_prompts: int) -> Interval:
    """||tau||^2 of the gradient that a setting is judged against."""
    names = {"one_question": "g_sq", "with_replacement": "grad_sq"}
    return found[names.get(setting, "grad_sq_at_hand")]


def _comparable(
    mse: Interval, cosine: float | None, best: float | None, target_sq: Interval | None
) -> dict[str, float | None]:
    """The columns free of scale; null where ||tau||^2 is not surely above 0.

    Without `target_sq`, for targets of a rule's own, there is no relative error.
    """
    if target_sq is not None and not target_sq.low > 0:
        return {"relative_mse": None, "best_scalar_mse": None, "cosine": None}
    relative = None if target_sq is None else _finite(mse.estimate / target_sq.estimate)
    return {"relative_mse": relative, "best_scalar_mse": best, "cosine": cosine}


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


def _triple(name: str, interval: Interval) -> dict[str, float | None]:
    """`name`, `name_low`, `name_high`; null where not a finite number."""
    keys = (name, f"{name}_low", f"{name}_high")
    return {k: x if math.isfinite(x) else None for k, x in zip(keys, interval, strict=True)}


def _clip(interval: Interval, low: float, high: float) -> Interval:
    """The part of an interval that the quantity can reach."""
    return Interval(*(min(max(x, low), high) if math.isfinite(x) else x for x in interval))


def _gradient(found: ClosedForm) -> dict[str, Any]:
    result: dict[str, Any] = _triple("grad_sq", found["grad_sq"])
    if not found["grad_sq_at_hand"].low > 0:
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
