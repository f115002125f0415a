"""Checks side by side, each in a process of its own: one that crashes or hangs is one line."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from grpo_ustat.checkup.catalogue import Check
from grpo_ustat.checkup.findings import Finding, failed, shareable

AT_ONCE = 3
LINGER = 2.0  # seconds for a killed process to be gone; one that a dead disk holds never is


@dataclass(frozen=True)
class Outcome:
    """A check's finding, and the seconds that it took."""

    name: str
    finding: Finding
    seconds: float


def examine(checks: list[Check], folder: Path) -> Iterator[Outcome]:
    """Run the checks, a few at a time; their outcomes come in the checks' order."""
    running: set[subprocess.Popen] = set()
    with ThreadPoolExecutor(AT_ONCE) as threads:
        waiting = [threads.submit(_outcome, check, folder, running) for check in checks]
        try:
            for one in waiting:
                yield one.result()
        finally:  # also Ctrl-C, which processes in sessions of their own do not see
            threads.shutdown(wait=False, cancel_futures=True)
            for process in tuple(running):
                _kill(process)


def _outcome(check: Check, folder: Path, running: set[subprocess.Popen]) -> Outcome:
    start = time.monotonic()
    finding = _finding(check, folder, running)
    told = Finding(finding.status, shareable(finding.said), shareable(finding.fix))
    return Outcome(check.name, told, time.monotonic() - start)


def _finding(check: Check, folder: Path, running: set[subprocess.Popen]) -> Finding:
    words = ["-m", "grpo_ustat.checkup", check.target, str(folder), str(check.deadline)]
    process = subprocess.Popen(
        [sys.executable, *words], stdin=subprocess.DEVNULL, stdout=subprocess.PIPE,
        stderr=subprocess.PIPE, text=True, errors="replace", start_new_session=True,
    )  # fmt: skip
    running.add(process)
    try:
        out, err = process.communicate(timeout=check.deadline)
        return _parsed(out) or _crashed(check, process.returncode, err)
    except subprocess.TimeoutExpired:
        return failed(
            f"no answer within {check.deadline:g} s; it was stopped",
            f"a disk, device or network that hangs? See python -m {' '.join(words[1:4])}",
        )
    finally:
        _kill(process)
        running.discard(process)


def _parsed(out: str) -> Finding | None:
    try:
        return Finding(**json.loads(out.strip().splitlines()[-1]))
    except (ValueError, TypeError, IndexError):
        return None


def _crashed(check: Check, code: int, err: str) -> Finding:
    lines = [line for line in err.strip().splitlines() if line.strip()]
    how = f"signal {-code}" if code < 0 else f"exit code {code}"
    last = lines[-1] if lines else "it said nothing"
    missing = "No module named" in last
    again = f"python -m grpo_ustat.checkup {check.target} . {check.deadline:g} shows all of it"
    fix = "pip install the missing package, see `packages` above" if missing else again
    return failed(f"the check itself broke ({how}): {last[:300]}", fix)


def _kill(process: subprocess.Popen) -> None:
    """End it and what it started, and wait no longer than `LINGER`."""
    with suppress(ProcessLookupError, PermissionError):
        os.killpg(process.pid, signal.SIGKILL)
    with suppress(subprocess.TimeoutExpired):
        process.wait(LINGER)
    for pipe in (process.stdout, process.stderr):
        pipe.close()
