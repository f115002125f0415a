"""Command lines for users to copy into a shell, to call this program or install its extras."""

from __future__ import annotations

import os
import shlex
from collections.abc import Iterable, Sequence
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from grpo_ustat.config.secrets import redact_text

# True in a source checkout, False if the package is installed from a wheel.
IN_CHECKOUT = (Path(__file__).parents[2] / "pyproject.toml").is_file()
# Environment variable in which scripts/run passes on the command with which the user called it.
PROGRAM = "GRPO_USTAT_COMMAND"
# Environment variable that passes the typed command line to child processes.
TYPED_VARIABLE = "GRPO_USTAT_TYPED"


def program() -> str:
    """Return the command with which the user called this program."""
    return os.environ.get(PROGRAM) or "grpo-ustat"


def command_line(verb: str, *overrides: str) -> str:
    """Return a command line that a user can copy into a shell.

    Args:
        verb: verb, such as `train`.
        overrides: arguments of the verb; each is quoted if a shell requires it.

    >>> command_line("mse", "model=tiny", "group_sizes=[4, 8]")
    "grpo-ustat mse model=tiny 'group_sizes=[4, 8]'"
    """
    return " ".join([program(), verb, *map(shlex.quote, overrides)])


def new_rollouts(
    model: Iterable[str], length: int | None = None, questions: int | None = None
) -> str:
    """Return the command that draws new rollouts from a checkpoint whose log is too small.

    The user must supply the data and the reward function of the run that wrote the log. Words in
    capitals are placeholders for values that the log does not contain.

    Args:
        model: overrides that select the checkpoint and its temperature.
        length: maximum length of a completion in tokens; None if unknown.
        questions: number of questions; None for the default of `mse`.
    """
    sizes = [] if questions is None else [
        f"dataset.study_size={questions}", f"study.questions={questions}",
    ]  # fmt: skip
    command = command_line(
        "mse", *model, "dataset=jsonl", "dataset.path=DATA.jsonl",
        "dataset.reward=REWARD.py:FUNCTION", "prompt=as_is",
        f"max_completion_length={length or 'LENGTH'}", *sizes,
    )  # fmt: skip
    return (
        f"{command}  # draws new rollouts; DATA.jsonl: the run's questions and answers; "
        "REWARD.py: the run's FUNCTION(prompt, completion); see docs/models-and-data.md"
    )


def note_typed(verb: str, arguments: Sequence[str]) -> None:
    """Store the typed command line, without secrets, for pages and child processes."""
    os.environ[TYPED_VARIABLE] = redact_text(command_line(verb, *arguments))


def typed_command() -> str | None:
    """Return the typed command line, or None if another program calls this package."""
    return os.environ.get(TYPED_VARIABLE)


def install_line(extra: str) -> str:
    """Return the command that installs an optional dependency of this package.

    Args:
        extra: name from `[project.optional-dependencies]`. The extra `cli` is added to all extras
            except `torch`.
    """
    names = extra if extra in ("cli", "logs", "torch") else f"cli,{extra}"
    if IN_CHECKOUT:
        return f"pip install -e '.[{names}]'"
    return f"pip install '{_source_folder() or 'grpo-ustat'}[{names}]'"


def _source_folder() -> str:
    """Return the folder from which this package was installed; empty for a package index."""
    # Imported here so that other command lines start faster.
    import json
    from importlib.metadata import PackageNotFoundError, distribution
    from urllib.parse import unquote, urlsplit

    try:
        record: dict[str, Any] = json.loads(
            distribution("grpo-ustat").read_text("direct_url.json") or "{}"
        )
    except (PackageNotFoundError, ValueError):
        return ""
    address = urlsplit(str(record.get("url", "")))
    return unquote(address.path) if address.scheme == "file" and "dir_info" in record else ""


def is_installed(module: str) -> bool:
    """Return True if a module can be imported, without importing it.

    A plain folder with this name does not count as a module, because trackers create folders that
    are named after the tracker.

    >>> is_installed("json"), is_installed("no_such.module")
    (True, False)
    """
    try:
        spec = find_spec(module)
    # The parent package of the module is missing.
    except ModuleNotFoundError:
        return False
    # The module has been imported and has no spec.
    except ValueError:
        return True
    return spec is not None and spec.origin is not None
