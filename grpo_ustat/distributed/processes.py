"""Functions that list and end child processes, and that end a process with its parent."""

from __future__ import annotations

import os
import shutil
import signal
import threading
import time
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import psutil

# Seconds between two checks that the parent is alive.
LOOK_SECONDS = 0.5


def children(pid: int, recursive: bool = False) -> list[psutil.Process]:
    """Return the children of a process, or all descendants if `recursive` is true.

    The list is empty if the process has ended.
    """
    # Imported only here, because commands that only read logs do not need psutil.
    import psutil

    with suppress(psutil.NoSuchProcess):
        return psutil.Process(pid).children(recursive)
    return []


def kill_children(pid: int, recursive: bool = False) -> None:
    """Kill the children of a process, or all descendants if `recursive` is true."""
    import psutil

    for child in children(pid, recursive):
        with suppress(psutil.NoSuchProcess):
            child.kill()


def kill_group(pid: int) -> None:
    """Kill the process group whose leader has the given process id."""
    # macOS raises PermissionError for zombies.
    with suppress(ProcessLookupError, PermissionError):
        os.killpg(pid, signal.SIGKILL)


def while_parent_lives(parent: int, ancestor: int | None = None) -> Iterator[None]:
    """Yield twice a second, until the parent of this process is dead.

    The parent is checked again and again, because a killed process cannot send a message.

    Args:
        parent: process id of the parent.
        ancestor: process id of another process, whose death also ends the iteration; or None.
    """
    import psutil

    above = []
    if ancestor is not None:
        try:
            above = [psutil.Process(ancestor)]
        except psutil.NoSuchProcess:
            return
    while os.getppid() == parent and all(map(_is_alive, above)):
        yield
        time.sleep(LOOK_SECONDS)


def end_with_parent(parent: int, ancestor: int | None = None, folder: Path | None = None) -> None:
    """Start a thread that ends this process as soon as its parent is dead.

    The process ends with exit code 1 and without any cleanup except for `folder`.

    Args:
        parent: process id of the parent.
        ancestor: process id of another process, whose death also ends this process; or None.
        folder: temporary folder of the parent, which is removed; or None.
    """

    def watch() -> None:
        for _ in while_parent_lives(parent, ancestor):
            pass
        if folder is not None:
            shutil.rmtree(folder, ignore_errors=True)
        os._exit(1)

    threading.Thread(target=watch, name="parent", daemon=True).start()


def _is_alive(process: psutil.Process) -> bool:
    import psutil

    with suppress(psutil.NoSuchProcess):
        return process.is_running() and process.status() != psutil.STATUS_ZOMBIE
    return False
