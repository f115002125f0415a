"""Options of sampling."""

from __future__ import annotations

from dataclasses import dataclass

from grpo_ustat.config.parts import SamplerOptions


@dataclass(frozen=True)
class Sampling:
    """Options with which completions are sampled."""

    # Seed of the random numbers, and name of their stream. Different streams, such as training and
    # evaluation, have independent random numbers. The key of a random number also contains the step
    # and the prompt's id.
    seed: int
    stream: str
    # Maximum number of tokens in a completion.
    max_completion_length: int
    # Divisor of the logits.
    temperature: float = 1.0
    # Number of completions sampled in parallel. It affects speed and memory, but not the random
    # numbers.
    rows: int = 512
    # True to choose the most likely token instead of drawing one.
    greedy: bool = False

    @classmethod
    def of(cls, sampler: SamplerOptions, stream: str, greedy: bool = False) -> Sampling:
        """Return the configured options, for the stream of random numbers with the given name."""
        return cls(
            seed=sampler.seed,
            stream=stream,
            max_completion_length=sampler.max_completion_length,
            temperature=sampler.temperature,
            rows=sampler.rows,
            greedy=greedy,
        )
