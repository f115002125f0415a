"""First import of the process that forks a study's workers, see `workers.preload`.

The process that started the server removes the folder with its socket. If that process was killed,
the server removes the folder when it ends, which it does once no process is left to ask it.
"""

from __future__ import annotations

import atexit
import os
import shutil

# Folder of the socket, in the environment of the server.
FOLDER_VARIABLE = "GRPO_USTAT_SERVER_FOLDER"


def remove_folder(path: str, process: int) -> None:
    """Remove a folder in the process with this number, not in its forks."""
    if os.getpid() == process:
        shutil.rmtree(path, ignore_errors=True)


if FOLDER_VARIABLE in os.environ:
    atexit.register(remove_folder, os.environ.pop(FOLDER_VARIABLE), os.getpid())
