"""Snapshots: numbered folders that are either complete or absent and are verified by checksums.

A snapshot is first written to a hidden folder. Its files are synced to the disk, their sizes and
checksums are written to a manifest, and the folder is renamed. Only then are older snapshots
removed. Each older snapshot is renamed before its files are deleted. A folder `checkpoint-<step>`
is therefore never incomplete, and once a complete snapshot exists, there is one at any later time.
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
    """Error for files of a snapshot that do not match the manifest; the message names the file."""


def publish(folder: Path, step: int, write: Callable[[Path], None]) -> Path:
    """Let `write` fill a staging folder, then rename this folder to `checkpoint-<step>`.

    Raises:
        Exception: If `write` or the disk fails; the staging folder is removed.
    """
    target = folder / f"{PREFIX}{step}"
    staging = hidden_path(target)
    shutil.rmtree(staging, ignore_errors=True)
    try:
        staging.mkdir()
        write(staging)
        _seal(staging, step)
        if target.exists():
            # The existing folder failed verification; otherwise the run would have continued from
            # it.
            _remove(target, ".replaced")
        os.replace(staging, target)
    except BaseException:
        shutil.rmtree(staging, ignore_errors=True)
        raise
    _sync(folder)
    return target


def prune(folder: Path, step: int, limit: int | None) -> None:
    """Keep the newest `limit` snapshots up to `step`; remove all others and all staging folders.

    The snapshot of `step` must be complete. Snapshots of later steps have failed verification,
    because otherwise the run would have continued from them. Links and folders without a manifest
    are kept. If `limit` is None, only staging folders are removed.
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
    """Return the latest snapshot that passes verification, or None if there are no snapshots.

    For each later snapshot, a warning names the damaged file and the fault.
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
    """Compare every file with the manifest.

    Raises:
        DamagedSnapshot: If a file differs; the message names the file and the difference.
    """
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
    """Sync all files, then write the manifest and sync it."""
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
    """Return the content of a snapshot's manifest; refuse a damaged manifest or another format."""
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
    """List (step, folder) for every folder with the name of a snapshot, by ascending step."""
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
