"""Data as text on a terminal: none of it is markup, and no control character acts."""

from __future__ import annotations

import re
import sys
import textwrap
from typing import Any, TextIO

import rich.console
from rich.text import Text

from grpo_ustat.terminal.streams import visible


def excerpt(text: str, most: int) -> str:
    """Return a text that is not longer than `most` characters; of a longer one both ends.

    >>> excerpt("a name", 9), excerpt("a very long name", 9)
    ('a name', 'a ve…name')
    """
    if len(text) <= most:
        return text
    half = (most - 1) // 2
    return f"{text[: most - 1 - half]}…{text[-half:]}"


def wrapped(text: str, width: int = 80) -> str:
    """Break a sentence into lines, but no number from its percent sign, nor a name from its value.

    >>> print(wrapped("of them 12 % are equal, G = 2", 11))
    of them
    12 % are
    equal,
    G = 2
    """
    glued = re.sub(r"(?<=\d) %| = ", lambda match: match[0].replace(" ", "\0"), text)
    lines = textwrap.fill(glued, width, break_long_words=False, break_on_hyphens=False)
    return lines.replace("\0", " ")


def tell(*lines: str, file: TextIO | None = None) -> None:
    """Print lines, by default on standard output."""
    for line in lines:
        print(visible(line), file=file or sys.stdout)


class Console(rich.console.Console):
    """Rich's console, in which a text is a text.

    Styles come from `style=` and `rich.text.Text` alone.
    """

    def __init__(self, **options: Any):
        settings: dict[str, Any] = {"markup": False, "highlight": False, "emoji": False}
        super().__init__(**settings | options)

    def render_str(self, text: str, **options: Any) -> Text:
        """Render a text or a table's cell, with invisible characters spelt out."""
        return super().render_str(visible(text), **options)


def warn(text: str) -> None:
    """Print a line in red on standard error, above bars that are drawn there."""
    console = Console(stderr=True, soft_wrap=True)
    with console.capture() as capture:
        console.print(f"warning: {text}", style="bold red")
    print(capture.get(), end="", file=sys.stderr)  # which a console of its own would go round
