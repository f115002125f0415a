"""The doctor's lines for people, and its JSON for programs.

Nothing but the standard library is imported, for any package may be missing.
"""

from __future__ import annotations

import json
import os
import platform
import shutil
import sys
import textwrap
import time
from collections import Counter
from dataclasses import asdict
from pathlib import Path

from grpo_ustat.checkup.catalogue import Check
from grpo_ustat.checkup.findings import shareable
from grpo_ustat.checkup.runner import Outcome, examine

COLOURS = {"ok": "32", "warning": "33", "failed": "1;31"}
NAMES = 11  # characters of the widest name, and a space
INDENT = 8 + NAMES  # where the words begin


def show(checks: list[Check], folder: Path) -> int:
    """Print a line for each check as it comes, and below it what to do; returns how many failed."""
    start, counts = time.monotonic(), Counter()
    print(f"grpo_ustat doctor, output folder {shareable(str(folder))}")
    for outcome in examine(checks, folder):
        counts[outcome.finding.status] += 1
        print(_lines(outcome), flush=True)
    told = ", ".join(f"{counts[status]} {status}" for status in COLOURS)
    print(f"{told} in {time.monotonic() - start:.1f} s")
    return counts["failed"]


def as_json(checks: list[Check], folder: Path) -> int:
    """Print all outcomes as one object; returns how many failed."""
    found = list(examine(checks, folder))
    rows = [{"check": x.name, **asdict(x.finding), "seconds": round(x.seconds, 2)} for x in found]
    bad = sum(x.finding.status == "failed" for x in found)
    print(json.dumps({"system": platform.platform(), "failed": bad, "checks": rows}, indent=1))
    return bad


def _lines(outcome: Outcome) -> str:
    """Status, name, words; on a terminal wrapped under themselves, elsewhere one line each."""
    finding, terminal = outcome.finding, sys.stdout.isatty()
    width = max(40, shutil.get_terminal_size().columns - INDENT) if terminal else 10_000
    texts = [finding.said] + ([f"fix: {finding.fix}"] if finding.fix else [])
    words = [line for text in texts for line in textwrap.wrap(text, width)]
    status = f"{finding.status:<8}"
    if terminal and "NO_COLOR" not in os.environ:
        status = f"\033[{COLOURS[finding.status]}m{status}\033[0m"
    return f"{status}{outcome.name:<{NAMES}}" + f"\n{' ' * INDENT}".join(words)
