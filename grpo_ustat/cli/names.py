"""Names of TRL, verl and papers that newcomers type for our fields and groups."""

from __future__ import annotations

import re

from grpo_ustat.cli.choices import RUN_SCHEMAS, choices_of, command_of, groups_of, is_choice
from grpo_ustat.config.command_line import command_line
from grpo_ustat.config.load import CONF, all_fields
from grpo_ustat.config.values import example_value, field_at, is_of_kind, to_type

# Words of TRL, verl and papers, with our names for fields or config groups that accept the same
# values. If there are several of our names, the first that the command has is used.
MEANT = {
    "policy model_name model_name_or_path": "model theorem.problem",
    "data dataset_name train_dataset train_files": "dataset",
    "algo algorithm loss": "objective",
    "adv_estimator advantage_estimator estimator": "baseline",
    "G num_generations rollout.n n_samples_per_prompt group_size "
    "group_sizes": "group_size group_sizes theorem.group_size",
    "n batch_size train_batch_size rollouts": "budget.rollouts study.rollouts theorem.rollouts",
    "lr learning_rate": "learning_rate theorem.constant_rates",
    "steps total_training_steps": "max_steps theorem.steps",
    "ppo_epochs num_iterations mu": "objective.num_iterations",
    "beta kl_coef kl_loss_coef": "objective.beta",
    "epsilon clip_ratio cliprange": "objective.epsilon",
    "epsilon_high clip_ratio_high": "objective.epsilon_high",
    "max_tokens max_new_tokens max_response_length response_length": "max_completion_length",
    "max_prompt_length": "prompt.max_length",
    "reward reward_fn reward_func rewards": "reward_funcs",
    "output_dir": "output_root",
    "path": "runs",
    "device": "launch.device",
    "num_processes n_gpus_per_node nproc_per_node": "launch.num_processes",
    "grad_clip clip_grad": "max_grad_norm",
    "report_to": "logger",
    "problem": "theorem.problem",
    "test_freq": "eval_steps",
    "save_freq": "save_steps",
}
NAMES = {word: names.split() for words, names in MEANT.items() for word in words.split()}
# Words whose values do not fit our field, with our field or override and a comment after a comma.
OTHER_VALUES = {
    "gradient_accumulation_steps": "micro_batch_tokens, the padded tokens of a backward pass",
    "per_device_train_batch_size": "budget.rollouts, completions per step on all devices",
    "num_train_epochs": "max_steps, steps with budget.rollouts completions each",
    "total_epochs": "max_steps, steps with budget.rollouts completions each",
    "loss_type": "objective=dapo or another loss, or objective.loss_type",
    "use_vllm": "rollout=vllm",
    "use_peft": "lora=r16, or lora.r",
    "wandb": "logger=wandb",
    "resume_from_checkpoint": "on_existing=resume",
    "fsdp": "launch.fsdp2=true",
    "run_name": "not offered, because settings determine the name of a run; output_root is the "
    "folder of all runs",
    "scale_rewards": "a baseline: use baseline=group_std for group, baseline=batch_std for batch "
    "and baseline=group_mean for none",
    **dict.fromkeys(
        ("top_p", "top_k", "min_p"),
        "not offered, because completions must come from the distribution whose gradient is "
        "computed",
    ),
}
# Other names for the choices of a config group.
CHOICES = {
    "baseline": {"rloo": "leave_one_out", "grpo": "group_std", "reinforce": "none"},
    "objective": {"drgrpo": "dr_grpo"},
}
ROW_FILE = re.compile(r".*\.(jsonl|json|csv|parquet)(\.\w+)?", re.IGNORECASE)


def meant(key: str, value: str, schema: type) -> str | None:
    """Return the correction for an unknown key; None if `NAMES` and `OTHER_VALUES` do not have it.

    Args:
        key, value: typed key and value.
        schema: schema of the command.

    >>> from grpo_ustat.config.load import SCHEMAS
    >>> meant("policy", "tiny", SCHEMAS["mse"]), meant("steps", "10", SCHEMAS["mse"])
    ('write model=tiny', 'it is max_steps of train, as in grpo-ustat train max_steps=10')
    """
    word = _word(key)
    if word in OTHER_VALUES:
        text = OTHER_VALUES[word]
        name = re.split("[ =,]", text)[0]
        is_here = has(schema, name) or not any(has(x, name) for x in RUN_SCHEMAS.values())
        if not is_here or schema not in RUN_SCHEMAS.values():
            return f"in train it is {text}"
        return f"write {text}" if re.match(r"[\w.]+=", text) else f"here it is {text}"
    if word is None:
        return None
    for name in NAMES[word]:
        if has(schema, name):
            # theorem=7 means theorem=theorem7.
            numbered = f"{word}{value}"
            chosen = numbered if is_choice(name, numbered, schema) else value
            return _write(name, chosen, schema) if value else f"here it is {name}"
    for name in NAMES[word]:
        for other in RUN_SCHEMAS.values():
            if has(other, name):
                line = override_of(name, value, other)
                command = command_of(other)
                typed = command_line(command, *line.split())
                return f"it is {name} of {command}, as in {typed}"
    return None


def has(schema: type, name: str) -> bool:
    """Return True if a command has a field or a config group of this name."""
    return name in groups_of(schema) or field_at(name, all_fields(schema)) is not None


def _word(key: str) -> str | None:
    """Return the longest suffix of a key that `NAMES` or `OTHER_VALUES` has."""
    parts = key.replace("-", "_").split(".")
    ends = [".".join(parts[first:]) for first in range(len(parts))]
    return next((end for end in ends if end in NAMES or end in OTHER_VALUES), None)


def _write(name: str, value: str, schema: type) -> str:
    """Return the correction: the override to write, or the choices of a config group."""
    if name not in groups_of(schema) or override_of(name, value, schema) != f"{name}=NAME":
        return f"write {override_of(name, value, schema)}"
    elsewhere = [x for x in groups_of(schema) if is_choice(x, value, schema)]
    if elsewhere:
        return f"write {' or '.join(f'{group}={value}' for group in elsewhere)}"
    places = ", org/name or FOLDER" if name == "model" else ""
    choices = ", ".join(choices_of(name, schema))
    return f"write {name}=NAME, a name from {choices}{places}"


def override_of(name: str, value: str, schema: type) -> str:
    """Return an override with the given value, or with a valid value if it is invalid."""
    if name in groups_of(schema):
        if name == "dataset" and ROW_FILE.fullmatch(value):
            return f"dataset=jsonl dataset.path={value}"
        value = CHOICES.get(name, {}).get(value.lower(), value)
        is_place = name == "model" and "/" in value
        return f"{name}={value if is_place or is_choice(name, value, schema) else 'NAME'}"
    field = field_at(name, all_fields(schema))
    assert field is not None
    kind = field.kind.removesuffix(" or null")
    of = kind.removeprefix("list of ")
    if of in ("int", "float", "bool") and not all(
        is_of_kind(x, of) for x in re.sub(r"[\[\] ]", "", value).split(",")
    ):
        return f"{name}={example_value(field, CONF) or '...'}"
    if kind.startswith("list") and not value.startswith("["):
        value = f"[{value}]"
    elif "," in value and kind in ("int", "float", "bool"):
        return f"-m {name}={value}"
    return to_type(name, value, None if "," in value else field.kind)
