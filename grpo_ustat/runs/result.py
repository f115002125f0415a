"""What `result.json` holds: records that a run's command builds and every reader checks a file by.

A field is a key of the file, in this order. A field with a default may be missing there, and one of
`Sometimes` is where it is None. An estimate is three keys, see `Ends`. Squared norms and errors are
in squared units of the gradient, lengths in tokens, times in seconds.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Annotated, Any

from grpo_ustat.runs import study_parts as parts
from grpo_ustat.runs.contents import Bounded, Count, Size, Sometimes

AGREES, DISAGREES, OPEN = "agrees", "disagrees", "not decided"
Verdict = Annotated[str, (AGREES, DISAGREES, OPEN)]


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
        mean_reward, low, high: of the data set's own reward.
        n, num_generations: questions, and completions of each.
        clipped_ratio, extraction_failure_ratio: shares that were cut, or held no answer.
    """

    step: Count
    split: str
    decoding: str
    quantity: parts.Quantity
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
        final_mean_reward, mean_reward_low, mean_reward_high: of the last evaluation, by the first
            decoding.
        gain: the last evaluation less the first, paired by question.
        steps: updates.
        rollouts, value_rollouts: completions, and those that a baseline drew besides.
        seconds, seconds_save: of all steps, and of the last checkpoint.
        failed_saves: checkpoints and tables that could not be written.
        alarms: how many steps each was heard at.
        left_out: questions by the reason why they were left out.
    """

    quantity: parts.Quantity
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
class StudyResult(RunResult):
    """The result of a study of the gradient's error.

    Attributes:
        recipes: published losses, each at its own G, by the names of `config.recipes`; their
            intervals hold together, see `mse.recipes`.
        verdicts: published claims judged on this policy, where `study.verdicts` asks for them.
        questions, pool_completions: of the pool, the second of each question.
        summary: the verdict in words, with warnings.
        pool_versions: completions by the versions that scored them.
        left_out: questions by the reason why they were left out.
        not_measured: rules without a row of `all_groups` at some G, and why.
    """

    curves: list[parts.CurveRow]
    ratio_to_oracle: list[parts.OracleRatio]
    scaling: parts.Scaling
    noise: parts.Noise
    losses: Sometimes[list[parts.LossWorth]] = None
    off_policy: Sometimes[parts.OffPolicy] = None
    recipes: Sometimes[list[parts.LossWorth]] = None
    verdicts: Sometimes[list[parts.ClaimVerdict]] = None
    dynamic_sampling: list[parts.DynamicSampling]
    allocation: Sometimes[list[parts.Allocation]] = None
    assumption2: parts.Assumption2
    grad_sq: parts.GradientNorm
    metric: parts.Metric
    precision: parts.Precision
    policy: parts.PolicyFacts
    questions: Size
    pool_completions: Size
    summary: str
    cost: parts.StudyCost
    versions: dict[str, str]
    pool_versions: dict[str, Count]
    reward_functions: Sometimes[list[parts.RewardFunction]] = None
    reward_correlations: Sometimes[list[parts.RewardCorrelation]] = None
    sampler: Sometimes[parts.Sampler] = None
    left_out: dict[str, Count]
    not_measured: list[parts.NotMeasured]


@dataclass(frozen=True, kw_only=True)
class EqualRewardsResult(RunResult):
    """The result of a study in which all rewards are equal: fields as in `StudyResult`, with null
    in place of what is not known.
    """

    curves: list[parts.CurveRow]
    equal_rewards: parts.CompletionCounts
    scaling: dict[str, float | None]
    assumption2: dict[str, float | None]
    policy: parts.PolicyFacts
    questions: Size
    pool_completions: Size
    summary: str
    cost: parts.StudyCost
    versions: dict[str, str]
    pool_versions: dict[str, Count]
    not_measured: list[parts.NotMeasured]
    sampler: Sometimes[parts.Sampler] = None
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
            does not reject the prediction, see `runs.claims.correct_family`.
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
    """The result of a study of a theorem: the policy (`bed`) with its exact truth, claims, and the
    verdict on all of them together.
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
