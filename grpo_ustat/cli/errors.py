"""Refusals of a command line, each one line that names what was typed and what to type instead."""

from __future__ import annotations

import difflib
import re
import shlex
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import fields, is_dataclass
from itertools import takewhile
from pathlib import Path
from typing import NoReturn, get_type_hints

import yaml
from hydra.errors import HydraException, OverrideParseException
from omegaconf.errors import OmegaConfBaseException, ValidationError

from grpo_ustat.config.command_line import command_line, install_line, program
from grpo_ustat.config.gap import OTHER_COMMANDS
from grpo_ustat.config.identity import OPERATIONAL_KEYS
from grpo_ustat.config.load import CONF, NODE_NOUNS, SCHEMAS, all_fields, kinds_of, type_error
from grpo_ustat.config.presets import PRESETS
from grpo_ustat.config.run import Shared
from grpo_ustat.config.schema import ConfigError, did_you_mean
from grpo_ustat.config.values import example_value, field_at, quote_for_shell, to_type, wrong_value
from grpo_ustat.estimators.baselines import BASELINES
from grpo_ustat.terminal.streams import single_line

# Names of fields in other trainers, and the names here.
NAMES_OF_OTHERS = {
    "num_generations": "group_size",
    "chat_template_kwargs": "prompt.template_options",
    "lr": "learning_rate",
    "gradient_accumulation_steps": "micro_batch_tokens, the padded tokens of a backward pass",
    "per_device_train_batch_size": "budget.rollouts, completions a step on all devices",
    "num_train_epochs": "max_steps",
    "loss_type": "objective=dapo and the like, or objective.loss_type",
    "beta": "objective.beta",
    "use_vllm": "rollout=vllm",
    "multi_objective_aggregation": "a baseline, group_std for sum_then_normalize, gdpo for "
    "normalize_then_sum",
    "scale_rewards": "a baseline, group_std for group, batch_std for batch, group_mean for none",
}
# Cuts of the sampled distribution, which other trainers have.
CUT_FIELDS = ("top_p", "top_k", "min_p")
RUN_SCHEMAS = {name: schema for name, schema in SCHEMAS.items() if issubclass(schema, Shared)}
# Keys of a report's folder, which hold no comma.
REPORT_NAME_KEYS = ("name", "report.name")
# Nodes that are not swept; nor are keys that make no run another one.
UNSWEPT_NODES = ("hydra", "reward_funcs", "reward_weights")
# Groups that are no fields of the schema.
EXTRA_GROUPS = {"mse": {"debug"}, "train": {"debug"}}

# Parts of Hydra's own node: a field of each, "" of those that are chosen by a name.
HYDRA_PARTS = {
    "hydra.run": "dir", "hydra.sweep": "dir", "hydra.job": "name",
    **dict.fromkeys(("hydra.launcher", "hydra.sweeper"), ""),
    **dict.fromkeys(("hydra.job_logging", "hydra.hydra_logging"), ""),
}  # fmt: skip


def refuse_words(words: Sequence[str], arguments: Sequence[str], flags: Sequence[str]) -> NoReturn:
    """Refuse words that the parser of flags did not take.

    Args:
        arguments: the whole command line.
        flags: all that there are.
    """
    word = next((word for word in words if word.startswith("-")), None)
    if word is None:
        raise ConfigError(f"{words[0]} comes too late: write flags first, then field=value")
    name, equals, value = word.partition("=")
    following = "".join(arguments[arguments.index(word) + 1 :][:1])
    if not equals and "=" not in following and following[:1] != "-":
        word, value = f"{word} {following}".strip(), following
    near = difflib.get_close_matches(name, flags, n=1, cutoff=0.8)
    if near and not value:
        raise ConfigError(f"unknown flag {name}: did you mean {near[0]}?")
    written = to_type(name.lstrip("-").replace("-", "_"), value or "true", None)
    raise ConfigError(f"{word}: fields have no dashes, write {written}")


def check_words(words: Sequence[str], schema: type) -> None:
    """Refuse words that are no overrides, and a number that OmegaConf would take as true.

    Args:
        words: of the command line, without flags.
    """
    for i, word in enumerate(words):
        key, equals, value = word.partition("=")
        if not (key and equals) and not word.startswith("~"):
            raise ConfigError(_no_override(word, words[:i], words[i:], schema))
        part, inner = key.removeprefix("hydra."), HYDRA_PARTS.get(key)
        if inner is not None:
            written = f"{key}.{inner}=..." if inner else f"hydra/{part}={value}"
            raise ConfigError(f"{word}: {key} has fields of its own, write {written}")
        no_name = re.fullmatch(r"-?[\d.]+|true|false|null", value, re.IGNORECASE)
        if key in _groups_of(schema) and no_name:
            raise ConfigError(f"{word}: a name is needed, see --help {key}")
        field = field_at(key, all_fields(schema))
        if field and field.schema and (CONF / key).is_dir() and key not in _groups_of(schema):
            raise ConfigError(_group_of_others(key, value, schema))
        number = re.fullmatch(r"-?[\d.]+", value) and value not in ("0", "1")
        if number and field and field.kind == "bool":
            raise ConfigError(wrong_value(field, value, CONF))


