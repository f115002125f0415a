"""One self-contained HTML page: what was found, figures, tables and completions; no network.

What models wrote is hostile. Every text goes through jinja2's autoescape, or into a block of JSON
that no parser leaves, and from there into the page as text alone. The page's own style and script
are the only ones that its Content-Security-Policy lets run.
"""

from __future__ import annotations

import base64
import hashlib
import json
import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any
from urllib.parse import quote

import yaml
from jinja2 import Environment, FileSystemLoader, StrictUndefined
from markupsafe import Markup

from grpo_ustat.nested import flat
from grpo_ustat.runs.svg import dark_rules, inlined

NAME = "report.html"
TEMPLATES = Path(__file__).parent / "templates"
MISSING = "–"
Cell = str | int | float | bool | None


@dataclass(frozen=True)
class Table:
    """A table that sorts by click.

    Attributes:
        title: above it.
        columns: their names.
        rows: a cell for every column; a text such as `0.35 [0.18, 0.57]` sorts by its first number,
            None is missing and comes last.
        note: below it: intervals over what, counts, what is missing and why.
    """

    title: str
    columns: Sequence[str]
    rows: Sequence[Sequence[Cell]]
    note: str = ""


@dataclass(frozen=True)
class Figure:
    """A picture.

    Attributes:
        title: above it, and its name for those who do not see it.
        svg: text of a matplotlib SVG, made with `svg.fonttype: none`.
        caption: below it.
        data: path, relative to the page, of the CSV that it shows.
    """

    title: str
    svg: str
    caption: str = ""
    data: str | None = None


@dataclass(frozen=True)
class Completions:
    """What models wrote, to be searched and filtered by reward.

    Attributes:
        rows: with the keys `prompt`, `completion` and `reward`; others, such as `run`, `step`,
            `advantage`, `length`, `ended`, `prompt_id`, `answer` or `extracted`, are shown too.
            All rows have the same keys.
        note: which these are, of how many.
    """

    rows: Sequence[Mapping[str, Any]]
    note: str = ""


@dataclass(frozen=True)
class Page:
    """What a page shows, in this order.

    Attributes:
        title: of the run or the report.
        answer: what was found, in one sentence.
        notes: warnings and what is missing, a line each.
        facts: what was run: names and values.
        overview: a table that says most of it, above all figures; None where there is none.
        figures, tables: see there.
        completions: None where there are none.
        difference: configuration keys whose values differ between runs, `key -> run -> value`; see
            `differences`.
        configuration: of the one run, or what all runs share; None shows none.
    """

    title: str
    answer: str
    notes: Sequence[str] = ()
    facts: Sequence[tuple[str, Cell]] = ()
    overview: Table | None = None
    figures: Sequence[Figure] = ()
    tables: Sequence[Table] = ()
    completions: Completions | None = None
    difference: Mapping[str, Mapping[str, Any]] | None = None
    configuration: Mapping[str, Any] | None = None


def differences(configurations: Mapping[str, Mapping[str, Any]]) -> dict[str, dict[str, Any]]:
    """The keys whose values differ between runs, `key -> run -> value`.

    Args:
        configurations: nested ones, by the run's name.

    >>> differences({"a": {"seed": 0, "model": {"name": "x"}}, "b": {"seed": 1, "model": {}}})
    {'seed': {'a': 0, 'b': 1}, 'model.name': {'a': 'x', 'b': None}}
    >>> differences({"a": {"seed": 0}, "b": {"seed": 0}})
    {}
    """
    runs = {run: flat(config) for run, config in configurations.items()}
    keys = dict.fromkeys(key for config in runs.values() for key in config)
    found = {key: {run: config.get(key) for run, config in runs.items()} for key in keys}
    return {
        key: values
        for key, values in found.items()
        if len({json.dumps(value, default=str) for value in values.values()}) > 1
    }


def render(page: Page) -> str:
    """The page's HTML; equal pages give equal text.

    Raises:
        ValueError: a row has not as many cells as its table has columns, completions have not the
            same keys, or a figure is not matplotlib's SVG.
    """
    pictures = [inlined(one.svg, f"figure-{i}") for i, one in enumerate(page.figures, 1)]
    dark = "".join(dark_rules({colour for one in pictures for colour in one.colours}))
    style = _asset("page.css").replace("/* dark colours of figures */", dark)
    script = _asset("page.js")
    difference = [difference_table(page.difference)] if page.difference else []
    text = _template().render(
        page=page,
        policy=_policy(style, script),
        style=Markup(style),
        script=Markup(script),
        figures=list(zip(page.figures, pictures, strict=True)),
        overview=[_laid_out(page.overview)] if page.overview else [],
        tables=[_laid_out(table) for table in page.tables],
        difference=[_laid_out(table) for table in difference],
        completions=Markup(completions_json(page.completions)) if page.completions else None,
        configuration=_yaml(page.configuration) if page.configuration else None,
    )
    return text.encode("ascii", "xmlcharrefreplace").decode()  # the same in every encoding


def difference_table(difference: Mapping[str, Mapping[str, Any]]) -> Table:
    """A row for every run and a column for every key whose values differ; or the other way round,
    where there are more keys than runs.
    """
    runs = list(dict.fromkeys(run for values in difference.values() for run in values))
    rows = [
        [key, *(as_cell(values.get(run)) for run in runs)] for key, values in difference.items()
    ]
    columns = ["key", *runs]
    if len(rows) <= len(runs):
        columns, *rows = map(list, zip(["run", *runs], *rows, strict=True))
    return Table("What differs between the runs", columns, rows)


