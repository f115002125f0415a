"""Count wrong statements among the statements that simulated studies print."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import numpy as np
from scipy.stats import beta

from grpo_ustat.estimators.intervals import Interval

Row = dict[str, Any]
# Statements of a study by name. The value is True if the statement is wrong, or a number.
Statements = Mapping[str, bool | float]


class Asked(NamedTuple):
    """Options of the command line."""

    # Number of studies per cell.
    studies: int
    # Sizes of a study, mostly (prompts, completions per prompt).
    cells: Sequence[tuple[int, int]]
    # Number of batches drawn for a loss that couples groups.
    draws: int
    # Seed of the draws from a population, in the kinds that use it.
    seed: int


@dataclass(frozen=True)
class Cell:
    """Simulated studies of one size, from one population."""

    # Table columns that identify the cell.
    facts: Mapping[str, Any]
    # The studies, which are simulated while they are counted.
    studies: Iterable[Statements]
    # True values by statement; statements without a true value are missing.
    truth: Mapping[str, float] = field(default_factory=dict)
    # Statements that get a row even if no study prints them.
    statements: Sequence[str] = ()


class Kind(NamedTuple):
    """A kind of statement, and the simulated studies that print such statements."""

    # Function that yields the cells of a population.
    cells_of: Callable[[str, Asked], Iterator[Cell]]
    populations: Sequence[str]
    # Defaults for the sizes and the number of studies.
    cells: Sequence[tuple[int, int]] = ((60, 16),)
    studies: int = 200


def covers(interval: Interval, truth: float) -> bool:
    """Return True if the interval contains the true value, up to rounding."""
    return interval.low - 1e-9 <= truth <= interval.high + 1e-9


def clopper_pearson(wrong: int, printed: int) -> tuple[float, float]:
    """Return the 95 % interval for a binomial proportion (Clopper & Pearson 1934).

    >>> [round(x, 3) for x in clopper_pearson(0, 100)]
    [0.0, 0.036]
    """
    low = float(beta.ppf(0.025, wrong, printed - wrong + 1)) if wrong else 0.0
    high = float(beta.ppf(0.975, wrong + 1, printed - wrong)) if wrong < printed else 1.0
    return low, high


def rows_of(population: str, cell: Cell) -> list[Row]:
    """Make a row for each statement in a cell."""
    values_of: dict[str, list[bool | float]] = {statement: [] for statement in cell.statements}
    studies = 0
    for statements in cell.studies:
        studies += 1
        for statement, value in statements.items():
            values_of.setdefault(statement, []).append(value)
    return [
        {
            "population": population, **cell.facts, "sentence": statement,
            "truth": cell.truth.get(statement), "studies": studies, **counts(values),
        }
        for statement, values in values_of.items()
    ]  # fmt: skip


def counts(values: Sequence[bool | float]) -> Row:
    """Count how often a statement is printed and wrong; for a number, return mean and median.

    >>> counts([False, True])["wrong_given_printed"], counts([1.0, 2.0, 6.0])["median"]
    (0.5, 2.0)
    """
    row: Row = dict.fromkeys(
        ("wrong", "wrong_given_printed", "low", "high", "mean", "median", "quantile_80")
    )
    if values and not isinstance(values[0], bool | np.bool_):
        median, most = np.nanquantile(values, (0.5, 0.8), method="inverted_cdf")
        row |= {"mean": float(np.nanmean(values)), "median": float(median)}
        row["quantile_80"] = float(most)
    else:
        row["wrong"] = wrong = int(sum(values))
        if values:
            low, high = clopper_pearson(wrong, len(values))
            row["wrong_given_printed"] = round(wrong / len(values), 4)
            row |= {"low": round(low, 4), "high": round(high, 4)}
    return {"printed": len(values)} | row


def worst_of(rows: Sequence[Row]) -> list[Row]:
    """Return the worst row by population and statement, if at least 1 % of studies print it."""
    worst: dict[tuple[str, str], Row] = {}
    for row in rows:
        if row["wrong_given_printed"] is None or row["printed"] < 0.01 * row["studies"]:
            continue
        place = row["population"], row["sentence"]
        if place not in worst or row["wrong_given_printed"] > worst[place]["wrong_given_printed"]:
            worst[place] = row
    return list(worst.values())


def columns_of(rows: Sequence[Row]) -> list[str]:
    """Return the columns in which any row has a value, in order."""
    return [key for key in rows[0] if any(row[key] is not None for row in rows)]


def text_of(row: Row) -> str:
    """Format a row of the printed table."""
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
    """Format the two header lines of the printed table."""
    names = [*list(row)[: list(row).index("sentence")], "sentence", "truth", "printed", "wrong"]
    return f"| {' | '.join(names)} |\n{'|---' * len(names)}|"
