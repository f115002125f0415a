"""Text to copy into a shell: a command of this program, or the installation of an extra."""

from __future__ import annotations

import os
import shlex
from collections.abc import Sequence
from importlib.util import find_spec
from pathlib import Path

from grpo_ustat.config.secrets import redact_text

# False if the package is installed as a wheel.
IN_CHECKOUT = (Path(__file__).parents[2] / "pyproject.toml").is_file()
# The environment variable in which scripts/run gives the command by which it was called.
PROGRAM = "GRPO_USTAT_COMMAND"
# The environment variable with the typed command line, for the processes that a command starts.
TYPED_VARIABLE = "GRPO_USTAT_TYPED"


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
        extra: a name of `[project.optional-dependencies]`; `cli` is added to an extra that only
            commands use.
    """
    names = extra if extra in ("cli", "torch") else f"cli,{extra}"
    return f"pip install -e '.[{names}]'" if IN_CHECKOUT else f"pip install 'grpo-ustat[{names}]'"


def is_installed(module: str) -> bool:
    """Return True if a module can be imported, without importing it.

    A folder of that name does not count, since trackers make such folders.

    >>> is_installed("json"), is_installed("no_such.module")
    (True, False)
    """
    try:
        spec = find_spec(module)
    # The package of the module is missing.
    except ModuleNotFoundError:
        return False
    # The module is imported and has no spec.
    except ValueError:
        return True
    return spec is not None and spec.origin is not None
