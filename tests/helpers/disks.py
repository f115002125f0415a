"""File systems in memory, small enough to be full."""

from __future__ import annotations

import subprocess
import time
from contextlib import contextmanager

import psutil
import pytest


@contextmanager
def small_disk(path, size):
    """A mounted tmpfs of `size` ("300k") at a new folder; skips where none may be mounted."""
    path.mkdir()
    command = ["mount", "-t", "tmpfs", "-o", f"size={size}", "none", path]
    try:
        subprocess.run(command, check=True, capture_output=True)
    except (OSError, subprocess.CalledProcessError) as error:
        pytest.skip(f"no file system can be mounted here: {error}")
    try:
        yield path
    finally:
        while path.is_mount():
            _unmount(path)


def _unmount(path, seconds=60):
    """One that has just ended may hold it for a moment; whoever holds it longer is named."""
    end = time.monotonic() + seconds
    while subprocess.run(["umount", path], capture_output=True).returncode:
        if time.monotonic() > end:
            holders = [process for process in psutil.process_iter() if _holds(process, path)]
            raise OSError(f"{path} cannot be unmounted after {seconds} s; held by {holders}")
        time.sleep(0.1)


def _holds(process, path):
    try:
        names = [process.cwd(), *(file.path for file in process.open_files())]
        names += [mapped.path for mapped in process.memory_maps()]
    except psutil.Error:
        return False
    return any(name.startswith(str(path)) for name in names)
