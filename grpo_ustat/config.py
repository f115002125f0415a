"""Typed schemas of both entrypoints, and the checks that span several fields.

Values live in `conf/`; there is no default here. Nothing in this file imports torch, so a wrong
configuration is refused before anything slow happens.
"""

from __future__ import annotations

import re
from dataclasses import asdict, dataclass, field, fields
from typing import Any

from omegaconf import MISSING, OmegaConf
from omegaconf.errors import MissingMandatoryValue, OmegaConfBaseException

from grpo_ustat.checks import ConfigError, check_logger, one_of, positive
from grpo_ustat.data_config import DATASETS, DatasetConfig, ModelConfig, PromptConfig
from grpo_ustat.secrecy import check_no_secrets
from grpo_ustat.study_checks import check_study
from grpo_ustat.train_checks import check_train


@dataclass
class BaselineConfig:
    """The rule that turns rewards into advantages, and the values of exactly its options."""

    name: str = MISSING
    options: dict[str, float] = MISSING


@dataclass
class OptimizerConfig:
    """adamw (Loshchilov & Hutter 2019) or sgd, plain."""

    name: str = MISSING
    weight_decay: float = MISSING
    beta1: float = MISSING
    beta2: float = MISSING


@dataclass
class ScheduleConfig:
    """lr_scheduler_type: a name of `transformers.get_scheduler`; warmup_steps: of a linear rise.
    Those that fall towards an end take it from max_steps.
    """

    lr_scheduler_type: str = MISSING
    warmup_steps: int = MISSING


@dataclass
class ObjectiveConfig:
    """How advantages and log-probabilities become a gradient; formulas in training/objective.py.

    importance_sampling_level: none, token, sequence (geometric mean of its tokens' ratios) or
    whole_sequence (their product). loss_type: what divides the sum over tokens: sum, dr_grpo, dapo
    or grpo. num_iterations: passes over a batch; minibatch_size: rollouts per update, null: all.
    epsilon, epsilon_high: clip ratios to [1 - epsilon, 1 + epsilon_high], null: not.
    beta: coefficient of the penalty kl_estimator (k1, k2, k3), kl_in: loss or reward.
    """

    name: str = MISSING
    importance_sampling_level: str = MISSING
    loss_type: str = MISSING
    num_iterations: int = MISSING
    minibatch_size: int | None = MISSING
    epsilon: float | None = MISSING
    epsilon_high: float | None = MISSING
    beta: float = MISSING
    kl_estimator: str | None = MISSING
    kl_in: str | None = MISSING
    entropy_coef: float = MISSING


@dataclass
class LoraConfig:
    """Adapters of rank r on target_modules (PEFT); r = 0: all parameters are trained."""

    r: int = MISSING
    lora_alpha: float | None = MISSING
    target_modules: str | None = MISSING


@dataclass
class RolloutConfig:
    """What writes completions: `local` (in process) or `vllm`, whose fields are null for local."""

    name: str = MISSING
    gpu_memory_utilization: float | None = MISSING
    max_model_len: int | None = MISSING
    enforce_eager: bool | None = MISSING


@dataclass
class EvalConfig:
    """decoding: any of sampled, greedy. num_generations: sampled completions of each test question;
    pass@k for k = 1, 2, 4 ... up to it.
    """

    decoding: list[str] = MISSING
    num_generations: int = MISSING


@dataclass
class MonitorConfig:
    """gradient_mse_every: steps between estimates of C1, C2, C3 and G* from the step's own
    rollouts; 0: never. gradient_sketch: numbers kept of every prompt's gradient for them.
    """

    gradient_mse_every: int = MISSING
    gradient_sketch: int = MISSING


@dataclass
class TrainBudget:
    """rollouts: completions per step, n = prompts x group_size. value_completions: fresh ones per
    prompt behind V (oracle), b* (optimal) or the start of a tracker (spo), outside `rollouts` but
    counted as cost.
    """

    rollouts: int = MISSING
    value_completions: int = MISSING


@dataclass
class StudyBudget:
    """Completions per question: `pool_completions` for closed_form and replay, at most
    `max_pool_completions` where target_halfwidth asks for more; for monte_carlo `replicates`
    groups of the largest size, `reference_completions` in `reference_blocks` independent blocks
    behind the reference gradient, `value_completions` behind V (oracle), b* (optimal) and the
    running mean. replay_draws: groups drawn from each pool for replay. feature_sketch,
    gradient_sketch: numbers kept of every completion's score and of every question's gradient;
    models with no more parameters are kept in full.
    """

    pool_completions: int = MISSING
    max_pool_completions: int = MISSING
    replay_draws: int = MISSING
    feature_sketch: int = MISSING
    gradient_sketch: int = MISSING
    replicates: int = MISSING
    reference_completions: int = MISSING
    reference_blocks: int = MISSING
    value_completions: int = MISSING


