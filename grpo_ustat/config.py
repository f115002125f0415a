"""Typed schemas of the entrypoints, and the checks that span several fields.

Values live in `conf/`; there is no default here. Nothing in this file imports torch, so a wrong
configuration is refused before anything slow happens.
"""

from __future__ import annotations

from dataclasses import dataclass, fields
from typing import Any, get_type_hints

from omegaconf import OmegaConf
from omegaconf.errors import MissingMandatoryValue, OmegaConfBaseException

from grpo_ustat.checks import OPTIONS, ConfigError, one_of, positive
from grpo_ustat.data_config import DATASETS
from grpo_ustat.estimators.baselines import BASELINES, own_rules
from grpo_ustat.gap_config import BEDS, STUDIES, GapConfig
from grpo_ustat.meanings import key, part
from grpo_ustat.model_config import ModelConfig, PromptConfig
from grpo_ustat.run_config import ProcessConfig, Shared, check_report_name
from grpo_ustat.study_checks import check_study
from grpo_ustat.study_config import StudyBudget, StudyConfig
from grpo_ustat.train_checks import DEVICES, check_train
from grpo_ustat.train_config import (
    EvalConfig,
    LoraConfig,
    MonitorConfig,
    ObjectiveConfig,
    OptimizerConfig,
    RolloutConfig,
    ScheduleConfig,
    TrainBudget,
)

OF_KIND = {"dataset": DATASETS, "bed": BEDS, "study": STUDIES}  # nodes whose kind has a schema
WORDS = {"dataset": "data set", "bed": "bed", "study": "study"}
SHARINGS = ("ddp", "deepspeed", "fsdp2")  # the files of launch/accelerate/
STUDIED = tuple(name for name, rule in BASELINES.items() if not rule.only_trains)


@dataclass
class BaselineConfig:
    """The rule that turns rewards into advantages, and the values of exactly its options."""

    name: str = key("of the rule; choose by baseline=NAME", choices=tuple(BASELINES))
    options: dict[str, float] = key("of the rule, exactly those that it takes", entries=OPTIONS)


@dataclass
class LaunchConfig(ProcessConfig):
    """Processes and devices; none of it changes results."""

    num_threads: int = key("of OpenMP, in each process", "threads")
    device: str = key("cpu, cuda, cuda:1 ...")
    judge_workers: int = key(
        "beside each one, which judge answers that need it, such as MATH's", "processes"
    )


@dataclass
class TrainLaunch(LaunchConfig):
    """As `LaunchConfig`, of training."""

    device: str = key("which processor; ranks on cuda take a GPU each", choices=DEVICES)
    accelerate: str | None = key(
        "how ranks share a policy, a file of grpo_ustat/launch/accelerate/; null: what accelerate "
        "launch was told, else ddp",
        choices=SHARINGS,
    )


@dataclass
class StudyLaunch(LaunchConfig):
    """As `LaunchConfig`, of studies."""

    workers: int = key(
        "that share the questions, with the same results; under torchrun its ranks do", "processes"
    )


@dataclass
class Common(Shared):
    """Fields of the entrypoints that have a model and questions."""

    model: ModelConfig = part(ModelConfig, "the policy")
    dataset: Any = key("the questions; fields of other kinds of data sets: dataset=NAME --help")
    prompt: PromptConfig = part(PromptConfig, "how a question is put to the model")
    launch: LaunchConfig = part(LaunchConfig, "processes and devices; none of it changes results")
    temperature: float = key("divides the logits, in sampling and in scoring alike")
    top_p: float = key("must stay 1: what is sampled is what is scored")
    top_k: int = key("must stay 0: what is sampled is what is scored")
    max_completion_length: int = key("of a completion; longer ones are cut and counted", "tokens")
    rollout_batch_size: int = key("written side by side: memory and speed only", "completions")
    show_prompts: int = key(
        "to print, with how their answers are read, instead of a run; 0: run", "prompts"
    )

    def check(self) -> None:
        """See `Shared.check`."""
        super().check()
        positive(self, "temperature", "max_completion_length", "rollout_batch_size")
        positive(self.launch, "num_threads", "judge_workers", prefix="launch.")
        if (self.top_p, self.top_k) != (1.0, 0):
            raise ConfigError(
                f"top_p={self.top_p} top_k={self.top_k} would sample from another distribution "
                "than the one whose gradient is taken: use top_p=1.0 top_k=0"
            )
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

    launch: StudyLaunch = part(StudyLaunch, "processes and devices; none of it changes results")
    study: StudyConfig = part(StudyConfig, "what is measured, and how")
    budget: StudyBudget = part(StudyBudget, "how many completions stand behind each number")
    rules: dict[str, BaselineConfig] = key("the options of each baseline", factory=dict)
    baselines: list[str] = key(
        "the rules to compare, with their options under rules", choices=STUDIED
    )
    group_sizes: list[int] = key("in a group, every G of the curves", "completions")
    target_halfwidth: float | None = key(
        "such as 0.05: add completions until every curve's 95 % interval is +-5 %; null: do not"
    )
    pool: str | None = key(
        "a folder of scored completions to reuse and extend, or a Parquet file of rollouts made "
        "elsewhere; null: in the run folder"
    )

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

    launch: TrainLaunch = part(TrainLaunch, "processes and devices; none of it changes results")
    baseline: BaselineConfig = part(BaselineConfig, "the rule that turns rewards into advantages")
    objective: ObjectiveConfig = part(
        ObjectiveConfig, "how advantages and log-probabilities become a gradient"
    )
    optimizer: OptimizerConfig = part(OptimizerConfig, "what turns gradients into steps")
    schedule: ScheduleConfig = part(ScheduleConfig, "how the learning rate changes")
    lora: LoraConfig = part(LoraConfig, "adapters (PEFT) in place of training all parameters")
    rollout: RolloutConfig = part(RolloutConfig, "what writes completions")
    eval: EvalConfig = part(EvalConfig, "how held-out questions are answered")
    monitor: MonitorConfig = part(MonitorConfig, "how good the gradients of training are")
    budget: TrainBudget = part(TrainBudget, "what a step may sample")
    group_size: int = key("in a group, G: TRL's num_generations", "completions")
    learning_rate: float = key("of the optimizer, at the schedule's highest")
    max_grad_norm: float | None = key("longer gradients are shortened to this norm; null: never")
    max_steps: int = key("of training; a larger number goes on", "steps")
    eval_steps: int = key("between evaluations", "steps")
    save_steps: int = key("between checkpoints", "steps")
    save_total_limit: int | None = key("kept, the newest; null: all", "checkpoints")
    log_completions: int = key("of each step kept in completions.parquet", "completions")
    bf16: bool = key("compute in bfloat16 over float32 weights, in sampling and updates alike")
    gradient_checkpointing: bool = key("compute layers again in place of keeping them: memory only")
    share_prompts: bool = key("read a prompt once per group in updates too (not with FSDP2)")
    micro_batch_tokens: int = key("of a backward pass, padding included: memory only", "tokens")

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


