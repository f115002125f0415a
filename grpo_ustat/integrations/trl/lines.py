"""Output lines of the callback."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

from grpo_ustat.estimators.groups import NoiseEstimate
from grpo_ustat.estimators.intervals import Interval, in_words
from grpo_ustat.estimators.scaling import MIN_GSTAR
from grpo_ustat.integrations.trl.objective import OwnLoss
from grpo_ustat.integrations.trl.windows import Window
from grpo_ustat.pages.advice import group_size_advice, pair_advice


def step_line(intervals: Mapping[str, Interval], own_loss: OwnLoss | None) -> str:
    """Summarise the current estimates in a line without a full stop."""
    line = numbers(intervals)
    if own_loss is not None and own_loss.decided and own_loss.efficiency is not None:
        efficiency = in_words(own_loss.efficiency.efficiency_same_g, digits=2)
        line += f", relative efficiency of your loss {efficiency}"
    return line


def end_lines(
    estimate: NoiseEstimate,
    windows: Sequence[Window],
    own_loss: OwnLoss | None,
    group_size: int,
    rollouts: int,
    scores: str,
    cost: str,
) -> list[str]:
    """Return the summary: a line of advice, a line with the estimates behind it, and remarks.

    Args:
        estimate: estimate from `windows`.
        windows: windows of the second half of training; see `GradientNoiseCallback.recent`.
        own_loss: relative efficiency of the run's loss; None if it was not estimated.
        group_size, rollouts: G and n of the run.
        scores: description of the scores and their precision.
        cost: time spent on measuring, in words.
    """
    gstar = estimate.intervals["gstar"]
    _, advice, _ = group_size_advice(estimate.law, gstar, group_size, rollouts)
    if math.isnan(gstar.low) and not math.isnan(estimate.intervals["c2"].low):
        advice = f"It is not known whether num_generations = {group_size} is the best size."
    if estimate.assumption2:
        advice = pair_advice(gstar)
    answer = advice
    if own_loss is not None:
        answer = f"{own_loss.line()} For the unbiased gradient: {advice[0].lower()}{advice[1:]}"
    groups = sum(len(window.terms.g_sq_P) for window in windows)
    lines = [
        answer,
        f"{numbers(estimate.intervals)}; from {groups} groups of steps {windows[0].first} to "
        f"{windows[-1].last}, averaged over these steps; {scores}; measuring took {cost}.",
    ]
    if estimate.heavy:
        lines.append(
            "A few groups dominate the estimates, so the coverage of the 95 % intervals may be "
            "below 90 %."
        )
    if unknown := sum(window.unknown for window in windows):
        lines.append(f"Groups left out because a completion has no reward: {unknown}.")
    return lines


def numbers(intervals: Mapping[str, Interval]) -> str:
    """Describe G*, the noise scale and the share of groups with equal rewards."""
    share = intervals["zero_variance"]
    if share.estimate == 1:
        return "the rewards are equal within every group, so there is no gradient to measure"
    best = in_words(intervals["gstar"], MIN_GSTAR, digits=1)
    if "gstar_assumption2" in intervals and math.isfinite(intervals["gstar"].high):
        # In groups of 2, G* cannot be estimated, but only bounded from below and above.
        _, low, high = intervals["gstar"]
        assumed = intervals["gstar_assumption2"].estimate
        best = f"in [{low:.1f}, {high:.1f}] ({assumed:.1f} under Assumption 2)"
    scale = in_words(intervals["noise_scale"])
    return (
        f"G* {best}, noise scale {scale}{' rollouts' * (scale != 'unknown')}, "
        f"{100 * share.estimate:.0f} % of groups have equal rewards"
    )
