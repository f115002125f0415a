"""Names of scalars in the logs of trainers, and the common field that each name means.

A name may contain a placeholder such as `{name}` for a part that depends on the run, for example
the name of a reward function. The column `source` names the source file of the trainer in which the
name was found. The source files are the newest of mid-2026 unless an entry says otherwise.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from functools import cache
from typing import NamedTuple

TRL, VERL, PRIME_RL, NEMO_RL, OURS = "TRL", "verl", "prime-rl", "NeMo-RL", "grpo-ustat"


class Name(NamedTuple):
    """Name of a scalar in the log of a trainer."""

    field: str
    trainer: str
    name: str
    source: str
    # Factor by which the logged number is multiplied to get the unit of the field.
    factor: float = 1.0


_GRPO = "trl/trainer/grpo_trainer.py"
_TRANSFORMERS = "transformers/trainer.py"
_VERL_DATA, _VERL_LOSS = "verl/trainer/ppo/metric_utils.py", "verl/trainer/ppo/core_algos.py"
_PRIME, _PRIME_TRAIN = "prime_rl/orchestrator/metrics.py", "prime_rl/trainer/rl/train.py"
_NEMO, _NEMO_LOSS = "nemo_rl/algorithms/grpo.py", "nemo_rl/algorithms/loss/loss_functions.py"
_TRL_NAMES = [
    Name("reward", TRL, "reward", _GRPO),
    # Standard deviation over the whole batch; early versions of TRL logged the mean over groups.
    Name("reward_std", TRL, "reward_std", _GRPO),
    Name("zero_variance", TRL, "frac_reward_zero_std", _GRPO),
    Name("reward/{name}", TRL, "rewards/{name}/mean", _GRPO),
    Name("truncated", TRL, "completions/clipped_ratio", _GRPO),
    Name("clip_ratio", TRL, "clip_ratio/region_mean", _GRPO),
    Name("clip_ratio", TRL, "clip_ratio", f"{_GRPO}, Liger kernel"),
    Name("kl", TRL, "kl", _GRPO),
    Name("entropy", TRL, "entropy", _GRPO),
    Name("grad_norm", TRL, "grad_norm", _TRANSFORMERS),
    Name("learning_rate", TRL, "learning_rate", _TRANSFORMERS),
]
NAMES = [
    *_TRL_NAMES,
    # The callbacks of transformers for W&B and TensorBoard add the prefix `train/` to TRL's names.
    *(name._replace(name=f"train/{name.name}") for name in _TRL_NAMES),
    Name("reward", VERL, "critic/score/mean", _VERL_DATA),
    Name("reward_min", VERL, "critic/score/min", _VERL_DATA),
    Name("reward_max", VERL, "critic/score/max", _VERL_DATA),
    Name("truncated", VERL, "response_length/clip_ratio", _VERL_DATA),
    Name("clip_ratio", VERL, "actor/pg_clipfrac", _VERL_LOSS),
    Name("kl", VERL, "actor/kl_loss", "verl/workers/actor/dp_actor.py"),
    Name("kl", VERL, "actor/reward_kl_penalty", "verl/trainer/ppo/ray_trainer.py"),
    Name("entropy", VERL, "actor/entropy", "verl/trainer/ppo/ray_trainer.py"),
    Name("grad_norm", VERL, "actor/grad_norm", "verl/workers/actor/dp_actor.py"),
    Name("learning_rate", VERL, "actor/lr", "verl/workers/fsdp_workers.py"),
    Name("generated_batches", VERL, "train/num_gen_batches", "DAPO recipe, dapo_ray_trainer.py"),
    Name("reward", PRIME_RL, "train/agg/all/{agent}/reward/mean", _PRIME),
    Name("reward_min", PRIME_RL, "train/agg/all/{agent}/reward/min", _PRIME),
    Name("reward_max", PRIME_RL, "train/agg/all/{agent}/reward/max", _PRIME),
    Name("all_zero", PRIME_RL, "train/agg/all/{agent}/solved_none", _PRIME),
    Name("all_one", PRIME_RL, "train/agg/all/{agent}/solved_all", _PRIME),
    Name("truncated", PRIME_RL, "train/agg/all/{agent}/is_truncated/mean", _PRIME),
    Name("rollouts", PRIME_RL, "progress/rollouts", "prime_rl/orchestrator/orchestrator.py"),
    Name("groups", PRIME_RL, "progress/tasks", "prime_rl/orchestrator/orchestrator.py"),
    Name("mismatch_kl", PRIME_RL, "mismatch_kl/all/mean", _PRIME_TRAIN),
    Name("entropy", PRIME_RL, "entropy/all/mean", _PRIME_TRAIN),
    Name("grad_norm", PRIME_RL, "optim/grad_norm", _PRIME_TRAIN),
    Name("learning_rate", PRIME_RL, "optim/lr", _PRIME_TRAIN),
    Name("reward", NEMO_RL, "train/reward", _NEMO),
    Name("all_zero", NEMO_RL, "train/baseline_reward/pct_0", _NEMO, 0.01),
    Name("all_one", NEMO_RL, "train/baseline_reward/pct_1", _NEMO, 0.01),
    Name("truncated", NEMO_RL, "train/truncation_rate", "nemo_rl/experience/rollouts.py"),
    Name("kl", NEMO_RL, "train/kl_penalty", _NEMO_LOSS),
    Name("mismatch_kl", NEMO_RL, "train/gen_kl_error", _NEMO_LOSS),
    Name("entropy", NEMO_RL, "train/approx_entropy", _NEMO_LOSS),
    Name("grad_norm", NEMO_RL, "train/grad_norm", _NEMO),
    Name("learning_rate", NEMO_RL, "train/lr", _NEMO),
    Name("generated_batches", NEMO_RL, "train/dynamic_sampling_num_gen_batches", _NEMO),
    # Our own log has TRL's names, and additionally the number of rollouts of all steps so far.
    Name("total_rollouts", OURS, "rollouts", "train/trainer.py"),
]
# Names that only one trainer logs. They identify the trainer of a log whose other names also fit
# other trainers.
SIGNATURES = {
    OURS: ("frac_completions_skipped", "seconds_generate"),
    NEMO_RL: ("train/baseline_reward/pct_0", "train/global_valid_seqs", "train/gen_kl_error"),
    VERL: ("critic/score/mean", "critic/rewards/mean", "actor/grad_norm", "actor/pg_clipfrac"),
    PRIME_RL: ("optim/grad_norm", "progress/rollouts", "mismatch_kl/all/mean"),
    TRL: ("frac_reward_zero_std", "completions/clipped_ratio", "reward_std",
          "train/frac_reward_zero_std", "train/completions/clipped_ratio", "train/reward_std"),
}  # fmt: skip
# Settings that contain the group size. Names of nested settings are joined by dots.
GROUP_SIZE_SETTINGS = (
    "num_generations", "actor_rollout_ref.rollout.n", "grpo.num_generations_per_prompt",
    "orchestrator.group_size", "group_size",
)  # fmt: skip
# Settings that contain the number of prompts per step, each with the setting of the group size.
PROMPT_SETTINGS = {
    "data.train_batch_size": "actor_rollout_ref.rollout.n",
    "grpo.num_prompts_per_step": "grpo.num_generations_per_prompt",
}
LEAVE_ONE_OUT_SETTING = "grpo.use_leave_one_out_baseline"
# Fields whose values are between 0 and 1, and fields that cannot be negative.
SHARES = ("zero_variance", "all_zero", "all_one", "truncated", "clip_ratio")
NONNEGATIVE = (
    "reward_std",
    "grad_norm",
    "learning_rate",
    "generated_batches",
    "rollouts",
    "groups",
)


@cache
def _pattern(name: str) -> re.Pattern[str]:
    """Compile a name with placeholders; a placeholder matches any text without a slash."""
    parts = re.split(r"\{\w+\}", name)
    return re.compile("([^/]+)".join(map(re.escape, parts)))


def match(logged: str, entry: Name) -> str | None:
    """Return the field that a logged name means if it matches an entry; None if it does not.

    >>> match("rewards/format/mean", NAMES[3])
    'reward/format'
    >>> match("rewards/format/std", NAMES[3])
    """
    found = _pattern(entry.name).fullmatch(logged)
    if found is None:
        return None
    return entry.field.format(name=found[1]) if "{name}" in entry.field else entry.field


def trainer_of(names: Iterable[str]) -> str:
    """Return the trainer that logs these names; empty if they do not identify one trainer."""
    present = set(names)
    for trainer, signatures in SIGNATURES.items():
        if present & set(signatures):
            return trainer
    fitting = {entry.trainer for entry in NAMES for name in present if match(name, entry)}
    return fitting.pop() if len(fitting) == 1 else ""
