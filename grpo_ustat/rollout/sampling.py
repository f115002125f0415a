"""Options of sampling."""

from __future__ import annotations

from dataclasses import dataclass

from grpo_ustat.config.parts import SamplerOptions


@dataclass(frozen=True)
class Sampling:
    """Options of sampling."""

    # Seed and stream of the draws. The key of a draw also contains the step and the prompt id.
    seed: int
    stream: str
    # Maximum number of tokens in a completion.
    max_completion_length: int
    # Temperature that divides the logits.
    temperature: float = 1.0
    # Number of completions sampled in parallel; it affects speed and memory, not the draws.
    rows: int = 512
    # True to choose the most likely token instead of drawing one.
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
