"""Records of `result.json`: a run's command builds them, and readers check the file by them.

A field is a key of the file, in this order. A field with a default may be missing in the file, and
a field of `Sometimes` is missing if it is None. An estimate has three keys, see `Ends`. Squared
norms and errors are in squared units of the gradient, lengths in tokens, times in seconds.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Annotated, Any

from grpo_ustat.runs import study_parts as parts
from grpo_ustat.runs.contents import Beside, Bounded, Count, Size, Sometimes

AGREES, DISAGREES, OPEN = "agrees", "disagrees", "not decided"
Verdict = Annotated[str, (AGREES, DISAGREES, OPEN)]


@dataclass(frozen=True, kw_only=True)
class RunResult:
    """Fields that a folder adds to every result when the run is complete."""

    # Fingerprint of the configuration.
    config_hash: Sometimes[str] = None
    # SHA-256 of each table in the folder.
    files: Sometimes[dict[str, str]] = None
    # Package versions of earlier parts of the run, if they differ.
    earlier_versions: Sometimes[list[dict[str, str]]] = None
    # Digest of all other values.
    digest: Sometimes[str] = None


@dataclass(frozen=True, kw_only=True)
class Evaluation:
    """Fields of every row of `eval.csv`.

    A row also has `pass@K` with its ends, and failures of a judge.
    """

    # Number of updates before the evaluation.
    step: Count
    split: str
    decoding: str
    quantity: parts.Quantity
    # Mean reward by the data set's judge, with its interval `low`, `high`.
    mean_reward: float
    low: float
    high: float
    # Number of questions.
    n: Size
    # Number of completions of each question.
    num_generations: Size
    # Share of completions that were cut.
    clipped_ratio: float
    # Share of completions without an answer.
    extraction_failure_ratio: float


@dataclass(frozen=True, kw_only=True)
class TrainResult(RunResult):
    """The result of a training run."""

    quantity: parts.Quantity
    # Mean reward at the last evaluation, by the first decoding, with its interval.
    final_mean_reward: float
    mean_reward_low: float
    mean_reward_high: float
    # The last evaluation less the first, paired by question.
    gain: Bounded
    # Number of updates.
    steps: Count
    # Number of completions.
    rollouts: Count
    # Number of further completions, drawn for a baseline.
    value_rollouts: Count
    tokens: Count
    # Wall time of all steps.
    seconds: float
    # Wall time of writing the last checkpoint.
    seconds_save: float
    # Checkpoints and tables that could not be written.
    failed_saves: Count
    evals: list[Annotated[dict[str, Any], Evaluation]]
    # Number of steps at which each alarm was raised.
    alarms: dict[str, Count]
    run: str
    summary: str
    versions: dict[str, str]
    # Numbers of dropped questions, by reason.
    left_out: dict[str, Count]


@dataclass(frozen=True, kw_only=True)
class StudyResult(RunResult):
    """The result of a study of the gradient's error."""

    # Counts if all rewards are equal, so that nothing else can be measured.
    equal_rewards: Sometimes[parts.CompletionCounts] = None
    metric: Sometimes[parts.Metric] = None
    precision: parts.Precision
    policy: parts.PolicyFacts
    questions: Size
    # Completions of each question of the pool.
    pool_completions: Size
    # The verdict in words, with warnings.
    summary: str
    cost: parts.StudyCost
    versions: dict[str, str]
    # Numbers of completions by the versions that scored them.
    pool_versions: dict[str, Count]
    sampler: Sometimes[parts.Sampler] = None
    # Numbers of dropped questions, by reason.
    left_out: dict[str, Count]
    # The record of each measurement of `measurements.registry`, by its name.
    measured: Beside = field(default_factory=dict)


@dataclass(frozen=True)
class Claim:
    """A prediction beside its measurement."""

    # The predicted quantity, in a few words.
    what: str
    # A number, or a relation such as `<= 1`.
    predicted: float | str
    # The estimate.
    measured: float
    # Its interval, `low` to `high`; both None if it was enumerated and has no error.
    low: float | None
    high: float | None
    # `agrees`, `disagrees` or `not decided`; with a p-value it is the verdict if Holm's correction
    # does not reject, see `runs.claims.correct_family`.
    verdict: Verdict
    # The criterion, the level and the number of replicates.
    how: str
    # P-value of the hypothesis that the prediction holds; None if the truth was enumerated.
    p_value: float | None = None
    # How many of the alternatives would also have agreed, in words; "" without a natural
    # alternative.
    severity: str = ""
    # The verdict if Holm's correction rejects the prediction; None is `disagrees`, but `not
    # decided` if `verdict` is.
    when_rejected: str | None = None
    # P-values of alternative predictions by name, from which `severity` is made.
    alternatives: Mapping[str, float] = field(default_factory=dict)
    # `p_value` corrected for all claims of the study that have one.
    holm_p: float | None = None


@dataclass(frozen=True, kw_only=True)
class TheoremCost:
    """Number of completions drawn, 0 if everything was enumerated, and wall time."""

    rollouts: Count
    seconds: float


@dataclass(frozen=True, kw_only=True)
class TheoremResult(RunResult):
    """The result of a theorem's test."""

    theorem: str
    statement: str
    # The policy with its exact truth.
    problem: Mapping[str, float | str]
    claims: list[Claim]
    answer: str
    notes: list[str]
    # Verdict on all claims together.
    verdict: Verdict
    cost: TheoremCost
    summary: str
    versions: dict[str, str]


# The record of each command's result.
RESULT_TYPES: Mapping[str, Any] = {
    "train": TrainResult,
    "mse": StudyResult,
    "gap": TheoremResult,
}
ANY_RESULT: Any = TrainResult | StudyResult | TheoremResult
