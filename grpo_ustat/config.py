"""Typed schemas of both entrypoints, and the checks that span several fields.

Values live in `conf/`; there is no default here. Nothing in this file imports torch, so a wrong
configuration is refused before anything slow happens.
"""

from __future__ import annotations

import hashlib
import json
import math
import re
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from omegaconf import MISSING, OmegaConf
from omegaconf.errors import OmegaConfBaseException

from grpo_ustat.estimators.baselines import BASELINES, check_options, check_shape

ASSETS = Path(__file__).resolve().parent / "assets"
EMBEDDED = "embedded:"
METHODS = ("closed_form", "monte_carlo")
CLOSED_FORMS = ("none", "leave_one_out", "group_mean", "oracle")
DATASETS = {
    "arithmetic": ("arithmetic",),
    "few_shot": ("one_digit_product", "one_digit_sum", "plus_one"),
}
DATASET_FIELDS = {
    "arithmetic": ("min_term", "max_term", "min_factor", "max_factor", "min_digit", "max_digit"),
    "few_shot": ("shots",),
}
OPERATIONAL = (
    "on_existing",
    "launch",
    "max_steps",
    "save_steps",
    "micro_batch_size",
    "rollout_batch_size",
)
RANGES = {  # of baseline options
    "epsilon": (0.0, math.inf),
    "decay": (0.0, 1.0),
    "ridge": (1e-12, math.inf),
    "ceiling": (1e-12, math.inf),
    "rho_min": (0.0, 0.999),
    "rho_max": (0.0, 1.0),
    "half_distance": (1e-12, math.inf),
}


class ConfigError(ValueError):
    """A mistake in what the user asked for; its message is one line that names values and fix."""


@dataclass
class ModelConfig:
    """Which policy: `embedded:NAME`, a folder, or `org/name`."""

    name: str = MISSING
    model_name_or_path: str = MISSING
    revision: str | None = MISSING
    dtype: str = MISSING


@dataclass
class DatasetConfig:
    """kind `arithmetic`: several steps; operand ranges include both ends. kind `few_shot`: one step
    after `shots` solved lines; `name` says which. Fields of the other kind are null.
    """

    name: str = MISSING
    kind: str = MISSING
    seed: int = MISSING
    train_size: int = MISSING
    test_size: int = MISSING
    study_size: int = MISSING
    shots: int | None = MISSING
    min_term: int | None = MISSING
    max_term: int | None = MISSING
    min_factor: int | None = MISSING
    max_factor: int | None = MISSING
    min_digit: int | None = MISSING
    max_digit: int | None = MISSING


@dataclass
class PromptConfig:
    """How a question is put to the model: `{question}` stands for it, `{shots}` for the solved
    lines of a few_shot dataset. stop: every token that contains it ends a completion, as its last.
    """

    name: str = MISSING
    template: str = MISSING
    stop: str | None = MISSING


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
class TrainBudget:
    """rollouts: completions per step, n = prompts x group_size. value_completions: fresh ones per
    prompt behind V (oracle), b* (optimal) or the start of a tracker (spo), outside `rollouts` but
    counted as cost.
    """

    rollouts: int = MISSING
    value_completions: int = MISSING


@dataclass
class StudyBudget:
    """Completions per question: `pool_completions` for closed_form; for monte_carlo `replicates`
    groups of the largest size, `reference_completions` in `reference_blocks` independent blocks
    behind the reference gradient, `value_completions` behind V (oracle), b* (optimal) and the
    running mean.
    """

    pool_completions: int = MISSING
    replicates: int = MISSING
    reference_completions: int = MISSING
    reference_blocks: int = MISSING
    value_completions: int = MISSING


@dataclass
class StudyConfig:
    """methods: any of closed_form, monte_carlo. interval: `completions` (conditional on the
    questions) or `questions` (as a sample of questions). questions: the first so many, null: all.
    """

    methods: list[str] = MISSING
    interval: str = MISSING
    questions: int | None = MISSING


@dataclass
class LaunchConfig:
    """num_threads: OpenMP threads of a process. device: `cpu`, `cuda`, `cuda:1` ..."""

    num_threads: int = MISSING
    device: str = MISSING


