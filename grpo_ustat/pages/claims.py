"""Table cells of the claims of a theorem: prediction, measurement, interval, p-value, verdict."""

from __future__ import annotations

from typing import Any

from grpo_ustat.config.gap import THEOREMS
from grpo_ustat.pages.tables import number_text
from grpo_ustat.runs.result import AGREES, DISAGREES, OPEN

# p-values are shown uncorrected and with Holm's correction over the claims of a run.
CLAIM_COLUMNS = (
    "claim", "predicted", "measured", "95 % interval", "p (Holm)", "verdict", "severity",
)  # fmt: skip
FAMILY_RULE = (
    "p: p-value of the hypothesis that the prediction holds; in brackets with Holm's correction "
    "over the claims of the run. A claim disagrees if the corrected p-value is at most 0.05, so "
    "that at most 5 % of runs without an error disagree. Intervals are not simultaneous. A claim "
    "without p was enumerated or not tested. Severity: other outcomes that would also have counted "
    "as agreement."
)
VERDICT_WORDS = {
    AGREES: "Theory and measurement agree.",
    DISAGREES: "Theory and measurement disagree in at least one claim.",
    OPEN: "There is not enough data to say whether theory and measurement agree in every claim.",
}
TITLES = {kind: schema.title for kind, schema in THEOREMS.items()}


def claim_cells(claim: dict[str, Any]) -> list[str]:
    """Return the cells of a claim for `CLAIM_COLUMNS`; a missing value is "".

    Pages, the terminal and reports show the same cells.
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
    """Format the interval of a claim; "" if the claim was enumerated."""
    if claim["low"] is None or claim["high"] is None:
        return ""
    return f"[{number_text(claim['low'])}, {number_text(claim['high'])}]"


def p_value_text(claim: dict[str, Any]) -> str:
    """Format the p-value of a claim, uncorrected and with Holm's correction; "" if it has none.

    >>> p_value_text({"p_value": 0.0312, "holm_p": 0.312}), p_value_text({"p_value": None})
    ('0.0312 (0.312)', '')
    """
    if claim.get("p_value") is None:
        return ""
    return f"{claim['p_value']:.3g} ({claim.get('holm_p', claim['p_value']):.3g})"
