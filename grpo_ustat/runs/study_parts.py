"""Parts of the result of a study, see `runs.result`: curves, the scaling law and more.

Squared norms and errors are in squared units of the gradient, lengths in tokens, times in seconds.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated

from grpo_ustat.records import ACCURACY, MEAN_REWARD
from grpo_ustat.runs.contents import Bounded, Count, NumberOrNull, Size, Sometimes

Quantity = Annotated[str, (ACCURACY, MEAN_REWARD)]


@dataclass(frozen=True, kw_only=True)
class Metric:
    """The norm in which gradients were measured, and the tails of the squared score norms."""

    # Number of parameters in the norm.
    parameters: Count
    norm: str
    # How questions were compared.
    between_questions: str
    # Effective number of completions in the sum.
    effective_sample_size: float
    # Share of the largest percent of completions in the sum.
    top_percent_share: float
    # This and the next two: see `estimators.intervals.Tails`.
    tail_size: NumberOrNull
    variance_carriers: NumberOrNull
    heavy_tails: bool
    # This and `uncertain` describe AdamW's metric, see `mse.second_moments`.
    shift: Sometimes[NumberOrNull] = None
    uncertain: Sometimes[bool] = None


@dataclass(frozen=True, kw_only=True)
class Precision:
    """Number formats of the scores' computation."""

    weights: str
    tf32: bool
    # Relative errors with TF32.
    tf32_error: dict[str, float] | None


@dataclass(frozen=True, kw_only=True)
class PolicyFacts:
    """The policy and its answers."""

    name: str
    quantity: Quantity
    # Mean reward by the data set's judge.
    mean_reward: Bounded
    # Tokens.
    mean_length: float
    # Share of completions that were cut.
    clipped_ratio: float


@dataclass(frozen=True, kw_only=True)
class StudyCost:
    """Costs of a study; seconds add up over workers, so they can exceed the wall time."""

    rollouts: Count
    tokens: Count
    judge_timeouts: Count
    judge_failures: Count
    seconds_generate: float
    seconds_score: float


@dataclass(frozen=True, kw_only=True)
class Sampler:
    """Distance of a sampler's log-probabilities from the model's."""

    name: str
    # Nats a token.
    gap: float


@dataclass(frozen=True, kw_only=True)
class CompletionCounts:
    """Numbers of completions with equal rewards, by cause; each completion counts once."""

    reward: float
    completions: Size
    right: Sometimes[Count] = None
    cut: Sometimes[Count] = None
    # Completions without an answer.
    no_answer: Sometimes[Count] = None
    wrong: Sometimes[Count] = None
