"""Limits on the size, depth and values of files in a run folder, and types of the values.

The files are checked because a user can edit them or receive them from somebody else. An invalid
value is refused with an error that names the file and the key.
"""

from __future__ import annotations

import hashlib
import json
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import MISSING, dataclass, fields, is_dataclass
from functools import cache
from pathlib import Path
from types import NoneType, UnionType
from typing import Annotated, Any, TypeVar, Union, get_args, get_origin, get_type_hints

import yaml

from grpo_ustat.config.run import MAX_COUNT
from grpo_ustat.estimators.intervals import Interval
from grpo_ustat.terminal.streams import single_line

MAX_BYTES = {".hydra/config.yaml": 400_000, "launches.jsonl": 64_000_000}
# Maximum size in bytes of any other file.
MAX_OTHER_BYTES = 256_000_000
MAX_DEPTH, MAX_VALUES, MAX_LETTERS = 40, 2_000_000, 1_000_000
# Maximum number of values in a configuration, including those in each use of a YAML alias.
MAX_SETTINGS = 50_000
# Maximum number of rows in a table of a result.
MAX_ROWS = 20_000
# Maximum absolute value of a number. The squares of such numbers, and random draws with them as
# standard deviations, are finite.
MAX_NUMBER = 1e100

T = TypeVar("T")


@dataclass(frozen=True)
class Ends:
    """Annotation for an estimate with the keys `NAME`, `NAME_low` and `NAME_high` in a file.

    The ends of the interval are null if they are not finite.
    """

    # Type of the value under `NAME`.
    estimate: Any
    # Type of the values under `NAME_low` and `NAME_high`.
    end: Any


# Types of a record's fields, in addition to Python's types. They have the form
# `Annotated[type, mark]`, and `misfit`, `content_of` and `record_of` read the mark:
#
# - A number is the smallest allowed integer. `Count` is at least 0, and `Size` is at least 1.
# - A tuple lists the allowed values.
# - A text identifies one of `NumberOrNull`, `Sometimes` and `Beside`.
Count = Annotated[int, 0]
Size = Annotated[int, 1]
# Number that is stored as null if it is not finite.
NumberOrNull = Annotated[float | None, "null where it is not finite"]
# Field that has no key in the file if its value is None.
Sometimes = Annotated[T | None, "no key where it is None"]
# Estimate with finite ends; in an `Interval`, the estimate and its ends can be null.
Bounded = Annotated[Interval, Ends(float, float)]
# Mapping of records that are stored as additional keys of the enclosing record.
Beside = Annotated[Mapping[str, Any], "further keys"]
SCALARS = {float: "a finite number", str: "a text", bool: "true or false"}
# Record class, type of a field, or dictionary that gives such types for some keys of a mapping.
Shape = Any


def text_of(folder: Path, name: str) -> str:
    """Read a file's text.

    Raises:
        ValueError: the file exceeds the maximum size.
    """
    size, most = (folder / name).stat().st_size, MAX_BYTES.get(name, MAX_OTHER_BYTES)
    if size > most:
        raise ValueError(f"it has {size:,} bytes, but at most {most:,} are read")
    return (folder / name).read_text(errors="replace")


def checked(
    folder: Path, name: str, parse: Callable[[str], Any], shape: Shape = None, complete: bool = True
) -> tuple[Any, str]:
    """Return a file's parsed content and an empty text, or None and a one-line error.

    Args:
        parse: parser of the file's text; raises a ValueError if the text is invalid.
        shape: expected type of the content, see `misfit`; None accepts any content.
        complete: True to report required keys of a record that are missing.
    """
    try:
        content = parse(text_of(folder, name))
        wrong = misfit(content, shape, complete=complete) if shape else None
    except (OSError, ValueError, yaml.YAMLError) as error:
        wrong = single_line(error, 200)
    return (None, wrong) if wrong else (content, "")


def parsed_json(text: str) -> Any:
    """Parse JSON; refuse numbers that are not finite.

    Raises:
        ValueError: the text is not JSON or exceeds the limits.
    """
    try:
        content = json.loads(text, parse_constant=_refuse_constant)
    except RecursionError:
        raise ValueError(f"it is nested more than {MAX_DEPTH} deep") from None
    check_limits(content)
    return content


def parsed_code(text: str) -> Any:
    """Parse the content of `code.json` and verify its digest.

    The digest detects changes that keep the type of a value, such as a changed version.

    Raises:
        ValueError: the text is not JSON, or the digest does not match the values.
    """
    content = parsed_json(text)
    if not isinstance(content, Mapping):
        return content
    if "digest" in content and content["digest"] != content_digest(content):
        raise ValueError("its values were changed: they do not match its digest")
    return content


