"""Options of a command: config groups with their choices, and fields with their values."""

from __future__ import annotations

import re
from argparse import Namespace
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException

from grpo_ustat.cli.choices import fits
from grpo_ustat.config.baseline import BaselineConfig
from grpo_ustat.config.command_line import program
from grpo_ustat.config.gap import THEOREMS
from grpo_ustat.config.load import CONF, KIND_SCHEMAS, SCHEMAS, default_values, kinds_of
from grpo_ustat.config.presets import PRESETS
from grpo_ustat.config.run import Shared
from grpo_ustat.config.schema import UNSET, FieldInfo, fields_of
from grpo_ustat.config.values import typed_value
from grpo_ustat.estimators.baselines import BASELINES

LAUNCHER = "hydra/launcher"
# Descriptions of config groups that set fields of several nodes, or whose name is not a node.
GROUP_MEANINGS = {
    "theorem": "the paper's result to test",
    "experiment": "all settings of a figure, table or check",
    "debug": "a run that ends in seconds",
    LAUNCHER: "where a sweep (-m) starts its runs",
}
SENTENCE_BREAK = re.compile(r"(?<=\.) (?=[A-Z])")
# If a description has more characters, only its first sentence is shown.
MAX_COMMENT_CHARACTERS = 100


@dataclass(frozen=True)
class Choice:
    """Choice of a config group: a YAML file, or a built-in baseline or objective."""

    name: str
    # First comment of the file, or description of the baseline or objective.
    words: str


@dataclass(frozen=True)
class Group:
    """Config group: fields that `name=choice` sets together."""

    name: str
    meaning: str
    # Name of the current choice; None if nothing is chosen.
    chosen: str | None
    choices: tuple[Choice, ...]
    # True if the group has a current choice, so that `name=choice` replaces it.
    settable: bool = True


@dataclass(frozen=True)
class Field:
    """Field with its value as typed on a command line, or `???` if it must be set."""

    key: FieldInfo
    value: str


@dataclass(frozen=True)
class CommandOptions:
    """All options of a command."""

    # The command.
    entry: str
    # Purpose of the command in one or two sentences.
    purpose: str
    # Example commands, each with a short description.
    commands: tuple[tuple[str, str], ...]
    groups: tuple[Group, ...]
    # Description of each top-level node.
    nodes: dict[str, str]
    fields: tuple[Field, ...]


def command_options(entry: str, words: Namespace) -> CommandOptions:
    """Return the options of a command with the values that a command line sets.

    Args:
        entry: key of `SCHEMAS`.
        words: command line as parsed by Hydra, without search words.
    """
    # This import loads Hydra and is therefore local.
    from grpo_ustat.cli.compose import whole_node

    node, schema = whole_node(entry, words), SCHEMAS[entry]
    kinds = {name: node[name].kind for name in KIND_SCHEMAS if "kind" in (node.get(name) or ())}
    schemas = {
        name: KIND_SCHEMAS[name][kind] for name, kind in kinds.items() if kind in KIND_SCHEMAS[name]
    }
    keys = list(fields_of(schema, schemas=schemas))
    folders = [CONF, *([Path(words.config_dir)] if words.config_dir else [])]
    groups: list[Group] = []
    if issubclass(schema, Shared):
        chosen = node.hydra.runtime.choices
        nodes = {key.path: key for key in fields_of(schema) if "." not in key.path}
        names = [str(name).partition("@")[0] for name in chosen]
        names = [name for name in names if not name.startswith("hydra/")]
        # Hydra lists the groups in reverse order.
        for group in reversed(dict.fromkeys(names)):
            files = [file for file in _files(group, folders) if fits(file, schema)]
            words_of = {file.stem: first_comment(file) for file in files}
            ours = {"baseline": BASELINES, "objective": PRESETS, "theorem": THEOREMS}.get(group, {})
            words_of = {name: short(choice.words) for name, choice in ours.items()} | words_of
            choices = tuple(Choice(name, words_of[name]) for name in sorted(words_of))
            meaning = _group_meaning(group, nodes)
            groups.append(Group(group, meaning, chosen.get(group), choices, group in chosen))
        launchers = [Choice(file.stem, first_comment(file)) for file in _files(LAUNCHER, folders)]
        launchers.insert(0, Choice("basic", "On this machine, one after the other."))
        meaning = GROUP_MEANINGS[LAUNCHER]
        groups.append(Group(LAUNCHER, meaning, chosen[LAUNCHER], tuple(launchers)))
    return CommandOptions(
        entry=entry,
        purpose=node.hydra.help.header.strip(),
        commands=_commands(node.hydra.help.template),
        groups=tuple(groups),
        nodes={key.path: key.meaning for key in keys if "." not in key.path},
        fields=tuple(_fields(keys, node)),
    )