@dataclass
class StudyLaunch(LaunchConfig):
    """workers: processes that share a study's questions."""

    workers: int = MISSING


@dataclass
class Common:
    """Fields of both entrypoints."""

    model: ModelConfig = field(default_factory=ModelConfig)
    dataset: DatasetConfig = field(default_factory=DatasetConfig)
    prompt: PromptConfig = field(default_factory=PromptConfig)
    launch: LaunchConfig = field(default_factory=LaunchConfig)
    seed: int = MISSING
    temperature: float = MISSING
    top_p: float = MISSING
    top_k: int = MISSING
    max_completion_length: int = MISSING
    rollout_batch_size: int = MISSING
    on_existing: str = MISSING

    def check(self) -> None:
        """Refuse what cannot be run.

        Raises:
            ConfigError: naming the values and the fix.
        """
        _positive(self, "temperature", "max_completion_length", "rollout_batch_size")
        _positive(self.launch, "num_threads", prefix="launch.")
        _one_of("on_existing", self.on_existing, ("resume", "error", "overwrite"))
        _one_of("model.dtype", self.model.dtype, ("float32", "float64", "bfloat16", "float16"))
        if (self.top_p, self.top_k) != (1.0, 0):
            raise ConfigError(
                f"top_p={self.top_p} top_k={self.top_k} would sample from another distribution "
                "than the one whose gradient is taken: use top_p=1.0 top_k=0"
            )
        _check_dataset(self.dataset)
        _check_prompt(self.prompt, self.dataset.kind)
        _check_model(self.model.model_name_or_path)


@dataclass
class MseConfig(Common):
    """What `python -m grpo_ustat.mse` runs."""

    launch: StudyLaunch = field(default_factory=StudyLaunch)
    study: StudyConfig = field(default_factory=StudyConfig)
    budget: StudyBudget = field(default_factory=StudyBudget)
    rules: dict[str, BaselineConfig] = field(default_factory=dict)
    baselines: list[str] = MISSING
    group_sizes: list[int] = MISSING

    @property
    def run_name(self) -> str:
        """What was measured, in words."""
        return f"{self.model.name}-{self.dataset.name}-{'-'.join(self.study.methods)}"

    def check(self) -> None:
        """See `Common.check`."""
        super().check()
        _positive(self.launch, "workers", prefix="launch.")
        _distinct("baselines", self.baselines)
        _distinct("group_sizes", self.group_sizes)
        _distinct("study.methods", self.study.methods)
        for name in self.baselines:
            _one_of("baselines", name, tuple(BASELINES))
            self._check_rule(name)
            for size in self.group_sizes:
                _check_group_size(name, size)
        if not (self.baselines and self.group_sizes and self.study.methods):
            raise ConfigError("baselines, group_sizes, study.methods: name at least one")
        for method in self.study.methods:
            _one_of("study.methods", method, METHODS)
        _one_of("study.interval", self.study.interval, ("completions", "questions"))
        self._check_counts()

    def _check_rule(self, name: str) -> None:
        if BASELINES[name].only_trains:
            raise ConfigError(
                f"baselines names {name}, which remembers past batches of a training run: a study "
                f"has none; leave it out, or use train baseline={name}"
            )
        if name not in self.rules:
            raise ConfigError(f"baselines names {name} but rules.{name} is missing: add it")
        if self.rules[name].name != name:
            raise ConfigError(
                f"rules.{name}.name={self.rules[name].name} is another rule: use {name}"
            )
        _check_options(self.rules[name], f"rules.{name}.options")
        if "closed_form" in self.study.methods and name not in CLOSED_FORMS:
            raise ConfigError(
                f"baselines names {name}, study.methods names closed_form, which knows "
                f"{', '.join(CLOSED_FORMS)}: use study.methods=[monte_carlo]"
            )

    def _check_counts(self) -> None:
        questions, size = self.study.questions, self.dataset.study_size
        if questions is not None and not 1 <= questions <= size:
            raise ConfigError(
                f"study.questions={questions} of dataset.study_size={size}: choose 1 to {size}"
            )
        asked = size if questions is None else questions
        for name in self.baselines:
            _check_shape(name, asked, min(self.group_sizes), "study.questions")
        if self.study.interval == "questions" and asked < 4:
            raise ConfigError(
                f"study.interval=questions needs 4 questions, got {asked}: raise study.questions"
            )
        budget = self.budget
        if budget.pool_completions < 4:
            raise ConfigError(
                f"budget.pool_completions={budget.pool_completions}: the unbiased estimators and "
                "their jackknife need at least 4"
            )
        if "monte_carlo" in self.study.methods:
            self._check_monte_carlo()

    def _check_monte_carlo(self) -> None:
        budget = self.budget
        _positive(budget, "value_completions", prefix="budget.")
        if budget.replicates < 2:
            raise ConfigError(
                f"budget.replicates={budget.replicates}: an interval needs at least 2"
            )
        per_block, rest = divmod(budget.reference_completions, max(1, budget.reference_blocks))
        if budget.reference_blocks < 3 or rest or per_block < 3:
            raise ConfigError(
                f"budget.reference_completions={budget.reference_completions} in "
                f"budget.reference_blocks={budget.reference_blocks}: use 3 or more equal blocks of "
                "3 or more completions"
            )


