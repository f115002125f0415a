"""Bounds on the share of zero-variance groups at other group sizes, from a run's scalars.

A group has zero variance if all of its rewards are equal. It then gives no gradient. Trainers log
the share of such groups only at the run's group size.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np

from grpo_ustat.estimators.intervals import CONFIDENCE, Interval, steps_mean
from grpo_ustat.estimators.zero_variance_bounds import zero_variance_bounds
from grpo_ustat.logs.scalar_names import NEMO_RL, PRIME_RL, TRL
from grpo_ustat.logs.scalars import ScalarRun
from grpo_ustat.records import Integers

SIZES = (2, 4, 8, 16, 32, 64)
# Minimum number of logged rows for an interval, and maximum number of recent rows that are used.
MIN_ROWS, MAX_ROWS = 8, 200


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
    # True if the log counts only groups whose rewards are all 0 or all 1, as prime-rl and NeMo-RL
    # do. The share then assumes that every reward is 0 or 1.
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
    counts_zeros = run.trainer in (PRIME_RL, NEMO_RL) or "all_zero" in run.fields
    rewards = [x for name in ("reward", "reward_min", "reward_max") for x in run.values(name)]
    outside = [x for x in rewards if not 0 <= x <= 1]
    if counts_zeros and outside:
        reasons.append(
            "The log counts only groups whose rewards are all 0 or all 1, but a reward or mean "
            f"reward is {outside[0]:.3g}. Other groups of equal rewards are not counted, so "
            "nothing follows for other sizes."
        )
    if reasons or size is None:
        return replace(result, reasons=reasons)
    bounds, reason = _bounds(run, rows, size, counts_zeros, (draws, groups))
    return replace(
        result, bounds=bounds, reasons=[reason], conditional=counts_zeros and bool(bounds)
    )


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
        counts_zeros: True if the log counts only groups whose rewards are all 0 or all 1.
        draws: number of rollouts and number of groups in the recent rows; None if unknown.
    """
    rollouts, groups = draws
    values = run.fields["zero_variance"][rows]
    sizes = sorted({*SIZES, run.num_generations or size} - {size})
    mean, level = None, CONFIDENCE
    if counts_zeros and "reward" in run.fields:
        level = 1 - (1 - CONFIDENCE) / 2
        mean = steps_mean(run.fields["reward"][rows], level, rollouts)
    share = steps_mean(values, level, groups)
    bounds = {
        target: found
        for target in sizes
        if (found := zero_variance_bounds(target, {size: share}, mean)) is not None
    }
    if not counts_zeros:
        return bounds, "The bounds hold for any rewards."
    if len(bounds) == len(sizes):
        return bounds, "The bounds require that every reward is 0 or 1."
    return {}, (
        "There are no bounds: for rewards of 0 and 1, the logged averages contradict each "
        "other at every mixture of prompt difficulties, so the rewards have other values."
    )
