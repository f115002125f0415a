"""The paper's published Table 2 beside accuracies of one's own runs on MATH."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import numpy as np
from scipy.special import chdtrc, ndtri  # pyright: ignore[reportUnknownVariableType]

from grpo_ustat.estimators.intervals import Interval, t_interval, wilson
from grpo_ustat.pages.tables import Table

TABLE2 = {  # test accuracy of Qwen2.5-Math-7B on MATH by n and G, as published
    1024: {4: 0.7677, 8: 0.7491, 16: 0.7753, 32: 0.7627, 64: 0.7817, 128: 0.7743},
    2048: {4: 0.7703, 8: 0.7679, 16: 0.7697, 32: 0.7793, 64: 0.7819, 128: 0.7665},
    4096: {4: 0.7691, 8: 0.7713, 16: 0.7701, 32: 0.7673, 64: 0.7703, 128: 0.7757},
}
# MATH's test split. All 18 values are shares, rounded, of 4994, 4998, 5002 or 5006 questions, or,
# truncated, of 4995, 4999, 5003 or 5007; none is one of 500 or of 5000.
QUESTIONS = 5000
NORMAL_95 = float(ndtri(0.975))


def homogeneity(rollouts: int) -> float:
    """p-value of equal accuracy at all six G of a published row of QUESTIONS answers
    each: Pearson's chi-square with 5 degrees of freedom.

    Raises:
        KeyError: a number of rollouts that the table does not have.

    >>> [round(homogeneity(n), 3) for n in TABLE2]
    [0.002, 0.324, 0.951]
    """
    share_G = np.array(list(TABLE2[rollouts].values()))
    pooled = share_G.mean()
    statistic = QUESTIONS * np.square(share_G - pooled).sum() / (pooled * (1 - pooled))
    return float(chdtrc(len(share_G) - 1, statistic))


def published_table(cells: Sequence[dict[str, Any]]) -> Table:
    """A published row for every n of the table, below it those of own runs and the differences.

    Args:
        cells: of `accuracy.BY_BUDGET`, of runs on MATH; each series has rows of its own.
    """
    series = list(dict.fromkeys(cell["series"] for cell in cells))
    own = {(cell["series"], cell["rollouts"], cell["group_size"]): cell for cell in cells}
    rows, data = [], []
    for n, accuracy in TABLE2.items():
        published = {g: wilson(share * QUESTIONS, QUESTIONS) for g, share in accuracy.items()}
        rows.append([f"n={n}, paper", *(_text(one) for one in published.values())])
        for name in series:
            entries = [own.get((name, n, g)) for g in accuracy]
            gaps = [
                _difference(cell, published[g]) for cell, g in zip(entries, accuracy, strict=True)
            ]
            if any(entries):
                title = " ".join(filter(None, (f"n={n}", name)))
                rows.append([f"{title}, own", *map(_text, map(_interval, entries))])
                rows.append([f"{title}, own - paper", *(_text(gap, "+") for gap in gaps)])
            columns = zip(accuracy, entries, gaps, strict=True)
            data += [_data_row(name, n, g, published[g], cell, gap) for g, cell, gap in columns]
    values = ", ".join(f"p = {homogeneity(n):.2g} at n = {n}" for n in TABLE2)
    return Table(
        name="published_table2",
        title="The paper's Table 2, Qwen2.5-Math-7B on MATH, beside own runs",
        columns=["", *(f"G = {size}" for size in TABLE2[1024])],
        rows=rows,
        notes=[
            "Published accuracies with 95 % intervals generalising to new questions, as of "
            f"{QUESTIONS} (Wilson), "
            "one run each: without the variation of training. "
            f"Equal accuracy at all six G: {values} (chi-square).",
            "Own ones are as in the table of accuracy by n and G; differences take both as "
            "independent. They compare like with like only for the same model, data, prompt and "
            "number of steps.",
        ],
        data=data,
        headings=True,
    )


def _interval(cell: dict[str, Any] | None) -> Interval | None:
    return None if cell is None else Interval(cell["mean_reward"], cell["low"], cell["high"])


def _difference(cell: dict[str, Any] | None, published: Interval) -> Interval | None:
    if cell is None:
        return None
    halves = (cell["high"] - cell["low"]) / 2, (published.high - published.low) / 2
    variance = sum((half / NORMAL_95) ** 2 for half in halves)
    return t_interval(cell["mean_reward"] - published.estimate, variance, math.inf)


def _data_row(
    series: str,
    n: int,
    size: int,
    published: Interval,
    cell: dict[str, Any] | None,
    difference: Interval | None,
) -> dict[str, Any]:
    """A row of the CSV file: one n and G of one series."""
    row = {"series": series, "rollouts": n, "group_size": size}
    row |= {key: None if cell is None else cell[key] for key in ("questions", "seeds")}
    columns = {"published": published, "own": _interval(cell), "difference": difference}
    for name, interval in columns.items():
        ends = zip(("", "_low", "_high"), interval or (None,) * 3, strict=True)
        row |= {f"{name}{end}": value for end, value in ends}
    return row


def _text(interval: Interval | None, sign: str = "") -> str:
    if interval is None:
        return "-"
    return f"{interval.estimate:{sign}.3f}\n[{interval.low:{sign}.3f}, {interval.high:{sign}.3f}]"