def _group_of_others(key: str, value: str, schema: type) -> str:
    """Return the line that refuses a choice of a node that only another command chooses by name."""
    elsewhere = [x for x in _groups_of(schema) if _is_choice(x, value, schema)]
    if elsewhere:
        return f"{key}={value}: write {' or '.join(f'{group}={value}' for group in elsewhere)}"
    if (CONF / key / f"{value}.yaml").is_file():
        owners = [other for other in RUN_SCHEMAS.values() if key in _groups_of(other)]
        return f"{key}={value} is {_one_of_commands(owners)}"
    return f"{key}={value}: it has fields of its own, see --help {key}"


def _no_override(word: str, before: Sequence[str], rest: Sequence[str], schema: type) -> str:
    """Return the line that refuses a word that sets nothing.

    Args:
        word: without a `=`, or with nothing before it.
        before: the words before it.
        rest: the word and those after it.
    """
    choices = _groups_of(schema)
    groups = [group for group in choices if "/" not in word and _is_choice(group, word, schema)]
    field = field_at(word, all_fields(schema))
    key, equals, value = "".join(before[-1:]).partition("=")
    cut = bool(equals) and (value == "" or (value[0] in "[{" and value[-1] not in "]}"))
    if groups:
        return f"{word}: write {' or '.join(f'{group}={word}' for group in groups)}"
    if field and field.schema is None:
        return f"{word} has no value: write {word}={example_value(field, CONF) or '...'}"
    if word in choices:
        return f"{word} has no value: write {word}=NAME, a name that --help {word} lists"
    if schema not in RUN_SCHEMAS.values() and "=" not in word and not cut:
        paths = [one.removeprefix("runs=") for one in (*before, *rest)]
        paths = [one.strip("[]") for one in paths if "=" not in one]
        runs = paths[0] if len(paths) == 1 else f"[{','.join(paths)}]"
        return f"{word}: write {shlex.quote(f'runs={runs}')}"
    if cut or (equals and _is_text(key, schema)):
        whole = " ".join([value, *takewhile(lambda one: "=" not in one, rest)])
        written = to_type(key, whole.strip(), "str" if _is_text(key, schema) else "")
        return f"{key}={whole}: the shell splits this at the blank, write {written}"
    if "=" in word:
        return f"{word}: no field stands before the =, write FIELD{word}"
    return unknown_key(word, schema)


def _groups_of(schema: type) -> list[str]:
    """Return the groups of a command's main file."""
    return re.findall(r"(?m)^  - (\w+):", (CONF / f"{_command_of(schema)}.yaml").read_text())


def _command_of(schema: type) -> str:
    return next(name for name, other in SCHEMAS.items() if other is schema)


def _is_text(key: str, schema: type) -> bool:
    """Return True if the key takes any text: a text field, `model`, or a key that is no field."""
    field = field_at(key.lstrip("+~"), all_fields(schema))
    return key == "model" or field is None or field.kind.startswith(("str", "any"))


@contextmanager
def in_one_line(schema: type) -> Iterator[None]:
    """Turn a refusal by Hydra or OmegaConf of a command line into a ConfigError, see `one_line`."""
    try:
        yield
    except (HydraException, OmegaConfBaseException) as error:
        raise ConfigError(one_line(error, schema)) from error


