"""Functions that end processes, either on request or when their parent ends."""

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

# Interval in seconds between checks that the parent is alive.
LOOK_SECONDS = 0.5


def children(pid: int, recursive: bool = False) -> list[psutil.Process]:
    """Return the children of a process, or all descendants if `recursive` is true.

    The list is empty if the process has ended.
    """
    # Imported where processes are listed, because commands that only read logs do not need it.
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
    """Yield twice a second while this process's parent, and the ancestor if given, are alive.

    Polling is necessary, because a killed process cannot notify this one.
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
    """End this process as soon as its parent or the given ancestor is dead.

    The process ends with exit code 1 and without any cleanup, except that `folder`, the parent's
    temporary folder, is removed if it is given. See `while_parent_lives`.
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
