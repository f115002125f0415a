"""Which entries a configuration file is for, told by what it sets."""

from __future__ import annotations

import re
from dataclasses import fields, is_dataclass
from pathlib import Path
from typing import get_type_hints

import yaml

from grpo_ustat.config import SCHEMAS

GROUPS = {"mse": {"policy", "debug"}, "train": {"debug"}}  # that are no fields of the schema


def overlays(file: Path) -> bool:
    """Whether a file sets fields of any node."""
    return "# @package _global_" in file.read_text()


def fits(file: Path, schema: type) -> bool:
    """Whether an entry knows all that a file of its groups sets, as far as that can be told.

    What a file sweeps over has to fit as well.
    """
    text = file.read_text()
    keys = set(re.findall(r"^(\w+):", text, re.MULTILINE)) - {"defaults", "hydra"}
    if not overlays(file):
        node = get_type_hints(schema).get(file.parent.name)
        return not is_dataclass(node) or keys <= {field.name for field in fields(node)}
    keys |= set(re.findall(r"^ +- override /(\w+)", text, re.MULTILINE)) - {"hydra"}
    return keys <= names(schema) and all(fits(other, schema) for other in _swept(file))


def names(schema: type) -> set[str]:
    """What an override of an entry's can begin with."""
    more = [groups for name, groups in GROUPS.items() if SCHEMAS[name] is schema]
    return {field.name for field in fields(schema)}.union(*more)


def _swept(file: Path) -> list[Path]:
    """The files that an overlay runs one after the other."""
    try:
        swept = yaml.safe_load(file.read_text())["hydra"]["sweeper"]["params"].items()
    except (yaml.YAMLError, LookupError, TypeError, AttributeError):  # it says nothing of a sweep
        return []
    others = [
        file.parent.parent / group / f"{choice}.yaml"
        for group, choices in swept
        for choice in str(choices).split(",")
    ]
    return [other for other in others if other.is_file()]
