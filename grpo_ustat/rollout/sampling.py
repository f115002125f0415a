"""Options of sampling."""

from __future__ import annotations

from dataclasses import dataclass

from grpo_ustat.config.parts import SamplerOptions


@dataclass(frozen=True)
class Sampling:
    """Options of sampling.

    Attributes:
        seed, stream: key the draws, with `step` of each call.
        max_completion_length: tokens after which a completion is cut.
        temperature: divides the logits.
        rows: completions sampled side by side; changes speed and memory, not draws.
        greedy: the most likely token each time instead of a drawn one.
        cuda_graphs: tokens as CUDA graphs where that can be; changes speed and memory, not draws.
    """

    seed: int
    stream: str
    max_completion_length: int
    temperature: float = 1.0
    rows: int = 512
    greedy: bool = False
    cuda_graphs: bool = False

    @classmethod
    def of(cls, sampler: SamplerOptions, stream: str, greedy: bool = False) -> Sampling:
        """The configured options for one stream of draws."""
        return cls(
            seed=sampler.seed,
            stream=stream,
            max_completion_length=sampler.max_completion_length,
            temperature=sampler.temperature,
            rows=sampler.rows,
            greedy=greedy,
            cuda_graphs=bool(sampler.rollout.cuda_graphs),
        )
