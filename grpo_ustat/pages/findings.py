"""The answer of a study of the gradient's error: which G, and at what cost.

It is made from `result.json` alone, for any number of rollouts: at a fixed number the error of
every G relative to another is the same, only the admissible sizes differ, those that divide it.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from grpo_ustat.estimators.group_size import TOLERANCES, USUAL_SIZES
from grpo_ustat.estimators.intervals import LEAST_UNITS, Interval
from grpo_ustat.estimators.moments import is_correlated, refutes_assumption2
from grpo_ustat.estimators.scaling import (
    CONSTANTS_AND_GRADIENT,
    LEAST_GSTAR,
    ScalingLaw,
    divisible_rollouts,
    divisors,
    noise_share,
)
from grpo_ustat.estimators.ustatistic import silent_share
from grpo_ustat.pages.caveats import summary_and_warnings
from grpo_ustat.pages.tables import percent, three_digits
from grpo_ustat.records import ACCURACY, LEAST_QUESTIONS, Array
from grpo_ustat.runs.contents import row_interval
from grpo_ustat.terminal.streams import best_size, percentage

WHY_FIXED_ROLLOUTS = (
    "In a batch of all questions the error falls with G since a larger G draws more completions "
    "of the same questions; a training step has a fixed number of rollouts, where a larger G means "
    "fewer prompts, so one G is best."
)
# TRL's default G.
USUAL_SIZE = 8
# The number at which nine in ten studies decide is printed up to so many times that of half.
USEFUL_RATIO = 10
# Neighbours of the best admissible G whose costs the sentence names.
NEIGHBOUR_OFFSETS = (-1, 1)


@dataclass(frozen=True)
class GroupSizeCosts:
    """The extra error of every admissible group size at a fixed number of rollouts."""

    # n of a step.
    rollouts: int
    # The admissible G, one that divides n, to take.
    best: int
    # MSE at G over MSE at `best`, less 1, by G; simultaneous 95 % intervals, see
    # `ScalingLaw.extra_error`, NaN where C1 to C3 have none.
    extra: Mapping[int, Interval]
    # The error at `best` is within this share of the least one; None: not decided.
    tolerance: float | None = None


def group_size_costs(law: ScalingLaw, rollouts: int) -> GroupSizeCosts:
    """Compute the cost of each admissible group size.

    Args:
        law: with the errors of C1, C2 and C3.
        rollouts: n of a training step.

    Raises:
        ValueError: n < 2.
    """
    sizes = divisors(rollouts)
    best, tolerance = law.decide(sizes)
    extra = {size: law.extra_error(size, best) for size in sizes}
    return GroupSizeCosts(rollouts, best, extra, tolerance)


def is_decided(scaling: Mapping[str, Any]) -> bool:
    """Return True if G* is known and its interval has both ends."""
    return all(scaling[f"gstar{end}"] is not None for end in ("", "_low", "_high"))


def decision_sentence(result: Mapping[str, Any], rollouts: int) -> str:
    """Return the best G and the costs of its neighbours, or how much data is missing for them.

    Args:
        result: content of the study's `result.json`.
        rollouts: n of a training step.
    """
    sentence = best_size_sentence(result)
    if result["assumption2"].get("corr") is None or not is_decided(result["scaling"]):
        return sentence
    divisible = divisible_rollouts(rollouts)
    costs = costs_sentence(group_size_costs(ScalingLaw.of_result(result["scaling"]), divisible))
    if divisible != rollouts:
        costs = f"only G = {rollouts} divides {rollouts}; {costs}"
    return f"{sentence.removesuffix('.')}: {costs}"


def study_answer(result: Mapping[str, Any], rollouts: int) -> str:
    """Return the study's answer: the best G, the costs of its neighbours, the noise of a step.

    Args:
        result: content of the study's `result.json`.
        rollouts: n of a training step.
    """
    return f"{decision_sentence(result, rollouts)} {noise_sentence(result, rollouts)}".rstrip()


def best_size_sentence(result: Mapping[str, Any]) -> str:
    """Return a sentence on G* with its interval, or on how much data is missing for it.

    Args:
        result: content of the study's `result.json`.
    """
    scaling, questions = result["scaling"], result["questions"]
    if result["assumption2"].get("corr") is None:
        return summary_and_warnings(result["summary"])[0]
    if is_decided(scaling):
        best, low, high = (scaling[f"gstar{end}"] for end in ("", "_low", "_high"))
        return f"Best G is about {best:.1f} [{low:.1f}, {high:.1f}]."
    more = f"{_prompts_text(*prompts_to_decide(result))} (now {questions})"
    low = scaling["gstar_low"]
    if low is not None and low > LEAST_GSTAR:
        return f"Best G is at least {low:.1f}; {more}."
    return f"Not enough data for a best G: {more}."


def _prompts_text(half: float, most: float) -> str:
    """Return the numbers of prompts with which such studies decide, in words.

    >>> _prompts_text(130, 300)
    'half of such studies decide with 130 prompts, nine in ten with 300'
    >>> _prompts_text(130, math.inf)
    'half of such studies decide with 130 prompts'
    >>> _prompts_text(math.inf, math.inf)
    'how many prompts would decide is not known yet'
    """
    if math.isinf(half):
        return "how many prompts would decide is not known yet"
    text = f"half of such studies decide with {half:.0f} prompts"
    return f"{text}, nine in ten with {most:.0f}" if most <= USEFUL_RATIO * half else text


def costs_sentence(costs: GroupSizeCosts) -> str:
    """Return a sentence on the best admissible G and the extra error of its neighbours.

    >>> extra = {2: Interval(0.4, 0.3, 0.5), 4: Interval(0, 0, 0)}
    >>> costs_sentence(GroupSizeCosts(4, 4, extra, 0.05))[:59]
    'at 4 rollouts a step use G = 4, within 5 % of the least err'
    >>> costs_sentence(GroupSizeCosts(4, 4, extra))
    'at 4 rollouts a step no size is known to be within 10 % of the least error.'
    """
    if costs.tolerance is None:
        return (
            f"at {costs.rollouts} rollouts a step no size is known to be within "
            f"{100 * TOLERANCES[-1]:.0f} % of the least error."
        )
    sizes = list(costs.extra)
    place = sizes.index(costs.best)
    parts = []
    for step in NEIGHBOUR_OFFSETS:
        if not 0 <= place + step < len(sizes):
            continue
        size = sizes[place + step]
        if not math.isfinite(costs.extra[size].low):
            continue
        if costs.extra[size].low <= 0:
            parts.append(f"G = {size} may be as good")
            continue
        extra, low, high = map(percent, costs.extra[size])
        parts.append(f"G = {size}: {extra} [{low}, {high}]")
    first = (
        f"at {costs.rollouts} rollouts a step use G = {costs.best}, within "
        f"{100 * costs.tolerance:.0f} % of the least error"
    )
    return f"{first} ({'; '.join(parts)})." if parts else f"{first}."


def noise_sentence(result: Mapping[str, Any], rollouts: int, group_size: int | None = None) -> str:
    """Return a sentence on the noise of a step, and on the effect of more or fewer rollouts.

    Args:
        result: content of the study's `result.json`.
        rollouts: n of a training step.
        group_size: G; None: the best one that divides n, or 8 where it is not decided. The nearest
            of the sizes that the result has is used.
    """
    if result["assumption2"].get("corr") is None:
        return ""
    if group_size is None:
        law = ScalingLaw.of_result(result["scaling"])
        costs = group_size_costs(law, divisible_rollouts(rollouts))
        group_size = costs.best if is_decided(result["scaling"]) else USUAL_SIZE
    row = min(
        result["noise"]["curve"], key=lambda row: abs(math.log(row["group_size"] / group_size))
    )
    return noise_text(row_interval(row, "rollouts"), rollouts)


def assumption2_sentence(result: Mapping[str, Any]) -> str:
    """Return a sentence on Assumption 2 and on the better of vanilla and GRPO.

    It is "" where neither is known.
    """
    assumption = result["assumption2"]
    corr, difference = (row_interval(assumption, name) for name in ("corr", "av_minus_a0"))
    passes = row_interval(assumption, "crossover_group_size")
    right_or_wrong = result["policy"]["quantity"] == ACCURACY
    worse = "wrong" if right_or_wrong else "low-reward"
    better = "right" if right_or_wrong else "high-reward"
    ordering, follows = "which of vanilla and GRPO is better is not known", False
    if difference.low > 0:
        ordering, follows = "vanilla beats GRPO here", corr.estimate < 0
    elif difference.high < 0 and math.isfinite(passes.high):
        from_size = f"{passes.estimate:.1f} [{passes.low:.1f}, {passes.high:.1f}]"
        ordering = f"GRPO beats vanilla from G > {from_size} on here"
        follows = corr.estimate > 0
    elif not assumption.get("refuted"):
        return ""
    if not assumption.get("refuted"):
        return f"Assumption 2 is not refuted; {ordering}."
    if not is_correlated(corr):
        return f"Assumption 2 fails, in different directions at different prompts; {ordering}."
    loud = worse if corr.estimate < 0 else better
    so = ", so " if follows else "; "
    return f"Assumption 2 fails: {loud} answers have the longer gradients{so}{ordering}."


def monitored_constants(rows: Sequence[Mapping[str, Any]]) -> Array:
    """Return C1, C2, C3 and ||grad J||^2 of monitored steps, rows of `metrics.jsonl`, [4, S]."""
    values_4S = [[row.get(f"monitor/{name}") for row in rows] for name in CONSTANTS_AND_GRADIENT]
    return np.array(values_4S, float)


def training_noise_sentence(
    metrics: Sequence[Mapping[str, Any]], group_size: int, rollouts: int
) -> str:
    """Return `noise_text` of a training run, averaged over the last half of its monitored steps.

    It is "" if that half has fewer than 4 steps.

    Args:
        metrics: rows of `metrics.jsonl`.
        rollouts: n of the run's steps.
    """
    keys = [f"monitor/{name}" for name in CONSTANTS_AND_GRADIENT]
    rows = [row for row in metrics if all(row.get(key) is not None for key in keys)]
    recent = [row for row in rows if 2 * row["step"] >= rows[-1]["step"]]
    if len(recent) < LEAST_UNITS:
        return ""
    law = ScalingLaw.of_steps(monitored_constants(recent))
    text = noise_text(law.noise_scale(group_size), rollouts)
    return text and f"{text} Steps {recent[0]['step']} to {recent[-1]['step']} together."


def noise_text(scale: Interval, rollouts: int) -> str:
    r"""Return a sentence on the noise of a step, and on twice or half as many rollouts.

    Args:
        scale: n_c, in rollouts; the sentence is "" where nothing is known of it.
        rollouts: n of a training step.

    >>> print(noise_text(Interval(5200, 2800, 12000), 256).replace("; ", ";\n"))
    A step of 256 rollouts is 95 % noise [92 %, 98 %] (half at n = 5200);
    doubling it gains 91 % more.
    >>> noise_text(Interval(9, 5, 20), 256)
    'A step of 256 rollouts is 3 % noise [2 %, 7 %] (half at n = 9); halving it loses 3 %.'
    >>> noise_text(Interval(math.nan, 400, math.inf), 256)
    'A step of 256 rollouts is at least 61 % noise.'
    """
    if not scale.low > 0:
        return ""
    share, low, high = noise_share(scale, rollouts)
    if round(100 * low) == 100:
        return f"A step of {rollouts} rollouts is nearly all noise."
    if not math.isfinite(scale.estimate):
        return f"A step of {rollouts} rollouts is at least {100 * low:.0f} % noise."
    first = (
        f"A step of {rollouts} rollouts is {100 * share:.0f} % noise [{100 * low:.0f} %, "
        f"{100 * high:.0f} %] (half at n = {float(f'{scale.estimate:.2g}'):.0f})"
    )
    if rollouts > scale.high:
        lost = scale.estimate / (rollouts + 2 * scale.estimate)
        return f"{first}; halving it loses {100 * lost:.0f} %."
    gained = scale.estimate / (2 * rollouts + scale.estimate)
    return f"{first}; doubling it gains {100 * gained:.0f} % more."


def interval_note(result: Mapping[str, Any]) -> str:
    """Return a sentence on the scope of the decision's intervals."""
    if result["questions"] < LEAST_QUESTIONS:
        return (
            "Intervals of 95 %, of these questions alone: those for new ones take at least "
            f"{LEAST_QUESTIONS} questions."
        )
    return (
        f"Intervals of 95 %, generalising from these {result['questions']} to new questions of the "
        "kind; those of G* and of extra errors hold together."
    )


