"""Tables of a study with several reward functions: the best G of each, and correlations."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from grpo_ustat.pages.tables import Table, interval_scope, open_interval, three_digits

COLUMNS = {"mean": "mean reward", "c1": "C1", "c2": "C2", "c3": "C3", "gstar": "G*"}


def reward_tables(result: Mapping[str, Any]) -> list[Table]:
    """Return a table of the functions and one of their pairs; none where there is one function."""
    functions, pairs = (result.get(f"reward_{name}") for name in ("functions", "correlations"))
    if not functions:
        return []
    cells = [
        [row["name"], "" if row["weight"] is None else three_digits(row["weight"])]
        + [open_interval(row, key) for key in COLUMNS]
        for row in functions
    ]
    notes = [
        "Each function alone, before its weight, on the same completions. A weight w multiplies "
        "C1, C2 and C3 by w^2 and does not change G*. The last line is the weighted sum, on which "
        "training works, but with gdpo. 95 % intervals; those of the mean "
        f"{interval_scope(result['questions'])}.",
    ]
    tables = [Table("Reward functions", ["function", "weight", *COLUMNS.values()], cells, notes)]
    if pairs:
        rows = [[row["first"], row["second"], open_interval(row, "correlation")] for row in pairs]
        notes = [
            "Within prompts. Below 0: completions that one function rewards more, the other tends "
            "to reward less."
        ]
        columns = ["function", "and", "correlation"]
        tables.append(Table("Correlation of reward functions", columns, rows, notes))
    return tables
