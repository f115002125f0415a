"""First import of the server process that forks a study's workers; see `workers.preload`.

The process that started the server removes the folder with the server's socket. If that process was
killed, the server ends when no process is connected to it, and then removes the folder itself.
"""

from __future__ import annotations

import atexit
import os
import shutil

# Environment variable of the server with the folder of its socket.
FOLDER_VARIABLE = "GRPO_USTAT_SERVER_FOLDER"


def remove_folder(path: str, process: int) -> None:
    """Remove a folder if this is the process with the given id, and not one of its forks."""
    if os.getpid() == process:
        shutil.rmtree(path, ignore_errors=True)


if FOLDER_VARIABLE in os.environ:
    atexit.register(remove_folder, os.environ.pop(FOLDER_VARIABLE), os.getpid())
