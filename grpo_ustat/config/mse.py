"""Schema of `mse`, with checks that refuse impossible measurements.

Every error message is one line that gives the values and the fix. The pool of a study is its stored
completions with their scores. A score is the gradient of a completion's log-probability.
"""

from __future__ import annotations

import re
from dataclasses import dataclass, replace
from pathlib import Path

from grpo_ustat.config.baseline import (
    BaselineConfig,
    check_group_size,
    check_options,
    check_shape,
)
from grpo_ustat.config.common import Common
from grpo_ustat.config.losses import MeasuredLosses
from grpo_ustat.config.model import (
    ModelConfig,
    adapter_base,
    check_model,
    check_weights,
    model_folder,
    tf32_in_use,
)
from grpo_ustat.config.objective import OBJECTIVES, ObjectiveConfig
from grpo_ustat.config.own_functions import load_registered
from grpo_ustat.config.parts import PolicyOptions, SamplerOptions, StudySampling
from grpo_ustat.config.reward_funcs import TASK, check_several
from grpo_ustat.config.rollout import RolloutConfig
from grpo_ustat.config.schema import ConfigError, field, node
from grpo_ustat.config.study import StudyBudget, StudyConfig, StudyLaunch
from grpo_ustat.estimators.baselines import BASELINES, OF_THE_BATCH, plugin_baselines
from grpo_ustat.records import MIN_QUESTIONS

PART_NAME = r"[0-9a-f]{16}-\d+-\d+\.(safetensors|unscored)"
POOL_FILE = re.compile(rf"\.?(pool\.json|prompt_date\.txt|{PART_NAME})(\.[0-9a-f]+\.tmp)?")
CLOSED_FORMS = (
    "none",
    "leave_one_out",
    "group_mean",
    "oracle",
    "optimal",
    "constant",
    "running_mean",
    "remax",
)
STUDIED_BASELINES = tuple(name for name, baseline in BASELINES.items() if not baseline.only_trains)


