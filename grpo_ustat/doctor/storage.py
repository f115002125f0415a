"""The output folder: room, speed, and locks that hold between two processes."""

from __future__ import annotations

import fcntl
import os
import shutil
import signal
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

from rich.filesize import decimal

from grpo_ustat.distributed import lock
from grpo_ustat.doctor.runner import Finding, failed, ok, warning

PIECE_BYTES = 2**20  # bytes
PIECES = 16  # MiB that are written
LEAST_FREE_BYTES = 5e9  # bytes free
LEAST_BYTES_PER_SECOND = 20e6  # bytes a second: 5 minutes for a checkpoint of 0.5 B parameters
OTHER_FOLDER_FIX = "choose another folder with --output DIR, and hydra.run.dir=DIR for runs"
FORK_SECONDS = 30  # seconds, more than the deadline of the check
TRIAL_PREFIX = ".grpo_ustat_doctor_"  # prefix of folders that are removed afterwards


def disk(folder: Path) -> Finding:
    """Free bytes, and the speed of writing, syncing, reading and renaming 16 MiB."""
    place, block = _nearest_folder(folder), os.urandom(PIECE_BYTES)
    try:
        free, files = shutil.disk_usage(place).free, os.statvfs(place).f_favail
        with tempfile.TemporaryDirectory(prefix=TRIAL_PREFIX, dir=place) as name:
            staged, target = Path(name) / "staged", Path(name) / "target"
            start = time.perf_counter()
            with staged.open("wb") as stream:
                for _ in range(PIECES):
                    stream.write(block)
                stream.flush()
                os.fsync(stream.fileno())
            speed = PIECE_BYTES * PIECES / (time.perf_counter() - start)
            os.replace(staged, target)
            whole = target.read_bytes() == block * PIECES
    except OSError as error:
        return failed(f"{place} cannot be written: {error.strerror or error}", OTHER_FOLDER_FIX)
    if not whole:
        return failed(f"{place} gave back other bytes than were written", OTHER_FOLDER_FIX)
    message = f"{decimal(free)} free in {place}, {decimal(int(speed))} a second written and synced"
    if free < LEAST_FREE_BYTES or 0 < files < 1000:
        return warning(f"{message}, {files} more files", "dry_run=true says what a run needs of it")
    if speed < LEAST_BYTES_PER_SECOND:
        return warning(
            f"{message}: checkpoints will take long", "save less often, or " + OTHER_FOLDER_FIX
        )
    return ok(message)


def locks(folder: Path) -> Finding:
    """A run's own lock against a second process, and after its owner was killed."""
    place = _nearest_folder(folder)
    try:
        with tempfile.TemporaryDirectory(prefix=TRIAL_PREFIX, dir=place) as name:
            if not _has_flock(Path(name) / "flock"):
                return warning(
                    f"the file system of {place} has no flock: a run there keeps others out by "
                    f"touching its lock, and a killed one is waited for "
                    f"{lock.DEAD_AFTER_SECONDS:g} s",
                    "mount it with flock (Lustre: -o flock), or " + OTHER_FOLDER_FIX,
                )
            keeps_out, frees = _try_lock(Path(name) / "run")
    except OSError as error:
        return failed(f"{place} cannot be locked: {error.strerror or error}", OTHER_FOLDER_FIX)
    if not keeps_out:
        return failed(
            f"a second process got the lock of the first in {place}: two runs could write there "
            "at once",
            "mount it with working flock, or " + OTHER_FOLDER_FIX,
        )
    if not frees:
        return failed(
            f"the lock of a killed process in {place} is still held: its run could not go on",
            "mount it with working flock, or " + OTHER_FOLDER_FIX,
        )
    return ok(f"flock in {place} keeps a second process out and ends with its owner")


def _nearest_folder(folder: Path) -> Path:
    """The folder, or the nearest one above it that exists."""
    return next(p for p in (folder.absolute(), *folder.absolute().parents) if p.exists())


def _has_flock(path: Path) -> bool:
    """Whether the file system of a file knows flock.

    Raises:
        OSError: it cannot be written or locked for another reason.
    """
    with path.open("w") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as error:
            if error.errno in lock.NO_FLOCK:
                return False
            raise
    return True


def _try_lock(folder: Path) -> tuple[bool, bool]:
    """Whether a lock keeps a second process out, and whether it is free once its owner is killed.

    Args:
        folder: to be locked.
    """
    reader, writer = os.pipe()

    def hold_until_killed() -> int:
        """Takes the lock, tells the parent through the pipe, and waits for the kill."""
        lock.Lock(folder).take()
        os.write(writer, b"1")
        signal.pause()
        return 0

    def try_once() -> int:
        """Exit code 0 where the lock was free, 3 where another process holds it."""
        own = lock.Lock(folder)
        try:
            own.take()
        except lock.Held:
            return 3
        own.release()
        return 0

    owner = _fork(hold_until_killed)
    os.close(writer)
    locked = os.read(reader, 1) == b"1"
    keeps_out = _exit_code(_fork(try_once)) == 3
    os.kill(owner, signal.SIGKILL)
    os.waitpid(owner, 0)
    os.close(reader)
    return locked and keeps_out, _exit_code(_fork(try_once)) == 0


def _fork(work: Callable[[], int]) -> int:
    """Id of a process whose exit code is what `work` returns, 1 if it raises; it prints nothing.

    An alarm of the system ends it where nobody waits for it any more.
    """
    pid = os.fork()
    if pid:
        return pid
    code = 1
    try:
        signal.alarm(FORK_SECONDS)
        os.dup2(os.open(os.devnull, os.O_WRONLY), 2)
        code = work()
    finally:
        os._exit(code)


def _exit_code(pid: int) -> int:
    """Waits for the end of the process."""
    return os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
