"""Terminal output in which markup and control characters have no effect."""

from __future__ import annotations

import sys
from typing import Any

import rich.console
from rich.text import Text

from grpo_ustat.terminal.streams import visible


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
