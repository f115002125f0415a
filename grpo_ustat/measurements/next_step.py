"""Suggested command after a study, and overrides that select the same policy and study again."""

from __future__ import annotations

import math
import re
from collections.abc import Iterator, Mapping
from dataclasses import asdict
from typing import Any

import yaml

from grpo_ustat.config.command_line import command_line, new_rollouts
from grpo_ustat.config.data import STUDY_QUESTIONS, JsonlConfig
from grpo_ustat.config.load import CONF, values_of
from grpo_ustat.config.presets import PRESETS
from grpo_ustat.config.schema import ConfigError
from grpo_ustat.config.study import METHODS
from grpo_ustat.estimators.baselines import BASELINES
from grpo_ustat.estimators.scaling import divisible_rollouts
from grpo_ustat.measurements.assumption2 import rewards_vary
from grpo_ustat.measurements.base import Study
from grpo_ustat.measurements.group_size import SCALING, prompts_to_decide
from grpo_ustat.measurements.losses import LOSSES
from grpo_ustat.runs.study_parts import CompletionCounts

# The next study adds at most this multiple of the current number of questions.
MAX_FOLLOW_UP = 3
# Fields of a study that the next study does not inherit.
SINGLE_STUDY_FIELDS = ("questions", "part", "cut_at")


def next_step(study: Study, rollouts: int | None = None) -> str:
    """Return the next step, as a command if possible: train with the best G, or measure more data.

    Args:
        rollouts: Number of rollouts per training step, n; None for the number in the study's
            configuration. If the data set has too few training questions for a step, n is halved
            until it has enough.
    """
    config, result = study.run.config, study.result
    if result.equal_rewards is not None:
        return _equal_rewards_step(result.equal_rewards, config)
    rollouts = divisible_rollouts(rollouts or study.rollouts)
    costs = study.need(SCALING).law.costs(rollouts)
    best = costs.best if costs.tolerance is not None else None
    # If the rollouts come from a file, another framework logged them and also does the training.
    if (config.get("pool") or "").endswith(".parquet"):
        if best is None:
            model = [x for x in policy_overrides(config) if x.startswith(("model", "temperature"))]
            return new_rollouts(model, config["study"]["cut_at"], _questions_for_best(study))
        return f"train with num_generations={best} in the framework that logged these rollouts"
    shared = policy_overrides(config)
    if not rewards_vary(study):
        return command_line("mse", *shared, "debug=prompts")
    if best is not None:
        _, most = _questions_there(config["dataset"])
        # A step must not need more prompts than there are training questions.
        while rollouts // best > most and rollouts // 2 % best == 0:
            rollouts //= 2
        if rollouts // best > most:
            return (
                f"add training questions: {_place(config)} has {most}, but a step with the best G "
                f"needs {rollouts // best} or more"
            )
        sizes = [f"budget.rollouts={rollouts}", f"group_size={_best_of_loss(study, best)}"]
        # `train` refuses `replace` because it does not draw replacement groups.
        replaced, dropped = "zero_variance_groups=replace", "zero_variance_groups=drop"
        loss = [word.replace(replaced, dropped) for word in objective_overrides(config)]
        return command_line("train", *shared, *loss, *sizes)
    questions, (there, _) = _questions_for_best(study), _questions_there(config["dataset"])
    if there <= result.questions:
        return (
            f"add study questions: {_place(config)} has {there}, but about {questions} are needed "
            "to find the best G"
        )
    questions = int(min(questions, there))
    budget = config["budget"] | {"pool_completions": result.pool_completions}
    sizes = [f"study.questions={questions}", *study_overrides({**config, "budget": budget})]
    if questions > (config["dataset"].get("study_size") or math.inf):
        shared = [override for override in shared if not override.startswith("dataset.study_size=")]
        sizes.insert(0, f"dataset.study_size={questions}")
    sizes.append(f"pool={config.get('pool') or study.run.folder / 'pool'}")
    return command_line("mse", *shared, *sizes)


