"""Advice to keep, raise or lower the group size, with the cost of the current size."""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from grpo_ustat.estimators.intervals import Interval
from grpo_ustat.terminal.streams import percent

if TYPE_CHECKING:
    from grpo_ustat.estimators.scaling import GroupSizeCosts, ScalingLaw

KEEP, RAISE, LOWER, CHOOSE, UNKNOWN = "keep", "raise", "lower", "choose", "not enough data"
# Verdict on several runs, if their mean rewards differ by more than noise.
DIFFERENT = "different"
# A group size is kept if the upper end of the interval of its extra error is at most this value.
TOLERABLE_EXTRA_ERROR = 0.3


@dataclass(frozen=True)
class Advice:
    """Advice on the group size."""

    # `keep`, `raise`, `lower`, `choose` (if no group size was given), `different` (of several
    # runs) or `not enough data`.
    verdict: str
    # Answer in one or two sentences.
    sentence: str
    # Further lines on other sizes, the scope of the intervals, and unknown quantities.
    details: list[str]
    # Next step: a command to copy, or a description in words.
    next: str
    # Numbers that the sentence contains, keyed by name, for use by programs.
    numbers: dict[str, Any] = field(default_factory=dict)


def rollouts_in_groups(group_size: int | None, rollouts: int) -> int:
    """Return the number of rollouts, or a nearby number that is a multiple of the group size.

    If the group size does not divide the given number, the result is the group size times the power
    of 2 that brings it nearest to the given number on a log scale.

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
    """Decide whether another group size has a smaller error at the same number of rollouts.

    The decision uses the interval of the extra error at `group_size`. This interval holds for all
    sizes simultaneously and accounts for the choice of the best size; see `ScalingLaw.extra_error`.
    The advice is "raise" or "lower" only if the interval lies above 0. It is "keep" only if two
    conditions hold: the data determine the best size; and `group_size` is this size, or the
    interval contains 0 and its upper end is at most 30 %.

    Args:
        law: Scaling law, including the sampling errors of C1, C2 and C3.
        gstar: G* and its interval, as shown to the user.
        group_size: Group size in use; None if unknown.
        rollouts: Number of rollouts per training step, n.

    Returns:
        Verdict, sentence and numbers; see `Advice`.

    Raises:
        ValueError: If n < 2.
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
            return UNKNOWN, "There is not enough data to recommend num_generations.", numbers
        prompts = rollouts // best
        sentence = (
            f"Use num_generations = {best}: a step of n = {rollouts} rollouts then has {prompts} "
            "prompts."
        )
        return CHOOSE, sentence, numbers
    if costs.tolerance is None:
        # The best size is undecided, but another size may still have a significantly smaller error
        # than the size in use.
        best = max(costs.extra, key=lambda size: _surely_worse(law, group_size, size))
        if not _surely_worse(law, group_size, best) > 0:
            best = costs.best
    extra, low, high = law.extra_error(group_size, best)
    extra_error = _three_numbers("extra_error", Interval(extra, low, high))
    numbers |= {"best_num_generations": best, **extra_error}
    if group_size != best and low > 0:
        verdict, word = (RAISE, "Raise") if group_size < best else (LOWER, "Lower")
        saved = extra / (1 + extra)
        larger = f"{percent(extra)} [{percent(low)}, {percent(high)}]".replace("+", "")
        return (
            verdict,
            f"{word} num_generations from {group_size} to {best}: with n = {rollouts} rollouts per "
            f"step, the error is {larger} larger at G = {group_size}. G = {best} reaches the same "
            f"error with {100 * saved:.0f} % fewer rollouts.",
            numbers | {"fewer_rollouts": saved},
        )
    if costs.tolerance is None or not (group_size == best or high <= TOLERABLE_EXTRA_ERROR):
        sentence = (
            f"There is not enough data to advise keeping or changing num_generations = {group_size}"
        )
        if costs.tolerance is not None and math.isfinite(low):
            sentence += (
                f": at n = {rollouts} its error is {percent(extra)} [{percent(low)}, "
                f"{percent(high)}] relative to the best size, {best}"
            )
        return UNKNOWN, f"{sentence}.", numbers
    if group_size == best:
        return (
            KEEP,
            f"Keep num_generations = {group_size}: its error is within "
            f"{100 * costs.tolerance:.0f} % of the minimum over the sizes that divide "
            f"n = {rollouts}.",
            numbers,
        )
    return (
        KEEP,
        f"Keep num_generations = {group_size}: its error is not significantly different from the "
        f"error of the best size, {best} ({percent(extra)} [{percent(low)}, {percent(high)}]).",
        numbers,
    )


def _three_numbers(name: str, interval: Interval) -> dict[str, float | None]:
    """Return an estimate and its interval's ends by name; None if a number is not finite."""
    values = (value if math.isfinite(value) else None for value in interval)
    return dict(zip((name, f"{name}_low", f"{name}_high"), values, strict=True))


