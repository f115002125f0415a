"""Schema of `train`, with checks that involve several fields.

Every error message is one line that gives the values and the fix.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from grpo_ustat.config.baseline import (
    BaselineConfig,
    check_group_size,
    check_options,
    check_shape,
)
from grpo_ustat.config.common import Common, LaunchConfig
from grpo_ustat.config.objective import ObjectiveConfig
from grpo_ustat.config.own_functions import load_registered
from grpo_ustat.config.parts import SamplerOptions
from grpo_ustat.config.reward_funcs import check_several
from grpo_ustat.config.rollout import RolloutConfig
from grpo_ustat.config.schema import ConfigError, check_positive, field, node
from grpo_ustat.estimators.baselines import BASELINES

# Baseline inputs that are computed from additional completions; see `budget.value_completions`.
FROM_FRESH_COMPLETIONS = {"value_P", "optimal_P"}
ENDLESS_SCHEDULES = ("constant", "constant_with_warmup", "inverse_sqrt")
ENDING_SCHEDULES = ("linear", "cosine")
OPTIMIZERS = ("adamw", "sgd")
DECODINGS = ("sampled", "greedy")
DEVICES = ("cpu", "cuda")


@dataclass
class OptimizerConfig:
    """AdamW (Loshchilov & Hutter 2019) or plain SGD."""

    name: str = field("optimization algorithm", choices=OPTIMIZERS)
    weight_decay: float = field(
        "weight decay of AdamW: each step multiplies weights by 1 - learning rate x weight_decay",
        at_least=0,
    )
    beta1: float = field(
        "decay rate of AdamW's running mean of gradients; sgd ignores it", at_least=0, below=1
    )
    beta2: float = field(
        "decay rate of AdamW's running mean of squared gradients; sgd ignores it",
        at_least=0,
        below=1,
    )


@dataclass
class ScheduleConfig:
    """Learning rate schedule."""

    lr_scheduler_type: str = field(
        "learning rate schedule, as named in transformers; linear and cosine fall to 0 at "
        "max_steps",
        choices=ENDLESS_SCHEDULES + ENDING_SCHEDULES,
    )
    warmup_steps: int = field("of linear warm-up", "steps", at_least=0)

    def check(self) -> None:
        """Refuse warm-up steps if the schedule has no warm-up."""
        if self.lr_scheduler_type == "constant" and self.warmup_steps:
            raise ConfigError(
                f"schedule.warmup_steps={self.warmup_steps} has no effect with "
                "lr_scheduler_type=constant: use constant_with_warmup"
            )


@dataclass
class LoraConfig:
    """LoRA adapters of PEFT."""

    r: int = field("rank of the adapters; 0: no adapters, all parameters are trained", at_least=0)
    lora_alpha: float | None = field(
        "scale of the adapters, whose output is multiplied by lora_alpha / r; null: no adapters",
        positive=True,
    )
    target_modules: str | None = field(
        "layers with adapters, as specified in PEFT; null: no adapters"
    )

    def check(self) -> None:
        """Refuse an incomplete configuration of adapters."""
        options = [
            name for name in ("lora_alpha", "target_modules") if getattr(self, name) is not None
        ]
        if not self.r and options:
            raise ConfigError(f"lora.{options[0]} without adapters: set lora=r16 or lora.r=16")
        if self.r and len(options) < 2:
            raise ConfigError(
                f"lora.r={self.r} needs lora_alpha and target_modules: start from lora=r16"
            )


@dataclass
class EvalConfig:
    """Evaluation on held-out questions."""

    decoding: list[str] = field(
        "decoding methods; eval.csv gets a row for each method", choices=DECODINGS, distinct=True
    )
    num_generations: int = field(
        "sampled for each test question, from which pass@k is computed for k = 1, 2, 4 ... up to "
        "this number",
        "completions",
        positive=True,
    )

    def check(self) -> None:
        """Refuse an empty list of decodings, and several samples without sampled decoding."""
        if not self.decoding:
            raise ConfigError("eval.decoding=[] evaluates nothing: use [sampled], [greedy] or both")
        if self.num_generations > 1 and "sampled" not in self.decoding:
            raise ConfigError(
                f"eval.num_generations={self.num_generations} needs sampled decoding, but "
                f"eval.decoding={self.decoding}: use eval.decoding=[sampled,greedy], or "
                "eval.num_generations=1"
            )


@dataclass
class MonitorConfig:
    """Estimates of gradient error that are computed from a training step's rollouts."""

    gradient_mse_every: int = field(
        "between estimates of the gradient error (its constants C1, C2, C3) and of the best group "
        "size G*; 0: no estimates",
        "steps",
        at_least=0,
    )
    gradient_sketch: int = field(
        "to which each prompt's gradient is compressed for these estimates", "numbers"
    )

    def check(self, group_size: int, prompts: int) -> None:
        """Refuse too few completions or prompts for the estimates.

        Args:
            group_size: number of completions per prompt.
            prompts: number of prompts per step.
        """
        interval = self.gradient_mse_every
        if not interval:
            return
        check_positive(self, "gradient_sketch", prefix="monitor.")
        if group_size < 3:
            raise ConfigError(
                f"monitor.gradient_mse_every={interval} with group_size={group_size}: the estimate "
                "of C3 needs at least 3 completions per group"
            )
        if prompts < 4:
            raise ConfigError(
                f"monitor.gradient_mse_every={interval} with {prompts} prompts per step "
                "(budget.rollouts / group_size): intervals over prompts need at least 4 prompts"
            )


