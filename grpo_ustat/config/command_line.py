"""Text for a reader to type: a command again, or the installation of an extra that lacks."""

from __future__ import annotations

import os
import shlex
from collections.abc import Sequence
from importlib.util import find_spec
from pathlib import Path

from grpo_ustat.config.secrets import redact_text

IN_CHECKOUT = (Path(__file__).parents[2] / "pyproject.toml").is_file()  # else installed as a wheel
PROGRAM = (
    "GRPO_USTAT_COMMAND"  # the environment variable in which scripts/run says how it was typed
)
TYPED_VARIABLE = "GRPO_USTAT_TYPED"  # the command line, for the processes that it starts


def program() -> str:
    """Return the beginning of a command line of this program, as the user typed it."""
    return os.environ.get(PROGRAM) or "grpo-ustat"


def command_line(verb: str, *overrides: str) -> str:
    """Return a command line to copy into a shell.

    Args:
        verb: a verb, such as `train`.
        overrides: its arguments; each is quoted if a shell needs it.

    >>> command_line("mse", "model=tiny", "group_sizes=[4, 8]")
    "grpo-ustat mse model=tiny 'group_sizes=[4, 8]'"
    """
    return " ".join([program(), verb, *map(shlex.quote, overrides)])


def note_typed(verb: str, arguments: Sequence[str]) -> None:
    """Keep the command line that was typed, without secrets, for pages and for child processes."""
    os.environ[TYPED_VARIABLE] = redact_text(command_line(verb, *arguments))


def typed_command() -> str | None:
    """Return the command line that was typed; None in a program that calls this package."""
    return os.environ.get(TYPED_VARIABLE)


def install_line(extra: str) -> str:
    """Return the command that installs an optional dependency of this package.

    Args:
        extra: a name of `[project.optional-dependencies]`; an extra that only commands use comes
            with `cli`.
    """
    names = extra if extra in ("cli", "torch") else f"cli,{extra}"
    return f"pip install -e '.[{names}]'" if IN_CHECKOUT else f"pip install 'grpo-ustat[{names}]'"


def is_installed(module: str) -> bool:
    """Return True if a module can be imported, without importing it.

    A folder of its name is no module: trackers make such folders.

    >>> is_installed("json"), is_installed("no_such.module")
    (True, False)
    """
    try:
        spec = find_spec(module)
    except ModuleNotFoundError:  # its package
        return False
    except ValueError:  # it is imported, and has no spec
        return True
    return spec is not None and spec.origin is not None
