"""Removal of the folder of the server process that forks a study's workers.

The server (see `workers.preload`) imports this module first. Usually the process that started the
server removes the folder with the server's socket. If this process was killed, the server ends when
no process is connected to it any more, and removes the folder itself.
"""

from __future__ import annotations

import atexit
import os
import shutil

# Environment variable with the folder of the server's socket.
FOLDER_VARIABLE = "GRPO_USTAT_SERVER_FOLDER"


def remove_folder(path: str, process: int) -> None:
    """Remove a folder if this process has the given id, so that forks do not remove it."""
    if os.getpid() == process:
        shutil.rmtree(path, ignore_errors=True)


if FOLDER_VARIABLE in os.environ:
    atexit.register(remove_folder, os.environ.pop(FOLDER_VARIABLE), os.getpid())
