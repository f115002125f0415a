"""Shell completion: `-sc install=bash` prints the script that a shell reads, `-sc query=bash` the
candidates.

What Hydra prints for them knows nothing of verbs, nor of the values that a field may take.
"""

from __future__ import annotations

import os
from argparse import Namespace
from collections.abc import Mapping
from pathlib import Path

from grpo_ustat.cli.hydra_api import flags, parse_arguments
from grpo_ustat.cli.options import CommandOptions, command_options
from grpo_ustat.cli.verbs import verb_candidates, verb_of
from grpo_ustat.config.load import SCHEMAS
from grpo_ustat.config.schema import ConfigError, one_of

SHELLS = ("bash", "zsh", "fish")
SCRIPTS = Path(__file__).with_name("shell")
COMMANDS = " ".join(["grpo-ustat", *(f"grpo-ustat-{name}" for name in SCHEMAS)])
IN_CHECKOUT = "./scripts/run scripts/run"
UNINSTALL_COMMANDS = {
    "bash": f"complete -r python python3 {COMMANDS} {IN_CHECKOUT}; unset -f _grpo_ustat",
    "zsh": f"compdef -d python python3 {COMMANDS} {IN_CHECKOUT}; unfunction _grpo_ustat",
    "fish": (
        f"for c in python python3 {COMMANDS}; complete -e -c $c; end; "
        "complete -e -p '*/scripts/run'; functions -e __grpo_ustat"
    ),
}


def complete(
    entry: str | None, words: Namespace, environment: Mapping[str, str] = os.environ
) -> None:
    """Print the script, or the candidates for `COMP_LINE` up to `COMP_POINT`, one a line.

    Args:
        entry: a key of `SCHEMAS`; None where the line itself names its verb, if it has one yet.
        words: the command line as Hydra reads it.
        environment: of this process.

    Raises:
        ConfigError: another request than install, uninstall or query of a shell that is known.
    """
    request, _, shell = (words.overrides or [""])[0].partition("=")
    one_of("-sc", request, ("install", "uninstall", "query"))
    one_of(f"-sc {request}", shell, SHELLS)
    if request == "query":
        line = environment["COMP_LINE"][: int(environment.get("COMP_POINT", 10**6))]
        entry = entry or verb_of(line.split()[: -1 if line[-1:].strip() else None])
        known = candidates(entry, line) if entry in SCHEMAS else verb_candidates(line)
        for text, meaning in known:
            print(f"{text}\t{meaning}" if shell == "fish" and meaning else text)
        return
    script = (SCRIPTS / f"completion.{shell}").read_text().replace("IN_CHECKOUT", IN_CHECKOUT)
    script = script.replace("ENTRIES", "|".join(SCHEMAS)).replace("COMMANDS", COMMANDS)
    print(script if request == "install" else UNINSTALL_COMMANDS[shell])


def candidates(entry: str, line: str) -> list[tuple[str, str]]:
    """Possible completions of a line's last word, each with its meaning ("" if unknown)."""
    *before, word = line.split(" ")
    if word.startswith("-"):
        return [(name, "") for name in flags() if name.startswith(word)]
    overrides = [one for one in before if "=" in one and not one.startswith("-")]
    try:
        page = command_options(entry, parse_arguments(overrides))
    except ConfigError:  # an override before the cursor is wrong
        page = command_options(entry, parse_arguments([]))
    sign = word[: len(word) - len(word.lstrip("+~"))]
    word = word.removeprefix(sign)
    if "=" in word:
        return [(sign + text, meaning) for text, meaning in _values(page, word)]
    groups = {f"{group.name}=": group.meaning for group in page.groups if group.settable}
    matches = {name: meaning for name, meaning in groups.items() if name.startswith(word)}
    for field in page.fields:
        if field.key.path.startswith(word):  # as far as the next dot
            node, dot, _ = field.key.path[len(word) :].partition(".")
            name = f"{word}{node}{dot or '='}"
            matches.setdefault(name, page.nodes.get(name[:-1], "") if dot else field.key.meaning)
    return [(sign + text, meaning) for text, meaning in sorted(matches.items())]


def _values(page: CommandOptions, word: str) -> list[tuple[str, str]]:
    """Choices of a group or field, or else its value; in `a,b` the last one is completed."""
    name, _, value = word.partition("=")
    start = max(value.rfind(","), value.rfind("[")) + 1
    head, tail = value[:start], value[start:]
    group = next((one for one in page.groups if one.name == name and one.settable), None)
    field = next((one for one in page.fields if one.key.path == name), None)
    if group:
        options = [(choice.name, choice.words) for choice in group.choices]
    elif field:
        in_list, choices = "[" in head, list(field.key.choices)
        if field.key.kind.startswith("list") and not in_list:
            choices = [f"[{choice}" for choice in choices]
        if field.key.kind.startswith("bool"):
            choices = ["true", "false"]
        if "null" in field.key.kind and not in_list:
            choices.append("null")
        if field.value not in ("???", *choices) and not in_list:
            choices.insert(0, field.value)
        options = [(choice, "") for choice in choices]
    else:
        options = []
    return [(f"{name}={head}{text}", meaning) for text, meaning in options if text.startswith(tail)]
