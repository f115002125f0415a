"""Shell completion: `-sc install=bash` prints what a shell is to read, `-sc query=bash` candidates.

What Hydra prints for them knows nothing of `python -m`, nor of the values that a field may take.
"""

from __future__ import annotations

import os
from argparse import Namespace
from collections.abc import Mapping
from pathlib import Path

from hydra._internal.utils import get_args_parser

from grpo_ustat.catalogue import Catalogue, Field, Group, catalogue
from grpo_ustat.checks import ConfigError, one_of
from grpo_ustat.config import SCHEMAS

SHELLS = ("bash", "zsh", "fish")
SCRIPTS = Path(__file__).with_name("shell")
UNINSTALL = {
    "bash": "complete -r python python3 {0}; unset -f _grpo_ustat",
    "zsh": "compdef -d python python3 {0}; unfunction _grpo_ustat",
    "fish": "for c in python python3 {0}; complete -e -c $c; end; functions -e __grpo_ustat",
}


def complete(entry: str, words: Namespace, environment: Mapping[str, str] = os.environ) -> None:
    """Print the script, or the candidates for `COMP_LINE` up to `COMP_POINT`, one a line.

    Raises:
        ConfigError: another request than install, uninstall or query of a shell that is known.
    """
    asked, _, shell = (words.overrides or [""])[0].partition("=")
    one_of("-sc", asked, ("install", "uninstall", "query"))
    one_of(f"-sc {asked}", shell, SHELLS)
    if asked == "query":
        line = environment["COMP_LINE"][: int(environment.get("COMP_POINT", 10**6))]
        for text, meaning in candidates(entry, line):
            print(f"{text}\t{meaning}" if shell == "fish" and meaning else text)
        return
    commands = " ".join(f"grpo-ustat-{name}" for name in SCHEMAS)
    script = (SCRIPTS / f"completion.{shell}").read_text()
    script = script.replace("ENTRIES", "|".join(SCHEMAS)).replace("COMMANDS", commands)
    print(script if asked == "install" else UNINSTALL[shell].format(commands))


def candidates(entry: str, line: str) -> list[tuple[str, str]]:
    """What the last word of a line may become, each with what it means, if that is known."""
    words = line.split(" ")
    before, word = [one for one in words[:-1] if one], words[-1]
    if word.startswith("-"):
        options = (name for one in get_args_parser()._actions for name in one.option_strings)
        return [(name, "") for name in options if name.startswith(word)]
    sign = word[: len(word) - len(word.lstrip("+~"))]
    page, word = _page(entry, before), word.removeprefix(sign)
    found = _values(page, word) if "=" in word else _names(page, word)
    return [(sign + text, meaning) for text, meaning in found]


def _page(entry: str, words: list[str]) -> Catalogue:
    """As the overrides before the cursor have it; without them where they are wrong."""
    given = [word for word in words if "=" in word and not word.startswith("-")]
    try:
        return catalogue(entry, get_args_parser().parse_args(given))
    except ConfigError:
        return catalogue(entry, get_args_parser().parse_args([]))


def _names(page: Catalogue, word: str) -> list[tuple[str, str]]:
    """Groups, fields, and nodes up to the next dot."""
    groups = {f"{group.name}=": group.meaning for group in page.groups if group.settable}
    found = {name: meaning for name, meaning in groups.items() if name.startswith(word)}
    for field in page.fields:
        if field.key.path.startswith(word):
            rest = field.key.path[len(word) :]
            node, dot, _ = rest.partition(".")
            name = f"{word}{node}{dot or '='}"
            found.setdefault(name, page.nodes.get(name[:-1], "") if dot else field.key.meaning)
    return sorted(found.items())


def _values(page: Catalogue, word: str) -> list[tuple[str, str]]:
    """Choices of a group or field, or the value that it has; the last one of several."""
    name, _, given = word.partition("=")
    start = max(given.rfind(","), given.rfind("[")) + 1
    head, tail = given[:start], given[start:]
    group = next((one for one in page.groups if one.name == name and one.settable), None)
    field = next((one for one in page.fields if one.key.path == name), None)
    options = _of_group(group) if group else _of_field(field, inside="[" in head) if field else []
    return [(f"{name}={head}{text}", meaning) for text, meaning in options if text.startswith(tail)]


def _of_group(group: Group) -> list[tuple[str, str]]:
    return [(choice.name, choice.words) for choice in group.choices]


def _of_field(field: Field, inside: bool) -> list[tuple[str, str]]:
    choices = list(field.key.choices)
    if field.key.kind.startswith("list") and not inside:
        choices = [f"[{choice}" for choice in choices]
    if field.key.kind.startswith("bool"):
        choices = ["true", "false"]
    if "null" in field.key.kind and not inside:
        choices.append("null")
    if field.value not in ("???", *choices) and not inside:
        choices.insert(0, field.value)
    return [(choice, "") for choice in choices]