def default_options(entry: str) -> CommandOptions:
    """Return a command's default options; their config groups do not list their choices.

    Args:
        entry: a key of `SCHEMAS`.
    """
    values, chosen = default_values(entry)
    schema = SCHEMAS[entry]
    kinds = {name: of[values[f"{name}.kind"]] for name, of in kinds_of(schema).items()}
    keys = list(fields_of(schema, schemas=kinds))
    nodes = {key.path: key for key in keys if "." not in key.path}
    return CommandOptions(
        entry=entry,
        purpose=values["hydra.help.header"].strip(),
        commands=_commands(values["hydra.help.template"]),
        groups=tuple(Group(x, _group_meaning(x, nodes), chosen[x], ()) for x in chosen),
        nodes={path: key.meaning for path, key in nodes.items()},
        fields=tuple(
            Field(key, typed_value(_number(key, values[key.path])))
            for key in keys
            if key.path in values
        ),
    )


def _number(key: FieldInfo, value: Any) -> Any:
    """Return a value in the field's type, since YAML reads 1 as an integer and 1e-3 as text."""
    if value in (None, UNSET):
        return value
    if key.kind.startswith("list of float"):
        return [float(x) for x in value]
    return float(value) if key.kind.startswith("float") else value


def _commands(template: str) -> tuple[tuple[str, str], ...]:
    """Return the commands of a main file's `hydra.help.template`, each with its comment."""
    lines = re.sub("(?m)^grpo-ustat", lambda _: program(), template).splitlines()
    pairs = [line.partition("  #") for line in lines]
    return tuple((command.strip(), words.strip()) for command, _, words in pairs)


def _group_meaning(group: str, nodes: dict[str, FieldInfo]) -> str:
    if group in GROUP_MEANINGS:
        return GROUP_MEANINGS[group]
    return nodes[group].meaning.partition(";")[0] if group in nodes else ""


def _fields(keys: list[FieldInfo], node: DictConfig) -> Iterator[Field]:
    for key in keys:
        if key.path == "baseline_options":
            (options,) = (x for x in fields_of(BaselineConfig) if x.path == "options")
            for name in node.baseline_options:
                yield from _entry_fields(replace(options, path=f"{key.path}.{name}"), node)
        elif key.schema is None:
            yield Field(key, typed_value(_value(node, key.path)))
            yield from _entry_fields(key, node)


def _entry_fields(key: FieldInfo, node: DictConfig) -> Iterator[Field]:
    """Yield a field for each entry of a dictionary, such as an option of a baseline."""
    for name, value in (_value(node, key.path) or {}).items() if key.entries else ():
        path, meaning = f"{key.path}.{name}", key.entries.get(name, "")
        entry = replace(key, path=path, kind="float", meaning=meaning, entries={})
        yield Field(entry, typed_value(value))


def _value(node: DictConfig, path: str) -> Any:
    above, _, name = path.rpartition(".")
    try:
        parent = OmegaConf.select(node, above) if above else node
        return "???" if OmegaConf.is_missing(parent, name) else parent[name]
    # The value is computed from a field that is not set yet.
    except OmegaConfBaseException:
        return "???"


def _files(group: str, folders: list[Path]) -> list[Path]:
    files = [file for folder in folders for file in (folder / group).glob("*.yaml")]
    return sorted(files, key=lambda file: file.stem)


def first_comment(file: Path) -> str:
    """Return the comment at the start of a configuration file; see `short`."""
    lines = []
    for line in file.read_text().splitlines():
        if line.startswith("# @package"):
            continue
        # The comment ends here, or a command to copy begins.
        if not line.startswith("# ") or line.startswith("#  "):
            break
        lines.append(line.removeprefix("# "))
    return short(" ".join(lines).removesuffix(":"))


def short(text: str) -> str:
    """Return a description, or only its first sentence if it is long."""
    return text if len(text) <= MAX_COMMENT_CHARACTERS else SENTENCE_BREAK.split(text)[0]