def prompts_to_decide(result: Mapping[str, Any]) -> tuple[float, float]:
    """Return the numbers of prompts with which half and nine in ten of such studies decide.

    They are rounded to two digits; see `ScalingLaw.prompts_to_decide`.
    """
    if "covariance" not in result["scaling"]:
        return math.inf, math.inf
    half, most = ScalingLaw.of_result(result["scaling"]).prompts_to_decide(USUAL_SIZES)
    return float(f"{half:.2g}"), float(f"{most:.2g}")


def summary_sentences(
    statistics: Mapping[str, Interval],
    population: Mapping[str, Interval],
    rewards_PN: Array,
    interval: str = "completions",
) -> str:
    """Return the summary of a study, from its estimates.

    It says if Assumption 2 holds, which ordering follows, and why G* has no interval.

    Args:
        statistics: by name, of the questions at hand.
        population: the same for new questions.
        rewards_PN: of the pool.
        interval: `completions` or `questions`, over which intervals of `statistics` are.
    """
    if (rewards_PN == rewards_PN[:, :1]).all():
        return (
            "All completions of a question got the same reward: any baseline that learns it has no "
            "error, vanilla (no baseline) alone is noisy. Choose questions that are sometimes "
            "right."
        )
    scope = "conditional on these" if interval == "completions" else "generalising to new"
    parts = [
        _assumption_sentence(statistics, f"intervals {scope} questions"),
        _ordering_sentence(population, rewards_PN),
        missing_size_sentence(population["gstar"]),
    ]
    return " ".join(filter(None, parts))


