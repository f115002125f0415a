"""Hydra's config groups, such as `model=NAME`, and the choices that each command accepts."""

from __future__ import annotations

import re
from dataclasses import fields, is_dataclass
from functools import cache
from pathlib import Path
from typing import get_type_hints

import yaml

from grpo_ustat.config.gap import THEOREMS
from grpo_ustat.config.load import CONF, SCHEMAS, kinds_of
from grpo_ustat.config.presets import PRESETS
from grpo_ustat.config.run import Shared
from grpo_ustat.estimators.baselines import BASELINES

RUN_SCHEMAS = {name: schema for name, schema in SCHEMAS.items() if issubclass(schema, Shared)}
# Config groups that are not fields of the schema.
EXTRA_GROUPS = {"mse": {"debug"}, "train": {"debug"}}


def command_of(schema: type) -> str:
    """Return the command of a schema."""
    return next(name for name, other in SCHEMAS.items() if other is schema)


@cache
def groups_of(schema: type) -> list[str]:
    """Return the config groups in a command's main file."""
    return re.findall(r"(?m)^  - (\w+):", (CONF / f"{command_of(schema)}.yaml").read_text())


def top_names(schema: type) -> set[str]:
    """Return the names with which an override of a command can begin."""
    return {field.name for field in fields(schema)} | EXTRA_GROUPS.get(command_of(schema), set())


def is_choice(group: str, name: str, schema: type) -> bool:
    """Return True if a built-in config group has this choice and the command accepts it."""
    if name in {"baseline": BASELINES, "objective": PRESETS, "theorem": THEOREMS}.get(group, ()):
        return group in top_names(schema)
    file = CONF / group / f"{name}.yaml"
    return file.is_file() and fits(file, schema)


def choices_of(group: str, schema: type, *, fitting: bool = True) -> list[str]:
    """Return the sorted choices of a built-in config group.

    Args:
        group: name of the config group.
        schema: schema of the command.
        fitting: True to return only the choices that the command accepts.
    """
    files = [file for file in (CONF / group).glob("*.yaml") if not fitting or fits(file, schema)]
    ours = {"baseline": BASELINES, "objective": PRESETS, "theorem": THEOREMS}.get(group, ())
    return sorted({*ours, *(file.stem for file in files)})


def is_overlay(file: Path) -> bool:
    """Return True if a file can set fields of all nodes, not only of its config group's node."""
    return "# @package _global_" in file.read_text()


def fits(file: Path, schema: type) -> bool:
    """Return True if a command has all fields that a file of a config group sets or sweeps over.

    The file is only read, not composed, so Hydra may still refuse a file that fits.
    """
    text = file.read_text()
    keys = set(re.findall(r"^(\w+):", text, re.MULTILINE)) - {"defaults", "hydra"}
    if not is_overlay(file):
        node = get_type_hints(schema).get(file.parent.name)
        return not is_dataclass(node) or keys <= {field.name for field in fields(node)}
    keys |= set(re.findall(r"^ +- override /(\w+)", text, re.MULTILINE)) - {"hydra"}
    if not keys <= top_names(schema):
        return False
    for name in keys & kinds_of(schema).keys():
        names = {field.name for kind in kinds_of(schema)[name].values() for field in fields(kind)}
        within = re.search(rf"^{name}:\n((?: .*\n)*)", text, re.MULTILINE)
        if within and not set(re.findall(r"^  (\w+):", within[1], re.MULTILINE)) <= names:
            return False
    try:
        params = dict(yaml.safe_load(text)["hydra"]["sweeper"]["params"])
    # The file defines no sweep.
    except (yaml.YAMLError, LookupError, TypeError, ValueError):
        return True
    if not {name.partition(".")[0].partition("/")[0] for name in params} <= top_names(schema):
        return False
    others = [
        file.parent.parent / group / f"{choice}.yaml"
        for group, choices in params.items()
        for choice in str(choices).split(",")
    ]
    return all(fits(other, schema) for other in others if other.is_file())