def _questions_there(dataset: Mapping[str, Any]) -> tuple[float, float]:
    """Return the numbers of questions available for studies and for training.

    If a number cannot be read from the configuration or the file, it is inf (no known limit).
    """
    train = dataset.get("train_size") or math.inf
    if dataset.get("kind") == "one_step":
        return max(map(STUDY_QUESTIONS.__getitem__, dataset["tables"])), train
    if dataset.get("kind") != "jsonl":
        return math.inf, train
    try:
        rows, test_rows = JsonlConfig(**dataset).row_counts()
    except ConfigError:
        # The file is not on this machine, so its rows cannot be counted.
        return math.inf, train
    tests, least_tests = (dataset["test_size"] or 0, 2) if test_rows is None else (0, 0)
    return rows - tests, min(train, max(0, rows - max(tests, least_tests) - dataset["study_size"]))


def _place(config: Mapping[str, Any]) -> str:
    return config["dataset"].get("path") or f"dataset={config['dataset']['name']}"


def _questions_for_best(study: Study) -> int:
    """Return the number of questions that the next study should have to find the best G."""
    half, most = prompts_to_decide(study.need(SCALING))
    follow_up = (1 + MAX_FOLLOW_UP) * study.result.questions
    return int(min(most, max(half, follow_up) if math.isfinite(half) else follow_up))


def _best_of_loss(study: Study, best: int) -> int:
    """Return the best G for the study's objective.

    If the study measured the objective and another G is significantly better for it, this G is
    returned. Otherwise the result is `best`, the best G of the unbiased gradient.
    """
    name = study.run.value("objective.name")
    rows = [row for row in study.of(LOSSES) or [] if row.loss == name]
    decided = [
        row for row in rows if row.efficiency_same_g is not None and row.efficiency_same_g.is_known
    ]
    if not decided or best in [row.group_size for row in decided if row.may_be_best]:
        return best
    return next(row.group_size for row in decided if row.best)


def _equal_rewards_step(equal: CompletionCounts, config: Mapping[str, Any]) -> str:
    """Return the next step if all rewards are equal, depending on the most frequent outcome."""
    names = ("right", "cut", "no_answer", "wrong")
    counts = {name: getattr(equal, name) or 0 for name in names}
    fate = max(names, key=counts.__getitem__)
    if (config.get("pool") or "").endswith(".parquet"):
        which = "longer completions" if fate == "cut" and counts["cut"] else "other questions"
        return f"log {which}, with some right and some wrong answers, and import them"
    shared = [*policy_overrides(config), *study_overrides(config)]
    if config["study"]["questions"] is not None:
        shared.append(f"study.questions={config['study']['questions']}")

    def without(*groups: str) -> list[str]:
        return [override for override in shared if not override.startswith(groups)]

    if not counts[fate] or fate == "no_answer":
        return command_line("mse", *policy_overrides(config), "debug=prompts")
    if fate == "right":
        return "harder questions: " + command_line("mse", *without("dataset"), "dataset=NAME")
    if fate == "cut":
        longer = f"max_completion_length={2 * config['max_completion_length']}"
        return command_line("mse", *without("max_completion_length"), longer)
    shots = "examples in the prompt (prompt.shots=4), " * (not config["prompt"]["shots"])
    return f"easier questions (dataset=NAME), {shots}or another model: " + command_line(
        "mse", *without("model"), "model=MODEL"
    )


