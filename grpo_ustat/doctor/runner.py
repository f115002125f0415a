"""Checks side by side, each in a process of its own: one that crashes or hangs is one line."""

from __future__ import annotations

import importlib
import json
import os
import platform
import re
import shutil
import signal
import subprocess
import sys
import textwrap
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Literal

from grpo_ustat.config.command_line import install_line
from grpo_ustat.config.secrets import redact_text
from grpo_ustat.terminal.streams import visible

AT_ONCE = 3  # checks
KILL_PATIENCE = 2.0  # seconds; a process that waits for a dead disk never ends
COLOURS = {"ok": "32", "warning": "33", "failed": "1;31"}
NAME_WIDTH = 11  # characters of the widest name, and a space
INDENT = 8 + NAME_WIDTH  # where the messages begin


@dataclass(frozen=True)
class Check:
    """One check.

    Attributes:
        name: of the check on the command line and in the output.
        target: `module:function`, from the output folder to a `Finding`; imported only in the
            process that runs it.
        deadline: seconds after which that process is killed.
    """

    name: str
    target: str
    deadline: float = 10.0


CHECKS = (  # those that import torch wait for slow disks
    Check("code", "grpo_ustat.doctor.software:code", 20.0),
    Check("python", "grpo_ustat.doctor.software:python"),
    Check("packages", "grpo_ustat.doctor.software:packages"),
    Check("torch", "grpo_ustat.doctor.hardware:torch_devices", 30.0),
    Check("bf16", "grpo_ustat.doctor.hardware:bf16", 30.0),
    Check("attention", "grpo_ustat.doctor.hardware:attention", 40.0),
    Check("threads", "grpo_ustat.doctor.hardware:threads"),
    Check("memory", "grpo_ustat.doctor.hardware:memory"),
    Check("disk", "grpo_ustat.doctor.storage:disk", 20.0),
    Check("locks", "grpo_ustat.doctor.storage:locks", 20.0),
    Check("cache", "grpo_ustat.doctor.software:cache"),
    Check("judge", "grpo_ustat.doctor.software:judge", 30.0),
    Check("slurm", "grpo_ustat.doctor.cluster:slurm", 20.0),
    Check("ranks", "grpo_ustat.doctor.cluster:ranks", 40.0),
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


@dataclass(frozen=True)
class Outcome:
    """A check's finding, and the seconds that it took."""

    name: str
    finding: Finding
    seconds: float


def show(checks: Sequence[Check], folder: Path) -> int:
    """Print a line for each check as it ends, and below it the fix; returns how many failed.

    On a terminal the messages are wrapped under themselves, elsewhere each is one line.
    """
    start, counts, terminal = time.monotonic(), Counter(), sys.stdout.isatty()
    width = max(40, shutil.get_terminal_size().columns - INDENT) if terminal else 10_000
    print(f"grpo_ustat doctor, output folder {shareable(str(folder))}")
    for outcome in examine(checks, folder):
        finding = outcome.finding
        counts[finding.status] += 1
        texts = [finding.message] + ([f"fix: {finding.fix}"] if finding.fix else [])
        lines = [line for text in texts for line in textwrap.wrap(text, width)]
        status = f"{finding.status:<8}"
        if terminal and "NO_COLOR" not in os.environ:
            status = f"\033[{COLOURS[finding.status]}m{status}\033[0m"
        print(f"{status}{outcome.name:<{NAME_WIDTH}}" + f"\n{' ' * INDENT}".join(lines), flush=True)
    summary = ", ".join(f"{counts[status]} {status}" for status in COLOURS)
    print(f"{summary} in {time.monotonic() - start:.1f} s")
    return counts["failed"]


def show_json(checks: Sequence[Check], folder: Path) -> int:
    """Print all outcomes as one JSON object; returns how many failed."""
    rows = [
        {
            "check": outcome.name,
            "status": outcome.finding.status,
            "said": outcome.finding.message,
            "fix": outcome.finding.fix,
            "seconds": round(outcome.seconds, 2),
        }
        for outcome in examine(checks, folder)
    ]
    failures = sum(row["status"] == "failed" for row in rows)
    print(json.dumps({"system": platform.platform(), "failed": failures, "checks": rows}, indent=1))
    return failures


def examine(checks: Sequence[Check], folder: Path) -> Iterator[Outcome]:
    """Run the checks, a few at a time; their outcomes come in the checks' order."""
    running: set[subprocess.Popen[str]] = set()
    with ThreadPoolExecutor(AT_ONCE) as threads:
        futures = [threads.submit(_run_check, check, folder, running) for check in checks]
        try:
            for future in futures:
                yield future.result()
        finally:  # also Ctrl-C, which processes in sessions of their own do not see
            threads.shutdown(wait=False, cancel_futures=True)
            for process in tuple(running):
                _kill(process)


def _run_check(check: Check, folder: Path, running: set[subprocess.Popen[str]]) -> Outcome:
    """Run one check in a process of its own; a crash or a missed deadline is a failed finding."""
    start = time.monotonic()
    module = ["-m", "grpo_ustat.doctor.runner", check.target]
    process = subprocess.Popen(
        [sys.executable, *module, str(folder), str(check.deadline)], stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, errors="replace",
        start_new_session=True,
    )  # fmt: skip
    running.add(process)
    try:
        stdout, stderr = process.communicate(timeout=check.deadline)
        try:
            finding = Finding(**json.loads(stdout.strip().splitlines()[-1]))
        except (ValueError, TypeError, IndexError):
            finding = _crash_finding(check, process.returncode, stderr)
    except subprocess.TimeoutExpired:
        finding = failed(
            f"no answer within {check.deadline:g} s; it was stopped",
            f"a disk, device or network that hangs? See python {' '.join(module)} {folder}",
        )
    finally:
        _kill(process)
        running.discard(process)
    public = Finding(finding.status, shareable(finding.message), shareable(finding.fix))
    return Outcome(check.name, public, time.monotonic() - start)


def _crash_finding(check: Check, code: int, stderr: str) -> Finding:
    """A process that ended without a finding: its exit code and the last line of its errors."""
    lines = [line for line in stderr.strip().splitlines() if line.strip()]
    last = lines[-1] if lines else "it said nothing"
    end = f"signal {-code}" if code < 0 else f"exit code {code}"
    fix = f"python -m grpo_ustat.doctor.runner {check.target} . {check.deadline:g} shows all of it"
    if "No module named" in last:
        fix = install_line("cli")
    return failed(f"the check itself broke ({end}): {last[:300]}", fix)


def _kill(process: subprocess.Popen[str]) -> None:
    """End it and all that it started, and wait no longer than `KILL_PATIENCE`."""
    with suppress(ProcessLookupError, PermissionError):
        os.killpg(process.pid, signal.SIGKILL)
    with suppress(subprocess.TimeoutExpired):
        process.wait(KILL_PATIENCE)
    for pipe in (process.stdout, process.stderr):
        if pipe is not None:
            pipe.close()


def shareable(text: str) -> str:
    """One line without secrets or escapes, and with `~` for the home folder.

    >>> shareable("key=abcdef at https://me:pass@host and hf_abcdefghij0123456789")
    'key=*** at https://***@host and ***'
    """
    line = redact_text(visible(" ".join(text.split())))
    home = os.path.expanduser("~")
    return re.sub(rf"(?<![\w/]){re.escape(home)}(?=/|\b)", "~", line) if len(home) > 1 else line


def main() -> None:
    """Run the check `module:function FOLDER SECONDS` of the command line and print its finding.

    An alarm of the system ends it where nobody is left to do so.
    """
    target, folder, limit = sys.argv[1:]
    signal.alarm(int(float(limit)) + 5)
    module, _, function = target.partition(":")
    finding = getattr(importlib.import_module(module), function)(Path(folder))
    print("\n" + json.dumps(asdict(finding)), flush=True)


if __name__ == "__main__":
    main()
