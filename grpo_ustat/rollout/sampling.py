"""Options of sampling."""

from __future__ import annotations

from dataclasses import dataclass

from grpo_ustat.config.common import Common


@dataclass(frozen=True)
class Sampling:
    """Options of sampling.

    Attributes:
        seed, stream: key the draws, with `step` of each call.
        max_completion_length: tokens after which a completion is cut.
        temperature: divides the logits.
        rows: completions sampled side by side; changes speed and memory, not draws.
        greedy: the most likely token each time instead of a drawn one.
    """

    seed: int
    stream: str
    max_completion_length: int
    temperature: float = 1.0
    rows: int = 512
    greedy: bool = False

    @classmethod
    def of(cls, config: Common, stream: str, greedy: bool = False) -> Sampling:
        """The configured options for one stream of draws."""
        return cls(
            seed=config.seed,
            stream=stream,
            max_completion_length=config.max_completion_length,
            temperature=config.temperature,
            rows=config.rollout_batch_size,
            greedy=greedy,
        )