def policy_overrides(config: Mapping[str, Any]) -> list[str]:
    """Return overrides that select model, questions, sampling and rewards of a configuration."""
    overrides = []
    for group, other in (("model", "hub"), ("dataset", "own"), ("prompt", "plain")):
        node = config[group]
        shipped = f"{node['name']}.yaml" in {file.name for file in (CONF / group).iterdir()}
        of_kind = "jsonl" if node.get("kind") == "jsonl" else other
        name = node["name"] if shipped else of_kind
        changes = list(_changes(node, values_of(group, name), f"{group}."))
        if name == "hub" and "/" in node["model_name_or_path"]:
            place = next(x for x in changes if x.startswith("model.model_name_or_path="))
            changes.remove(place)
            overrides += [place.replace(".model_name_or_path", "", 1), *changes]
        else:
            overrides += [f"{group}={name}", *changes]
    values = yaml.safe_load((CONF / "common.yaml").read_text())
    values["max_completion_length"] = config["dataset"].get("max_completion_length")
    sampling = {key: config[key] for key in ("temperature", "max_completion_length")}
    rewards = {key: config[key] for key in ("reward_funcs", "reward_weights") if key in config}
    return [*overrides, *_changes(sampling | rewards, values)]


def study_overrides(config: Mapping[str, Any]) -> list[str]:
    """Return overrides that select the measurements of a study and its random draws.

    They set baselines, group sizes, methods, seed, sampler and budget.
    """
    values = yaml.safe_load((CONF / "mse.yaml").read_text())
    budget = yaml.safe_load((CONF / "budget" / "study.yaml").read_text())
    seed = yaml.safe_load((CONF / "common.yaml").read_text())["seed"]
    # A stored configuration may be from another version, so only fields that still exist are used.
    fields = values["study"].keys() - set(SINGLE_STUDY_FIELDS)
    study = {key: x for key, x in config["study"].items() if key in fields}
    if not set(study.get("methods", ())) <= set(METHODS):
        study.pop("methods")
    sizes = {key: x for key, x in config["budget"].items() if key in budget}
    sampler = config["rollout"]["name"]
    engine = values_of("rollout", sampler)
    chosen = {
        key: config[key]
        for key in ("seed", "baselines", "group_sizes", "objectives")
        if key in config
    }
    return [
        *objective_overrides(config),
        *_changes(chosen, values | {"seed": seed}),
        *_changes(study, values["study"], "study."),
        *([] if sampler == "local" else [f"rollout={sampler}"]),
        *_changes({key: config["rollout"].get(key) for key in engine}, engine, "rollout."),
        *_changes(sizes, budget, "budget."),
    ]


def objective_overrides(config: Mapping[str, Any]) -> list[str]:
    """Return overrides that select the objective and baseline of a study or training run."""
    objective, baseline = config.get("objective") or {}, config.get("baseline") or {}
    if objective.get("name") not in PRESETS or baseline.get("name") not in BASELINES:
        # The study ran in another version, or with a baseline that is not installed here.
        return []
    preset = PRESETS[objective["name"]]
    chosen = preset.baseline
    words = [f"objective={objective['name']}"] if objective["name"] != "algorithm1" else []
    today = asdict(preset.objective)
    words += _changes({key: x for key, x in objective.items() if key in today}, today, "objective.")
    options = chosen.options if chosen else {}
    if baseline["name"] != (chosen.name if chosen else "leave_one_out"):
        words.append(f"baseline={baseline['name']}")
        options = BASELINES[baseline["name"]].options
    return [*words, *_changes(baseline.get("options") or {}, options, "baseline.options.")]


def _changes(node: Mapping[str, Any], values: Mapping[str, Any], prefix: str = "") -> Iterator[str]:
    """Yield overrides for the fields whose values differ from the node's configuration file."""
    for key, value in node.items():
        default = values.get(key)
        if value == default or str(default).startswith("${"):
            continue
        if isinstance(value, dict) and (key != "template_options" or not value):
            continue
        text = yaml.safe_dump(value, default_flow_style=True, width=math.inf).split("\n")[0]
        if isinstance(value, str) and not re.fullmatch(r"[\w./:@+-]+", value):
            text = "'" + value.replace("\\", "\\\\").replace("'", "\\'") + "'"
            # OmegaConf would interpolate an unescaped `${`.
            text = text.replace("${", "\\${")
        if isinstance(value, list) and not {"'", '"'} & set(text):
            # Without spaces, a shell does not split the list.
            text = text.replace(", ", ",")
        yield f"{prefix}{key}={text}"
