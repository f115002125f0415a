"""What every field of a configuration means: the one place is the metadata of its schema.

A field is declared as `name: type = key("meaning", unit="tokens", choices=("a", "b"))`, a node as
`name: Schema = part(Schema, "meaning")`; `--help`, shell completion and the tests read them here.
"""

from __future__ import annotations

import types
from collections.abc import Iterator, Mapping
from dataclasses import MISSING as WITHOUT
from dataclasses import dataclass, field, fields, is_dataclass
from typing import Any, Union, get_args, get_origin, get_type_hints

from omegaconf import MISSING


def key(
    meaning: str,
    unit: str = "",
    choices: tuple[str, ...] = (),
    entries: Mapping[str, str] | None = None,
    factory: Any = WITHOUT,
) -> Any:
    """A field of a schema; its value is in `conf/`.

    Args:
        meaning: in a few words, `null: ...` where it may be null.
        unit: of a number.
        choices: all that the checks accept, of the field or of a list's elements; none: anything.
        entries: of a dictionary of options, the meaning of each.
        factory: of the value of a field that is not in `conf/`.
    """
    said = {"meaning": meaning, "unit": unit, "choices": choices, "entries": entries or {}}
    if factory is not WITHOUT:
        return field(default_factory=factory, metadata=said)
    return field(default=MISSING, metadata=said)


def part(schema: type, meaning: str) -> Any:
    """A node of a schema, with fields of its own."""
    return field(default_factory=schema, metadata={"meaning": meaning})


@dataclass(frozen=True)
class Key:
    """A field as it is told about.

    Attributes:
        path: its name on the command line, `eval.decoding`.
        kind: its type in words, `list of str`; empty for a node.
        meaning, unit, choices, entries: see `key`; empty where the schema does not say.
        schema: a node's; None for fields.
    """

    path: str
    kind: str
    meaning: str
    unit: str
    choices: tuple[str, ...]
    entries: Mapping[str, str]
    schema: type | None


def keys_of(
    schema: type, prefix: str = "", schemas: Mapping[str, type] | None = None
) -> Iterator[Key]:
    """Every field of a schema, nodes before their fields.

    Args:
        schema: a dataclass.
        prefix: before every path.
        schemas: of nodes whose schema is not in their type, by path.
    """
    schemas, hints = schemas or {}, get_type_hints(schema)
    for one in fields(schema):
        path, hint = f"{prefix}{one.name}", hints[one.name]
        node = schemas.get(path, hint if is_dataclass(hint) else None)
        said = {name: one.metadata.get(name, "") for name in ("meaning", "unit")}
        said |= {"choices": one.metadata.get("choices", ())}
        entries = one.metadata.get("entries", {})
        yield Key(path, "" if node else kind_of(hint), **said, entries=entries, schema=node)
        if node:
            yield from keys_of(node, f"{path}.", schemas)


def kind_of(hint: Any) -> str:
    """A type in words.

    >>> kind_of(list[int] | None), kind_of(bool), kind_of(dict[str, float])
    ('list of int or null', 'bool', 'dict of float')
    """
    if get_origin(hint) in (Union, types.UnionType):
        return " or ".join(kind_of(each) for each in get_args(hint))
    if get_origin(hint) in (list, dict):
        return f"{get_origin(hint).__name__} of {kind_of(get_args(hint)[-1])}"
    return "null" if hint is type(None) else getattr(hint, "__name__", "any").lower()
