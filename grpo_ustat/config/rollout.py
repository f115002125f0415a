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
        "engine that writes completions, in this process: local, the model itself, or vllm",
        choices=ROLLOUTS,
    )
    gpu_memory_utilization: float | None = field(
        "share of the GPU's memory, or of all memory on a CPU, that vLLM may hold; null: vLLM's "
        "default",
        default=None,
    )
    max_model_len: int | None = field(
        "for prompt and completion together in vLLM; null: prompt.max_length and "
        "max_completion_length, or as many as the model has positions",
        "tokens",
        default=None,
    )
    enforce_eager: bool | None = field(
        "run vLLM without CUDA graphs; null: vLLM's default", default=None
    )

    def check(self) -> None:
        """Refuse options of vLLM without vLLM."""
        for name in VLLM_FIELDS:
            if self.name != "vllm" and getattr(self, name) is not None:
                raise ConfigError(f"rollout.{name} is an option of vLLM: use rollout=vllm with it")
