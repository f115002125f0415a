"""What `result.json` holds: records that a run's command builds and every reader checks a file by.

A field is a key of the file, in this order. A field with a default may be missing there, and one of
`Sometimes` is where it is None. An estimate is three keys, see `Ends`. Squared norms and errors are
in squared units of the gradient, lengths in tokens, times in seconds.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Annotated, Any

from grpo_ustat.records import ACCURACY, MEAN_REWARD
from grpo_ustat.runs.contents import (
    Bounded,
    Count,
    Estimate,
    Known,
    NumberOrNull,
    Size,
    Sometimes,
)

AGREES, DISAGREES, OPEN = "agrees", "disagrees", "not decided"
Verdict = Annotated[str, (AGREES, DISAGREES, OPEN)]
Quantity = Annotated[str, (ACCURACY, MEAN_REWARD)]
Setting = Annotated[
    str, ("all_questions_once", "with_replacement", "without_replacement", "one_question")
]
Three = tuple[float, float, float]


@dataclass(frozen=True, kw_only=True)
class RunResult:
    """What a folder adds to every result when the run is complete.

    Attributes:
        config_hash: fingerprint of the configuration.
        files: SHA-256 of each of the tables beside it.
        earlier_versions: of packages that parts of the run were made with, where they were others.
        digest: of all other values.
    """

    config_hash: Sometimes[str] = None
    files: Sometimes[dict[str, str]] = None
    earlier_versions: Sometimes[list[dict[str, str]]] = None
    digest: Sometimes[str] = None


@dataclass(frozen=True, kw_only=True)
class Evaluation:
    """What every row of `eval.csv` has; beside it `pass@K` with its ends, and failures of a judge.

    Attributes:
        step: updates before it.
        split, decoding: which questions, and `sampled` or `greedy`.
        quantity: what the mean of the rewards is called.
        mean_reward, low, high: of the data set's own reward.
        n: questions.
        num_generations: completions of each.
        clipped_ratio, extraction_failure_ratio: shares of them that were cut, or held no answer.
    """

    step: Count
    split: str
    decoding: str
    quantity: Quantity
    mean_reward: float
    low: float
    high: float
    n: Size
    num_generations: Size
    clipped_ratio: float
    extraction_failure_ratio: float


@dataclass(frozen=True, kw_only=True)
class TrainResult(RunResult):
    """The result of a training run.

    Attributes:
        quantity: what the mean of the held-out rewards is called.
        final_mean_reward, mean_reward_low, mean_reward_high: of the last evaluation, by the first
            decoding.
        gain: the last evaluation less the first, paired by question.
        steps: updates.
        rollouts, value_rollouts: completions, and those that a baseline drew besides.
        tokens: of completions.
        seconds, seconds_save: of all steps, and of the last checkpoint.
        failed_saves: checkpoints and tables that could not be written.
        evals: the rows of `eval.csv`.
        alarms: how many steps each was heard at.
        run: name.
        summary: what training did, in words.
        versions: of packages.
        left_out: questions by the reason why they were left out.
    """

    quantity: Quantity
    final_mean_reward: float
    mean_reward_low: float
    mean_reward_high: float
    gain: Bounded
    steps: Count
    rollouts: Count
    value_rollouts: Count
    tokens: Count
    seconds: float
    seconds_save: float
    failed_saves: Count
    evals: list[Annotated[dict[str, Any], Evaluation]]
    alarms: dict[str, Count]
    run: str
    summary: str
    versions: dict[str, str]
    left_out: dict[str, Count]


@dataclass(frozen=True, kw_only=True)
class CurveRow:
    """A mean squared error of a baseline's gradient, also a row of `curves.csv`.

    Attributes:
        method, baseline: how it was measured, and of which rule.
        target: the vector that the estimate is judged against.
        setting: how the questions of a batch are drawn.
        interval: over what it generalises: other completions, or other questions too.
        group_size, num_prompts: G, and prompts of a batch.
        unbiased: whether the estimate's mean is the target.
        mse, low, high: the error with its interval.
        replicates: draws; null of a closed form.
        bias2, variance: its two parts.
        relative_mse: over ||target||^2.
        best_scalar_mse, cosine: the relative error of the best multiple, and the cosine of the
            estimate and the target.
    """

    method: Annotated[str, ("closed_form", "replay", "monte_carlo")]
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
    n_mse: float
    low: NumberOrNull
    high: NumberOrNull


@dataclass(frozen=True, kw_only=True)
class BestSize:
    """The best of the measured G of a rule at n rollouts.

    Attributes:
        n, group_size: rollouts, and the best size.
        alike: sizes that are not significantly worse, the best one among them.
        errors: by G.
    """

    n: Size
    group_size: Size
    alike: list[Size]
    errors: dict[str, float]


@dataclass(frozen=True, kw_only=True)
class RuleSizes:
    """How the best G of a replayed rule changes with n, see `mse.rule_sizes`.

    Attributes:
        baseline, target: the rule, and what it is judged against.
        measure: `mse`, or `best_scalar`: of the best multiple.
        sizes: at each n.
        grows: whether the best sizes at the largest n are all above those at the smallest.
        growth: `2 b^2 / C1`, whose product with n has the cube root G*(n) for large n.
    """

    baseline: str
    target: str
    measure: str
    sizes: list[BestSize]
    grows: bool
    growth: Sometimes[Estimate] = None


@dataclass(frozen=True, kw_only=True)
class Scaling:
    """The scaling law `MSE = C1/B + C2/(BG) + C3/(BG(G-1))`, over new questions.

    Attributes:
        c1, c2, c3: its constants.
        gstar, gstar_paper: 1 + sqrt(C3/C1), and sqrt(C3/C1).
        gstar_tokens, gstar_seconds: the best G at a fixed number of tokens, or time.
        covariance, dof: of the errors of the constants, and its degrees of freedom.
        best_divisor: the best G that divides n, by n.
        curve: the error at a fixed number of rollouts.
        reason: why the interval of G* has no upper end.
        rules: best sizes of replayed rules.
    """

    c1: Known
    c2: Known
    c3: Known
    gstar: Estimate
    gstar_paper: Estimate
    gstar_tokens: Estimate
    gstar_seconds: Estimate
    covariance: Sometimes[tuple[Three, Three, Three]] = None
    dof: Sometimes[float] = None
    best_divisor: Sometimes[dict[str, Size]] = None
    curve: list[FixedCost]
    reason: Sometimes[str] = None
    rules: Sometimes[list[RuleSizes]] = None


@dataclass(frozen=True, kw_only=True)
class NoiseRow:
    """The noise scale of `leave_one_out` at one G, see `estimators.noise`.

    Attributes:
        group_size: G.
        rollouts, tokens: at which half of a step's squared norm is noise.
        prompt_share: the part of the noise that comes from prompts.
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
    """The noise scale at every G, at its least, and ||grad J||^2 that it rests on.

    Attributes:
        curve, best: rows by G, and at G*.
        grad_sq: ||grad J||^2, for new questions.
        reason: why the scale has no upper end.
    """

    curve: list[NoiseRow]
    best: LeastNoise
    grad_sq: Estimate
    reason: Sometimes[str] = None


