"""Verdicts on claims; a claim in `result.json` compares a prediction with a measurement."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import replace

import numpy as np

from grpo_ustat.runs.result import AGREES, DISAGREES, OPEN, Claim

# Family-wise error rate: largest probability that any claim of a correct theory disagrees.
FAMILY_ERROR = 0.05


def correct_family(claims: Sequence[Claim]) -> list[Claim]:
    """Return claims with verdicts that are corrected for multiple testing (Holm 1979).

    Holm's step-down correction covers all claims of the study that have p-values. Such a claim
    disagrees only if the correction rejects it at 5 %. If all predictions are correct, at most 5 %
    of studies therefore contain a claim that disagrees, even if the claims are dependent. An
    alternative prediction disagrees if its p-value is at most 5 % divided by the number of
    p-values. Correcting the claims a second time does not change their verdicts.
    """
    p_values = [claim.p_value for claim in claims if claim.p_value is not None]
    holm = iter(holm_adjust(p_values))
    family = []
    for claim in claims:
        if claim.p_value is not None:
            holm_p, verdict, severity = next(holm), claim.verdict, claim.severity
            if holm_p <= FAMILY_ERROR:
                verdict = claim.when_rejected or (OPEN if verdict == OPEN else DISAGREES)
            elif verdict == DISAGREES:
                verdict = AGREES
            if claim.alternatives:
                p_of = claim.alternatives.items()
                agreeing = [name for name, p in p_of if p * len(p_values) > FAMILY_ERROR]
                severity = f"{len(agreeing)} of {len(p_of)} alternatives would also have agreed"
                severity += f": {', '.join(agreeing)}" if agreeing else ""
            claim = replace(claim, verdict=verdict, holm_p=holm_p, severity=severity)
        family.append(claim)
    return family


def holm_adjust(p_values: Sequence[float]) -> list[float]:
    """Return Holm's adjusted p-values.

    If predictions with an adjusted p-value of at most 5 % are rejected, the family-wise error rate
    is at most 5 %.

    >>> holm_adjust([0.04, 0.01, 0.03])
    [0.06, 0.03, 0.06]
    """
    order, count = np.argsort(p_values, kind="stable"), len(p_values)
    steps = [min(1.0, (count - i) * p_values[j]) for i, j in enumerate(order)]
    adjusted = np.empty(count)
    adjusted[order] = np.maximum.accumulate(steps) if count else steps
    return adjusted.tolist()


def verdict_of(agrees: bool | None) -> str:
    """Return the name of a verdict; None stands for `not decided`.

    >>> verdict_of(True), verdict_of(False), verdict_of(None)
    ('agrees', 'disagrees', 'not decided')
    """
    return OPEN if agrees is None else AGREES if agrees else DISAGREES


def worst_verdict(claims: Sequence[Claim]) -> str:
    """Return the first verdict that occurs, in the order `disagrees`, `not decided`, `agrees`."""
    verdicts = {claim.verdict for claim in claims}
    return next((verdict for verdict in (DISAGREES, OPEN) if verdict in verdicts), AGREES)


def agreement(claims: Sequence[Claim]) -> str:
    """Return the number of claims that agree after Holm's correction, such as `21 of 21`."""
    verdicts = [claim.verdict for claim in correct_family(claims)]
    return f"{verdicts.count(AGREES)} of {len(verdicts)}"


def comma_list(values: Iterable[int]) -> str:
    """Format numbers for a sentence.

    >>> comma_list([2, 4, 8])
    '2, 4, 8'
    """
    return ", ".join(map(str, values))
