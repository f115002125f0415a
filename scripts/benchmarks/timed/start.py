"""Time commands that start no run, and compare them with the import of Hydra.

    python scripts/benchmarks/speed.py start
    python scripts/benchmarks/speed.py start --turns 7 --against OTHER_CHECKOUT

Each program is a separate process. The relevant columns are the CPU seconds and their ratio to the
first program.
"""

from __future__ import annotations

import argparse
import subprocess
import sys
from collections.abc import Callable

LINES = (
    "mse --help", "train --help", "gap --help", "mse --help all", "mse --help clip",
    "mse --cfg job", "mse study.questionz=3", "mse budget=nope", "mse policy=tiny",
    "train group_size=abc",
)  # fmt: skip
BASE = "import hydra"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Set a default number of turns that suffices for the median of short times."""
    parser.set_defaults(turns=7)


def programs(asked: argparse.Namespace) -> list[str]:
    """Return the import of Hydra and the commands."""
    return [BASE, *LINES]


def prepare(asked: argparse.Namespace, program: str) -> Callable[[], object]:
    """Return a run, which starts the process and waits for its end."""
    words = ["-c", BASE] if program == BASE else ["-m", "grpo_ustat", *program.split()]

    def run() -> None:
        subprocess.run([sys.executable, *words], capture_output=True, check=False)

    return run
