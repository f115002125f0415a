"""Simulate how often a statement is wrong, given that a study prints it.

A statement is an interval or a sentence. An interval is wrong if it misses the true value, and a
sentence is wrong if it is false. Each KIND simulates studies of populations with known true values.
The populations are defined in `populations.py`, and the kinds in `statements.py`:

{kinds}

A row shows the true value, the share of studies that print the statement, and the share of the
printed statements that are wrong, with its 95 % interval (Clopper & Pearson 1934). The coverage of
an interval is 1 minus the share that is wrong. For a number, the row shows the mean and the median
over the studies. A cell is a population together with a size of study. `--worst` shows, for each
population and statement, the worst of the cells in which at least 1 % of the studies print the
statement.

    python scripts/benchmarks/error_rates.py group_size --worst --csv docs/examples/decisions.csv
    python scripts/benchmarks/error_rates.py losses --cells 64x8 128x8 --studies 60
"""

from __future__ import annotations

import argparse
import csv
from collections.abc import Sequence
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
from scipy.stats import beta
from statements import KINDS, Asked, Cell

Row = dict[str, Any]


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


def rows_of_population(kind: str, name: str, asked: Asked) -> list[Row]:
    """Return all rows for a population."""
    return [row for cell in KINDS[kind].cells_of(name, asked) for row in rows_of(name, cell)]


def cell(text: str) -> tuple[int, int]:
    """Parse numbers of prompts and of completions per prompt, such as 64x8."""
    prompts, completions = map(int, text.split("x"))
    return prompts, completions


def arguments() -> argparse.Namespace:
    """Parse the command line."""
    lines = [
        f"    {name:12}{(kind.cells_of.__doc__ or '').splitlines()[0]}"
        for name, kind in KINDS.items()
    ]
    parser = argparse.ArgumentParser(
        description=(__doc__ or "").replace("{kinds}", "\n".join(lines)),
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    add = parser.add_argument
    add("kind", choices=KINDS, metavar="KIND")
    add("--studies", type=int, help="number of studies per cell")
    add("--populations", nargs="+")
    add("--cells", nargs="+", type=cell, help="such as 64x8")
    add("--draws", type=int, default=100, help="batches drawn for losses that couple groups")
    add("--workers", type=int, default=1, help="number of processes, each for one population")
    add("--worst", action="store_true", help="print only the worst cells")
    add("--csv", type=Path, help="file to which all rows are written")
    options = parser.parse_args()
    if wrong := set(options.populations or ()) - {*KINDS[options.kind].populations}:
        names = ", ".join(KINDS[options.kind].populations)
        parser.error(
            f"unknown population {', '.join(sorted(wrong))} for {options.kind}: choose from {names}"
        )
    return options


def main() -> None:
    """Print each population's table as soon as it is done, and write all rows as CSV."""
    options = arguments()
    kind = KINDS[options.kind]
    asked = Asked(options.studies or kind.studies, options.cells or kind.cells, options.draws)
    names, rows = options.populations or list(kind.populations), []
    with ProcessPoolExecutor(options.workers) as pool:
        jobs = [options.kind] * len(names), names, [asked] * len(names)
        for of_population in pool.map(rows_of_population, *jobs):
            if not rows:
                print(header_of(of_population[0]))
            rows += of_population
            printed = [row for row in of_population if row["printed"]]
            shown = worst_of(printed) if options.worst else printed
            print(*map(text_of, shown), sep="\n", flush=True)
    if options.csv:
        with options.csv.open("w", newline="") as file:
            columns = [key for key in rows[0] if any(row[key] is not None for row in rows)]
            writer = csv.DictWriter(file, columns, lineterminator="\n", extrasaction="ignore")
            writer.writeheader()
            writer.writerows(rows)


if __name__ == "__main__":
    main()
