"""One self-contained HTML page: the answer, figures, tables and completions; no network.

What models wrote is hostile. Every text goes through jinja2's autoescape, or into a block of JSON
that no parser leaves, and from there into the page only as text. The page's own style and script
are the only ones that its Content-Security-Policy lets run. A figure is an image of the page: in an
image no script runs and nothing is loaded, whatever the SVG holds.
"""

from __future__ import annotations

import base64
import hashlib
import json
import math
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import UTC, datetime
from functools import cache, cached_property
from pathlib import Path
from typing import Any
from urllib.parse import quote
from xml.etree import ElementTree

import yaml
from jinja2 import Environment, FileSystemLoader, StrictUndefined, Template
from markupsafe import Markup, escape

from grpo_ustat.config.schema import flatten
from grpo_ustat.pages.caveats import is_warning
from grpo_ustat.pages.symbols import legend, parts
from grpo_ustat.pages.tables import Cell, Table, as_cell, cell_text, sort_value
from grpo_ustat.terminal.streams import single_line, visible

NAME = "report.html"
TEMPLATES = Path(__file__).parent / "templates"
# Pixels of a picture that leaves room for another beside it.
WIDEST_HALF = 800
# Points.
WIDEST_PICTURE = 100_000


@dataclass(frozen=True)
class Figure:
    """A picture."""

    # Above it, and its name for those who do not see it.
    title: str
    # Text of an SVG with a viewBox in points, as matplotlib writes it.
    svg: str
    # Below it.
    caption: str = ""
    # Path, relative to the page, of the CSV that it shows; None: it shows none.
    data: str | None = None

    @cached_property
    def width(self) -> int:
        """Width in pixels at the size that it was drawn for.

        Raises:
            ValueError: it is no picture.
        """
        try:
            root = ElementTree.fromstring(self.svg)
            _, _, width, _ = map(float, root.get("viewBox", "").split())
        except (ElementTree.ParseError, ValueError) as error:
            raise ValueError(f"not an SVG with a viewBox: {error}") from error
        if root.tag != "{http://www.w3.org/2000/svg}svg" or not 0 < width < WIDEST_PICTURE:
            raise ValueError(f"not an SVG with a viewBox: it is <{root.tag}>, {width:g} wide")
        return round(width * 4 / 3)

    @property
    def is_wide(self) -> bool:
        """True if it is wider than a phone can show by shrinking it."""
        return self.width > WIDEST_HALF

    @property
    def address(self) -> str:
        """Picture itself as a `data:` address."""
        encoded = base64.b64encode(self.svg.encode(errors="replace")).decode()
        return f"data:image/svg+xml;base64,{encoded}"


def read_figure(
    file: Path, title: str, caption: str = "", data: str | None = None
) -> tuple[Figure | None, str]:
    """Read the picture of a run, an SVG: it and an empty text, or None and why it is not shown.

    For `title`, `caption` and `data` see `Figure`.
    """
    try:
        figure = Figure(title, file.read_text(), caption, data)
        _ = figure.width
    except (OSError, ValueError) as error:
        return None, single_line(error, 200)
    return figure, ""


@dataclass(frozen=True)
class Completions:
    """Texts that models wrote, to be searched and filtered by reward."""

    # With the keys `prompt`, `completion` and `reward`; others, such as `run`, `step`, `advantage`,
    # `length`, `ended`, `prompt_id`, `answer` or `extracted`, are shown too. All rows have the same
    # keys.
    rows: Sequence[Mapping[str, Any]]
    # A sentence on which completions these are, of how many.
    note: str = ""


