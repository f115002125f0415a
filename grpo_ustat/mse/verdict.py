"""What a study found, in words."""

from __future__ import annotations

import math

import numpy as np

from grpo_ustat.estimators.intervals import Interval
from grpo_ustat.estimators.scaling import heavy_text
from grpo_ustat.estimators.ustatistic import silent_share
from grpo_ustat.mse.closed_form import ClosedForm
from grpo_ustat.pages.tables import best_size, three_digits
from grpo_ustat.records import ScorePool
from grpo_ustat.terminal.streams import percentage

MARGIN = 1.68  # half-widths that corr(q, Z) is from 0: 99.9 % where its interval is of 95 %


def heavy_warning(statistics: ClosedForm, population: ClosedForm) -> str:
    """A sentence where intervals are likely to cover less than 90 %, see `Tails.heavy`, those for
    new questions first; none where no value carries a variance, as where all rewards are equal.
    """
    for tails, units, more in (
        (population.tails, "questions", "study.questions"),
        (statistics.tails, "completions", "budget.pool_completions"),
    ):
        if tails.heavy and math.isfinite(tails.carriers):
            return f" WARNING: {heavy_text(tails, units)}. Raise {more}."
    return ""


def zero_scores_sentence(pool: ScorePool) -> str:
    """How many scores are exactly 0; "" where none is. It begins with a space."""
    zero, count = int((pool.sq_norm_PN == 0).sum()), pool.sq_norm_PN.size
    if not zero:
        return ""
    return (
        f" {zero} of {count} scores are exactly 0: there the model is so certain of every token "
        "that the others' probabilities are lost in rounding; such completions move no weight."
    )


def packages_sentence(packages: dict[str, int], installed: str) -> str:
    """Which completions other versions of the packages scored, and how to have one version alone.

    >>> packages_sentence({"torch 2.13.0": 32}, "torch 2.13.0")
    ''

    Args:
        packages: completions by the versions that scored them.
        installed: the versions of now.
    """
    other = {name: count for name, count in packages.items() if name != installed}
    if not other:
        return ""
    counts = " and ".join(f"{count} of them with {name}" for name, count in sorted(other.items()))
    return (
        f" The pool's {sum(packages.values())} completions were not all scored with {installed}, "
        f"which is installed, but {counts}: another pool=DIR has one version alone."
    )


def verdict(statistics: ClosedForm, population: ClosedForm, rewards_PN: np.ndarray) -> str:
    """In words: whether Assumption 2 holds, which ordering follows, why G* has no interval."""
    if (rewards_PN == rewards_PN[:, :1]).all():
        return (
            "All completions of a question got the same reward: any baseline that learns it has no "
            "error, vanilla (no baseline) alone is noisy. Choose questions that are sometimes "
            "right."
        )
    parts = [_assumption_sentence(statistics), _ordering_sentence(population, rewards_PN)]
    parts.append(missing_size_sentence(population["gstar"]))
    return " ".join(filter(None, parts))


def missing_size_sentence(best: Interval) -> str:
    """Why G* has no interval, or one without an upper end; "" where it has both ends: the answer of
    the study says them (`grpo_ustat.pages.decision`).
    """
    if best_size(*best) is None:
        return "Not enough data for G*: C1 or C3 is not significantly different from 0."
    if math.isfinite(best.high):
        return ""
    return "The interval of G* has no upper end: C1 is not significantly different from 0."


def refutes_assumption2(statistics: ClosedForm) -> bool:
    """Whether Assumption 2 (squared score norm and reward uncorrelated, given the prompt) fails.

    It does where the share of A_V that the best prompt-only baseline takes off the oracle's error,
    `E[Cov(q, Z | X)^2 / M_0] / A_V`, is surely positive: covariances of prompts cannot cancel in
    it, as they can in corr(q, Z). It does too where their mean is surely not 0, which small pools
    show before the squares do; the 95 % interval of corr(q, Z) misses 0 too often for that with
    heavy tails (in 5 to 17 % of pools), so it has to by a margin (`MARGIN`).

    Where the assumption holds at every prompt this is True in 1 to 4 % of the pools (1 to 60
    questions of 8 to 64 completions, light to heavy tails, 300 pools each).
    """
    share, corr = statistics["share"], statistics["corr"]
    return bool(share.low > 0 or abs(corr.estimate) > MARGIN * (corr.high - corr.estimate))


def _assumption_sentence(statistics: ClosedForm) -> str:
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
    if not refutes_assumption2(statistics):
        return f"{name} is not refuted: {gain}; {text}."
    direction = "in opposite directions at different prompts, or in no clear one"
    if not corr.low <= 0 <= corr.high:
        direction = f"{'wrong' if corr.estimate < 0 else 'right'} answers carry the larger scores"
    return f"{name} fails, {direction}: {gain}; {text}."


def _ordering_sentence(statistics: ClosedForm, rewards_PN: np.ndarray) -> str:
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
            f"GRPO beats vanilla from G > {cross.estimate:.1f} [{cross.low:.1f}, {high}] on"
            f"{zero_variance}."
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
        f"(A_V - A_0 in [{three_digits(difference.low)}, {three_digits(difference.high)}])."
    )
