"""`--help`, in our own words: purpose, commands to copy, groups with choices, fields with meaning.

It shows the values that the rest of the command line stands for. Words without `=` search it:
`python -m grpo_ustat.train --help clip`.
"""

from __future__ import annotations

import os
import sys
from argparse import Namespace
from collections.abc import Iterable, Iterator
from dataclasses import replace
from itertools import groupby

from rich.console import Console, RenderableType
from rich.padding import Padding
from rich.table import Table
from rich.text import Text

from grpo_ustat.catalogue import Catalogue, Field, Group, catalogue
from grpo_ustat.checks import ConfigError

WIDE = 110  # columns from which on a field's meaning stands beside it
WIDEST = 160
LONGEST = 48  # characters of a value
NAME, VALUE, DIM, TITLE = "cyan", "green", "dim", "bold"


def show_help(entry: str, words: Namespace) -> None:
    """Print the help of an entry, or what it says of the words that are searched for.

    Raises:
        ConfigError: an override that cannot be, or nothing is found.
    """
    sought = [word.lower() for word in words.overrides if _is_word(word)]
    rest = [word for word in words.overrides if not _is_word(word)]
    page = catalogue(entry, Namespace(**vars(words) | {"overrides": rest}))
    console = Console(highlight=False, markup=False, emoji=False)
    console.width = min(console.width, WIDEST)
    if sought:
        page = _found(page, sought)
    with console.capture() as capture:
        for part in _page(page, wide=console.width >= WIDE, whole=not sought):
            console.print(
                part, soft_wrap=isinstance(part, str), style=NAME if isinstance(part, str) else None
            )
    try:
        print("\n".join(line.rstrip() for line in capture.get().splitlines()), flush=True)
    except BrokenPipeError:  # head or less has seen enough; nor may the interpreter's end complain
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


def _is_word(override: str) -> bool:
    return "=" not in override and not override.startswith(("~", "+"))


def _found(page: Catalogue, sought: list[str]) -> Catalogue:
    """The groups and fields that say every word."""

    def says(*texts: str) -> bool:
        return all(word in " ".join(texts).lower() for word in sought)

    fields = [f for f in page.fields if says(f.key.path, f.key.meaning, *f.key.choices, f.key.unit)]
    groups = []
    for group in page.groups:
        own = tuple(c for c in group.choices if says(group.name, c.name, c.words))
        if own or says(group.name, group.meaning):
            groups.append(replace(group, choices=own or group.choices))
    if not (fields or groups):
        raise ConfigError(f"--help says nothing about {' '.join(sought)!r}: use fewer words")
    return replace(page, fields=tuple(fields), groups=tuple(groups))


def _page(page: Catalogue, wide: bool, whole: bool) -> Iterator[RenderableType]:
    if whole:
        yield from _opening(page)
    if page.groups:
        yield _title("Groups", "group=choice sets several fields together; * is chosen")
        for group in page.groups:
            yield from _of_group(group)
    if page.fields:
        yield _title("Fields", "field=value, as they are with this command line; ???: to be given")
    for node, fields in groupby(sorted(page.fields, key=lambda f: bool(_node(f))), key=_node):
        yield Text.assemble(("\n" + (node or "the run"), TITLE), _colon(page.nodes.get(node)))
        yield _of_fields(fields, wide)


def _node(field: Field) -> str:
    return field.key.path.partition(".")[0] if "." in field.key.path else ""


def _opening(page: Catalogue) -> Iterator[RenderableType]:
    yield Text(page.purpose + "\n")
    for command, words in page.commands:
        yield Text(f"  # {words}", DIM)
        yield f"  {command}"
    me, table = f"python -m grpo_ustat.{page.entry}", Table.grid(padding=(0, 2))
    of_runs = {
        f"{me} --help model=NAME": "fields as it sets them",
        f"{me} -m field=a,b": "a run for each value",
    }
    found = {f"{me} --help WORD": "what this says of a word"} | (of_runs if page.groups else {})
    found |= {
        f"{me} -c job": "all fields as YAML",
        f'eval "$({me} -sc install=bash)"': "Tab; also zsh, fish",
    }
    for command, words in found.items():
        table.add_row(Text(command, NAME), Text(words, DIM))
    yield Padding(table, (1, 0, 0, 0))


def _title(name: str, words: str) -> Text:
    return Text.assemble((f"\n{name.upper()}", TITLE), (f"  {words}", DIM))


def _colon(words: str | None) -> str:
    return f": {words}" if words else ""


def _of_group(group: Group) -> Iterator[RenderableType]:
    name = f"{group.name}=" if group.settable else group.name
    yield Text.assemble((f"\n{name}", TITLE), f"  {group.meaning}")
    table = Table.grid(padding=(0, 2, 0, 0))
    for choice in group.choices:
        mark = "*" if choice.name == group.chosen else " "
        name = Text.assemble(f"  {mark} ", (choice.name, NAME), no_wrap=True)
        table.add_row(name, choice.words)
    yield table


def _of_fields(fields: Iterable[Field], wide: bool) -> Table:
    """One row each: beside each other where there is room, else the meaning below."""
    table = Table.grid(padding=(0, 2))
    for field in fields:
        head, kind, meaning = _head(field), Text(field.key.kind, DIM), _meaning(field)
        if wide:
            table.add_row(Padding(head, (0, 0, 0, 2)), kind, meaning)
        else:
            table.add_row(Padding(Text.assemble(head, "  ", kind), (0, 0, 0, 2)))
            table.add_row(Padding(meaning, (0, 0, 0, 6)))
    return table


def _head(field: Field) -> Text:
    value = field.value if len(field.value) <= LONGEST else field.value[: LONGEST - 3] + "..."
    return Text.assemble((f"{field.key.path}=", NAME), (value, VALUE), overflow="fold")


def _meaning(field: Field) -> Text:
    unit = f"{field.key.unit} " if field.key.unit else ""
    choices = f" [{' | '.join(field.key.choices)}]" if field.key.choices else ""
    return Text.assemble(unit, field.key.meaning, (choices, VALUE))
