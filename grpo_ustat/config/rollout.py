"""Engines that generate completions for `train` and `mse`."""

from __future__ import annotations

from dataclasses import dataclass

from grpo_ustat.config.schema import ConfigError, field

ROLLOUTS = ("local", "vllm")
VLLM_FIELDS = ("gpu_memory_utilization", "max_model_len", "enforce_eager")


@dataclass
class RolloutConfig:
    """Engine that generates completions."""

    name: str = field(
        "engine that generates completions in this process: local (the model itself) or vllm",
        choices=ROLLOUTS,
    )
    gpu_memory_utilization: float | None = field(
        "share of GPU memory, or of all memory on a CPU, that vLLM can use; null: vLLM's default",
        default=None,
    )
    max_model_len: int | None = field(
        "for prompt and completion together in vLLM; null: prompt.max_length + "
        "max_completion_length, at most the number of positions of the model",
        "tokens",
        default=None,
    )
    enforce_eager: bool | None = field(
        "run vLLM without CUDA graphs; null: vLLM's default", default=None
    )

    def check(self) -> None:
        """Refuse vLLM options if the engine is not vLLM."""
        for name in VLLM_FIELDS:
            if self.name != "vllm" and getattr(self, name) is not None:
                raise ConfigError(
                    f"rollout.{name} is an option of vLLM: use rollout=vllm or remove the option"
                )
