"""What Hydra and OmegaConf complain of, in one line that says what to type instead."""

from __future__ import annotations

import difflib
import re
from collections.abc import Iterator, Sequence
from dataclasses import fields
from pathlib import Path

from omegaconf import DictConfig, OmegaConf

from grpo_ustat.config import SCHEMAS, WORDS, kinds_of
from grpo_ustat.overlays import fits, names, overlays
from grpo_ustat.run_config import Shared

ELSEWHERE = {  # what other trainers call it
    "num_generations": "group_size",
    "lr": "learning_rate",
    "gradient_accumulation_steps": "micro_batch_tokens, the padded tokens of a backward pass",
    "per_device_train_batch_size": "budget.rollouts, completions a step on all devices",
    "num_train_epochs": "max_steps",
    "loss_type": "objective=dapo and the like, or objective.loss_type",
    "beta": "objective.beta",
    "use_vllm": "rollout=vllm",
}
RUNS = {name: schema for name, schema in SCHEMAS.items() if issubclass(schema, Shared)}


def one_line(error: Exception, schema: type, conf: Path) -> str:
    """A message in one line, with what is known where something is unknown.

    Args:
        error: of Hydra or OmegaConf, while a configuration was composed.
        schema: of the entry that was asked.
        conf: the folder of configuration files.
    """
    text = " ".join(f"{error} {error.__cause__ or ''}".split())
    if said := _of_choice(text, schema, conf) or _of_file(text, schema, conf):
        return said
    if "hydra/launcher/submitit" in text:
        return "SLURM needs hydra-submitit-launcher: pip install 'grpo-ustat[slurm]'"
    missing = re.search(r"Missing mandatory value: (\S+)", text)
    if missing:
        return f"{missing.group(1)} has no value: set {missing.group(1)}=..."
    unknown = re.match(r"Could not override '([^']+)'", text)
    return _unknown(unknown.group(1), schema) if unknown else text.removesuffix(" None")


def _of_choice(text: str, schema: type, conf: Path) -> str:
    """Of a group's choice that is not there: those that the entry can take."""
    choice = re.search(
        r"Could not find '([^']+)/([^'/]+)' Available options in '[^']+': (.*?) Conf", text
    )
    if not choice:
        return ""
    group, asked, known = choice.groups()
    files = {name: conf / group / f"{name}.yaml" for name in known.split()}
    fit = [name for name, file in files.items() if not file.is_file() or fits(file, schema)]
    return f"unknown {group} {asked!r}: choose from {', '.join(fit)}"


def _of_file(text: str, schema: type, conf: Path) -> str:
    """Of a file that sets what the entry does not know: the entries that it is for."""
    foreign = re.match(r"In '([^']+)': (Could not override|ConfigKeyError raised)", text)
    file = conf / f"{foreign[1]}.yaml" if foreign else None
    if file is None or not file.is_file():
        return ""
    group = set() if overlays(file) else {file.parent.name}
    others = [one for one in RUNS.values() if group <= names(one) and fits(file, one)]
    if not others or schema in others:
        return ""
    return f"{foreign[1].replace('/', '=')} is {_one_of(others)}"


def _unknown(key: str, schema: type) -> str:
    """What to say of a key that an entry does not know."""
    if key in ELSEWHERE:
        where = "here" if schema is SCHEMAS["train"] else "in train"
        return f"unknown key {key}: {where} it is {ELSEWHERE[key]}"
    node, _, field = key.partition(".")
    kinds = [name for name, kind in kinds_of(schema).get(node, {}).items() if _has(kind, field)]
    if kinds:
        return (
            f"unknown key {key}: it is of {node}.kind={' or '.join(kinds)}, choose such a "
            f"{WORDS[node]} by {node}=NAME"
        )
    if others := _owners(key, schema):
        return f"unknown key {key}: it is {_one_of(others)}"
    if key.startswith("dataset.options"):
        return f"unknown key {key}: options of a task of your own are added, +{key}=..."
    near = difflib.get_close_matches(key, _known(schema), n=1, cutoff=0.5)
    hint = f"did you mean {near[0]}?" if near else "see --help for the known keys"
    return f"unknown key {key}: {hint}"


def _has(schema: type, field: str) -> bool:
    return field in {one.name for one in fields(schema)}


def _owners(key: str, asked: type) -> list[type]:
    """The other entries that know a key, or what it begins with, where the one asked does not."""
    top = key.partition(".")[0]
    others = [schema for schema in RUNS.values() if schema is not asked]
    exact = [schema for schema in others if key in _known(schema)]
    return exact or [schema for schema in others if top in names(schema) - names(asked)]


def _one_of(schemas: Sequence[type]) -> str:
    names = [name for name, schema in RUNS.items() if schema in schemas]
    of = [f"{name}'s" for name in names]
    commands = " or ".join(f"python -m grpo_ustat.{name}" for name in names)
    return f"one of {' or '.join(of)}, {commands}"


def _known(schema: type) -> list[str]:
    """Every key, those of all kinds included."""
    of_kinds = [
        f"{node}.{field.name}"
        for node, kinds in kinds_of(schema).items()
        for kind in kinds.values()
        for field in fields(kind)
    ]
    return list(dict.fromkeys([*_keys(OmegaConf.structured(schema)), *of_kinds]))


def _keys(node: DictConfig, prefix: str = "") -> Iterator[str]:
    for key in node:
        yield prefix + key
        child = node._get_node(key)
        if isinstance(child, DictConfig):
            yield from _keys(child, f"{prefix}{key}.")
