"""Costs of a planned study: sampling, scoring and stored pools."""

from __future__ import annotations

from dataclasses import asdict
from pathlib import Path

from grpo_ustat.config.mse import MseConfig
from grpo_ustat.costs.cost import Cost, KeptPool, Work, cost
from grpo_ustat.costs.duration import Plan, conditions
from grpo_ustat.costs.table import score_notes
from grpo_ustat.estimators.baselines import BASELINES, OF_THE_BATCH
from grpo_ustat.estimators.looks import FIRST_COMPLETIONS, FIRST_QUESTIONS
from grpo_ustat.runs.status import PlannedRun


def plan(planned: PlannedRun) -> Plan:
    """Return the plan of a study, including its costs."""
    config: MseConfig = planned.config
    device, ranks, workers = config.launch.device, config.launch.num_processes, shared_by(config)
    expected, completions = study_cost(config), config.budget.pool_completions
    notes = score_notes(
        config.model, completions, config.max_completion_length, expected.weights or 0
    )
    notes.append(
        f"Each of the launch.workers={config.launch.workers} processes needs this memory."
        if config.rollout.name == "local"
        else "One process needs this memory; vLLM also uses the share "
        f"rollout.gpu_memory_utilization={config.rollout.gpu_memory_utilization}."
    )
    if config.study.until is not None:
        questions = config.study.questions or config.dataset.study_size
        least = min(FIRST_QUESTIONS, questions), min(FIRST_COMPLETIONS, completions)
        notes.append(
            "study.until=decided: the costs above are upper limits. The study stops when the data "
            f"decide, at the earliest after {least[0]} questions with {least[1]} completions each."
        )
    # If the device has an index (cuda:0), all workers share this GPU.
    gpus = workers if device == "cuda" else ranks
    return Plan(
        command="mse",
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
            "device": device,
        },
        cost=expected,
        model=config.model.name,
        device=device,
        processes=workers,
        gpus=gpus if device.startswith("cuda") else 0,
        max_completion_length=config.max_completion_length,
        conditions=conditions(asdict(config)),
        usual_place=Path(config.output_root) / "mse",
        folder=None if planned.folder is None else planned.folder.path,
        short_run="study.questions=8",
        notes=notes,
    )


def shared_by(config: MseConfig) -> int:
    """Return the number of processes that share a study's work: ranks or local workers."""
    ranks = config.launch.num_processes
    return ranks if ranks > 1 else config.sampling_workers


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
    return cost(
        Work(
            model=config.model,
            sampler=config.sampler_options,
            device=config.launch.device,
            rollouts=questions * (of_errors + (policies - 1) * count),
            values=questions * of_baselines,
            evaluation=0,
            sampled_together=questions * count,
            pass_tokens=count * config.max_completion_length,
            by_layer=None,
            pool=KeptPool(
                questions=questions * pools,
                completions=count,
                feature_sketch=budget.feature_sketch,
                gradient_sketch=budget.gradient_sketch,
            ),
        )
    )
