"""A table with its data: on the terminal, on a page, as CSV, as LaTeX, as Markdown."""

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
from grpo_ustat.terminal.console import excerpt, wrapped
from grpo_ustat.terminal.streams import visible

Cell = str | int | float | bool | None
MISSING = "–"
# Characters of a cell on a terminal; longer ones are cut.
MAX_CHARACTERS = 300
NUMBER = re.compile(r"[-+]?(\d+(\.\d*)?|\.\d+)(e[-+]?\d+)?(?![\w.-])", re.IGNORECASE)
# Characters between two columns on a terminal, and the least width of a table there.
GAP, MIN_WIDTH = 2, 64
# What no line of a cell breaks: an interval, and a number with its percent sign.
UNBROKEN = re.compile(r"\[[^\]\[]*?[\])]|(?<=\d) %")
GLUE = "\0"
# Baselines side by side on a terminal of 80 characters.
MAX_BASELINES = 4
# The kind of a column of sentences.
LATEX_SENTENCES = r"p{0.3\linewidth}"
LATEX_SPECIAL = {
    "\\": r"\textbackslash{}", "~": r"\textasciitilde{}", "^": r"\textasciicircum{}",
    "<": r"\textless{}", ">": r"\textgreater{}", "|": r"\textbar{}", "\u2212": "$-$",
    "±": r"$\pm$", "×": r"$\times$", "≤": r"$\le$", "≥": r"$\ge$", "≈": r"$\approx$", "–": "--",
    "→": r"$\to$", "…": r"\dots{}", "∞": r"$\infty$", "σ": r"$\sigma$", "τ": r"$\tau$",
    "·": r"$\cdot$", "—": "---", "√": r"$\surd$", "²": "$^2$",
}  # fmt: skip
LATEX_SYMBOLS = {
    "A_V - A_0": "$A_V - A_0$", "A_V": "$A_V$", "A_0": "$A_0$", "G*": "$G^*$",
    "corr(q, Z)": r"$\mathrm{corr}(q, Z)$", "1 + sqrt(C3/C1)": r"$1 + \sqrt{C_3/C_1}$",
    "C1": "$C_1$", "C2": "$C_2$", "C3": "$C_3$", "infinity": r"$\infty$",
    "n_c": "$n_c$", "||grad J||^2": r"$\|\nabla J\|^2$",
}  # fmt: skip
MATH_SYMBOLS = re.compile(rf"(?<!\w)({'|'.join(map(re.escape, LATEX_SYMBOLS))})(?!\w)")
HTML_ENTITIES = {"&": "&amp;", "<": "&lt;", ">": "&gt;"}
# The last two alternatives are for bare links.
MARKDOWN_SPECIAL = re.compile(r"([\\`*_{}\[\]()#|~$@]|:(?=//)|(?<=www)\.)")


@dataclass(frozen=True)
class Table:
    """A table.

    Raises:
        ValueError: a row has not as many cells as there are columns.
    """

    title: str
    columns: Sequence[str]
    # A cell for every column; None is missing. The lines of a text belong together; on a page a
    # text such as `0.35 [0.18, 0.57]` sorts by its first number.
    rows: Sequence[Sequence[Cell]]
    # Below it: the scope of intervals, the meaning of marks, missing numbers and the reasons.
    notes: Sequence[str] = ()
    # Of its files, `<name>.csv` and `<name>.tex`.
    name: str = ""
    # Its numbers for the CSV file; a key that a row lacks is an empty field.
    data: Sequence[dict[str, Any]] = ()
    # For below the figure of the same name; None where there is no such figure.
    figure_notes: Sequence[str] | None = None
    # True if the first column holds headings, blank where they repeat those above.
    headings: bool = False
    # Columns that hold sentences, for which a terminal has no room.
    sentences: Sequence[str] = ()
    # True if a terminal leaves it out.
    page_only: bool = False
    # True if a page shows only its title until a reader opens it.
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
        """Yield the table for a terminal, without the columns of sentences.

        No word, number or interval is broken: columns that have no room follow in a further part,
        beside the first column. A table without rows is a line of its title and its notes.
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
        """Return the width of each column that a terminal shows, by its index, in each part.

        Args:
            room: characters of a line.
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
        # The first column stands beside each other one: only a word longer than that is broken.
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
            # The column that lacks most has each further character.
            for _ in range(room - sum(part.values()) - (len(part) - 1) * GAP):
                i = max(part, key=lambda i: longest[i] - part[i])
                part[i] += longest[i] > part[i]
        return parts

    def csv(self) -> str:
        """Return its data as CSV."""
        keys = dict.fromkeys(key for row in self.data for key in row)
        return csv_text([dict.fromkeys(keys) | row for row in self.data])

    def latex(self) -> str:
        r"""Return a floating `table` for a paper, as wide as the page at most.

        It needs the packages booktabs and graphicx.

        A cell is one line, its interval small after its value. Headings of several lines that
        repeat, such as the names of a study, are a line of their own above their rows. No row
        begins with `[` or `*`, which LaTeX would read as an option of the `\\` before it.
        """
        headings = [row[0] for row in self.rows]
        grouped = self.headings and len(set(headings)) < len(headings)
        grouped = grouped and any("\n" in str(heading) for heading in headings)
        # The first column that is shown.
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
        """Return columns and rows in Markdown, on one line each."""
        lines = ["| " + " | ".join(map(plain, row)) + " |" for row in (self.columns, *self.rows)]
        return "\n".join([lines[0], "|---" * len(self.columns) + "|", *lines[1:]])

    def numeric_columns(self) -> list[bool]:
        """Return for each column, for a page, True if all cells with a value sort by a number."""
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
        """Return cells as texts; a heading that repeats the one above is blank."""
        rows = [[x if isinstance(x, str) else cell_text(x) for x in row] for row in self.rows]
        if not self.headings:
            return rows
        above = [None, *(row[0] for row in rows)]
        return [
            ["" if row[0] == heading else row[0], *row[1:]]
            for row, heading in zip(rows, above, strict=False)
        ]