@dataclass
class MseConfig(Common):
    """Configuration of `grpo-ustat mse`."""

    launch: StudyLaunch = node(  # pyright: ignore[reportIncompatibleVariableOverride]  # narrower
        StudyLaunch, "processes and devices, which do not affect results"
    )
    study: StudyConfig = node(StudyConfig, "what is measured and how")
    rollout: RolloutConfig = node(
        RolloutConfig,
        "the engine that generates completions; their log-probabilities and gradients always come "
        "from the model itself",
    )
    budget: StudyBudget = node(
        StudyBudget,
        "how many completions and random draws are made, and how many numbers of each gradient "
        "are kept",
    )
    baseline_options: dict[str, dict[str, float]] = field("options of each baseline")
    objective: ObjectiveConfig = node(
        ObjectiveConfig,
        "the loss whose efficiency is measured, relative to the leave-one-out gradient",
    )
    baseline: BaselineConfig = node(BaselineConfig, "the baseline of the loss in objective")
    objectives: list[str] = field(
        "names of further losses to measure; a loss that sets no baseline of its own uses "
        "baseline=NAME",
        choices=OBJECTIVES,
        distinct=True,
    )
    baselines: list[str] = field(
        "baselines to compare; baseline_options sets their options",
        choices=STUDIED_BASELINES,
        plugins=plugin_baselines,
        distinct=True,
    )
    group_sizes: list[int] = field(
        "per group: the values of G to compare", "completions", distinct=True
    )
    pool: str | None = field(
        "folder for completions and their gradients, which is reused and extended, or Parquet "
        "file with rollouts of another program; null: a folder in the run folder"
    )

    @property
    def run_name(self) -> str:
        """Name of the run, made from the names of the policy, the data and the methods."""
        data = "imported" if self.imports_pool else self.dataset.name
        return f"{self.model.name}-{data}-{'-'.join(self.study.methods)}"

    @property
    def plan(self) -> str:
        """Summary of the policy, questions, completions, methods, baselines and group sizes."""
        questions = self.study.questions or getattr(self.dataset, "study_size", None)
        completions = self.budget.pool_completions
        most = "" if self.study.until is None else "at most "
        source = (
            f"the rollouts of {self.pool}"
            if self.imports_pool
            else f"{self.dataset.name}: {most}{questions or 'all'} "
            f"question{'s' * (questions != 1)} with {completions} completions each"
        )
        sizes = ", ".join(map(str, self.group_sizes))
        reward = f", reward {self.rewards_plan}" if self.rewards_plan else ""
        sampler = ""
        if self.rollout.name == "vllm":
            sampler = "; one process samples with vLLM and computes gradients"
        policy = f"{self.model.name} (its adapters)" if self.scores_adapters else self.model.name
        return (
            f"mse: {policy} on {source}; gradient error at G = {sizes} (baselines: "
            f"{', '.join(self.baselines)}; methods: {', '.join(self.study.methods)})"
            f"{reward}{sampler}"
        )

    @property
    def sampling_workers(self) -> int:
        """Number of local processes that fill the pool; always 1 with vLLM, to save memory."""
        return 1 if self.rollout.name == "vllm" else self.launch.workers

    @property
    def computes_tf32(self) -> bool:
        """True if float32 products use TF32; see `tf32_in_use`."""
        return tf32_in_use(self.launch.device, self.model.dtype)

    @property
    def policy_options(self) -> PolicyOptions:
        """Options for loading the policy in a study; see `Common.policy_options`."""
        return replace(
            super().policy_options, tf32=self.computes_tf32, parameters=self.study.parameters,
            merge_adapters=self.study.merge_adapters,
        )  # fmt: skip

    @property
    def sampler_options(self) -> SamplerOptions:
        """Options for sampling completions."""
        return self.sampling_by(self.rollout)

    @property
    def measured(self) -> MeasuredLosses:
        """Losses that the study measures."""
        return MeasuredLosses(
            self.objective, self.baseline, self.objectives, self.study, self.pool,
            self.imports_pool, self.max_completion_length,
        )  # fmt: skip

    @property
    def later_model(self) -> ModelConfig:
        """Current policy: `study.scored_by` or, if unset, `model`."""
        return self._model_at(self.study.scored_by)

    @property
    def reference_model(self) -> ModelConfig:
        """Reference model of the KL penalty."""
        return self._model_at(self.study.reference)

    def _model_at(self, place: str | None) -> ModelConfig:
        if place is None:
            return self.model
        # The name that the override model=NAME or model=FOLDER would set.
        name = place.partition(":")[2] or place
        return replace(self.model, name=name, model_name_or_path=place, revision=None)

    @property
    def scores_adapters(self) -> bool:
        """True if the study measures the gradient of LoRA adapters with fixed base weights."""
        is_adapted = adapter_base(model_folder(self.model.model_name_or_path)) is not None
        return is_adapted and not self.study.merge_adapters

    @property
    def compared_options(self) -> dict[str, dict[str, float]]:
        """Options of the compared baselines, keyed by baseline."""
        return {name: self.baseline_options[name] for name in self.baselines}

    @property
    def compares_by_groups(self) -> bool:
        """True if a compared baseline has no closed form.

        Its error is then an average over groups that are formed from the pool.
        """
        return "closed_form" in self.study.methods and bool(self.baselines_by_groups)

    @property
    def dividing_sizes(self) -> list[int]:
        """Group sizes that divide `study.rollouts`.

        A baseline without a closed form can only be measured at these sizes.
        """
        return [size for size in self.group_sizes if self.study.rollouts % size == 0]

    @property
    def baselines_by_groups(self) -> dict[str, dict[str, float]]:
        """Options of the compared baselines without a closed form, keyed by baseline."""
        options = self.compared_options
        return {name: options[name] for name in self.baselines if name not in CLOSED_FORMS}

    @property
    def sampling(self) -> StudySampling:
        """Options for the processes that sample completions and compute their scores."""
        return StudySampling(
            self.policy_options, self.sampler_options, self.task_options, self.sampling_workers
        )

    @property
    def most_questions(self) -> int | None:
        """Number of questions to use from the start of the study split; None means all."""
        return self.study.questions

    @property
    def fills_part(self) -> bool:
        """True if this job adds only a part of the questions to the pool (`study.part`).

        Several jobs can fill the parts of one pool in parallel.
        """
        return self.study.part is not None

    @property
    def imports_pool(self) -> bool:
        """True if `pool` is a file with imported rollouts instead of a pool folder."""
        return self.pool is not None and self.pool.endswith(".parquet")

    def check(self) -> None:
        """Refuse a study that cannot be measured."""
        for name in self.baselines:
            if name in BASELINES and BASELINES[name].only_trains:
                raise _only_trains(name)
        super().check()
        if not (self.baselines and self.group_sizes and self.study.methods):
            raise ConfigError(
                "one of the lists baselines, group_sizes and study.methods is empty: name at least "
                "one entry in each"
            )
        self._check_parameters()
        self._check_rollout()
        self._check_baselines()
        self._check_losses()
        self._check_pool()
        self._check_part()
        self._check_until()
        # For an imported file, the file determines the numbers of questions and completions.
        if not self.imports_pool:
            self._check_counts()

    def _check_parameters(self) -> None:
        """Refuse an invalid regular expression."""
        pattern = self.study.parameters
        try:
            re.compile(pattern or "")
        except re.error as error:
            raise ConfigError(
                f"study.parameters={pattern} is not a regular expression ({error}): try attn, mlp "
                "or embed"
            ) from error

    def _check_rollout(self) -> None:
        """Refuse vLLM on several ranks or with an imported pool."""
        self.rollout.check()
        if self.rollout.name != "vllm":
            return
        if self.imports_pool:
            raise ConfigError(
                f"rollout=vllm with pool={self.pool}: the file already contains the completions, "
                "use rollout=local"
            )
        if self.launch.num_processes > 1:
            raise ConfigError(
                f"launch.num_processes={self.launch.num_processes} with rollout=vllm: only one "
                "process of a study can use vLLM; use launch.num_processes=1 and, for several "
                "GPUs, one job per study.part=k/n"
            )

    def _check_baselines(self) -> None:
        """Refuse baselines that a study cannot measure, and invalid options or group sizes."""
        for name in self.baselines:
            if load_registered(BASELINES, "baselines", name).only_trains:
                raise _only_trains(name)
            if name not in self.baseline_options:
                raise ConfigError(
                    f"baselines contains {name} but baseline_options.{name} is missing: add the "
                    "options"
                )
            options = BaselineConfig(name, self.baseline_options[name])
            check_options(options, f"baseline_options.{name}")
            check_several(name, "baselines", self.reward_funcs)
            for size in self.group_sizes:
                check_group_size(name, size, "group_sizes")

    def _check_losses(self) -> None:
        """Refuse invalid losses, losses that a study cannot measure, and missing models."""
        load_registered(BASELINES, "baseline", self.baseline.name)
        check_options(self.baseline, "baseline.options")
        self.measured.check()
        for key in ("scored_by", "reference"):
            place = getattr(self.study, key)
            if place is not None:
                check_model(place, trusted=self.model.trust_remote_code, key=f"study.{key}")
                check_weights(place, f"study.{key}")

    def _check_pool(self) -> None:
        """Refuse a folder that is not a pool, and settings that conflict with imported rollouts."""
        if self.study.cut_at is not None and not self.imports_pool:
            raise ConfigError(
                f"study.cut_at={self.study.cut_at} applies to imported rollouts, but pool="
                f"{self.pool} is not a Parquet file: use study.cut_at=null"
            )
        if self.pool is None:
            return
        if not self.imports_pool:
            check_pool_folder(self.pool)
            return
        if not Path(self.pool).is_file():
            raise ConfigError(f"pool={self.pool} is not a file: use a Parquet file or a folder")
        if self.reward_funcs != [TASK] or self.weights != [1.0]:
            raise ConfigError(
                f"reward_funcs={self.reward_funcs} reward_weights={self.reward_weights} with "
                f"pool={self.pool}: imported rollouts already have rewards in the file's column "
                f"reward; use reward_funcs=[{TASK}] reward_weights=null and write the weighted "
                "sum into that column"
            )
        needs = {need for name in self.baselines for need in BASELINES[name].needs}
        for key, samples in (
            ("study.methods=[monte_carlo]", "monte_carlo" in self.study.methods),
            ("baselines=[remax]", "greedy_P" in needs),
        ):
            if samples:
                raise ConfigError(
                    f"{key} must sample completions, which is impossible if pool is a file with "
                    "rollouts of another program: remove it"
                )

    def _check_part(self) -> None:
        """Refuse an invalid `study.part`, and a part for which `pool` names no common folder."""
        if self.study.part is None:
            return
        part = f"study.part={self.study.part}"
        k, n = self.study.share
        if not 1 <= k <= n:
            raise ConfigError(f"{part}: use k/n with k from 1 to n, such as 3/8")
        if self.pool is None:
            raise ConfigError(
                f"{part} with pool=null: all parts must be written to one folder, use the same "
                "pool=DIR for all parts"
            )
        if self.imports_pool:
            raise ConfigError(
                f"{part} with pool={self.pool}: the rollouts of a file cannot be processed in "
                "parts, use study.part=null"
            )

    def _check_until(self) -> None:
        """Refuse `study.until` if questions cannot be drawn in batches, or a batch is too small."""
        if self.study.until is None:
            return
        until = f"study.until={self.study.until}"
        if self.imports_pool:
            raise ConfigError(
                f"{until} with pool={self.pool}: no further questions can be drawn for the "
                "rollouts of a file, use study.until=null"
            )
        if self.study.part is not None:
            raise ConfigError(
                f"{until} with study.part={self.study.part}: a part has a fixed number of "
                "questions, use study.until=null, or study.part=null with launch.num_processes=N"
            )
        # Imported here, because the help and refused command lines do not need it.
        from grpo_ustat.estimators.looks import FIRST_COMPLETIONS, FIRST_QUESTIONS

        least = min(FIRST_QUESTIONS, self.study.questions or self.dataset.study_size)
        completions = min(FIRST_COMPLETIONS, self.budget.pool_completions)
        try:
            self.check_questions(least, completions)
        except ConfigError as error:
            raise ConfigError(
                f"{until} can stop with {least} questions of {completions} completions each, "
                f"which are too few ({error}): use study.until=null"
            ) from error

    def _check_counts(self) -> None:
        """Refuse a study with too few questions or completions for its methods and baselines."""
        questions, size = self.study.questions, self.dataset.study_size
        if questions is not None and questions > size:
            raise ConfigError(
                f"study.questions={questions} exceeds dataset.study_size={size}: use at most "
                f"{size}, or dataset.study_size={questions} if the data set is large enough"
            )
        self.check_questions(size if questions is None else questions)
        pool = self.budget.pool_completions
        if pool < 4:
            raise ConfigError(
                f"budget.pool_completions={pool}: the unbiased estimators and their jackknife "
                "need at least 4 completions"
            )
        if "optimal" in self.baselines and pool < 6:
            raise ConfigError(
                f"budget.pool_completions={pool}: baseline optimal needs at least 6 completions "
                "for its error and the jackknife"
            )
        if "monte_carlo" in self.study.methods:
            self.budget.check_monte_carlo()

    def check_questions(self, count: int, completions: int | None = None) -> None:
        """Refuse a pool that is too small for the baselines.

        Args:
            count: number of questions.
            completions: number of completions per question; None if they come from a file that has
                not been read yet.
        """
        key = "study.questions"
        if self.imports_pool:
            key = f"study.questions, or the number of prompts in {self.pool}"
        for name in self.baselines:
            check_shape(name, count, min(self.group_sizes), key)
        for name in self.baselines_by_groups if self.compares_by_groups else ():
            self._check_groups(name, count, completions, key)

    def _check_groups(self, name: str, count: int, completions: int | None, key: str) -> None:
        """Refuse a baseline without a closed form that cannot be measured at any group size.

        Args:
            name: name of the baseline.
            count, completions: see `check_questions`.
            key: field that sets the number of questions.
        """
        baseline, rollouts = BASELINES[name], self.study.rollouts
        missing = ", ".join(sorted(baseline.needs - OF_THE_BATCH))
        if missing:
            raise ConfigError(
                f"baselines contains {name}, which has no closed form and needs {missing}, but "
                f"the stored completions do not include {missing}: use study.methods=[monte_carlo]"
            )
        if count < MIN_QUESTIONS:
            raise ConfigError(
                f"baselines contains {name}, which has no closed form, so its error needs "
                f"at least {MIN_QUESTIONS} questions, but got {count}: raise {key}"
            )
        sizes = [size for size in self.dividing_sizes if rollouts // size >= baseline.min_prompts]
        if not sizes:
            raise ConfigError(
                f"baselines contains {name}, which has no closed form, so "
                f"study.rollouts={rollouts} must be a multiple ({baseline.min_prompts} x or more) "
                f"of one of group_sizes={self.group_sizes}"
            )
        if completions is None:
            completions = max(sizes) if self.imports_pool else self.budget.pool_completions
        if min(sizes) > completions:
            raise ConfigError(
                f"baselines contains {name}, which has no closed form, so groups of {min(sizes)} "
                f"need {min(sizes)} completions per question, but "
                f"budget.pool_completions={completions}: raise budget.pool_completions"
            )
        size = max(size for size in sizes if size <= completions)
        if not baseline.couples_prompts:
            return
        # Imported here, because the help and refused command lines do not need it.
        from grpo_ustat.estimators.coupled_losses import prompts_needed

        needed = prompts_needed(rollouts // size)
        if needed > count:
            raise ConfigError(
                f"baselines contains {name}, whose advantages depend on all questions of an "
                f"update: with updates of {rollouts // size} questions "
                f"(study.rollouts={rollouts} in groups of {size}), the study needs {needed} "
                f"questions, but has {count}: lower study.rollouts or raise {key}"
            )


def _only_trains(name: str) -> ConfigError:
    return ConfigError(
        f"baselines contains {name}, which needs the past batches of a training run, but a study "
        f"has no past batches: remove {name}, or use train baseline={name}"
    )


def check_pool_folder(pool: str) -> None:
    """Refuse a folder that is not a pool but contains files.

    Args:
        pool: folder that must be missing, empty or a pool, that is, written by an earlier study. A
            pool contains `pool.json`, or only files whose names match `POOL_FILE`.
    """
    folder = Path(pool)
    if folder.exists() and not folder.is_dir():
        raise ConfigError(
            f"pool={pool} is not a folder: use a new folder, or a file named *.parquet that "
            "`grpo-ustat convert` made from another framework's rollouts"
        )
    if not folder.is_dir() or (folder / "pool.json").is_file():
        return
    # An unfinished pool may not have a pool.json yet.
    names = sorted(x.name for x in folder.iterdir() if not POOL_FILE.fullmatch(x.name))
    if (folder / "pool" / "pool.json").is_file():
        raise ConfigError(
            f"pool={pool} is not a pool (a study's stored completions), but its subfolder pool is "
            f"one: use pool={folder / 'pool'}"
        )
    if names:
        files = f"{names[0]} and {len(names) - 1} more" if len(names) > 1 else names[0]
        raise ConfigError(
            f"pool={pool} is neither empty nor a pool (a study's stored completions): it contains "
            f"{files} and no pool.json; use a new folder, such as pool={folder / 'pool'}"
        )
