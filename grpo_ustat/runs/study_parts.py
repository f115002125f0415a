"""What the result of a study is made of, see `runs.result`: curves, the scaling law and more.

Squared norms and errors are in squared units of the gradient, lengths in tokens, times in seconds.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated

from grpo_ustat.records import ACCURACY, MEAN_REWARD
from grpo_ustat.runs.contents import Bounded, Count, Estimate, NumberOrNull, Size, Sometimes

Quantity = Annotated[str, (ACCURACY, MEAN_REWARD)]
Setting = Annotated[str, ("all_questions_once", "with_replacement")]
Three = tuple[float, float, float]
HOLDS, FAILS, UNDECIDED, UNMEASURED = VERDICTS = (
    "holds", "does not hold", "not decided", "not measured",
)  # fmt: skip
ClaimWord = Annotated[str, VERDICTS]


@dataclass(frozen=True, kw_only=True)
class CurveRow:
    """A mean squared error of a baseline's gradient, also a row of `curves.csv`.

    Attributes:
        method, baseline: how it was measured, and of which rule; see `mse.rules` of all_groups.
        target: the vector that the estimate is judged against.
        setting: how the questions of a batch are drawn: each of the study once, or independently.
        interval: over what it generalises: other completions, or other questions too.
        group_size, num_prompts: G, and prompts of a batch.
        unbiased: whether the estimate's mean is the target.
        mse, low, high: the error with its interval.
        replicates: draws; null of a closed form, and where all groups of the pool count.
        bias2, variance: its two parts.
        relative_mse: over ||target||^2.
        best_scalar_mse, cosine: the relative error of the best multiple, and the cosine of the
            estimate and the target.
    """

    method: Annotated[str, ("closed_form", "all_groups", "monte_carlo")]
    baseline: str
    target: str
    setting: Setting
    interval: Annotated[str, ("completions", "questions")]
    group_size: Size
    num_prompts: Size
    unbiased: bool
    mse: NumberOrNull
    low: NumberOrNull
    high: NumberOrNull
    replicates: Count | None
    bias2: NumberOrNull
    variance: NumberOrNull
    relative_mse: NumberOrNull
    best_scalar_mse: NumberOrNull
    cosine: NumberOrNull


@dataclass(frozen=True, kw_only=True)
class OracleRatio:
    """A baseline's error over the oracle's at the same G, with a paired interval."""

    baseline: str
    setting: Setting
    group_size: Size
    num_prompts: Size
    ratio: Estimate


@dataclass(frozen=True, kw_only=True)
class FixedCost:
    """n times the error of `leave_one_out` at n rollouts in groups of G, whatever n."""

    group_size: Size
    n_mse: NumberOrNull
    low: NumberOrNull
    high: NumberOrNull


@dataclass(frozen=True, kw_only=True)
class Scaling:
    """The scaling law `C1/B + C2/(BG) + C3/(BG(G-1))` over new questions, see `estimators.scaling`.

    Attributes:
        c1, c2, c3, covariance, dof: its constants, and of their errors.
        gstar, gstar_paper: 1 + sqrt(C3/C1), and sqrt(C3/C1).
        gstar_tokens: the best G at a fixed number of tokens.
        best_divisor: the best G that divides n, by n; of a prime n that of the next multiple of 8.
        curve: the error at a fixed number of rollouts.
        reason: why the interval of G* has no upper end.
    """

    c1: Estimate
    c2: Estimate
    c3: Estimate
    gstar: Estimate
    gstar_paper: Estimate
    gstar_tokens: Estimate
    covariance: Sometimes[tuple[Three, Three, Three]] = None
    dof: Sometimes[float] = None
    best_divisor: Sometimes[dict[str, Size]] = None
    curve: list[FixedCost]
    reason: Sometimes[str] = None


@dataclass(frozen=True, kw_only=True)
class LossWorth:
    """What a rollout of a loss is worth at one G, for new questions, see `estimators.worth`.

    Attributes:
        loss, baseline, loss_type: name, rule of the advantages, and what divides the tokens.
        zero_variance_groups, reward_variance_share, advantage_threshold: which rows count, where
            not all do, see `estimators.row_weights.RowFilter`.
        rollouts, group_size: n of an update, and G.
        kept: share of the groups drawn that are in the update, where the others are replaced.
        worth, worth_best: rollouts of the unbiased estimate, at the same G and at its best, that
            do as much as one of the loss.
        direction: cos^2 of the loss's mean and the gradient; 1 of an `unbiased_direction`.
        noise: share of an update's squared norm that is noise.
        best, alike: whether this G is the loss's best of the measured ones, or not worse.
        reason: why it is not measured.
    """

    loss: str
    baseline: str
    loss_type: str
    zero_variance_groups: Sometimes[str] = None
    reward_variance_share: Sometimes[float] = None
    advantage_threshold: Sometimes[float] = None
    rollouts: Size
    group_size: Size
    kept: Sometimes[Estimate] = None
    unbiased_direction: bool
    worth: Sometimes[Estimate] = None
    worth_best: Sometimes[Estimate] = None
    direction: Sometimes[Estimate] = None
    noise: Sometimes[Estimate] = None
    best: bool
    alike: bool
    reason: Sometimes[str] = None


@dataclass(frozen=True, kw_only=True)
class OffPolicy:
    """What rollouts are worth that another policy, or a sampler that is not quite it, wrote.

    Attributes:
        written_by, policy, reference: which wrote them, whose gradient is estimated, and which a
            penalty is measured from.
        question: lag, where an earlier policy wrote them and those of `policy` itself are compared
            with; gap, where the sampler of a file did, and the same ones weighted by their exact
            ratios are compared with; penalty, where `policy` itself did.
        penalised: whether any loss has a penalty.
        kl: of the first from the second, nats a token.
        effective_tokens, effective_completions: `(sum w)^2 / (count sum w^2)` of the ratios of
            tokens, and of their products over a completion.
        losses: what a rollout of each is worth.
    """

    written_by: str
    policy: str
    reference: str
    question: str
    penalised: bool
    kl: Estimate
    effective_tokens: Estimate
    effective_completions: Estimate
    losses: list[LossWorth]


@dataclass(frozen=True, kw_only=True)
class ClaimVerdict:
    """A published claim judged on this policy, see `mse.verdicts`.

    Attributes:
        claim, source: what is claimed, and where.
        measured: the number that stands for it, in words.
        number: with its interval, for new questions.
        least, most: between which it lies where the claim holds; null: no bound.
        holm_p: of the hypothesis that it lies on the other side, corrected for all rows.
        verdict: what is said.
        beside: further numbers, in a sentence.
        reason: why nothing is measured.
    """

    claim: str
    source: str
    measured: str
    number: Sometimes[Estimate] = None
    least: NumberOrNull
    most: NumberOrNull
    holm_p: Sometimes[float] = None
    verdict: ClaimWord
    beside: Sometimes[str] = None
    reason: Sometimes[str] = None


@dataclass(frozen=True, kw_only=True)
class NoiseRow:
    """The noise scale of `leave_one_out` at one G in rollouts and tokens, and the share of the
    noise that comes from prompts, see `estimators.noise`.
    """

    group_size: float | None
    rollouts: Estimate
    tokens: Estimate
    prompt_share: Estimate


@dataclass(frozen=True, kw_only=True)
class LeastNoise(NoiseRow):
    """The noise scale at G*; `group_size_tokens` is the best G at a fixed number of tokens."""

    group_size_tokens: float | None


@dataclass(frozen=True, kw_only=True)
class Noise:
    """The noise scale at every G and at its least, with ||grad J||^2 that it rests on, and why it
    has no upper end.
    """

    curve: list[NoiseRow]
    best: LeastNoise
    grad_sq: Estimate
    reason: Sometimes[str] = None


@dataclass(frozen=True, kw_only=True)
class DynamicSampling:
    """The share of groups that dynamic sampling keeps, groups generated for each that is kept, and
    up to which share throwing away pays, see `estimators.dynamic_sampling`.
    """

    group_size: Size
    kept: Estimate
    generated: Estimate
    break_even: Estimate


@dataclass(frozen=True, kw_only=True)
class Allocation:
    """The relative change of the error by a plan of unequal group sizes, held out and `in_sample`,
    see `estimators.allocation`.
    """

    plan: str
    group_size: Size
    change: Estimate
    in_sample: NumberOrNull


@dataclass(frozen=True, kw_only=True)
class Assumption2:
    """Whether squared score norm and reward are uncorrelated given the question.

    Attributes:
        a0, a_v, a_bstar: the constants A of no baseline, of the value, and of the best baseline.
        share: of A_V that the best baseline saves.
        crossover_group_size: from which G on GRPO is better than no baseline.
        silent_share_at_crossover: zero-variance groups there.
        refuted: at the questions at hand.
        reason: why a number is missing.
    """

    a0: NumberOrNull
    a_v: NumberOrNull
    a_bstar: NumberOrNull
    corr: Estimate
    share: Estimate
    av_minus_abstar: Estimate
    av_minus_a0: Estimate
    crossover_group_size: Estimate
    silent_share_at_crossover: float | None
    refuted: bool
    reason: Sometimes[str] = None


@dataclass(frozen=True, kw_only=True)
class GradientNorm:
    """||grad J||^2, and why relative errors are null where it is not surely above 0."""

    grad_sq: Estimate
    reason: Sometimes[str] = None


@dataclass(frozen=True, kw_only=True)
class Metric:
    """The norm in which gradients were measured, and the tails of the squared score norms.

    Attributes:
        parameters, norm, between_questions: how many; which norm; how questions were compared.
        effective_sample_size, top_percent_share: completions that carry the sum, and its share by
            the largest percent.
        tail_size, variance_carriers, heavy_tails: see `estimators.intervals.Tails`.
        shift, uncertain: of AdamW's metric, see `mse.second_moments`.
    """

    parameters: Count
    norm: str
    between_questions: str
    effective_sample_size: float
    top_percent_share: float
    tail_size: NumberOrNull
    variance_carriers: NumberOrNull
    heavy_tails: bool
    shift: Sometimes[NumberOrNull] = None
    uncertain: Sometimes[bool] = None


@dataclass(frozen=True, kw_only=True)
class Precision:
    """In what the scores were computed, and with TF32 the relative errors of that."""

    weights: str
    tf32: bool
    tf32_error: dict[str, float] | None


@dataclass(frozen=True, kw_only=True)
class PolicyFacts:
    """The policy: name, mean of the data set's own reward, mean length and share cut."""

    name: str
    quantity: Quantity
    mean_reward: Bounded
    mean_length: float
    clipped_ratio: float


