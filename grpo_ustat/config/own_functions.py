"""Checks of functions and tasks that the user gives as FILE:FUNCTION or as entry points."""

from __future__ import annotations

import ast
import importlib.metadata
import importlib.util
from collections.abc import Mapping
from inspect import Parameter, Signature
from pathlib import Path
from typing import TypeVar

from grpo_ustat.config.schema import ConfigError, did_you_mean

Entry = TypeVar("Entry")

# Entry point groups.
TASKS, REWARDS = "grpo_ustat.tasks", "grpo_ustat.rewards"


def load_registered(registry: Mapping[str, Entry], key: str, name: str) -> Entry:
    """Return a built-in object, or one that an installed package offers by its entry point.

    Args:
        registry: objects by name; looking up a name may load an entry point.
        key: configuration key with the name, for errors.
        name: one of the field's choices.
    """
    try:
        return registry[name]
    # The code of an installed package can raise any exception.
    except Exception as error:
        reason = " ".join(f"{type(error).__name__}: {error}".split())
        raise ConfigError(f"{key}={name} cannot be loaded: {reason}") from error


def reward_file(reward: str) -> tuple[Path, str] | None:
    """Return the file and function of a reward FILE:FUNCTION, or None for an entry point.

    >>> reward_file("rewards/my.py:score"), reward_file("lenient")
    ((PosixPath('rewards/my.py'), 'score'), None)
    """
    file, colon, function = reward.rpartition(":")
    return (Path(file).expanduser(), function) if colon else None


def check_reward(reward: str, field_name: str, ours: tuple[str, ...] = ()) -> None:
    """Refuse a reward that is neither FILE:FUNCTION nor the name of an entry point.

    Args:
        reward: configured value.
        field_name: configuration field with this value.
        ours: names of built-in rewards, which are also allowed.
    """
    if reward_file(reward):
        check_reward_file(reward, field_name)
    elif reward.endswith(".py"):
        key, file = f"{field_name}={reward}", Path(reward).expanduser()
        offered = ", ".join(_functions(_module(key, file))) or "none"
        raise ConfigError(
            f"{key} has no function: write {field_name}={reward}:FUNCTION, {file} has {offered}"
        )
    else:
        check_entry_point(REWARDS, reward, field_name, ours)


def check_reward_file(reward: str, field_name: str) -> None:
    """Refuse an unusable reward FILE:FUNCTION; the file is not run.

    The file must exist, be valid Python and contain the function. The function must accept a prompt
    and a completion.

    Args:
        reward: reward in the form FILE:FUNCTION.
        field_name: configuration field with this value.
    """
    place, key = reward_file(reward), f"{field_name}={reward}"
    assert place is not None
    file, function = place
    tree = _module(key, file)
    functions = _functions(tree)
    names = {node.id for node in ast.walk(tree) if isinstance(node, ast.Name)}
    for node in ast.walk(tree):
        if isinstance(node, ast.Import | ast.ImportFrom):
            names |= {imported.asname or imported.name for imported in node.names}
    if function not in functions and function not in names and "*" not in names:
        hint = did_you_mean(function, functions)
        offered = ", ".join(functions) or "none"
        raise ConfigError(f"{key}: {file} has no function {function!r}: {hint}it has {offered}")
    # The signature is not checked if the function has a decorator, because a decorator can change
    # the signature.
    if function in functions and not functions[function].decorator_list:
        check_reward_call(key, _signature(functions[function].args))


def check_reward_call(name: str, signature: Signature) -> None:
    """Refuse a reward function that does not accept a prompt and a completion.

    Reward functions written for TRL are also refused, because they accept lists.

    Args:
        name: name of the reward, for the message.
        signature: signature of the function.
    """
    names = list(signature.parameters)
    try:
        signature.bind("prompt", "completion")
        of_another = "completions" in names or names[:2] == ["completion", "prompt"]
    except TypeError:
        of_another = True
    if of_another:
        takes = signature.replace(return_annotation=Signature.empty)
        written = name.rpartition(":")[2] if ".py:" in name else "it as "
        raise ConfigError(
            f"{name} takes {str(takes):.120}: write {written}(prompt, completion), which returns "
            "a number for one completion (TRL's functions accept lists)"
        )


def _module(key: str, file: Path) -> ast.Module:
    """Parse a file without running it."""
    if not file.is_file():
        raise ConfigError(f"{key}: there is no file {file}")
    try:
        return ast.parse(file.read_bytes())
    except (SyntaxError, ValueError) as error:
        line = getattr(error, "lineno", None)
        raise ConfigError(f"{key}: {file} line {line} is not valid Python: {error}") from error


def _functions(tree: ast.Module) -> dict[str, ast.FunctionDef | ast.AsyncFunctionDef]:
    """Return the functions at the top level of a file, keyed by name."""
    return {
        node.name: node
        for node in tree.body
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)
    }


def _signature(arguments: ast.arguments) -> Signature:
    """Return a function's signature from its syntax tree, with None for every default."""
    positional = [*arguments.posonlyargs, *arguments.args]
    required = len(positional) - len(arguments.defaults)
    parameters = [
        Parameter(x.arg, Parameter.POSITIONAL_OR_KEYWORD,
                  default=Parameter.empty if place < required else None)
        for place, x in enumerate(positional)
    ]  # fmt: skip
    if arguments.vararg:
        parameters.append(Parameter(arguments.vararg.arg, Parameter.VAR_POSITIONAL))
    for x, default in zip(arguments.kwonlyargs, arguments.kw_defaults, strict=True):
        value = Parameter.empty if default is None else None
        parameters.append(Parameter(x.arg, Parameter.KEYWORD_ONLY, default=value))
    if arguments.kwarg:
        parameters.append(Parameter(arguments.kwarg.arg, Parameter.VAR_KEYWORD))
    return Signature(parameters)


def check_entry_point(group: str, name: str, key: str, ours: tuple[str, ...] = ()) -> None:
    """Refuse an entry point that no installed package provides.

    Args:
        group: entry point group.
        name: name of the entry point.
        key: configuration key with the name.
        ours: built-in names, which the message also lists.
    """
    installed = sorted(importlib.metadata.entry_points(group=group).names)
    if name not in installed:
        offered = f"no entry point of {group} is installed"
        if installed:
            offered = f"entry points of {group} are {', '.join(installed)}"
        hint = did_you_mean(name, [*ours, *installed])
        also = f"choose from {', '.join(ours)} or FILE.py:FUNCTION; " if ours else ""
        raise ConfigError(f"unknown {key} {name!r}: {hint}{also}{offered}")
    module = importlib.metadata.entry_points(group=group)[name].module
    if module_file(group, name) is None:
        raise ConfigError(
            f"{key}={name}: the module {module!r} of this {group} entry point does not exist"
        )


def module_file(group: str, name: str) -> Path | None:
    """Return the file of an entry point's module without importing the module."""
    try:
        spec = importlib.util.find_spec(importlib.metadata.entry_points(group=group)[name].module)
    except ImportError:
        return None
    return Path(spec.origin) if spec and spec.origin else None
