"""Parts of the result of a study, see `runs.result`: curves, the scaling law and more.

Squared norms and errors are in squared units of the gradient, lengths in tokens, times in seconds.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated

from grpo_ustat.estimators.intervals import Interval
from grpo_ustat.records import ACCURACY, MEAN_REWARD
from grpo_ustat.runs.contents import Bounded, Count, NumberOrNull, Size, Sometimes

Quantity = Annotated[str, (ACCURACY, MEAN_REWARD)]
Setting = Annotated[str, ("all_questions_once", "with_replacement")]
Three = tuple[float, float, float]


@dataclass(frozen=True, kw_only=True)
class CurveRow:
    """A mean squared error of a baseline's gradient, also a row of `curves.csv`."""

    # How it was measured.
    method: Annotated[str, ("closed_form", "new_questions", "monte_carlo")]
    # The rule; see `mse.rules` of new_questions.
    baseline: str
    # The vector that the estimate is judged against.
    target: str
    # How the questions of a batch are drawn: each of the study once, or independently.
    setting: Setting
    # The population of the interval: other completions, or other questions too.
    interval: Annotated[str, ("completions", "questions")]
    # G.
    group_size: Size
    # Prompts of a batch.
    num_prompts: Size
    # True if the estimate's mean is the target.
    unbiased: bool
    # The error, with its interval `low`, `high`.
    mse: NumberOrNull
    low: NumberOrNull
    high: NumberOrNull
    # Draws; null of a closed form, and if all groups of the pool count.
    replicates: Count | None
    # The two parts of the error are `bias2` and `variance`.
    bias2: NumberOrNull
    variance: NumberOrNull
    # Over ||target||^2.
    relative_mse: NumberOrNull
    # The relative error of the best multiple.
    best_scalar_mse: NumberOrNull
    # Of the estimate and the target.
    cosine: NumberOrNull


@dataclass(frozen=True, kw_only=True)
class OracleRatio:
    """A baseline's error over the oracle's at the same G, with a paired interval."""

    baseline: str
    setting: Setting
    group_size: Size
    num_prompts: Size
    ratio: Interval


@dataclass(frozen=True, kw_only=True)
class FixedCost:
    """n times the error of `leave_one_out` at n rollouts in groups of G, whatever n."""

    group_size: Size
    n_mse: NumberOrNull
    low: NumberOrNull
    high: NumberOrNull


@dataclass(frozen=True, kw_only=True)
class Scaling:
    """The scaling law `C1/B + C2/(BG) + C3/(BG(G-1))` for new questions.

    See `estimators.scaling`.
    """

    c1: Interval
    c2: Interval
    c3: Interval
    # 1 + sqrt(C3/C1).
    gstar: Interval
    # sqrt(C3/C1).
    gstar_paper: Interval
    # The best G at a fixed number of tokens.
    gstar_tokens: Interval
    # Covariance and degrees of freedom of the errors of C1, C2, C3.
    covariance: Sometimes[tuple[Three, Three, Three]] = None
    dof: Sometimes[float] = None
    # The best G that divides n, by n; of a prime n that of the next multiple of 8.
    best_divisor: Sometimes[dict[str, Size]] = None
    # The error at a fixed number of rollouts.
    curve: list[FixedCost]
    # Why the interval of G* has no upper end.
    reason: Sometimes[str] = None


@dataclass(frozen=True, kw_only=True)
class NoiseRow:
    """The noise scale of `leave_one_out` at one G, in rollouts and tokens.

    See `estimators.scaling`.
    """

    group_size: float | None
    rollouts: Interval
    tokens: Interval
    # Share of the noise that comes from prompts.
    prompt_share: Interval


@dataclass(frozen=True, kw_only=True)
class LeastNoise(NoiseRow):
    """The noise scale at G*; `group_size_tokens` is the best G at a fixed number of tokens."""

    group_size_tokens: float | None


@dataclass(frozen=True, kw_only=True)
class Noise:
    """The noise scale at every G and at its least."""

    curve: list[NoiseRow]
    best: LeastNoise
    # ||grad J||^2, on which the noise scale rests.
    grad_sq: Interval
    # Why the noise scale has no upper end.
    reason: Sometimes[str] = None


@dataclass(frozen=True, kw_only=True)
class Assumption2:
    """Test that squared score norm and reward are uncorrelated given the question."""

    # The constant A of no baseline.
    a0: NumberOrNull
    # A of the value.
    a_v: NumberOrNull
    # A of the best baseline.
    a_bstar: NumberOrNull
    corr: Interval
    # Share of A_V that the best baseline saves.
    share: Interval
    av_minus_abstar: Interval
    av_minus_a0: Interval
    # G from which on GRPO is better than no baseline.
    crossover_group_size: Interval
    # Share of zero-variance groups there.
    silent_share_at_crossover: float | None
    # At the questions at hand.
    refuted: bool
    # Why a number is missing.
    reason: Sometimes[str] = None


@dataclass(frozen=True, kw_only=True)
class GradientNorm:
    """||grad J||^2."""

    grad_sq: Interval
    # Why relative errors are null, if it is not surely above 0.
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
class NotMeasured:
    """A rule whose error for new questions is not measured at one G, and the reason."""

    baseline: str
    group_size: Size
    reason: str


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
