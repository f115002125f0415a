"""Lock of a folder for one process at a time: flock(2) on a file that names its owner.

The kernel releases the flock when the owner ends. Some file systems restrict flock to one machine
(BeeGFS and Lustre by default), and others do not support it.
"""

from __future__ import annotations

import errno
import fcntl
import os
import socket
import sys
import time
from contextlib import suppress
from datetime import UTC, datetime
from io import TextIOWrapper
from pathlib import Path

from grpo_ustat.config.schema import ConfigError
from grpo_ustat.distributed import slurm
from grpo_ustat.terminal.streams import tell

NAME = ".lock"
# Seconds for which a denied flock is tried again. A process that only looks at the lock also has
# the flock, but only for a few microseconds.
FLOCK_SECONDS = 1.0
# Errors of file systems that do not support flock.
NO_FLOCK = (errno.ENOLCK, errno.ENOTSUP, errno.EOPNOTSUPP, errno.ENOSYS)


class Lock:
    """Lock of a folder, which a process can take once.

    Args:
        folder: folder to lock; it is created if it does not exist.
    """

    def __init__(self, folder: Path):
        self._path = folder / NAME

    def take(self) -> None:
        """Take the lock.

        Raises:
            ConfigError: another process has the lock; the message names it.
            OSError: the lock file cannot be created or written.
        """
        until = time.monotonic() + FLOCK_SECONDS
        while (file := self._opened()) is None:
            if time.monotonic() > until:
                raise ConfigError(in_use(self._path.parent, owner(self._path.parent)))
            time.sleep(0.02)
        job = f" (SLURM job {slurm.job_id()})" if slurm.job_id() else ""
        now = datetime.now(UTC).isoformat(timespec="seconds")
        file.truncate(0)
        file.write(f"process {os.getpid()} on {socket.gethostname()}{job}, started {now}")
        file.flush()
        self._file = file
        _HELD_LOCKS.add(self)

    def release(self) -> None:
        """Release the lock if this process owns it; otherwise, as in a fork, do nothing."""
        if self in _HELD_LOCKS:
            _HELD_LOCKS.discard(self)
            with suppress(OSError):
                self._path.unlink()
            self._file.close()

    def _opened(self) -> TextIOWrapper | None:
        """Open and lock the file; return None if another process has it."""
        self._path.parent.mkdir(parents=True, exist_ok=True)
        try:
            file = self._path.open("a+")
        except FileNotFoundError:
            # Another process removed the empty folder in the meantime.
            return None
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            # The owner may have removed the file before it released the lock.
            if os.path.samestat(self._path.stat(), os.fstat(file.fileno())):
                return file
        except (BlockingIOError, FileNotFoundError):
            pass
        except OSError as error:
            if error.errno in NO_FLOCK:
                tell(
                    f"warning: the file system of {self._path.parent} has no file locks (flock), "
                    "so a second process that runs there is not refused",
                    file=sys.stderr,
                )
                return file
            file.close()
            raise
        file.close()
        return None


# Locks that this process owns.
_HELD_LOCKS: set[Lock] = set()


def _forget() -> None:
    """Close the files of locks in a forked process.

    Otherwise a fork would keep a lock after the process that took it has ended.
    """
    while _HELD_LOCKS:
        _HELD_LOCKS.pop()._file.close()


os.register_at_fork(after_in_child=_forget)


def owner(folder: Path) -> str | None:
    """Return a text that names the process that has locked the folder; None if there is none."""
    with suppress(OSError), (folder / NAME).open() as file:
        try:
            fcntl.flock(file, fcntl.LOCK_SH | fcntl.LOCK_NB)
        except BlockingIOError:
            return file.read() or "another process"
    return None


def in_use(folder: Path, who: str | None) -> str:
    """Return the error message for a folder that is locked by `who`."""
    return (
        f"{folder} is in use by {who or 'another process'}: wait for it, stop it, or choose "
        "another folder with hydra.run.dir=DIR"
    )
