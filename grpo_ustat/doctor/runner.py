"""Checks one after another, each in a thread with a deadline: one that breaks or hangs is one line.

Work that would keep Python's interpreter lock while it hangs, such as the start of CUDA, knows no
deadline of a thread; the checks that need it try it in a process first.
"""

from __future__ import annotations

import importlib
import io
import json
import os
import platform
import re
import shutil
import sys
import textwrap
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import redirect_stderr, redirect_stdout
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Literal, TypeVar

from grpo_ustat.config.command_line import install_line
from grpo_ustat.config.secrets import redact_text
from grpo_ustat.terminal.streams import visible

Answer = TypeVar("Answer")
COLOURS = {"ok": "32", "warning": "33", "failed": "1;31"}
NAME_WIDTH = 11  # characters of the widest name, and a space
INDENT = 8 + NAME_WIDTH  # where the messages begin


@dataclass(frozen=True)
class Check:
    """One check.

    Attributes:
        name: of the check on the command line and in the output.
        target: `module:function`, from the output folder to a `Finding`; imported only when it
            runs, so that a missing package breaks no other check.
        deadline: seconds after which it is not waited for any more.
    """

    name: str
    target: str
    deadline: float = 10.0


CHECKS = (  # those that import torch wait for slow disks
    Check("code", "grpo_ustat.doctor.software:code", 20.0),
    Check("python", "grpo_ustat.doctor.software:python"),
    Check("packages", "grpo_ustat.doctor.software:packages"),
    Check("torch", "grpo_ustat.doctor.hardware:torch_devices", 40.0),
    Check("bf16", "grpo_ustat.doctor.hardware:bf16", 30.0),
    Check("attention", "grpo_ustat.doctor.hardware:attention", 40.0),
    Check("threads", "grpo_ustat.doctor.hardware:threads"),
    Check("memory", "grpo_ustat.doctor.hardware:memory"),
    Check("disk", "grpo_ustat.doctor.storage:disk", 20.0),
    Check("locks", "grpo_ustat.doctor.storage:locks", 20.0),
    Check("cache", "grpo_ustat.doctor.software:cache"),
    Check("judge", "grpo_ustat.doctor.software:judge", 30.0),
    Check("slurm", "grpo_ustat.doctor.cluster:slurm", 20.0),
    Check("ranks", "grpo_ustat.doctor.cluster:ranks", 100.0),
    Check("trackers", "grpo_ustat.doctor.software:trackers"),
)


@dataclass(frozen=True)
class Finding:
    """What a check reports.

    Attributes:
        status: `warning` where runs work but something is likely a mistake.
        message: what was looked at and what it is like, one line.
        fix: what to do; empty only where the status is ok.
    """

    status: Literal["ok", "warning", "failed"]
    message: str
    fix: str = ""


def ok(message: str) -> Finding:
    """All is well."""
    return Finding("ok", message)


def warning(message: str, fix: str) -> Finding:
    """Runs work, but something is likely a mistake."""
    return Finding("warning", message, fix)


def failed(message: str, fix: str) -> Finding:
    """Runs will fail, or give wrong results."""
    return Finding("failed", message, fix)


def show(checks: Sequence[Check], folder: Path) -> int:
    """Print a line for each check as it ends, and below it the fix; returns how many failed.

    On a terminal the messages are wrapped under themselves, elsewhere each is one line.
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
        print(f"{status}{name:<{NAME_WIDTH}}" + f"\n{' ' * INDENT}".join(lines), flush=True)
    summary = ", ".join(f"{counts[status]} {status}" for status in COLOURS)
    print(f"{summary} in {time.monotonic() - start:.1f} s")
    return counts["failed"]


def show_json(checks: Sequence[Check], folder: Path) -> int:
    """Print all outcomes as one JSON object; returns how many failed."""
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
    """Run the checks in their order; what libraries print meanwhile is not shown.

    Yields:
        A check's name, its finding, and the seconds that it took.
    """
    for check in checks:
        start = time.monotonic()
        with redirect_stdout(io.StringIO()), redirect_stderr(io.StringIO()):
            finding = answer_within(check.deadline, partial(_run_check, check, folder))
        if finding is None:
            finding = failed(
                f"did not answer in {check.deadline:g} s", "a disk, device or network that hangs?"
            )
        public = Finding(finding.status, shareable(finding.message), shareable(finding.fix))
        yield check.name, public, time.monotonic() - start


def _run_check(check: Check, folder: Path) -> Finding:
    """Import and run a check; an error of it is a failed finding."""
    module, _, function = check.target.partition(":")
    try:
        return getattr(importlib.import_module(module), function)(folder)
    except BaseException as error:  # a library may also leave by SystemExit
        code = f"import {module} as m, pathlib as p; m.{function}(p.Path('outputs'))"
        fix = f'python -c "{code}" shows all of it'
        if isinstance(error, ModuleNotFoundError):
            fix = install_line("cli")
        return failed(f"the check itself broke: {type(error).__name__}: {str(error)[:300]}", fix)


def answer_within(seconds: float, work: Callable[[], Answer]) -> Answer | None:
    """The answer of `work`; None, and its thread is left behind, where it has none in `seconds`."""
    answers: list[Answer] = []
    thread = threading.Thread(target=lambda: answers.append(work()), daemon=True)
    thread.start()
    thread.join(seconds)
    return answers[0] if answers else None


def shareable(text: str) -> str:
    """One line without secrets or escapes, and with `~` for the home folder.

    >>> shareable("key=abcdef at https://me:pass@host and hf_abcdefghij0123456789")
    'key=*** at https://***@host and ***'
    """
    line = redact_text(visible(" ".join(text.split())))
    home = os.path.expanduser("~")
    return re.sub(rf"(?<![\w/]){re.escape(home)}(?=/|\b)", "~", line) if len(home) > 1 else line
