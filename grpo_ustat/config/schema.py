"""Declaration of schema fields and checks of single fields.

A field is declared as `name: type = field("meaning", unit="tokens", choices=("a", "b"))`, and a
node as `name: Schema = node(Schema, "meaning")`. `--help` and the tests use these declarations.
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
    """Return the values of nested dictionaries, keyed by path; empty dictionaries are omitted.

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
        meaning: description, including `null: ...` if null is allowed. `--help` prints the unit
            before the description.
        unit: unit of a number, such as `tokens`. The description continues the unit, as in `tokens`
            + `in a backward pass`.
        choices: allowed values of the field or, for a list, of its elements; if empty, any value is
            allowed.
        plugins: function that returns further choices from installed packages.
        positive: True if numbers must be positive and finite.
        at_least: smallest allowed number; numbers must then be finite.
        below: exclusive upper limit of numbers.
        distinct: True if the values of a list must be distinct.
        entries: descriptions of the entries, if the field is a dictionary of options.
        default: value if `conf/` does not set the field; `conf/` must set a field without a
            default.
    """
    limits = Limits(choices, plugins, positive, at_least, below, distinct)
    metadata = {"meaning": meaning, "unit": unit, "limits": limits, "entries": entries or {}}
    return dataclasses.field(default=default, metadata=metadata)


@dataclass(frozen=True)
class Limits:
    """Allowed values of a field; see `field`."""

    choices: tuple[str, ...] = ()
    plugins: Callable[[], Collection[str]] = tuple
    positive: bool = False
    at_least: float = -math.inf
    below: float = math.inf
    distinct: bool = False

    def check(self, path: str, value: Any) -> None:
        """Refuse a value, or an entry of a list, that is not allowed; null is always allowed."""
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
                    named += f" contains {entry}, which"
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
    """Refuse values that their fields do not allow, in a node and in all nested nodes.

    Args:
        node: instance of a schema.
        prefix: prefix of the field names, for messages.
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
    """Declare a node: a part of a schema that has fields of its own."""
    return dataclasses.field(default_factory=schema, metadata={"meaning": meaning})


@dataclass(frozen=True)
class FieldInfo:
    """A field's description in its schema."""

    # Name on the command line, such as `eval.decoding`.
    path: str
    # Type in words, such as `list of str`; empty for a node.
    kind: str
    # `meaning`, `unit`, `limits` and `entries` are arguments of `field`; each is empty if not
    # given.
    meaning: str
    unit: str
    limits: Limits
    entries: Mapping[str, str]
    # Value if no file sets the field; `UNSET` if a file must set it.
    default: object
    # Schema of a node; None for other fields.
    schema: type | None

    @property
    def choices(self) -> tuple[str, ...]:
        """Allowed values, including those of installed packages; if empty, any value is allowed."""
        return (*self.limits.choices, *sorted(self.limits.plugins()))


def fields_of(
    schema: type, prefix: str = "", schemas: Mapping[str, type] | None = None
) -> Iterator[FieldInfo]:
    """Yield every field of a schema; nodes come before their fields.

    Args:
        schema: dataclass of the schema.
        prefix: prefix of every path.
        schemas: schemas of the nodes whose type annotation does not name a schema, keyed by path.
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
    """Return a description of a type in words.

    >>> kind_of(list[int] | None), kind_of(bool), kind_of(dict[str, float])
    ('list of int or null', 'bool', 'dict of float')
    """
    if get_origin(hint) in (Union, types.UnionType):
        return " or ".join(kind_of(each) for each in get_args(hint))
    if get_origin(hint) in (list, dict):
        return f"{get_origin(hint).__name__} of {kind_of(get_args(hint)[-1])}"
    return "null" if hint is type(None) else getattr(hint, "__name__", "any").lower()


class ConfigError(ValueError):
    """Error for invalid user input; the message is one line with the values and the fix."""


def check_positive(node: Any, *names: str, prefix: str = "") -> None:
    """Refuse fields of a node that are not positive and finite."""
    for name in names:
        Limits(positive=True).check(f"{prefix}{name}", getattr(node, name))


def check_distinct(path: str, values: list[Any]) -> None:
    """Refuse a list with a repeated value."""
    repeated = [value for i, value in enumerate(values) if value in values[:i]]
    if repeated:
        raise ConfigError(f"{path}={values} contains {repeated[0]} twice: use it once")


def check_choice(path: str, value: Any, choices: tuple[str, ...]) -> None:
    """Refuse a value that is not one of the choices."""
    if value not in choices:
        hint = did_you_mean(str(value), choices)
        raise ConfigError(f"unknown {path} {value!r}: {hint}choose from {', '.join(choices)}")


def did_you_mean(word: str, names: Collection[str]) -> str:
    """Return a "did you mean" question, with a trailing blank, for a misspelt or truncated word.

    The result is "" if no name is similar.

    >>> did_you_mean("qwen2_5_1_5", ("hub", "qwen2_5_1_5b_instruct")), did_you_mean("x", ("hub",))
    ('did you mean qwen2_5_1_5b_instruct? ', '')
    """
    begun = [name for name in names if word and name.startswith(word)]
    near = begun if len(begun) == 1 else difflib.get_close_matches(word, names, n=1, cutoff=0.7)
    return f"did you mean {near[0]}? " if near else ""
