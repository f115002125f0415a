"""Snapshots: folders `checkpoint-<step>` that are never incomplete and are verified by checksums.

A snapshot is first written to a hidden folder. Its files are synced to the disk, their sizes and
checksums are written to a manifest, and the folder is renamed. Only then are older snapshots
removed, and each is renamed before its files are deleted. If the process is killed at any time, a
folder `checkpoint-<step>` is therefore complete, and the newest complete snapshot is still there.
"""

from __future__ import annotations

import hashlib
import json
import os
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

from grpo_ustat.config.schema import ConfigError
from grpo_ustat.runs.files import hidden_path
from grpo_ustat.terminal.console import warn

PREFIX = "checkpoint-"
MANIFEST = "grpo_ustat_manifest.json"
FORMAT = 1


class DamagedSnapshot(ValueError):
    """Error raised if a file of a snapshot does not match the manifest; the message names it."""


def publish(folder: Path, step: int, write: Callable[[Path], None]) -> Path:
    """Write a snapshot to a hidden folder, then rename this folder to `checkpoint-<step>`.

    If an error occurs, the hidden folder is removed.

    Args:
        folder: run folder.
        step: number in the snapshot's name.
        write: function that writes the snapshot's files to the folder that it is given.

    Returns:
        The snapshot's folder.
    """
    target = folder / f"{PREFIX}{step}"
    staging = hidden_path(target)
    shutil.rmtree(staging, ignore_errors=True)
    try:
        staging.mkdir()
        write(staging)
        _seal(staging, step)
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
    """Remove old snapshots and the hidden folders that a killed process left.

    Snapshots of steps after `step` are also removed. They must be damaged, because otherwise the
    run would have continued from them. Links and folders without a manifest are kept.

    Args:
        folder: run folder.
        step: step of the newest snapshot, which must be complete.
        limit: number of snapshots to keep, the newest up to `step`; None to remove only hidden
            folders.
    """
    for staging in folder.glob(f".{PREFIX}*.tmp"):
        shutil.rmtree(staging)
    snapshots = [
        (n, p) for n, p in _numbered(folder) if (p / MANIFEST).is_file() and not p.is_symlink()
    ]
    earlier = [path for number, path in snapshots if number <= step]
    later = [path for number, path in snapshots if number > step]
    if limit is not None:
        for path in later + earlier[:-limit]:
            _remove(path)


def newest_whole(folder: Path) -> Path | None:
    """Return the latest snapshot that is not damaged, or None if there are no snapshots.

    If snapshots after it are damaged, a warning for each names the file and the fault. If all
    snapshots are damaged, an error is raised.
    """
    snapshots = _numbered(folder)[::-1]
    for _, path in snapshots:
        try:
            verify(path)
        except (DamagedSnapshot, OSError) as error:
            warn(f"{path.name} is not used: {error}")
            continue
        return path
    if snapshots:
        names = ", ".join(path.name for _, path in snapshots)
        raise ConfigError(
            f"no checkpoint in {folder} can be used ({names}; reasons above): restore one, or "
            "start again with on_existing=overwrite"
        )
    return None


def verify(snapshot: Path) -> None:
    """Raise DamagedSnapshot if a file differs in size or checksum from the manifest."""
    for name, entry in _manifest(snapshot)["files"].items():
        file = snapshot / name
        if not file.is_file():
            raise DamagedSnapshot(f"{name} is missing")
        size = file.stat().st_size
        if size != entry["bytes"]:
            raise DamagedSnapshot(f"{name} has {size} bytes, but {entry['bytes']} were written")
        if _digest(file) != entry["sha256"]:
            raise DamagedSnapshot(f"{name} does not match the checksum (sha256) that was written")


def _seal(staging: Path, step: int) -> None:
    """Sync all files to the disk, then write the manifest and sync it too."""
    files = [path for path in sorted(staging.rglob("*")) if path.is_file()]
    for file in files:
        _sync(file)
    entries = {
        file.relative_to(staging).as_posix(): {
            "bytes": file.stat().st_size,
            "sha256": _digest(file),
        }
        for file in files
    }
    content = {"format": FORMAT, "step": step, "files": entries}
    (staging / MANIFEST).write_text(_manifest_text(content))
    _sync(staging / MANIFEST)
    for folder in [path for path in staging.rglob("*") if path.is_dir()]:
        _sync(folder)
    _sync(staging)


def _manifest(snapshot: Path) -> dict[str, Any]:
    """Return the content of a snapshot's manifest.

    An error is raised if the manifest is damaged or was written by a version with another format.
    """
    if not (snapshot / MANIFEST).is_file():
        raise DamagedSnapshot(
            f"{MANIFEST} is missing: the folder is incomplete, or from a version without manifests"
        )
    text = (snapshot / MANIFEST).read_bytes()
    try:
        content = json.loads(text)
        content.pop("sha256")
        intact = _manifest_text(content).encode() == text
    except (ValueError, KeyError, AttributeError, TypeError, RecursionError):
        intact = False
    if not intact:
        raise DamagedSnapshot(f"{MANIFEST} does not match its checksum")
    if content["format"] != FORMAT:
        raise ConfigError(
            f"{snapshot} has format {content['format']}, but this version reads format {FORMAT}: "
            "use the version that wrote it, or on_existing=overwrite"
        )
    return content


def _manifest_text(content: dict[str, Any]) -> str:
    """Return the manifest's text; its last field is the checksum of the other fields."""
    text = json.dumps(content, indent=1)
    checksum = hashlib.sha256(text.encode()).hexdigest()
    return json.dumps(content | {"sha256": checksum}, indent=1) + "\n"


def _numbered(folder: Path) -> list[tuple[int, Path]]:
    """List (step, folder) for every folder with the name of a snapshot, in order of the step."""
    names = {path: path.name.removeprefix(PREFIX) for path in folder.glob(f"{PREFIX}*")}
    return sorted((int(n), path) for path, n in names.items() if n.isdecimal() and path.is_dir())


def _remove(path: Path, mark: str = "") -> None:
    """Rename a folder before removing it, so that its remains never count as a snapshot."""
    hidden = hidden_path(path, mark)
    shutil.rmtree(hidden, ignore_errors=True)
    os.replace(path, hidden)
    shutil.rmtree(hidden)


def _digest(file: Path) -> str:
    with file.open("rb") as stream:
        return hashlib.file_digest(stream, "sha256").hexdigest()


def _sync(path: Path) -> None:
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)
