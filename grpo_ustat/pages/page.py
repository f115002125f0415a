"""Self-contained HTML page with answer, figures, tables and completions; it needs no network.

The output of a model may contain HTML or scripts, which must not take effect. Every text passes
through jinja2's autoescape or is encoded in a JSON block, and no text can close this block. The
script inserts values from the block as text and never as HTML. The Content-Security-Policy allows
only the page's own style and script. Each figure is embedded as an image, because browsers run no
script and load no file from an image, whatever the SVG contains.
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
from markupsafe import Markup

from grpo_ustat.config.schema import flatten
from grpo_ustat.pages.caveats import is_warning
from grpo_ustat.pages.symbols import legend
from grpo_ustat.pages.tables import Cell, Table, as_cell, cell_text, sort_value
from grpo_ustat.terminal.streams import single_line, visible

NAME = "report.html"
TEMPLATES = Path(__file__).parent / "templates"
# Maximum width in pixels of a figure that leaves room for a second figure beside it.
WIDEST_HALF = 800
# Maximum width of a figure in points.
WIDEST_PICTURE = 100_000


@dataclass(frozen=True)
class Figure:
    """A figure."""

    # Title above the figure, also used as alternative text.
    title: str
    # Text of an SVG with a viewBox in points, as matplotlib writes it.
    svg: str
    # Text below the figure.
    caption: str = ""
    # Path of the CSV file with the figure's numbers, relative to the page; None if there is no
    # file.
    data: str | None = None

    @cached_property
    def width(self) -> int:
        """Width of the figure in pixels at its intended size.

        Raises:
            ValueError: If the text is not an SVG with a viewBox.
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
        """True if the figure is too wide to have another figure beside it."""
        return self.width > WIDEST_HALF

    @property
    def address(self) -> str:
        """The figure as a `data:` URL."""
        encoded = base64.b64encode(self.svg.encode(errors="replace")).decode()
        return f"data:image/svg+xml;base64,{encoded}"


def read_figure(
    file: Path, title: str, caption: str = "", data: str | None = None
) -> tuple[Figure | None, str]:
    """Read an SVG figure from a run folder.

    `Figure` describes `title`, `caption` and `data`.

    Returns:
        The figure and "", or None and the reason why it cannot be shown.
    """
    try:
        figure = Figure(title, file.read_text(), caption, data)
        _ = figure.width
    except (OSError, ValueError) as error:
        return None, single_line(error, 200)
    return figure, ""


@dataclass(frozen=True)
class Completions:
    """Completions that users can search and filter on a page."""

    # Rows with the keys `prompt`, `completion` and `reward`. Further keys, such as `run`, `step`,
    # `advantage`, `length`, `ended`, `prompt_id`, `answer` or `extracted`, are also shown. All rows
    # have the same keys.
    rows: Sequence[Mapping[str, Any]]
    # Sentence that describes how these completions were selected.
    note: str = ""


@dataclass(frozen=True)
class Page:
    """Content of a page."""

    # Title of the run or report.
    title: str
    # Main result, with one line for each kind of run.
    answer: str
    # Next step, usually a shell command; "" if there is none.
    next_step: str = ""
    # Warnings and other remarks, for example on parts that are missing.
    notes: Sequence[str] = ()
    # Names and values that describe the run.
    facts: Sequence[tuple[str, Cell]] = ()
    # Figure and table of the main result, shown side by side between the answer and the next step;
    # None if missing.
    lead: Figure | None = None
    overview: Table | None = None
    # Further figures and tables, shown below.
    figures: Sequence[Figure] = ()
    tables: Sequence[Table] = ()
    # None if there are no completions.
    completions: Completions | None = None
    # Nested configurations by run name. A single configuration is shown completely. For several
    # configurations, the page shows the keys that differ and the keys that all of them share.
    configurations: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)
    # Time, machine and command, shown after the notes; "" if unknown.
    provenance: str = ""


def differences(configurations: Mapping[str, Mapping[str, Any]]) -> dict[str, dict[str, Any]]:
    """Return the keys whose values differ between runs, in the form `key -> run -> value`.

    Args:
        configurations: Nested configurations by run name.

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
    """Return a single run's nested configuration, or the dotted keys that several runs share.

    >>> shared_configuration({"a": {"seed": 0, "x": {"y": 1}}, "b": {"seed": 1, "x": {"y": 1}}})
    {'x.y': 1}
    """
    if len(configurations) < 2:
        return {key: x for config in configurations.values() for key, x in config.items()}
    first, *others = map(flatten, configurations.values())
    return {k: x for k, x in first.items() if all(k in o and o[k] == x for o in others)}


def render(page: Page) -> str:
    """Return the HTML of a page; equal pages give equal text.

    Raises:
        ValueError: If completions have different keys, or a figure is not an SVG.
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
    # ASCII text has the same bytes in all common encodings.
    return html.encode("ascii", "xmlcharrefreplace").decode()


def provenance_line(what: str, time: str, host: str | None, command: str | None) -> str:
    """Return a line with the time, host and command that produced a run or a page.

    Args:
        what: First word of the line, a participle such as "made".
        time: Time in ISO format, UTC.
        host, command: Host name and command line; None if unknown.

    >>> provenance_line("made", "2026-03-01T04:20:59+00:00", "node7", "grpo-ustat mse")
    'made 2026-03-01 04:20 UTC on node7 by `grpo-ustat mse`'
    """
    moment = datetime.fromisoformat(time).astimezone(UTC).strftime("%Y-%m-%d %H:%M UTC")
    place = f" on {host}" if host else ""
    return f"{what} {moment}{place}" + (f" by `{command}`" if command else "")


def _printed(page: Page) -> Iterator[str]:
    """Yield all texts of a page except completions, configurations and differences."""
    yield from (page.title, page.answer, *page.notes)
    yield from (str(text) for fact in page.facts for text in fact)
    for table in filter(None, (page.overview, *page.tables)):
        yield from (table.title, *table.columns, *table.notes)
        yield from (cell for row in table.rows for cell in row if isinstance(cell, str))
    for figure in filter(None, (page.lead, *page.figures)):
        yield from (figure.title, figure.caption)
        yield from re.findall(">([^<>]+)</(?:text|tspan)>", figure.svg)


def difference_table(difference: Mapping[str, Mapping[str, Any]]) -> Table:
    """Return a table of the differing keys, with one row per run and one column per key.

    If there are more keys than runs, rows and columns are exchanged.
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
    """Encode rows as JSON that is safe in a `script` element: ASCII without `<`, `>` and `&`.

    A prompt that several completions share is written only once.

    Raises:
        ValueError: If the rows have different keys.
    """
    keys = list(completions.rows[0]) if completions.rows else []
    for row in completions.rows:
        if list(row) != keys:
            raise ValueError(f"completions have different keys: {keys} and {list(row)}")

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
    """Return the Content-Security-Policy of the page.

    It allows only the page's own style, script and embedded images.
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
        """Return a relative link to a file in the folder of the page."""
        return "./" + quote(path.replace("\\", "/").lstrip("/"))

    environment.filters |= {"visible": visible, "cell": cell_text, "beside": beside}
    environment.filters["sort_value"] = sort_value
    environment.tests["warns"] = is_warning
    return environment.get_template("page.html.j2")
