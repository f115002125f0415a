"""Rows of a study's curves: of closed forms, of all groups of the pool and of Monte Carlo."""

from __future__ import annotations

from typing import Any

from grpo_ustat.config.mse import MseConfig
from grpo_ustat.estimators.baselines import BASELINES
from grpo_ustat.estimators.closed_form import (
    ClosedForm,
    CurvePoint,
)
from grpo_ustat.estimators.intervals import Interval
from grpo_ustat.estimators.minibatch import scale_free
from grpo_ustat.mse.rules import RuleError
from grpo_ustat.runs import study_parts as parts

# The target of every error.
EXPECTED_REWARD = "gradient of the expected reward"


def closed_form_rows(config: MseConfig, statistics: ClosedForm) -> list[parts.CurveRow]:
    """Return one row per baseline and group size, of each question of the study once."""
    return [
        _formula_row(point, statistics, "closed_form", config.study.interval)
        for point in statistics.parts
    ]


def new_questions_rows(
    config: MseConfig, errors: list[RuleError], population: ClosedForm
) -> list[parts.CurveRow]:
    """Return one row per baseline and group size, of n rollouts of new questions.

    Rows are in the order of the configuration.

    Args:
        errors: from all groups of the pool.
        population: closed forms over questions, with the points of the other rules.
    """
    rows = [
        _formula_row(point, population, "new_questions", "questions") for point in population.parts
    ]
    for error in errors:
        prompts = config.study.rollouts // error.group_size
        point = CurvePoint(error.baseline, error.group_size, "with_replacement", prompts)
        scaled = scale_free(error.energy, error.cross, error.target_sq)
        rows.append(
            _row(
                point, error.mse, method="new_questions", interval="questions",
                replicates=error.draws, bias2=error.bias2, variance=error.variance,
                **_comparable(error.mse, *scaled, population["grad_sq"]),
            )
        )  # fmt: skip
    order = config.baselines.index
    return sorted(rows, key=lambda row: (order(row.baseline), row.group_size))


def oracle_ratios(statistics: ClosedForm) -> list[parts.OracleRatio]:
    """Return one row per baseline other than the oracle and group size.

    There is no ratio where the oracle's error is not above 0.
    """
    return [
        parts.OracleRatio(
            baseline=point.baseline, setting=point.setting, group_size=point.group_size,
            num_prompts=point.num_prompts, ratio=statistics[point.ratio_key],
        )
        for point in statistics.parts
        if point.baseline != "oracle"
    ]  # fmt: skip


def monte_carlo_rows(curves_by_rule, statistics: ClosedForm, prompts: int) -> list[parts.CurveRow]:
    """Return one row per baseline and group size; intervals are conditional on these questions."""
    target_sq = statistics["grad_sq_at_hand"]
    return [
        _row(
            CurvePoint(name, size, "all_questions_once", prompts), x.mse, method="monte_carlo",
            interval="completions", replicates=x.replicates, bias2=x.bias2, variance=x.variance,
            **_comparable(x.mse, x.cosine, x.best_scalar_mse, target_sq),
        )
        for (name, size), x in curves_by_rule.items()
    ]  # fmt: skip


def _formula_row(
    point: CurvePoint, statistics: ClosedForm, method: str, interval: str
) -> parts.CurveRow:
    """Return the row of a point that has a closed form."""
    bias2, variance, energy, cross, target_sq = statistics.parts[point]
    name = "grad_sq_at_hand" if point.setting == "all_questions_once" else "grad_sq"
    mse = statistics[point.key]
    return _row(
        point, mse, method=method, interval=interval, replicates=None, bias2=bias2,
        variance=variance,
        **_comparable(mse, *scale_free(energy, cross, target_sq), statistics[name]),
    )  # fmt: skip


def _row(point: CurvePoint, mse: Interval, **others: Any) -> parts.CurveRow:
    return parts.CurveRow(
        baseline=point.baseline, target=EXPECTED_REWARD, setting=point.setting,
        group_size=point.group_size, num_prompts=point.num_prompts,
        unbiased=BASELINES[point.baseline].unbiased, mse=mse.estimate, low=mse.low, high=mse.high,
        **others,
    )  # fmt: skip


def _comparable(
    mse: Interval, cosine: float | None, best: float | None, target_sq: Interval
) -> dict[str, float | None]:
    """Return the columns free of scale; null where ||grad J||^2 is not surely above 0."""
    if not target_sq.low > 0:
        return {"relative_mse": None, "best_scalar_mse": None, "cosine": None}
    relative = mse.estimate / target_sq.estimate
    return {"relative_mse": relative, "best_scalar_mse": best, "cosine": cosine}
