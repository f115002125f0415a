"""`grpo-ustat doctor`: check whether runs will work on this machine, and suggest fixes.

Checks run one after another, each in a thread with a deadline. If a check raises an error or hangs,
one line reports this, and the other checks still run.
"""

from __future__ import annotations

import io
import os
import re
import shutil
import sys
import textwrap
from collections.abc import Callable, Mapping
from contextlib import redirect_stderr, redirect_stdout
from pathlib import Path

from grpo_ustat.cli.parser import VerbParser
from grpo_ustat.config.command_line import install_line
from grpo_ustat.config.secrets import redact_text
from grpo_ustat.doctor.checks import CHECKS, Finding, answer_within
from grpo_ustat.terminal.streams import visible

EXAMPLES = {"": "all checks", "--output /scratch/outputs": "all checks, on another disk"}
# Width of a check's status and name, in characters.
INDENT = 18


def main() -> None:
    """Run the checks; the exit code is 1 if any check failed, else 0."""
    parser = VerbParser("doctor", (__doc__ or "").partition("\n")[0], EXAMPLES)
    parser.add_argument(
        "--output", type=Path, default=Path("outputs"), metavar="DIR",
        help="folder for run outputs, whose disk is tested (default: outputs)",
    )  # fmt: skip
    raise SystemExit(int(show(CHECKS, parser.parse_args().output) > 0))


def show(checks: Mapping[Callable[[Path], Finding], float], folder: Path) -> int:
    """Print each check's result and fix when the check ends; return the number of failures.

    On a terminal, messages are wrapped and indented. Elsewhere, each message is a single line.
    """
    failures, is_terminal = 0, sys.stdout.isatty()
    width = max(40, shutil.get_terminal_size().columns - INDENT) if is_terminal else 10_000
    print(f"grpo_ustat doctor, output folder {shareable(str(folder))}")
    for run, seconds in checks.items():
        with redirect_stdout(io.StringIO()), redirect_stderr(io.StringIO()):
            finding = answer_within(seconds, lambda run=run: examine(run, folder))
        if finding is None:
            fix = "check whether a disk, a device or the network hangs"
            finding = Finding("failed", f"no answer in {seconds:g} s", fix)
        failures += finding.status == "failed"
        texts = [finding.message] + ([f"fix: {finding.fix}"] if finding.fix else [])
        lines = [line for text in texts for line in textwrap.wrap(shareable(text), width)]
        name = run.__name__.removeprefix("check_")
        print(f"{finding.status:<8}{name:<{INDENT - 8}}" + f"\n{' ' * INDENT}".join(lines))
    return failures


def examine(run: Callable[[Path], Finding], folder: Path) -> Finding:
    """Run a check; convert an error into a failed finding."""
    try:
        return run(folder)
    # Libraries can also raise SystemExit.
    except BaseException as error:
        code = f"from {run.__module__} import *; {run.__name__}(Path('outputs'))"
        fix = f'python -c "{code}" shows the full error'
        if isinstance(error, ModuleNotFoundError):
            fix = install_line("cli")
        text = f"the check itself failed: {type(error).__name__}: {str(error)[:300]}"
        return Finding("failed", text, fix)


def shareable(text: str) -> str:
    """Return the text on one line without secrets or escapes, with `~` for the home folder.

    >>> shareable("key=abcdef at https://me:pass@host and hf_abcdefghij0123456789")
    'key=*** at https://***@host and ***'
    """
    line = redact_text(visible(" ".join(text.split())))
    home = os.path.expanduser("~")
    return re.sub(rf"(?<![\w/]){re.escape(home)}(?=/|\b)", "~", line) if len(home) > 1 else line


if __name__ == "__main__":
    main()