@dataclass(frozen=True)
class Page:
    """The content of a page; the provenance follows the notes."""

    # Of the run or the report.
    title: str
    # To the question asked of the runs, a line for each kind of runs.
    answer: str
    # Mostly a command to copy into a shell; "" shows none.
    next_step: str = ""
    # Warnings, and lines on what is missing.
    notes: Sequence[str] = ()
    # Names and values of what was run.
    facts: Sequence[tuple[str, Cell]] = ()
    # The picture and the table of the main result, side by side below the answer and before the
    # next step; None where there are none.
    lead: Figure | None = None
    overview: Table | None = None
    # Further ones, below.
    figures: Sequence[Figure] = ()
    tables: Sequence[Table] = ()
    # None where there are none.
    completions: Completions | None = None
    # Nested ones, by the run's name: one is shown whole; of several, the differing keys and the
    # shared ones are shown.
    configurations: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)
    # Time, machine and command; "" where they are not known.
    provenance: str = ""


def differences(configurations: Mapping[str, Mapping[str, Any]]) -> dict[str, dict[str, Any]]:
    """Return the keys whose values differ between runs, `key -> run -> value`.

    Args:
        configurations: nested ones, by the run's name.

    >>> differences({"a": {"seed": 0, "model": {"name": "x"}}, "b": {"seed": 1, "model": {}}})
    {'seed': {'a': 0, 'b': 1}, 'model.name': {'a': 'x', 'b': None}}
    >>> differences({"a": {"seed": 0}, "b": {"seed": 0}})
    {}
    """
    runs = {run: flatten(config) for run, config in configurations.items()}
    keys = dict.fromkeys(key for config in runs.values() for key in config)
    by_key = {key: {run: config.get(key) for run, config in runs.items()} for key in keys}
    return {
        key: values
        for key, values in by_key.items()
        if len({json.dumps(value, default=str) for value in values.values()}) > 1
    }


def shared_configuration(configurations: Mapping[str, Mapping[str, Any]]) -> dict[str, Any]:
    """Return the configuration of a single run, or the keys on which several runs agree.

    The former is as it is, the latter are dotted.

    >>> shared_configuration({"a": {"seed": 0, "x": {"y": 1}}, "b": {"seed": 1, "x": {"y": 1}}})
    {'x.y': 1}
    """
    if len(configurations) < 2:
        return {key: x for config in configurations.values() for key, x in config.items()}
    first, *others = map(flatten, configurations.values())
    return {k: x for k, x in first.items() if all(k in o and o[k] == x for o in others)}


def render(page: Page) -> str:
    """Return the page's HTML; equal pages give equal text.

    Raises:
        ValueError: completions have not the same keys, or a figure is no SVG.
    """
    style, script = _asset("page.css"), _asset("page.js")
    difference = differences(page.configurations)
    shared = shared_configuration(page.configurations)
    configuration = yaml.safe_dump(shared, sort_keys=False, allow_unicode=True) if shared else ""
    html = _template().render(
        page=page,
        symbols=legend(_printed(page)),
        policy=_content_policy(style, script),
        style=Markup(style),
        script=Markup(script),
        difference=difference_table(difference) if difference else None,
        completions=Markup(completions_json(page.completions)) if page.completions else None,
        configuration=visible(configuration),
    )
    # The text is the same in every encoding.
    return html.encode("ascii", "xmlcharrefreplace").decode()


def provenance_line(what: str, time: str, host: str | None, command: str | None) -> str:
    """Return a line on the time, machine and command by which a run or a page was made.

    Args:
        what: the participle that begins it.
        time: in ISO format, UTC.
        host, command: None where not known.

    >>> provenance_line("made", "2026-03-01T04:20:59+00:00", "node7", "grpo-ustat mse")
    'made 2026-03-01 04:20 UTC on node7 by `grpo-ustat mse`'
    """
    moment = datetime.fromisoformat(time).astimezone(UTC).strftime("%Y-%m-%d %H:%M UTC")
    place = f" on {host}" if host else ""
    return f"{what} {moment}{place}" + (f" by `{command}`" if command else "")