def _terminal_text(cell: str) -> str:
    """Return a cell's text for a terminal: cut, with invisible characters spelt out."""
    return visible(excerpt(cell, MAX_CHARACTERS)).expandtabs()


def _words(text: str) -> list[str]:
    """Split a text where its lines may end.

    >>> _words("tiny, bare 0.5 [0.2, 0.8] 12 %")
    ['tiny,', 'bare', '0.5', '[0.2, 0.8]', '12 %']
    """
    return [word.replace(GLUE, " ") for word in _glued(text).split()] or [""]


def _glued(text: str) -> str:
    return UNBROKEN.sub(lambda match: match[0].replace(" ", GLUE), text)


def broken(text: str, width: int) -> str:
    """Break the lines of a text that are longer than a width, between words if that is possible.

    >>> print(broken("0.5 [0.2, 0.8]", 10))
    0.5
    [0.2, 0.8]
    """
    lines = [
        textwrap.fill(line, width, break_on_hyphens=False) for line in _glued(text).split("\n")
    ]
    return "\n".join(lines).replace(GLUE, " ")


def rows_table(title: str, rows: Sequence[dict[str, Any]], note: str = "") -> Table:
    """Return a table of rows by key; columns without any value are left out."""
    keys = dict.fromkeys(key for row in rows for key in row)
    columns = [key for key in keys if any(row.get(key) is not None for row in rows)]
    cells = [[as_cell(row.get(key)) for key in columns] for row in rows]
    return Table(title, [key.replace("_", " ") for key in columns], cells, [note] if note else [])