def as_cell(value: Any) -> Cell:
    """A value of a configuration or of a file as what a cell can hold."""
    return value if isinstance(value, Cell) else json.dumps(value, default=str)


@dataclass(frozen=True)
class _LaidOut:
    """A table as the template takes it: texts, and the number that each sorts by."""

    table: Table
    numeric: list[bool]
    rows: list[list[tuple[str, float | None]]]


def _laid_out(table: Table) -> _LaidOut:
    for row in table.rows:
        if len(row) != len(table.columns):
            raise ValueError(
                f"table {table.title!r} has {len(table.columns)} columns and a row of {len(row)}"
            )
    rows = [[(cell_text(cell), sort_value(cell)) for cell in row] for row in table.rows]
    numeric = [
        all(value is not None for text, value in column if text != MISSING)
        for column in zip(*rows, strict=True)
    ]
    return _LaidOut(table, numeric or [False] * len(table.columns), rows)


def cell_text(cell: Cell) -> str:
    """What a cell shows.

    >>> cell_text(0.123456), cell_text(12), cell_text(True), cell_text(None)
    ('0.1235', '12', 'yes', '–')
    """
    if cell in (None, "", "-"):
        return MISSING
    if isinstance(cell, bool):
        return "yes" if cell else "no"
    return f"{cell:.4g}" if isinstance(cell, float) else visible(str(cell))


NUMBER = re.compile(r"[-+]?(\d+(\.\d*)?|\.\d+)(e[-+]?\d+)?(?![\w.-])", re.IGNORECASE)


def sort_value(cell: Cell) -> float | None:
    """The number that a cell sorts by: its own, or what its text begins with.

    >>> sort_value("0.35 [0.18, 0.57]"), sort_value("12 %"), sort_value(3)
    (0.35, 12.0, 3.0)
    >>> sort_value("2024-11-22"), sort_value("tiny"), sort_value(None)
    (None, None, None)
    """
    if cell is None or isinstance(cell, bool):
        return None
    if isinstance(cell, str):
        found = NUMBER.match(cell.strip())
        return float(found[0]) if found else None
    return float(cell) if math.isfinite(cell) else None


# Control characters, and those that turn the direction of the text around them.
UNSEEN = re.compile(
    "[\x00-\x08\x0b-\x1f\x7f-\x9f\u200e\u200f\u2028-\u202e\u2066-\u2069\ud800-\udfff]"
)


def visible(text: str) -> str:
    r"""The text with unseen characters spelt out: terminal escapes, nulls, turns of direction.

    >>> visible("a\x1b[31mb\x00\u202ec\n")
    'a\\x1b[31mb\\x00\\u202ec\n'
    """
    return UNSEEN.sub(lambda found: ascii(found[0])[1:-1], text)


def completions_json(completions: Completions) -> str:
    """Rows as JSON that is safe within a `script` element: no `<`, no `>`, no `&`, ASCII alone.

    A prompt that many completions share is held once.
    """
    keys = list(completions.rows[0]) if completions.rows else []
    for row in completions.rows:
        if list(row) != keys:
            raise ValueError(f"completions have not the same keys: {keys} and {list(row)}")
    prompts = dict.fromkeys(row["prompt"] for row in completions.rows)
    places = {prompt: i for i, prompt in enumerate(prompts)}
    rows = [
        [places[v] if k == "prompt" else _plain(v) for k, v in row.items()]
        for row in completions.rows
    ]
    held = {"keys": keys, "prompts": [_plain(prompt) for prompt in prompts], "rows": rows}
    text = json.dumps(held, separators=(",", ":"), allow_nan=False)
    for character in "<>&":
        text = text.replace(character, f"\\u{ord(character):04x}")
    return text


def _plain(value: Any) -> Any:
    if isinstance(value, str):
        return visible(value)
    return str(value) if isinstance(value, float) and not math.isfinite(value) else value


def _yaml(configuration: Mapping[str, Any]) -> str:
    return visible(yaml.safe_dump(dict(configuration), sort_keys=False, allow_unicode=True))


def _policy(style: str, script: str) -> str:
    """What a browser may do for the page: apply its style, run its script, nothing else."""
    return "; ".join(
        (
            "default-src 'none'",
            f"style-src '{_hash(style)}'",
            f"script-src '{_hash(script)}'",
            "img-src data:",
            "base-uri 'none'",
            "form-action 'none'",
            "require-trusted-types-for 'script'",
            "trusted-types 'none'",
        )
    )


def _hash(text: str) -> str:
    return "sha256-" + base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()


def _beside(path: str) -> str:
    """A link to a file beside the page, never to another place."""
    return "./" + quote(path.replace("\\", "/").lstrip("/"))


@cache
def _asset(name: str) -> str:
    return (TEMPLATES / name).read_text()


@cache
def _template():
    environment = Environment(
        loader=FileSystemLoader(TEMPLATES), autoescape=True, undefined=StrictUndefined,
        trim_blocks=True, lstrip_blocks=True, keep_trailing_newline=True,
    )  # fmt: skip
    environment.filters |= {"visible": visible, "cell": cell_text, "beside": _beside}
    return environment.get_template("page.html.j2")
