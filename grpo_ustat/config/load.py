"""Schemas of the commands, and construction of checked configurations from composed values.

Values come from `conf/`, or from the schemas for fields that `conf/` does not set. This module does
not import torch, so that invalid configurations are refused before any slow import.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import asdict, fields
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast, get_type_hints

import yaml

from grpo_ustat.config.baseline import BaselineConfig, baseline_choice, complete_plugin_options
from grpo_ustat.config.data import DATASETS
from grpo_ustat.config.gap import KINDS, THEOREMS, GapConfig
from grpo_ustat.config.mse import MseConfig
from grpo_ustat.config.presets import PRESETS
from grpo_ustat.config.run import ReportEntry
from grpo_ustat.config.schema import (
    ConfigError,
    FieldInfo,
    check_choice,
    did_you_mean,
    fields_of,
    flatten,
)
from grpo_ustat.config.train import TrainConfig
from grpo_ustat.config.values import field_at, typed_value, wrong_value
from grpo_ustat.estimators.baselines import plugin_baselines
from grpo_ustat.terminal.streams import SURROGATE, single_line

if TYPE_CHECKING:
    from omegaconf.errors import ValidationError

PACKAGE = Path(__file__).resolve().parents[1]
# The first folder exists in an installed wheel, and the second in a source checkout.
CONF = next(c for c in (PACKAGE / "conf", PACKAGE.parent / "conf") if (c / "mse.yaml").is_file())
# Schemas of the nodes whose fields depend on their field `kind`, keyed by node and by kind.
KIND_SCHEMAS: dict[str, Mapping[str, type]] = {
    "dataset": DATASETS,
    "theorem": KINDS,
}
NODE_NOUNS = {"dataset": "data set", "theorem": "theorem"}
SCHEMAS = {"mse": MseConfig, "train": TrainConfig, "gap": GapConfig, "report": ReportEntry}


def build_config(config: Any, schema: type) -> Any:
    """Build a checked instance of a schema from a composed configuration.

    Args:
        config: OmegaConf node or dictionary, without a `hydra` node. Strings in a dictionary are
            not interpolated.
        schema: one of `SCHEMAS`.
    """
    # Imported here, because commands that only read values from files do not need it.
    from omegaconf import OmegaConf
    from omegaconf.errors import (
        ConfigKeyError,
        MissingMandatoryValue,
        OmegaConfBaseException,
        ValidationError,
    )

    if not OmegaConf.is_config(config):
        config = OmegaConf.create(_literal(config))
    try:
        base = OmegaConf.structured(schema)
        for name, kinds in kinds_of(schema).items():
            base[name] = _kind_schema(config, name, kinds)
        result: Any = OmegaConf.to_object(OmegaConf.merge(base, config))
    except MissingMandatoryValue as error:
        raise ConfigError(f"{error.full_key} has no value: set {error.full_key}=...") from error
    except ValidationError as error:
        raise ConfigError(type_error(error, schema, config)) from error
    except ConfigKeyError as error:
        paths = [field.path for field in all_fields(schema)]
        hint = did_you_mean(error.full_key or "", paths) or "see --help for the known keys"
        raise ConfigError(f"unknown key {error.full_key}: {hint.strip()}") from error
    except OmegaConfBaseException as error:
        lines = [line.strip() for line in str(error).splitlines() if line.strip()]
        raise ConfigError("; ".join(lines[:2])) from error
    for path, value in flatten(asdict(result)).items():
        for text in cast(list[Any], value) if isinstance(value, list) else [value]:
            if isinstance(text, str) and SURROGATE.search(text):
                raise ConfigError(f"{path}={text!r:.60}: use valid Unicode text")
    if isinstance(result, (MseConfig, TrainConfig)):
        complete_plugin_options(result.baseline, "baseline.name")
    if isinstance(result, MseConfig):
        for name in plugin_baselines(result.baselines):
            typed = BaselineConfig(name, result.baseline_options.get(name, {}))
            complete_plugin_options(typed, "baselines")
            result.baseline_options[name] = typed.options
    result.check()
    return result


def values_of(group: str, name: str, command: type = TrainConfig) -> dict[str, Any]:
    """Return the values that `group=name` sets in a command's node.

    The values come from the file, from the files in its defaults list, and from the schema.

    >>> values_of("dataset", "math500")["path"], values_of("prompt", "bare")["shots"]
    ('DigitalLearningGmbH/MATH-lighteval', 0)
    """
    content = _content(CONF / group / f"{name}.yaml")
    schema = get_type_hints(command).get(group, Any)
    values: dict[str, Any] = {} if schema is Any else asdict(schema())
    for base in content.pop("defaults", ()):
        values |= values_of(group, base, command)
    return values | content


def default_values(entry: str) -> tuple[dict[str, Any], dict[str, str | None]]:
    """Return a command's default values, keyed by path, and the default choice of each group.

    Hydra is not used, because importing it takes longer than printing the help.

    Args:
        entry: key of `SCHEMAS`.
    """
    schema, main = SCHEMAS[entry], _content(CONF / f"{entry}.yaml")
    values = {key.path: key.default for key in fields_of(schema) if key.schema is None}
    choices: dict[str, str | None] = {}
    for default in _defaults(main):
        if isinstance(default, dict):
            chosen = {x: y for x, y in default.items() if not x.startswith("override ")}
            choices |= chosen
            for group, choice in chosen.items():
                values |= flatten(_chosen(group, choice, schema))
        elif (CONF / f"{default}.yaml").is_file():
            values |= flatten(_content(CONF / f"{default}.yaml"))
    values |= flatten(main)
    for path, value in values.items():
        if value == "${learning_rate:}":
            values[path] = values[f"model.{'lora_' if values['lora.r'] else ''}learning_rate"]
        elif isinstance(value, str) and (reference := re.fullmatch(r"\$\{([\w.]+)\}", value)):
            values[path] = values[reference[1]]
    return values, choices


def _content(file: Path) -> dict[str, Any]:
    return yaml.safe_load(file.read_text())


def _defaults(content: dict[str, Any]) -> list[str | dict[str, str | None]]:
    return content.pop("defaults", [])


def _chosen(group: str, choice: str | None, schema: type) -> dict[str, Any]:
    """Return the nested values that `group=choice` sets, possibly in several nodes."""
    if choice is None:
        return {}
    if group == "baseline":
        return {group: asdict(baseline_choice(choice))}
    if group == "objective":
        return {group: asdict(PRESETS[choice].objective)}
    if group == "theorem":
        return {group: asdict(THEOREMS[choice])}
    if "# @package _global_" not in (CONF / group / f"{choice}.yaml").read_text():
        return {group: values_of(group, choice, schema)}
    content = _content(CONF / group / f"{choice}.yaml")
    values: dict[str, Any] = {}
    for default in _defaults(content):
        for node, other in default.items() if isinstance(default, dict) else ():
            values |= _chosen(node.removeprefix("override /"), other, schema)
    return values | content


def _literal(value: Any) -> Any:
    r"""Escape every `${` in a nested value with `\`, so that OmegaConf does not interpolate it."""
    if isinstance(value, str):
        return re.sub(r"(\\*)\$\{", lambda match: f"{match[1] * 2}\\${{", value)
    if isinstance(value, dict):
        return {key: _literal(entry) for key, entry in cast(dict[Any, Any], value).items()}
    return [_literal(x) for x in cast(list[Any], value)] if isinstance(value, list) else value


def type_error(error: ValidationError, schema: type, config: Any, typed: str | None = None) -> str:
    """Return the error message for a value of the wrong type.

    Args:
        error: error of OmegaConf.
        schema: one of `SCHEMAS`.
        config: OmegaConf node or dictionary that contains the value.
        typed: value as the user typed it, or None if unknown.
    """
    field = field_at(error.full_key or "", all_fields(schema))
    if field is None:
        return single_line(error)
    if typed is None:
        from omegaconf import OmegaConf

        typed = typed_value(OmegaConf.select(OmegaConf.create(config), field.path))
    return wrong_value(field, typed, CONF)


@cache
def all_fields(schema: type) -> tuple[FieldInfo, ...]:
    """Return all fields of a schema, including those that exist only for some kinds of a node."""
    of_kinds = [(name, kind) for name, kinds in kinds_of(schema).items() for kind in kinds.values()]
    further = (key for name, kind in of_kinds for key in fields_of(kind, f"{name}."))
    return (*fields_of(schema), *further)


def kinds_of(schema: type) -> dict[str, Mapping[str, type]]:
    """Return the nodes whose fields depend on their kind, with the schema of each kind.

    >>> list(kinds_of(TrainConfig)), list(kinds_of(GapConfig))
    (['dataset'], ['theorem'])
    """
    hints = get_type_hints(schema)
    return {name: kinds for name, kinds in KIND_SCHEMAS.items() if hints.get(name) is Any}


def _kind_schema(config: Any, name: str, kinds: Mapping[str, type]) -> type:
    """Return the schema for a node's kind; refuse fields that this schema does not have."""
    values = config.get(name)
    if values is None:
        raise ConfigError(f"{name} has no value: choose by {name}=NAME")
    check_choice(f"{name}.kind", values.kind, tuple(kinds))
    schema = kinds[values.kind]
    declared = {field.name for field in fields(schema)}
    for key in (key for key in values if key not in declared):
        raise ConfigError(
            f"{name}.kind={values.kind} has no field {name}.{key}: use {name}=NAME to choose a "
            f"{NODE_NOUNS[name]} with this field"
        )
    return schema
