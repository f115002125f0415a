"""What a study reports: rows of curves, the scaling law, Assumption 2, policy and cost."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import numpy as np
import pyarrow
from pyarrow import parquet

from grpo_ustat.config.mse import CLOSED_FORMS, MseConfig
from grpo_ustat.config.reward_funcs import reward_names
from grpo_ustat.distributed.ranks import is_main
from grpo_ustat.distributed.workers import WorkCost
from grpo_ustat.estimators.allocation import allocation_savings
from grpo_ustat.estimators.baselines import BASELINES
from grpo_ustat.estimators.dynamic_sampling import kept_groups
from grpo_ustat.estimators.intervals import Interval, mean_reward, quantity
from grpo_ustat.estimators.minibatch import scale_free
from grpo_ustat.estimators.proxies import proxy_correlations
from grpo_ustat.estimators.scaling import ScalingLaw
from grpo_ustat.estimators.ustatistic import silent_share
from grpo_ustat.mse.closed_form import (
    GRID,
    LEAST_QUESTIONS,
    ClosedForm,
    CurvePoint,
    Request,
)
from grpo_ustat.mse.pool import ModelFacts
from grpo_ustat.mse.pool_store import scored_with
from grpo_ustat.mse.replay import TARGET_WORDS, ReplayPoint
from grpo_ustat.mse.reward_functions import function_correlations, function_statistics
from grpo_ustat.mse.verdict import (
    heavy_warning,
    packages_sentence,
    refutes_assumption2,
    verdict,
    zero_scores_sentence,
)
from grpo_ustat.pages.tables import clipped_warning, unjudged_warning
from grpo_ustat.records import Array, Integers, ScorePool
from grpo_ustat.runs.files import atomic_write
from grpo_ustat.runs.folder import RunFolder, versions
from grpo_ustat.runs.log import arrow_table
from grpo_ustat.terminal.streams import percentage

NAME = "curves.parquet"
ENDS = ("n_mse", "low", "high")
NORMS = {
    "euclidean": "Euclidean",
    "adam": "of AdamW's step, v that of steps of {} rollouts in groups of {},",
}
TF32_ERROR = {"norm": 1e-3, "sum_of_norms": 6e-4}  # scripts/benchmarks/precision.py
COLUMNS = {
    "method": pyarrow.string(),
    "baseline": pyarrow.string(),
    "target": pyarrow.string(),
    "setting": pyarrow.string(),
    "interval": pyarrow.string(),
    "group_size": pyarrow.int64(),
    "num_prompts": pyarrow.int64(),
    "unbiased": pyarrow.bool_(),
    "mse": pyarrow.float64(),
    "low": pyarrow.float64(),
    "high": pyarrow.float64(),
    "replicates": pyarrow.int64(),
    "bias2": pyarrow.float64(),
    "variance": pyarrow.float64(),
    "relative_mse": pyarrow.float64(),
    "best_scalar_mse": pyarrow.float64(),
    "cosine": pyarrow.float64(),
}


def batch_settings(config: MseConfig, questions: int) -> list[tuple[str, int]]:
    """(setting, number of questions in a batch) of every curve."""
    settings: list[tuple[str, int]] = []
    for setting in config.study.settings:
        if setting in ("with_replacement", "without_replacement"):
            settings += [(setting, count) for count in config.study.num_prompts]
        else:
            settings.append((setting, questions if setting == "all_questions_once" else 1))
    return settings


def closed_form_request(
    config: MseConfig, pool: ScorePool, facts: ModelFacts, pool_cost: WorkCost
) -> Request:
    """The request for the curves of this study; `pool_cost` is the cost of the pool."""
    each = (pool_cost.seconds_generate + pool_cost.seconds_score) / pool_cost.rollouts
    questions = len(pool.rewards_PN)
    points = [
        CurvePoint(name, size, *setting)
        for setting in batch_settings(config, questions)
        for name in config.baselines
        if name in CLOSED_FORMS
        for size in config.group_sizes
    ]
    return Request(
        points=points,
        options={name: config.rules[name].options for name in config.baselines},
        questions=questions,
        sample=config.study.interval == "questions",
        costs={
            "tokens": (facts.prompt_tokens, float(pool.lengths_PN.mean())),
            "seconds": (facts.prompt_seconds, each),
        },
    )


def of_population(request: Request) -> Request:
    """The request for what a training step is asked of, with no curve: new questions."""
    return replace(request, points=[], options={}, sample=True)


def study_result(
    config: MseConfig,
    pool: ScorePool,
    statistics: ClosedForm,
    population: ClosedForm,
    curves: list[dict[str, Any]],
    facts: ModelFacts,
    pool_cost: WorkCost,
    replicate_cost: WorkCost,
) -> dict[str, Any]:
    """The content of `result.json`.

    Args:
        config: the study's configuration.
        pool: the scored completions.
        statistics: their closed forms, of the curves.
        population: the same over questions, without curves: what generalises to training.
        curves: rows of all methods.
        facts: of the model; see `model_facts`.
        pool_cost, replicate_cost: what the pool and Monte Carlo took.
    """
    total_cost = pool_cost + replicate_cost
    metric = _metric(config, pool, facts) | _tails(population)
    return {
        "curves": curves,
        "ratio_to_oracle": oracle_ratios(statistics),
        "scaling": _scaling(population),
        "noise": _noise(population),
        "dynamic_sampling": _dynamic_sampling(population, pool),
        "proxies": _proxies(pool),
        "allocation": _allocation(pool),
        "assumption2": _assumption(statistics, population, pool),
        "grad_sq": _gradient(statistics),
        "metric": metric,
        "precision": precision(config),
        "policy": policy_facts(
            config,
            pool.rewards_PN if pool.rewards_PNF is None else pool.rewards_PNF[..., 0],
            pool.lengths_PN,
            pool_cost,
        ),
        "questions": len(pool.rewards_PN),
        "pool_completions": pool.rewards_PN.shape[1],
        "summary": verdict(statistics, population, pool.rewards_PN)
        + metric_text(config)
        + tf32_text(config)
        + heavy_warning(statistics, population)
        + clipped_warning(
            "pool's",
            pool_cost.clipped / pool_cost.rollouts,
            None if config.imports_pool else config.max_completion_length,
        )
        + unjudged_warning(total_cost.timeouts, total_cost.failures, total_cost.rollouts)
        + zero_scores_sentence(pool)
        + packages_sentence(pool.packages, scored_with()),
        "cost": work_facts(total_cost),
        "versions": versions(),
        "pool_versions": pool.packages,
    }


def work_facts(cost: WorkCost) -> dict[str, Any]:
    """The cost, under the names of `result.json`."""
    return {
        "rollouts": cost.rollouts,
        "tokens": cost.tokens,
        "judge_timeouts": cost.timeouts,
        "judge_failures": cost.failures,
        "seconds_generate": cost.seconds_generate,
        "seconds_score": cost.seconds_score,
    }


def precision(config: MseConfig) -> dict[str, Any]:
    """In what the scores were computed; with TF32 the relative error of a squared score norm, the
    median over completions, and of their sum, at most, on three policies.
    """
    error = TF32_ERROR if config.computes_tf32 else None
    return {"weights": config.model.dtype, "tf32": config.computes_tf32, "tf32_error": error}


def metric_text(config: MseConfig) -> str:
    """Sentences on another metric than the Euclidean over all parameters, with a space before them;
    "" without.
    """
    text = ""
    if config.study.metric == "adam":
        text += (
            " Errors are those of AdamW's step, not of the gradient: each entry counts in units of "
            f"its root mean square in steps of {config.study.adam_rollouts} rollouts in groups of "
            f"{config.study.adam_group_size}, whatever the G; each half of the questions has those "
            "of the other."
        )
    if config.study.parameters is not None:
        text += (
            " Errors are those of the parameters whose names fit study.parameters="
            f"{config.study.parameters}, not of the whole gradient."
        )
    return text


def tf32_text(config: MseConfig) -> str:
    """A sentence on the error of TF32, with a space before it; "" without."""
    if not config.computes_tf32:
        return ""
    norm, total = TF32_ERROR["norm"], TF32_ERROR["sum_of_norms"]
    return (
        f" Products were TF32: a squared score norm is off by about {percentage(norm, 1)}, their "
        f"sum by at most {percentage(total, 2)}, as measured on three policies; tf32=false "
        "computes in full float32."
    )


def closed_form_rows(config: MseConfig, statistics: ClosedForm) -> list[dict[str, Any]]:
    """One row per baseline, group size and setting."""
    result = []
    for row, (bias2, variance, energy, cross, target_sq) in statistics.parts.items():
        point, mse = (row.setting, row.num_prompts), statistics[row.key]
        result.append(
            _row(config, "closed_form", row.baseline, row.group_size, point, mse)
            | {"replicates": None, "bias2": bias2, "variance": variance}
            | _comparable(
                mse, *scale_free(energy, cross, target_sq), _target_sq(statistics, row.setting)
            )
        )
    return result


def oracle_ratios(statistics: ClosedForm) -> list[dict[str, Any]]:
    """One row per baseline other than the oracle, group size and setting: its error over the
    oracle's with a paired interval, null where the oracle's is not above 0.
    """
    return [
        {
            "baseline": point.baseline,
            "setting": point.setting,
            "group_size": point.group_size,
            "num_prompts": point.num_prompts,
        }
        | _triple("ratio", statistics[point.ratio_key])
        for point in statistics.parts
        if point.baseline != "oracle"
    ]


def replay_rows(
    config: MseConfig, replay_points: list[ReplayPoint], statistics: ClosedForm
) -> list[dict]:
    """One row per rule, group size, setting and target."""
    result = []
    for x in replay_points:
        point = (x.setting, x.num_prompts)
        target_sq = _target_sq(statistics, x.setting) if x.target == "expected_reward" else None
        result.append(
            _row(config, "replay", x.baseline, x.group_size, point, x.mse)
            | {"target": TARGET_WORDS[x.target], "replicates": x.draws}
            | {"unbiased": x.target == "own_mean" or BASELINES[x.baseline].unbiased}
            | {"bias2": _finite(x.bias2), "variance": _finite(x.variance)}
            | _comparable(x.mse, x.cosine, x.best_scalar_mse, target_sq)
        )
    return result


def monte_carlo_rows(
    config, curves_by_rule, statistics: ClosedForm, prompts: int
) -> list[dict[str, Any]]:
    """One row per baseline and group size; intervals are conditional on these questions."""
    point = ("all_questions_once", prompts)
    target_sq = _target_sq(statistics, point[0])
    return [
        _row(config, "monte_carlo", name, size, point, x.mse)
        | {"interval": "completions", "replicates": x.replicates}
        | {"bias2": x.bias2, "variance": x.variance}
        | _comparable(x.mse, x.cosine, x.best_scalar_mse, target_sq)
        for (name, size), x in curves_by_rule.items()
    ]


def _target_sq(statistics: ClosedForm, setting: str) -> Interval:
    """||tau||^2 of the gradient that a setting is judged against."""
    names = {"one_question": "g_sq", "with_replacement": "grad_sq"}
    return statistics[names.get(setting, "grad_sq_at_hand")]


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
        "target": TARGET_WORDS["expected_reward"],
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


def _gradient(statistics: ClosedForm) -> dict[str, Any]:
    result: dict[str, Any] = _triple("grad_sq", statistics["grad_sq"])
    if not statistics["grad_sq_at_hand"].low > 0:
        result["reason"] = (
            "||grad J||^2 is not significantly different from 0: relative_mse, best_scalar_mse "
            "and cosine "
            "are null"
        )
    return result


def _scaling(population: ClosedForm) -> dict[str, Any]:
    result: dict[str, Any] = {}
    for name in ("c1", "c2", "c3", "gstar", "gstar_paper", "gstar_tokens", "gstar_seconds"):
        result |= _triple(name, population[name])
    law = ScalingLaw(*(population[name].estimate for name in ("c1", "c2", "c3")))
    if np.isfinite(population.scaling.covariance_33).all():
        result["covariance"] = population.scaling.covariance_33.tolist()
        result["dof"] = population.scaling.dof
    if result["gstar"] is not None:
        result["best_divisor"] = {str(n): law.best_divisor(n) for n in (256, 1024, 2048, 4096)}
    result["curve"] = [
        {"group_size": size}
        | {key: _finite(x) for key, x in zip(ENDS, population[f"n_mse/{size}"], strict=True)}
        for size in GRID
    ]
    if result["gstar_high"] is None:
        result["reason"] = _unbounded_reason(result["gstar_low"])
    return result


def _noise(population: ClosedForm) -> dict[str, Any]:
    """The noise scale of leave_one_out at every G, and at its least, see `estimators.noise`."""
    statistics = population
    sizes: list[tuple[str, float | None]] = [(str(size), size) for size in GRID]
    sizes.append(("best", _scaled_size(statistics["gstar"])))
    rows = [
        {"group_size": size}
        | _triple("rollouts", statistics[f"noise/{name}"])
        | _triple("tokens", statistics[f"noise_tokens/{name}"])
        | _triple("prompt_share", statistics[f"prompt_share/{name}"])
        for name, size in sizes
    ]
    best_tokens = _scaled_size(statistics["gstar_tokens"])
    result: dict[str, Any] = {
        "curve": rows[:-1],
        "best": rows[-1] | {"group_size_tokens": best_tokens},
        **_triple("grad_sq", statistics["grad_sq"]),
    }
    if not statistics["grad_sq"].low > 0:
        result["reason"] = (
            "||grad J||^2 is not significantly different from 0: the noise scale has no upper end"
        )
    return result


def _dynamic_sampling(population: ClosedForm, pool: ScorePool) -> list[dict[str, Any]]:
    """What dynamic sampling costs at every G that the pool has, see `kept_groups`."""
    rows = []
    for size in GRID:
        if size > pool.rewards_PN.shape[1]:
            break
        silent_P = silent_share(pool.rewards_PN, size)
        most = pool.rewards_PN.shape[1] // size
        groups = kept_groups(silent_P, size, population[f"noise/{size}"], most)
        rows.append(
            {"group_size": size}
            | _triple("kept", groups.kept)
            | _triple("generated", groups.generated)
            | _triple("break_even", groups.break_even)
        )
    return rows


def _proxies(pool: ScorePool) -> list[dict[str, Any]]:
    """How well p (1-p) and length go with what they stand for, see `proxy_correlations`."""
    return [
        {"units": row.units, "proxy": row.proxy, "target": row.target, "scale": row.scale}
        | _triple("correlation", row.correlation)
        | {
            "uncorrected": _finite(row.uncorrected),
            "proxy_reliability": _finite(row.reliability[0]),
            "target_reliability": _finite(row.reliability[1]),
        }
        for row in proxy_correlations(pool)
    ]


def _allocation(pool: ScorePool) -> list[dict[str, Any]]:
    """What unequal group sizes do to the error, see `allocation_savings`."""
    return [
        {"plan": row.plan, "group_size": row.group_size}
        | _triple("change", row.change)
        | {"in_sample": _finite(row.in_sample)}
        for row in allocation_savings(pool)
    ]


def reward_functions(
    config: MseConfig, pool: ScorePool, population: ClosedForm, request: Request
) -> dict[str, Any]:
    """Rows of every reward function by itself and of their weighted sum, and of every pair's
    correlation; nothing where there is one function.
    """
    if pool.rewards_PNF is None or pool.rewards_PNF.shape[-1] == 1:
        return {}
    names = reward_names(config.reward_funcs)
    rows: list[dict[str, Any]] = []
    functions = function_statistics(pool, names, population, request)
    for name, weight, intervals in functions:
        rows.append({"name": name, "weight": weight})
        for key, value in intervals.items():
            rows[-1] |= _triple(key, value)
    pairs = function_correlations(pool, names)
    correlations = [
        {"first": first, "second": second} | _triple("correlation", _clip(value, -1, 1))
        for first, second, value in pairs
    ]
    return {"reward_functions": rows, "reward_correlations": correlations}


def _scaled_size(best: Interval) -> float | None:
    """G* where its interval has both ends; elsewhere the least noise scale is not known."""
    return _finite(best.estimate) if math.isfinite(best.high) else None


def _unbounded_reason(low: float | None) -> str:
    """Why the interval of G* has no upper end."""
    if low is None:
        return (
            "G* has no interval: fewer than 4 questions, or C1 below 0 by more than its own error"
        )
    if low <= 1:
        return "neither C1 nor C3 is significantly different from 0: G* may be any group size"
    return "C1 is not significantly different from 0: the interval of G* has no upper end"


def _assumption(statistics: ClosedForm, population: ClosedForm, pool: ScorePool) -> dict[str, Any]:
    """Assumption 2 and the ordering, for new questions; refuted where it is at the questions at
    hand: a hypothesis on every question.
    """
    refuted = refutes_assumption2(statistics)
    statistics = statistics if len(pool.rewards_PN) < LEAST_QUESTIONS else population
    result: dict[str, Any] = {n: _finite(statistics[n].estimate) for n in ("a0", "a_v", "a_bstar")}
    result |= _triple("corr", _clip(statistics["corr"], -1, 1))
    for name in ("share", "av_minus_abstar", "av_minus_a0"):
        result |= _triple(name, statistics[name])
    result |= _triple("crossover_group_size", statistics["crossover"])
    cross = statistics["crossover"].estimate
    size = pool.rewards_PN.shape[1]
    at = math.ceil(cross) if math.isfinite(cross) else None
    result["silent_share_at_crossover"] = (
        float(silent_share(pool.rewards_PN, at).mean())
        if at is not None and 2 <= at <= size
        else None
    )
    result["refuted"] = refuted
    if result["corr"] is None:
        result["reason"] = "all rewards of a question are equal: no covariance with the reward"
    elif statistics["av_minus_a0"].low > 0:
        result["reason"] = "A_0 < A_V: GRPO never passes vanilla"
    elif result["crossover_group_size_high"] is None:
        result["reason"] = (
            "A_0 - A_V is not significantly different from 0: no finite crossover interval"
        )
    return result


def _metric(config: MseConfig, pool: ScorePool, facts: ModelFacts) -> dict[str, Any]:
    """The norm in which gradients were measured, and the tails of the score norms over all
    completions.
    """
    q = np.sort(pool.sq_norm_PN.ravel())[::-1]
    top = q[: max(1, len(q) // 100)].sum()
    study, pattern = config.study, config.study.parameters
    counted = "all trainable parameters" if pattern is None else f"those that fit {pattern}"
    return {
        "parameters": facts.parameters,
        "norm": f"{NORMS[study.metric].format(study.adam_rollouts, study.adam_group_size)} over "
        f"{counted}",
        "between_questions": "exact"
        if facts.parameters <= config.budget.gradient_sketch
        else f"unbiased sketch of {config.budget.gradient_sketch} numbers",
        "effective_sample_size": float(q.sum() ** 2 / np.square(q).sum()) if q.any() else 0.0,
        "top_percent_share": float(top / q.sum()) if q.any() else 0.0,
    }


def _tails(statistics: ClosedForm) -> dict[str, Any]:
    """The statistics on which the warning of heavy tails rests."""
    size, carriers = statistics.tails
    return {
        "tail_size": _finite(size),
        "variance_carriers": _finite(carriers),
        "heavy_tails": statistics.tails.heavy,
    }


def policy_facts(
    config: MseConfig, own_PN: Array, lengths_PN: Integers, pool_cost: WorkCost
) -> dict[str, Any]:
    """Accuracy, length and cut share of the policy; `own_PN` are rewards by the data set's own
    function.
    """
    return {
        "name": config.model.name,
        "quantity": quantity(own_PN),
        **_triple("mean_reward", mean_reward(own_PN)),
        "mean_length": float(lengths_PN.mean()),
        "clipped_ratio": pool_cost.clipped / pool_cost.rollouts,
    }


def write_curves(folder: RunFolder, rows: list[dict[str, Any]]) -> None:
    """Write the rows, columns in the order of `curves.csv`; what is not known is null.

    Raises:
        ValueError: a row has another column, or a value of another type.
    """
    if not is_main():
        return
    folder.check_lock()
    for name in {key for row in rows for key in row} ^ COLUMNS.keys():
        raise ValueError(f"{name} is a column of the rows or of {NAME}, not of both")
    schema = pyarrow.schema([(name, COLUMNS[name]) for name in rows[0]])
    with atomic_write(folder.path / NAME) as staged:
        parquet.write_table(arrow_table(rows, schema), staged)
