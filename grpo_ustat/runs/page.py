"""One self-contained HTML page: what was found, figures, tables and completions; no network.

What models wrote is hostile. Every text goes through jinja2's autoescape, or into a block of JSON
that no parser leaves, and from there into the page as text alone. The page's own style and script
are the only ones that its Content-Security-Policy lets run.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any


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
    flat = {run: _flat(config) for run, config in configurations.items()}
    keys = dict.fromkeys(key for config in flat.values() for key in config)
    found = {key: {run: config.get(key) for run, config in flat.items()} for key in keys}
    return {
        key: values
        for key, values in found.items()
        if len({json.dumps(value, default=str) for value in values.values()}) > 1
    }


def _flat(config: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    flat: dict[str, Any] = {}
    for key, value in config.items():
        inside = isinstance(value, Mapping) and value
        flat |= _flat(value, f"{prefix}{key}.") if inside else {f"{prefix}{key}": value}
    return flat


def render(page: Page) -> str:
    """The page's HTML, the same for the same page.

    Raises:
        ValueError: a row has not as many cells as its table has columns; a figure is no SVG.
    """
    return "<!doctype html>"
