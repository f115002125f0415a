"""Lock that reserves a folder for one process at a time and ends when that process ends.

The owner locks the file `.lock` with flock(2) and writes a record of itself into the file. The
kernel releases the flock when the owner dies. This is not enough for several machines, because some
file systems restrict flock to one machine (BeeGFS and Lustre by default), and others do not support
it. The owner therefore also touches the file every `BEAT_SECONDS`, and a lock from another machine
is taken over only if the file has not changed for `DEAD_AFTER_SECONDS`. The file's modification
time is compared only with its earlier values, never with a clock, so the machines' clocks can
differ by any amount.

An owner calls `check` before it writes. If the owner was suspended for so long that it lost its
lock, the file names another owner, and the suspended process ends.

`SoftFileLease` in filelock 4.2.11 has a similar heartbeat. It was tried and is not used for two
reasons. First, it can take the lock from an owner that is alive, as flock would show. This happens
immediately if the owner's process id does not exist here (for example in another container with the
same host name), and after the lease if an owner on this machine is suspended. Second, its file has
no field for a SLURM job. Here, a restart of the owner's job proves immediately that an owner on
another machine is dead.
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
# Interval between heartbeats in seconds.
BEAT_SECONDS = 10.0
# Seconds without a heartbeat after which an owner on another machine is considered dead.
DEAD_AFTER_SECONDS = 60.0
# Interval between checks for a heartbeat in seconds.
LOOK_SECONDS = 1.0
# Seconds after a takeover in which other processes that took over at the same time become visible.
SETTLE_SECONDS = 2.0
# Seconds for which a denied flock is retried, because a process that only inspects the lock also
# has the flock for a few microseconds.
FLOCK_SECONDS = 1.0
NO_FLOCK = (errno.ENOLCK, errno.ENOTSUP, errno.EOPNOTSUPP, errno.ENOSYS)


class Held(ConfigError):
    """Error for a folder locked by another process; the one-line message names the process."""


@dataclass(frozen=True)
class Owner:
    """Record that a process writes into its lock."""

    # Random token, unique to this lock.
    token: str
    host: str
    # Process id as seen by the process itself; outside its container, the id can differ.
    pid: int
    # Random id of the running kernel, which changes at every boot; None outside Linux.
    boot_id: str | None
    # Time at which the process took the lock, by its machine's clock; used only for display.
    started: str
    # Number of the SLURM job (None outside SLURM), and number of times that the job was restarted;
    # see `grpo_ustat.distributed.slurm`.
    slurm_job: str | None
    slurm_restart: int

    def __str__(self) -> str:
        job = f" (SLURM job {self.slurm_job})" if self.slurm_job else ""
        return f"process {self.pid} on {self.host}{job}, started {self.started}"


@dataclass(frozen=True)
class Holder(Owner):
    """Owner of a lock, as seen by another process."""

    # Seconds since the owner's last heartbeat.
    silent: float
    # True if flock shows that the owner is alive; False if only its last heartbeat is recent.
    certain: bool


class Lock:
    """Lock of a folder, which a process can take once; forks of the process do not own the lock.

    Args:
        folder: folder to lock; it is created if it does not exist.
    """

    def __init__(self, folder: Path):
        self.path = folder / NAME
        self.owner = _this_process()
        self._content = json.dumps(asdict(self.owner)).encode() + b"\n"
        self._released = threading.Event()

    def take(self) -> None:
        """Take the lock; if it belonged to a dead owner, print a line on standard error.

        Raises:
            Held: the owner is alive. The check takes up to `DEAD_AFTER_SECONDS` if the owner is on
                another machine.
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
        """Write this process into the locked file, and start a thread that sends heartbeats."""
        if previous:
            _say(f"{self.path.parent}: {_named(previous)} has ended; this process takes over")
        # Write before truncating, because an empty file would have no owner.
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

        If the file cannot be read because of a disk error, the check passes.

        Raises:
            Held: the lock was taken over or removed.
        """
        try:
            content = self.path.read_bytes()
        except FileNotFoundError:
            content = b""
        except OSError:
            return
        if not content:
            raise Held(
                f"{self.path.parent} or its {NAME} was moved or removed while this process worked "
                "there: this process now ends without writing; put the folder back and run the "
                "same command to continue"
            )
        if content != self._content:
            raise Held(
                f"{self.path.parent} was taken over by {_named(content)}, because this process "
                f"sent no heartbeat for {DEAD_AFTER_SECONDS:g} s (suspended?): this process now "
                "ends without writing"
            )

    def is_own(self) -> bool:
        """Return True if this process still owns the lock."""
        try:
            self.check()
        except Held:
            return False
        return self in _HELD_LOCKS

    def release(self) -> None:
        """Release the lock if this process owns it; do nothing in a fork of the owner."""
        if self not in _HELD_LOCKS:
            return
        _HELD_LOCKS.discard(self)
        self._released.set()
        try:
            # Closing the descriptor below releases the flock even if the file cannot be removed.
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
    """Close the descriptors in a fork, so that the lock ends with the process that took it."""
    while _HELD_LOCKS:
        os.close(_HELD_LOCKS.pop()._descriptor)


os.register_at_fork(after_in_child=_forget)


def peek(folder: Path) -> Holder | None:
    """Return the live process that has locked the folder, or None if there is none.

    The lock is not changed. The current time is taken from a temporary file in the folder. If the
    folder is not writable, this machine's clock is used. In that case, if the owner is on another
    machine and its flock is not visible here, the result depends on the difference between the two
    machines' clocks. Only `Lock.take` is decisive, and it does not compare clocks.
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
    """Return the error message for a folder that another process has locked."""
    return (
        f"{folder} is in use by {who}: wait for it, stop it, or choose another folder with "
        "hydra.run.dir=DIR"
    )


