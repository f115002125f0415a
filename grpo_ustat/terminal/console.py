"""Terminal output in which markup and control characters have no effect."""

from __future__ import annotations

import re
import sys
import textwrap
from typing import Any

import rich.console
from rich.text import Text

from grpo_ustat.terminal.streams import visible


def excerpt(text: str, most: int) -> str:
    """Shorten a text to at most `most` characters by replacing its middle with an ellipsis.

    >>> excerpt("a name", 9), excerpt("a very long name", 9)
    ('a name', 'a ve…name')
    """
    if len(text) <= most:
        return text
    half = (most - 1) // 2
    return f"{text[: most - 1 - half]}…{text[-half:]}"


def wrapped(text: str, width: int = 80) -> str:
    """Wrap a sentence without breaking lines before `%` or around `=`.

    >>> print(wrapped("of them 12 % are equal, G = 2", 11))
    of them
    12 % are
    equal,
    G = 2
    """
    glued = re.sub(r"(?<=\d) %| = ", lambda match: match[0].replace(" ", "\0"), text)
    lines = textwrap.fill(glued, width, break_long_words=False, break_on_hyphens=False)
    return lines.replace("\0", " ")


class Console(rich.console.Console):
    """Rich console that ignores markup; styles come only from `style=` or `rich.text.Text`."""

    def __init__(self, **options: Any):
        settings: dict[str, Any] = {"markup": False, "highlight": False, "emoji": False}
        super().__init__(**settings | options)

    def render_str(self, text: str, **options: Any) -> Text:
        """Render a text or a table cell with invisible characters as escape sequences."""
        return super().render_str(visible(text), **options)


def warn(text: str) -> None:
    """Print a warning in red on standard error, above any progress bars."""
    console = Console(stderr=True, soft_wrap=True)
    with console.capture() as capture:
        console.print(f"warning: {text}", style="bold red")
    # Printing directly to a second console would overwrite the progress bars.
    print(capture.get(), end="", file=sys.stderr)
