"""One-line error messages for command lines, with the typed words and a correction.

There are five kinds of errors: an unknown key, an unknown choice of a config group, a value of the
wrong type, several values without `-m`, and a missing or unreadable value.
"""

from __future__ import annotations

import difflib
import re
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import fields

from hydra.core.override_parser.types import Override, OverrideType
from hydra.errors import HydraException, OverrideParseException
from omegaconf.errors import OmegaConfBaseException, ValidationError

from grpo_ustat.cli.choices import (
    RUN_SCHEMAS,
    choices_of,
    command_of,
    fits,
    groups_of,
    is_choice,
    is_overlay,
    top_names,
)
from grpo_ustat.cli.names import CHOICES, NAMES, meant, override_of
from grpo_ustat.cli.verbs import VERBS
from grpo_ustat.config.command_line import command_line, install_line, program
from grpo_ustat.config.gap import OTHER_COMMANDS
from grpo_ustat.config.identity import OPERATIONAL_KEYS
from grpo_ustat.config.load import CONF, NODE_NOUNS, SCHEMAS, all_fields, kinds_of, type_error
from grpo_ustat.config.schema import ConfigError, did_you_mean
from grpo_ustat.config.values import (
    example_value,
    field_at,
    is_of_kind,
    quote_for_shell,
    to_type,
    wrong_value,
)
from grpo_ustat.terminal.streams import single_line

# Hydra keys that are groups and are set as in `hydra/launcher=slurm`.
HYDRA_GROUPS = ("hydra.launcher", "hydra.sweeper", "hydra.job_logging", "hydra.hydra_logging")

# Keys over which no sweep is suggested, because different values do not define different runs.
UNSWEPT_NODES = ("hydra", "reward_funcs", "reward_weights", *OPERATIONAL_KEYS)


@contextmanager
def in_one_line(schema: type) -> Iterator[None]:
    """Turn errors of Hydra or OmegaConf into ConfigErrors; see `one_line`."""
    try:
        yield
    except (HydraException, OmegaConfBaseException) as error:
        raise ConfigError(one_line(error, schema)) from error


def check_names(overrides: Sequence[Override], schema: type) -> None:
    """Refuse unknown keys, unknown choices and words in place of numbers before Hydra composes.

    Call this only if the command line uses none of the user's configuration files, which can define
    other choices. Hydra itself checks additions, deletions, dictionary entries and its own keys.
    """
    fields = {field.path: field for field in all_fields(schema)}
    leaves = {path for path, x in fields.items() if x.schema is None} - kinds_of(schema).keys()
    for override in overrides:
        key, value = override.key_or_group, override.value()
        is_ours = override.type is OverrideType.CHANGE and override.package is None
        if not is_ours or "/" in key or key.partition(".")[0] == "hydra":
            continue
        typed = (override.input_line or "").partition("=")[2]
        if key in groups_of(schema):
            choices = choices_of(key, schema, fitting=False)
            if isinstance(value, str) and "/" not in value and value not in choices:
                raise ConfigError(_unknown_choice(key, value, choices, schema))
        elif key in fields:
            kind = fields[key].kind.removesuffix(" or null")
            is_word = isinstance(value, str) and "${" not in value and not is_of_kind(value, kind)
            if is_word and kind in ("int", "float"):
                raise ConfigError(wrong_value(fields[key], typed, CONF))
        elif not any(key.startswith(f"{leaf}.") for leaf in leaves):
            raise ConfigError(unknown_key(key, schema, typed))


def check_overrides(overrides: Sequence[Override], schema: type) -> None:
    """Refuse overrides that Hydra or OmegaConf would misread."""
    for override in overrides:
        line, key, value = override.input_line, override.key_or_group, override.value()
        if not key:
            raise ConfigError(f"{line} is not KEY=VALUE: write KEY=VALUE, {_example(schema)}")
        if key in HYDRA_GROUPS:
            raise ConfigError(f"{line}: write {key.replace('.', '/')}={value}")
        is_name = isinstance(value, str | list) or override.is_sweep_override()
        is_group = key in ("hydra", *groups_of(schema)) or "/" in key
        if is_group and not is_name and not override.is_delete():
            # theorem=7 means theorem=theorem7.
            numbered = f"{key}{value}"
            hint = f"write {key}={numbered}" if is_choice(key, numbered, schema) else ""
            raise ConfigError(f"{line}: {hint or f'a name is needed, see --help {key}'}")
        field = field_at(key, all_fields(schema))
        if elsewhere := is_name and _choice_elsewhere(key, str(value), schema):
            raise ConfigError(elsewhere)
        # OmegaConf would read any number except 0 as true, but only 0 and 1 are accepted here.
        is_number = isinstance(value, int | float) and value not in (0, 1)
        if field and field.kind == "bool" and is_number:
            raise ConfigError(wrong_value(field, str(value), CONF))


