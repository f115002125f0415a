"""Module that the server process of a study's workers imports first; see `workers.preload`.

The process that started the server removes the folder with the server's socket. If that process was
killed, the server ends once no process is connected to it, and it then removes the folder itself.
"""

from __future__ import annotations

import atexit
import os
import shutil

# Environment variable that gives the server the folder of its socket.
FOLDER_VARIABLE = "GRPO_USTAT_SERVER_FOLDER"


def remove_folder(path: str, process: int) -> None:
    """Remove a folder if this process has the given id; do nothing in a fork."""
    if os.getpid() == process:
        shutil.rmtree(path, ignore_errors=True)


if FOLDER_VARIABLE in os.environ:
    atexit.register(remove_folder, os.environ.pop(FOLDER_VARIABLE), os.getpid())
