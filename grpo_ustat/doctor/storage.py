"""The output folder: room, speed, and locks that hold between two processes."""

from __future__ import annotations

import fcntl
import os
import shutil
import signal
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

from rich.filesize import decimal

from grpo_ustat.checkup.findings import Finding, existing, failed, ok, warning
from grpo_ustat.runs import lock

PIECE = 2**20
PIECES = 16  # MiB that are written
LITTLE = 5e9  # bytes free
SLOW = 20e6  # bytes a second: a checkpoint of 0.5 B parameters with its optimizer takes 5 minutes
ELSEWHERE = "choose another folder with --output DIR, and hydra.run.dir=DIR for runs"


def disk(folder: Path) -> Finding:
    """Room, and writing, syncing, reading back and renaming 16 MiB there."""
    place, block = existing(folder), os.urandom(PIECE)
    try:
        free, files = shutil.disk_usage(place).free, os.statvfs(place).f_favail
        with _trial(place) as trial:
            seconds = _written(trial / "staged", block)
            os.replace(trial / "staged", trial / "there")
            whole = (trial / "there").read_bytes() == block * PIECES
    except OSError as error:
        return failed(f"{place} cannot be written: {error.strerror or error}", ELSEWHERE)
    if not whole:
        return failed(f"{place} gave back other bytes than were written", ELSEWHERE)
    speed = PIECE * PIECES / seconds
    said = f"{decimal(free)} free in {place}, {decimal(int(speed))} a second written and synced"
    if free < LITTLE or 0 < files < 1000:
        return warning(f"{said}, {files} more files", "dry_run=true says what a run needs of it")
    if speed < SLOW:
        return warning(f"{said}: checkpoints will take long", "save less often, or " + ELSEWHERE)
    return ok(said)


def _written(file: Path, block: bytes) -> float:
    """Seconds of writing and syncing."""
    start = time.perf_counter()
    with file.open("wb") as stream:
        for _ in range(PIECES):
            stream.write(block)
        stream.flush()
        os.fsync(stream.fileno())
    return time.perf_counter() - start


@contextmanager
def _trial(place: Path) -> Iterator[Path]:
    """A folder there that is gone afterwards."""
    with tempfile.TemporaryDirectory(prefix=".grpo_ustat_doctor_", dir=place) as name:
        yield Path(name)


def locks(folder: Path) -> Finding:
    """A run's own lock against a second process, and after its owner was killed."""
    place = existing(folder)
    try:
        with _trial(place) as trial:
            if not _has_flock(trial):
                return warning(
                    f"the file system of {place} has no flock: a run there keeps others out by "
                    f"touching its lock, and a killed one is waited for {lock.PATIENCE:g} s",
                    "mount it with flock (Lustre: -o flock), or " + ELSEWHERE,
                )
            return _tried(place, trial / "run")
    except OSError as error:
        return failed(f"{place} cannot be locked: {error.strerror or error}", ELSEWHERE)


def _has_flock(trial: Path) -> bool:
    with (trial / "flock").open("w") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as error:
            if error.errno in lock.NO_FLOCK:
                return False
            raise
    return True


def _tried(place: Path, run: Path) -> Finding:
    reader, writer = os.pipe()
    owner = _forked(lambda: _hold(run, writer))
    os.close(writer)
    taken = os.read(reader, 1) == b"1"
    kept_out = _ended(_forked(lambda: _take(run))) == 3
    os.kill(owner, signal.SIGKILL)
    os.waitpid(owner, 0)
    os.close(reader)
    free = _ended(_forked(lambda: _take(run))) == 0
    if not (taken and kept_out):
        return failed(
            f"a second process got the lock of the first in {place}: two runs could write there "
            "at once",
            "mount it with working flock, or " + ELSEWHERE,
        )
    if not free:
        return failed(
            f"the lock of a killed process in {place} is still held: its run could not go on",
            "mount it with working flock, or " + ELSEWHERE,
        )
    return ok(f"flock in {place} keeps a second process out and ends with its owner")


def _hold(run: Path, told: int) -> int:
    lock.Lock(run).take()
    os.write(told, b"1")
    signal.pause()
    return 0


def _take(run: Path) -> int:
    """0: the lock was free; 3: it was not."""
    own = lock.Lock(run)
    try:
        own.take()
    except lock.Held:
        return 3
    own.release()
    return 0


def _forked(work: Callable[[], int]) -> int:
    pid = os.fork()
    if pid:
        return pid
    code = 1
    try:
        os.dup2(os.open(os.devnull, os.O_WRONLY), 2)
        code = work()
    finally:
        os._exit(code)


def _ended(pid: int) -> int:
    return os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
