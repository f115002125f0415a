"""Parts of a study's result: metric, precision, policy, cost and sampler; see `runs.result`.

A score is the gradient of a completion's log-probability. Squared norms and errors are in squared
units of the gradient, lengths in tokens, and times in seconds.
"""

from __future__ import annotations

from dataclasses import dataclass

from grpo_ustat.estimators.intervals import Interval


@dataclass(frozen=True, kw_only=True)
class Metric:
    """Norm in which gradients were measured, and how heavy the tail of squared score norms is."""

    # Number of the model's parameters that the norm includes.
    parameters: int
    norm: str
    # How inner products of gradients of different questions were computed: exactly, or from
    # sketches.
    between_questions: str
    # Effective number of completions in the sum of squared score norms.
    effective_sample_size: float
    # Share of this sum that comes from the one percent of completions with the largest norms.
    top_percent_share: float
    # For this field and the next two, see `estimators.intervals.Tails`.
    tail_size: float
    variance_carriers: float
    heavy_tails: bool


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
    # `accuracy` or `mean reward`.
    quantity: str
    # Mean reward according to the data set's judge.
    mean_reward: Interval
    # Mean length of a completion, in tokens.
    mean_length: float
    # Share of truncated completions.
    clipped_ratio: float


@dataclass(frozen=True, kw_only=True)
class StudyCost:
    """Costs of a study; seconds are summed over workers and can therefore exceed the wall time."""

    rollouts: int
    tokens: int
    judge_timeouts: int
    judge_failures: int
    seconds_generate: float
    seconds_score: float


@dataclass(frozen=True, kw_only=True)
class Sampler:
    """Difference between the log-probabilities of the program that sampled and of the model."""

    name: str
    # Mean absolute difference in nats per token.
    gap: float


@dataclass(frozen=True, kw_only=True)
class CompletionCounts:
    """Numbers of completions by outcome, in a study in which all completions have equal rewards."""

    reward: float
    completions: int
    right: int | None = None
    # Truncated completions.
    cut: int | None = None
    # Completions without an answer.
    no_answer: int | None = None
    wrong: int | None = None


@dataclass(frozen=True, kw_only=True)
class Look:
    """State of the decision on G after a batch of questions, with `study.until=decided`."""

    questions: int
    # Number of completions per question, N.
    completions: int
    # Chosen G, and the probability that its extra error is at most 5 %; see
    # `estimators.group_size.Estimates.choose`. None if the noise cannot be estimated yet.
    group_size: int | None
    probability: float | None
    # Bound on the extra error of the chosen G; None if the data do not decide.
    tolerance: float | None
    # Number of further questions after which half of all similar studies would have decided; None
    # if it is unknown or if the data decide already.
    more_questions: int | None