@dataclass(frozen=True, kw_only=True)
class StudyCost:
    """What a study took; seconds are a worker's own, so their sum exceeds the clock's."""

    rollouts: Count
    tokens: Count
    judge_timeouts: Count
    judge_failures: Count
    seconds_generate: float
    seconds_score: float


@dataclass(frozen=True, kw_only=True)
class RewardFunction:
    """One reward function by itself, or the weighted sum of all, whose weight is null."""

    name: str
    weight: float | None
    c1: Estimate
    c2: Estimate
    c3: Estimate
    gstar: Estimate
    a_v: Estimate
    grad_sq: Estimate
    mean: Estimate


@dataclass(frozen=True, kw_only=True)
class RewardCorrelation:
    """The correlation of two reward functions within prompts."""

    first: str
    second: str
    correlation: Estimate


@dataclass(frozen=True, kw_only=True)
class Sampler:
    """How far a sampler's log-probabilities are from the model's, in nats a token."""

    name: str
    gap: float


@dataclass(frozen=True, kw_only=True)
class NotMeasured:
    """A rule whose error for new questions is not measured at one G, and why."""

    baseline: str
    group_size: Size
    reason: str


@dataclass(frozen=True, kw_only=True)
class CompletionCounts:
    """Numbers of completions by what earned them their one reward: being right, cut, without an
    answer, or wrong; each counts once.
    """

    reward: float
    completions: Size
    right: Sometimes[Count] = None
    cut: Sometimes[Count] = None
    no_answer: Sometimes[Count] = None
    wrong: Sometimes[Count] = None