@dataclass
class StudyConfig:
    """methods: any of closed_form, replay, monte_carlo. interval: `completions` (conditional on
    the questions) or `questions` (as a sample of questions). questions: the first so many, null:
    all. settings: how questions are drawn, any of all_questions_once, with_replacement,
    without_replacement, one_question; num_prompts: B of the two middle ones. part: null, or `k/n`:
    fill the k-th of n parts of the pool and end.
    """

    methods: list[str] = MISSING
    settings: list[str] = MISSING
    num_prompts: list[int] = MISSING
    interval: str = MISSING
    questions: int | None = MISSING
    part: str | None = MISSING

    @property
    def share(self) -> tuple[int, int]:
        """(k, n) of `part`, (1, 1) without; (0, 0) where it is not of the form k/n."""
        found = re.fullmatch(r"(\d+)/(\d+)", "1/1" if self.part is None else self.part)
        return (int(found[1]), int(found[2])) if found else (0, 0)


@dataclass
class LaunchConfig:
    """num_threads: OpenMP threads of a process. device: `cpu`, `cuda`, `cuda:1` ...
    judge_workers: processes beside each that judge answers which need it.
    num_processes: ranks that this command starts by torchrun on this machine; 1: it is the run.
    grace_seconds: that ranks have to save after a signal, before they are killed.
    """

    num_threads: int = MISSING
    device: str = MISSING
    judge_workers: int = MISSING
    num_processes: int = MISSING
    grace_seconds: int = MISSING


@dataclass
class TrainLaunch(LaunchConfig):
    """accelerate: how ranks share a policy, a file of grpo_ustat/launch/accelerate/ by name; null:
    what `accelerate launch` was told, else ddp.
    """

    accelerate: str | None = MISSING


@dataclass
class StudyLaunch(LaunchConfig):
    """workers: processes that share a study's questions."""

    workers: int = MISSING


@dataclass
class LoggerConfig:
    """A tracker that mirrors the run folder, from a process of its own: none, wandb, tensorboard or
    trackio. project: of the run there. finish_seconds: that a run which ends waits for it at most.
    Keys and addresses come from the tracker's own environment variables.
    """

    name: str = MISSING
    project: str | None = MISSING
    finish_seconds: float = MISSING


@dataclass
class ReportConfig:
    """What a sweep leaves beside its runs: table and figure in outputs/<entry>/<name>, name null:
    nothing. steps: at which accuracy is drawn, null: at every evaluation.
    """

    name: str | None = MISSING
    steps: list[int] | None = MISSING


@dataclass
class Common:
    """Fields of both entrypoints. dry_run: print what would run and what it costs, and end.
    show_prompts: print so many prompts and how their answers are read, and end; 0: run.
    """

    model: ModelConfig = field(default_factory=ModelConfig)
    dataset: Any = MISSING  # a DatasetConfig, of the class that its kind names
    prompt: PromptConfig = field(default_factory=PromptConfig)
    launch: LaunchConfig = field(default_factory=LaunchConfig)
    seed: int = MISSING
    temperature: float = MISSING
    top_p: float = MISSING
    top_k: int = MISSING
    max_completion_length: int = MISSING
    rollout_batch_size: int = MISSING
    on_existing: str = MISSING
    dry_run: bool = MISSING
    show_prompts: int = MISSING
    report: ReportConfig = field(default_factory=ReportConfig)
    logger: LoggerConfig = field(default_factory=LoggerConfig)

    def check(self) -> None:
        """Refuse what cannot be run.

        Raises:
            ConfigError: naming the values and the fix.
        """
        positive(self, "temperature", "max_completion_length", "rollout_batch_size")
        positive(
            self.launch,
            *("num_threads", "judge_workers", "num_processes", "grace_seconds"),
            prefix="launch.",
        )
        one_of("on_existing", self.on_existing, ("resume", "error", "overwrite"))
        if (self.top_p, self.top_k) != (1.0, 0):
            raise ConfigError(
                f"top_p={self.top_p} top_k={self.top_k} would sample from another distribution "
                "than the one whose gradient is taken: use top_p=1.0 top_k=0"
            )
        if self.report.name is not None and not re.fullmatch(r"[\w.-]+", self.report.name):
            raise ConfigError(f"report.name={self.report.name!r}: use letters, digits, . _ -")
        check_no_secrets(asdict(self))
        check_logger(self.logger, needed=not (self.dry_run or self.show_prompts))
        self.dataset.check()
        self.prompt.check()
        self._check_box()
        self.model.check(cached=not self.dry_run)

    def _check_box(self) -> None:
        """MATH's judge reads boxes; where the prompt asks for none, all obedient replies lose."""
        prompt = self.prompt
        if self.dataset.kind != "math" or self.dataset.reward is not None or prompt.shots:
            return
        if "boxed" not in f"{prompt.system} {prompt.template}":
            raise ConfigError(
                f"dataset={self.dataset.name} reads answers in \\boxed{{}}, for which "
                f"prompt={prompt.name} does not ask: use prompt=qwen_math_cot, prompt=chat_boxed, "
                "or a template that asks for it"
            )