def as_cell(value: Any) -> Cell:
    """Convert a value of a configuration or of a file to one that a cell can hold."""
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
    """Return the number that a cell sorts by: its value, or the number at the start of its text.

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
    r"""Escape a text for LaTeX, symbols of the statistics in math mode.

    A character that its fonts lack is shown as its number.

    >>> tex("n_0 = 5 %, ~"), tex("-0.5 ± 1 ≤ x\x00\n中")
    ('n\\_0 = 5 \\%, \\textasciitilde{}', '$-$0.5 $\\pm$ 1 $\\le$ x\\textbackslash{}x00 U+4E2D')
    >>> print(tex("A_V - A_0 and G*, [2.0, infinity)"))
    $A_V - A_0$ and $G^*$, [2.0, $\infty$)
    """
    text = re.sub(r"(?<![\w.)-])-(?=[\d.])", "\u2212", " ".join(visible(text).split()))
    text = text.replace("->", "→")
    parts = MATH_SYMBOLS.split(text)
    return "".join(
        LATEX_SYMBOLS[part] if i % 2 else "".join(map(_tex_letter, part))
        for i, part in enumerate(parts)
    )


def _tex_letter(letter: str) -> str:
    if letter in LATEX_SPECIAL:
        return LATEX_SPECIAL[letter]
    if letter in "&%$#_{}":
        return f"\\{letter}"
    return letter if letter.isascii() else f"U+{ord(letter):04X}"


def tex_cell(cell: str) -> str:
    r"""Join a cell's lines to one LaTeX cell.

    The lines below its value, or its half interval, are small.

    >>> print(tex_cell("23.1\n[21.3, 25.0]"), tex_cell("0.378*"))
    23.1 {\scriptsize [21.3, 25.0]} 0.378*
    """
    value, *rest = cell.split("\n")
    return f"{tex(value)} {{\\scriptsize {tex(', '.join(rest))}}}" if rest else tex(value)


def _latex_row(cells: Sequence[str]) -> str:
    r"""Return a row of LaTeX.

    `{}` guards a row that begins with `[` or `*`, which the row before would read as its option.
    """
    text = " & ".join(cells)
    return ("{}" if text.lstrip()[:1] in ("[", "*") else "") + text + r" \\"


def plain(value: Any) -> str:
    r"""Return a value as one line of text that Markdown leaves as it is; None as an empty one.

    >>> print(plain("<b>[x](http://y)</b> | a_b"))
    &lt;b&gt;\[x\]\(http\://y\)&lt;/b&gt; \| a\_b
    """
    text = "" if value is None else "".join(c if c.isprintable() else " " for c in str(value))
    text = re.sub("[&<>]", lambda match: HTML_ENTITIES[match[0]], " ".join(text.split()))
    return MARKDOWN_SPECIAL.sub(r"\\\1", text)


def fenced(text: str, language: str = "") -> str:
    """Return a block of code for Markdown that no backticks of the text end.

    >>> print(fenced("a ``` b", "text"))
    ````text
    a ``` b
    ````
    """
    longest = max((len(run) for run in re.findall("`+", text)), default=0)
    fence = "`" * max(3, longest + 1)
    return f"{fence}{language}\n{text.rstrip()}\n{fence}"


def csv_text(rows: Sequence[dict[str, Any]]) -> str:
    r"""Return rows of equal keys as CSV; None becomes an empty field.

    A text that a spreadsheet would run begins with `'`, which `files.csv_rows` takes away again;
    invisible characters are spelt out.

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
    """Write rows of equal keys; None becomes an empty field."""
    folder.write(name, csv_text(rows))


def shorten(lines: Sequence[str], most: int, where: str) -> list[str]:
    """Return the first so many lines, and the number of further ones.

    >>> shorten(["a", "b", "c"], 1, "runs.csv")
    ['a', 'and 2 more, see runs.csv']
    """
    rest = len(lines) - most
    return [*lines[:most], f"and {rest} more, see {where}"] if rest > 0 else list(lines)


def enumeration(names: Sequence[str], word: str = "and") -> str:
    """Join names by commas, the last one by a word.

    >>> enumeration(["a"]), enumeration(["a", "b", "c"])
    ('a', 'a, b and c')
    """
    return f" {word} ".join(filter(None, (", ".join(names[:-1]), names[-1])))


def three_digits(value: float) -> str:
    """Format three significant digits, trailing zeros kept; thousands without an exponent.

    >>> [three_digits(x) for x in (0.001234, -0.5, 62.4, 2647.0, 1234567.0, math.inf)]
    ['0.00123', '-0.500', '62.4', '2650', '1.23e+06', 'infinity']
    """
    if math.isinf(value):
        return "infinity" if value > 0 else "-infinity"
    if 999.5 <= abs(value) < 999_500:
        return f"{float(f'{value:.3g}'):.0f}"
    return f"{value:#.3g}".removesuffix(".")


def number_text(value: float | str) -> str:
    """Format a number with four significant digits; a text stays as it is.

    >>> number_text(0.123456), number_text("<= 1"), number_text(-0.0)
    ('0.1235', '<= 1', '0')
    """
    return value if isinstance(value, str) else f"{value + 0.0:.4g}"


def with_interval(row: Mapping[str, Any], key: str, prefix: str = "") -> str | None:
    """Format a number with its interval after it, in `<prefix>low` and `<prefix>high`."""
    values = (row.get(name) for name in (key, f"{prefix}low", f"{prefix}high"))
    return closed_interval_text(
        Interval(*(x if isinstance(x, int | float) else math.nan for x in values))
    )


def closed_interval_text(value: Interval) -> str | None:
    """Format an estimate to three digits with both ends of its interval; None: it is unknown.

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
    """Format an estimate to three digits with its interval; `-` where it is not known.

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
    """Format an estimate of a row of a file, see `interval_text`."""
    return interval_text(row_interval(row, name))


def percent(share: float) -> str:
    """Format a signed share in percent, without decimals.

    >>> percent(0.094), percent(-0.004), percent(12.3), percent(math.inf)
    ('+9 %', '0 %', '+1230 %', 'no upper end')
    """
    if share == math.inf:
        return "no upper end"
    value = round(100 * share)
    return f"{value:+d} %" if value else "0 %"


def count_text(count: int, noun: str) -> str:
    """Format a number of things.

    >>> count_text(1, "question"), count_text(20, "question")
    ('1 question', '20 questions')
    """
    return f"{count} {noun}{'s' * (count != 1)}"


def interval_scope(questions: int) -> str:
    """Describe the scope of a study's intervals for new questions, by its number of questions.

    A few questions tell nothing of others, see `intervals.pool_mean_reward`.
    """
    if questions < MIN_QUESTIONS:
        return "of these questions"
    return "generalising to new questions"
