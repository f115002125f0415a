"""Claims of a theorem as cells: predicted, measured, interval, p-value, verdict."""

from __future__ import annotations

from typing import Any

from grpo_ustat.config.gap import THEOREMS
from grpo_ustat.pages.tables import number_text
from grpo_ustat.runs.result import AGREES, DISAGREES, OPEN

# p-values are raw, and corrected for the claims of a run.
CLAIM_COLUMNS = (
    "claim", "predicted", "measured", "95 % interval", "p (Holm)", "verdict", "severity",
)  # fmt: skip
FAMILY_RULE = (
    "p: the p-value of the hypothesis that the prediction holds; in brackets with Holm's "
    "correction "
    "over the claims of the run that have one. A claim disagrees if the corrected one is at most "
    "0.05, so that at most 5 % of runs without an error disagree. Intervals are of each claim "
    "by "
    "itself. Without p: enumerated, or not tested. Severity: what else would have agreed."
)
VERDICT_WORDS = {
    AGREES: "Theory and measurement agree.",
    DISAGREES: "Theory and measurement disagree in at least one claim.",
    OPEN: "Not enough data to say whether theory and measurement agree in every claim.",
}
TITLES = {kind: schema.title for kind, schema in THEOREMS.items()}


def claim_cells(claim: dict[str, Any]) -> list[str]:
    """Return a claim's cells in `CLAIM_COLUMNS`; "" is missing.

    A page, a terminal and a report show the same cells.
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
    """Format the interval of a claim; "" where it was enumerated."""
    if claim["low"] is None or claim["high"] is None:
        return ""
    return f"[{number_text(claim['low'])}, {number_text(claim['high'])}]"


def p_value_text(claim: dict[str, Any]) -> str:
    """Format the p-value of a claim, raw and with Holm's correction; "" where it has none.

    >>> p_value_text({"p_value": 0.0312, "holm_p": 0.312}), p_value_text({"p_value": None})
    ('0.0312 (0.312)', '')
    """
    if claim.get("p_value") is None:
        return ""
    return f"{claim['p_value']:.3g} ({claim.get('holm_p', claim['p_value']):.3g})"