def _surely_worse(law: ScalingLaw, group_size: int, reference: int) -> float:
    """Return the lower end of the extra error's interval at `group_size`; -inf if there is none."""
    low = law.extra_error(group_size, reference).low
    return low if math.isfinite(low) else -math.inf


def pair_advice(gstar: Interval) -> str:
    """Return a sentence for num_generations = 2.

    With groups of 2, a log determines only C2 + C3 and not G*. The sentence needs no data, because
    C3 >= 2 C1 for any policy, so the error with groups of 3 is at most the error with pairs; see
    `estimators.groups`.

    Args:
        gstar: Interval for G* from the lower end of its lower bound to the upper end of its upper
            bound.

    >>> pair_advice(Interval(math.nan, 2.42, math.inf))
    'Raise num_generations from 2: at the same n, the error at 3 is never larger, for any policy.'
    >>> pair_advice(Interval(math.nan, 3.6, math.inf))[-56:]
    'ger, for any policy. Here the best size is at least 3.6.'
    """
    sentence = (
        "Raise num_generations from 2: at the same n, the error at 3 is never larger, for any "
    )
    best = f" Here the best size is at least {gstar.low:.1f}." if gstar.low > 3 else ""
    return f"{sentence}policy.{best}"


def other_sizes(costs: GroupSizeCosts) -> str:
    """Return a line with the extra error of each size that divides n, up to a largest size.

    The largest size is 64, or twice the best size if that is more.

    >>> from grpo_ustat.estimators.scaling import GroupSizeCosts
    >>> from grpo_ustat.estimators.intervals import Interval
    >>> extra = {2: Interval(0.4, 0.3, 0.5), 4: Interval(0, 0, 0)}
    >>> other_sizes(GroupSizeCosts(4, 4, extra))
    'Extra error at n = 4: G = 2: +40 % [+30 %, +50 %]; G = 4: best.'
    """
    parts = []
    for size, (extra, low, high) in costs.extra.items():
        if size == costs.best:
            parts.append(f"G = {size}: best")
        elif size <= max(64, 2 * costs.best) and math.isfinite(extra):
            ends = f" [{percent(low)}, {percent(high)}]" if math.isfinite(low) else ""
            parts.append(f"G = {size}: {percent(extra)}{ends}")
    return f"Extra error at n = {costs.rollouts}: {'; '.join(parts)}."


def noise_text(scale: Interval, rollouts: int) -> str:
    r"""Return a sentence on a step's noise and a sentence on doubling or halving the rollouts.

    With the optimal step length, the improvement per step is proportional to 1 / (1 + n_c/n)
    (McCandlish et al., arXiv 1812.06162). So a step with 2n rollouts makes 2 (n + n_c) / (2n + n_c)
    times the progress of a step with n rollouts.

    Args:
        scale: Noise scale n_c, in rollouts. If the lower end of its interval is not above 0, the
            result is "".
        rollouts: Number of rollouts per training step, n.

    >>> print(noise_text(Interval(5200, 2800, 12000), 256).replace("; ", ";\n"))
    The leave-one-out gradient of 256 rollouts is 95 % noise [92 %, 98 %];
    at n = 5200 it is half noise. Doubling the rollouts gives up to 1.9 times the progress per step.
    >>> noise_text(Interval(9, 5, 20), 256).partition(". ")[2]
    'Halving the rollouts keeps 97 % of the progress per step.'
    >>> noise_text(Interval(math.nan, 400, math.inf), 256)
    'The leave-one-out gradient of 256 rollouts is at least 61 % noise.'
    """
    # Imported here, so that a log without gradients is read without loading SciPy's optimisers.
    from grpo_ustat.estimators.scaling import noise_share

    if not scale.low > 0:
        return ""
    share, low, high = noise_share(scale, rollouts)
    gradient = f"The leave-one-out gradient of {rollouts} rollouts"
    if round(100 * low) == 100:
        return f"{gradient} is nearly all noise."
    if not math.isfinite(scale.estimate):
        return f"{gradient} is at least {100 * low:.0f} % noise."
    first = (
        f"{gradient} is {100 * share:.0f} % noise [{100 * low:.0f} %, {100 * high:.0f} %]; "
        f"at n = {float(f'{scale.estimate:.2g}'):.0f} it is half noise."
    )
    if rollouts > scale.high:
        kept = (rollouts + scale.estimate) / (rollouts + 2 * scale.estimate)
        return f"{first} Halving the rollouts keeps {100 * kept:.0f} % of the progress per step."
    times = 2 * (rollouts + scale.estimate) / (2 * rollouts + scale.estimate)
    return f"{first} Doubling the rollouts gives up to {times:.1f} times the progress per step."
