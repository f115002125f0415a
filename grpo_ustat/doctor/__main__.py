"""`grpo-ustat doctor`: check whether runs will work on this machine, and suggest fixes.

Checks run one after another, each in a thread with a deadline. If a check raises an error or hangs,
one line reports this, and the other checks still run.
"""

from __future__ import annotations

import faulthandler
import io
import json
import os
import platform
import re
import shutil
import sys
import textwrap
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import redirect_stderr, redirect_stdout
from pathlib import Path

from grpo_ustat.cli.parser import VerbParser
from grpo_ustat.config.command_line import install_line
from grpo_ustat.config.secrets import redact_text
from grpo_ustat.doctor.checks import CHECKS, Check, Finding, answer_within, failed
from grpo_ustat.terminal.streams import visible

EXAMPLES = {
    "": "all checks",
    "--output /scratch/outputs": "all checks, on another disk",
    "--only torch disk": "selected checks",
}
COLOURS = {"ok": "32", "warning": "33", "failed": "1;31"}
# Width of a check's status and name, in characters.
INDENT = 18


def main() -> None:
    """Run the checks; the exit code is 1 if any check failed, else 0."""
    names = [check.name for check in CHECKS]
    parser = VerbParser("doctor", (__doc__ or "").partition("\n")[0], EXAMPLES)
    parser.add_argument(
        "--output", type=Path, default=Path("outputs"), metavar="DIR",
        help="folder for run outputs; its disk and file locks are tested (default: outputs)",
    )  # fmt: skip
    parser.add_argument("--json", action="store_true", help="print one JSON object, for programs")
    parser.add_argument(
        "--only",
        nargs="+",
        metavar="CHECK",
        choices=names,
        help=f"checks to run: {', '.join(names)}",
    )
    options = parser.parse_args()
    checks = [check for check in CHECKS if options.only is None or check.name in options.only]
    # If a library crashes the process, standard error shows which check was running.
    faulthandler.enable()
    failures = (show_json if options.json else show)(checks, options.output)
    raise SystemExit(int(failures > 0))


def show(checks: Sequence[Check], folder: Path) -> int:
    """Print each check's result and fix when the check ends; return the number of failures.

    On a terminal, messages are wrapped and indented. Elsewhere, each message is a single line.
    """
    start, counts, terminal = time.monotonic(), Counter(), sys.stdout.isatty()
    width = max(40, shutil.get_terminal_size().columns - INDENT) if terminal else 10_000
    print(f"grpo_ustat doctor, output folder {shareable(str(folder))}")
    for name, finding, _ in examine(checks, folder):
        counts[finding.status] += 1
        texts = [finding.message] + ([f"fix: {finding.fix}"] if finding.fix else [])
        lines = [line for text in texts for line in textwrap.wrap(text, width)]
        status = f"{finding.status:<8}"
        if terminal and "NO_COLOR" not in os.environ:
            status = f"\033[{COLOURS[finding.status]}m{status}\033[0m"
        print(f"{status}{name:<{INDENT - 8}}" + f"\n{' ' * INDENT}".join(lines), flush=True)
    summary = ", ".join(f"{counts[status]} {status}" for status in COLOURS)
    print(f"{summary} in {time.monotonic() - start:.1f} s")
    return counts["failed"]


def show_json(checks: Sequence[Check], folder: Path) -> int:
    """Print all findings as one JSON object; return the number of failed checks."""
    rows = [
        {
            "check": name,
            "status": finding.status,
            "said": finding.message,
            "fix": finding.fix,
            "seconds": round(seconds, 2),
        }
        for name, finding, seconds in examine(checks, folder)
    ]
    failures = sum(row["status"] == "failed" for row in rows)
    print(json.dumps({"system": platform.platform(), "failed": failures, "checks": rows}, indent=1))
    return failures


def examine(checks: Sequence[Check], folder: Path) -> Iterator[tuple[str, Finding, float]]:
    """Run the checks in order; discard the output of libraries.

    Yields:
        Name of the check, its finding, and its duration in seconds.
    """
    for check in checks:
        start = time.monotonic()
        with redirect_stdout(io.StringIO()), redirect_stderr(io.StringIO()):
            finding = answer_within(check.seconds, lambda check=check: _run(check, folder))
        if finding is None:
            finding = failed(
                f"no answer in {check.seconds:g} s",
                "check whether a disk, a device or the network hangs",
            )
        status, message, fix = finding
        yield (
            check.name,
            Finding(status, shareable(message), shareable(fix)),
            (time.monotonic() - start),
        )


def _run(check: Check, folder: Path) -> Finding:
    """Run a check; convert an error into a failed finding."""
    try:
        return check.run(folder)
    # Libraries can also raise SystemExit.
    except BaseException as error:
        module, function = check.run.__module__, check.run.__name__
        code = f"import {module} as m, pathlib as p; m.{function}(p.Path('outputs'))"
        fix = f'python -c "{code}" shows the full error'
        if isinstance(error, ModuleNotFoundError):
            fix = install_line("cli")
        return failed(f"the check itself failed: {type(error).__name__}: {str(error)[:300]}", fix)


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
