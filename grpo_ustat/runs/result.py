"""Records stored in `result.json`. Commands build them, and readers check the file against them.

Each field is a key of the file, in the order of the fields. A key can be missing in the file if its
field has a default. An `Interval` has three keys; see `runs.contents`. Squared norms and errors
are in squared units of the gradient, lengths in tokens, and times in seconds.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from grpo_ustat.estimators.intervals import Interval
from grpo_ustat.runs import study_parts as parts

AGREES, DISAGREES, OPEN = "agrees", "disagrees", "not decided"


@dataclass(frozen=True, kw_only=True)
class RunResult:
    """Fields that `RunFolder.finish` adds to every result."""

    # Fingerprint of the configuration.
    config_hash: str | None = None
    # Package versions used in earlier parts of the run, if they differ from the last versions.
    earlier_versions: list[dict[str, str]] | None = None


@dataclass(frozen=True, kw_only=True)
class Evaluation:
    """Fields of every row of `eval.csv`.

    A row can also have `pass@K` with the ends of its interval, and the numbers of judge failures.
    """

    # Number of updates before the evaluation.
    step: int
    split: str
    decoding: str
    quantity: str
    # Mean reward according to the data set's judge, with its interval from `low` to `high`.
    mean_reward: float
    low: float
    high: float
    # Number of questions.
    n: int
    # Number of completions per question.
    num_generations: int
    # Share of truncated completions.
    clipped_ratio: float
    # Share of completions without an answer.
    extraction_failure_ratio: float


@dataclass(frozen=True, kw_only=True)
class TrainResult(RunResult):
    """Result of a training run."""

    quantity: str
    # Mean reward at the last evaluation with the first decoding method, with its interval.
    final_mean_reward: float
    mean_reward_low: float
    mean_reward_high: float
    # Mean reward at the last evaluation minus mean reward at the first, paired by question.
    gain: Interval
    # Number of updates.
    steps: int
    # Number of completions.
    rollouts: int
    # Number of additional completions sampled for the baseline.
    value_rollouts: int
    tokens: int
    # Total wall time of all steps.
    seconds: float
    # Wall time to write the last checkpoint.
    seconds_save: float
    # Number of checkpoints and tables that could not be written.
    failed_saves: int
    evals: list[dict[str, Any]]
    # Number of steps at which each alarm was raised.
    alarms: dict[str, int]
    run: str
    summary: str
    versions: dict[str, str]
    # Numbers of dropped questions, by reason.
    left_out: dict[str, int]


@dataclass(frozen=True, kw_only=True)
class StudyResult(RunResult):
    """Result of a study of the gradient error."""

    # Numbers of completions by outcome; given only if all rewards are equal, so that no error can
    # be measured.
    equal_rewards: parts.CompletionCounts | None = None
    metric: parts.Metric | None = None
    precision: parts.Precision
    policy: parts.PolicyFacts
    questions: int
    # Number of stored completions per question.
    pool_completions: int
    # Verdict in words, with warnings.
    summary: str
    cost: parts.StudyCost
    versions: dict[str, str]
    # Number of completions scored with each set of package versions.
    pool_versions: dict[str, int]
    sampler: parts.Sampler | None = None
    # Numbers of dropped questions, by reason.
    left_out: dict[str, int]
    # For `study.until=decided`: what the study knew after each batch of questions, in order.
    looks: list[parts.Look] | None = None
    # Records of the measurements in `measurements.registry`, by name.
    measured: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class Claim:
    """Prediction and measurement of a quantity, and their verdict."""

    # Predicted quantity, in a few words.
    what: str
    # Predicted value, or a relation such as `<= 1`.
    predicted: float | str
    # Estimate of the quantity.
    measured: float
    # Interval of the estimate, from `low` to `high`; None if the quantity was enumerated exactly.
    low: float | None
    high: float | None
    # `agrees`, `disagrees` or `not decided`. For a claim with a p-value, this verdict applies if
    # Holm's correction does not reject the prediction; see `runs.claims.correct_family`.
    verdict: str
    # Criterion, level and number of replicates.
    how: str
    # P-value of the hypothesis that the prediction is correct; None if the quantity was enumerated.
    p_value: float | None = None
    # Text with the number of alternative predictions that would also have agreed. It shows how
    # severe the test is. Empty if there is no natural alternative.
    severity: str = ""
    # Verdict if Holm's correction rejects the prediction. None means `not decided` if `verdict` is
    # `not decided`, and `disagrees` otherwise.
    when_rejected: str | None = None
    # P-values of alternative predictions, by name; they determine `severity`.
    alternatives: Mapping[str, float] = field(default_factory=dict)
    # Holm's adjusted p-value, over all claims with p-values in the study.
    holm_p: float | None = None


@dataclass(frozen=True, kw_only=True)
class TheoremCost:
    """Number of sampled completions (0 if everything was enumerated) and wall time."""

    rollouts: int
    seconds: float


@dataclass(frozen=True, kw_only=True)
class TheoremResult(RunResult):
    """Result of a test of a theorem."""

    theorem: str
    statement: str
    # Test problem, that is, a policy and its exact values.
    problem: Mapping[str, float | str]
    claims: list[Claim]
    answer: str
    # Joint verdict on all claims.
    verdict: str
    cost: TheoremCost
    summary: str
    versions: dict[str, str]


# Record type of each command's result.
RESULT_TYPES: Mapping[str, Any] = {
    "train": TrainResult,
    "mse": StudyResult,
    "gap": TheoremResult,
}


def result_type(content: Mapping[str, Any]) -> Any:
    """Return the record type of a result whose command is unknown."""
    if "claims" in content:
        return TheoremResult
    return TrainResult if "final_mean_reward" in content else StudyResult
