"""Argument parser of the verbs that do not use Hydra, with one-line errors."""

from __future__ import annotations

import argparse
import shutil
import sys
import textwrap
from collections.abc import Mapping
from typing import Any, NoReturn

from grpo_ustat.cli.verbs import VERBS
from grpo_ustat.config.command_line import command_line
from grpo_ustat.config.schema import did_you_mean
from grpo_ustat.terminal.streams import beside, visible

# Minimum and maximum width of a help text and width of its left column, in characters.
NARROWEST, WIDEST, LEFT = 60, 100, 24


class VerbParser(argparse.ArgumentParser):
    """Argument parser whose errors are one line with the words to type, without the usage.

    Args:
        verb: a key of `VERBS`.
        purpose: first part of the help; blank lines separate paragraphs.
        examples: arguments to copy, each with a comment.
        values: NAME=VALUE arguments, each with its meaning.
    """

    def __init__(
        self,
        verb: str,
        purpose: str,
        examples: Mapping[str, str],
        values: Mapping[str, str] | None = None,
    ) -> None:
        super().__init__(prog=command_line(verb))
        self.verb, self.words = verb, list[str]()
        self._purpose, self._examples, self._values = purpose, examples, values or {}

    def format_help(self) -> str:
        """Return the help: purpose, examples and arguments."""
        width = max(NARROWEST, shutil.get_terminal_size().columns)
        lines = list[str]()
        for paragraph in self._purpose.strip().split("\n\n"):
            lines += [*textwrap.wrap(paragraph, min(width, WIDEST)), ""]
        for words, comment in self._examples.items():
            line = f"  {command_line(self.verb)} {words}".rstrip()
            is_long = len(f"{line}  # {comment}") > width
            lines += [f"  # {comment}", line] if is_long else [f"{line}  # {comment}"]
        arguments = super().format_help().rstrip().splitlines()
        arguments += [""] if self._values else []
        for name, meaning in self._values.items():
            arguments += beside(f"  {name}", meaning, LEFT, width)
        return "\n".join([*lines, "", *arguments, ""])

    def parse_known_args(self, args: Any = None, namespace: Any = None) -> Any:
        """Parse the arguments, and store their words for error messages."""
        self.words = list[str](sys.argv[1:] if args is None else args)
        return super().parse_known_args(args, namespace)

    def error(self, message: str) -> NoReturn:
        """Print a one-line error message and exit with code 2."""
        print(visible(f"error: {self.verb}: {self._line(message)}"), file=sys.stderr)
        raise SystemExit(2)

    def _line(self, message: str) -> str:
        """Return an error message of argparse with the words to type instead."""
        options = [x for action in self._actions for x in action.option_strings if x[:2] == "--"]
        typed = [word.partition("=")[0] for word in self.words if word.startswith("--")]
        unknown = [word for word in typed if not any(name.startswith(word) for name in options)]
        if unknown:
            near = did_you_mean(unknown[0], options)
            return f"unknown {unknown[0]}: {near}choose from {', '.join(options)}"
        return f"{message}, as in {command_line(self.verb, *VERBS[self.verb].example)}"
