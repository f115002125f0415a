"""Separate virtual environment for TRL, which is not a dependency of the project.

On both sides, torch, transformers and other packages have the versions in `constraints.txt`, so
that a comparison compares only the training code.
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
import venv
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
CONSTRAINTS = ROOT / "constraints.txt"
PINNED = ("trl==1.16.0", "datasets==5.2.0")
WORKER = Path(__file__).with_name("trl_worker.py")


def add_environment_argument(parser: argparse.ArgumentParser) -> None:
    """Add `--environment DIR`."""
    parser.add_argument(
        "--environment", type=Path, default=ROOT / ".venv-trl",
        help="virtual environment with TRL, made there if it is missing (default: .venv-trl)",
    )  # fmt: skip


def environment(folder: Path) -> Path:
    """Return the Python of the environment in `folder`, which is made unless it has the pins."""
    python, stamp = folder / "bin" / "python", folder / ".installed"
    wanted = "\n".join((*PINNED, CONSTRAINTS.read_text()))
    if stamp.is_file() and stamp.read_text() == wanted:
        return python
    if folder.exists() and any(folder.iterdir()) and not (folder / "pyvenv.cfg").is_file():
        raise SystemExit(f"error: {folder} is not a virtual environment: choose another folder")
    print(f"Installing {', '.join(PINNED)} into {folder} (some minutes) ...", file=sys.stderr)
    if not python.exists():
        venv.create(folder, with_pip=True)
    pip = [python, "-m", "pip", "install", "-q", "--disable-pip-version-check", "-c", CONSTRAINTS]
    # torch is installed by a separate command, so that no other package determines its build.
    subprocess.run([*pip, "torch"], check=True)
    subprocess.run([*pip, "torch", *PINNED], check=True)
    stamp.write_text(wanted)
    return python


def run_worker(python: Path, task: str, folder: Path) -> None:
    """Run `trl_worker.py` on the job in `folder`; if it fails, exit and print its output."""
    quiet = {"HF_HUB_OFFLINE": "1", "TOKENIZERS_PARALLELISM": "false"}
    done = subprocess.run(
        [python, WORKER, task, folder], capture_output=True, text=True, env=os.environ | quiet
    )
    if done.returncode:
        raise SystemExit(f"error: TRL failed:\n{done.stdout[-2000:]}{done.stderr[-6000:]}")
