"""The count of wrong statements among those that simulated studies print."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import numpy as np
from scipy.stats import beta

from grpo_ustat.estimators.intervals import Interval

Row = dict[str, Any]
# What a study says: a statement that is wrong or not, or a number.
Said = Mapping[str, bool | float]


class Asked(NamedTuple):
    """What the command line asks for."""

    # Studies of each cell.
    studies: int
    # Sizes of a study, mostly prompts x completions of each.
    cells: Sequence[tuple[int, int]]
    # Batches that are drawn for a loss that couples groups.
    draws: int
    # Of the draws of a population, where a kind has one.
    seed: int


@dataclass(frozen=True)
class Cell:
    """Studies of one size of one population."""

    # Columns of the table that name the cell.
    facts: Mapping[str, Any]
    # Drawn as they are counted.
    studies: Iterable[Said]
    # Numbers by statement; none of a sentence without a number.
    truth: Mapping[str, float] = field(default_factory=dict)
    # Those that have a row even if no study prints them.
    statements: Sequence[str] = ()


class Kind(NamedTuple):
    """Statements of one kind, and the studies that print them."""

    # The cells of a population.
    cells_of: Callable[[str, Asked], Iterator[Cell]]
    populations: Sequence[str]
    # Default sizes and number of studies.
    cells: Sequence[tuple[int, int]] = ((60, 16),)
    studies: int = 200


def covers(interval: Interval, truth: float) -> bool:
    """Whether the truth is within, but for rounding."""
    return interval.low - 1e-9 <= truth <= interval.high + 1e-9


def clopper_pearson(wrong: int, said: int) -> tuple[float, float]:
    """The 95 % interval of a share of independent trials (Clopper & Pearson 1934).

    >>> [round(x, 3) for x in clopper_pearson(0, 100)]
    [0.0, 0.036]
    """
    low = float(beta.ppf(0.025, wrong, said - wrong + 1)) if wrong else 0.0
    high = float(beta.ppf(0.975, wrong + 1, said - wrong)) if wrong < said else 1.0
    return low, high


def rows_of(population: str, cell: Cell) -> list[Row]:
    """A row for each statement of a cell."""
    said: dict[str, list[bool | float]] = {statement: [] for statement in cell.statements}
    studies = 0
    for statements in cell.studies:
        studies += 1
        for statement, value in statements.items():
            said.setdefault(statement, []).append(value)
    return [
        {
            "population": population, **cell.facts, "sentence": statement,
            "truth": cell.truth.get(statement), "studies": studies, **counts(values),
        }
        for statement, values in said.items()
    ]  # fmt: skip


def counts(values: Sequence[bool | float]) -> Row:
    """How often a statement is printed, and how often that is wrong; of a number mean and median.

    >>> counts([False, True])["wrong_given_printed"], counts([1.0, 2.0, 6.0])["median"]
    (0.5, 2.0)
    """
    row: Row = dict.fromkeys(("wrong", "wrong_given_printed", "low", "high", "mean", "median"))
    if values and not isinstance(values[0], bool | np.bool_):
        row |= {"mean": float(np.nanmean(values)), "median": float(np.nanmedian(values))}
    else:
        row["wrong"] = wrong = int(sum(values))
        if values:
            low, high = clopper_pearson(wrong, len(values))
            row["wrong_given_printed"] = round(wrong / len(values), 4)
            row |= {"low": round(low, 4), "high": round(high, 4)}
    return {"printed": len(values)} | row


def worst_of(rows: Sequence[Row]) -> list[Row]:
    """For each population and statement the worst cell among those that print it in 1 % or more."""
    worst: dict[tuple[str, str], Row] = {}
    for row in rows:
        if row["wrong_given_printed"] is None or row["printed"] < 0.01 * row["studies"]:
            continue
        place = row["population"], row["sentence"]
        if place not in worst or row["wrong_given_printed"] > worst[place]["wrong_given_printed"]:
            worst[place] = row
    return list(worst.values())


def columns_of(rows: Sequence[Row]) -> list[str]:
    """The columns that any of the rows fills, in order."""
    return [key for key in rows[0] if any(row[key] is not None for row in rows)]


def text_of(row: Row) -> str:
    """A row of the printed table."""
    facts = list(row.values())[: list(row).index("sentence")]
    cells = [f"{x:.4g}" if isinstance(x, float) else str(x) for x in facts]
    truth = "" if row["truth"] is None else f"{row['truth']:.4g}"
    cells += [row["sentence"], truth, f"{row['printed'] / row['studies']:.3f}"]
    if row["median"] is not None:
        cells.append(f"mean {row['mean']:.4g}, median {row['median']:.4g}")
    elif row["wrong_given_printed"] is None:
        cells.append("")
    else:
        share = row["wrong"] / row["printed"]
        cells.append(f"{share:.3f} [{row['low']:.3f}, {row['high']:.3f}]")
    return f"| {' | '.join(cells)} |"


def header_of(row: Row) -> str:
    """The two lines above the printed table."""
    names = [*list(row)[: list(row).index("sentence")], "sentence", "truth", "printed", "wrong"]
    return f"| {' | '.join(names)} |\n{'|---' * len(names)}|"
