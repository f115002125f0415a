"""Verdicts on what theory predicts, and how many there are of each."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

AGREES, DISAGREES, OPEN = "agrees", "disagrees", "not decided"
COUNTED = {AGREES: "agree", DISAGREES: "disagree", OPEN: "not decided"}  # how counts are headed


def verdict_counts(claims: Sequence[dict[str, Any]]) -> dict[str, int]:
    """How many claims have each verdict.

    Args:
        claims: of a study's `result.json`.

    Raises:
        LookupError, TypeError, ValueError: they are not what a study writes.

    >>> verdict_counts([{"verdict": "agrees"}, {"verdict": "not decided"}, {"verdict": "agrees"}])
    {'agrees': 2, 'disagrees': 0, 'not decided': 1}
    """
    counts = dict.fromkeys(COUNTED, 0)
    for claim in claims:
        counts[claim["verdict"]] += 1
    return counts
