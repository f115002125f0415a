"""Reward function that gives no reward and logs the tokens of every completion."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from grpo_ustat.config.schema import ConfigError


def record(
    prompts: Sequence[Any],
    completion_ids: Sequence[Sequence[int]],
    trainer_state: Any,
    log_extra: Any,
    **_: Any,
) -> list[None]:
    """Return None for each completion and log its tokens; this is a TRL reward function.

    The function has no effect on training. Add it to the reward functions of a `GRPOTrainer` with
    `log_completions=True`. TRL's logs, such as `completions/completions_00010.parquet`, then have
    three more columns: `prompt_ids`, `completion_ids` and `policy_step`. With the logged token ids,
    no text has to be tokenised again. `policy_step` is the number of updates before the completions
    were written; the policy that wrote them is `checkpoint-<policy_step>`.
    """
    # `log_extra` is a method of the trainer.
    trainer = log_extra.__self__
    if any(getattr(trainer, name, None) for name in ("tools", "environments", "rollout_func")):
        raise ConfigError(
            "grpo_ustat.integrations.trl.record cannot log a run with tools, environments or a "
            "rollout_func, because a reward function cannot distinguish their tokens from the "
            "policy's tokens: remove record from reward_funcs"
        )
    prompt_ids, *_rest = trainer._tokenize_prompts(list(prompts))
    log_extra("prompt_ids", [list(ids) for ids in prompt_ids])
    log_extra("completion_ids", [list(ids) for ids in completion_ids])
    log_extra("policy_step", [trainer_state.global_step] * len(completion_ids))
    return [None] * len(completion_ids)
