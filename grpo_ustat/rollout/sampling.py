"""Options of sampling."""

from __future__ import annotations

from dataclasses import dataclass

from grpo_ustat.config.parts import SamplerOptions


@dataclass(frozen=True)
class Sampling:
    """Options of sampling."""

    # Seed, stream and the step of a call are the key of its draws.
    seed: int
    stream: str
    # Tokens after which a completion is cut.
    max_completion_length: int
    # Divides the logits.
    temperature: float = 1.0
    # Completions sampled side by side; changes speed and memory, not draws.
    rows: int = 512
    # True: take the most likely token instead of a drawn one.
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
