"""Declaration of a schema's fields, and the checks of one field.

A field is declared as `name: type = field("meaning", unit="tokens", choices=("a", "b"))`, a node as
`name: Schema = node(Schema, "meaning")`; `--help` and the tests read them here.
"""

from __future__ import annotations

import dataclasses
import difflib
import math
import types
from collections.abc import Callable, Collection, Iterator, Mapping
from dataclasses import dataclass, is_dataclass
from typing import Any, Union, cast, get_args, get_origin, get_type_hints

# The value of omegaconf.MISSING.
UNSET: Any = "???"


def flatten(content: Mapping[str, Any], between: str = ".", prefix: str = "") -> dict[str, Any]:
    """Return the values of nested dictionaries by path; an empty dictionary has none.

    >>> flatten({"seed": 0, "model": {"name": "tiny", "size": {}}, "sizes": [2, 4]})
    {'seed': 0, 'model.name': 'tiny', 'sizes': [2, 4]}
    """
    values: dict[str, Any] = {}
    for key, value in content.items():
        path = f"{prefix}{key}"
        if isinstance(value, Mapping):
            values |= flatten(cast(Mapping[str, Any], value), between, f"{path}{between}")
        else:
            values[path] = value
    return values


def field(
    meaning: str,
    unit: str = "",
    choices: tuple[str, ...] = (),
    *,
    plugins: Callable[[], Collection[str]] = tuple,
    positive: bool = False,
    at_least: float = -math.inf,
    below: float = math.inf,
    distinct: bool = False,
    entries: Mapping[str, str] | None = None,
    default: object = UNSET,
) -> Any:
    """Declare a field of a schema; `check_fields` enforces its limits.

    Args:
        meaning: a phrase, with `null: ...` if it may be null. `--help` prints the unit before it.
        unit: unit of a number, such as `tokens`; the meaning then continues it.
        choices: all allowed values, of the field or of a list's elements; empty: anything.
        plugins: returns further choices, those that installed packages offer.
        positive: a number, or each of a list, must be above 0 and finite.
        at_least: the smallest allowed number; a number must then be finite.
        below: a number must be smaller than this.
        distinct: a list must not name a value twice.
        entries: meaning of each entry of a dictionary of options.
        default: value of a field that is not in `conf/`; without one it must be there.
    """
    limits = Limits(choices, plugins, positive, at_least, below, distinct)
    metadata = {"meaning": meaning, "unit": unit, "limits": limits, "entries": entries or {}}
    return dataclasses.field(default=default, metadata=metadata)


@dataclass(frozen=True)
class Limits:
    """Values that a field allows; see `field`."""

    choices: tuple[str, ...] = ()
    plugins: Callable[[], Collection[str]] = tuple
    positive: bool = False
    at_least: float = -math.inf
    below: float = math.inf
    distinct: bool = False

    def check(self, path: str, value: Any) -> None:
        """Refuse a value, or a list with an entry, that is not allowed; null is allowed."""
        entries = cast(list[Any], value) if isinstance(value, list) else [value]
        for entry in entries:
            if entry is None:
                continue
            if self.choices and entry not in self.choices:
                check_choice(path, entry, (*self.choices, *sorted(self.plugins())))
            if not (self.positive or self.at_least > -math.inf):
                continue
            smallest = entry > 0 if self.positive else entry >= self.at_least
            if not (smallest and entry < self.below):
                named = f"{path}={value}"
                if isinstance(value, list):
                    named += f" holds {entry}, which"
                allowed = "above 0" if self.positive else f"{self.at_least:g} or more"
                if self.below < math.inf:
                    lowest = "(0" if self.positive else f"[{self.at_least:g}"
                    allowed = f"in {lowest}, {self.below:g})"
                elif isinstance(entry, float):
                    allowed += " and finite"
                raise ConfigError(f"{named} must be {allowed}")
        if self.distinct and value is not None:
            check_distinct(path, entries)


def check_fields(node: Any, prefix: str = "") -> None:
    """Refuse a value that its field does not allow, in a node and in all nodes within it.

    Args:
        node: an instance of a schema.
        prefix: prefix of every field's name.
    """
    for declared in dataclasses.fields(node):
        value, path = getattr(node, declared.name), f"{prefix}{declared.name}"
        if is_dataclass(value):
            check_fields(value, f"{path}.")
        entries = cast(dict[str, Any], value) if isinstance(value, dict) else {}
        for name, inner in entries.items():
            if is_dataclass(inner):
                check_fields(inner, f"{path}.{name}.")
        declared.metadata.get("limits", Limits()).check(path, value)


