"""Rows of a study's curves: of closed forms, of replay and of Monte Carlo."""

from __future__ import annotations

from typing import Any

from grpo_ustat.config.mse import MseConfig
from grpo_ustat.estimators.baselines import BASELINES
from grpo_ustat.estimators.intervals import Interval
from grpo_ustat.estimators.minibatch import scale_free
from grpo_ustat.mse.closed_form import (
    ClosedForm,
    CurvePoint,
)
from grpo_ustat.mse.replay import TARGET_WORDS, ReplayPoint
from grpo_ustat.runs import study_parts as parts


def closed_form_rows(config: MseConfig, statistics: ClosedForm) -> list[parts.CurveRow]:
    """One row per baseline, group size and setting."""
    result = []
    for row, (bias2, variance, energy, cross, target_sq) in statistics.parts.items():
        mse, tau_sq = statistics[row.key], _target_sq(statistics, row.setting)
        result.append(
            _row(
                row, mse, method="closed_form", target=TARGET_WORDS["expected_reward"],
                interval=config.study.interval, unbiased=BASELINES[row.baseline].unbiased,
                replicates=None, bias2=bias2, variance=variance,
                **_comparable(mse, *scale_free(energy, cross, target_sq), tau_sq),
            )
        )  # fmt: skip
    return result


def oracle_ratios(statistics: ClosedForm) -> list[parts.OracleRatio]:
    """One row per baseline other than the oracle, group size and setting; no ratio where the
    oracle's error is not above 0.
    """
    return [
        parts.OracleRatio(
            baseline=point.baseline, setting=point.setting, group_size=point.group_size,
            num_prompts=point.num_prompts, ratio=statistics[point.ratio_key],
        )
        for point in statistics.parts
        if point.baseline != "oracle"
    ]  # fmt: skip


def replay_rows(
    config: MseConfig, replay_points: list[ReplayPoint], statistics: ClosedForm
) -> list[parts.CurveRow]:
    """One row per rule, group size, setting and target."""
    result = []
    for x in replay_points:
        target_sq = _target_sq(statistics, x.setting) if x.target == "expected_reward" else None
        result.append(
            _row(
                x, x.mse, method="replay", target=TARGET_WORDS[x.target],
                interval=config.study.interval, replicates=x.draws, bias2=x.bias2,
                unbiased=x.target == "own_mean" or BASELINES[x.baseline].unbiased,
                variance=x.variance, **_comparable(x.mse, x.cosine, x.best_scalar_mse, target_sq),
            )
        )  # fmt: skip
    return result


def monte_carlo_rows(curves_by_rule, statistics: ClosedForm, prompts: int) -> list[parts.CurveRow]:
    """One row per baseline and group size; intervals are conditional on these questions."""
    target_sq = _target_sq(statistics, "all_questions_once")
    return [
        _row(
            CurvePoint(name, size, "all_questions_once", prompts), x.mse, method="monte_carlo",
            target=TARGET_WORDS["expected_reward"], interval="completions",
            unbiased=BASELINES[name].unbiased, replicates=x.replicates, bias2=x.bias2,
            variance=x.variance, **_comparable(x.mse, x.cosine, x.best_scalar_mse, target_sq),
        )
        for (name, size), x in curves_by_rule.items()
    ]  # fmt: skip


def _row(point: CurvePoint | ReplayPoint, mse: Interval, **others: Any) -> parts.CurveRow:
    assert point.num_prompts is not None  # see `batch_settings`
    return parts.CurveRow(
        baseline=point.baseline, setting=point.setting, group_size=point.group_size,
        num_prompts=point.num_prompts, mse=mse.estimate, low=mse.low, high=mse.high, **others,
    )  # fmt: skip


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
    relative = None if target_sq is None else mse.estimate / target_sq.estimate
    return {"relative_mse": relative, "best_scalar_mse": best, "cosine": cosine}