def _opened(path: Path) -> tuple[int, bool, bool]:
    """Open the file and lock it with flock; return its descriptor and two flags.

    The first flag is True if the file is new. The second flag is True if the flock succeeded, and
    False if the file system does not support flock.

    Raises:
        Held: another process has locked the file.
    """
    until = time.monotonic() + FLOCK_SECONDS
    while True:
        path.parent.mkdir(parents=True, exist_ok=True)
        # Another process whose own lock was refused can remove the folder in the meantime.
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
    """Lock a file with flock.

    Return True if this succeeds, False if another process has the flock, and None if the file
    system does not support flock.
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
    """Return True if the path still refers to the open file, which its owner might have removed."""
    try:
        return os.path.samestat(os.stat(path), os.fstat(descriptor))
    except FileNotFoundError:
        return False


def _outlived(owner: Owner | None) -> bool:
    """Return True if an owner that has no flock is certainly dead.

    The owner is certainly dead if it ran under this kernel, or if SLURM has restarted its job.
    """
    if owner is None:
        return False
    here = _this_process()
    again = owner.slurm_job is not None and owner.slurm_job == here.slurm_job
    return (owner.boot_id is not None and owner.boot_id == here.boot_id) or (
        again and owner.slurm_restart < here.slurm_restart
    )


def _seen_dead(path: Path) -> bytes | None:
    """Watch a lock until its owner is considered dead, and return the lock's content.

    The result is None if the file disappears. The time limit is a number of checks, not a duration,
    because the owner cannot send heartbeats while the file system hangs.

    Raises:
        Held: the owner sent a heartbeat.
        Stopped: a signal asked this process to stop.
    """
    first = _look(path)
    _say(
        f"{path.parent} is locked by {_named(first[0])}: checking for {DEAD_AFTER_SECONDS:g} s "
        "whether it is alive"
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
    """Return a lock file's content and the time of its last change in nanoseconds.

    Every call opens the file anew, because NFS contacts its server only when a file is opened.
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
    """Return the time in seconds, from the clock that sets modification times in the folder.

    If the folder is not writable, return this machine's time.
    """
    try:
        with tempfile.TemporaryFile(dir=folder) as probe:
            return os.fstat(probe.fileno()).st_mtime
    except OSError:
        return time.time()


def _say(line: str) -> None:
    print(line, file=sys.stderr, flush=True)
