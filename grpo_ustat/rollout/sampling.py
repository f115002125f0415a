"""Options of sampling."""

from __future__ import annotations

from dataclasses import dataclass

from grpo_ustat.config.parts import SamplerOptions


@dataclass(frozen=True)
class Sampling:
    """Options of sampling."""

    # With `stream`, and `step` of each call, it keys the draws.
    seed: int
    stream: str
    # Tokens after which a completion is cut.
    max_completion_length: int
    # Divides the logits.
    temperature: float = 1.0
    # Completions sampled side by side; changes speed and memory, not draws.
    rows: int = 512
    # Take the most likely token each time instead of a drawn one.
    greedy: bool = False

    @classmethod
    def of(cls, sampler: SamplerOptions, stream: str, greedy: bool = False) -> Sampling:
        """Return the configured options for one stream of draws."""
        return cls(
            seed=sampler.seed,
            stream=stream,
            max_completion_length=sampler.max_completion_length,
            temperature=sampler.temperature,
            rows=sampler.rows,
            greedy=greedy,
        )
