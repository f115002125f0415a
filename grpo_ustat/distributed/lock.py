"""Lock that reserves a folder for one process at a time and ends when that process ends.

The process that has the lock, its owner, locks the file `.lock` with flock(2) and writes a record
of itself into the file. The kernel releases the flock when the owner dies.

This is not enough for several machines. Some file systems restrict flock to one machine (BeeGFS and
Lustre by default), and others do not support it. The owner therefore also changes the file's
modification time every `BEAT_SECONDS`, which is called a heartbeat. A process takes over a lock
from another machine only if it sees no heartbeat for `DEAD_AFTER_SECONDS`. Modification times are
compared only with each other, never with a clock, so the machines' clocks may differ.

An owner calls `check` before it writes. If it was suspended for so long that another process took
over the lock, the file names this other process, and the suspended process ends.

`SoftFileLease` in filelock 4.2.11 has a similar heartbeat. It was tried and is not used, for two
reasons. First, it can take the lock from an owner that is alive, although flock would show that it
is. This happens immediately if the owner's process id does not exist here (for example if the owner
is in another container with the same host name). It happens after the lease if an owner on this
machine is suspended. Second, its file has no field for a SLURM job. With this field, a restart of
the owner's job proves immediately that the owner is dead, even if it was on another machine.
"""

from __future__ import annotations

import errno
import fcntl
import json
import os
import socket
import sys
import tempfile
import threading
import time
from contextlib import suppress
from dataclasses import asdict, dataclass
from datetime import UTC, datetime
from pathlib import Path
from uuid import uuid4

from grpo_ustat.config.schema import ConfigError
from grpo_ustat.distributed import slurm
from grpo_ustat.distributed.signals import stop_if_requested

NAME = ".lock"
# Seconds between two heartbeats.
BEAT_SECONDS = 10.0
# Seconds without a heartbeat after which an owner on another machine is considered dead.
DEAD_AFTER_SECONDS = 60.0
# Seconds between two checks for a heartbeat.
LOOK_SECONDS = 1.0
# Seconds to wait after a takeover. Another process may have taken over at the same time, and only
# becomes visible in this time.
SETTLE_SECONDS = 2.0
# Seconds for which a denied flock is tried again. A process that only inspects the lock also has
# the flock, but only for a few microseconds.
FLOCK_SECONDS = 1.0
# Errors of file systems that do not support flock.
NO_FLOCK = (errno.ENOLCK, errno.ENOTSUP, errno.EOPNOTSUPP, errno.ENOSYS)


class Held(ConfigError):
    """Error for a folder that another process has locked; the message names this process."""


@dataclass(frozen=True)
class Owner:
    """Record of the owner that is written into the lock file."""

    # Random token, unique to this lock.
    token: str
    host: str
    # Process id as the process itself sees it. Outside its container, the id can be different.
    pid: int
    # Random id of the running kernel, which changes at every boot; None outside Linux.
    boot_id: str | None
    # Time at which the process took the lock, by its machine's clock. It is only shown.
    started: str
    # Number of the SLURM job; None outside SLURM.
    slurm_job: str | None
    # Number of times that SLURM has restarted the job.
    slurm_restart: int

    def __str__(self) -> str:
        job = f" (SLURM job {self.slurm_job})" if self.slurm_job else ""
        return f"process {self.pid} on {self.host}{job}, started {self.started}"


@dataclass(frozen=True)
class Holder(Owner):
    """Owner of a lock, as seen by another process."""

    # Seconds since the owner's last heartbeat.
    silent: float
    # True if flock shows that the owner is alive. False if only its recent heartbeat suggests it.
    certain: bool