def one_line(error: Exception, schema: type) -> str:
    """Return an error's message in one line, with the valid names if one is unknown.

    Args:
        error: of Hydra or OmegaConf, while a configuration was composed.
    """
    text = " ".join(f"{error} {error.__cause__ or ''}".split())

    # A value has the wrong type, or is several values.
    cause = error if isinstance(error, ValidationError) else error.__cause__
    typed = re.match(r"Error merging override [+]*[^=]+=(.*)", str(error))
    if isinstance(cause, ValidationError) and (typed or cause is error):
        return type_error(cause, schema, {}, typed[1] if typed else None)
    if several := re.match(r"Ambiguous value for argument '([^=]+)=(.*)' 1\. To use it", text):
        return several_values(several[1], several[2], schema)
    if "does not support sweep type" in text:
        return (
            "interval(...) has no values to go through: write them, as in seed=0,1, or a range(...)"
        )
    if needs_sweep := re.match(r"Sweep parameters '(.*)' requires --multirun", text):
        swept = shlex.split(re.sub("[()*]", r"\\\g<0>", needs_sweep[1]))
        runs = command_line(_command_of(schema), "-m", *swept)
        return f"{needs_sweep[1]} is for a sweep: add -m, as in {runs}"
    if isinstance(error, OverrideParseException) and error.override:
        return single_line(_unreadable(error.override, schema))

    # A group has no such choice: list those that the command can take.
    choice = re.search(
        r"Could not find '([^']+)/([^'/]*)' Available options in '[^']+': (.*?) Conf", text
    )
    if choice:
        group, name, options = choice.groups()
        files = {other: CONF / group / f"{other}.yaml" for other in options.split()}
        fit = [other for other, file in files.items() if not file.is_file() or fits(file, schema)]
        if not name:
            return f"{group}= has no value: choose from {', '.join(fit)}"
        if group == "study" and name.lower() in OTHER_COMMANDS:
            return f"study={name} is shown by {program()} {OTHER_COMMANDS[name.lower()]}"
        elsewhere = [x for x in _groups_of(schema) if _is_choice(x, name, schema)]
        if len(elsewhere) == 1:
            return f"unknown {group} {name!r}: write {elsewhere[0]}={name}"
        known = f"{did_you_mean(name, fit)}choose from {', '.join(fit)}"
        places = ", or write model=org/name or model=FOLDER" if group == "model" else ""
        return f"unknown {group} {name!r}: {known}{places}"

    # A file sets fields that the command does not have: name the commands that have them.
    in_file = re.match(r"In '([^']+)': (Could not override|ConfigKeyError raised)", text)
    file = CONF / f"{in_file[1]}.yaml" if in_file else None
    if in_file and file and file.is_file():
        group = set() if is_overlay(file) else {file.parent.name}
        others = [x for x in RUN_SCHEMAS.values() if group <= top_names(x) and fits(file, x)]
        if others and schema not in others:
            return f"{in_file[1].replace('/', '=')} is {_one_of_commands(others)}"

    if "hydra/launcher/submitit" in text:
        return f"SLURM needs hydra-submitit-launcher: {install_line('slurm')}"
    if missing := re.search(r"Missing mandatory value: (\S+)", text):
        return f"{missing.group(1)} has no value: set {missing.group(1)}=..."
    if unset := re.search(r"Interpolation key '\w+\.(\w+)' not found", text):
        return f"{unset[1]} has no value: set {unset[1]}=..."
    if unknown := re.match(r"Could not override '([^']+)'", text):
        return unknown_key(unknown.group(1), schema)
    return text.removesuffix(" None")


def _unreadable(override: str, schema: type) -> str:
    """Return the line that refuses an override that Hydra cannot parse."""
    typed, _, value = override.partition("=")
    key, value = typed.strip(), value.strip()
    field, is_text = field_at(key.lstrip("+~"), all_fields(schema)), _is_text(key, schema)
    if typed != key:
        written = to_type(key, value, "str" if is_text else "")
        return f"{override}: leave out the blanks, write {written}"
    if re.match(r"(glob|range|choice)\(", value) or (is_text and value[:1] in ("[", "{", "'", '"')):
        return f"{override}: this cannot be read: check its brackets and quotes"
    if field and not is_text:
        return wrong_value(field, value, CONF)
    return f"{override}: this cannot be read, quote it: {quote_for_shell(key, value)}"


def several_values(key: str, value: str, schema: type) -> str:
    """Return the line that refuses `key=a,b` if no sweep is typed."""
    field, node = field_at(key.lstrip("+"), all_fields(schema)), key.lstrip("+").partition(".")[0]
    if field is None and "/" not in key and node not in {"hydra", *top_names(schema)}:
        return unknown_key(key, schema)
    kind = "" if field is None or key in REPORT_NAME_KEYS else field.kind
    is_list, is_text = kind.startswith(("list", "any")), kind.startswith(("str", "any"))
    as_list = f"write {key}=[{value}]" if is_list else ""
    values = re.sub(r"([^,]+)", r"[\1]", value) if is_list else value
    runs = command_line(_command_of(schema), "-m", f"{key}={values}")
    sweep = f"add -m for a run of each, as in {runs}" if schema in RUN_SCHEMAS.values() else ""
    if node in {*UNSWEPT_NODES, *OPERATIONAL_KEYS} - {"output_root"}:
        sweep = ""
    quoted = quote_for_shell(key, value) if is_text or key == "model" or node == "hydra" else ""
    quoted = quoted and f"{'if it is one, quote it:' if sweep else 'quote it,'} {quoted}"
    one = f"it has one, such as {key}={value.partition(',')[0]}"
    fixes = ", or ".join(filter(None, [as_list, quoted, sweep])) or one
    return f"{key}={value} names several values: {fixes}"


