"""Published claims judged on one policy, as a table."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

from grpo_ustat.pages.tables import Table, open_interval

# Size from which on a bound is a whole number.
ROUND = 100
# Least p-value that is written out.
LEAST_P_VALUE = 1e-6
NOTE = (
    "95 % intervals for new questions, each by itself. A verdict is given if the number lies "
    "entirely inside or outside the bounds; those of this study are corrected together (Holm, 5 % "
    "of studies), several studies are not. Bounds are ours: claims are made in words, and rollouts "
    "within 10 % of each other are taken to be alike."
)


def verdicts_table(result: Mapping[str, Any]) -> Table | None:
    """Return a table with a row per claim; None where the study judged none.

    On a terminal it is without its sentences.

    Args:
        result: content of the study's `result.json`.
    """
    rows = result.get("verdicts")
    if not rows:
        return None
    cells = [
        [
            row["claim"],
            row["source"],
            row["measured"],
            open_interval(row, "number"),
            bounds_text(row["least"], row["most"]),
            p_text(row.get("holm_p")),
            row["verdict"],
            row.get("reason") or row.get("beside") or "",
        ]
        for row in rows
    ]
    columns = ["claim", "source", "measured", "number", "holds", "p (Holm)", "verdict", "beside it"]
    sentences = ("source", "measured", "p (Holm)", "beside it")
    return Table(
        "Published claims on this policy", columns, cells, [NOTE], headings=True,
        sentences=sentences,
    )  # fmt: skip


def p_text(p_value: float | None) -> str:
    """Format a p-value; `-` for a claim that is not measured.

    >>> p_text(0.0312), p_text(2e-9), p_text(None)
    ('0.031', 'below 1e-6', '-')
    """
    if p_value is None:
        return "-"
    return "below 1e-6" if p_value < LEAST_P_VALUE else f"{p_value:.2g}"


def bounds_text(least: float | None, most: float | None) -> str:
    """Format the bounds between which a claim holds.

    >>> bounds_text(0.5, None), bounds_text(None, 0.9), bounds_text(0.67, 1.5)
    ('above 0.5', 'below 0.9', '0.67 to 1.5')
    >>> bounds_text(4096, 16384)
    '4096 to 16384'
    """
    bounded = [x for x in (least, most) if x is not None and math.isfinite(x)]
    words = [f"{x:.0f}" if abs(x) >= ROUND else f"{x:.2g}" for x in bounded]
    if len(bounded) == 2:
        return " to ".join(words)
    return f"{'above' if least is not None else 'below'} {words[0]}"
