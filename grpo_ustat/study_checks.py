"""What a study can be asked for; each check refuses in one line that names values and fix."""

from __future__ import annotations

from pathlib import Path
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
    from grpo_ustat.config import MseConfig

METHODS = ("closed_form", "replay", "monte_carlo")
INTERVALS = ("completions", "questions")
SETTINGS = ("all_questions_once", "with_replacement", "without_replacement", "one_question")
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


def check_study(config: MseConfig) -> None:
    """Baselines, group sizes, methods, settings, pool and counts go together.

    Raises:
        ConfigError: naming the values and the fix.
    """
    positive(config.launch, "workers", prefix="launch.")
    distinct("baselines", config.baselines)
    distinct("group_sizes", config.group_sizes)
    distinct("study.methods", config.study.methods)
    for name in config.baselines:
        check_rule("baselines", name)
        _check_rule(config, name)
        for size in config.group_sizes:
            check_group_size(name, size)
    if not (config.baselines and config.group_sizes and config.study.methods):
        raise ConfigError("baselines, group_sizes, study.methods: name at least one")
    for method in config.study.methods:
        one_of("study.methods", method, METHODS)
    one_of("study.interval", config.study.interval, INTERVALS)
    _check_settings(config)
    _check_pool(config)
    _check_part(config)
    _check_counts(config)


def _check_rule(config: MseConfig, name: str) -> None:
    if BASELINES[name].only_trains:
        raise ConfigError(
            f"baselines names {name}, which remembers past batches of a training run: a study "
            f"has none; leave it out, or use train baseline={name}"
        )
    if name not in config.rules:
        raise ConfigError(f"baselines names {name} but rules.{name} is missing: add it")
    if config.rules[name].name != name:
        raise ConfigError(
            f"rules.{name}.name={config.rules[name].name} is another rule: use {name}"
        )
    check_options(config.rules[name], f"rules.{name}.options")
    if config.study.methods == ["closed_form"] and name not in CLOSED_FORMS:
        raise ConfigError(
            f"baselines names {name}, study.methods only closed_form, which knows "
            f"{', '.join(CLOSED_FORMS)}: add replay or monte_carlo to study.methods"
        )


def _check_pool(config: MseConfig) -> None:
    if not config.imports_pool:
        return
    if not Path(config.pool).is_file():
        raise ConfigError(f"pool={config.pool} is no file: give a Parquet file, or a folder")
    needs = {need for name in config.baselines for need in BASELINES[name].needs}
    for key, asked in (
        ("study.methods=[monte_carlo]", "monte_carlo" in config.study.methods),
        (f"target_halfwidth={config.target_halfwidth}", config.target_halfwidth is not None),
        ("baselines=[remax]", "greedy_P" in needs),
    ):
        if asked:
            raise ConfigError(f"{key} samples completions, which an imported pool cannot")


def _check_part(config: MseConfig) -> None:
    if config.study.part is None:
        return
    asked, size = f"study.part={config.study.part}", config.target_halfwidth
    k, n = config.study.share
    for refused, why in (
        (not 1 <= k <= n, ": use k/n with k from 1 to n, such as 3/8"),
        (
            config.pool is None,
            " with pool=null: the parts meet in one folder, give all of them the same pool=DIR",
        ),
        (
            config.imports_pool,
            f" with pool={config.pool}: an imported pool is scored as a whole, use study.part=null",
        ),
        (
            size is not None,
            f" with target_halfwidth={size}: only the whole pool says how many completions it "
            "takes, use target_halfwidth=null and budget.pool_completions",
        ),
    ):
        if refused:
            raise ConfigError(asked + why)


def _check_settings(config: MseConfig) -> None:
    study = config.study
    distinct("study.settings", study.settings)
    distinct("study.num_prompts", study.num_prompts)
    for setting in study.settings:
        one_of("study.settings", setting, SETTINGS)
    if not study.settings:
        raise ConfigError(f"study.settings=[]: name at least one of {', '.join(SETTINGS)}")
    batches = {"with_replacement", "without_replacement"} & set(study.settings)
    if batches and not (study.num_prompts and min(study.num_prompts) >= 1):
        raise ConfigError(
            f"study.num_prompts={study.num_prompts}: {' and '.join(sorted(batches))} need at "
            "least one number of questions a batch, 1 or more"
        )
    if config.target_halfwidth is not None and not 0 < config.target_halfwidth < 1:
        raise ConfigError(f"target_halfwidth={config.target_halfwidth} must be in (0, 1)")


def check_questions(config: MseConfig, asked: int) -> None:
    """There are enough questions for baselines, interval and settings.

    Args:
        config: the study's.
        asked: how many questions there are.

    Raises:
        ConfigError: naming the values and the fix.
    """
    for name in config.baselines:
        check_shape(name, asked, min(config.group_sizes), "study.questions")
    if config.study.interval == "questions" and asked < 4:
        raise ConfigError(
            f"study.interval=questions needs 4 questions, got {asked}: raise study.questions"
        )
    largest = max(config.study.num_prompts, default=0)
    if "without_replacement" in config.study.settings and largest > asked:
        raise ConfigError(
            f"study.num_prompts={largest} of {asked} questions without replacement: use at "
            f"most {asked}, or raise study.questions"
        )


def _check_counts(config: MseConfig) -> None:
    questions, size = config.study.questions, config.dataset.study_size
    if questions is not None and not 1 <= questions <= size:
        raise ConfigError(
            f"study.questions={questions} of dataset.study_size={size}: choose 1 to {size}"
        )
    check_questions(config, size if questions is None else questions)
    budget = config.budget
    positive(budget, "replay_draws", "feature_sketch", "gradient_sketch", prefix="budget.")
    if config.target_halfwidth is not None and (
        budget.max_pool_completions < budget.pool_completions
    ):
        raise ConfigError(
            f"budget.max_pool_completions={budget.max_pool_completions} is below "
            f"budget.pool_completions={budget.pool_completions}: raise it"
        )
    if "replay" in config.study.methods:
        _check_replay(config)
    if budget.pool_completions < 4:
        raise ConfigError(
            f"budget.pool_completions={budget.pool_completions}: the unbiased estimators and "
            "their jackknife need at least 4"
        )
    if "monte_carlo" in config.study.methods:
        _check_monte_carlo(config)


def _check_replay(config: MseConfig) -> None:
    largest, size = max(config.group_sizes), config.budget.pool_completions
    if size < largest + 3:
        raise ConfigError(
            f"budget.pool_completions={size}: replay of group_size={largest} takes the true "
            f"gradient from completions outside the group: use at least {largest + 3}"
        )


def _check_monte_carlo(config: MseConfig) -> None:
    budget = config.budget
    positive(budget, "value_completions", prefix="budget.")
    if budget.replicates < 2:
        raise ConfigError(f"budget.replicates={budget.replicates}: an interval needs at least 2")
    per_block, rest = divmod(budget.reference_completions, max(1, budget.reference_blocks))
    if budget.reference_blocks < 3 or rest or per_block < 3:
        raise ConfigError(
            f"budget.reference_completions={budget.reference_completions} in "
            f"budget.reference_blocks={budget.reference_blocks}: use 3 or more equal blocks of "
            "3 or more completions"
        )
