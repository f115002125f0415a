"""Content of a study's `result.json`: measurements, summary, policy, metric and cost."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np

from grpo_ustat.config.mse import CLOSED_FORMS, MseConfig
from grpo_ustat.distributed.workers import WorkCost
from grpo_ustat.estimators.closed_form import (
    ClosedForm,
    CurvePoint,
    Request,
)
from grpo_ustat.estimators.group_size import PRIORS
from grpo_ustat.estimators.intervals import pool_mean_reward, quantity
from grpo_ustat.measurements.base import PoolStudy
from grpo_ustat.measurements.group_size import summary_text
from grpo_ustat.mse.pool import ModelFacts
from grpo_ustat.mse.pool_store import scored_with
from grpo_ustat.mse.sampler import sampler_text
from grpo_ustat.pages.caveats import (
    clipped_warning,
    heavy_warning,
    packages_sentence,
    unjudged_warning,
    zero_scores_sentence,
)
from grpo_ustat.records import Array, Integers, ScorePool
from grpo_ustat.runs import study_parts as parts
from grpo_ustat.runs.folder import versions
from grpo_ustat.runs.result import StudyResult
from grpo_ustat.terminal.streams import percentage

# Measured at commit ebbcb118 by scripts/benchmarks/precision.py.
TF32_ERROR = {"norm": 1e-3, "sum_of_norms": 6e-4}


def closed_form_request(config: MseConfig, pool: ScorePool, facts: ModelFacts) -> Request:
    """Return the request for the closed-form errors of this study's baselines and group sizes.

    Baselines without a closed form are measured only at `study.rollouts` rollouts of new questions.
    If the study has any, the request includes the errors of the other baselines at this number, for
    comparison.
    """
    rollouts = config.study.rollouts
    curves = [
        (name, size)
        for name in config.baselines
        if name in CLOSED_FORMS
        for size in config.group_sizes
    ]
    points = [CurvePoint(*x, "all_questions_once", len(pool.rewards_PN)) for x in curves]
    if config.compares_by_groups:
        points += [
            CurvePoint(name, size, "with_replacement", rollouts // size)
            for name, size in curves
            if rollouts % size == 0
        ]
    return Request(
        points=points,
        options=config.compared_options,
        costs={"tokens": (facts.prompt_tokens, float(pool.lengths_PN.mean()))},
        prior=PRIORS[config.study.prior],
    )


def study_result(
    config: MseConfig,
    study: PoolStudy,
    facts: ModelFacts,
    pool_cost: WorkCost,
    replicate_cost: WorkCost,
    left_out: dict[str, int],
    remarks: str,
    measured: Mapping[str, Any],
    looks: list[parts.Look] | None = None,
) -> StudyResult:
    """Return the content of `result.json`.

    Args:
        study: Pool and settings of the study.
        pool_cost, replicate_cost: Cost of the pool, and cost of Monte Carlo replicates.
        left_out: Number of excluded questions by reason.
        remarks: Sentences on the pool to add to the summary.
        measured: Records of all measurements, keyed by name.
        looks: Looks at the data while the pool grew; None if the pool had a fixed size.
    """
    total_cost = pool_cost + replicate_cost
    pool, population = study.pool, study.population
    gap = pool.sampler_gap
    decided = bool(looks) and looks[-1].tolerance is not None
    return StudyResult(
        metric=_metric(config, pool, facts, population),
        precision=precision(config),
        policy=policy_facts(
            config,
            pool.rewards_PN if pool.rewards_PNF is None else pool.rewards_PNF[..., 0],
            pool.lengths_PN,
            pool_cost,
        ),
        questions=len(pool.rewards_PN),
        pool_completions=pool.rewards_PN.shape[1],
        summary=summary_text(study)
        + parameters_text(config)
        + tf32_text(config)
        + heavy_warning(population.tails, stops=decided)
        + clipped_warning(
            "pool's",
            pool_cost.clipped / pool_cost.rollouts,
            None if config.imports_pool else config.max_completion_length,
        )
        + unjudged_warning(total_cost.timeouts, total_cost.failures, total_cost.rollouts)
        + zero_scores_sentence(pool)
        + packages_sentence(pool.packages, scored_with())
        + remarks
        + ("" if gap is None else sampler_text(config.rollout.name, gap)),
        cost=study_cost(total_cost),
        versions=versions(),
        pool_versions=pool.packages,
        sampler=None if gap is None else parts.Sampler(name=config.rollout.name, gap=gap),
        left_out=left_out,
        looks=looks,
        measured=measured,
    )


def study_cost(cost: WorkCost) -> parts.StudyCost:
    """Return the cost as a record of `result.json`."""
    return parts.StudyCost(
        rollouts=cost.rollouts, tokens=cost.tokens, judge_timeouts=cost.timeouts,
        judge_failures=cost.failures, seconds_generate=cost.seconds_generate,
        seconds_score=cost.seconds_score,
    )  # fmt: skip


def precision(config: MseConfig) -> parts.Precision:
    """Return the precision of the scores.

    With TF32 the record includes two relative errors that were measured on three policies: the
    median error of a completion's squared score norm, and the largest error of the sum of these
    norms.
    """
    error = TF32_ERROR if config.computes_tf32 else None
    return parts.Precision(weights=config.model.dtype, tf32=config.computes_tf32, tf32_error=error)


def parameters_text(config: MseConfig) -> str:
    """Return a space and sentences on the parameters that are measured; "" for all parameters."""
    text = ""
    if config.scores_adapters:
        text += (
            " Errors are for the adapter parameters, not for all weights; use "
            "study.merge_adapters=true to measure all weights."
        )
    if config.study.parameters is not None:
        text += (
            " Errors are for the parameters whose names match study.parameters="
            f"{config.study.parameters}, not for the whole gradient."
        )
    return text


def tf32_text(config: MseConfig) -> str:
    """Return a space and a sentence on the error due to TF32; "" without TF32."""
    if not config.computes_tf32:
        return ""
    norm, total = TF32_ERROR["norm"], TF32_ERROR["sum_of_norms"]
    return (
        " Matrix products were computed in TF32: the error is about "
        f"{percentage(norm, 1)} for a squared score norm and at most {percentage(total, 2)} for "
        "the sum of these norms, as measured on three policies."
    )


def _metric(
    config: MseConfig,
    pool: ScorePool,
    facts: ModelFacts,
    population: ClosedForm,
) -> parts.Metric:
    """Return the norm in which gradients were measured, and statistics on large score norms.

    The norms are those of all completions of the pool.
    """
    q = np.sort(pool.sq_norm_PN.ravel())[::-1]
    top = q[: max(1, len(q) // 100)].sum()
    pattern = config.study.parameters
    parameters = (
        "the adapters' parameters" if config.scores_adapters else "all trainable parameters"
    )
    counted = parameters if pattern is None else f"the parameters that match {pattern}"
    tail_size, variance_carriers = population.tails
    return parts.Metric(
        parameters=facts.parameters,
        norm=f"Euclidean over {counted}",
        between_questions="exact"
        if facts.parameters <= config.budget.gradient_sketch
        else f"unbiased sketch of {config.budget.gradient_sketch} numbers",
        effective_sample_size=float(q.sum() ** 2 / np.square(q).sum()) if q.any() else 0.0,
        top_percent_share=float(top / q.sum()) if q.any() else 0.0,
        tail_size=tail_size,
        variance_carriers=variance_carriers,
        heavy_tails=population.tails.heavy,
    )


def policy_facts(
    config: MseConfig, own_PN: Array, lengths_PN: Integers, pool_cost: WorkCost
) -> parts.PolicyFacts:
    """Compute the policy's accuracy, mean completion length, and share of cut completions.

    Args:
        own_PN: Rewards from the first reward function.
    """
    return parts.PolicyFacts(
        name=config.model.name,
        quantity=quantity(own_PN),
        mean_reward=pool_mean_reward(own_PN),
        mean_length=float(lengths_PN.mean()),
        clipped_ratio=pool_cost.clipped / pool_cost.rollouts,
    )
