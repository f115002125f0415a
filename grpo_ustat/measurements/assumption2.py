"""Test of Assumption 2: given the prompt, squared score norm and reward are uncorrelated.

From this assumption, the paper derives two statements on errors: at every G, the oracle baseline
has a lower error than vanilla (no baseline), and above some G, GRPO has a lower error than vanilla.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from grpo_ustat.estimators.intervals import Interval
from grpo_ustat.estimators.moments import is_correlated, refutes_assumption2
from grpo_ustat.estimators.ustatistic import zero_variance_share
from grpo_ustat.measurements.base import Measurement, PoolStudy, Study
from grpo_ustat.pages.tables import three_digits
from grpo_ustat.records import ACCURACY, MIN_QUESTIONS
from grpo_ustat.terminal.streams import percentage

ALL_EQUAL = (
    "All completions of each question got the same reward. With a baseline equal to this reward, "
    "the gradient estimate has no error; only vanilla (no baseline) is noisy. Choose questions "
    "that the policy sometimes answers correctly."
)


# Name of the assumption with its meaning, for readers who have not read the paper.
NAMED = "Assumption 2 (size of gradient and reward are uncorrelated)"


@dataclass(frozen=True, kw_only=True)
class Assumption2:
    """Test of whether squared score norm and reward are uncorrelated given the question."""

    # A_0 = E[q Z^2], without a baseline.
    a0: float
    # A_V = E[q (Z - V)^2], with the value as baseline.
    a_v: float
    # A_b* = E[q (Z - b*)^2], with the best prompt-only baseline.
    a_bstar: float
    corr: Interval
    # (A_V - A_b*) / A_V, the relative reduction of A_V by the best prompt-only baseline.
    share: Interval
    av_minus_abstar: Interval
    av_minus_a0: Interval
    # Group size above which GRPO has a lower error than vanilla (no baseline).
    crossover_group_size: Interval
    # Share of zero-variance groups at the crossover group size.
    zero_variance_share_at_crossover: float | None
    # True if the data refute the assumption.
    refuted: bool
    # Reason why a number is missing.
    reason: str | None = None


def measure(study: PoolStudy) -> Assumption2:
    """Test the assumption, and compare the errors of vanilla and GRPO."""
    statistics, rewards_PN = study.population, study.pool.rewards_PN
    corr, crossover = statistics["corr"].within(-1, 1), statistics["crossover"]
    size, share_at_crossover, reason = rewards_PN.shape[1], None, None
    if math.isfinite(crossover.estimate) and 2 <= math.ceil(crossover.estimate) <= size:
        zero_variance_P = zero_variance_share(rewards_PN, math.ceil(crossover.estimate))
        share_at_crossover = float(zero_variance_P.mean())
    if not math.isfinite(corr.estimate):
        reason = "the correlation is undefined because all rewards of each question are equal"
    elif len(rewards_PN) < MIN_QUESTIONS:
        reason = f"intervals need at least {MIN_QUESTIONS} questions"
    elif statistics["av_minus_a0"].low > 0:
        reason = "A_0 < A_V, so GRPO never beats vanilla"
    elif not math.isfinite(crossover.high):
        reason = (
            "the interval of the crossover group size is unbounded because A_0 - A_V is not "
            "significantly different from 0"
        )
    return Assumption2(
        a0=statistics["a0"].estimate,
        a_v=statistics["a_v"].estimate,
        a_bstar=statistics["a_bstar"].estimate,
        share=statistics["share"],
        av_minus_abstar=statistics["av_minus_abstar"],
        av_minus_a0=statistics["av_minus_a0"],
        corr=corr,
        crossover_group_size=crossover,
        zero_variance_share_at_crossover=share_at_crossover,
        refuted=refutes_assumption2(statistics["share"], statistics["corr"]),
        reason=reason,
    )


def sentences(record: Assumption2, study: Study) -> list[str]:
    """Return a sentence on the assumption and on the comparison of vanilla with GRPO.

    The list is empty if the assumption is not refuted and the comparison is not decided either.
    """
    corr, difference = record.corr, record.av_minus_a0
    passes = record.crossover_group_size
    right_or_wrong = study.result.policy.quantity == ACCURACY
    worse = "wrong" if right_or_wrong else "low-reward"
    better = "right" if right_or_wrong else "high-reward"
    ordering, follows = "the data do not show whether vanilla or GRPO is better", False
    if difference.low > 0:
        ordering, follows = "vanilla beats GRPO here", corr.estimate < 0
    elif difference.high < 0 and math.isfinite(passes.high):
        from_size = f"{passes.estimate:.1f} [{passes.low:.1f}, {passes.high:.1f}]"
        ordering = f"GRPO beats vanilla here for G > {from_size}"
        follows = corr.estimate > 0
    elif not record.refuted:
        return []
    second = f"{ordering[0].upper()}{ordering[1:]}."
    if not record.refuted:
        return [f"{NAMED} is not refuted. {second}"]
    if not is_correlated(corr):
        sign = "the sign of the correlation is unclear or differs between prompts"
        return [f"{NAMED} fails. For new questions, {sign}. {second}"]
    loud = worse if corr.estimate < 0 else better
    first = f"{NAMED} fails: {loud} answers have larger gradients"
    return [f"{first}, so {ordering}." if follows else f"{first}. {second}"]


ASSUMPTION2 = Measurement("assumption2", Assumption2, measure, sentences, always=True)


def rewards_vary(study: Study) -> bool:
    """Return True if at least one question has different rewards; otherwise the gradient is 0."""
    return study.result.equal_rewards is None and study.need(ASSUMPTION2).corr.is_known


def summary_sentences(study: PoolStudy) -> list[str]:
    """Return two summary sentences: one on the assumption, one on the ordering of errors."""
    return [_assumption_sentence(study), _ordering_sentence(study)]


def _assumption_sentence(study: PoolStudy) -> str:
    share, corr = study.population["share"], study.population["corr"]
    text = f"corr(q, Z) = {corr.estimate:.3f}"
    if math.isfinite(corr.low):
        text += f" [{max(corr.low, -1):.3f}, {min(corr.high, 1):.3f}], averaged over prompts"
    if not math.isfinite(share.low):
        return (
            f"{text}. Assumption 2 was not tested, because the test needs {MIN_QUESTIONS} "
            "questions with 6 completions each, and several questions with different rewards among "
            "their completions."
        )
    gain = (
        f"The best baseline that depends only on the prompt, E[q Z]/E[q], lowers A_V by "
        f"{percentage(share.estimate, 1)} [{percentage(share.low, 1)}, {percentage(share.high, 1)}]"
    )
    name = "Assumption 2 (squared score norm and reward are uncorrelated given the prompt)"
    if not refutes_assumption2(share, corr):
        return f"{name} is not refuted. {gain}. {text} (intervals for new questions)."
    direction = "the correlation has different signs for different prompts, or its sign is unclear"
    if is_correlated(corr):
        direction = f"{'wrong' if corr.estimate < 0 else 'right'} answers have larger score norms"
    return f"{name} fails; {direction}. {gain}. {text} (intervals for new questions)."


def _ordering_sentence(study: PoolStudy) -> str:
    population, rewards_PN = study.population, study.pool.rewards_PN
    difference, cross = population["av_minus_a0"], population["crossover"]
    a_0, a_v = (three_digits(population[name].estimate) for name in ("a0", "a_v"))
    values = f"A_0 = {a_0}, A_V = {a_v}"
    if difference.high < 0:
        high = f"{cross.high:.1f}" if math.isfinite(cross.high) else "infinity"
        size = math.ceil(cross.estimate) if math.isfinite(cross.estimate) else 0
        zero_variance = ""
        if 2 <= size <= rewards_PN.shape[1]:
            share = zero_variance_share(rewards_PN, size).mean()
            zero_variance = (
                f" At G = {size}, {percentage(share)} of the groups have zero variance (all "
                "rewards equal)."
            )
        return (
            f"{values}. The paper's ordering holds: the oracle beats vanilla (no baseline) at "
            f"every G, and GRPO beats vanilla for G > {cross.estimate:.1f} [{cross.low:.1f}, "
            f"{high}] (for new questions).{zero_variance}"
        )
    if difference.low > 0:
        return (
            f"{values}. The paper's ordering is reversed: vanilla (no baseline) beats the oracle "
            "and GRPO at every G."
        )
    return (
        f"{values}. There is not enough data to say whether vanilla (no baseline) or the oracle "
        f"is better (A_V - A_0 in [{three_digits(difference.low)}, "
        f"{three_digits(difference.high)}] for new questions)."
    )
