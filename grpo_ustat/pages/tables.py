"""Tables for the terminal, pages, CSV, LaTeX and Markdown."""

from __future__ import annotations

import csv
import io
import json
import math
import re
import textwrap
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rich.box import SIMPLE_HEAD
from rich.console import Console, ConsoleOptions, RenderableType
from rich.table import Table as TerminalTable

from grpo_ustat.estimators.intervals import Interval
from grpo_ustat.records import MIN_QUESTIONS
from grpo_ustat.runs.contents import row_interval
from grpo_ustat.runs.files import FORMULA, write_whole
from grpo_ustat.runs.folder import RunFolder
from grpo_ustat.terminal.streams import excerpt, visible, wrapped

Cell = str | int | float | bool | None
MISSING = "–"
# Maximum number of characters per cell on a terminal; longer texts are truncated.
MAX_CHARACTERS = 300
NUMBER = re.compile(r"[-+]?(\d+(\.\d*)?|\.\d+)(e[-+]?\d+)?(?![\w.-])", re.IGNORECASE)
# Number of characters between columns on a terminal, and minimum width of a table in characters.
GAP, MIN_WIDTH = 2, 64
# Line breaks must not split an interval or a number and its percent sign.
UNBROKEN = re.compile(r"\[[^\]\[]*?[\])]|(?<=\d) %")
GLUE = "\0"
# Maximum number of baselines that fit side by side on an 80-column terminal.
MAX_BASELINES = 4
# LaTeX column type for columns that contain sentences.
LATEX_SENTENCES = r"p{0.3\linewidth}"
LATEX_SPECIAL = {
    "\\": r"\textbackslash{}", "~": r"\textasciitilde{}", "^": r"\textasciicircum{}",
    "<": r"\textless{}", ">": r"\textgreater{}", "|": r"\textbar{}", "\u2212": "$-$",
    "±": r"$\pm$", "×": r"$\times$", "≤": r"$\le$", "≥": r"$\ge$", "≈": r"$\approx$", "–": "--",
    "→": r"$\to$", "…": r"\dots{}", "∞": r"$\infty$", "σ": r"$\sigma$", "τ": r"$\tau$",
    "·": r"$\cdot$", "—": "---", "√": r"$\surd$", "²": "$^2$",
}  # fmt: skip
HTML_ENTITIES = {"&": "&amp;", "<": "&lt;", ">": "&gt;"}
# The last two alternatives prevent automatic links.
MARKDOWN_SPECIAL = re.compile(r"([\\`*_{}\[\]()#|~$@]|:(?=//)|(?<=www)\.)")


