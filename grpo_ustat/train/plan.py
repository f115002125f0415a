"""Description of a planned training run for cost estimates: sampling, updates and files."""

from __future__ import annotations

import math

from grpo_ustat.config.train import TrainConfig
from grpo_ustat.costs.cost import Cost, Plan, cache_bytes, product, weight_bytes
from grpo_ustat.estimators.baselines import BASELINES
from grpo_ustat.runs.status import PlannedRun

# Number of values that the optimizer stores per parameter.
MOMENTS_PER_PARAMETER = {"adamw": 2, "sgd": 0}


def plan(planned: PlannedRun) -> Plan:
    """Describe a planned run and estimate its cost."""
    config: TrainConfig = planned.config
    notes = []
    if config.dataset.test_size is None and (size := config.dataset.published_test_size):
        notes = [
            f"The number of test questions is taken to be the published {size}, because "
            "dataset.test_size=null."
        ]
    return Plan(
        settings={
            **config.shared_settings,
            "rollout": config.rollout.name,
            "reward": config.rewards_plan or None,
            "objective": config.objective.name,
            "baseline": config.baseline.name,
            "G": config.group_size,
            "n": config.budget.rollouts,
            "P": config.prompts_per_step,
            "steps": config.max_steps,
            "learning_rate": f"{config.learning_rate:g}",
            "lora": f"r={config.lora.r}" if config.lora.r else None,
            "bf16": config.bf16,
            "eval_steps": config.eval_steps,
            "decoding": config.eval.decoding,
            "save_steps": config.save_steps,
            "seed": config.seed,
            "device": config.launch.device,
        },
        cost=training_cost(config),
        batch=batch_in_words(config),
        notes=notes,
    )


def training_cost(config: TrainConfig) -> Cost:
    """Estimate the cost of a training run.

    Each step samples n completions, and some baselines sample more. For each prompt of a step, the
    baselines `oracle` and `optimal` sample budget.value_completions more completions, and `remax`
    samples one greedy completion. Evaluations take place at step 0, every eval_steps steps and at
    the last step.

    The memory for gradients and the optimizer's state is counted if all weights are trained. With
    adapters, it is small and not counted. While a checkpoint is written, at most
    save_total_limit + 1 checkpoints exist.
    """
    needs, each = BASELINES[config.baseline.name].needs, config.budget.value_completions
    visits = config.prompts_per_step * config.max_steps
    values = visits * (each * bool(needs & {"value_P", "optimal_P"}) + ("greedy_P" in needs))

    evaluations = 1 + math.ceil(config.max_steps / config.eval_steps)
    decoding, questions = config.eval.decoding, config.dataset.test_size
    if questions is None:
        questions = config.dataset.published_test_size
    of_question = config.eval.num_generations * ("sampled" in decoding) + ("greedy" in decoding)
    tests = None if questions is None else questions * of_question * evaluations

    rollouts, adapts = config.budget.rollouts, config.lora.r > 0
    weights = weight_bytes(config.model)
    kept = 0 if adapts else 1 + MOMENTS_PER_PARAMETER[config.optimizer.name]
    checkpoints, limit = math.ceil(config.max_steps / config.save_steps), config.save_total_limit
    most, last = (
        checkpoints if limit is None else min(checkpoints, limit + more) for more in (1, 0)
    )
    has_reference = bool(config.objective.beta and not adapts)
    return Cost(
        rollouts=rollouts * config.max_steps,
        values=values,
        evaluation=tests,
        tokens=(rollouts * config.max_steps + values + (tests or 0)) * config.max_completion_length,
        weights=product(weights, 1 + has_reference),
        training=product(weights, kept),
        cache=cache_bytes(
            config.model,
            config.sampler_options,
            max(rollouts, (tests or 0) // evaluations),
            bf16=config.bf16,
        ),
        disk=product(weights, kept * most),
        disk_after=product(weights, kept * last),
    )


def batch_in_words(config: TrainConfig) -> str:
    """Describe how a step's batch is divided among processes, updates and backward passes."""
    rollouts, prompts = config.budget.rollouts, config.prompts_per_step
    ranks, objective = config.launch.num_processes, config.objective
    size = objective.update_size(rollouts)
    updates = objective.num_iterations * math.ceil(rollouts / size)
    share = f"up to {math.ceil(prompts / ranks)} prompts on each of {ranks} processes; "
    longest = math.ceil(size / ranks) * config.max_completion_length
    passes = max(1, math.ceil(longest / config.micro_batch_tokens))
    return (
        f"Batch: n = {rollouts} completions per step = {prompts} prompts x G = "
        f"{config.group_size}; {share if ranks > 1 else ''}{updates} "
        f"update{'s' * (updates > 1)} per step. An update reads {size} completions in at most "
        f"about {passes} backward pass{'es' * (passes > 1)} of {config.micro_batch_tokens} padded "
        "tokens (prompts not counted)."
    )