@dataclass(frozen=True, kw_only=True)
class DynamicSampling:
    """What leaving out zero-variance groups costs, see `estimators.dynamic_sampling`.

    Attributes:
        group_size: G.
        kept: share of groups.
        generated: groups drawn for each that is kept.
        break_even: share of its kept groups up to which throwing away pays.
    """

    group_size: Size
    kept: Estimate
    generated: Estimate
    break_even: Estimate


@dataclass(frozen=True, kw_only=True)
class Proxy:
    """The correlation of a cheap proxy with what it stands for, see `estimators.proxies`.

    Attributes:
        units, proxy, target, scale: over what, of what with what, of values or of ranks.
        correlation, uncorrected: without and with the errors of estimates.
        proxy_reliability, target_reliability: of half a pool.
    """

    units: str
    proxy: str
    target: str
    scale: str
    correlation: Estimate
    uncorrected: NumberOrNull
    proxy_reliability: NumberOrNull
    target_reliability: NumberOrNull


@dataclass(frozen=True, kw_only=True)
class Allocation:
    """What a plan of unequal group sizes does to the error, see `estimators.allocation`.

    Attributes:
        plan, group_size: the plan, and its mean G.
        change, in_sample: of the error, relative: held out, and by the pool that made the plan.
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
        corr: of squared score norm and reward.
        share: of A_V that the best baseline saves.
        av_minus_abstar, av_minus_a0: differences.
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
        parameters: counted ones.
        norm, between_questions: which norm of what, and how differences of questions were taken.
        effective_sample_size: completions that carry the sum of the squared score norms.
        top_percent_share: of the sum, by the largest percent.
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
    """An error that replay does not measure, and why; `num_prompts` is null of all."""

    method: str
    baseline: str
    target: str
    setting: str
    num_prompts: Size | None
    reason: str


@dataclass(frozen=True, kw_only=True)
class StudyResult(RunResult):
    """The result of a study of the gradient's error.

    Attributes:
        curves, ratio_to_oracle: errors by rule and G, and over the oracle's.
        scaling, noise, dynamic_sampling, proxies, allocation, assumption2: see there.
        grad_sq: ||grad J||^2 of the setting.
        metric, precision, policy: see there.
        questions, pool_completions: of the pool, the second of each question.
        summary: the verdict in words, with warnings.
        cost: of the pool and of Monte Carlo.
        versions: of packages.
        pool_versions: completions by the versions that scored them.
        reward_functions, reward_correlations: where there are several functions.
        sampler: where its log-probabilities are known.
        left_out: questions by the reason why they were left out.
        not_measured: what replay does not measure.
    """

    curves: list[CurveRow]
    ratio_to_oracle: list[OracleRatio]
    scaling: Scaling
    noise: Noise
    dynamic_sampling: list[DynamicSampling]
    proxies: list[Proxy]
    allocation: list[Allocation]
    assumption2: Assumption2
    grad_sq: GradientNorm
    metric: Metric
    precision: Precision
    policy: PolicyFacts
    questions: Size
    pool_completions: Size
    summary: str
    cost: StudyCost
    versions: dict[str, str]
    pool_versions: dict[str, Count]
    reward_functions: Sometimes[list[RewardFunction]] = None
    reward_correlations: Sometimes[list[RewardCorrelation]] = None
    sampler: Sometimes[Sampler] = None
    left_out: dict[str, Count]
    not_measured: list[NotMeasured]


@dataclass(frozen=True, kw_only=True)
class CompletionCounts:
    """What became of completions that all got one reward.

    Attributes:
        reward, completions: the reward, and their number.
        right, cut, no_answer, wrong: how many; each counts once.
    """

    reward: float
    completions: Size
    right: Sometimes[Count] = None
    cut: Sometimes[Count] = None
    no_answer: Sometimes[Count] = None
    wrong: Sometimes[Count] = None


@dataclass(frozen=True, kw_only=True)
class NoScaling:
    """G* of equal rewards, which is not known."""

    gstar: Estimate


@dataclass(frozen=True, kw_only=True)
class NoCorrelation:
    """The correlation of squared score norm and reward, null where all rewards are equal."""

    corr: float | None


@dataclass(frozen=True, kw_only=True)
class EqualRewardsResult(RunResult):
    """The result of a study in which all rewards are equal; fields as in `StudyResult`."""

    curves: list[CurveRow]
    equal_rewards: CompletionCounts
    scaling: NoScaling
    assumption2: NoCorrelation
    policy: PolicyFacts
    questions: Size
    pool_completions: Size
    summary: str
    cost: StudyCost
    versions: dict[str, str]
    pool_versions: dict[str, Count]
    not_measured: list[NotMeasured]
    sampler: Sometimes[Sampler] = None
    left_out: dict[str, Count]


@dataclass(frozen=True)
class Claim:
    """A prediction beside its measurement.

    Attributes:
        what: is predicted, and of what, in a few words.
        predicted: a number, or a relation such as `<= 1` where it is no number.
        measured: the estimate.
        low, high: its interval; both None where it was enumerated and has no error.
        verdict: `agrees`, `disagrees` or `not decided`; with a p-value that where Holm's correction
            does not reject the prediction, see `gap.claims.correct_family`.
        how: the criterion, the level and the number of replicates.
        p_value: of the hypothesis that the prediction holds; None where it was enumerated and the
            verdict is certain.
        severity: how many of the alternatives would also have agreed, in words; "" where there is
            no natural alternative.
        when_rejected: the verdict where Holm's correction rejects the prediction; None is
            `disagrees`, but `not decided` where `verdict` is.
        alternatives: names and p-values of other predictions, of which `severity` is made.
        holm_p: `p_value` corrected for all claims of the study that have one.
    """

    what: str
    predicted: float | str
    measured: float
    low: float | None
    high: float | None
    verdict: Verdict
    how: str
    p_value: float | None = None
    severity: str = ""
    when_rejected: str | None = None
    alternatives: Mapping[str, float] = field(default_factory=dict)
    holm_p: float | None = None


@dataclass(frozen=True, kw_only=True)
class TheoremCost:
    """Completions that were drawn, 0 where all was enumerated, and wall time."""

    rollouts: Count
    seconds: float


@dataclass(frozen=True, kw_only=True)
class TheoremResult(RunResult):
    """The result of a study of a theorem.

    Attributes:
        study, statement: the kind of study, and what the paper claims.
        bed: the policy and its exact truth: names and values.
        claims: predictions beside measurements.
        answer, notes: one sentence; limits, surprises and reasons, a line each.
        verdict: on all claims together.
        cost, summary, versions: as of other results.
    """

    study: str
    statement: str
    bed: Mapping[str, float | str]
    claims: list[Claim]
    answer: str
    notes: list[str]
    verdict: Verdict
    cost: TheoremCost
    summary: str
    versions: dict[str, str]


RESULT_TYPES: Mapping[str, Any] = {  # by command
    "train": TrainResult,
    "mse": StudyResult | EqualRewardsResult,
    "gap": TheoremResult,
}
ANY_RESULT: Any = TrainResult | StudyResult | EqualRewardsResult | TheoremResult