@dataclass
class TrainConfig(Common):
    """What `python -m grpo_ustat.train` runs."""

    baseline: BaselineConfig = field(default_factory=BaselineConfig)
    optimizer: OptimizerConfig = field(default_factory=OptimizerConfig)
    budget: TrainBudget = field(default_factory=TrainBudget)
    group_size: int = MISSING
    learning_rate: float = MISSING
    max_steps: int = MISSING
    eval_steps: int = MISSING
    save_steps: int = MISSING
    micro_batch_size: int = MISSING

    @property
    def run_name(self) -> str:
        """What is trained, in words."""
        words = (self.model.name, self.dataset.name, self.baseline.name)
        return f"{'-'.join(words)}-G={self.group_size}-n={self.budget.rollouts}"

    @property
    def prompts_per_step(self) -> int:
        """P = n / G."""
        return self.budget.rollouts // self.group_size

    def check(self) -> None:
        """See `Common.check`."""
        super().check()
        _one_of("baseline.name", self.baseline.name, tuple(BASELINES))
        _check_options(self.baseline, "baseline.options")
        _one_of("optimizer.name", self.optimizer.name, ("adamw", "sgd"))
        _positive(self, "group_size", "learning_rate", "max_steps", "micro_batch_size")
        _positive(self, "eval_steps", "save_steps")
        _check_optimizer(self.optimizer)
        if self.dataset.test_size < 2:
            raise ConfigError(
                f"dataset.test_size={self.dataset.test_size}: a paired interval needs at least 2"
            )
        if self.launch.device.startswith("cuda:"):
            raise ConfigError(
                f"launch.device={self.launch.device}: training takes its GPU from the launcher; "
                "use launch.device=cuda and choose with CUDA_VISIBLE_DEVICES"
            )
        _check_group_size(self.baseline.name, self.group_size)
        _positive(self.budget, "rollouts", prefix="budget.")
        rollouts, size = self.budget.rollouts, self.group_size
        if rollouts < size or rollouts % size:
            near = [n for n in (rollouts // size * size, (rollouts // size + 1) * size) if n > 0]
            raise ConfigError(
                f"budget.rollouts={rollouts} is not a multiple of group_size={size}: "
                f"use budget.rollouts={' or '.join(map(str, near))}, or another group_size"
            )
        if BASELINES[self.baseline.name].needs & {"value_P", "optimal_P", "tracker_P"}:
            _positive(self.budget, "value_completions", prefix="budget.")
        _check_shape(self.baseline.name, self.prompts_per_step, self.group_size, "budget.rollouts")
        if self.prompts_per_step > self.dataset.train_size:
            raise ConfigError(
                f"{self.prompts_per_step} prompts a step (budget.rollouts / group_size) but "
                f"dataset.train_size={self.dataset.train_size}: raise group_size or train_size"
            )


def _positive(node: Any, *names: str, prefix: str = "") -> None:
    for name in names:
        value = getattr(node, name)
        if not 0 < value < math.inf:
            raise ConfigError(f"{prefix}{name}={value} must be above 0 and finite")


def _distinct(key: str, values: list[Any]) -> None:
    twice = [value for i, value in enumerate(values) if value in values[:i]]
    if twice:
        raise ConfigError(f"{key}={values} names {twice[0]} twice: once is enough")


def _check_optimizer(optimizer: OptimizerConfig) -> None:
    for name in ("beta1", "beta2"):
        if not 0 <= getattr(optimizer, name) < 1:
            raise ConfigError(f"optimizer.{name}={getattr(optimizer, name)} must be in [0, 1)")
    if not 0 <= optimizer.weight_decay < math.inf:
        raise ConfigError(f"optimizer.weight_decay={optimizer.weight_decay} must be 0 or more")


def _one_of(key: str, value: str, known: tuple[str, ...]) -> None:
    if value not in known:
        raise ConfigError(f"unknown {key} {value!r}: choose from {', '.join(known)}")


def _check_group_size(baseline: str, group_size: int) -> None:
    least = BASELINES[baseline].min_group_size
    if group_size < least:
        raise ConfigError(
            f"group_size={group_size} with baseline {baseline}, which needs at least {least} "
            f"completions a group: use group_size={least} or more, or baseline none"
        )


def _check_shape(baseline: str, num_prompts: int, group_size: int, key: str) -> None:
    try:
        check_shape(baseline, num_prompts, group_size)
    except ValueError as error:
        raise ConfigError(f"{error}: raise {key}") from error


def _check_options(rule: BaselineConfig, key: str) -> None:
    try:
        check_options(rule.name, rule.options)
    except ValueError as error:
        raise ConfigError(f"{key}: {error}") from error
    for name, value in rule.options.items():
        low, high = RANGES.get(name, (-math.inf, math.inf))
        if not (math.isfinite(value) and low <= value <= high):
            raise ConfigError(f"{key}.{name}={value} must be finite and in [{low}, {high}]")
    for low, high in (("minimum", "maximum"), ("rho_min", "rho_max")):
        if low in rule.options and rule.options[low] >= rule.options[high]:
            raise ConfigError(
                f"{key}: {low}={rule.options[low]} {high}={rule.options[high]}: use {low} < {high}"
            )


def _check_dataset(dataset: DatasetConfig) -> None:
    _one_of("dataset.kind", dataset.kind, tuple(DATASETS))
    _one_of("dataset.name", dataset.name, DATASETS[dataset.kind])
    for kind, names in DATASET_FIELDS.items():
        for name in names:
            value = getattr(dataset, name)
            if kind == dataset.kind and value is None:
                raise ConfigError(f"dataset.{name}=null: dataset.kind={kind} needs a number")
            if kind != dataset.kind and value is not None:
                raise ConfigError(
                    f"dataset.{name}={value} is not read by dataset.kind={dataset.kind}: use null"
                )
    _positive(dataset, "train_size", "test_size", "study_size", prefix="dataset.")
    if dataset.kind == "few_shot":
        _positive(dataset, "shots", prefix="dataset.")
    else:
        _check_ranges(dataset)


def _check_prompt(prompt: PromptConfig, kind: str) -> None:
    if "{question}" not in prompt.template:
        raise ConfigError(
            f"prompt.template={prompt.template!r} never shows the question: "
            "put {question} into it"
        )
    if ("{shots}" in prompt.template) != (kind == "few_shot"):
        raise ConfigError(
            f"prompt.template={prompt.template!r} with dataset.kind={kind}: "
            "few_shot needs {shots} in the template (prompt=few_shot), other kinds have no shots"
        )
    if prompt.stop == "":
        raise ConfigError("prompt.stop='' is in every token: use null to stop at end tokens only")


def _check_ranges(dataset: DatasetConfig) -> None:
    for name in ("term", "factor", "digit"):
        low, high = getattr(dataset, f"min_{name}"), getattr(dataset, f"max_{name}")
        if not 1 <= low <= high:
            raise ConfigError(f"dataset.min_{name}={low} max_{name}={high}: use 1 <= min <= max")
    low, high = dataset.min_factor, dataset.max_factor
    if all(factor % 10 == 0 for factor in range(low, min(high, low + 1) + 1)):
        raise ConfigError(f"dataset.min_factor={low} max_factor={high} holds only multiples of ten")


def _check_model(model_name_or_path: str) -> None:
    name = model_name_or_path
    looks_local = name.startswith(("/", "./", "../", "~")) or Path(name).exists()
    folder = Path(name).expanduser()
    if looks_local and not (folder / "config.json").is_file():
        raise ConfigError(
            f"model.model_name_or_path={name} holds no model: no config.json in {folder.resolve()}"
        )
    if name.startswith(EMBEDDED):
        known = sorted(p.parent.name for p in ASSETS.glob("*/config.json"))
        _one_of(
            "model.model_name_or_path", name, tuple(EMBEDDED + known_name for known_name in known)
        )
    elif not looks_local and not re.fullmatch(r"[\w.-]+(/[\w.-]+)?", name):
        raise ConfigError(f"model.model_name_or_path={name} is neither a folder nor org/name")


def typed(config: Any, schema: type) -> Any:
    """The composed configuration as a checked instance of its schema.

    Args:
        config: an OmegaConf node or a plain dictionary, without the `hydra` node.
        schema: `MseConfig` or `TrainConfig`.

    Raises:
        ConfigError: an unknown key, a wrong type, or a combination that cannot be run.
    """
    try:
        result = OmegaConf.to_object(OmegaConf.merge(OmegaConf.structured(schema), config))
    except OmegaConfBaseException as error:
        lines = [line.strip() for line in str(error).splitlines() if line.strip()]
        raise ConfigError("; ".join(lines[:2])) from error
    result.check()
    return result


def identity(config: Any) -> dict[str, Any]:
    """What makes the run this run: the configuration without operational keys, and the weights."""
    keys = {key: value for key, value in named(asdict(config)).items() if key not in OPERATIONAL}
    return keys | {"weights": weights_fingerprint(config.model.model_name_or_path)}


def named(keys: dict[str, Any]) -> dict[str, Any]:
    """A configuration's keys, of `rules` only those in `baselines`: adding one changes no folder.

    >>> named({"baselines": ["none"], "rules": {"none": {}, "opo": {}}})["rules"]
    {'none': {}}
    """
    if not keys.get("rules"):
        return keys
    asked = keys.get("baselines", ())
    return keys | {"rules": {name: keys["rules"][name] for name in asked if name in keys["rules"]}}


def weights_fingerprint(model_name_or_path: str) -> str | None:
    """A hash of the weight files of an embedded policy or a folder; None for a hub id.

    Small files count by their content, files above 64 MiB by size and time of change.
    """
    name = model_name_or_path
    folder = ASSETS / name.removeprefix(EMBEDDED) if name.startswith(EMBEDDED) else Path(name)
    files = sorted(folder.expanduser().glob("*.safetensors"))
    if not files:
        return None
    total = hashlib.sha256()
    for file in files:
        stat = file.stat()
        small = stat.st_size <= 2**26
        total.update(file.read_bytes() if small else f"{stat.st_size} {stat.st_mtime_ns}".encode())
    return total.hexdigest()[:12]


def fingerprint(identity_keys: dict[str, Any]) -> str:
    """A short hash of `identity`, 12 hexadecimal digits.

    >>> fingerprint({"seed": 0, "group_size": 4}) == fingerprint({"group_size": 4, "seed": 0})
    True
    """
    text = json.dumps(identity_keys, sort_keys=True)
    return hashlib.sha256(text.encode()).hexdigest()[:12]


def folder_name(config: Any) -> str:
    """The run folder's name without its seed: words, then a hash of the identity keys."""
    keys = identity(config)
    del keys["seed"]
    words = re.sub(r"[^\w.=-]+", "_", config.run_name)
    return f"{words}-{fingerprint(keys)[:8]}"
