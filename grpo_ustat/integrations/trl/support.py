"""Checks that refuse a trainer whose gradient cannot be measured, before training starts."""

from __future__ import annotations

import re
from typing import Any

from torch import nn

from grpo_ustat.config.schema import ConfigError
from grpo_ustat.integrations.trl.sharding import check_sharding

USED_ATTRIBUTES = (
    "_generate_and_score_completions", "_logs", "_metrics", "reward_weights", "reward_func_names",
    "num_generations", "temperature",
)  # fmt: skip


def check_trainer(trainer: Any) -> None:
    """Refuse a trainer whose gradient cannot be measured."""
    if "GRPOTrainer" not in [kind.__name__ for kind in type(trainer).__mro__]:
        raise ConfigError(
            f"GradientNoiseCallback measures TRL's GRPOTrainer, not {type(trainer).__name__}"
        )
    if missing := [name for name in USED_ATTRIBUTES if not hasattr(trainer, name)]:
        raise ConfigError(
            f"GRPOTrainer in this version of TRL has no {missing[0]}: install TRL 1.16"
        )
    check_sharding(trainer)
    has_tools = any(
        getattr(trainer, name, None) for name in ("tools", "environments", "rollout_func")
    )
    if getattr(trainer, "mask_truncated_completions", False) and has_tools:
        raise ConfigError(
            "with mask_truncated_completions=True, the tokens that tools wrote in a truncated "
            "completion cannot be identified: use mask_truncated_completions=False"
        )


def check_parameters(model: nn.Module, pattern: str | None) -> None:
    """Refuse a pattern that matches no trainable parameter."""
    if pattern is None:
        return
    names = [name for name, parameter in model.named_parameters() if parameter.requires_grad]
    try:
        fits = any(re.search(pattern, name) for name in names)
    except re.error as error:
        raise ConfigError(
            f"parameters={pattern!r} is not a valid regular expression ({error}): try 'norm' or "
            "'attn'"
        ) from None
    if not fits:
        raise ConfigError(
            f"parameters={pattern!r} matches none of the {len(names)} trainable parameters, "
            f"such as {', '.join(names[:: max(1, len(names) // 3)][:3])}: use part of a name"
        )
