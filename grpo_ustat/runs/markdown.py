"""Markdown from texts that others wrote: nothing in them becomes a link, a heading or HTML."""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from typing import Any

PUNCTUATION = re.compile(r"([\\`*_{}\[\]()#|~$@]|:(?=//)|(?<=www)\.)")  # the last two: bare links
ENTITIES = {"&": "&amp;", "<": "&lt;", ">": "&gt;"}


def plain(value: Any) -> str:
    r"""A value as one line of text that Markdown leaves as it is; None as an empty one.

    >>> print(plain("<b>[x](http://y)</b> | a_b"))
    &lt;b&gt;\[x\]\(http\://y\)&lt;/b&gt; \| a\_b
    """
    text = re.sub("[&<>]", lambda found: ENTITIES[found[0]], _line(value))
    return PUNCTUATION.sub(r"\\\1", text)


def table(header: Sequence[str], rows: Iterable[Sequence[Any]]) -> str:
    """A table of values as `plain` shows them, headers too."""
    lines = [header, *rows]
    shown = ["| " + " | ".join(map(plain, cells)) + " |" for cells in lines]
    return "\n".join([shown[0], "|---" * len(header) + "|", *shown[1:]])


def fenced(text: str, language: str = "") -> str:
    """A block of code that no backticks of the text end.

    >>> print(fenced("a ``` b", "text"))
    ````text
    a ``` b
    ````
    """
    longest = max((len(run) for run in re.findall("`+", text)), default=0)
    fence = "`" * max(3, longest + 1)
    return f"{fence}{language}\n{text.rstrip()}\n{fence}"


def _line(value: Any) -> str:
    """Without line breaks and characters that show nothing."""
    if value is None:
        return ""
    return " ".join("".join(c if c.isprintable() else " " for c in str(value)).split())
