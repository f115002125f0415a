"""Checks of a training run; each refuses in one line that names values and fix."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

from grpo_ustat.checks import (
    ConfigError,
    check_group_size,
    check_options,
    check_rule,
    check_shape,
    distinct,
    one_of,
    positive,
)
from grpo_ustat.estimators.baselines import BASELINES

if TYPE_CHECKING:
    from grpo_ustat.config import ObjectiveConfig, OptimizerConfig, ScheduleConfig, TrainConfig

FRESH = {"value_P", "optimal_P", "tracker_P"}  # context that budget.value_completions pays for
OBJECTIVES = (
    "algorithm1", "grpo", "grpo_original", "dr_grpo", "dapo", "gspo", "whole_sequence"
)  # fmt: skip
LEVELS = ("none", "token", "sequence", "whole_sequence")
LOSS_TYPES = ("sum", "dr_grpo", "dapo", "grpo")
ENDLESS = ("constant", "constant_with_warmup", "inverse_sqrt")  # schedules that need no end
ENDING = ("linear", "cosine")
OPTIMIZERS = ("adamw", "sgd")
KL_ESTIMATORS, KL_PLACES = ("k1", "k2", "k3"), ("loss", "reward")
ROLLOUTS = ("local", "vllm")
DECODINGS = ("sampled", "greedy")
DEVICES = ("cpu", "cuda")


def check_train(config: TrainConfig) -> None:
    """Everything about a training run that its configuration shows.

    Raises:
        ConfigError: naming the values and the fix.
    """
    check_rule("baseline.name", config.baseline.name)
    check_options(config.baseline, "baseline.options")
    positive(config, "group_size", "learning_rate", "max_steps", "eval_steps", "save_steps")
    positive(config, "micro_batch_tokens")
    for name in ("max_grad_norm", "save_total_limit"):
        if getattr(config, name) is not None:
            positive(config, name)
    _check_counts(config)
    check_optimizer(config.optimizer)
    check_schedule(config.schedule)
    _check_batch(config)
    check_objective(config.objective, config.group_size, config.budget.rollouts)
    _check_device(config)
    _check_lora(config)
    _check_rollout(config)
    _check_eval(config)
    _check_report(config)


def _check_counts(config: TrainConfig) -> None:
    for key, value in (
        ("log_completions", config.log_completions),
        ("monitor.gradient_mse_every", config.monitor.gradient_mse_every),
        ("schedule.warmup_steps", config.schedule.warmup_steps),
        ("lora.r", config.lora.r),
    ):
        if value < 0:
            raise ConfigError(f"{key}={value} must be 0 or more")
    if config.monitor.gradient_mse_every:
        _check_monitor(config)


def _check_monitor(config: TrainConfig) -> None:
    every, prompts = config.monitor.gradient_mse_every, config.prompts_per_step
    positive(config.monitor, "gradient_sketch", prefix="monitor.")
    if config.group_size < 3:
        raise ConfigError(
            f"monitor.gradient_mse_every={every} with group_size={config.group_size}: C3 needs at "
            "least 3 completions a group"
        )
    if prompts < 4:
        raise ConfigError(
            f"monitor.gradient_mse_every={every} with {prompts} prompts a step (budget.rollouts / "
            "group_size): intervals over prompts need at least 4"
        )


def check_optimizer(optimizer: OptimizerConfig) -> None:
    """A known optimizer; momenta in [0, 1), weight decay finite and not negative."""
    one_of("optimizer.name", optimizer.name, OPTIMIZERS)
    for name in ("beta1", "beta2"):
        if not 0 <= getattr(optimizer, name) < 1:
            raise ConfigError(f"optimizer.{name}={getattr(optimizer, name)} must be in [0, 1)")
    if not 0 <= optimizer.weight_decay < math.inf:
        raise ConfigError(f"optimizer.weight_decay={optimizer.weight_decay} must be 0 or more")


def check_schedule(schedule: ScheduleConfig) -> None:
    """A known schedule; steps of warm-up only where it has one."""
    kind, warmup = schedule.lr_scheduler_type, schedule.warmup_steps
    one_of("schedule.lr_scheduler_type", kind, ENDLESS + ENDING)
    if kind == "constant" and warmup:
        raise ConfigError(
            f"schedule.warmup_steps={warmup} with lr_scheduler_type=constant has no effect: "
            "use constant_with_warmup"
        )


def _check_batch(config: TrainConfig) -> None:
    check_group_size(config.baseline.name, config.group_size)
    positive(config.budget, "rollouts", prefix="budget.")
    rollouts, size = config.budget.rollouts, config.group_size
    if rollouts < size or rollouts % size:
        near = [n for n in (rollouts // size * size, (rollouts // size + 1) * size) if n > 0]
        raise ConfigError(
            f"budget.rollouts={rollouts} is not a multiple of group_size={size}: "
            f"use budget.rollouts={' or '.join(map(str, near))}, or another group_size"
        )
    if BASELINES[config.baseline.name].needs & FRESH:
        positive(config.budget, "value_completions", prefix="budget.")
    check_shape(config.baseline.name, config.prompts_per_step, size, "budget.rollouts")
    if config.prompts_per_step > (config.dataset.train_size or math.inf):
        raise ConfigError(
            f"{config.prompts_per_step} prompts a step (budget.rollouts / group_size) but "
            f"dataset.train_size={config.dataset.train_size}: raise group_size or train_size"
        )


def check_objective(objective: ObjectiveConfig, group_size: int, rollouts: int) -> None:
    """The objective means something: see training/objective.py."""
    one_of("objective.name", objective.name, OBJECTIVES)
    one_of("objective.importance_sampling_level", objective.importance_sampling_level, LEVELS)
    one_of("objective.loss_type", objective.loss_type, LOSS_TYPES)
    positive(objective, "num_iterations", prefix="objective.")
    if objective.name == "algorithm1":
        _check_algorithm1(objective)
    _check_level(objective)
    _check_updates(objective, group_size, rollouts)
    _check_clipping(objective)
    _check_penalty(objective)


ALGORITHM1 = {  # what the paper's Algorithm 1 has none of
    "importance_sampling_level": "none",
    "loss_type": "sum",
    "num_iterations": 1,
    "minibatch_size": None,
    "epsilon": None,
    "epsilon_high": None,
    "beta": 0.0,
    "kl_estimator": None,
    "kl_in": None,
    "entropy_coef": 0.0,
}


def _check_algorithm1(objective: ObjectiveConfig) -> None:
    for name, neutral in ALGORITHM1.items():
        value = getattr(objective, name)
        if value != neutral:
            raise ConfigError(
                f"objective=algorithm1 is a sum over tokens with one update, no ratio and no "
                f"penalty, but objective.{name}={value}: use objective=grpo with it"
            )


def _check_level(objective: ObjectiveConfig) -> None:
    """A ratio of whole sequences goes with one aggregation: the others would weigh it twice."""
    level, wanted = (
        objective.importance_sampling_level,
        {"sequence": "grpo", "whole_sequence": "sum"},
    )
    if level in wanted and objective.loss_type != wanted[level]:
        raise ConfigError(
            f"objective.importance_sampling_level={level} with loss_type={objective.loss_type} "
            f"would count a sequence's ratio once per token: use loss_type={wanted[level]}"
        )


def _check_updates(objective: ObjectiveConfig, group_size: int, rollouts: int) -> None:
    size = objective.minibatch_size
    if size is not None and (size <= 0 or size % group_size or rollouts % size):
        raise ConfigError(
            f"objective.minibatch_size={size} must be a multiple of group_size={group_size} that "
            f"divides budget.rollouts={rollouts}"
        )
    several = objective.num_iterations > 1 or size not in (None, rollouts)
    if several and objective.importance_sampling_level == "none":
        raise ConfigError(
            f"objective.num_iterations={objective.num_iterations} minibatch_size={size} updates "
            "on completions of an older policy, which needs a ratio: use "
            "objective.importance_sampling_level=token, or one update"
        )


def _check_clipping(objective: ObjectiveConfig) -> None:
    low, high = objective.epsilon, objective.epsilon_high
    if (low is None) != (high is None):
        raise ConfigError(
            f"objective.epsilon={low} epsilon_high={high}: give both (equal ones are PPO's) or none"
        )
    if low is None:
        return
    if objective.importance_sampling_level == "none":
        raise ConfigError(
            f"objective.epsilon={low} clips a ratio, and importance_sampling_level=none has none: "
            "use token, or epsilon=null epsilon_high=null"
        )
    if not (0 < low < 1 and 0 < high < math.inf):
        raise ConfigError(
            f"objective.epsilon={low} epsilon_high={high}: use 0 < epsilon < 1 and epsilon_high > 0"
        )


def _check_penalty(objective: ObjectiveConfig) -> None:
    kind, where = objective.kl_estimator, objective.kl_in
    for name in ("beta", "entropy_coef"):
        if not 0 <= getattr(objective, name) < math.inf:
            raise ConfigError(f"objective.{name}={getattr(objective, name)} must be 0 or more")
    if kind is None and where is None:
        if objective.beta:
            raise ConfigError(
                f"objective.beta={objective.beta} without a penalty: set kl_estimator=k3 kl_in=loss"
            )
        return
    one_of("objective.kl_estimator", str(kind), KL_ESTIMATORS)
    one_of("objective.kl_in", str(where), KL_PLACES)
    if (kind, where) == ("k1", "loss"):
        raise ConfigError(
            "objective.kl_estimator=k1 in the loss has a gradient of mean zero on-policy "
            "(E grad log pi = 0): use kl_in=reward, or k2 or k3 in the loss"
        )
    if where == "reward" and kind != "k1":
        raise ConfigError(
            f"objective.kl_estimator={kind} in the reward: only the mean of k1, times the score, "
            "has the gradient of the divergence: use k1, or kl_in=loss"
        )


def _check_device(config: TrainConfig) -> None:
    if config.launch.device.startswith("cuda:"):
        raise ConfigError(
            f"launch.device={config.launch.device}: training takes its GPU from the launcher; "
            "use launch.device=cuda and choose with CUDA_VISIBLE_DEVICES"
        )
    one_of("launch.device", config.launch.device, DEVICES)
    if config.model.dtype == "float16":
        raise ConfigError(
            "model.dtype=float16 in training: AdamW's steps underflow in it; use bf16=true, or "
            "model.dtype=float32"
        )
    if config.bf16 and config.model.dtype != "float32":
        raise ConfigError(
            f"bf16=true computes in bfloat16 over float32 weights, but model.dtype="
            f"{config.model.dtype}: use model.dtype=float32, or bf16=false"
        )


def _check_lora(config: TrainConfig) -> None:
    lora = config.lora
    given = [n for n in ("lora_alpha", "target_modules") if getattr(lora, n) is not None]
    if not lora.r and given:
        raise ConfigError(f"lora.{given[0]} without adapters: set lora=r16 or lora.r=16")
    if lora.r and len(given) < 2:
        raise ConfigError(
            f"lora.r={lora.r} needs lora_alpha and target_modules: start from lora=r16"
        )
    if lora.r:
        positive(lora, "lora_alpha", prefix="lora.")


def _check_rollout(config: TrainConfig) -> None:
    rollout = config.rollout
    one_of("rollout.name", rollout.name, ROLLOUTS)
    if rollout.name == "local":
        for name in ("gpu_memory_utilization", "max_model_len", "enforce_eager"):
            if getattr(rollout, name) is not None:
                raise ConfigError(f"rollout.{name} is vLLM's: use rollout=vllm with it")


def _check_report(config: TrainConfig) -> None:
    every, last = config.eval_steps, config.max_steps
    for step in config.report.steps or ():
        if step > last:
            raise ConfigError(
                f"report.steps names {step}, beyond max_steps={last}: use steps up to {last}, or "
                "report.steps=null for every evaluation"
            )
        if step < last and step % every:
            raise ConfigError(
                f"report.steps names {step}, but eval_steps={every} never evaluates there: use "
                "multiples of eval_steps"
            )


def _check_eval(config: TrainConfig) -> None:
    if config.dataset.test_size == 1:
        raise ConfigError(
            f"dataset.test_size={config.dataset.test_size}: a paired interval needs at least 2"
        )
    positive(config.eval, "num_generations", prefix="eval.")
    if not config.eval.decoding:
        raise ConfigError("eval.decoding=[] evaluates nothing: use [sampled], [greedy] or both")
    for name in config.eval.decoding:
        one_of("eval.decoding", name, DECODINGS)
    distinct("eval.decoding", config.eval.decoding)
    if config.eval.num_generations > 1 and "sampled" not in config.eval.decoding:
        raise ConfigError(
            f"eval.num_generations={config.eval.num_generations} samples, but eval.decoding="
            f"{config.eval.decoding}: use [sampled,greedy], or eval.num_generations=1"
        )
