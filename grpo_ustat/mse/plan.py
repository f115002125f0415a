"""Costs of a planned study: sampling, scoring and stored pools."""

from __future__ import annotations

import math

from grpo_ustat.config.mse import MseConfig
from grpo_ustat.costs.cost import Cost, Plan, cache_bytes, model_size, weight_bytes
from grpo_ustat.estimators.baselines import BASELINES, OF_THE_BATCH
from grpo_ustat.estimators.looks import FIRST_COMPLETIONS, FIRST_QUESTIONS
from grpo_ustat.runs.status import PlannedRun


def plan(planned: PlannedRun) -> Plan:
    """Return the plan of a study, including its costs."""
    config: MseConfig = planned.config
    completions = config.budget.pool_completions
    notes = [
        f"Each of the launch.workers={config.launch.workers} processes needs this memory."
        if config.rollout.name == "local"
        else "One process needs this memory; vLLM also uses the share "
        f"rollout.gpu_memory_utilization={config.rollout.gpu_memory_utilization}."
    ]
    if config.study.until is not None:
        questions = config.study.questions or config.dataset.study_size
        least = min(FIRST_QUESTIONS, questions), min(FIRST_COMPLETIONS, completions)
        notes.append(
            "study.until=decided: the costs above are upper limits. The study stops when the data "
            f"decide, at the earliest after {least[0]} questions with {least[1]} completions each."
        )
    return Plan(
        settings={
            **config.shared_settings,
            "rollout": config.rollout.name,
            "reward": config.rewards_plan or None,
            "questions": config.study.questions or config.dataset.study_size,
            "until": config.study.until,
            "N": completions,
            "G": config.group_sizes,
            "baselines": config.baselines,
            "methods": config.study.methods,
            "seed": config.seed,
            "device": config.launch.device,
        },
        cost=study_cost(config),
        notes=notes,
    )


def study_cost(config: MseConfig) -> Cost:
    """Compute the cost of a study with N completions per question.

    The method monte_carlo adds to each question `replicates` groups of the largest size,
    `reference_completions` completions and, if a baseline needs them, `value_completions`
    completions.
    """
    budget = config.budget
    questions = 0 if config.imports_pool else config.study.questions or config.dataset.study_size
    # Number of policies that write completions.
    policies = 1 if config.study.scored_by is None else 2
    pools = policies
    # Inner products between K kinds of vectors take as much space as K^2 pools.
    if config.measured.is_off_policy:
        kinds = {loss.tokens: len(loss.kinds) for loss in config.measured.off_policy}
        pools += sum(count**2 for tokens, count in kinds.items() if tokens is not None)
    count = budget.pool_completions

    needs = frozenset().union(*(BASELINES[name].needs for name in config.baselines))
    of_errors, of_baselines = count, int("greedy_P" in needs)
    if "monte_carlo" in config.study.methods:
        of_errors += budget.replicates * max(config.group_sizes) + budget.reference_completions
        if needs - OF_THE_BATCH:
            of_baselines += budget.value_completions + ("greedy_P" in needs)
    rollouts, values = questions * (of_errors + (policies - 1) * count), questions * of_baselines
    length = config.max_completion_length
    disk = questions * pools * question_bytes(config)
    return Cost(
        rollouts=rollouts,
        values=values,
        evaluation=0,
        tokens=(rollouts + values) * length,
        weights=weight_bytes(config.model),
        training=0,
        cache=cache_bytes(config.model, config.sampler_options, questions * count),
        disk=disk,
        disk_after=disk,
    )


def question_bytes(config: MseConfig) -> int:
    """Return the bytes of the file that a study stores for a question with N completions.

    They are 8 N^2 bytes of inner products, 17 N bytes of rewards, lengths and end-of-sequence
    flags, 4 N bytes for each token position, 4 N R + 8 R' bytes of sketches with R and R' entries,
    but at most one for each parameter, and about 1000 bytes that describe the arrays.
    """
    count, parameters = config.budget.pool_completions, model_size(config.model).parameters
    most = math.inf if parameters is None else parameters
    features = min(config.budget.feature_sketch, most)
    gradients = min(config.budget.gradient_sketch, most)
    row = 8 * count + 4 * features + 4 * config.max_completion_length + 17
    return int(count * row + 8 * gradients + 1000)
