"""Records as JSON, and the reading of files in a run folder.

An estimate with an interval has three keys in a file: `NAME`, `NAME_low` and `NAME_high`. A number
that is not finite is null. A field that is None by default has no key while it is None.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from dataclasses import fields, is_dataclass
from functools import cache
from pathlib import Path
from types import NoneType, UnionType
from typing import Any, Union, cast, get_args, get_origin, get_type_hints

import yaml

from grpo_ustat.estimators.intervals import Interval

# Errors that are raised if a file cannot be read, or does not have the content of its record.
DAMAGE = (OSError, ValueError, TypeError, LookupError, RecursionError, yaml.YAMLError)
ENDS = ("", "_low", "_high")
SCALARS = {int: int, float: (int, float), str: str, bool: bool}


def read_mapping(file: Path, kind: Any = None) -> dict[str, Any]:
    """Read a JSON or YAML file that contains a mapping.

    Args:
        kind: record class that the content must have; None accepts any mapping.

    Raises:
        DAMAGE: the file cannot be read, or it does not have this content.
    """
    text = file.read_text()
    content = json.loads(text) if file.suffix == ".json" else yaml.safe_load(text)
    if not isinstance(content, dict):
        raise ValueError("it is not a mapping")
    if kind:
        record_of(kind, content)
    return content


def content_of(value: Any) -> Any:
    """Convert a record into content for a file: mappings, lists, texts and numbers.

    >>> from dataclasses import dataclass
    >>> @dataclass
    ... class Law:
    ...     gstar: Interval
    ...     reason: str | None = None
    >>> content_of(Law((4.0, 3.0, math.inf)))
    {'gstar': 4.0, 'gstar_low': 3.0, 'gstar_high': None}
    """
    if isinstance(value, Mapping):
        return {name: content_of(x) for name, x in value.items()}
    if isinstance(value, list | tuple):
        return [content_of(x) for x in value]
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if not is_dataclass(value):
        return value
    content: dict[str, Any] = {}
    hints = hints_of(type(value))
    for field in fields(value):
        x: Any = getattr(value, field.name)
        if x is None and field.default is None:
            continue
        if is_interval(hints[field.name]):
            ends = zip(ENDS, cast(Interval, x), strict=True)
            content |= {f"{field.name}{end}": content_of(y) for end, y in ends}
        elif field.name == "measured" and isinstance(x, Mapping):
            # The records of the measurements are keys of the result itself.
            content |= content_of(x)
        else:
            content[field.name] = content_of(x)
    return content


def record_of(kind: Any, content: Any, name: str = "it") -> Any:
    """Convert the content of a file into a record; this is the inverse of `content_of`.

    Keys that match no field are dropped.

    Args:
        kind: record class, or type of a field.
        content: content of the file.
        name: key of the content in the file, for errors.

    Raises:
        TypeError, ValueError: a key is missing, or a value has another type.

    >>> from dataclasses import dataclass
    >>> @dataclass
    ... class Law:
    ...     gstar: Interval
    ...     reason: str | None = None
    >>> record_of(Law, {"gstar": 4.0, "gstar_low": 3.0, "gstar_high": None, "other": 1})
    Law(gstar=Interval(estimate=4.0, low=3.0, high=inf), reason=None)
    >>> record_of(Law, {"gstar": 4.0, "reason": 3})
    Traceback (most recent call last):
        ...
    TypeError: reason is 3, not str
    """
    origin, arguments = get_origin(kind), get_args(kind)
    if kind is float and content is None:
        return math.nan
    if kind in SCALARS and not isinstance(content, SCALARS[kind]):
        raise TypeError(f"{name} is {content!r:.40}, not {kind.__name__}")
    if is_dataclass(kind):
        if not isinstance(content, Mapping):
            raise TypeError(f"{name} is {content!r:.40}, not a mapping")
        values = {
            key: row_interval(content, key)
            if is_interval(hint)
            else record_of(hint, content[key], key)
            for key, hint in hints_of(kind).items()
            if key in content
        }
        return kind(**values)  # pyright: ignore[reportCallIssue]  # a class, not an instance
    if origin in (list, tuple):
        if not isinstance(content, list):
            raise TypeError(f"{name} is {content!r:.40}, not a list")
        return origin(record_of(arguments[0], x, name) for x in content)
    if origin in (Union, UnionType) and content is not None:
        kinds = [x for x in arguments if x is not NoneType]
        return record_of(kinds[0], content, name) if len(kinds) == 1 else content
    return content


def row_interval(row: Mapping[str, Any], name: str) -> Interval:
    """Read an estimate and the ends of its interval from three keys of a mapping.

    A missing estimate or lower end is NaN. A missing upper end is infinite if the lower end exists,
    and NaN otherwise.
    """
    estimate, low, high = (row.get(f"{name}{end}") for end in ENDS)
    return Interval(
        record_of(float, estimate, name),
        record_of(float, low, name),
        (math.nan if low is None else math.inf) if high is None else record_of(float, high, name),
    )


@cache
def hints_of(record: type) -> dict[str, Any]:
    """Return the types of a record's fields, by name."""
    hints = get_type_hints(record)
    return {field.name: hints[field.name] for field in fields(record)}


def is_interval(kind: Any) -> bool:
    """Return True for the type of an estimate with an interval, which may be None."""
    return Interval in (kind, *get_args(kind))


def command_of(config: dict[str, Any]) -> str:
    """Return the command of a configuration: `train`, `mse` or `gap`.

    >>> [command_of(x) for x in ({"max_steps": 80}, {"theorem": {}}, {"study": {}})]
    ['train', 'gap', 'mse']
    """
    return "train" if "max_steps" in config else "gap" if "theorem" in config else "mse"
