"""Schema of `train` and the checks that involve several fields.

Every error is one line that gives the values and the fix.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from grpo_ustat.config.baseline import (
    BaselineConfig,
    check_group_size,
    check_options,
    check_shape,
    load_baseline,
)
from grpo_ustat.config.common import Common, LaunchConfig
from grpo_ustat.config.objective import ObjectiveConfig
from grpo_ustat.config.parts import SamplerOptions
from grpo_ustat.config.reward_funcs import check_several
from grpo_ustat.config.rollout import RolloutConfig
from grpo_ustat.config.schema import ConfigError, check_positive, field, node

# Inputs of baselines that are computed from budget.value_completions.
FROM_FRESH_COMPLETIONS = {"value_P", "optimal_P", "tracker_P"}
ENDLESS_SCHEDULES = ("constant", "constant_with_warmup", "inverse_sqrt")
ENDING_SCHEDULES = ("linear", "cosine")
OPTIMIZERS = ("adamw", "sgd")
DECODINGS = ("sampled", "greedy")
DEVICES = ("cpu", "cuda")
# Names of the files in launch/accelerate/.
SHARINGS = ("ddp", "fsdp2")


@dataclass
class OptimizerConfig:
    """Optimizer: adamw (Loshchilov & Hutter 2019) or plain sgd."""

    name: str = field("algorithm of the optimizer", choices=OPTIMIZERS)
    weight_decay: float = field(
        "weight decay of AdamW, as a share of the weights per unit of learning rate", at_least=0
    )
    beta1: float = field("decay of AdamW's mean of gradients; sgd has none", at_least=0, below=1)
    beta2: float = field(
        "decay of AdamW's mean of squared gradients; sgd has none", at_least=0, below=1
    )


@dataclass
class ScheduleConfig:
    """Schedule of the learning rate; decaying schedules end at max_steps."""

    lr_scheduler_type: str = field(
        "schedule of the learning rate, by transformers' name; linear and cosine fall to 0 at "
        "max_steps",
        choices=ENDLESS_SCHEDULES + ENDING_SCHEDULES,
    )
    warmup_steps: int = field("of linear warm-up", "steps", at_least=0)

    def check(self) -> None:
        """Refuse warm-up steps in a schedule without warm-up."""
        if self.lr_scheduler_type == "constant" and self.warmup_steps:
            raise ConfigError(
                f"schedule.warmup_steps={self.warmup_steps} with lr_scheduler_type=constant has no "
                "effect: use constant_with_warmup"
            )


@dataclass
class LoraConfig:
    """LoRA adapters of PEFT."""

    r: int = field("rank of the adapters; 0: none, all parameters are trained", at_least=0)
    lora_alpha: float | None = field(
        "scale of the adapters, which are multiplied by lora_alpha / r; null: no adapters",
        positive=True,
    )
    target_modules: str | None = field("layers with adapters, by PEFT's name; null: no adapters")

    def check(self) -> None:
        """Refuse an incomplete description of adapters."""
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
        "ways of decoding; each gives a row of eval.csv", choices=DECODINGS, distinct=True
    )
    num_generations: int = field(
        "sampled for each test question, for pass@k with k = 1, 2, 4 ... up to this number",
        "completions",
        positive=True,
    )

    def check(self) -> None:
        """Refuse an evaluation without decoding, or with samples but without sampled decoding."""
        if not self.decoding:
            raise ConfigError("eval.decoding=[] evaluates nothing: use [sampled], [greedy] or both")
        if self.num_generations > 1 and "sampled" not in self.decoding:
            raise ConfigError(
                f"eval.num_generations={self.num_generations} samples, but eval.decoding="
                f"{self.decoding}: use [sampled,greedy], or eval.num_generations=1"
            )


@dataclass
class MonitorConfig:
    """Estimates of gradient error from the rollouts of a training step."""

    gradient_mse_every: int = field(
        "between estimates of C1, C2, C3 and G*; 0: never", "steps", at_least=0
    )
    gradient_sketch: int = field("kept of each prompt's gradient for these estimates", "numbers")

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
                f"monitor.gradient_mse_every={interval} with group_size={group_size}: C3 needs at "
                "least 3 completions a group"
            )
        if prompts < 4:
            raise ConfigError(
                f"monitor.gradient_mse_every={interval} with {prompts} prompts a step "
                "(budget.rollouts / group_size): intervals over prompts need at least 4"
            )


@dataclass
class TrainBudget:
    """Numbers of completions that a step samples."""

    rollouts: int = field("of a step: n = prompts x group_size", "completions", positive=True)
    value_completions: int = field(
        "sampled for each prompt in addition to rollouts, for V (oracle), b* (optimal) or the "
        "start of a tracker (spo); they count as cost",
        "completions",
    )


@dataclass
class TrainLaunch(LaunchConfig):
    """Processes and devices of training."""

    device: str = field("processor; each rank on cuda takes a GPU", choices=DEVICES)
    accelerate: str | None = field(
        "how ranks share a policy, a file of grpo_ustat/launch/accelerate/; null: the choice of "
        "accelerate launch, else ddp",
        choices=SHARINGS,
    )


@dataclass
class TrainConfig(Common):
    """Configuration of `grpo-ustat train`."""

    launch: TrainLaunch = node(  # pyright: ignore[reportIncompatibleVariableOverride]  # narrower
        TrainLaunch, "processes and devices; none of it changes results"
    )
    baseline: BaselineConfig = node(
        BaselineConfig, "the baseline that turns rewards into advantages"
    )
    objective: ObjectiveConfig = node(
        ObjectiveConfig, "how advantages and log-probabilities become a gradient"
    )
    optimizer: OptimizerConfig = node(OptimizerConfig, "the optimizer and its constants")
    schedule: ScheduleConfig = node(ScheduleConfig, "the schedule of the learning rate")
    lora: LoraConfig = node(LoraConfig, "adapters (PEFT) in place of training all parameters")
    rollout: RolloutConfig = node(RolloutConfig, "the engine that writes completions")
    eval: EvalConfig = node(EvalConfig, "the evaluation on held-out questions")
    monitor: MonitorConfig = node(MonitorConfig, "estimates of the error of training's gradients")
    budget: TrainBudget = node(TrainBudget, "completions of a step")
    group_size: int = field("in a group, G: TRL's num_generations", "completions", positive=True)
    learning_rate: float = field(
        "learning rate of the optimizer, at the maximum of the schedule", positive=True
    )
    max_grad_norm: float | None = field(
        "largest norm of a gradient; a longer one is scaled to it; null: no limit", positive=True
    )
    max_steps: int = field(
        "of training; a larger number continues a finished run", "steps", positive=True
    )
    eval_steps: int = field("between evaluations", "steps", positive=True)
    save_steps: int = field("between checkpoints", "steps", positive=True)
    save_total_limit: int | None = field(
        "to keep, the newest; null: all", "checkpoints", positive=True
    )
    log_completions: int = field(
        "of each step kept in completions.parquet", "completions", at_least=0
    )
    bf16: bool = field("compute in bfloat16 over float32 weights, in sampling and in updates")
    gradient_checkpointing: bool = field(
        "compute layers again in the backward pass instead of storing them; changes memory and "
        "speed only"
    )
    share_prompts: bool = field("read a prompt once for its group, in updates too (not with FSDP2)")
    micro_batch_tokens: int = field(
        "of a backward pass, padding included; changes memory and speed only",
        "tokens",
        positive=True,
    )

    @property
    def run_name(self) -> str:
        """Name of the run, from the model, the data and the algorithm."""
        words = (self.model.name, self.dataset.name, self.objective.name, self.baseline.name)
        return f"{'-'.join(words)}-G={self.group_size}-n={self.budget.rollouts}"

    @property
    def plan(self) -> str:
        """Sentence with policy, algorithm, rollouts per step, steps and learning rate."""
        reward = f", reward {self.rewards_plan}" if self.rewards_plan else ""
        return (
            f"train: {self.model.name} on {self.dataset.name}; {self.objective.name} with "
            f"{self.baseline.name}, {self.max_steps} steps of {self.prompts_per_step} prompts x "
            f"{self.group_size} completions{reward}, {self.optimizer.name} at "
            f"{self.learning_rate:g}, seed {self.seed}"
        )

    @property
    def sampler_options(self) -> SamplerOptions:
        """Options of sampling completions."""
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
                "model.dtype=float16 in training: AdamW's steps underflow in it; use bf16=true, or "
                "model.dtype=float32"
            )
        if self.bf16 and self.model.dtype != "float32":
            raise ConfigError(
                f"bf16=true computes in bfloat16 over float32 weights, but model.dtype="
                f"{self.model.dtype}: use model.dtype=float32, or bf16=false"
            )
        if self.dataset.test_size == 1:
            raise ConfigError("dataset.test_size=1: a paired interval needs at least 2")
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
                    f"report.steps contains {step}, which exceeds max_steps={self.max_steps}: use "
                    f"steps up to {self.max_steps}, or report.steps=null for every evaluation"
                )
            if step < self.max_steps and step % self.eval_steps:
                raise ConfigError(
                    f"report.steps contains {step}, at which eval_steps={self.eval_steps} does not "
                    "evaluate: use multiples of eval_steps"
                )

    def _check_batch(self) -> None:
        """Refuse invalid options of a baseline and a batch that does not suit the baseline."""
        baseline = load_baseline("baseline.name", self.baseline.name)
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
                f"{self.prompts_per_step} prompts a step (budget.rollouts / group_size) but "
                f"dataset.train_size={self.dataset.train_size}: raise group_size or train_size"
            )
