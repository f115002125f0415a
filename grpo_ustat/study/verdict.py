"""What a study found, in words."""

from __future__ import annotations

import math

import numpy as np

from grpo_ustat.estimators.ustatistic import silent_share
from grpo_ustat.study.closed_form import ClosedForm

HEAVY_SHARE = 0.5  # warn where the loudest 1 % of the completions carry more of sum q than this
UNBIASED = ("none", "leave_one_out", "oracle", "optimal")


def heavy_warning(top_percent_share: float) -> str:
    """A sentence where a few completions decide the sums: intervals promise nothing there."""
    if top_percent_share <= HEAVY_SHARE:
        return ""
    return (
        f" WARNING: the loudest 1 % of the completions carry {top_percent_share:.0%} of the sum of "
        "squared score norms: raise budget.pool_completions, intervals are too short here."
    )


def verdict(found: ClosedForm, baselines: list[str], rewards_PN: np.ndarray) -> str:
    """In words: whether Assumption 2 holds, which ordering follows, which G is best."""
    if (rewards_PN == rewards_PN[:, :1]).all():
        return _without_signal(rewards_PN)
    parts = [_assumption_sentence(found), _ordering_sentence(found, rewards_PN)]
    unbiased = [name for name in baselines if name in UNBIASED]
    if len(unbiased) > 1:
        parts.append(_best_sentence(found, unbiased))
    best = found["gstar"]
    if math.isfinite(best.low):
        parts.append(f"G* = {best.estimate:.1f} [{best.low:.1f}, {best.high:.1f}].")
    else:
        parts.append("G* has no finite interval: C1 or C3 is not distinguishable from 0.")
    return " ".join(parts)


def _without_signal(rewards_PN: np.ndarray) -> str:
    if not rewards_PN.any():
        return (
            "Every completion got reward 0, so there is no gradient to estimate: check the prompt, "
            "max_completion_length and the answer format."
        )
    return (
        "All completions of a question got the same reward: any baseline that learns it has no "
        "error, vanilla alone is noisy. Choose questions that are sometimes right."
    )


def _assumption_sentence(found: ClosedForm) -> str:
    corr = found["corr"]
    gain = found["av_minus_abstar"]
    share = f"{gain.estimate / found['a_v'].estimate:.0%}" if gain.low > 0 else "an undecided share"
    if not math.isfinite(corr.low):
        return f"corr(q, Z) = {corr.estimate:.3f}, without an interval from so few completions."
    shown = f"corr(q, Z) = {corr.estimate:.3f} [{max(corr.low, -1):.3f}, {min(corr.high, 1):.3f}]"
    if corr.low <= 0 <= corr.high:
        return f"{shown}: Assumption 2 (squared score norm and reward uncorrelated) is not refuted."
    loud = "wrong" if corr.estimate < 0 else "right"
    return (
        f"{shown}: Assumption 2 fails, {loud} answers carry the larger scores; the best "
        f"prompt-only baseline E[q Z]/E[q] would take {share} off the oracle's A_V."
    )


def _ordering_sentence(found: ClosedForm, rewards_PN: np.ndarray) -> str:
    difference, cross = found["av_minus_a0"], found["crossover"]
    values = f"A_0 = {found['a0'].estimate:.0f}, A_V = {found['a_v'].estimate:.0f}"
    if difference.high < 0:
        high = f"{cross.high:.1f}" if math.isfinite(cross.high) else "infinity"
        return (
            f"{values}: the paper's ordering, the oracle beats vanilla at every G and GRPO beats "
            f"vanilla from G > {cross.estimate:.1f} [{cross.low:.1f}, {high}] on"
            f"{_silent(rewards_PN, cross.estimate)}."
        )
    if difference.low > 0:
        return (
            f"{values}: the paper's ordering is reversed, vanilla beats the oracle and GRPO at "
            "every G."
        )
    return (
        f"{values}: which of vanilla and the oracle is better is not decided by this pool "
        f"(A_V - A_0 in [{difference.low:.0f}, {difference.high:.0f}])."
    )


def _silent(rewards_PN: np.ndarray, crossover: float) -> str:
    """The share of groups without any signal at the crossover."""
    size = math.ceil(crossover)
    if not 2 <= size <= rewards_PN.shape[1]:
        return ""
    share = silent_share(rewards_PN, size).mean()
    return f", where {share:.0%} of the groups of {size} are silent (all rewards equal)"


def _best_sentence(found: ClosedForm, unbiased: list[str]) -> str:
    """The unbiased baseline of smallest error at each group size, by point estimate."""
    keys = [name.split("/") for name in found.statistics if name.startswith("mse/")]
    first = keys[0][3:]
    sizes = sorted({int(key[2]) for key in keys})
    best = {
        g: min(unbiased, key=lambda b: found["/".join(["mse", b, str(g), *first])].estimate)
        for g in sizes
    }
    groups = [
        f"{name} at G = {', '.join(str(g) for g in sizes if best[g] == name)}"
        for name in dict.fromkeys(best[g] for g in sizes)
    ]
    found_best = "; ".join(groups)
    return f"Smallest closed-form error of an unbiased baseline, by point estimate: {found_best}."
