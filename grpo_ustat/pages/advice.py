"""Keep, raise or lower the number of completions of a prompt, with the interval and the cost."""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import Any

from grpo_ustat.estimators.intervals import Interval
from grpo_ustat.estimators.scaling import GroupSizeCosts, ScalingLaw, noise_share
from grpo_ustat.pages.tables import percent

KEEP, RAISE, LOWER, CHOOSE, UNKNOWN = "keep", "raise", "lower", "choose", "not enough data"
# Largest extra error of a size to keep, by the upper end of its interval.
TOLERABLE_EXTRA_ERROR = 0.3


@dataclass(frozen=True)
class Advice:
    """Advice on the group size."""

    # `keep`, `raise`, `lower`, `choose` (no group size was given to judge) or `not enough data`.
    verdict: str
    # The answer, in one or two sentences.
    sentence: str
    # Further lines: other sizes, the scope of the intervals, what is not known.
    details: list[str]
    # A command to copy, or another next step in words.
    next: str
    # The numbers of the sentence, by name, for programs.
    numbers: dict[str, Any] = field(default_factory=dict)


def rollouts_in_groups(group_size: int | None, rollouts: int) -> int:
    """Return the number of rollouts, or the nearest one of whole groups.

    It is as given where the group size divides it, else the group size times the power of 2 that
    comes nearest to it.

    >>> rollouts_in_groups(8, 256), rollouts_in_groups(6, 256), rollouts_in_groups(512, 256)
    (256, 192, 512)
    >>> rollouts_in_groups(10, 100), rollouts_in_groups(None, 100)
    (100, 100)
    """
    if group_size is None or rollouts % group_size == 0:
        return rollouts
    return group_size * 2 ** max(0, round(math.log2(rollouts / group_size)))


def group_size_advice(
    law: ScalingLaw, gstar: Interval, group_size: int | None, rollouts: int
) -> tuple[str, str, dict[str, Any]]:
    """Judge if another group size has a smaller error at the same number of rollouts.

    "Raise" and "lower" are printed only if the interval of the extra error at `group_size` is above
    0; that interval holds for all sizes and their best one together, see
    `ScalingLaw.extra_error`. "Keep" is printed of the size that is decided, and of another if that
    interval contains 0 and ends below 30 %.

    Args:
        law: with the errors of C1, C2 and C3.
        gstar: G* as it is published.
        group_size: the size in use; None: none is.
        rollouts: n of a training step.

    Returns:
        The verdict, its sentence and its numbers, see `Advice`.

    Raises:
        ValueError: n < 2.
    """
    costs = law.costs(rollouts)
    best = costs.best
    numbers = {
        "num_generations": group_size,
        "rollouts": rollouts,
        "best_num_generations": best,
        **_three_numbers("gstar", gstar),
    }
    if group_size is None:
        if costs.tolerance is None:
            return UNKNOWN, "There is not enough data for a best num_generations.", numbers
        prompts = rollouts // best
        sentence = f"Use num_generations = {best}: at n = {rollouts}, {prompts} prompts a step."
        return CHOOSE, sentence, numbers
    if costs.tolerance is None:
        # What is not decided may still be known to be better than the size in use.
        best = max(costs.extra, key=lambda size: _surely_worse(law, group_size, size))
        if not _surely_worse(law, group_size, best) > 0:
            best = costs.best
    extra, low, high = law.extra_error(group_size, best)
    extra_error = _three_numbers("extra_error", Interval(extra, low, high))
    numbers |= {"best_num_generations": best, **extra_error}
    if group_size != best and low > 0:
        verdict, word = (RAISE, "Raise") if group_size < best else (LOWER, "Lower")
        saved = extra / (1 + extra)
        return (
            verdict,
            f"{word} num_generations from {group_size} to {best}: at n = {rollouts} rollouts a "
            f"step {group_size} costs {percent(extra)} error [{percent(low)}, {percent(high)}], so "
            f"{best} is as good with {100 * saved:.0f} % fewer rollouts.",
            numbers | {"fewer_rollouts": saved},
        )
    if costs.tolerance is None or not (group_size == best or high <= TOLERABLE_EXTRA_ERROR):
        sentence = f"There is not enough data to keep or to change num_generations = {group_size}"
        if costs.tolerance is not None and math.isfinite(low):
            sentence += (
                f": at n = {rollouts} it costs {percent(extra)} error [{percent(low)}, "
                f"{percent(high)}] against the best size, {best}"
            )
        return UNKNOWN, f"{sentence}.", numbers
    if group_size == best:
        return (
            KEEP,
            f"Keep num_generations = {group_size}: its error is within "
            f"{100 * costs.tolerance:.0f} % of the least one of the sizes that divide n = "
            f"{rollouts}.",
            numbers,
        )
    return (
        KEEP,
        f"Keep num_generations = {group_size}: its error is not significantly different from that "
        f"of the best size, {best} ({percent(extra)} [{percent(low)}, {percent(high)}]).",
        numbers,
    )