@dataclass(frozen=True)
class Table:
    """A table, with notes and the data for its CSV file.

    Raises:
        ValueError: If the number of cells in a row differs from the number of columns.
    """

    title: str
    columns: Sequence[str]
    # Rows of cells, one cell per column; None for a missing cell. A cell may have several lines.
    # Users can sort a page's table by a column; a text such as `0.35 [0.18, 0.57]` is sorted by its
    # first number.
    rows: Sequence[Sequence[Cell]]
    # Notes below the table on the scope of intervals, the meaning of marks, and missing numbers.
    notes: Sequence[str] = ()
    # Base name for the files `<name>.csv` and `<name>.tex`.
    name: str = ""
    # Rows of the CSV file; a missing key becomes an empty field.
    data: Sequence[dict[str, Any]] = ()
    # Notes below the figure with the same name; None if no figure has this name.
    figure_notes: Sequence[str] | None = None
    # True if the first column contains row headings; a repeated heading is left blank.
    headings: bool = False
    # Names of columns that contain sentences; they are omitted on a terminal.
    sentences: Sequence[str] = ()
    # True if the table is omitted on a terminal.
    page_only: bool = False
    # True if a page shows only the title until the reader opens the table.
    folded: bool = False

    def __post_init__(self) -> None:
        for row in self.rows:
            if len(row) != len(self.columns):
                raise ValueError(
                    f"table {self.title!r} has {len(self.columns)} columns and a row of {len(row)}"
                )

    def __rich_console__(
        self, console: Console, options: ConsoleOptions
    ) -> Iterator[RenderableType]:
        """Yield the table for a terminal, without columns that contain sentences.

        Lines do not break inside words, numbers or intervals. Columns that do not fit are printed
        below in another part, which repeats the first column. For a table without rows, only a line
        with the title and notes is printed.
        """
        if not self.rows:
            yield wrapped(f"{self.title}: {' '.join(self.notes)}", options.max_width)
            yield ""
            return
        parts = self._parts(options.max_width)
        for place, widths in enumerate(parts):
            first, last = place == 0, place == len(parts) - 1
            table = TerminalTable(
                title=self.title if first else None,
                caption="\n".join(self.notes) if last else None,
                box=SIMPLE_HEAD, show_edge=False, pad_edge=False, collapse_padding=True,
                title_justify="left", caption_justify="left",
                min_width=min(MIN_WIDTH, options.max_width),
            )  # fmt: skip
            for column, width in widths.items():
                is_heading = self.headings and column == 0
                has_numbers = any(sort_value(row[column]) is not None for row in self.rows)
                table.add_column(
                    broken(_terminal_text(self.columns[column]), width),
                    justify="right" if has_numbers and not is_heading else "left", width=width,
                )  # fmt: skip
            for row in self._text_rows():
                table.add_row(
                    *(broken(_terminal_text(row[i]), width) for i, width in widths.items())
                )
            yield table
            yield ""

    def _parts(self, room: int) -> list[dict[int, int]]:
        """Split the columns into parts that fit a terminal; return the widths by column index.

        Args:
            room: Number of characters per line.
        """
        texts = {
            i: [_terminal_text(row[i]) for row in (self.columns, *self._text_rows())]
            for i, column in enumerate(self.columns)
            if column not in self.sentences
        }
        least = {
            i: max(len(word) for text in column for word in _words(text))
            for i, column in texts.items()
        }
        longest = {
            i: max(len(line) for text in column for line in text.split("\n"))
            for i, column in texts.items()
        }
        (heading, *others), parts = texts, []
        # The first column is in every part, so its long words may have to be broken.
        beside = min(max((least[i] for i in others), default=0), room // 2)
        part = {heading: min(least[heading], room - GAP - beside)}
        for i in others:
            least[i] = min(least[i], room - GAP - part[heading])
            if len(part) > 1 and sum(part.values()) + len(part) * GAP + least[i] > room:
                parts.append(part)
                part = {heading: part[heading]}
            part[i] = least[i]
        parts.append(part)
        for part in parts:
            # Each spare character goes to the column that lacks the most characters to its full
            # width.
            for _ in range(room - sum(part.values()) - (len(part) - 1) * GAP):
                i = max(part, key=lambda i: longest[i] - part[i])
                part[i] += longest[i] > part[i]
        return parts

    def csv(self) -> str:
        """Return the table's data as CSV."""
        keys = dict.fromkeys(key for row in self.data for key in row)
        return csv_text([dict.fromkeys(keys) | row for row in self.data])

    def latex(self) -> str:
        r"""Return a floating LaTeX `table` that is at most as wide as the line.

        The LaTeX document must load the packages booktabs and graphicx.

        Each cell is one line, with the interval in small print after the value. If headings repeat
        and have several lines, as the names of a study do, each heading is printed once on a
        separate line above its rows. No row begins with `[` or `*`, because LaTeX would read this
        character as an option of the preceding `\\`.
        """
        headings = [row[0] for row in self.rows]
        grouped = self.headings and len(set(headings)) < len(headings)
        grouped = grouped and any("\n" in str(heading) for heading in headings)
        # Index of the first column to print.
        first = int(grouped)
        kinds = ["r"] * len(self.columns)
        kinds[0] = "l"
        for i, column in enumerate(self.columns):
            if column in self.sentences:
                kinds[i] = LATEX_SENTENCES

        lines = [f"\\begin{{tabular}}{{{''.join(kinds[first:])}}}", "\\toprule"]
        lines += [_latex_row([tex_cell(x) for x in self.columns[first:]]), "\\midrule"]
        for i, row in enumerate(self._text_rows()):
            if grouped and row[0]:
                lines += ["\\addlinespace"] if i else []
                span = f"\\multicolumn{{{len(self.columns) - 1}}}{{l}}"
                lines.append(_latex_row([f"{span}{{{tex(', '.join(row[0].splitlines()))}}}"]))
            cells = [tex_cell(row[j]) for j in range(1, len(row))]
            heading = [] if grouped else [tex(", ".join(row[0].splitlines()))]
            lines.append(_latex_row([*heading, *cells]))
        tabular = "\n".join([*lines, "\\bottomrule", "\\end{tabular}%"])

        title = " ".join(self.title.split()).rstrip(".")
        caption = tex(" ".join(f"{x.rstrip('.')}." for x in (title, *self.notes)))
        label = re.sub(r"[^A-Za-z0-9.=:-]+", "-", self.name)
        width = r"\ifdim\width>\linewidth\linewidth\else\width\fi"
        return "\n".join([
            "% \\usepackage{booktabs,graphicx}",
            "\\begin{table}",
            "\\centering",
            f"\\caption[{{{tex(title)}}}]{{{caption}}}",
            f"\\label{{tab:{label}}}",
            f"\\resizebox{{{width}}}{{!}}{{%",
            tabular,
            "}",
            "\\end{table}",
            "",
        ])  # fmt: skip

    def markdown(self) -> str:
        """Return the header and the rows as Markdown lines."""
        lines = ["| " + " | ".join(map(plain, row)) + " |" for row in (self.columns, *self.rows)]
        return "\n".join([lines[0], "|---" * len(self.columns) + "|", *lines[1:]])

    def numeric_columns(self) -> list[bool]:
        """Return, for each column, True if all cells that are not missing sort by a number."""
        columns = list(zip(*self.rows, strict=True)) or [(None,)] * len(self.columns)
        return [
            bool(self.rows)
            and all(sort_value(x) is not None for x in cells if cell_text(x) != MISSING)
            for cells in columns
        ]

    def write(self, folder: Path) -> None:
        """Write `<name>.csv` and `<name>.tex`."""
        write_whole(folder / f"{self.name}.csv", self.csv())
        write_whole(folder / f"{self.name}.tex", self.latex())

    def _text_rows(self) -> list[list[str]]:
        """Return all cells as texts, and leave a heading blank if it equals the one above."""
        rows = [[x if isinstance(x, str) else cell_text(x) for x in row] for row in self.rows]
        if not self.headings:
            return rows
        above = [None, *(row[0] for row in rows)]
        return [
            ["" if row[0] == heading else row[0], *row[1:]]
            for row, heading in zip(rows, above, strict=False)
        ]


def _terminal_text(cell: str) -> str:
    """Return a cell's text for a terminal, truncated and with invisible characters spelt out."""
    return visible(excerpt(cell, MAX_CHARACTERS)).expandtabs()


def _words(text: str) -> list[str]:
    """Split a text at the spaces where a line may be broken.

    >>> _words("tiny, bare 0.5 [0.2, 0.8] 12 %")
    ['tiny,', 'bare', '0.5', '[0.2, 0.8]', '12 %']
    """
    return [word.replace(GLUE, " ") for word in _glued(text).split()] or [""]


def _glued(text: str) -> str:
    return UNBROKEN.sub(lambda match: match[0].replace(" ", GLUE), text)


def broken(text: str, width: int) -> str:
    """Break all lines that are longer than a width, between words if possible.

    >>> print(broken("0.5 [0.2, 0.8]", 10))
    0.5
    [0.2, 0.8]
    """
    lines = [
        textwrap.fill(line, width, break_on_hyphens=False) for line in _glued(text).split("\n")
    ]
    return "\n".join(lines).replace(GLUE, " ")


def rows_table(title: str, rows: Sequence[dict[str, Any]], note: str = "") -> Table:
    """Return a table with a column per key of the rows; columns without any value are omitted."""
    keys = dict.fromkeys(key for row in rows for key in row)
    columns = [key for key in keys if any(row.get(key) is not None for row in rows)]
    cells = [[as_cell(row.get(key)) for key in columns] for row in rows]
    return Table(title, [key.replace("_", " ") for key in columns], cells, [note] if note else [])


def as_cell(value: Any) -> Cell:
    """Convert a value from a configuration or a file to a table cell."""
    return value if isinstance(value, Cell) else json.dumps(value, default=str)


def cell_text(cell: Cell) -> str:
    """Return the text of a cell.

    >>> cell_text(0.123456), cell_text(12), cell_text(True), cell_text(None)
    ('0.1235', '12', 'yes', '–')
    """
    if cell in (None, "", "-"):
        return MISSING
    if isinstance(cell, bool):
        return "yes" if cell else "no"
    return f"{cell:.4g}" if isinstance(cell, float) else visible(str(cell))


def sort_value(cell: Cell) -> float | None:
    """Return a cell's sort key: its value, or the number at the start of its text.

    >>> sort_value("0.35 [0.18, 0.57]"), sort_value("12 %"), sort_value(3)
    (0.35, 12.0, 3.0)
    >>> sort_value("2024-11-22"), sort_value("tiny"), sort_value(None)
    (None, None, None)
    """
    if cell is None or isinstance(cell, bool):
        return None
    if isinstance(cell, str):
        match = NUMBER.match(cell.strip())
        return float(match[0]) if match else None
    return float(cell) if math.isfinite(cell) else None


def tex(text: str) -> str:
    r"""Escape a text for LaTeX.

    A non-ASCII character without a LaTeX equivalent is replaced by its code point.

    >>> tex("n_0 = 5 %, ~"), tex("-0.5 ± 1 ≤ x\x00\n中")
    ('n\\_0 = 5 \\%, \\textasciitilde{}', '$-$0.5 $\\pm$ 1 $\\le$ x\\textbackslash{}x00 U+4E2D')
    """
    text = re.sub(r"(?<![\w.)-])-(?=[\d.])", "\u2212", " ".join(visible(text).split()))
    return "".join(map(_tex_letter, text.replace("->", "→")))


def _tex_letter(letter: str) -> str:
    if letter in LATEX_SPECIAL:
        return LATEX_SPECIAL[letter]
    if letter in "&%$#_{}":
        return f"\\{letter}"
    return letter if letter.isascii() else f"U+{ord(letter):04X}"


def tex_cell(cell: str) -> str:
    r"""Join the lines of a cell into one LaTeX cell, with all lines after the first in small print.

    >>> print(tex_cell("23.1\n[21.3, 25.0]"), tex_cell("0.378*"))
    23.1 {\scriptsize [21.3, 25.0]} 0.378*
    """
    value, *rest = cell.split("\n")
    return f"{tex(value)} {{\\scriptsize {tex(', '.join(rest))}}}" if rest else tex(value)


def _latex_row(cells: Sequence[str]) -> str:
    r"""Return a row of LaTeX.

    A row that begins with `[` or `*` is prefixed with `{}`. Otherwise LaTeX would read the
    character as an option of the preceding `\\`.
    """
    text = " & ".join(cells)
    return ("{}" if text.lstrip()[:1] in ("[", "*") else "") + text + r" \\"


def plain(value: Any) -> str:
    r"""Escape a value as one line of plain text for Markdown; None becomes an empty text.

    >>> print(plain("<b>[x](http://y)</b> | a_b"))
    &lt;b&gt;\[x\]\(http\://y\)&lt;/b&gt; \| a\_b
    """
    text = "" if value is None else "".join(c if c.isprintable() else " " for c in str(value))
    text = re.sub("[&<>]", lambda match: HTML_ENTITIES[match[0]], " ".join(text.split()))
    return MARKDOWN_SPECIAL.sub(r"\\\1", text)


def csv_text(rows: Sequence[dict[str, Any]]) -> str:
    r"""Return rows with equal keys as CSV; None becomes an empty field.

    If a spreadsheet would execute a text as a formula, a `'` is put before it. `files.csv_rows`
    removes this character. Invisible characters are spelt out.

    >>> print(csv_text([{"name": "=1+1", "low": -0.5, "text": "-0.5"}]), end="")
    name,low,text
    '=1+1,-0.5,-0.5
    """
    text = io.StringIO()
    writer = csv.DictWriter(text, fieldnames=list(rows[0]), lineterminator="\n")
    writer.writeheader()
    writer.writerows({key: _csv_cell(value) for key, value in row.items()} for row in rows)
    return text.getvalue()


def _csv_cell(value: Any) -> Any:
    if not isinstance(value, str):
        return value
    runs = FORMULA.match(value) and not NUMBER.fullmatch(value)
    return visible(f"'{value}" if runs else value)


def write_csv(folder: RunFolder, name: str, rows: list[dict[str, Any]]) -> None:
    """Write rows with equal keys as CSV; None becomes an empty field."""
    folder.write(name, csv_text(rows))


def shorten(lines: Sequence[str], most: int, where: str) -> list[str]:
    """Return the first `most` lines, and a last line with the number of omitted lines.

    >>> shorten(["a", "b", "c"], 1, "runs.csv")
    ['a', 'and 2 more, see runs.csv']
    """
    rest = len(lines) - most
    return [*lines[:most], f"and {rest} more, see {where}"] if rest > 0 else list(lines)


def enumeration(names: Sequence[str], word: str = "and") -> str:
    """Join names with commas, and put a word before the last name.

    >>> enumeration(["a"]), enumeration(["a", "b", "c"])
    ('a', 'a, b and c')
    """
    return f" {word} ".join(filter(None, (", ".join(names[:-1]), names[-1])))


def three_digits(value: float) -> str:
    """Format a number with three significant digits, including trailing zeros.

    Numbers from 1,000 to 999,000 are written without an exponent.

    >>> [three_digits(x) for x in (0.001234, -0.5, 62.4, 2647.0, 1234567.0, math.inf)]
    ['0.00123', '-0.500', '62.4', '2650', '1.23e+06', 'infinity']
    """
    if math.isinf(value):
        return "infinity" if value > 0 else "-infinity"
    if 999.5 <= abs(value) < 999_500:
        return f"{float(f'{value:.3g}'):.0f}"
    return f"{value:#.3g}".removesuffix(".")


def number_text(value: float | str) -> str:
    """Format a number with four significant digits; return a text unchanged.

    >>> number_text(0.123456), number_text("<= 1"), number_text(-0.0)
    ('0.1235', '<= 1', '0')
    """
    return value if isinstance(value, str) else f"{value + 0.0:.4g}"


def with_interval(row: Mapping[str, Any], key: str, prefix: str = "") -> str | None:
    """Format a number from a row and its interval, which is in `<prefix>low` and `<prefix>high`."""
    values = (row.get(name) for name in (key, f"{prefix}low", f"{prefix}high"))
    return closed_interval_text(
        Interval(*(x if isinstance(x, int | float) else math.nan for x in values))
    )


def closed_interval_text(value: Interval) -> str | None:
    """Format an estimate and its closed interval with three digits; None if it is unknown.

    >>> closed_interval_text(Interval(2.0, 1.0, 3.0))
    '2.00 [1.00, 3.00]'
    >>> closed_interval_text(Interval(2.0, 1.0, math.inf))
    '2.00 (no interval)'
    """
    if not value.is_known:
        return None
    if not (math.isfinite(value.low) and math.isfinite(value.high)):
        return f"{three_digits(value.estimate)} (no interval)"
    return "{} [{}, {}]".format(*map(three_digits, value))


def interval_text(value: Interval) -> str:
    """Format an estimate and its interval with three digits; `-` if there is no interval.

    The interval may have no upper end.

    >>> interval_text(Interval(2.0, 1.0, math.inf)), interval_text(Interval(*3 * [math.nan]))
    ('2.00 [1.00, infinity)', '-')
    """
    if math.isnan(value.low):
        return "-"
    first = "unknown" if math.isnan(value.estimate) else three_digits(value.estimate)
    end = f"{three_digits(value.high)}]" if math.isfinite(value.high) else "infinity)"
    return f"{first} [{three_digits(value.low)}, {end}"


def open_interval(row: Mapping[str, Any], name: str) -> str:
    """Format an estimate from a row of a file; see `interval_text`."""
    return interval_text(row_interval(row, name))


def count_text(count: int, noun: str) -> str:
    """Format a count with its noun.

    >>> count_text(1, "question"), count_text(20, "question")
    ('1 question', '20 questions')
    """
    return f"{count} {noun}{'s' * (count != 1)}"


def interval_scope(questions: int) -> str:
    """Return the words for what a study's intervals cover: new questions, or only its own.

    If a study has too few questions, its intervals do not cover new questions; see
    `intervals.pool_mean_reward`.
    """
    if questions < MIN_QUESTIONS:
        return "for these questions"
    return "for new questions"
