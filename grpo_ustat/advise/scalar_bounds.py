"""Bounds on the share of zero-variance groups at other group sizes, from a run's scalars.

A group has zero variance if all of its rewards are equal. It then gives no gradient. Trainers log
the share of such groups only at the run's group size.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np

from grpo_ustat.estimators.intervals import CONFIDENCE, Interval, steps_mean
from grpo_ustat.estimators.zero_variance_bounds import zero_variance_bounds
from grpo_ustat.logs.scalar_names import NEMO_RL, OURS, PRIME_RL, TRL
from grpo_ustat.logs.scalars import MIN_RATIOS, ScalarRun, variance_ratios
from grpo_ustat.records import Array, Integers

SIZES = (2, 4, 8, 16, 32, 64)
# Minimum number of logged rows for an interval, and maximum number of recent rows that are used.
MIN_ROWS, MAX_ROWS = 8, 200
# Relative tolerance of a standard deviation that a trainer computes in float32.
STD_TOLERANCE = 1e-4
# A row can be the average of several steps. Its averaged standard deviation is then smaller than
# the standard deviation that belongs to its averaged mean reward, because the standard deviation is
# a concave function of the mean. Their ratio must be at least this value.
LEAST_STD_RATIO = 0.9
# Relative error of a mean reward in float32, and the largest error with which a sum of rewards can
# still be recognised as a whole number.
FLOAT32, COUNT_TOLERANCE = 2e-7, 0.05

SHOWN, REFUTED, UNDECIDED = "shown", "refuted", "undecided"


@dataclass(frozen=True)
class Evidence:
    """Evidence that every reward is 0 or 1."""

    # `shown`, `refuted` or `undecided`.
    verdict: str
    # Sentence without full stop.
    reason: str


@dataclass(frozen=True)
class ZeroVariance:
    """Zero-variance share of recent steps, and its bounds at other group sizes."""

    # Share at the group size of the log, with its interval over steps.
    share: Interval
    # Number of rewards that must be equal in the logged share; None if unknown. It is the group
    # size, or one less if the trainer logs leave-one-out baselines.
    size: int | None
    # First and last step that the share averages over.
    steps: tuple[int, int]
    # Lower and upper bound of the share, keyed by group size; empty if the log determines none.
    bounds: dict[int, tuple[float, float]]
    # Sentences on the assumption about the rewards, or on the reason why there are no bounds.
    reasons: list[str]
    # True if the share assumes that all rewards are 0 or 1, and the log does not show this.
    conditional: bool = False


def recent_rows(run: ScalarRun, *names: str) -> Integers:
    """Return the indices of recent rows: the last half of the rows in which all fields are present.

    They are at most MAX_ROWS, and at least MIN_ROWS if there are so many.
    """
    present = np.ones(len(run.steps), dtype=bool)
    for name in names:
        present &= np.isfinite(run.fields.get(name, np.full(len(run.steps), np.nan)))
    rows = np.flatnonzero(present)
    return rows[-min(MAX_ROWS, max(MIN_ROWS, (len(rows) + 1) // 2)) :]


def zero_variance(run: ScalarRun, rollouts: int | None = None) -> ZeroVariance | None:
    """Return the zero-variance share of the recent steps; None if the run does not log it.

    Args:
        run: scalars of the run.
        rollouts: number of rollouts per step; None for the number in the log.
    """
    if "zero_variance" not in run.fields:
        return None
    rollouts = rollouts or run.rollouts
    names = ["zero_variance"] + ["reward"] * ("reward" in run.fields)
    rows = recent_rows(run, *names)
    if not len(rows):
        return None
    values, size = run.fields["zero_variance"][rows], run.share_size
    averaged = run.steps_per_row or 1
    draws = groups = None
    if rollouts and run.num_generations:
        draws = float(len(rows) * averaged * rollouts)
        groups = draws / run.num_generations
    span = (int(run.steps[rows[0]]), int(run.steps[rows[-1]]))
    share = Interval(float(values.mean()), 0.0, 1.0)
    if len(rows) >= MIN_ROWS:
        share = steps_mean(values, most=groups)
    result = ZeroVariance(share, size, span, {}, [])
    reasons = _obstacles(run, rows)
    evidence = binary_evidence(run, rollouts)
    # prime-rl and NeMo-RL count only groups whose rewards are all 0 or all 1. Other groups with
    # equal rewards are not counted.
    counts_zeros = run.trainer in (PRIME_RL, NEMO_RL) or "all_zero" in run.fields
    if counts_zeros and evidence.verdict == REFUTED:
        reasons.append(
            f"The log counts only groups whose rewards are all 0 or all 1, but {evidence.reason}. "
            "Other groups of equal rewards are not counted, so nothing follows for other sizes."
        )
    if reasons or size is None:
        return replace(result, reasons=reasons)
    conditional = counts_zeros and evidence.verdict == UNDECIDED
    bounds, reason = _bounds(run, rows, size, evidence, counts_zeros, (draws, groups))
    return replace(result, bounds=bounds, reasons=[reason], conditional=conditional)


def _obstacles(run: ScalarRun, rows: Integers) -> list[str]:
    """Return reasons why the logged share says nothing about the share at other group sizes."""
    shares = run.fields["zero_variance"][rows]
    if len(rows) < MIN_ROWS:
        return [f"{len(rows)} logged steps are too few for an interval: {MIN_ROWS} are needed."]
    batches = run.values("generated_batches")
    if len(batches):
        return [
            "Dynamic sampling removed groups before these scalars were computed, so they describe "
            "the remaining groups only."
        ]
    if run.trainer == TRL and run.settings.get("scale_rewards") == "batch":
        return ["With scale_rewards='batch', TRL's frac_reward_zero_std is not a share of groups."]
    if run.trainer in (TRL, "") and not shares.any():
        return [
            "frac_reward_zero_std is 0 at all of these steps. TRL also logs 0 with "
            "scale_rewards='batch', so nothing follows for other sizes."
        ]
    return []


def _bounds(
    run: ScalarRun,
    rows: Integers,
    size: int,
    evidence: Evidence,
    counts_zeros: bool,
    draws: tuple[float | None, float | None],
) -> tuple[dict[int, tuple[float, float]], str]:
    """Return the bounds keyed by group size, and the sentence that states what they assume.

    The bounds are computed from the intervals of the logged averages, which hold jointly with 95 %
    confidence (Bonferroni).

    Args:
        run: scalars of the run.
        rows: indices of the recent rows.
        size: number of rewards that must be equal in the logged share.
        evidence: evidence that every reward is 0 or 1.
        counts_zeros: True if the log counts only groups whose rewards are all 0 or all 1.
        draws: number of rollouts and number of groups in the recent rows; None if unknown.
    """
    rollouts, groups = draws
    values = run.fields["zero_variance"][rows]
    wanted = {*SIZES, run.num_generations or size} - {size}
    sizes = sorted(wanted)
    uses_mean = "reward" in run.fields and (counts_zeros or evidence.verdict == SHOWN)
    if uses_mean:
        level = 1 - (1 - CONFIDENCE) / 2
        share = steps_mean(values, level, groups)
        mean = steps_mean(run.fields["reward"][rows], level, rollouts)
        bounds = {
            target: found
            for target in sizes
            if (found := zero_variance_bounds(target, {size: share}, mean)) is not None
        }
        because = f"The log shows this, because {evidence.reason}"
        if evidence.verdict == UNDECIDED:
            because = f"The log does not show this, because {evidence.reason}"
        if len(bounds) == len(sizes):
            return bounds, f"The bounds require that every reward is 0 or 1. {because}."
        if counts_zeros:
            return {}, (
                "There are no bounds: for rewards of 0 and 1, the logged averages contradict each "
                "other at every mixture of prompt difficulties, so the rewards have other values."
            )
    share = steps_mean(values, most=groups)
    general = {target: zero_variance_bounds(target, {size: share}) for target in sizes}
    reason = evidence.reason
    if uses_mean:
        reason = (
            "rewards of 0 and 1 contradict the logged averages at every mixture of prompt "
            "difficulties"
        )
    return (
        {target: found for target, found in general.items() if found is not None},
        f"The bounds hold for any rewards. The narrower bounds for rewards of 0 and 1 were not "
        f"used, because {reason}.",
    )


def binary_evidence(run: ScalarRun, rollouts: int | None = None) -> Evidence:
    """Decide whether the scalars show that every reward is 0 or 1.

    Let m be the mean of n rewards in [0, 1]. Two facts are used. First, the variance of the rewards
    (with divisor n - 1) is at most `m (1 - m) n / (n - 1)`, and it reaches this value only if every
    reward is 0 or 1. Second, the sum m n of rewards of 0 and 1 is a whole number. If a logged row
    is the average of several steps, neither fact alone is enough evidence, but both together are.

    Args:
        run: scalars of the run.
        rollouts: number of rollouts per step; None if unknown.
    """
    means = run.values("reward")
    if not len(means):
        return Evidence(UNDECIDED, "the log has no mean reward")
    outside = [*means[(means < 0) | (means > 1)]]
    lows, highs = run.values("reward_min"), run.values("reward_max")
    outside += [*lows[lows < 0], *highs[highs > 1]]
    if outside:
        return Evidence(REFUTED, f"a reward or mean reward is {outside[0]:.3g}")
    if len(lows) and len(highs):
        return _evidence_of_range(run, rollouts)
    if run.trainer in (TRL, OURS, "") and "reward_std" in run.fields:
        return _evidence_of_std(run, rollouts)
    if rollouts and not _whole_sums(means, rollouts):
        return Evidence(REFUTED, f"the mean reward times n = {rollouts} is not a whole number")
    return Evidence(UNDECIDED, "the log has no standard deviation or range of the rewards")


def _evidence_of_range(run: ScalarRun, rollouts: int | None) -> Evidence:
    """Judge by the logged minimum and maximum reward: the sum must also be a whole number."""
    rows = recent_rows(run, "reward", "reward_min", "reward_max")
    means = run.fields["reward"][rows]
    counts = run.fields.get("rollouts", np.full(len(run.steps), rollouts or np.nan))[rows]
    if not np.isfinite(counts).all() or len(rows) < MIN_ROWS:
        return Evidence(UNDECIDED, "too few steps of the log have a number of rollouts")
    if not _whole_sums(means, counts):
        return Evidence(REFUTED, "the mean reward times the number of rollouts is no whole number")
    return Evidence(
        SHOWN,
        f"the rewards are between 0 and 1 and their sum is a whole number at all {len(rows)} steps",
    )


def _evidence_of_std(run: ScalarRun, rollouts: int | None) -> Evidence:
    """Judge by the standard deviation of the rewards over the batch.

    If a logged row is the average of several steps, the sums of rewards are also used.
    """
    rows = recent_rows(run, "reward", "reward_std")
    means = run.fields["reward"][rows]
    ratios = variance_ratios(run, rows)
    if len(ratios) < MIN_RATIOS:
        return Evidence(UNDECIDED, "too few steps have unequal rewards")
    name = run.logged_names["reward_std"]
    if run.steps_per_row == 1:
        typical = float(np.median(ratios))
        is_constant = np.abs(ratios - typical).max() < STD_TOLERANCE * typical
        if is_constant and 1 < typical <= 2 + STD_TOLERANCE:
            return Evidence(
                SHOWN,
                f"{name}^2 is m (1 - m) n / (n - 1) at all {len(ratios)} steps (m is the mean of "
                "the n rewards), which is possible only for rewards of 0 and 1",
            )
        return Evidence(
            REFUTED,
            f"rewards of 0 and 1 with the logged mean would have another {name}",
        )
    averaged = f"{run.steps_per_row or 'several'} steps"
    if rollouts is None or run.steps_per_row is None:
        return Evidence(
            UNDECIDED,
            f"each row is an average of {averaged}, so the number of rollouts per step must be "
            "known (type rollouts=)",
        )
    sums = rollouts * run.steps_per_row
    if sums * FLOAT32 > COUNT_TOLERANCE:
        return Evidence(
            UNDECIDED, f"each row is an average of {averaged}, which is too many to decide"
        )
    bound = rollouts / (rollouts - 1)
    if not _whole_sums(means, sums) or ratios.max() > bound * (1 + STD_TOLERANCE):
        return Evidence(
            REFUTED,
            f"{rollouts} rewards of 0 and 1 per step cannot have the logged mean and {name}",
        )
    if np.sqrt(ratios / bound).mean() < LEAST_STD_RATIO:
        return Evidence(
            UNDECIDED, f"{name} is lower than is usual for rewards of 0 and 1 with the logged mean"
        )
    return Evidence(
        SHOWN, f"the mean rewards times {sums} are whole numbers and {name} agrees with them"
    )


def _whole_sums(means: Array, counts: Array | float) -> bool:
    """Return True if all sums of rewards are whole numbers, up to rounding in float32."""
    sums = means * counts
    tolerance = np.maximum(1e-6, np.asarray(counts) * FLOAT32)
    return bool((np.abs(sums - np.round(sums)) <= tolerance).all())