def _three_numbers(name: str, interval: Interval) -> dict[str, float | None]:
    """Return an interval by the names of its numbers, None where one is not finite."""
    values = (value if math.isfinite(value) else None for value in interval)
    return dict(zip((name, f"{name}_low", f"{name}_high"), values, strict=True))


def _surely_worse(law: ScalingLaw, group_size: int, reference: int) -> float:
    """Return the lower end of the extra error at `group_size`; -inf where there is none."""
    low = law.extra_error(group_size, reference).low
    return low if math.isfinite(low) else -math.inf


def pair_advice(gstar: Interval) -> str:
    """Return a sentence for num_generations = 2, where C2 and C3 have only a sum.

    Groups of 3 have at most the error of pairs without any data: C3 >= 2 C1 for any policy, see
    `estimators.groups`.

    Args:
        gstar: from the low end of its lower bound to the high end of its upper bound.

    >>> pair_advice(Interval(math.nan, 2.42, math.inf))
    'Raise num_generations from 2: at the same n 3 have no larger error, for any policy.'
    >>> pair_advice(Interval(math.nan, 3.6, math.inf))[-56:]
    ' for any policy, and the best size is here at least 3.6.'
    """
    sentence = "Raise num_generations from 2: at the same n 3 have no larger error, for any policy"
    best = f", and the best size is here at least {gstar.low:.1f}" if gstar.low > 3 else ""
    return f"{sentence}{best}."


def other_sizes(costs: GroupSizeCosts) -> str:
    """Return a line with the extra error of every admissible size up to 64.

    >>> from grpo_ustat.estimators.intervals import Interval
    >>> extra = {2: Interval(0.4, 0.3, 0.5), 4: Interval(0, 0, 0)}
    >>> other_sizes(GroupSizeCosts(4, 4, extra))
    'Extra error at n = 4: 2: +40 % [+30 %, +50 %]; 4: the best.'
    """
    parts = []
    for size, (extra, low, high) in costs.extra.items():
        if size == costs.best:
            parts.append(f"{size}: the best")
        elif size <= max(64, 2 * costs.best) and math.isfinite(extra):
            ends = f" [{percent(low)}, {percent(high)}]" if math.isfinite(low) else ""
            parts.append(f"{size}: {percent(extra)}{ends}")
    return f"Extra error at n = {costs.rollouts}: {'; '.join(parts)}."


def noise_text(scale: Interval, rollouts: int) -> str:
    r"""Return a sentence on the noise of a step, and one on twice or half as many rollouts.

    The first-order improvement of a step of its best length is proportional to 1 / (1 + n_c/n)
    (McCandlish et al., arXiv 1812.06162), so 2n rollouts make 2 (n + n_c) / (2n + n_c)
    times the progress of n.

    Args:
        scale: n_c, in rollouts; the sentence is "" where nothing is known of it.
        rollouts: n of a training step.

    >>> print(noise_text(Interval(5200, 2800, 12000), 256).replace(". ", ".\n"))
    The leave-one-out gradient of 256 rollouts is 95 % noise [92 %, 98 %] (half at n = 5200).
    Twice the rollouts make up to 1.9 times the progress per step.
    >>> noise_text(Interval(9, 5, 20), 256).partition(". ")[2]
    'Half the rollouts make 97 % of the progress per step.'
    >>> noise_text(Interval(math.nan, 400, math.inf), 256)
    'The leave-one-out gradient of 256 rollouts is at least 61 % noise.'
    """
    if not scale.low > 0:
        return ""
    share, low, high = noise_share(scale, rollouts)
    gradient = f"The leave-one-out gradient of {rollouts} rollouts"
    if round(100 * low) == 100:
        return f"{gradient} is nearly all noise."
    if not math.isfinite(scale.estimate):
        return f"{gradient} is at least {100 * low:.0f} % noise."
    first = (
        f"{gradient} is {100 * share:.0f} % noise [{100 * low:.0f} %, {100 * high:.0f} %] "
        f"(half at n = {float(f'{scale.estimate:.2g}'):.0f})."
    )
    if rollouts > scale.high:
        kept = (rollouts + scale.estimate) / (rollouts + 2 * scale.estimate)
        return f"{first} Half the rollouts make {100 * kept:.0f} % of the progress per step."
    times = 2 * (rollouts + scale.estimate) / (2 * rollouts + scale.estimate)
    return f"{first} Twice the rollouts make up to {times:.1f} times the progress per step."
