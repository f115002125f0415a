"""Table cells for a theorem's claims: prediction, measurement, interval, p-value and verdict."""

from __future__ import annotations

from typing import Any

from grpo_ustat.config.gap import KINDS
from grpo_ustat.pages.tables import number_text
from grpo_ustat.runs.result import AGREES, DISAGREES, OPEN

# The column p (Holm) has two p-values: without correction and, in brackets, with Holm's correction
# over the claims of a run.
CLAIM_COLUMNS = (
    "claim", "predicted", "measured", "95 % interval", "p (Holm)", "verdict", "severity",
)  # fmt: skip
FAMILY_RULE = (
    "p is the p-value of the hypothesis that the prediction is true; the p-value in brackets has "
    "Holm's correction over the run's claims. A claim disagrees if the corrected p-value is at "
    "most 0.05, so at most 5 % of runs have a false disagreement. A claim without a p-value was "
    "decided by enumeration or was not tested. The intervals do not hold simultaneously. The "
    "column severity names other outcomes that would also have counted as agreement."
)
VERDICT_WORDS = {
    AGREES: "Theory and measurement agree.",
    DISAGREES: "Theory and measurement disagree in at least one claim.",
    OPEN: "There is not enough data to decide whether theory and measurement agree in every claim.",
}
TITLES = {kind: schema.title for kind, schema in KINDS.items()}


def claim_cells(claim: dict[str, Any]) -> list[str]:
    """Return a claim's cells in the order of `CLAIM_COLUMNS`; a missing value is "".

    Pages, the terminal and reports all use these cells.
    """
    return [
        claim["what"],
        number_text(claim["predicted"]),
        number_text(claim["measured"]),
        interval_of_claim(claim),
        p_value_text(claim),
        claim["verdict"],
        claim.get("severity", ""),
    ]


def interval_of_claim(claim: dict[str, Any]) -> str:
    """Format the interval of a claim; "" if the claim has none because it was enumerated."""
    if claim["low"] is None or claim["high"] is None:
        return ""
    return f"[{number_text(claim['low'])}, {number_text(claim['high'])}]"


def p_value_text(claim: dict[str, Any]) -> str:
    """Format a claim's p-value without and with Holm's correction; "" if the claim has no p-value.

    >>> p_value_text({"p_value": 0.0312, "holm_p": 0.312}), p_value_text({"p_value": None})
    ('0.0312 (0.312)', '')
    """
    if claim.get("p_value") is None:
        return ""
    return f"{claim['p_value']:.3g} ({claim.get('holm_p', claim['p_value']):.3g})"
