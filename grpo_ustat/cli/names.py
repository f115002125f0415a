"""Names from other programs that newcomers type for our fields and groups.

The names come from TRL, verl, transformers, papers and everyday language.
"""

from __future__ import annotations

import difflib
import re

from grpo_ustat.cli.choices import RUN_SCHEMAS, choices_of, command_of, groups_of, is_choice
from grpo_ustat.config.command_line import command_line
from grpo_ustat.config.load import CONF, all_fields
from grpo_ustat.config.values import example_value, field_at, is_of_kind, to_type

# Words that users type, with our names for fields or config groups that accept the same values. If
# there are several of our names, the first that the command has is used.
MEANT = {
    "policy actor checkpoint llm model_name model_name_or_path base_model "
    "pretrained": "model theorem.problem",
    "data data_set dataset_name train_dataset train_files task env environment "
    "benchmark": "dataset",
    "data_path data_file train_file": "dataset.path",
    "template chat_template prompts prompt_template": "prompt",
    "system system_prompt": "prompt.system",
    "shots few_shot num_shots fewshot": "prompt.shots",
    "algo algorithm loss loss_fn loss_function": "objective",
    "adv_estimator advantage advantages estimator advantage_estimator": "baseline",
    "G group k num_generations n_generations samples_per_prompt num_samples_per_prompt "
    "generations group_size group_sizes rollout.n n_samples_per_prompt "
    "rollouts_per_prompt": "group_size group_sizes theorem.group_size",
    "n batch batch_size train_batch_size rollouts num_rollouts rollout_batch global_batch_size "
    "prompts_per_step": "budget.rollouts study.rollouts theorem.rollouts",
    "N samples n_samples num_samples completions num_completions": "budget.pool_completions "
    "budget.rollouts",
    "lr learning_rate optim.lr": "learning_rate theorem.constant_rates",
    "steps iterations iters max_iters num_steps total_steps total_training_steps "
    "train_steps": "max_steps theorem.steps",
    "minibatches num_mini_batches": "objective.num_minibatches",
    "minibatch_size mini_batch_size ppo_mini_batch_size": "objective.minibatch_size",
    "ppo_epochs num_iterations mu": "objective.num_iterations",
    "kl kl_coef kl_beta kl_coeff kl_loss_coef beta": "objective.beta",
    "eps epsilon clip clip_ratio cliprange clip_range clip_eps clip_ratio_low": "objective.epsilon",
    "epsilon_high clip_ratio_high clip_high": "objective.epsilon_high",
    "entropy_coeff entropy_coef": "objective.entropy_coef",
    "temp": "temperature",
    "max_tokens max_new_tokens max_length response_length max_response_length seq_len "
    "max_seq_length length": "max_completion_length",
    "max_prompt_length prompt_length": "prompt.max_length",
    "reward reward_fn reward_func reward_function rewards": "reward_funcs",
    "output out output_dir outdir out_dir save_dir default_local_dir": "output_root",
    "dir folder": "runs output_root",
    "device": "launch.device",
    "num_gpus ngpus nproc world_size num_processes n_gpus_per_node nproc_per_node "
    "processes": "launch.num_processes",
    "workers num_workers": "launch.workers launch.judge_workers",
    "threads num_threads": "launch.num_threads",
    "dtype precision torch_dtype": "model.dtype",
    "attn attn_implementation": "model.attn_implementation",
    "revision": "model.revision",
    "opt optim": "optimizer",
    "scheduler lr_scheduler lr_scheduler_type": "schedule.lr_scheduler_type",
    "warmup warmup_steps lr_warmup_steps": "schedule.warmup_steps",
    "weight_decay wd": "optimizer.weight_decay",
    "grad_clip max_norm clip_grad gradient_clip grad_norm": "max_grad_norm",
    "adapter adapters peft": "lora",
    "tracker report_to logging log_with": "logger",
    "project project_name wandb_project": "logger.project",
    "engine backend sampler": "rollout",
    "grad_checkpointing checkpointing enable_gradient_checkpointing": "gradient_checkpointing",
    "eval_every eval_interval test_freq evaluation_steps": "eval_steps",
    "save_every save_interval save_freq": "save_steps",
    "seeds random_seed": "seed",
    "dry dryrun": "dry_run",
    "num_questions n_questions num_prompts P": "study.questions",
    "lemma result proposition corollary": "theorem",
    "bandit mdp problem": "theorem.problem",
    "exp figure table": "experiment",
    "paths source sources inputs": "runs",
}
NAMES = {word: names.split() for words, names in MEANT.items() for word in words.split()}
# Words whose values do not fit our field, with our field or override and a comment after a comma.
OTHER_VALUES = {
    "chat_template_kwargs": "prompt.template_options",
    "gradient_accumulation_steps": "micro_batch_tokens, the padded tokens of a backward pass",
    "per_device_train_batch_size": "budget.rollouts, completions per step on all devices",
    "micro_batch_size": "micro_batch_tokens, the padded tokens of a backward pass",
    **dict.fromkeys(
        ("num_train_epochs", "epochs", "num_epochs", "total_epochs", "n_epochs"),
        "max_steps, steps with budget.rollouts completions each",
    ),
    "loss_type": "objective=dapo or another loss, or objective.loss_type",
    **dict.fromkeys(("use_vllm", "vllm"), "rollout=vllm"),
    **dict.fromkeys(("use_peft", "lora_r", "lora_rank", "use_lora"), "lora=r16, or lora.r"),
    **dict.fromkeys(("gpu", "gpus", "cuda"), "launch.device=cuda"),
    **dict.fromkeys(("wandb", "use_wandb"), "logger=wandb"),
    **dict.fromkeys(("resume", "resume_from_checkpoint"), "on_existing=resume"),
    **dict.fromkeys(("overwrite", "overwrite_output_dir"), "on_existing=overwrite"),
    **dict.fromkeys(("fsdp", "deepspeed"), "launch.fsdp2=true"),
    "fp16": "bf16=true",
    "verbose": "hydra.verbose=true",
    **dict.fromkeys(
        ("name", "run_name", "exp_name", "experiment_name"),
        "not offered, because settings determine the name of a run; output_root is the folder of "
        "all runs",
    ),
    "multi_objective_aggregation": "a baseline: use baseline=group_std for sum_then_normalize and "
    "baseline=gdpo for normalize_then_sum",
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
    "baseline": {
        **dict.fromkeys(("rloo", "loo", "reinforce_leave_one_out"), "leave_one_out"),
        **dict.fromkeys(("grpo", "group_norm", "group_normalised"), "group_std"),
        "reinforce": "none",
        "mean": "group_mean",
    },
    "objective": {"drgrpo": "dr_grpo", "dr-grpo": "dr_grpo"},
    "prompt": {"chat_template": "chat"},
    "rollout": {"hf": "local", "transformers": "local"},
}
ROW_FILE = re.compile(r".*\.(jsonl|json|csv|parquet)(\.\w+)?", re.IGNORECASE)
# Minimum length of a word whose misspellings are recognised, in letters.
MIN_LETTERS = 4


