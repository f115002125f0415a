"""Parts of a study's result: metric, precision, policy, cost and sampler; see `runs.result`.

Squared norms and errors are in squared units of the gradient, lengths in tokens, and times in
seconds.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated

from grpo_ustat.records import ACCURACY, MEAN_REWARD
from grpo_ustat.runs.contents import Bounded, Count, NumberOrNull, Size, Sometimes

Quantity = Annotated[str, (ACCURACY, MEAN_REWARD)]


@dataclass(frozen=True, kw_only=True)
class Metric:
    """Norm in which gradients were measured, and statistics of the tails of squared score norms."""

    # Number of parameters in the norm.
    parameters: Count
    norm: str
    # Method for inner products between questions: exact, or a sketch.
    between_questions: str
    # Effective number of completions in the sum of squared score norms.
    effective_sample_size: float
    # Share of that sum contributed by the one percent of completions with the largest norms.
    top_percent_share: float
    # For this field and the next two, see `estimators.intervals.Tails`.
    tail_size: NumberOrNull
    variance_carriers: NumberOrNull
    heavy_tails: bool
    # This field and `uncertain` apply only to AdamW's metric; see `mse.second_moments`.
    shift: Sometimes[NumberOrNull] = None
    uncertain: Sometimes[bool] = None


@dataclass(frozen=True, kw_only=True)
class Precision:
    """Number formats in which scores were computed."""

    weights: str
    tf32: bool
    # Relative errors caused by TF32.
    tf32_error: dict[str, float] | None


@dataclass(frozen=True, kw_only=True)
class PolicyFacts:
    """Facts about the policy and its completions."""

    name: str
    quantity: Quantity
    # Mean reward according to the data set's judge.
    mean_reward: Bounded
    # Mean length of a completion, in tokens.
    mean_length: float
    # Share of truncated completions.
    clipped_ratio: float


@dataclass(frozen=True, kw_only=True)
class StudyCost:
    """Costs of a study; seconds are summed over workers and can therefore exceed the wall time."""

    rollouts: Count
    tokens: Count
    judge_timeouts: Count
    judge_failures: Count
    seconds_generate: float
    seconds_score: float


@dataclass(frozen=True, kw_only=True)
class Sampler:
    """Difference between a sampler's log-probabilities and the model's."""

    name: str
    # Mean absolute difference in nats per token.
    gap: float


@dataclass(frozen=True, kw_only=True)
class CompletionCounts:
    """Numbers of completions by outcome, in a study in which all completions have equal rewards."""

    reward: float
    completions: Size
    right: Sometimes[Count] = None
    cut: Sometimes[Count] = None
    # Completions without an answer.
    no_answer: Sometimes[Count] = None
    wrong: Sometimes[Count] = None


@dataclass(frozen=True, kw_only=True)
class Look:
    """State of a study with `study.until=decided` after a batch of questions."""

    questions: Size
    # Number of completions per question, N.
    completions: Size
    # Chosen G, and the probability that its extra error is at most 5 %; see
    # `estimators.group_size.Estimates.choose`. None if the noise cannot be estimated yet.
    group_size: Size | None
    probability: float | None
    # Bound on the extra error; None if the data do not decide.
    tolerance: float | None
    # Number of further questions with which half of all similar studies would decide; None if it is
    # unknown or if the data decide.
    more_questions: Count | None
