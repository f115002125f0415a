"""Formatting of values for command lines, and error messages for invalid values."""

from __future__ import annotations

import re
import shlex
from collections.abc import Iterable
from pathlib import Path
from typing import Any, cast

import yaml

from grpo_ustat.config.schema import FieldInfo, flatten

TYPE_NOUNS = {
    "int": "a whole number",
    "float": "a number",
    "bool": "true or false",
    "str": "a word",
}
TYPE_PLURALS = {"int": "whole numbers", "float": "numbers", "str": "words"}


def typed_value(value: Any) -> str:
    """Format a value for the command line.

    >>> typed_value(None), typed_value([1, 2]), typed_value(True), typed_value("a b")
    ('null', '[1,2]', 'true', "'a b'")
    """
    if value is None or isinstance(value, bool):
        return {None: "null", True: "true", False: "false"}[value]
    from omegaconf import OmegaConf

    if OmegaConf.is_list(value) or isinstance(value, list):
        return f"[{','.join(map(typed_value, cast(list[Any], value)))}]"
    if OmegaConf.is_dict(value):
        return "{" + ",".join(f"{key}:{typed_value(entry)}" for key, entry in value.items()) + "}"
    plain = not isinstance(value, str) or re.fullmatch(r"[\w.:/?+-]+", value)
    return str(value) if plain else repr(value)


def wrong_value(field: FieldInfo, value: str, conf: Path) -> str:
    """Return the error message for a value of the wrong type.

    Args:
        field: field of a schema.
        value: value as the user typed it.
        conf: folder of configuration files; the example in the message comes from these files.
    """
    path, kind = field.path, field.kind.removesuffix(" or null")
    typed = f"{path}={value}" if value else f"{path}= has no value"
    example = example_value(field, conf) or ("[2,4]" if kind == "list of int" else None)
    such_as = f", such as {path}={example}" if example else ""
    if field.schema is not None:
        return f"{typed}: it has fields of its own, see --help {path}"

    if kind.startswith("list of "):
        of, single = kind.removeprefix("list of "), value and not value.startswith("[")
        if single and value != "null" and (of == "str" or is_of_kind(value, of)):
            return f"{typed}: a list is needed: {path}=[{value}]"
        return f"{typed}: a list of {TYPE_PLURALS.get(of, of)} is needed{such_as}"
    if value.startswith("[") and kind in TYPE_NOUNS:
        runs = value.strip("[]").replace(" ", "")
        each = f"for one run per value: -m {path}={runs}"
        return f"{typed}: {TYPE_NOUNS[kind]} is needed, not a list; {each}"
    if kind == "int" and is_of_kind(value, "float") and float(value).is_integer():
        such_as = f", such as {path}={float(value):.0f}"
    return f"{typed}: {TYPE_NOUNS.get(kind, kind)} is needed{such_as}"


def example_value(field: FieldInfo, conf: Path) -> str | None:
    """Return a valid value, written as a user types it, from a main file or from the default."""
    values = [
        flatten(cast(dict[str, Any], yaml.safe_load(file.read_text()))).get(field.path)
        for file in sorted(conf.glob("*.yaml"))
    ]
    kind = field.kind.removesuffix(" or null")
    of = kind.removeprefix("list of ")
    for value in (*values, field.default):
        entries = cast(list[Any], value)[:3] if isinstance(value, list) else [value]
        if isinstance(value, list) == kind.startswith("list") and entries:
            typed = [typed_value(entry) for entry in entries]
            if all(is_of_kind(entry, of) for entry in typed):
                return f"[{','.join(typed)}]" if isinstance(value, list) else typed[0]
    return None


def quote_for_shell(key: str, value: str) -> str:
    r"""Return `key=value` quoted for Hydra and then for a shell.

    >>> print(quote_for_shell("name", "a(b"), quote_for_shell("name", "${x"))
    "name='a(b'" 'name='"'"'\${x'"'"''
    """
    value = value.replace("'", "\\'").replace("${", "\\${")
    slashes = value[len(value.rstrip("\\")) :]
    # Trailing backslashes are doubled, because an odd number of backslashes would escape the quote.
    text = f"{key}='{value}{slashes}'"
    return shlex.quote(text) if re.search(r'["$`\\!]', value) else f'"{text}"'


def to_type(key: str, value: str, kind: str | None) -> str:
    """Return `key=value` quoted for a shell, so that Hydra reads a single value.

    Args:
        key: key of a field or a group.
        value: intended value.
        kind: type of the field in words, or None if unknown.

    >>> print(to_type("seed", "3", "int"), to_type("pool", "a b,c", "str or null"))
    seed=3 "pool='a b,c'"
    >>> print(to_type("steps", "[3, 4]", "list of int"), to_type("name", "a b", "str"))
    'steps=[3, 4]' 'name=a b'
    """
    is_text = (kind is None or kind.startswith("str")) and value[:1] not in "'\"["
    special = re.search(r"[,{}()\[\];#&!\n]|\$\{", value)
    return quote_for_shell(key, value) if is_text and special else shlex.quote(f"{key}={value}")


def is_of_kind(value: str, kind: str) -> bool:
    """Return True if a value can be read as `int`, `float`, `bool` or `str`."""
    if kind in ("int", "float"):
        try:
            float(value) if kind == "float" else int(value)
        except ValueError:
            return False
        return True
    if kind == "bool":
        return value in ("true", "false")
    return kind == "str" and bool(re.fullmatch(r"[\w.-]*[a-z][\w.-]*", value)) and value != "null"


def field_at(path: str, fields: Iterable[FieldInfo]) -> FieldInfo | None:
    """Return the field at a path, or the list field that contains the path, or None."""
    path = re.sub(r"\[\d+\].*", "", path)
    return next((field for field in fields if field.path == path), None)
