"""Output lines of the callback, in plain words."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

from grpo_ustat.estimators.groups import NoiseEstimate
from grpo_ustat.estimators.intervals import Interval
from grpo_ustat.estimators.scaling import MIN_GSTAR
from grpo_ustat.integrations.trl.objective import OwnLoss
from grpo_ustat.integrations.trl.windows import Window
from grpo_ustat.pages.advice import group_size_advice, pair_advice

# An upper end of this many times the estimate, or more, is not reported.
MAX_RATIO_OF_UPPER_END = 100


def step_line(intervals: Mapping[str, Interval], own_loss: OwnLoss | None) -> str:
    """Summarise the present estimates, without a full stop."""
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
    """Write the answer in the first line, its basis in the second, and further remarks.

    Args:
        estimate: estimate from these windows.
        windows: the recent windows.
        own_loss: relative efficiency of the run's loss.
        group_size, rollouts: G and n of the run.
        scores: description of the scores and their precision.
        cost: cost of measuring.
    """
    gstar = estimate.intervals["gstar"]
    _, advice, _ = group_size_advice(estimate.law, gstar, group_size, rollouts)
    if math.isnan(gstar.low) and not math.isnan(estimate.intervals["c2"].low):
        advice = f"It is not known if num_generations = {group_size} is best."
    if estimate.assumption2:
        advice = pair_advice(gstar)
    answer = advice
    if own_loss is not None:
        answer = f"{own_loss.line()} For the unbiased gradient: {advice[0].lower()}{advice[1:]}"
    groups = sum(len(window.terms.g_sq_P) for window in windows)
    lines = [
        answer,
        f"{numbers(estimate.intervals)}; from {groups} groups of steps {windows[0].first} to "
        f"{windows[-1].last}, averaged over these; {scores}; measuring took {cost}.",
    ]
    if own_loss is not None and (sizes := own_loss.smaller_sizes()):
        lines.append(sizes)
    if estimate.heavy:
        lines.append("Few groups carry most of the weight: intervals may cover less than 90 %.")
    if unknown := sum(window.unknown for window in windows):
        lines.append(f"Groups left out because a completion has no reward: {unknown}.")
    return lines


def numbers(intervals: Mapping[str, Interval]) -> str:
    """State G*, the noise scale and the share of groups with equal rewards, in words."""
    share = intervals["zero_variance"]
    if share.estimate == 1:
        return "all groups have equal rewards, so there is no gradient to measure"
    best = in_words(intervals["gstar"], MIN_GSTAR, digits=1)
    if "gstar_assumption2" in intervals and math.isfinite(intervals["gstar"].high):
        # Pairs give only bounds of G*.
        _, low, high = intervals["gstar"]
        assumed = intervals["gstar_assumption2"].estimate
        best = f"in [{low:.1f}, {high:.1f}] ({assumed:.1f} under Assumption 2)"
    scale = in_words(intervals["noise_scale"])
    return (
        f"G* {best}, noise scale {scale}{' rollouts' * (scale != 'unknown')}, "
        f"{100 * share.estimate:.0f} % of groups have equal rewards"
    )


def in_words(interval: Interval, least: float = 0, digits: int = 0) -> str:
    """Format an estimate with its interval, or its lower end if only that is known, or "unknown".

    >>> in_words(Interval(5.25, 4.31, 9.8), 1, 1), in_words(Interval(math.nan, 32, math.inf))
    ('5.2 [4.3, 9.8]', 'at least 32')
    >>> in_words(Interval(8.7, 1.0, math.inf), 1, 1)
    'unknown'
    """
    estimate, low, high = interval
    if math.isfinite(estimate) and high < MAX_RATIO_OF_UPPER_END * estimate:
        return f"{estimate:.{digits}f} [{low:.{digits}f}, {high:.{digits}f}]"
    return f"at least {low:.{digits}f}" if low > least else "unknown"
