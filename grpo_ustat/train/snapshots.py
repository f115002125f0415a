"""Folders `checkpoint-<step>` that are never incomplete.

A checkpoint is written to a hidden folder, which is then renamed. Only then are older checkpoints
removed, and each is renamed before its files are deleted. If the process is killed at any time, a
folder `checkpoint-<step>` is therefore complete, and the newest complete one is still there.
"""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable
from pathlib import Path

from grpo_ustat.runs.files import hidden_path

PREFIX = "checkpoint-"
STATE_FILE = "grpo_ustat_state.json"


def publish(folder: Path, step: int, write: Callable[[Path], None]) -> Path:
    """Write a checkpoint to a hidden folder, then rename this folder to `checkpoint-<step>`.

    If an error occurs, the hidden folder is removed.

    Args:
        folder: run folder.
        step: number in the checkpoint's name.
        write: function that writes the checkpoint's files to the folder that it is given.

    Returns:
        The checkpoint's folder.
    """
    target = folder / f"{PREFIX}{step}"
    staging = hidden_path(target)
    shutil.rmtree(staging, ignore_errors=True)
    try:
        staging.mkdir()
        write(staging)
        for path in (*staging.rglob("*"), staging):
            _sync(path)
        if target.exists():
            # The existing folder must be damaged, because otherwise the run would have continued
            # from it.
            _remove(target, ".replaced")
        os.replace(staging, target)
    except BaseException:
        shutil.rmtree(staging, ignore_errors=True)
        raise
    _sync(folder)
    return target


def prune(folder: Path, step: int, limit: int | None) -> None:
    """Remove old checkpoints and the hidden folders that a killed process left.

    Checkpoints of steps after `step` are also removed. They must be damaged, because otherwise the
    run would have continued from them. Links and folders without a state file are kept.

    Args:
        folder: run folder.
        step: step of the newest checkpoint, which must be complete.
        limit: number of checkpoints to keep, the newest up to `step`; None to remove only hidden
            folders.
    """
    for staging in folder.glob(f".{PREFIX}*.tmp"):
        shutil.rmtree(staging)
    ours = [x for x in checkpoints(folder) if (x / STATE_FILE).is_file() and not x.is_symlink()]
    later = [path for path in ours if step_of(path) > step]
    earlier = [path for path in ours if step_of(path) <= step]
    if limit is not None:
        for path in later + earlier[limit:]:
            _remove(path)


def checkpoints(folder: Path) -> list[Path]:
    """List the folders with the name of a checkpoint, the newest step first."""
    found = [x for x in folder.glob(f"{PREFIX}*") if x.name[len(PREFIX) :].isdecimal()]
    return sorted(filter(Path.is_dir, found), key=step_of, reverse=True)


def step_of(checkpoint: Path) -> int:
    """Return the step in a checkpoint's name."""
    return int(checkpoint.name[len(PREFIX) :])


def _remove(path: Path, mark: str = "") -> None:
    """Rename a folder before removing it, so that its remains never count as a checkpoint."""
    hidden = hidden_path(path, mark)
    shutil.rmtree(hidden, ignore_errors=True)
    os.replace(path, hidden)
    shutil.rmtree(hidden)


def _sync(path: Path) -> None:
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)