def meant(key: str, value: str, schema: type, *, fuzzy: bool = False) -> str | None:
    """Return the correction for an unknown key; None if `NAMES` and `OTHER_VALUES` do not have it.

    Args:
        key, value: typed key and value.
        schema: schema of the command.
        fuzzy: True to accept misspelt words.

    >>> from grpo_ustat.config.load import SCHEMAS
    >>> meant("policy", "tiny", SCHEMAS["mse"]), meant("steps", "10", SCHEMAS["mse"])
    ('write model=tiny', 'it is max_steps of train, as in grpo-ustat train max_steps=10')
    """
    word = _word(key, fuzzy)
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


def _word(key: str, fuzzy: bool) -> str | None:
    """Return the longest suffix of a key that `NAMES` or `OTHER_VALUES` has, in any case."""
    parts = key.replace("-", "_").split(".")
    ends = [".".join(parts[first:]) for first in range(len(parts))]
    for end in [*ends, *(end.lower() for end in ends)]:
        if end in NAMES or end in OTHER_VALUES:
            return end
    if not fuzzy:
        return None
    words = [word for word in (*NAMES, *OTHER_VALUES) if len(word) >= MIN_LETTERS]
    return next(iter(difflib.get_close_matches(key.lower(), words, n=1, cutoff=0.85)), None)


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