def missing_size_sentence(best: Interval) -> str:
    """Return the reason why G* has no interval, or one without an upper end.

    It is "" where it has both ends: the answer of the study says them (`decision_sentence`).
    """
    if best_size(*best) is None:
        return "Not enough data for G*: no group size is decided."
    if math.isfinite(best.high):
        return ""
    return "The interval of G* has no upper end: no group size is decided."


def _assumption_sentence(statistics: Mapping[str, Interval], scope: str) -> str:
    share, corr = statistics["share"], statistics["corr"]
    text = f"corr(q, Z) = {corr.estimate:.3f}"
    if math.isfinite(corr.low):
        text += f" [{max(corr.low, -1):.3f}, {min(corr.high, 1):.3f}] averaged over prompts"
    if not math.isfinite(share.low):
        return (
            f"{text}; Assumption 2 is not judged: that takes 6 completions a question, and several "
            "questions with rewards that vary."
        )
    gain = (
        f"the best prompt-only baseline E[q Z]/E[q] takes {percentage(share.estimate, 1)} "
        f"[{percentage(share.low, 1)}, {percentage(share.high, 1)}] off the oracle's A_V"
    )
    name = "Assumption 2 (squared score norm and reward uncorrelated given the prompt)"
    if not refutes_assumption2(share, corr):
        return f"{name} is not refuted: {gain}; {text} ({scope})."
    direction = "in opposite directions at different prompts, or in no clear one"
    if not corr.low <= 0 <= corr.high:
        direction = f"{'wrong' if corr.estimate < 0 else 'right'} answers carry the larger scores"
    return f"{name} fails, {direction}: {gain}; {text} ({scope})."


