"""Engines that write completions, of `train` and of the studies of `mse`."""

from __future__ import annotations

from dataclasses import dataclass

from grpo_ustat.config.schema import ConfigError, field

ROLLOUTS = ("local", "vllm")
VLLM_FIELDS = ("gpu_memory_utilization", "max_model_len", "enforce_eager")


@dataclass
class RolloutConfig:
    """Engine that writes completions."""

    name: str = field("local: in this process; vllm: by vLLM in this process", choices=ROLLOUTS)
    gpu_memory_utilization: float | None = field(
        "share of the GPU's memory, or of all on a CPU, that vLLM may hold; null: its own choice",
        default=None,
    )
    max_model_len: int | None = field(
        "of prompt and completion that vLLM has room for; null: prompt.max_length and "
        "max_completion_length, or what the model has positions for",
        "tokens",
        default=None,
    )
    enforce_eager: bool | None = field(
        "vLLM without CUDA graphs; null: its own choice", default=None
    )

    def check(self) -> None:
        """Refuse vLLM's options without vLLM."""
        for name in VLLM_FIELDS:
            if self.name != "vllm" and getattr(self, name) is not None:
                raise ConfigError(f"rollout.{name} is vLLM's: use rollout=vllm with it")