@dataclass
class ReportEntry:
    """What `python -m grpo_ustat.report` shows."""

    runs: Any = key("folders of runs, or patterns of them: one, or a list")
    name: str = key("of the report's folder")
    steps: list[int] | None = key("at which accuracy is shown; null: at every evaluation", "steps")

    @property
    def patterns(self) -> list[str]:
        """`runs` as a list."""
        return self.runs if isinstance(self.runs, list) else [self.runs]

    def check(self) -> None:
        """Refuse what is no list of folders.

        Raises:
            ConfigError: naming the value.
        """
        if not self.patterns or not all(x and isinstance(x, str) for x in self.patterns):
            raise ConfigError(f"runs={self.runs}: name folders, such as runs=outputs/train")
        check_report_name("name", self.name)


SCHEMAS = {"mse": MseConfig, "train": TrainConfig, "gap": GapConfig, "report": ReportEntry}


def typed(config: Any, schema: type) -> Any:
    """The composed configuration as a checked instance of its schema.

    Args:
        config: an OmegaConf node or a plain dictionary, without the `hydra` node.
        schema: one of `SCHEMAS`.

    Raises:
        ConfigError: an unknown key, a wrong type, or a combination that cannot be run.
    """
    try:
        base = OmegaConf.structured(schema)
        for node in kinds_of(schema):
            base[node] = _of_kind(config, node, OF_KIND[node])
        result = OmegaConf.to_object(OmegaConf.merge(base, config))
        if isinstance(result, MseConfig):
            _add_own_rules(result)
    except MissingMandatoryValue as error:
        raise ConfigError(f"{error.full_key} has no value: set {error.full_key}=...") from error
    except OmegaConfBaseException as error:
        lines = [line.strip() for line in str(error).splitlines() if line.strip()]
        raise ConfigError("; ".join(lines[:2])) from error
    result.check()
    return result


def _add_own_rules(config: MseConfig) -> None:
    """Baselines of installed packages need no entry in `conf/`, unless they have options."""
    for name in own_rules(config.baselines):
        config.rules.setdefault(name, BaselineConfig(name=name, options={}))


def kinds_of(schema: type) -> dict[str, dict[str, type]]:
    """The nodes of a schema that are typed by their kind, with the schema of each.

    >>> list(kinds_of(TrainConfig)), list(kinds_of(GapConfig))
    (['dataset'], ['bed', 'study'])
    """
    hints = get_type_hints(schema)
    return {node: kinds for node, kinds in OF_KIND.items() if hints.get(node) is Any}


def _of_kind(config: Any, node: str, schemas: dict[str, type]) -> type:
    """The class that a node's kind names."""
    asked = OmegaConf.create(config).get(node)
    if asked is None:
        raise ConfigError(f"{node} has no value: choose by {node}=NAME")
    one_of(f"{node}.kind", asked.kind, tuple(schemas))
    schema = schemas[asked.kind]
    for name in set(asked) - {known.name for known in fields(schema)}:
        raise ConfigError(
            f"{node}.{name} means nothing to {node}.kind={asked.kind}: choose a {WORDS[node]} as a "
            f"whole, by {node}=NAME"
        )
    return schema