class Lock:
    """Lock of a folder, which a process can take once.

    If the process forks, the new process does not own the lock.

    Args:
        folder: folder to lock; it is created if it does not exist.
    """

    def __init__(self, folder: Path):
        self.path = folder / NAME
        self.owner = _this_process()
        self._content = json.dumps(asdict(self.owner)).encode() + b"\n"
        self._released = threading.Event()

    def take(self) -> None:
        """Take the lock.

        If the lock belonged to a dead owner, a line on standard error says so.

        Raises:
            Held: another process has the lock and is alive. If it is on another machine, it takes
                up to `DEAD_AFTER_SECONDS` to find out.
            OSError: the lock file cannot be created or written.
        """
        watched = None
        while True:
            descriptor, new, flocked = _opened(self.path)
            try:
                content = _read(descriptor)
                certain = new or (flocked and _outlived(_parsed(content)))
                if certain or (flocked and not content) or content == watched:
                    return self._own(descriptor, content, settle=not certain)
            except BaseException:
                os.close(descriptor)
                raise
            os.close(descriptor)
            watched = _seen_dead(self.path)

    def _own(self, descriptor: int, previous: bytes, settle: bool) -> None:
        """Write the record of this process into the locked file, and start its heartbeats.

        Args:
            descriptor: descriptor of the lock file, on which this process has the flock.
            previous: content of the file.
            settle: True to wait in case that another process takes over at the same time.
        """
        if previous:
            _say(f"{self.path.parent}: {_named(previous)} has ended; this process takes over")
        # The file is written before it is truncated, so that it is never empty. An empty file would
        # have no owner.
        os.pwrite(descriptor, self._content, 0)
        os.ftruncate(descriptor, len(self._content))
        os.fsync(descriptor)
        if settle:
            time.sleep(SETTLE_SECONDS)
            self.check()
        self._descriptor = descriptor
        _HELD_LOCKS.add(self)
        threading.Thread(target=self._live, name="lock", daemon=True).start()

    def check(self) -> None:
        """Verify that the lock still belongs to this process.

        The check passes if a disk error prevents reading the file.

        Raises:
            Held: another process took over the lock, or its file was removed.
        """
        try:
            content = self.path.read_bytes()
        except FileNotFoundError:
            content = b""
        except OSError:
            return
        if not content:
            raise Held(
                f"{self.path.parent} or its file {NAME} was moved or removed while this process "
                "worked there, so the process ends without writing: put the folder back and run "
                "the same command to continue"
            )
        if content != self._content:
            raise Held(
                f"{self.path.parent} was taken over by {_named(content)}, which saw no heartbeat "
                f"of this process for {DEAD_AFTER_SECONDS:g} s (was this process suspended?): this "
                "process ends without writing"
            )

    def is_own(self) -> bool:
        """Return True if this process still owns the lock."""
        try:
            self.check()
        except Held:
            return False
        return self in _HELD_LOCKS

    def release(self) -> None:
        """Release the lock if this process owns it; otherwise, as in a fork, do nothing."""
        if self not in _HELD_LOCKS:
            return
        _HELD_LOCKS.discard(self)
        self._released.set()
        try:
            # If the file cannot be removed, closing the descriptor below still releases the flock.
            with suppress(Held, OSError):
                self.check()
                self.path.unlink()
        finally:
            os.close(self._descriptor)

    def _live(self) -> None:
        with suppress(Held):
            while not self._released.wait(BEAT_SECONDS):
                self.check()
                with suppress(OSError):
                    os.utime(self.path)


# Locks that this process owns.
_HELD_LOCKS: set[Lock] = set()


def check_own() -> None:
    """Call `Lock.check` on every lock that this process owns."""
    for lock in tuple(_HELD_LOCKS):
        lock.check()


def _forget() -> None:
    """Close the descriptors of locks in a forked process.

    Otherwise a fork would keep a lock alive after the process that took it has ended.
    """
    while _HELD_LOCKS:
        os.close(_HELD_LOCKS.pop()._descriptor)


os.register_at_fork(after_in_child=_forget)


def peek(folder: Path) -> Holder | None:
    """Return the live process that has locked the folder, or None if there is none.

    The lock is not changed. The result is for display; only `Lock.take` decides reliably. The time
    since the last heartbeat is measured with the clock that sets modification times in the folder,
    by means of a temporary file. In a folder that is not writable, this machine's clock is used. If
    the clocks of the two machines differ, the result can then be wrong for an owner on another
    machine whose flock is not visible here.
    """
    try:
        descriptor = os.open(folder / NAME, os.O_RDONLY)
    except OSError:
        return None
    try:
        owner, flocked = _parsed(_read(descriptor)), _is_flocked(descriptor)
        silent = max(0.0, _now(folder) - os.fstat(descriptor).st_mtime)
    finally:
        os.close(descriptor)
    dead = silent > DEAD_AFTER_SECONDS or (flocked is False and _outlived(owner))
    if owner is None or (dead and not flocked):
        return None
    return Holder(**asdict(owner), silent=silent, certain=flocked is True)


def in_use(folder: Path, who: str) -> str:
    """Return the error message for a folder that is locked by `who`."""
    return (
        f"{folder} is in use by {who}: wait for it, stop it, or choose another folder with "
        "hydra.run.dir=DIR"
    )


