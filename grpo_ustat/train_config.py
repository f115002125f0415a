"""Typed schemas of what only training knows; what is checked of them is in `train_checks`."""

from __future__ import annotations

from dataclasses import dataclass

from grpo_ustat.meanings import key
from grpo_ustat.train_checks import (
    DECODINGS,
    ENDING,
    ENDLESS,
    KL_ESTIMATORS,
    KL_PLACES,
    LEVELS,
    LOSS_TYPES,
    OBJECTIVES,
    OPTIMIZERS,
    ROLLOUTS,
)


@dataclass
class OptimizerConfig:
    """adamw (Loshchilov & Hutter 2019) or sgd, plain."""

    name: str = key("what turns gradients into steps", choices=OPTIMIZERS)
    weight_decay: float = key("AdamW's, as a share of the weights for each unit of learning rate")
    beta1: float = key("decay of AdamW's mean of gradients; sgd has none")
    beta2: float = key("decay of AdamW's mean of squared gradients; sgd has none")


@dataclass
class ScheduleConfig:
    """How the learning rate changes; schedules that fall towards an end take it from max_steps."""

    lr_scheduler_type: str = key(
        "of the learning rate, by transformers' name; linear and cosine fall to 0 at max_steps",
        choices=ENDLESS + ENDING,
    )
    warmup_steps: int = key("of a linear rise at the start", "steps")


@dataclass
class ObjectiveConfig:
    """How advantages and log-probabilities become a gradient; formulas in training/objective.py."""

    name: str = key("in the run folder's name; choose by objective=NAME", choices=OBJECTIVES)
    importance_sampling_level: str = key(
        "what the ratio to the sampling policy is of: none, each token, sequence (the geometric "
        "mean of its tokens' ratios), whole_sequence (their product)",
        choices=LEVELS,
    )
    loss_type: str = key(
        "what divides the sum over tokens: sum, the n completions of the update; dr_grpo, n x "
        "max_completion_length; dapo, all tokens of the update; grpo, n x each completion's own",
        choices=LOSS_TYPES,
    )
    num_iterations: int = key("over each batch", "passes")
    minibatch_size: int | None = key("of an update; null: the whole batch", "completions")
    epsilon: float | None = key("ratios are clipped below at 1 - epsilon; null: not")
    epsilon_high: float | None = key("ratios are clipped above at 1 + epsilon_high; null: not")
    beta: float = key("coefficient of the penalty for leaving the reference model")
    kl_estimator: str | None = key("of that penalty; null: none", choices=KL_ESTIMATORS)
    kl_in: str | None = key("where that penalty counts; null: nowhere", choices=KL_PLACES)
    entropy_coef: float = key("coefficient of the bonus for entropy")


@dataclass
class LoraConfig:
    """Adapters by PEFT."""

    r: int = key("rank of the adapters; 0: none, all parameters are trained")
    lora_alpha: float | None = key("adapters count by lora_alpha / r; null: none")
    target_modules: str | None = key("which layers get adapters, by PEFT's name; null: none")


@dataclass
class RolloutConfig:
    """What writes completions."""

    name: str = key("local: in this process; vllm: by vLLM in this process", choices=ROLLOUTS)
    gpu_memory_utilization: float | None = key(
        "share of the GPU's memory, or of all on a CPU, that vLLM may hold; null: its own choice"
    )
    max_model_len: int | None = key(
        "of prompt and completion that vLLM has room for; null: its own choice", "tokens"
    )
    enforce_eager: bool | None = key("vLLM without CUDA graphs; null: its own choice")


@dataclass
class EvalConfig:
    """How held-out questions are answered."""

    decoding: list[str] = key("one row of eval.csv for each", choices=DECODINGS)
    num_generations: int = key(
        "sampled of each test question, for pass@k with k = 1, 2, 4 ... up to it", "completions"
    )


@dataclass
class MonitorConfig:
    """How good the gradients are, from a step's own rollouts."""

    gradient_mse_every: int = key("between estimates of C1, C2, C3 and G*; 0: never", "steps")
    gradient_sketch: int = key("kept of each prompt's gradient for them", "numbers")


@dataclass
class TrainBudget:
    """What a step may sample."""

    rollouts: int = key("of a step: n = prompts x group_size", "completions")
    value_completions: int = key(
        "of each prompt, fresh ones, behind V (oracle), b* (optimal) or the start of a tracker "
        "(spo); outside rollouts but counted as cost",
        "completions",
    )
