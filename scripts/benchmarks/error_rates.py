"""Simulate how often a statement is wrong, given that a study prints it.

A statement is an interval or a sentence. An interval is wrong if it misses the true value, and a
sentence is wrong if it is false. Each KIND simulates studies of populations with known true values.
The populations are defined in `populations.py` or in the kind's module in `statements/`, which also
explains the statements. The kinds are:

{kinds}

A row shows the true value, the share of studies that print the statement, and the share of the
printed statements that are wrong, with its 95 % interval (Clopper & Pearson 1934). The coverage of
an interval is 1 minus the share that is wrong. For a number, the row shows the mean and the median
over the studies. A cell is a population together with a size of study. `--worst` shows, for each
population and statement, the worst of the cells in which at least 1 % of the studies print the
statement. `--warnings STATEMENT` also prints the mean share of studies with each warning,
separately for the cells in which more than 13 % of the statements are wrong and for the cells in
which at most 10 % are wrong.

    python scripts/benchmarks/error_rates.py group_size --worst --csv docs/examples/decisions.csv
    python scripts/benchmarks/error_rates.py losses --cells 64x8 128x8 --studies 60
    python scripts/benchmarks/error_rates.py adam --warnings "G*"
"""

from __future__ import annotations

import argparse
import csv
from collections.abc import Sequence
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path

import numpy as np
from counting import Asked, Row, columns_of, header_of, rows_of, text_of, worst_of
from statements import adam, claims, group_size, losses, moments, rewards, theorems

KINDS = {
    **group_size.KINDS, **losses.KINDS, **claims.KINDS, **moments.KINDS, **rewards.KINDS,
    **adam.KINDS, **theorems.KINDS,
}  # fmt: skip


def cell(text: str) -> tuple[int, int]:
    """Parse numbers of prompts and of completions per prompt, such as 64x8."""
    prompts, completions = map(int, text.split("x"))
    return prompts, completions


def rows_of_population(kind: str, name: str, asked: Asked) -> list[Row]:
    """Return all rows for a population."""
    return [row for cell in KINDS[kind].cells_of(name, asked) for row in rows_of(name, cell)]


def print_warnings(rows: Sequence[Row], statement: str) -> None:
    """Print the shares of studies that warn, in cells with bad and with good coverage."""
    cells: dict[str, dict[str, Row]] = {}
    for row in rows:
        place = str(list(row.values())[: list(row).index("sentence")])
        cells.setdefault(place, {})[row["sentence"]] = row
    wrong = {place: of[statement]["wrong_given_printed"] for place, of in cells.items()}
    for words, least, most in (("more than 13 %", 0.1301, 1), ("at most 10 %", 0, 0.1)):
        some = [of for place, of in cells.items() if least <= wrong[place] <= most]
        warnings = sorted({name for of in some for name in of if name.startswith("warning: ")})
        shares = [f"{x} {np.mean([of[x]['mean'] for of in some]):.2f}" for x in warnings]
        print(f"{statement} is wrong in {words} of studies: {len(some)} cells; {', '.join(shares)}")


def arguments() -> argparse.Namespace:
    """Parse the command line."""
    lines = [
        f"    {name:20}{(kind.cells_of.__doc__ or '').splitlines()[0]}"
        for name, kind in KINDS.items()
    ]
    parser = argparse.ArgumentParser(
        description=(__doc__ or "").replace("{kinds}", "\n".join(lines)),
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("kind", choices=KINDS, metavar="KIND")
    parser.add_argument("--studies", type=int, help="number of studies per cell")
    parser.add_argument("--populations", nargs="+")
    parser.add_argument("--cells", nargs="+", type=cell, help="such as 64x8")
    parser.add_argument(
        "--draws",
        type=int,
        default=100,
        help="number of batches drawn for losses that couple groups",
    )
    parser.add_argument(
        "--seed", type=int, default=0, help="seed of the draws, in the kinds that use it"
    )
    parser.add_argument(
        "--workers", type=int, default=1, help="number of processes, each for one population"
    )
    parser.add_argument("--worst", action="store_true", help="print only the worst cells")
    parser.add_argument(
        "--warnings", metavar="STATEMENT", help="print the shares of warnings for this statement"
    )
    parser.add_argument("--csv", type=Path, help="file to which all rows are written")
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
    asked = Asked(
        options.studies or kind.studies, options.cells or kind.cells, options.draws, options.seed
    )
    names = options.populations or list(kind.populations)
    rows: list[Row] = []
    with ProcessPoolExecutor(options.workers) as pool:
        several = len(names)
        jobs = [options.kind] * several, names, [asked] * several
        for of_population in pool.map(rows_of_population, *jobs):
            if not rows:
                print(header_of(of_population[0]))
            rows += of_population
            printed = [row for row in of_population if row["printed"]]
            shown = worst_of(printed) if options.worst else printed
            print(*map(text_of, shown), sep="\n", flush=True)
    if options.warnings:
        print_warnings(rows, options.warnings)
    if options.csv:
        with options.csv.open("w", newline="") as file:
            columns = columns_of(rows)
            writer = csv.DictWriter(file, columns, lineterminator="\n", extrasaction="ignore")
            writer.writeheader()
            writer.writerows(rows)


if __name__ == "__main__":
    main()