def _opened(path: Path) -> tuple[int, bool, bool]:
    """Open the lock file, or create it, and lock it with flock.

    Returns:
        Descriptor of the file; True if the file is new; True if this process has the flock, or
        False if the file system does not support flock.

    Raises:
        Held: another process has locked the file.
    """
    until = time.monotonic() + FLOCK_SECONDS
    while True:
        path.parent.mkdir(parents=True, exist_ok=True)
        # In the meantime another process can remove the folder, after its own lock was refused.
        with suppress(FileNotFoundError):
            descriptor, new = _open_or_create(path)
            flocked = _flock(descriptor)
            if flocked is not False and _is_at(path, descriptor):
                return descriptor, new, flocked is True
            os.close(descriptor)
            if time.monotonic() > until:
                raise Held(in_use(path.parent, _named(_look(path)[0])))
            time.sleep(0.02)


def _open_or_create(path: Path) -> tuple[int, bool]:
    """Return the file's descriptor, and True if this call created the file."""
    try:
        return os.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL, 0o666), True
    except FileExistsError:
        return os.open(path, os.O_RDWR), False


def _flock(descriptor: int) -> bool | None:
    """Try to lock a file with flock.

    Returns:
        True if this succeeds, False if another process has the flock, and None if the file system
        does not support flock.
    """
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    except OSError as error:
        if error.errno in NO_FLOCK:
            return None
        os.close(descriptor)
        raise
    return True


def _is_flocked(descriptor: int) -> bool | None:
    """Return True if another process has a flock on the file; None if flock is not supported."""
    try:
        fcntl.flock(descriptor, fcntl.LOCK_SH | fcntl.LOCK_NB)
        fcntl.flock(descriptor, fcntl.LOCK_UN)
    except BlockingIOError:
        return True
    except OSError:
        return None
    return False


def _is_at(path: Path, descriptor: int) -> bool:
    """Return True if the path still refers to the open file, and not to a new or missing one."""
    try:
        return os.path.samestat(os.stat(path), os.fstat(descriptor))
    except FileNotFoundError:
        return False


def _outlived(owner: Owner | None) -> bool:
    """Return True if the owner is certainly dead, given that it no longer has the flock.

    This is certain in two cases. If the owner ran under the same kernel, the missing flock proves
    it. If SLURM has restarted the owner's job as the job of this process, the restart proves it.
    """
    if owner is None:
        return False
    here = _this_process()
    again = owner.slurm_job is not None and owner.slurm_job == here.slurm_job
    return (owner.boot_id is not None and owner.boot_id == here.boot_id) or (
        again and owner.slurm_restart < here.slurm_restart
    )


def _seen_dead(path: Path) -> bytes | None:
    """Wait until the owner of a lock is considered dead.

    The wait ends after a fixed number of checks instead of a fixed time. While the file system
    hangs, the owner cannot send heartbeats, and this process does not check.

    Returns:
        Content of the lock file, or None if the file disappeared.

    Raises:
        Held: the owner sent a heartbeat.
        Stopped: a signal asked this process to stop.
    """
    first = _look(path)
    _say(
        f"{path.parent} is locked by {_named(first[0])}: this process waits up to "
        f"{DEAD_AFTER_SECONDS:g} s to see if it is alive"
    )
    for _ in range(round(DEAD_AFTER_SECONDS / LOOK_SECONDS)):
        time.sleep(LOOK_SECONDS)
        stop_if_requested()
        now = _look(path)
        if now[1] is None:
            return None
        if now != first:
            raise Held(in_use(path.parent, _named(now[0])))
    return first[0]


def _look(path: Path) -> tuple[bytes, int | None]:
    """Return the content of a lock file and the time of its last change in nanoseconds.

    The file is opened at every call, because NFS asks its server for changes only then.
    """
    try:
        with path.open("rb") as file:
            return file.read(), os.fstat(file.fileno()).st_mtime_ns
    except FileNotFoundError:
        return b"", None


def _read(descriptor: int) -> bytes:
    return os.pread(descriptor, os.fstat(descriptor).st_size, 0)


def _parsed(content: bytes) -> Owner | None:
    try:
        return Owner(**json.loads(content))
    except (ValueError, TypeError):
        return None


def _named(content: bytes) -> str:
    return str(_parsed(content) or "an unknown process")


def _this_process() -> Owner:
    now = datetime.now(UTC).isoformat(timespec="seconds")
    job, boot_id = (slurm.job_id(), slurm.restart_count()), None
    # Only Linux has this file.
    with suppress(OSError):
        boot_id = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    return Owner(uuid4().hex, socket.gethostname(), os.getpid(), boot_id, now, *job)


def _now(folder: Path) -> float:
    """Return the time in seconds by the clock that sets modification times in the folder.

    If the folder is not writable, this machine's clock is used.
    """
    try:
        with tempfile.TemporaryFile(dir=folder) as probe:
            return os.fstat(probe.fileno()).st_mtime
    except OSError:
        return time.time()


def _say(line: str) -> None:
    print(line, file=sys.stderr, flush=True)
