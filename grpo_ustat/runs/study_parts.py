"""Parts of the result of a study, see `runs.result`: losses, policy, metric, cost and more.

Squared norms and errors are in squared units of the gradient, lengths in tokens, times in seconds.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated

from grpo_ustat.estimators.intervals import Interval
from grpo_ustat.records import ACCURACY, MEAN_REWARD
from grpo_ustat.runs.contents import Bounded, Count, NumberOrNull, Size, Sometimes

Quantity = Annotated[str, (ACCURACY, MEAN_REWARD)]
HOLDS, FAILS, UNDECIDED, UNMEASURED = VERDICTS = (
    "holds", "does not hold", "not decided", "not measured",
)  # fmt: skip
ClaimWord = Annotated[str, VERDICTS]


@dataclass(frozen=True, kw_only=True)
class LossWorth:
    """Efficiency of a rollout of a loss at one G, for new questions, see `estimators.worth`."""

    # Its name.
    loss: str
    # The rule of the advantages.
    baseline: str
    # The divisor of the tokens.
    loss_type: str
    # Which rows count, if not all do, see `estimators.row_weights.RowFilter`; likewise the next
    # two.
    zero_variance_groups: Sometimes[str] = None
    reward_variance_share: Sometimes[float] = None
    advantage_threshold: Sometimes[float] = None
    # n of an update.
    rollouts: Size
    # G.
    group_size: Size
    # Share of the groups drawn that are in the update, if the others are replaced.
    kept: Sometimes[Interval] = None
    unbiased_direction: bool
    # Rollouts of the unbiased estimate, at the same G, that do as much as one of the loss.
    worth: Sometimes[Interval] = None
    # Rollouts of the unbiased estimate at its best G that do as much.
    worth_best: Sometimes[Interval] = None
    # cos^2 of the loss's mean and the gradient; 1 of an `unbiased_direction`.
    direction: Sometimes[Interval] = None
    # Share of an update's squared norm that is noise.
    noise: Sometimes[Interval] = None
    # True if this G is the loss's best of the measured ones.
    best: bool
    # True if this G is not worse than the best.
    alike: bool
    # Why it is not measured.
    reason: Sometimes[str] = None


@dataclass(frozen=True, kw_only=True)
class OffPolicy:
    """Efficiency of rollouts written by another policy, or by a sampler that differs from it."""

    # The policy that wrote them.
    written_by: str
    # The policy whose gradient is estimated.
    policy: str
    # The policy that a penalty is measured from.
    reference: str
    # lag: an earlier policy wrote them, and the comparison is with rollouts of `policy` itself;
    # gap: the sampler of a file wrote them, and the comparison is with the same ones weighted by
    # their exact ratios; penalty: `policy` itself wrote them.
    question: str
    # True if any loss has a penalty.
    penalised: bool
    # KL divergence of `written_by` from `policy`, nats a token.
    kl: Interval
    # Effective share `(sum w)^2 / (count sum w^2)` of the ratios w of tokens.
    effective_tokens: Interval
    # Effective share of the products of these ratios over a completion.
    effective_completions: Interval
    # Efficiency of a rollout of each loss.
    losses: list[LossWorth]


@dataclass(frozen=True, kw_only=True)
class ClaimVerdict:
    """A published claim judged on this policy, see `mse.verdicts`."""

    # In words.
    claim: str
    # The paper that makes the claim.
    source: str
    # The number that represents the claim, in words.
    measured: str
    # With its interval, for new questions.
    number: Sometimes[Interval] = None
    # The number is between `least` and `most` if the claim holds; null: no bound.
    least: NumberOrNull
    most: NumberOrNull
    # Of the hypothesis that it is on the other side, corrected for all rows.
    holm_p: Sometimes[float] = None
    verdict: ClaimWord
    # Further numbers, in a sentence.
    beside: Sometimes[str] = None
    # Why nothing is measured.
    reason: Sometimes[str] = None


@dataclass(frozen=True, kw_only=True)
class Metric:
    """The norm in which gradients were measured, and the tails of the squared score norms."""

    # Number of parameters in the norm.
    parameters: Count
    norm: str
    # How questions were compared.
    between_questions: str
    # Completions that carry the sum.
    effective_sample_size: float
    # Share of the sum by the largest percent of completions.
    top_percent_share: float
    # See `estimators.intervals.Tails`, likewise the next two.
    tail_size: NumberOrNull
    variance_carriers: NumberOrNull
    heavy_tails: bool
    # Of AdamW's metric, see `mse.second_moments`; likewise `uncertain`.
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
    # Of the data set's own reward.
    mean_reward: Bounded
    # In tokens.
    mean_length: float
    # Share of completions that were cut.
    clipped_ratio: float


@dataclass(frozen=True, kw_only=True)
class StudyCost:
    """Costs of a study; seconds add up those of all workers, so they can exceed the wall time."""

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
    """Numbers of completions that all earned the same reward, by the cause; each counts once."""

    reward: float
    completions: Size
    right: Sometimes[Count] = None
    cut: Sometimes[Count] = None
    # Stated no answer.
    no_answer: Sometimes[Count] = None
    wrong: Sometimes[Count] = None