def _choice_elsewhere(key: str, value: str, schema: type) -> str | None:
    """Return the error for `node=value` if the node is no config group but a group has the choice.

    Return None if no config group has this choice.
    """
    fields_there = [field_at(key, all_fields(x)) for x in RUN_SCHEMAS.values()]
    is_node = any(field and field.schema for field in fields_there)
    if not is_node or any(key in groups_of(x) for x in RUN_SCHEMAS.values()):
        return None
    if here := [x for x in groups_of(schema) if is_choice(x, value, schema)]:
        return f"{key}={value}: write {' or '.join(f'{group}={value}' for group in here)}"
    for name, other in RUN_SCHEMAS.items():
        for group in groups_of(other):
            if is_choice(group, value, other):
                return f"{key}={value}: write {command_line(name, f'{group}={value}')}"
    return None


def several_values(override: Override, schema: type) -> str:
    """Return the error message for several values of a key without `-m`."""
    key, (_, _, value) = override.key_or_group, (override.input_line or "").partition("=")
    field, node = field_at(key, all_fields(schema)), key.partition(".")[0].partition("/")[0]
    if field is None and node not in {"hydra", *top_names(schema)}:
        return unknown_key(key, schema, value)
    kind, fixes = field.kind if field and key not in groups_of(schema) else "", []
    is_list = kind.startswith(("list", "any"))
    # The value is a call, such as range(0,3).
    is_call = re.match(r"\w+\(", value)
    if is_list and not is_call:
        fixes.append(f"write {key}=[{value}]")
    if not is_call and (kind.startswith(("str", "any")) or key == "model" or node == "hydra"):
        fixes.append(f"if it is a single value, quote it: {quote_for_shell(key, value)}")
    if schema in RUN_SCHEMAS.values() and node not in UNSWEPT_NODES:
        each = re.sub(r"([^,]+)", r"[\1]", value) if is_list and not is_call else value
        runs = command_line(command_of(schema), "-m", f"{key}={each}")
        fixes.append(f"add -m for one run per value, as in {runs}")
    fixes = fixes or [f"use a single value, such as {key}={value.partition(',')[0]}"]
    return f"{key}={value} has several values: {', or '.join(fixes)}"


def one_line(error: Exception, schema: type) -> str:
    """Return the message of an error in one line, with valid names if a name is unknown.

    Args:
        error: error of Hydra or OmegaConf during composition.
        schema: schema of the command.
    """
    text = " ".join(f"{error} {error.__cause__ or ''}".split())
    cause = error if isinstance(error, ValidationError) else error.__cause__
    typed = re.match(r"Error merging override [+]*[^=]+=(.*)", str(error))
    if isinstance(cause, ValidationError) and (typed or cause is error):
        return type_error(cause, schema, {}, typed[1] if typed else None)
    if isinstance(error, OverrideParseException) and error.override:
        return single_line(_no_value(error.override, schema))
    if choice := re.search(
        r"Could not find '([^']+)/([^'/]*)' Available options in '[^']+': (.*?) Conf", text
    ):
        return _unknown_choice(choice[1], choice[2], choice[3].split(), schema)
    if in_file := re.match(r"In '([^']+)': (?:Could not override|ConfigKeyError raised)", text):
        file = CONF / f"{in_file[1]}.yaml"
        group = set() if file.is_file() and is_overlay(file) else {file.parent.name}
        others = [x for x in RUN_SCHEMAS.values() if group <= top_names(x)]
        others = [x for x in others if file.is_file() and fits(file, x)]
        if others and schema not in others:
            choice = in_file[1].replace("/", "=")
            return f"{_command(schema)} has no {choice}; it is a choice of {_commands(others)}"
    if "hydra/launcher/submitit" in text:
        return f"SLURM needs hydra-submitit-launcher: {install_line('slurm')}"
    if missing := re.search(
        r"Missing mandatory value: (\S+)|Interpolation key '\w+\.(\w+)' not found", text
    ):
        key = missing[1] or missing[2]
        return f"{key} has no value: set {key}=..."
    if unknown := re.match(r"Could not override '([^']+)'", text):
        return unknown_key(unknown[1], schema)
    return text.removesuffix(" None")


def _no_value(word: str, schema: type) -> str:
    """Return the error message for a word without a value or with an unreadable value."""
    typed, equals, value = word.partition("=")
    key, value = typed.strip(), value.strip()
    field = field_at(key.lstrip("+~"), all_fields(schema))
    is_text = key == "model" or field is None or field.kind.startswith(("str", "any"))
    if not equals and field and field.schema is None:
        return f"{word} has no value: write {word}={example_value(field, CONF) or '...'}"
    if not equals and word in groups_of(schema):
        return f"{word} has no value: write {word}=NAME, a name that --help {word} lists"
    if not equals:
        groups = [group for group in groups_of(schema) if is_choice(group, word, schema)]
        choices = [f"{group}={word}" for group in groups]
        choices += [f"{x}={names[word]}" for x, names in CHOICES.items() if word in names]
        fix = " or ".join(choices) or f"KEY=VALUE, {_example(schema)}"
        return f"the argument {word} is not KEY=VALUE: write {fix}"
    if typed != key:
        return f"{word}: remove the blanks, write {to_type(key, value, 'str' * is_text)}"
    if not is_text and field:
        return wrong_value(field, value, CONF)
    if re.match(r"[\[{'\"]|(glob|range|choice)\(", value):
        return f"{word}: the value cannot be read: check its brackets and quotes"
    return f"{word}: the value cannot be read, quote it: {quote_for_shell(key, value)}"


