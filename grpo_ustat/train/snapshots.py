"""Numbered folders of a run that are whole or not there, and known by their checksums.

A snapshot is staged in a hidden folder beside its place; its files are synced to the disk, their
sizes and checksums go last into a manifest, and the folder is renamed. Only then do older ones go,
each renamed away before it is emptied. So a name `checkpoint-<step>` never stands for a part, and
where there was a whole snapshot there is one at every moment after.
"""

from __future__ import annotations

import hashlib
import json
import os
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from grpo_ustat.checks import ConfigError
from grpo_ustat.runs.log import warn

PREFIX = "checkpoint-"
MANIFEST = "grpo_ustat_manifest.json"
FORMAT = 1


class Damaged(ValueError):
    """A snapshot that is not what was written; the message names the file."""


def publish(folder: Path, step: int, write: Callable[[Path], None]) -> Path:
    """Let `write` fill a staged folder and make it `checkpoint-<step>`.

    Raises:
        Exception: whatever `write` or the disk raised; nothing is left of the staged folder.
    """
    target = folder / f"{PREFIX}{step}"
    staged = _hidden(target)
    shutil.rmtree(staged, ignore_errors=True)
    try:
        staged.mkdir()
        write(staged)
        _seal(staged, step)
        if target.exists():  # it did not verify, or this run would have gone on from it
            _remove(target, ".replaced")
        os.replace(staged, target)
    except BaseException:
        shutil.rmtree(staged, ignore_errors=True)
        raise
    _sync(folder)
    return target


def prune(folder: Path, step: int, limit: int | None) -> None:
    """Keep the newest `limit` snapshots up to `step`, which is whole, and clear what was staged.

    Later ones did not verify, or `step` would not have been written after them, and go too.
    Folders without our manifest and links are left alone.
    """
    for staged in folder.glob(f".{PREFIX}*.tmp"):
        shutil.rmtree(staged)
    ours = [(n, p) for n, p in _numbered(folder) if (p / MANIFEST).is_file()]
    done = [path for number, path in ours if number <= step and not path.is_symlink()]
    later = [path for number, path in ours if number > step and not path.is_symlink()]
    if limit is not None:
        for path in later + done[:-limit]:
            _remove(path)


def newest_whole(folder: Path) -> Path | None:
    """The latest snapshot that verifies, None where there is none of any kind; a warning for
    each later one, with the file and what is wrong with it.

    Raises:
        ConfigError: there are snapshots but none verifies, or one is of another format.
    """
    found = _numbered(folder)[::-1]
    for _, path in found:
        try:
            verify(path)
        except (Damaged, OSError) as error:
            warn(f"{path.name} is passed over: {error}")
            continue
        return path
    if found:
        names = ", ".join(path.name for _, path in found)
        raise ConfigError(
            f"no checkpoint in {folder} can be used ({names}; reasons above): restore one, or "
            "start anew with on_existing=overwrite"
        )
    return None


def verify(snapshot: Path) -> None:
    """Compare every file with the manifest.

    Raises:
        Damaged: naming the first file that differs and how.
        ConfigError: the format is not the one this version reads.
    """
    for name, told in _manifest(snapshot)["files"].items():
        file = snapshot / name
        if not file.is_file():
            raise Damaged(f"{name} is missing")
        size = file.stat().st_size
        if size != told["bytes"]:
            raise Damaged(f"{name} has {size} bytes, {told['bytes']} were written")
        if _digest(file) != told["sha256"]:
            raise Damaged(f"{name} does not have the checksum (sha256) that was written")


def _seal(staged: Path, step: int) -> None:
    """Sync all files, then write the manifest and sync it."""
    files = [path for path in sorted(staged.rglob("*")) if path.is_file()]
    for file in files:
        _sync(file)
    told = {
        file.relative_to(staged).as_posix(): {
            "bytes": file.stat().st_size,
            "sha256": _digest(file),
        }
        for file in files
    }
    (staged / MANIFEST).write_text(_rendered({"format": FORMAT, "step": step, "files": told}))
    _sync(staged / MANIFEST)
    for inside in [path for path in staged.rglob("*") if path.is_dir()]:
        _sync(inside)
    _sync(staged)


def _manifest(snapshot: Path) -> dict[str, Any]:
    if not (snapshot / MANIFEST).is_file():
        raise Damaged(
            f"{MANIFEST} is missing: it is not whole, or of a version that wrote no manifest"
        )
    text = (snapshot / MANIFEST).read_bytes()
    try:
        content = json.loads(text)
        content.pop("sha256")
        whole = _rendered(content).encode() == text
    except (ValueError, KeyError, AttributeError, TypeError):
        whole = False
    if not whole:
        raise Damaged(f"{MANIFEST} does not have its own checksum")
    if content["format"] != FORMAT:
        raise ConfigError(
            f"{snapshot} has format {content['format']}, this version reads {FORMAT}: use the "
            "version that wrote it, or on_existing=overwrite"
        )
    return content


def _rendered(content: dict[str, Any]) -> str:
    """The manifest's text; its last field is the checksum of the others."""
    text = json.dumps(content, indent=1)
    own = hashlib.sha256(text.encode()).hexdigest()
    return json.dumps(content | {"sha256": own}, indent=1) + "\n"


def _numbered(folder: Path) -> list[tuple[int, Path]]:
    """Every (step, folder) that looks like a snapshot, in order."""
    return sorted(_steps(folder))


def _steps(folder: Path) -> Iterator[tuple[int, Path]]:
    for path in folder.glob(f"{PREFIX}*"):
        digits = path.name.removeprefix(PREFIX)
        if digits.isdecimal() and path.is_dir():
            yield int(digits), path


def _hidden(path: Path, mark: str = "") -> Path:
    return path.with_name(f".{path.name}{mark}.tmp")


def _remove(path: Path, mark: str = "") -> None:
    """Take the name away first: a half removed folder is never taken for a snapshot."""
    hidden = _hidden(path, mark)
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
