"""A table with its data: on the console, as CSV, as LaTeX."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rich.markup import escape
from rich.table import Table

from grpo_ustat.runs.folder import write_whole
from grpo_ustat.runs.summary import csv_text


@dataclass(frozen=True)
class Sheet:
    """A table of a report.

    Attributes:
        name: of its files, `<name>.csv` and `<name>.tex`.
        title: above it.
        columns: their names.
        rows: a text for every column; its lines belong together, the first is the number.
        notes: below it: what intervals are over, what marks mean.
        data: its numbers as they are; what a row lacks is an empty field.
        drawn: what the figure of the same name needs said below it, None where there is none.
        long: columns that hold sentences, for which a terminal has no room.
    """

    name: str
    title: str
    columns: Sequence[str]
    rows: Sequence[Sequence[str]]
    notes: Sequence[str]
    data: Sequence[dict[str, Any]]
    drawn: Sequence[str] | None = None
    long: Sequence[str] = ()

    def table(self) -> Table:
        """For a terminal."""
        table = Table(title=escape(self.title), caption=escape("\n".join(self.notes)))
        table.min_width = 64
        shown = [i for i, column in enumerate(self.columns) if column not in self.long]
        for i in shown:
            table.add_column(escape(self.columns[i]), justify="right" if i else "left")
        for row in _headed(self.rows):
            table.add_row(*(escape(row[i]) for i in shown))
        return table

    def write(self, folder: Path) -> None:
        """Its numbers as CSV, itself as LaTeX."""
        keys = dict.fromkeys(key for row in self.data for key in row)
        whole = [dict.fromkeys(keys) | row for row in self.data]  # studies of other versions
        write_whole(folder / f"{self.name}.csv", csv_text(whole))
        write_whole(folder / f"{self.name}.tex", self.latex())

    def latex(self) -> str:
        """A `tabular` for the package booktabs, a line per row."""
        lines = [f"% {line}" for line in (self.title, *self.notes)]
        kinds = [
            SENTENCES if x in self.long else "r" if i else "l" for i, x in enumerate(self.columns)
        ]
        lines += [f"\\begin{{tabular}}{{{''.join(kinds)}}}", "\\toprule"]
        lines += [_line(self.columns), "\\midrule", *map(_line, _headed(self.rows)), "\\bottomrule"]
        return "\n".join([*lines, "\\end{tabular}", ""])


SENTENCES = r"p{0.3\linewidth}"  # a LaTeX column of them


def _headed(rows: Sequence[Sequence[str]]) -> list[list[str]]:
    """Rows whose first text is blank where it is that of the row above."""
    above = [None, *(row[0] for row in rows)]
    return [
        ["" if row[0] == head else row[0], *row[1:]] for row, head in zip(rows, above, strict=False)
    ]


def _line(cells: Sequence[str]) -> str:
    return " & ".join(map(_stacked, cells)) + r" \\"


def _stacked(cell: str) -> str:
    lines = [tex(line) for line in cell.split("\n")]
    stacked = r" \\ ".join(lines)
    return stacked if len(lines) == 1 else f"\\shortstack[r]{{{stacked}}}"


SPECIAL = {
    "\\": r"\textbackslash{}", "~": r"\textasciitilde{}", "^": r"\textasciicircum{}",
    "<": r"\textless{}", ">": r"\textgreater{}", "|": r"\textbar{}",
}  # fmt: skip


def tex(text: str) -> str:
    r"""Text as LaTeX shows it.

    >>> tex("n_0 = 5 %, ~")
    'n\\_0 = 5 \\%, \\textasciitilde{}'
    """
    return re.sub(r"[\\~^<>|&%$#_{}]", lambda m: SPECIAL.get(m[0], f"\\{m[0]}"), text)


def shorter(lines: Sequence[str], most: int, where: str) -> list[str]:
    """The first so many lines, and how many more there are.

    >>> shorter(["a", "b", "c"], 1, "runs.csv")
    ['a', 'and 2 more, see runs.csv']
    """
    rest = len(lines) - most
    return [*lines[:most], f"and {rest} more, see {where}"] if rest > 0 else list(lines)