def _unknown_choice(group: str, name: str, options: Sequence[str], schema: type) -> str:
    """Return the error message for an unknown choice, with the choices of the group."""
    files = {option: CONF / group / f"{option}.yaml" for option in options}
    fit = [x for x, file in files.items() if not file.is_file() or fits(file, schema)]
    if not name:
        return f"{group}= has no value: choose from {', '.join(fit)}"
    if group == "theorem" and name.lower() in OTHER_COMMANDS:
        return f"theorem={name} is shown by {program()} {OTHER_COMMANDS[name.lower()]}"
    elsewhere = [x for x in groups_of(schema) if is_choice(x, name, schema)]
    ours = CHOICES.get(group, {}).get(name.lower())
    if ours or len(elsewhere) == 1:
        fixes = [f"{group}={ours}"] if ours else []
        nouns = {"objective": "loss"} if ours else {}
        fixes += [
            f"{x}={name}" + (f" for the {nouns.get(x, x)}" if ours else "") for x in elsewhere
        ]
        return f"unknown {group} {name!r}: write {', or '.join(fixes)}"
    begun = {
        command: [x for x in choices_of(group, other) if x.startswith(name)]
        for command, other in RUN_SCHEMAS.items()
        if other is not schema and group in groups_of(other)
    }
    if any(begun.values()) and not any(x.startswith(name) for x in fit):
        theirs = "; ".join(f"{command} has {', '.join(x)}" for command, x in begun.items() if x)
        return f"unknown {group} {name!r}: {theirs}; here choose from {', '.join(fit)}"
    places = ", or write model=org/name or model=FOLDER" if group == "model" else ""
    choices = f"{did_you_mean(name, fit)}choose from {', '.join(fit)}{places}"
    return f"unknown {group} {name!r}: {choices}"


def unknown_key(key: str, schema: type, value: str = "") -> str:
    """Return the error for an unknown key, with the nearest key or the command that has it."""
    node, _, name = key.partition(".")
    kinds = kinds_of(schema).get(node, {}).items()
    if owners := [kind for kind, of in kinds if name in {field.name for field in fields(of)}]:
        return (
            f"unknown key {key}: it is a field only of {node}.kind={' or '.join(owners)}; use "
            f"{node}=NAME to choose a {NODE_NOUNS[node]} of this kind"
        )
    if key.startswith("dataset.options"):
        return f"unknown key {key}: to add an option of your own task, type +{key}=..."
    names = [*(field.path for field in all_fields(schema)), *groups_of(schema)]
    near = difflib.get_close_matches(key, names, n=1, cutoff=0.8)
    others = [other for other in RUN_SCHEMAS.values() if other is not schema]
    owners = [other for other in others if field_at(key, all_fields(other))]
    owners = owners or [other for other in others if node in top_names(other) - top_names(schema)]
    if not owners and (line := meant(key, value, schema)):
        return f"unknown key {key}: {line}"
    if owners and (not near or near[0].endswith(f".{key}")):
        similar = [name for name in names if name.endswith(f".{key}")]
        here = f"; here it is {similar[0]}" if similar else ""
        return f"{_command(schema)} has no {key}; it is a field of {_commands(owners)}{here}"
    near = near or difflib.get_close_matches(key, names, n=1, cutoff=0.5)
    hint = f"did you mean {_near(near[0], value, schema)}?" if near else "--help all lists all keys"
    return f"unknown key {key}: {hint}"


def _near(name: str, value: str, schema: type) -> str:
    """Return the override of the nearest name with the typed value, or only the name."""
    field = field_at(name, all_fields(schema))
    is_node = name not in groups_of(schema) and (field is None or field.schema is not None)
    override = name if is_node or not value else override_of(name, value, schema)
    return override.removesuffix("=NAME")


def unknown_flag(name: str, flags: Sequence[str]) -> str:
    """Return the error message for an unknown flag."""
    field = name.lstrip("-").replace("-", "_")
    if any(field_at(field, all_fields(schema)) for schema in SCHEMAS.values()):
        return f"unknown flag {name}: fields have no dashes, write {field}=..."
    if field in NAMES:
        return f"unknown flag {name}: fields have no dashes, write {NAMES[field][0]}=..."
    long = [flag for flag in flags if flag.startswith("--")]
    return f"unknown flag {name}: {did_you_mean(name, long)}choose from {', '.join(long)}"


def _command(schema: type) -> str:
    return command_line(command_of(schema))


def _commands(schemas: Sequence[type]) -> str:
    return " or ".join(_command(x) for x in RUN_SCHEMAS.values() if x in schemas)


def _example(schema: type) -> str:
    command = command_of(schema)
    return f"as in {command_line(command, *VERBS[command].example)}"