def content_digest(content: Mapping[str, Any]) -> str:
    """Return the digest of a mapping; white space and the order of keys do not affect it."""
    values = {name: value for name, value in content.items() if name != "digest"}
    return hashlib.sha256(json.dumps(values, sort_keys=True).encode()).hexdigest()[:12]


def parsed_yaml(text: str) -> Any:
    """Parse YAML; tags can create only texts, numbers, lists and mappings.

    Raises:
        ValueError, yaml.YAMLError: the text is not YAML or exceeds the limits.
    """
    try:
        content = yaml.safe_load(text)
    except RecursionError:
        raise ValueError(f"it is nested more than {MAX_DEPTH} deep") from None
    check_limits(content, MAX_SETTINGS)
    return content


def check_limits(content: Any, most: int = MAX_VALUES) -> None:
    """Refuse content that is nested too deeply, or has too many, too long or impossible values.

    Raises:
        ValueError: the content exceeds a limit; the message names the limit.
    """
    count, level = 0, [content]
    for _ in range(MAX_DEPTH):
        below: list[Any] = []
        for value in level:
            if isinstance(value, Mapping):
                below += [*value, *value.values()]
            elif isinstance(value, list):
                below += value
            elif isinstance(value, str) and len(value) > MAX_LETTERS:
                raise ValueError(f"it contains a text of {len(value):,} characters")
            elif isinstance(value, int | float) and not is_number(value) and value not in (0, 1):
                raise ValueError(f"it contains the number {str(value)[:20]}, which no run writes")
        count += len(below)
        if count > most:
            raise ValueError(f"it contains more than {most:,} values")
        level = below
        if not level:
            return
    raise ValueError(f"it is nested more than {MAX_DEPTH} deep")


def _refuse_constant(name: str) -> float:
    raise ValueError(f"it contains {name}, which no run writes")


def is_number(value: Any) -> bool:
    """Return True for a number (but not a boolean) of at most `MAX_NUMBER` in absolute value."""
    if isinstance(value, bool) or not isinstance(value, int | float):
        return False
    return abs(value) <= MAX_NUMBER and math.isfinite(value)


def count(value: Any) -> bool:
    """Return True for an integer that is at least 0."""
    return misfit(value, Count) is None


def scalar(value: Any) -> bool:
    """Return True for a text, a finite number, a boolean, or null."""
    return misfit(value, str | float | bool | None) is None


@cache
def keys_of(record: type) -> dict[str, tuple[Any, bool]]:
    """Return the keys under which a record is stored, each with its type and a flag.

    The flag is True if the key is required, that is, if the field has no default.

    >>> @dataclass
    ... class Law:
    ...     gstar: Interval
    ...     reason: Sometimes[str] = None
    >>> [(name, required) for name, (_, required) in keys_of(Law).items()]
    [('gstar', True), ('gstar_low', True), ('gstar_high', True), ('reason', False)]
    """
    keys: dict[str, tuple[Any, bool]] = {}
    for name, kind, field in _typed_fields(record):
        required = field.default is MISSING and field.default_factory is MISSING
        of_estimate = _sometimes(kind)[0]
        if ends := _ends(of_estimate):
            types = (ends.estimate, ends.end, ends.end)
            keys |= {key: (x, required) for key, x in zip(_three(name), types, strict=True)}
        else:
            keys[name] = (kind, required)
    return keys


def content_of(record: Any) -> Any:
    """Convert a record into content for a file: mappings, lists, texts and numbers.

    >>> @dataclass
    ... class Law:
    ...     gstar: Interval
    ...     reason: Sometimes[str] = None
    >>> content_of(Law((4.0, 3.0, math.inf)))
    {'gstar': 4.0, 'gstar_low': 3.0, 'gstar_high': None}
    """
    if isinstance(record, Mapping):
        return {name: content_of(value) for name, value in record.items()}
    if isinstance(record, list | tuple):
        return [content_of(value) for value in record]
    if not is_dataclass(record):
        return record
    content: dict[str, Any] = {}
    for name, kind, _ in _typed_fields(type(record)):
        value = getattr(record, name)
        kind, sometimes = _sometimes(kind)
        if sometimes and value is None:
            continue
        if _ends(kind):
            content |= zip(_three(name), map(_finite, value), strict=True)
        else:
            content[name] = _finite(value) if kind == NumberOrNull else content_of(value)
    kinds = get_type_hints(type(record), include_extras=True)
    for name in (field.name for field in fields(record) if kinds[field.name] == Beside):
        content |= content_of(getattr(record, name))
    return content


