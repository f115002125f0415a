"""A gradient-MSE study from configuration to `result.json`, table and figure."""

from __future__ import annotations

import math
from dataclasses import asdict
from typing import Any

from rich.console import Console

from grpo_ustat.config import MseConfig
from grpo_ustat.estimators.intervals import Interval, clustered_mean
from grpo_ustat.records import ScorePool
from grpo_ustat.runs.figures import mse_figure
from grpo_ustat.runs.folder import RunFolder, versions
from grpo_ustat.runs.summary import clipped_warning, mse_tables, write_csv
from grpo_ustat.study.closed_form import ClosedForm, closed_form
from grpo_ustat.study.pool import Cost, build_pool
from grpo_ustat.tasks.registry import make_task

UNBIASED_TARGET = "gradient of the expected reward"


def run(config: MseConfig, folder: RunFolder) -> float | None:
    """Run the study, or show the one that the folder already holds.

    Returns:
        The first curve's mean squared error at the first group size.
    """
    console = Console()
    result = folder.result()
    if result is None:
        folder.open()
        result = study(config, folder)
        folder.finish(result)
    else:
        console.print(f"{folder.path} is complete; on_existing=overwrite runs it again.")
    for table in mse_tables(result):
        console.print(table)
    console.print(result["summary"], highlight=False)
    console.print(f"Wrote {folder.path}", soft_wrap=True, highlight=False)
    return result["curves"][0]["mse"]


def study(config: MseConfig, folder: RunFolder) -> dict[str, Any]:
    """The study's result; writes its table and figure into the folder."""
    prompts = make_task(config).prompts("study")[: config.study.questions]
    pool, cost = build_pool(config, prompts)
    found = closed_form(pool, config.baselines, config.group_sizes, config.study.interval)
    curves = []
    if "closed_form" in config.study.methods:
        curves += _closed_form_rows(config, found, len(prompts))
    if "monte_carlo" in config.study.methods:
        from grpo_ustat.study.monte_carlo import monte_carlo

        estimated = monte_carlo(config, prompts)
        curves += _monte_carlo_rows(config, estimated, found, len(prompts))
    assumption = _assumption(found)
    result = {
        "curves": curves,
        "scaling": _scaling(found),
        "assumption2": assumption,
        "grad_sq": _triple("grad_sq", found["grad_sq"]),
        "metric": {"parameters": cost.parameters, "norm": "Euclidean over all trainable"},
        "policy": _policy(pool, config, cost),
        "questions": len(prompts),
        "pool_completions": config.budget.pool_completions,
        "summary": summary(found, assumption)
        + clipped_warning(cost.clipped / cost.rollouts, config.max_completion_length),
        "cost": _cost(cost),
        "versions": versions(),
    }
    write_csv(folder, "curves.csv", curves)
    mse_figure(folder.path, result, config)
    return result


def _closed_form_rows(config: MseConfig, found: ClosedForm, prompts: int) -> list[dict[str, Any]]:
    grad_sq = found["grad_sq"]
    rows = []
    for name in config.baselines:
        for size in config.group_sizes:
            mse = found[f"mse/{name}/{size}"]
            bias2 = grad_sq.estimate / size**2 if name == "group_mean" else 0.0
            shrink = (size - 1) / size if name == "group_mean" else 1.0
            free = _scale_free((mse.estimate - bias2) / shrink**2, grad_sq)
            rows.append(
                _row(config, "closed_form", name, size, prompts, mse)
                | {"replicates": None, "bias2": bias2, "variance": mse.estimate - bias2}
                | {"relative_mse": _relative(mse.estimate, grad_sq)}
                | free
            )
    return rows


def _monte_carlo_rows(config, estimated, found: ClosedForm, prompts: int) -> list[dict[str, Any]]:
    rows = []
    for (name, size), curve in estimated.items():
        known = _distinct_from_zero(found["grad_sq"])
        rows.append(
            _row(config, "monte_carlo", name, size, prompts, curve.mse)
            | {"interval": "completions", "replicates": curve.replicates}
            | {"bias2": curve.bias2, "variance": curve.variance}
            | {"relative_mse": _relative(curve.mse.estimate, found["grad_sq"])}
            | {"best_scalar_mse": curve.best_scalar_mse if known else None}
            | {"cosine": curve.cosine if known else None}
        )
    return rows