def _ordering_sentence(statistics: Mapping[str, Interval], rewards_PN: Array) -> str:
    difference, cross = statistics["av_minus_a0"], statistics["crossover"]
    a_0, a_v = (three_digits(statistics[name].estimate) for name in ("a0", "a_v"))
    values = f"A_0 = {a_0}, A_V = {a_v}"
    if difference.high < 0:
        high = f"{cross.high:.1f}" if math.isfinite(cross.high) else "infinity"
        size = math.ceil(cross.estimate) if math.isfinite(cross.estimate) else 0
        zero_variance = ""
        if 2 <= size <= rewards_PN.shape[1]:
            share = silent_share(rewards_PN, size).mean()
            zero_variance = (
                f", where {percentage(share)} of the groups of {size} are zero-variance groups "
                "(all rewards equal)"
            )
        return (
            f"{values}: the paper's ordering, the oracle beats vanilla (no baseline) at every G "
            "and "
            f"GRPO beats vanilla from G > {cross.estimate:.1f} [{cross.low:.1f}, {high}] on (for "
            f"new questions){zero_variance}."
        )
    if difference.low > 0:
        return (
            f"{values}: the paper's ordering is reversed, vanilla (no baseline) beats the oracle "
            "and GRPO at "
            "every G."
        )
    return (
        f"{values}: not enough data to say which of vanilla (no baseline) and the oracle "
        f"is better "
        f"(A_V - A_0 in [{three_digits(difference.low)}, {three_digits(difference.high)}] for new "
        "questions)."
    )
