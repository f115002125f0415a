"""File systems in memory, small enough to be full."""

from __future__ import annotations

import subprocess
from contextlib import contextmanager

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
            subprocess.run(["umount", path], check=True)
