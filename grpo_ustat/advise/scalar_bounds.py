"""Zero-variance share at other group sizes, from the scalars that a run logged."""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np

from grpo_ustat.estimators.intervals import CONFIDENCE, Interval, steps_mean
from grpo_ustat.estimators.zero_variance_bounds import zero_variance_bounds
from grpo_ustat.logs.scalar_names import NEMO_RL, OURS, PRIME_RL, TRL
from grpo_ustat.logs.scalars import MIN_RATIOS, ScalarRun, variance_ratios
from grpo_ustat.records import Array, Integers

SIZES = (2, 4, 8, 16, 32, 64)
# Minimum number of logged rows for an interval, and largest number of recent rows that count.
MIN_ROWS, MAX_ROWS = 8, 200
# Relative tolerance of a standard deviation that a trainer computes in float32.
STD_TOLERANCE = 1e-4
# Averages of several steps have a smaller standard deviation than their average mean reward
# suggests, because the standard deviation is a concave function of it.
LEAST_STD_RATIO = 0.9
# Relative error of a mean reward in float32, and largest error of a count that is still decided.
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
    # Number of rewards of a group that decide; None if unknown.
    size: int | None
    # First and last step that counts.
    steps: tuple[int, int]
    # Lower and upper bound by group size; empty if the log does not determine any.
    bounds: dict[int, tuple[float, float]]
    # Sentences: which rewards were assumed, and why; reasons for missing bounds.
    reasons: list[str]
    # True if the share was derived by assuming rewards of 0 or 1, which the log does not show.
    conditional: bool = False


def recent_rows(run: ScalarRun, *names: str) -> Integers:
    """Return indices of the last half of the rows that have all fields, at most MAX_ROWS."""
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
    # prime-rl and NeMo-RL count groups of only 0 or only 1, not groups of equal rewards.
    counts_zeros = run.trainer in (PRIME_RL, NEMO_RL) or "all_zero" in run.fields
    if counts_zeros and evidence.verdict == REFUTED:
        reasons.append(
            f"The log counts groups whose rewards are all 0 or all 1, but {evidence.reason}; other "
            "groups of equal rewards are not counted, so nothing follows for other sizes."
        )
    if reasons or size is None:
        return replace(result, reasons=reasons)
    conditional = counts_zeros and evidence.verdict == UNDECIDED
    bounds, reason = _bounds(run, rows, size, evidence, counts_zeros, (draws, groups))
    return replace(result, bounds=bounds, reasons=[reason], conditional=conditional)


def _obstacles(run: ScalarRun, rows: Integers) -> list[str]:
    """Return reasons for which the logged share does not determine the share at other sizes."""
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
        return ["With scale_rewards='batch', frac_reward_zero_std is no share of groups."]
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
    """Return the bounds by size, and the sentence that states what they assume.

    The intervals of the scalars hold jointly with 95 % (Bonferroni).
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
        because = f"because {evidence.reason}"
        if evidence.verdict == UNDECIDED:
            because = f"which is assumed: {evidence.reason}"
        if len(bounds) == len(sizes):
            return bounds, f"The bounds use that every reward is 0 or 1, {because}."
        if counts_zeros:
            return {}, (
                "No difficulties of prompts agree with the logged averages for rewards of 0 and 1, "
                "so the rewards have other values."
            )
    share = steps_mean(values, most=groups)
    general = {target: zero_variance_bounds(target, {size: share}) for target in sizes}
    reason = evidence.reason
    if uses_mean:
        reason = "no difficulties of prompts agree with the averages for rewards of 0 and 1"
    return (
        {target: found for target, found in general.items() if found is not None},
        f"The bounds hold for any rewards; narrower ones for rewards of 0 and 1 were not used, "
        f"because {reason}.",
    )


def binary_evidence(run: ScalarRun, rollouts: int | None = None) -> Evidence:
    """Decide whether the scalars show that every reward is 0 or 1.

    With m the mean of n rewards in [0, 1], their variance with divisor n - 1 is at most
    `m (1 - m) n / (n - 1)`, with equality only if every reward is 0 or 1. Rewards of 0 and 1 also
    have a whole sum m n. Neither is enough for averages of several steps; both together are.

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
    """Judge by the smallest and largest reward, and by whether the rewards have a whole sum."""
    rows = recent_rows(run, "reward", "reward_min", "reward_max")
    means = run.fields["reward"][rows]
    counts = run.fields.get("rollouts", np.full(len(run.steps), rollouts or np.nan))[rows]
    if not np.isfinite(counts).all() or len(rows) < MIN_ROWS:
        return Evidence(UNDECIDED, "the log has too few steps with a number of rollouts")
    if not _whole_sums(means, counts):
        return Evidence(REFUTED, "the mean reward times the number of rollouts is not whole")
    return Evidence(
        SHOWN, f"the rewards are between 0 and 1 and have a whole sum at all {len(rows)} steps"
    )


def _evidence_of_std(run: ScalarRun, rollouts: int | None) -> Evidence:
    """Judge by the standard deviation over the batch, and for averages of steps also by sums."""
    rows = recent_rows(run, "reward", "reward_std")
    means = run.fields["reward"][rows]
    ratios = variance_ratios(run, rows)
    if len(ratios) < MIN_RATIOS:
        return Evidence(UNDECIDED, "too few steps have rewards of more than one value")
    name = run.logged_names["reward_std"]
    if run.steps_per_row == 1:
        typical = float(np.median(ratios))
        is_constant = np.abs(ratios - typical).max() < STD_TOLERANCE * typical
        if is_constant and 1 < typical <= 2 + STD_TOLERANCE:
            return Evidence(
                SHOWN,
                f"{name}^2 = m (1 - m) n / (n - 1) with the mean reward m at all {len(ratios)} "
                "steps",
            )
        return Evidence(
            REFUTED,
            f"{name} is not the standard deviation that rewards of 0 and 1 with the logged mean "
            "have",
        )
    averaged = f"{run.steps_per_row or 'several'} steps"
    if rollouts is None or run.steps_per_row is None:
        return Evidence(
            UNDECIDED,
            f"each row is an average of {averaged}, for which the number of rollouts per step must "
            "be known (type rollouts=)",
        )
    sums = rollouts * run.steps_per_row
    if sums * FLOAT32 > COUNT_TOLERANCE:
        return Evidence(UNDECIDED, f"each row is an average of {averaged}, which is too many")
    bound = rollouts / (rollouts - 1)
    if not _whole_sums(means, sums) or ratios.max() > bound * (1 + STD_TOLERANCE):
        return Evidence(
            REFUTED,
            f"{rollouts} rewards of 0 and 1 per step cannot have the logged mean and {name}",
        )
    if np.sqrt(ratios / bound).mean() < LEAST_STD_RATIO:
        return Evidence(
            UNDECIDED, f"{name} is lower than most rewards of 0 and 1 with the logged mean have"
        )
    return Evidence(
        SHOWN, f"the mean rewards times {sums} are whole numbers and {name} agrees with them"
    )


def _whole_sums(means: Array, counts: Array | float) -> bool:
    """Return True if all sums of rewards are whole numbers, up to rounding in float32."""
    sums = means * counts
    tolerance = np.maximum(1e-6, np.asarray(counts) * FLOAT32)
    return bool((np.abs(sums - np.round(sums)) <= tolerance).all())