def node(schema: type, meaning: str) -> Any:
    """Declare a node of a schema, with its own fields."""
    return dataclasses.field(default_factory=schema, metadata={"meaning": meaning})


@dataclass(frozen=True)
class FieldInfo:
    """Description of one field by its schema."""

    # Its name on the command line, such as `eval.decoding`.
    path: str
    # Its type in words, `list of str`; empty for a node.
    kind: str
    # These four are arguments of `field`; empty if the schema gives none.
    meaning: str
    unit: str
    limits: Limits
    entries: Mapping[str, str]
    # Value without a file; `UNSET`: a file must give it.
    default: object
    # Schema of a node; None for fields.
    schema: type | None

    @property
    def choices(self) -> tuple[str, ...]:
        """All allowed values, those of installed packages included; empty: anything."""
        return (*self.limits.choices, *sorted(self.limits.plugins()))


def fields_of(
    schema: type, prefix: str = "", schemas: Mapping[str, type] | None = None
) -> Iterator[FieldInfo]:
    """Yield every field of a schema, nodes before their fields.

    Args:
        schema: a dataclass.
        prefix: prefix of every path.
        schemas: schemas of nodes whose type does not give them, by path.
    """
    schemas, hints = schemas or {}, get_type_hints(schema)
    for declared in dataclasses.fields(schema):
        path, hint = f"{prefix}{declared.name}", hints[declared.name]
        nested = schemas.get(path) or (cast(type, hint) if is_dataclass(hint) else None)
        metadata = declared.metadata
        yield FieldInfo(
            path,
            kind="" if nested else kind_of(hint),
            meaning=metadata.get("meaning", ""),
            unit=metadata.get("unit", ""),
            limits=metadata.get("limits", Limits()),
            entries=metadata.get("entries", {}),
            default=declared.default,
            schema=nested,
        )
        if nested:
            yield from fields_of(nested, f"{path}.", schemas)


def kind_of(hint: Any) -> str:
    """Name a type in words.

    >>> kind_of(list[int] | None), kind_of(bool), kind_of(dict[str, float])
    ('list of int or null', 'bool', 'dict of float')
    """
    if get_origin(hint) in (Union, types.UnionType):
        return " or ".join(kind_of(each) for each in get_args(hint))
    if get_origin(hint) in (list, dict):
        return f"{get_origin(hint).__name__} of {kind_of(get_args(hint)[-1])}"
    return "null" if hint is type(None) else getattr(hint, "__name__", "any").lower()


class ConfigError(ValueError):
    """A mistake of the user; its message is one line with the values and the fix."""


def check_positive(node: Any, *names: str, prefix: str = "") -> None:
    """Refuse fields of a node that are not above 0 and finite."""
    for name in names:
        Limits(positive=True).check(f"{prefix}{name}", getattr(node, name))


def check_distinct(path: str, values: list[Any]) -> None:
    """Refuse a list that names a value twice."""
    repeated = [value for i, value in enumerate(values) if value in values[:i]]
    if repeated:
        raise ConfigError(f"{path}={values} names {repeated[0]} twice: once is enough")


def check_choice(path: str, value: Any, choices: tuple[str, ...]) -> None:
    """Refuse a value that is none of the choices; it may have any type."""
    if value not in choices:
        hint = did_you_mean(str(value), choices)
        raise ConfigError(f"unknown {path} {value!r}: {hint}choose from {', '.join(choices)}")


def did_you_mean(word: str, names: Collection[str]) -> str:
    """Return the question after a misspelt or cut word, with a blank at its end.

    It is "" if no name is near.

    >>> did_you_mean("qwen2_5_1_5", ("hub", "qwen2_5_1_5b_instruct")), did_you_mean("x", ("hub",))
    ('did you mean qwen2_5_1_5b_instruct? ', '')
    """
    begun = [name for name in names if word and name.startswith(word)]
    near = begun if len(begun) == 1 else difflib.get_close_matches(word, names, n=1, cutoff=0.7)
    return f"did you mean {near[0]}? " if near else ""
