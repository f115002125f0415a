"""Which trainers can be measured: what is refused is refused before training, in one line."""

from __future__ import annotations

from typing import Any

from grpo_ustat.config.schema import ConfigError

USED_ATTRIBUTES = (
    "_generate_and_score_completions", "_logs", "_metrics", "reward_weights", "reward_func_names",
    "num_generations", "temperature",
)  # fmt: skip


def check_trainer(trainer: Any) -> None:
    """Refuse a trainer whose gradient cannot be measured.

    Raises:
        ConfigError: it is no GRPOTrainer of TRL 1.16 or newer; parameters are sharded; rewards have
            no one sum; groups or batches are too small.
    """
    if "GRPOTrainer" not in [kind.__name__ for kind in type(trainer).__mro__]:
        raise ConfigError(
            f"GradientNoiseCallback measures TRL's GRPOTrainer, not {type(trainer).__name__}"
        )
    if missing := [name for name in USED_ATTRIBUTES if not hasattr(trainer, name)]:
        raise ConfigError(
            f"this TRL's GRPOTrainer has no {missing[0]}: use TRL 1.16, for which it was written"
        )
    plugin = getattr(trainer.accelerator.state, "deepspeed_plugin", None)
    if plugin is not None and plugin.zero_stage == 3:
        raise ConfigError(
            "DeepSpeed ZeRO-3 shards the parameters, of which scores need all: use ZeRO-2 or DDP, "
            "or measure checkpoints with grpo-ustat mse model=CHECKPOINT"
        )
    if getattr(trainer, "is_fsdp_enabled", False):
        raise ConfigError(
            "FSDP shards the parameters, of which scores need all: use DDP, or measure "
            "checkpoints with grpo-ustat mse model=CHECKPOINT"
        )
    if getattr(trainer, "multi_objective_aggregation", "sum_then_normalize") != (
        "sum_then_normalize"
    ):
        raise ConfigError(
            "multi_objective_aggregation='normalize_then_sum' divides each reward by its own "
            "group's spread, so there is no one reward whose gradient has an error: use "
            "'sum_then_normalize'"
        )
    has_tools = any(
        getattr(trainer, name, None) for name in ("tools", "environments", "rollout_func")
    )
    if getattr(trainer, "mask_truncated_completions", False) and has_tools:
        raise ConfigError(
            "mask_truncated_completions=True hides which tokens of a truncated completion tools "
            "wrote: use mask_truncated_completions=False"
        )
    if trainer.num_generations < 3:
        raise ConfigError(
            f"num_generations={trainer.num_generations}: C2 and C3 need at least 3 completions of "
            "a prompt; measure a checkpoint with grpo-ustat mse model=CHECKPOINT instead"
        )
    rows = trainer.args.generation_batch_size
    if rows < 2 * trainer.num_generations:
        raise ConfigError(
            f"generation_batch_size={rows} is one prompt of num_generations="
            f"{trainer.num_generations}: C1 compares prompts, so use at least "
            f"{2 * trainer.num_generations}"
        )