def unknown_key(key: str, schema: type) -> str:
    """Return the line that refuses an unknown key.

    It names the command that has the key, or the nearest valid name.
    """
    if key in CUT_FIELDS:
        return f"unknown key {key}: what is sampled is what is scored, so there is no {key}"
    if key in NAMES_OF_OTHERS:
        where = "here" if schema is SCHEMAS["train"] else "in train"
        return f"unknown key {key}: {where} it is {NAMES_OF_OTHERS[key]}"

    node, _, name = key.partition(".")
    kinds = [
        kind
        for kind, of_kind in kinds_of(schema).get(node, {}).items()
        if name in {field.name for field in fields(of_kind)}
    ]
    if kinds:
        return (
            f"unknown key {key}: it is of {node}.kind={' or '.join(kinds)}, choose such a "
            f"{NODE_NOUNS[node]} by {node}=NAME"
        )

    others = [other for other in RUN_SCHEMAS.values() if other is not schema]
    owners = [other for other in others if field_at(key, all_fields(other))]
    owners = owners or [other for other in others if node in top_names(other) - top_names(schema)]
    known = [field.path for field in all_fields(schema)]
    if owners:
        return f"unknown key {key}: it is {_one_of_commands(owners)}{_own_name(key, schema, known)}"
    if key.startswith("dataset.options"):
        return f"unknown key {key}: options of a task of your own are added, +{key}=..."
    near = difflib.get_close_matches(key, [*known, *_groups_of(schema)], n=1, cutoff=0.5)
    hint = f"did you mean {near[0]}?" if near else "see --help for the known keys"
    return f"unknown key {key}: {hint}"


def _own_name(key: str, schema: type, known: Sequence[str]) -> str:
    """Return the spelling here of another command's key, as `group_sizes=[...]` for group_size.

    It is "" if the command has nothing of that name, in the plural or the singular, or below
    `study`.
    """
    last = key.rpartition(".")[2]
    names = [last] if last != key else [key, f"{key}s", key.removesuffix("s")]
    own = next((x for x in [*names, *(f"study.{name}" for name in names)] if x in known), None)
    field = field_at(own or "", all_fields(schema))
    if field is None:
        return ""
    value = "NAME" if field.schema else example_value(field, CONF) or "..."
    command = _command_of(schema)
    runs = command_line(command, "-m", f"{own}=...")
    of_each = f", or for a run of each {runs}" if key == f"{own}s" else ""
    return f"; {command} has {own}={value}{of_each}"


def _is_choice(group: str, name: str, schema: type) -> bool:
    """Return True if a group of ours has this choice and the command can take it."""
    if name in {"baseline": BASELINES, "objective": PRESETS}.get(group, ()):
        return group in top_names(schema)
    file = CONF / group / f"{name}.yaml"
    return file.is_file() and fits(file, schema)


def is_overlay(file: Path) -> bool:
    """Return True if a file sets fields of any node."""
    return "# @package _global_" in file.read_text()


def fits(file: Path, schema: type) -> bool:
    """Return True if a command has all fields that a file of its groups sets or sweeps over.

    The file is not composed, so the answer holds only as far as can be told without that.
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
        known = {field.name for kind in kinds_of(schema)[name].values() for field in fields(kind)}
        within = re.search(rf"^{name}:\n((?: .*\n)*)", text, re.MULTILINE)
        if within and not set(re.findall(r"^  (\w+):", within[1], re.MULTILINE)) <= known:
            return False
    try:
        params = dict(yaml.safe_load(text)["hydra"]["sweeper"]["params"])
    except (yaml.YAMLError, LookupError, TypeError, ValueError):  # it says nothing of a sweep
        return True
    others = [
        file.parent.parent / group / f"{choice}.yaml"
        for group, choices in params.items()
        for choice in str(choices).split(",")
    ]
    return all(fits(other, schema) for other in others if other.is_file())


def top_names(schema: type) -> set[str]:
    """Return the names that an override of a command can begin with."""
    groups = [extra for name, extra in EXTRA_GROUPS.items() if SCHEMAS[name] is schema]
    return {field.name for field in fields(schema)}.union(*groups)


def _one_of_commands(schemas: Sequence[type]) -> str:
    names = [name for name, schema in RUN_SCHEMAS.items() if schema in schemas]
    owners = " or ".join(f"{name}'s" for name in names)
    commands = " or ".join(map(command_line, names))
    return f"one of {owners}, {commands}"