def record_of(kind: Shape, content: Any) -> Any:
    """Convert the content of a file into a record; this is the inverse of `content_of`.

    Null becomes NaN in a `NumberOrNull` field. Keys that match no field are dropped.

    Args:
        kind: record class, or type of a field.
        content: content that matches the type, see `misfit`.

    >>> @dataclass
    ... class Law:
    ...     gstar: Interval
    ...     reason: Sometimes[str] = None
    >>> record_of(Law, {"gstar": 4.0, "gstar_low": 3.0, "gstar_high": None, "other": 1})
    Law(gstar=Interval(estimate=4.0, low=3.0, high=inf), reason=None)
    """
    kind, _ = _sometimes(kind)
    if kind == NumberOrNull:
        return math.nan if content is None else content
    origin, arguments = get_origin(kind), get_args(kind)
    if is_dataclass(kind) and isinstance(kind, type):
        values: dict[str, Any] = {}
        for name, its_kind, _ in _typed_fields(kind):
            if name in content:
                is_estimate = _ends(_sometimes(its_kind)[0]) is not None
                values[name] = (
                    row_interval(content, name)
                    if is_estimate
                    else record_of(its_kind, content[name])
                )
        return kind(**values)
    if origin is list:
        return [record_of(arguments[0], entry) for entry in content]
    if origin is tuple:
        return tuple(record_of(x, entry) for x, entry in zip(arguments, content, strict=True))
    if origin in (Union, UnionType) and content is not None:
        records = [x for x in arguments if is_dataclass(x)]
        return record_of(records[0], content) if records else content
    return content


def row_interval(row: Mapping[str, Any], name: str) -> Interval:
    """Read an estimate and the ends of its interval from three keys of a mapping.

    A missing estimate or lower end is NaN. A missing upper end is infinite if the lower end exists,
    and NaN otherwise.
    """
    estimate, low, high = (row.get(key) for key in _three(name))
    return Interval(
        math.nan if estimate is None else estimate,
        math.nan if low is None else low,
        (math.nan if low is None else math.inf) if high is None else high,
    )


@cache
def _typed_fields(record: type) -> list[tuple[str, Any, Any]]:
    kinds = get_type_hints(record, include_extras=True)
    return [
        (field.name, kinds[field.name], field)
        for field in fields(record)
        if kinds[field.name] != Beside
    ]


def _sometimes(kind: Any) -> tuple[Any, bool]:
    """Return the type inside `Sometimes[...]` and True, or any other type as it is and False."""
    if get_origin(kind) is not Annotated or get_args(kind)[1] != get_args(Sometimes[int])[1]:
        return kind, False
    (inner,) = [x for x in get_args(get_args(kind)[0]) if x is not NoneType]
    return inner, True


def _ends(kind: Any) -> Ends | None:
    if kind is Interval:
        return Ends(float | None, float | None)
    mark = get_args(kind)[1] if get_origin(kind) is Annotated else None
    return mark if isinstance(mark, Ends) else None


def _three(name: str) -> tuple[str, str, str]:
    return name, f"{name}_low", f"{name}_high"


def _finite(value: float | None) -> float | None:
    return value if value is not None and math.isfinite(value) else None


def misfit(content: Any, kind: Shape, key: str = "", complete: bool = True) -> str | None:
    """Return an error line for the first missing key or wrong type, or None if there is none.

    For a wrong type, the line contains the value and the expected type. Unknown keys are ignored.

    Args:
        content: parsed content of a JSON or YAML file.
        kind: record class, type of a field, or dictionary of types by key. Every key of a
            dictionary is optional.
        key: position of the content in the file.
        complete: True to report required keys of a record that are missing.

    >>> misfit({"a": {"b": "x"}}, {"a": {"b": float}, "c": float})
    "a.b is 'x', not a finite number"
    >>> misfit({"rows": [{"n": 1}, {"n": -1}]}, {"rows": list[dict[str, Count]]})
    'rows[1].n is -1, not a whole number from 0 on'
    >>> misfit({}, Ends), misfit({}, Ends, complete=False)
    ('it has no estimate', None)
    """
    name, origin, arguments = key or "it", get_origin(kind), get_args(kind)
    if origin is Annotated:
        mark = arguments[1]
        if isinstance(mark, int):
            whole_number = isinstance(content, int) and is_number(content)
            fits = whole_number and mark <= content <= MAX_COUNT
            return None if fits else _misfit(name, content, f"a whole number from {mark} on")
        if isinstance(mark, tuple):
            return None if content in mark else _misfit(name, content, f"one of {', '.join(mark)}")
        return misfit(content, mark if isinstance(mark, type) else arguments[0], key, complete)
    if origin in (Union, UnionType):
        kinds = [x for x in arguments if x is not NoneType]
        if content is None and len(kinds) < len(arguments):
            return None
        if all(map(is_dataclass, kinds)):
            # Choose the record type with the fewest missing keys.
            present = content if isinstance(content, dict) else {}
            kinds = [min(kinds, key=lambda record: len(_missing(present, record)))]
        if len(kinds) == 1:
            return misfit(content, kinds[0], key, complete)
        fits = any(misfit(content, x) is None for x in kinds)
        return None if fits else _misfit(name, content, " or ".join(SCALARS[x] for x in kinds))
    if kind is int:
        return misfit(content, Count, key)
    if kind in (float, str, bool):
        fits = is_number(content) if kind is float else isinstance(content, kind)
        return None if fits else _misfit(name, content, SCALARS[kind])
    if origin in (list, tuple):
        if not isinstance(content, list) or (origin is tuple and len(content) != len(arguments)):
            entries = f" of {len(arguments)}" if origin is tuple else ""
            return _misfit(name, content, f"a list{entries}")
        if len(content) > MAX_ROWS:
            return f"{name} has {len(content):,} entries, but at most {MAX_ROWS:,} are read"
        inner = ((f"{key}[{i}]", entry, arguments[0]) for i, entry in enumerate(content))
    else:
        if not isinstance(content, dict):
            return _misfit(name, content, "a mapping")
        if is_dataclass(kind):
            kinds = {x: below for x, (below, _) in keys_of(kind).items()}
        else:
            kinds = kind if isinstance(kind, dict) else dict.fromkeys(content, arguments[1])
        inner = ((f"{key}.{x}" if key else x, content[x], below)
                 for x, below in kinds.items() if x in content)  # fmt: skip
    for below, value, its_kind in inner:
        if wrong := misfit(value, its_kind, below, complete):
            return wrong
    if complete and is_dataclass(kind) and (missing := _missing(content, kind)):
        return f"it has no {f'{key}.' if key else ''}{missing[0]}"
    return None


