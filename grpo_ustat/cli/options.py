"""All that can be written on an entry's command line: groups with choices, fields with values."""

from __future__ import annotations

import re
from argparse import Namespace
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException

from grpo_ustat.composing import CONF, whole_node
from grpo_ustat.config import OF_KIND, SCHEMAS, BaselineConfig
from grpo_ustat.meanings import Key, keys_of
from grpo_ustat.overlays import fits, overlays
from grpo_ustat.run_config import Shared

LAUNCHER = "hydra/launcher"
MEANINGS = {  # of groups that set fields of several nodes, or that have no node of their name
    "baseline": "the rules to compare: baselines=[NAME,NAME]; all their options are under rules",
    "policy": "model, data set, prompt and length together, for sweeps",
    "study": "a study of the paper, or of ours",
    "experiment": "everything that one figure, table or check needs",
    "debug": "a run that ends in seconds",
    LAUNCHER: "where a sweep (-m) starts its runs",
}
SENTENCE = re.compile(r"(?<=\.) (?=[A-Z])")
LONG = 100  # characters of a choice's words from which on the first sentence must do


@dataclass(frozen=True)
class Choice:
    """One file of a group, and what its first comment says."""

    name: str
    words: str


@dataclass(frozen=True)
class Group:
    """Fields that are set together, by `name=choice`.

    Attributes:
        chosen: its choice; None where nothing is chosen.
        settable: whether `name=choice` is how to choose.
    """

    name: str
    meaning: str
    chosen: str | None
    choices: tuple[Choice, ...]
    settable: bool = True


@dataclass(frozen=True)
class Field:
    """A field with its value, as one would type it; `???` where one has to be given."""

    key: Key
    value: str


@dataclass(frozen=True)
class Catalogue:
    """Of one entry, for the choices on a command line.

    Attributes:
        purpose: of the entry, in a sentence or two.
        commands: to copy, each with a few words.
        nodes: the meaning of each top-level node.
    """

    entry: str
    purpose: str
    commands: tuple[tuple[str, str], ...]
    groups: tuple[Group, ...]
    nodes: dict[str, str]
    fields: tuple[Field, ...]


def catalogue(entry: str, words: Namespace) -> Catalogue:
    """What a command line can say, and what it stands for now.

    Args:
        entry: a key of `SCHEMAS`.
        words: the command line as Hydra reads it, its overrides without any other word.

    Raises:
        ConfigError: a choice or a field that is not known.
    """
    node, schema = whole_node(entry, words), SCHEMAS[entry]
    runs = issubclass(schema, Shared)
    known = list(keys_of(schema, schemas=_of_kinds(node)))
    homes = [CONF, *([Path(words.config_dir)] if words.config_dir else [])]
    lines = [line.split("  #") for line in node.hydra.help.template.splitlines()]
    return Catalogue(
        entry=entry,
        purpose=node.hydra.help.header.strip(),
        commands=tuple((line[0].strip(), line[-1].strip()) for line in lines),
        groups=tuple(_groups(schema, node.hydra.runtime.choices, homes)) if runs else (),
        nodes={key.path: key.meaning for key in known if "." not in key.path},
        fields=tuple(_fields(known, node)),
    )


def _of_kinds(node: DictConfig) -> dict[str, type]:
    """The schemas that kinds name, of nodes that have one."""
    kinds = {name: node[name].kind for name in OF_KIND if "kind" in (node.get(name) or ())}
    return {name: OF_KIND[name][kind] for name, kind in kinds.items() if kind in OF_KIND[name]}


def _fields(known: list[Key], node: DictConfig) -> Iterator[Field]:
    for key in known:
        if key.path == "rules":
            yield from (
                one
                for name in node.rules
                for inner in keys_of(BaselineConfig, f"rules.{name}.")
                for one in _options(inner, node)
            )
        elif key.schema is None:
            yield Field(key, shown(_value(node, key.path)))
            yield from _options(key, node)


def _options(key: Key, node: DictConfig) -> Iterator[Field]:
    """A field of each option that a dictionary holds."""
    for name, value in (_value(node, key.path) or {}).items() if key.entries else ():
        path, meaning = f"{key.path}.{name}", key.entries[name]
        yield Field(
            replace(key, path=path, kind="float", meaning=meaning, entries={}), shown(value)
        )


def _value(node: DictConfig, path: str) -> Any:
    above, _, name = path.rpartition(".")
    try:
        parent = OmegaConf.select(node, above) if above else node
        return "???" if OmegaConf.is_missing(parent, name) else parent[name]
    except OmegaConfBaseException:  # made of what is still to be given
        return "???"


def shown(value: Any) -> str:
    """A value as one would type it.

    >>> shown(None), shown([1, 2]), shown(True), shown("a b")
    ('null', '[1,2]', 'true', "'a b'")
    """
    if value is None or isinstance(value, bool):
        return {None: "null", True: "true", False: "false"}[value]
    if OmegaConf.is_list(value) or isinstance(value, list):
        return f"[{','.join(map(shown, value))}]"
    if OmegaConf.is_dict(value):
        return "{" + ",".join(f"{key}:{shown(one)}" for key, one in value.items()) + "}"
    plain = not isinstance(value, str) or re.fullmatch(r"[\w.:/?+-]+", value)
    return str(value) if plain else repr(value)


def _groups(schema: type, chosen: DictConfig, homes: list[Path]) -> Iterator[Group]:
    """Groups of the entry's defaults, with the choices that the entry can take."""
    nodes = {key.path: key for key in keys_of(schema) if "." not in key.path}
    places = {name: name.partition("@")[0] for name in chosen if not name.startswith("hydra/")}
    for group in reversed(dict.fromkeys(places.values())):  # Hydra's are from the last to the first
        files = [f for f in _files(group, homes) if fits(f, schema)]
        sets_node = group in nodes and not any(map(overlays, files))
        meaning = nodes[group].meaning.partition(";")[0] if sets_node else MEANINGS.get(group, "")
        choices = tuple(Choice(file.stem, words_of(file)) for file in files)
        yield Group(group, meaning, chosen.get(group), choices, settable=group in chosen)
    choices = [Choice(file.stem, words_of(file)) for file in _files(LAUNCHER, homes)]
    choices.insert(0, Choice("basic", "Here, one after the other."))
    yield Group(LAUNCHER, MEANINGS[LAUNCHER], chosen[LAUNCHER], tuple(choices))


def _files(group: str, homes: list[Path]) -> list[Path]:
    found = [file for home in homes for file in (home / group).glob("*.yaml")]
    return sorted(found, key=lambda file: file.stem)


def words_of(file: Path) -> str:
    """The comment that a choice begins with, or its first sentence."""
    lines = []
    for line in file.read_text().splitlines():
        if line.startswith("# @package"):
            continue
        if not line.startswith("# ") or line.startswith("#  "):  # its end, or a command
            break
        lines.append(line.removeprefix("# "))
    text = " ".join(lines).removesuffix(":")
    return text if len(text) <= LONG else SENTENCE.split(text)[0]