def _row(config: MseConfig, method: str, name: str, size: int, prompts: int, mse: Interval):
    return {
        "method": method,
        "baseline": name,
        "target": UNBIASED_TARGET,
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
    if not _distinct_from_zero(grad_sq):
        return {"best_scalar_mse": None, "cosine": None}
    energy = unbiased_mse + grad_sq.estimate
    return {
        "best_scalar_mse": unbiased_mse * grad_sq.estimate / energy,
        "cosine": math.sqrt(grad_sq.estimate / energy) if energy > 0 else None,
    }


def _triple(name: str, interval: Interval) -> dict[str, float | None]:
    """`name`, `name_low`, `name_high`; null where not a finite number."""
    keys = (name, f"{name}_low", f"{name}_high")
    return {k: x if math.isfinite(x) else None for k, x in zip(keys, interval, strict=True)}


def _scaling(found: ClosedForm) -> dict[str, Any]:
    result: dict[str, Any] = {}
    for name in ("c1", "c2", "c3", "gstar", "gstar_paper"):
        result |= _triple(name, found[name])
    if result["gstar"] is None or result["gstar_low"] is None:
        result["reason"] = "C1 is not distinguishable from 0: G* has no finite interval"
    return result


def _assumption(found: ClosedForm) -> dict[str, Any]:
    result = {name: found[name].estimate for name in ("a0", "a_v", "a_bstar")}
    for name in ("corr", "av_minus_abstar", "av_minus_a0"):
        result |= _triple(name, found[name])
    if result["corr"] is None:
        return result | {"crossover_group_size": None, "reason": "all rewards of a question equal"}
    gain = -result["av_minus_a0"]
    result["crossover_group_size"] = 1 + found["c3"].estimate / gain if gain > 0 else None
    if gain <= 0:
        result["reason"] = "A_0 <= A_V: vanilla is better than the oracle at every group size"
    return result


def _policy(pool: ScorePool, config: MseConfig, cost: Cost) -> dict[str, Any]:
    accuracy = clustered_mean(pool.rewards_PN)
    return {
        "name": config.model.name,
        **_triple("accuracy", accuracy),
        "mean_length": float(pool.lengths_PN.mean()),
        "clipped_ratio": cost.clipped / cost.rollouts,
    }


def _cost(cost: Cost) -> dict[str, Any]:
    keys = ("rollouts", "tokens", "seconds_generate", "seconds_score")
    return {key: asdict(cost)[key] for key in keys}


def summary(found: ClosedForm, assumption: dict[str, Any]) -> str:
    """In plain words: which regime the policy is in, and what follows."""
    difference, corr = found["av_minus_a0"], found["corr"]
    if not math.isfinite(corr.estimate):
        return (
            "Every completion of a question got the same reward: no baseline changes anything and "
            "the gradient is 0. Check the prompt, max_completion_length and the answer format."
        )
    a_0, a_v = assumption["a0"], assumption["a_v"]
    excess = found["av_minus_abstar"].estimate / a_v
    text = (
        f"corr(q, Z) = {corr.estimate:.3f} [{corr.low:.3f}, {corr.high:.3f}]; the best prompt-only "
        f"baseline E[q Z]/E[q] would take {excess:.0%} off the oracle's A_V. "
    )
    if difference.high < 0:
        cross = assumption["crossover_group_size"]
        text += (
            f"A_0 = {a_0:.0f} > A_V = {a_v:.0f}, the paper's regime: the oracle beats vanilla at "
            f"every G, GRPO beats vanilla from G > {cross:.1f} on. "
        )
    elif difference.low > 0:
        text += (
            f"A_0 = {a_0:.0f} < A_V = {a_v:.0f}, Assumption 2 is broken: wrong answers carry the "
            "large scores, and vanilla beats oracle and GRPO at every G. "
        )
    else:
        text += "A_0 and A_V are not distinguishable: neither vanilla nor the oracle is better. "
    best = found["gstar"]
    if math.isfinite(best.low):
        text += f"G* = {best.estimate:.1f} [{best.low:.1f}, {best.high:.1f}]."
    else:
        text += "G* has no finite interval: C1 is not distinguishable from 0."
    return text