@dataclass
class MseConfig(Common):
    """What `python -m grpo_ustat.mse` runs."""

    launch: StudyLaunch = field(default_factory=StudyLaunch)
    study: StudyConfig = field(default_factory=StudyConfig)
    budget: StudyBudget = field(default_factory=StudyBudget)
    rules: dict[str, BaselineConfig] = field(default_factory=dict)
    baselines: list[str] = MISSING
    group_sizes: list[int] = MISSING
    target_halfwidth: float | None = MISSING
    pool: str | None = MISSING

    @property
    def run_name(self) -> str:
        """What was measured, in words."""
        data = "imported" if self.imports_pool else self.dataset.name
        return f"{self.model.name}-{data}-{'-'.join(self.study.methods)}"

    @property
    def fills_part(self) -> bool:
        """Whether only a part of the pool is asked for, which several jobs may fill at once."""
        return self.study.part is not None

    @property
    def imports_pool(self) -> bool:
        """Whether `pool` is a file of rollouts made elsewhere rather than a folder of our own."""
        return self.pool is not None and self.pool.endswith(".parquet")

    def check(self) -> None:
        """See `Common.check`."""
        super().check()
        check_study(self)


@dataclass
class TrainConfig(Common):
    """What `python -m grpo_ustat.train` runs."""

    launch: TrainLaunch = field(default_factory=TrainLaunch)
    baseline: BaselineConfig = field(default_factory=BaselineConfig)
    objective: ObjectiveConfig = field(default_factory=ObjectiveConfig)
    optimizer: OptimizerConfig = field(default_factory=OptimizerConfig)
    schedule: ScheduleConfig = field(default_factory=ScheduleConfig)
    lora: LoraConfig = field(default_factory=LoraConfig)
    rollout: RolloutConfig = field(default_factory=RolloutConfig)
    eval: EvalConfig = field(default_factory=EvalConfig)
    monitor: MonitorConfig = field(default_factory=MonitorConfig)
    budget: TrainBudget = field(default_factory=TrainBudget)
    group_size: int = MISSING
    learning_rate: float = MISSING
    max_grad_norm: float | None = MISSING
    max_steps: int = MISSING
    eval_steps: int = MISSING
    save_steps: int = MISSING
    save_total_limit: int | None = MISSING
    log_completions: int = MISSING
    bf16: bool = MISSING
    gradient_checkpointing: bool = MISSING
    share_prompts: bool = MISSING
    micro_batch_tokens: int = MISSING

    @property
    def run_name(self) -> str:
        """What is trained, in words."""
        words = (self.model.name, self.dataset.name, self.objective.name, self.baseline.name)
        return f"{'-'.join(words)}-G={self.group_size}-n={self.budget.rollouts}"

    @property
    def prompts_per_step(self) -> int:
        """P = n / G."""
        return self.budget.rollouts // self.group_size

    def check(self) -> None:
        """See `Common.check`."""
        super().check()
        check_train(self)


SCHEMAS = {"mse": MseConfig, "train": TrainConfig}


def typed(config: Any, schema: type) -> Any:
    """The composed configuration as a checked instance of its schema.

    Args:
        config: an OmegaConf node or a plain dictionary, without the `hydra` node.
        schema: `MseConfig` or `TrainConfig`.

    Raises:
        ConfigError: an unknown key, a wrong type, or a combination that cannot be run.
    """
    try:
        base = OmegaConf.structured(schema)
        base.dataset = _dataset_schema(config)
        result = OmegaConf.to_object(OmegaConf.merge(base, config))
    except MissingMandatoryValue as error:
        raise ConfigError(f"{error.full_key} has no value: set {error.full_key}=...") from error
    except OmegaConfBaseException as error:
        lines = [line.strip() for line in str(error).splitlines() if line.strip()]
        raise ConfigError("; ".join(lines[:2])) from error
    result.check()
    return result


def _dataset_schema(config: Any) -> type[DatasetConfig]:
    """The class that the data set's kind names."""
    asked = OmegaConf.create(config).dataset
    one_of("dataset.kind", asked.kind, tuple(DATASETS))
    schema = DATASETS[asked.kind]
    for name in set(asked) - {known.name for known in fields(schema)}:
        raise ConfigError(
            f"dataset.{name} means nothing to dataset.kind={asked.kind}: choose a data set as a "
            "whole, by dataset=NAME"
        )
    return schema
