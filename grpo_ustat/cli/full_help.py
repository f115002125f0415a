"""`--help all`: purpose, example commands, config groups with choices, and all fields.

The page shows the values that the rest of the command line sets. Words without `=` are search
words, as in `grpo-ustat train --help clip`.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator
from dataclasses import replace
from itertools import groupby

from rich.console import Console, RenderableType
from rich.padding import Padding
from rich.table import Table
from rich.text import Text

from grpo_ustat.cli.options import CommandOptions, Field
from grpo_ustat.config.command_line import command_line
from grpo_ustat.config.schema import ConfigError

# Smallest terminal width at which descriptions are beside the fields instead of below them.
SIDE_BY_SIDE_COLUMNS = 110
# Largest width of a help page in columns.
MAX_COLUMNS = 160
# Largest number of characters of a value; longer values are truncated.
LONGEST_VALUE = 48
NAME, VALUE, DIM, TITLE = "cyan", "green", "dim", "bold"


def show_full_help(page: CommandOptions, search: list[str]) -> None:
    """Print all options of a command, or those that contain all search words (in lower case)."""
    if search:
        page = _search(page, search)

    console = Console(highlight=False, markup=False, emoji=False)
    console.width = min(console.width, MAX_COLUMNS)
    with console.capture() as capture:
        if not search:
            for part in _opening(page):
                command = isinstance(part, str)
                console.print(part, soft_wrap=command, style=NAME if command else None)
        for part in _groups_and_fields(page, wide=console.width >= SIDE_BY_SIDE_COLUMNS):
            console.print(part)
    try:
        print("\n".join(line.rstrip() for line in capture.get().splitlines()), flush=True)
    # The reader of the pipe, such as head, has closed it. The null device receives the rest, so
    # that the interpreter does not fail at exit.
    except BrokenPipeError:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


def _search(page: CommandOptions, search: list[str]) -> CommandOptions:
    """Return the groups and fields whose texts contain every word."""

    def holds_all(*texts: str) -> bool:
        return all(word in " ".join(texts).lower() for word in search)

    fields = [
        field
        for field in page.fields
        if holds_all(field.key.path, field.key.meaning, *field.key.choices, field.key.unit)
    ]
    groups = []
    for group in page.groups:
        choices = tuple(x for x in group.choices if holds_all(group.name, x.name, x.words))
        if choices or holds_all(group.name, group.meaning):
            groups.append(replace(group, choices=choices or group.choices))
    if not (fields or groups):
        raise ConfigError(f"--help has no match for {' '.join(search)!r}: use fewer words")
    return replace(page, fields=tuple(fields), groups=tuple(groups))


def _opening(page: CommandOptions) -> Iterator[RenderableType]:
    """Yield purpose, example commands (plain strings) and further uses of `--help`."""
    yield Text(page.purpose + "\n")
    for command, words in page.commands:
        yield Text(f"  # {words}", DIM)
        yield f"  {command}"
    me = command_line(page.entry)
    more = {f"{me} --help WORD": "search this help for a word"}
    if page.groups:
        more[f"{me} --help model=NAME"] = "fields that this choice sets"
        more[f"{me} -m field=a,b"] = "one run per value"
    more[f"{me} -c job"] = "all fields as YAML"
    table = Table.grid(padding=(0, 2))
    for command, words in more.items():
        table.add_row(Text(command, NAME), Text(words, DIM))
    yield Padding(table, (1, 0, 0, 0))


def _groups_and_fields(page: CommandOptions, wide: bool) -> Iterator[RenderableType]:
    if page.groups:
        yield _title(
            "Groups",
            "of fields: NAME=CHOICE sets several fields together; * marks the current choice",
        )
    for group in page.groups:
        name = f"{group.name}=" if group.settable else group.name
        yield Text.assemble((f"\n{name}", TITLE), f"  {group.meaning}")
        table = Table.grid(padding=(0, 2, 0, 0))
        for choice in group.choices:
            mark = "*" if choice.name == group.chosen else " "
            cell = Text.assemble(f"  {mark} ", (choice.name, NAME), no_wrap=True)
            table.add_row(cell, choice.words)
        yield table
    if page.fields:
        yield _title(
            "Fields", "field=value, with the values that this command line has; ???: must be set"
        )
    for node, fields in groupby(sorted(page.fields, key=lambda f: bool(_node(f))), key=_node):
        meaning = page.nodes.get(node)
        yield Text.assemble((f"\n{node or 'the run'}", TITLE), f": {meaning}" if meaning else "")
        table = Table.grid(padding=(0, 2))
        for field in fields:
            key, value = field.key, field.value
            value = value if len(value) <= LONGEST_VALUE else value[: LONGEST_VALUE - 3] + "..."
            head = Text.assemble((f"{key.path}=", NAME), (value, VALUE), overflow="fold")
            kind = Text(key.kind, DIM)
            choices = f" [{' | '.join(key.choices)}]" if key.choices else ""
            description = Text.assemble(key.unit and f"{key.unit} ", key.meaning, (choices, VALUE))
            if wide:
                table.add_row(Padding(head, (0, 0, 0, 2)), kind, description)
            else:
                table.add_row(Padding(Text.assemble(head, "  ", kind), (0, 0, 0, 2)))
                table.add_row(Padding(description, (0, 0, 0, 6)))
        yield table


def _title(name: str, words: str) -> Text:
    return Text.assemble((f"\n{name.upper()}", TITLE), (f"  {words}", DIM))


def _node(field: Field) -> str:
    return field.key.path.partition(".")[0] if "." in field.key.path else ""