@dataclass
class TrainBudget:
    """Numbers of completions sampled per step."""

    rollouts: int = field("in a step: n = prompts x group_size", "completions", positive=True)
    value_completions: int = field(
        "sampled for each prompt in addition to rollouts, and counted in the cost; only two "
        "baselines use them: oracle for the prompt's value V, optimal for the best baseline b*",
        "completions",
    )


@dataclass
class TrainLaunch(LaunchConfig):
    """Processes and devices of training."""

    device: str = field("device; with cuda each rank uses its own GPU", choices=DEVICES)
    fsdp2: bool = field(
        "divide weights, gradients and the optimizer's state among the ranks (FSDP2); otherwise "
        "every rank stores all of them (DDP)"
    )


@dataclass
class TrainConfig(Common):
    """Configuration of `grpo-ustat train`."""

    launch: TrainLaunch = node(  # pyright: ignore[reportIncompatibleVariableOverride]  # narrower
        TrainLaunch, "processes and devices, which do not affect results"
    )
    baseline: BaselineConfig = node(
        BaselineConfig, "the baseline that turns rewards into advantages"
    )
    objective: ObjectiveConfig = node(
        ObjectiveConfig, "the loss, which turns advantages and log-probabilities into a gradient"
    )
    optimizer: OptimizerConfig = node(OptimizerConfig, "the optimizer and its parameters")
    schedule: ScheduleConfig = node(ScheduleConfig, "the learning rate schedule")
    lora: LoraConfig = node(LoraConfig, "adapters (PEFT) to train instead of all parameters")
    rollout: RolloutConfig = node(RolloutConfig, "the engine that generates completions")
    eval: EvalConfig = node(EvalConfig, "the evaluation on held-out questions")
    monitor: MonitorConfig = node(MonitorConfig, "estimates of the gradient error during training")
    budget: TrainBudget = node(TrainBudget, "numbers of completions per step")
    group_size: int = field("in a group, G; num_generations in TRL", "completions", positive=True)
    learning_rate: float = field("learning rate at the schedule's maximum", positive=True)
    max_grad_norm: float | None = field(
        "gradient norm above which gradients are scaled down to this norm; null: no limit",
        positive=True,
    )
    max_steps: int = field(
        "of training; increase this number to continue a finished run", "steps", positive=True
    )
    eval_steps: int = field("between evaluations", "steps", positive=True)
    save_steps: int = field("between checkpoints", "steps", positive=True)
    save_total_limit: int | None = field(
        "to keep (the newest); null: all", "checkpoints", positive=True
    )
    log_completions: int = field(
        "of each step to keep in completions.parquet", "completions", at_least=0
    )
    bf16: bool = field("compute in bfloat16 with float32 weights, in sampling and in updates")
    gradient_checkpointing: bool = field(
        "recompute activations in the backward pass instead of storing them; affects only memory "
        "and speed"
    )
    share_prompts: bool = field(
        "process each prompt only once for all completions of its group, also in updates (not "
        "with FSDP2)"
    )
    micro_batch_tokens: int = field(
        "allowed in a backward pass, including padding; affects only memory and speed",
        "tokens",
        positive=True,
    )

    @property
    def run_name(self) -> str:
        """Name of the run, made from the names of the model, the data and the algorithm."""
        words = (self.model.name, self.dataset.name, self.objective.name, self.baseline.name)
        return f"{'-'.join(words)}-G={self.group_size}-n={self.budget.rollouts}"

    @property
    def plan(self) -> str:
        """Summary of the policy, algorithm, rollouts per step, steps and learning rate."""
        reward = f", reward {self.rewards_plan}" if self.rewards_plan else ""
        return (
            f"train: {self.model.name} on {self.dataset.name}; {self.objective.name} with "
            f"{self.baseline.name}, {self.max_steps} steps of {self.prompts_per_step} prompts with "
            f"{self.group_size} completions each{reward}, {self.optimizer.name} with learning rate "
            f"{self.learning_rate:g}, seed {self.seed}"
        )

    @property
    def sampler_options(self) -> SamplerOptions:
        """Options for sampling completions."""
        return self.sampling_by(self.rollout)

    @property
    def prompts_per_step(self) -> int:
        """Number of prompts per step, P = n / G."""
        return self.budget.rollouts // self.group_size

    def check(self) -> None:
        """Refuse a training run that cannot work."""
        if self.launch.device.startswith("cuda:"):
            raise ConfigError(
                f"launch.device={self.launch.device}: the launcher chooses the GPU for training; "
                "use launch.device=cuda and CUDA_VISIBLE_DEVICES"
            )
        super().check()
        if self.model.dtype == "float16":
            raise ConfigError(
                "model.dtype=float16 in training: AdamW's steps underflow in float16; use "
                "bf16=true, or model.dtype=float32"
            )
        if self.bf16 and self.model.dtype != "float32":
            raise ConfigError(
                "bf16=true computes in bfloat16 with float32 weights, but "
                f"model.dtype={self.model.dtype}: use model.dtype=float32, or bf16=false"
            )
        if self.dataset.test_size == 1:
            raise ConfigError("dataset.test_size=1: a paired interval needs at least 2 questions")
        self._check_batch()
        self.objective.check()
        self.objective.check_updates(self.group_size, self.budget.rollouts)
        self.schedule.check()
        self.lora.check()
        self.rollout.check()
        self.eval.check()
        self.monitor.check(self.group_size, self.prompts_per_step)
        for step in self.report.steps or ():
            if step > self.max_steps:
                raise ConfigError(
                    f"report.steps contains {step}, which exceeds max_steps={self.max_steps}: "
                    f"use steps up to {self.max_steps}, or report.steps=null for all evaluations"
                )
            if step < self.max_steps and step % self.eval_steps:
                raise ConfigError(
                    f"report.steps contains {step}, which is not a multiple of "
                    f"eval_steps={self.eval_steps}: there is no evaluation at this step, use "
                    "multiples of eval_steps"
                )

    def _check_batch(self) -> None:
        """Refuse invalid options of the baseline, and batches that the baseline cannot use."""
        baseline = load_registered(BASELINES, "baseline.name", self.baseline.name)
        check_options(self.baseline, "baseline.options")
        check_several(baseline.name, "baseline", self.reward_funcs)
        if (
            "rewards_PGF" in baseline.needs
            and self.objective.beta
            and self.objective.kl_in == "reward"
        ):
            raise ConfigError(
                f"objective.kl_in=reward with baseline={baseline.name}, which normalises each "
                "reward function separately and therefore ignores the penalty: use "
                "objective.kl_estimator=k3 objective.kl_in=loss"
            )
        check_group_size(baseline.name, self.group_size)
        rollouts, size = self.budget.rollouts, self.group_size
        if rollouts < size or rollouts % size:
            near = [n for n in (rollouts // size * size, (rollouts // size + 1) * size) if n > 0]
            raise ConfigError(
                f"budget.rollouts={rollouts} is not a multiple of group_size={size}: "
                f"use budget.rollouts={' or '.join(map(str, near))}, or another group_size"
            )
        if baseline.needs & FROM_FRESH_COMPLETIONS:
            check_positive(self.budget, "value_completions", prefix="budget.")
        check_shape(baseline.name, self.prompts_per_step, size, "budget.rollouts")
        if self.dataset.kind == "jsonl" and not self.show_prompts:
            self.dataset.check_training(self.prompts_per_step)
        if self.prompts_per_step > (self.dataset.train_size or math.inf):
            raise ConfigError(
                f"each step needs {self.prompts_per_step} prompts (budget.rollouts / group_size), "
                f"but dataset.train_size={self.dataset.train_size}: raise group_size or train_size"
            )