def _missing(content: Any, record: Any) -> list[str]:
    return [x for x, (_, required) in keys_of(record).items() if required and x not in content]


def _misfit(name: str, content: Any, wanted: str) -> str:
    return f"{name} is {_short(content)}, not {wanted}"


def typed_rows(rows: Sequence[dict[str, Any]]) -> tuple[list[dict[str, Any]], str]:
    """Return rows of training steps without invalid values, and a line about these values.

    Valid values are numbers, booleans and null. A text is valid only for a key that ends in
    `_reason`, which explains why a number is missing.

    >>> typed_rows([{"step": 1, "reward": "x", "gstar_reason": "few groups"}, {"step": -1}])[0]
    [{'step': 1, 'gstar_reason': 'few groups'}]
    >>> typed_rows([{"step": 1, "reward": "x"}, {"step": -1}])[1]
    "2 values are invalid and are not used, the first is reward='x'"
    """
    typed, wrong = [], []
    for row in rows:
        if "step" not in row:
            # Some rows have no step, such as the row at the end of a run.
            continue
        if not count(row["step"]):
            wrong.append(("step", row["step"]))
            continue
        bad = {
            key: x
            for key, x in row.items()
            if not (
                (x is None or is_number(x) or isinstance(x, bool))
                or (key.endswith("_reason") and isinstance(x, str))
            )
        }
        wrong += bad.items()
        typed.append({k: x for k, x in row.items() if k not in bad})
    if not wrong:
        return typed, ""
    name, value = wrong[0]
    return (
        typed,
        f"{len(wrong)} values are invalid and are not used, the first is {name}={_short(value)}",
    )


def _short(value: Any) -> str:
    if isinstance(value, dict | list):
        return "a mapping" if isinstance(value, dict) else "a list"
    words = "null" if value is None else repr(value)
    return words if len(words) <= 40 else f"{words[:36]}..."


def command_of(config: dict[str, Any]) -> str:
    """Return the command of a configuration: `train`, `mse` or `gap`.

    >>> [command_of(x) for x in ({"max_steps": 80}, {"theorem": {}}, {"study": {}})]
    ['train', 'gap', 'mse']
    """
    return "train" if "max_steps" in config else "gap" if "theorem" in config else "mse"


CONFIGURATION: Shape = {
    "model": {"name": str, "model_name_or_path": str}, "dataset": {"name": str},
    "prompt": {"name": str, "shots": NumberOrNull},
    "baseline": {"name": str}, "objective": {"name": str}, "rollout": {"name": str},
    "theorem": {"kind": str, "problem": str}, "study": {"methods": list[str]},
    "seed": Count, "group_size": Size, "max_steps": Count, "group_sizes": list[Size],
    "budget": {"rollouts": Size}, "baselines": list[str], "temperature": float,
    "reward_funcs": list[str], "pool": str | None, "eval": {"decoding": list[str]}, "launch": {},
}  # fmt: skip
CODE: Shape = {
    "digest": str, "commit": str | None, "diff": str | None, "weights": str | None,
    "data": str | None, "versions": {"grpo-ustat": str},
}  # fmt: skip