def _printed(page: Page) -> Iterator[str]:
    """Yield all texts of a page except completions, configuration and differences."""
    yield from (page.title, page.answer, *page.notes)
    yield from (str(text) for fact in page.facts for text in fact)
    for table in filter(None, (page.overview, *page.tables)):
        yield from (table.title, *table.columns, *table.notes)
        yield from (cell for row in table.rows for cell in row if isinstance(cell, str))
    for figure in filter(None, (page.lead, *page.figures)):
        yield from (figure.title, figure.caption)
        yield from re.findall(">([^<>]+)</(?:text|tspan)>", figure.svg)


def _explained(text: str) -> Markup:
    """Return the text, escaped, with the meaning of each symbol where it is pointed at."""
    pieces = (
        escape(piece)
        if meaning is None
        else Markup('<abbr title="{}">{}</abbr>').format(meaning, piece)  # noqa: S704
        for piece, meaning in parts(text)
    )
    return Markup("").join(pieces)


def difference_table(difference: Mapping[str, Mapping[str, Any]]) -> Table:
    """Return a table with a row for every run and a column for every key whose values differ.

    It is the other way round where there are more keys than runs.
    """
    runs = list(dict.fromkeys(run for values in difference.values() for run in values))
    rows = [
        [key, *(as_cell(values.get(run)) for run in runs)] for key, values in difference.items()
    ]
    columns = ["key", *runs]
    if len(rows) <= len(runs):
        columns, *rows = map(list, zip(["run", *runs], *rows, strict=True))
    return Table("What differs between the runs", columns, rows)


def completions_json(completions: Completions) -> str:
    """Encode rows as JSON that is safe within a `script` element: ASCII without `<`, `>` and `&`.

    A prompt that many completions share is written once.

    Raises:
        ValueError: the rows have not the same keys.
    """
    keys = list(completions.rows[0]) if completions.rows else []
    for row in completions.rows:
        if list(row) != keys:
            raise ValueError(f"completions have not the same keys: {keys} and {list(row)}")

    def json_value(value: Any) -> Any:
        if isinstance(value, str):
            return visible(value)
        return str(value) if isinstance(value, float) and not math.isfinite(value) else value

    prompts = dict.fromkeys(row["prompt"] for row in completions.rows)
    places = {prompt: i for i, prompt in enumerate(prompts)}
    rows = [
        [places[v] if k == "prompt" else json_value(v) for k, v in row.items()]
        for row in completions.rows
    ]
    content = {"keys": keys, "prompts": [json_value(prompt) for prompt in prompts], "rows": rows}
    text = json.dumps(content, separators=(",", ":"), allow_nan=False)
    for character in "<>&":
        text = text.replace(character, f"\\u{ord(character):04x}")
    return text


def _content_policy(style: str, script: str) -> str:
    """Return the page's Content-Security-Policy.

    A browser may apply the page's style, run its script and show its own images, nothing else.
    """

    def source(text: str) -> str:
        digest = hashlib.sha256(text.encode()).digest()
        return "'sha256-" + base64.b64encode(digest).decode() + "'"

    return "; ".join(
        (
            "default-src 'none'",
            f"style-src {source(style)}",
            f"script-src {source(script)}",
            "img-src data:",
            "base-uri 'none'",
            "form-action 'none'",
            "require-trusted-types-for 'script'",
            "trusted-types 'none'",
        )
    )


@cache
def _asset(name: str) -> str:
    return (TEMPLATES / name).read_text()


@cache
def _template() -> Template:
    environment = Environment(
        loader=FileSystemLoader(TEMPLATES), autoescape=True, undefined=StrictUndefined,
        trim_blocks=True, lstrip_blocks=True, keep_trailing_newline=True,
    )  # fmt: skip

    def beside(path: str) -> str:
        """Return a link to a file beside the page, never to another place."""
        return "./" + quote(path.replace("\\", "/").lstrip("/"))

    environment.filters |= {"visible": visible, "cell": cell_text, "beside": beside}
    environment.filters |= {"sort_value": sort_value, "explained": _explained}
    environment.tests["warns"] = is_warning
    return environment.get_template("page.html.j2")
