"""A process that follows a run folder and sends its events to a tracker.

`python -m grpo_ustat.mirror.follow`, started by `Mirroring` beside a run, or by hand as
`grpo-ustat mirror`. It shares nothing with the run but the files that it reads: whatever
happens to it or to the tracker, the run goes on as it would alone, and what was not sent can be
sent later. A tracker that fails is opened again, in a process as good as new, ever more rarely.
"""

from __future__ import annotations

import json
import os
import resource
import signal
import subprocess
import sys
import threading
import time
import traceback
from collections.abc import Callable
from contextlib import suppress
from dataclasses import asdict, dataclass, field
from itertools import groupby
from pathlib import Path
from typing import Any, NoReturn

from grpo_ustat.config.command_line import command_line
from grpo_ustat.distributed.processes import kill_children, while_parent_lives
from grpo_ustat.distributed.signals import STOPPING, seconds_since_request
from grpo_ustat.mirror.backends import OPENERS, About, Tracker
from grpo_ustat.mirror.journal import InUse, Journal
from grpo_ustat.mirror.source import Event, FolderReader
from grpo_ustat.runs.folder import TRACKER
from grpo_ustat.terminal.console import excerpt, tell
from grpo_ustat.terminal.streams import visible

REPORT_FD = "GRPO_USTAT_REPORT_FD"  # environment: where a mirror begun anew writes for its run
LOOK = 1.0  # seconds between two looks into the folder
RETRY, LONGEST = 10.0, 600.0  # seconds before a tracker that failed is tried again; they double
HUNG = 60.0  # seconds of CPU time in which a tracker lets no other thread run
LAST_WORDS = 10.0  # seconds in which it finishes after its run was killed
LONGEST_NAME = 120  # of a run, in letters; wandb takes 128
MEMORY = 2**30  # bytes of data that a tracker may fill
LARGE = ("completions", "figure", "table")  # what a tracker may refuse and get all else
MOST_STEPS = 200  # completions of so many steps at most go into one table

OF_RANKS = ("RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")
MILD = {  # what a mirror may use
    "CUDA_VISIBLE_DEVICES": "", "HIP_VISIBLE_DEVICES": "", "OMP_NUM_THREADS": "1",
    "OPENBLAS_NUM_THREADS": "1", "MKL_NUM_THREADS": "1", "GOMAXPROCS": "1",
}  # fmt: skip
MARGIN = 10.0  # seconds of a stop's grace that are not the mirror's
PATIENCE = 2.0  # seconds after which a line tells of the waiting


@dataclass
class MirrorJob:
    """What a mirror sends, and how far it is; it survives `_begin_anew`.

    Attributes:
        folder: the run folder.
        logger: `name`, `project` of the configuration.
        parent: process id of the run; None where it is a finished folder to be sent.
        outcome: how the run ended, None while it goes on.
        failures: in a row.
        last_try: whether the run has ended and the tracker failed since.
        warnings: so that each is printed once.
    """

    folder: str
    logger: dict[str, Any]
    parent: int | None = None
    outcome: str | None = None
    failures: int = 0
    last_try: bool = False
    warnings: list[str] = field(default_factory=list)


class End:
    """Learns that the run has ended: from a line on standard input, or from its death."""

    def __init__(self, job: MirrorJob):
        self._job, self._ended = job, threading.Event()
        if job.outcome is not None:
            self._ended.set()
        if job.parent is not None:
            threading.Thread(target=self._watch_parent, args=(job.parent,), daemon=True).start()
        if job.parent is not None and job.outcome is None:
            threading.Thread(target=self._listen, daemon=True).start()

    @property
    def outcome(self) -> str | None:
        """How the run ended, None while it goes on."""
        return self._job.outcome

    def wait(self, seconds: float) -> None:
        """Wait so many seconds, less if the run ends."""
        self._ended.wait(seconds)

    def _listen(self) -> None:
        text = b""
        while not text.endswith(b"\n") and (part := os.read(0, 100)):
            text += part
        self._end(text.decode().strip() or "interrupted")

    def _watch_parent(self, parent: int) -> None:
        for _ in while_parent_lives(parent):
            signal.setitimer(signal.ITIMER_PROF, HUNG)  # kills a process that never comes here
        self._end("interrupted")
        time.sleep(LAST_WORDS)
        end_now()

    def _end(self, outcome: str) -> None:
        self._job.outcome = self._job.outcome or outcome
        self._ended.set()


def follow(job: MirrorJob, end: End, report: Callable[[str], None]) -> tuple[int, int]:
    """Send what comes until the run has ended and all of it is sent.

    Args:
        job: the folder and the tracker.
        end: of the run.
        report: prints a line.

    Returns:
        How many events there were, and how many of them the tracker refused.

    Raises:
        InUse: another mirror does it.
        Exception: of the tracker.
    """
    folder, name = Path(job.folder), job.logger["name"]
    place = folder.absolute()
    reader, journal = FolderReader(folder), Journal(folder, name)
    _take(journal)
    try:
        about = About(
            folder=place / TRACKER,
            run_id=journal.run_id or "",
            name=excerpt(visible(f"{place.parent.name}/{place.name}"), LONGEST_NAME),
            group=excerpt(visible(place.parent.name), LONGEST_NAME),
            project=job.logger["project"],
            config=reader.config(),
        )
        tracker = OPENERS[name](about)
        journal.forget(journal.settled if tracker.arrived is None else tracker.arrived)
        refused: set[str] = set()
        while True:
            outcome = end.outcome  # before the look: then all files are there
            refused |= _send(tracker, journal, reader.new_events())
            job.failures = 0
            if outcome is not None:
                where = tracker.close(outcome)
                if where is not None:
                    report(f"logger={name}: {where}")
                journal.settle()
                return len(journal.entries), len(refused)
            end.wait(LOOK)
    finally:
        journal.release()


def _take(journal: Journal) -> None:
    """Take the journal; the mirror of an earlier launch, whose run was killed, may still send for a
    while.
    """
    until = time.monotonic() + 2 * LAST_WORDS
    while True:
        try:
            return journal.take()
        except InUse:
            if time.monotonic() > until:
                raise
            time.sleep(0.5)


def _send(tracker: Tracker, journal: Journal, events: list[Event]) -> set[str]:
    """Send what is new: completions of steps that follow each other together, all else one by one.

    Returns:
        Keys of the pictures and tables that the tracker refused.

    Raises:
        Exception: it refused numbers.
    """
    refused = set()
    for kind, same in groupby(journal.pending(events), key=lambda event: event.kind):
        pending, size = list(same), MOST_STEPS if kind == "completions" else 1
        for first in range(0, len(pending), size):
            group = pending[first : first + size]
            try:
                tracker.send(len(journal.entries) + len(group) - 1, group)
            except Exception:
                if kind not in LARGE:
                    raise
                traceback.print_exc()
                refused |= {event.key for event in group}
            else:
                journal.note(group)
    tracker.flush()
    if tracker.lasting:
        journal.settle()
    return refused


def main() -> NoReturn:
    """Do the job of the command line's JSON; the end of this process is its exit code."""
    job, environment = MirrorJob(**json.loads(sys.argv[1])), dict(os.environ)
    descriptor = int(os.environ.pop(REPORT_FD, 0)) or os.dup(1)  # for lines to the run
    os.set_inheritable(descriptor, False)
    place = Path(job.folder) / TRACKER
    place.mkdir(exist_ok=True)
    log = os.open(place / f"{job.logger['name']}.log", os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    for stream in (1, 2):  # all that is printed here goes to the tracker's log
        os.dup2(log, stream)
    become_humble()
    end = End(job)
    try:
        _, refused = follow(job, end, lambda text: _report(descriptor, text, warning=False))
    except InUse as error:
        _warn_once(job, descriptor, str(error))
        end_now(3)
    except BaseException as error:  # a tracker may raise SystemExit, or be out of memory
        traceback.print_exc()
        _warn_once(job, descriptor, f"{describe(error)}; the run goes on, it is tried again")
        _begin_anew(job, end, descriptor, environment)
    end_now(int(refused > 0))


def _begin_anew(job: MirrorJob, end: End, descriptor: int, environment: dict[str, str]) -> NoReturn:
    """Replace this process by a new one after a while; once the run has ended, at once and once.

    In the environment as it was: trackers leave their own traces there.
    """
    if job.last_try:
        end_now(1)
    job.failures += 1
    end.wait(min(LONGEST, RETRY * 2 ** (job.failures - 1)))
    job.last_try = job.outcome is not None
    kill_children(os.getpid(), recursive=True)
    os.set_inheritable(descriptor, True)
    command = [sys.executable, "-m", "grpo_ustat.mirror.follow", json.dumps(asdict(job))]
    os.execve(sys.executable, command, environment | {REPORT_FD: str(descriptor)})


def _warn_once(job: MirrorJob, descriptor: int, text: str) -> None:
    """A warning for the run to print, of which there are three at most."""
    text = f"logger={job.logger['name']}: {text}"
    if text not in job.warnings and len(job.warnings) < 3:
        job.warnings.append(text)
        _report(descriptor, text, warning=True)


def _report(descriptor: int, text: str, warning: bool) -> None:
    """A line for the run to print, of printable characters alone: a stranger may have sent it."""
    printable = "".join(c if c.isprintable() else " " for c in text)
    line = json.dumps({"text": " ".join(printable.split())[:300], "warning": warning}) + "\n"
    with suppress(OSError):
        os.write(descriptor, line.encode())


def describe(error: BaseException) -> str:
    """An error's type and message."""
    return f"{type(error).__name__}: {error}".removesuffix(": ")


def end_now(code: int = 1) -> NoReturn:
    """End this process without whatever a tracker would do or wait for at exit."""
    kill_children(os.getpid(), recursive=True)
    os._exit(code)


def become_humble() -> None:
    """Low priority, little memory, first to be killed; deaf to what stops the run, see `End`."""
    for number in (*STOPPING, signal.SIGINT, signal.SIGHUP):
        signal.signal(number, signal.SIG_IGN)
    signal.pthread_sigmask(signal.SIG_SETMASK, ())
    with suppress(OSError):
        os.nice(19)
    with suppress(OSError, ValueError):
        resource.setrlimit(resource.RLIMIT_DATA, (MEMORY, resource.RLIM_INFINITY))
    with suppress(OSError):
        Path("/proc/self/oom_score_adj").write_text("1000")


class Mirroring:
    """A mirror of a run folder, as its run sees it; nothing here raises, or waits but in `finish`.

    Args:
        folder: the run folder, with its configuration.
        logger: a `LoggerConfig`, not `none`.
    """

    def __init__(self, folder: Path, logger: Any):
        self._folder, self._logger, self._owner = folder, logger, os.getpid()
        self._process: subprocess.Popen[bytes] | None = None
        self._finishing = False
        try:
            process = _start_mirror(folder, logger)
        except OSError as error:
            self._warn(f"cannot be started ({error})")
            return
        self._process = process
        threading.Thread(target=self._listen, args=(process,), daemon=True).start()

    def finish(self, outcome: str, grace_seconds: float) -> None:
        """Wait until it has sent what there is, `finish_seconds` at most; then end it.

        Args:
            outcome: done, stopped, failed or interrupted.
            grace_seconds: between a signal to the run and its kill.
        """
        process = self._process
        if process is None or os.getpid() != self._owner:
            return
        assert process.stdin is not None  # a pipe, see `_start_mirror`
        self._finishing = True
        with suppress(OSError):
            process.stdin.write(f"{outcome}\n".encode())
            process.stdin.flush()
        patience = self._logger.finish_seconds
        if outcome == "stopped":
            remaining = grace_seconds - seconds_since_request() - MARGIN
            patience = max(0.0, min(patience, remaining))
        try:
            code = self._wait(process, patience)
        finally:  # also where someone is tired of waiting
            kill_children(process.pid, recursive=True)  # what its tracker has started
            process.kill()
            with suppress(subprocess.TimeoutExpired):
                process.wait(5)
        if code != 0:
            log = self._folder / TRACKER / f"{self._logger.name}.log"
            reason = "no answer in time" if code is None else f"see {log}"
            try:
                events = FolderReader(self._folder).new_events()
                num_unsure = len(Journal(self._folder, self._logger.name).unsure(events))
            except (OSError, ValueError) as error:
                self._warn(f"was not told all ({error})")
                return
            command = command_line("mirror", str(self._folder), f"logger={self._logger.name}")
            self._warn(
                f"was not told {num_unsure} of {len(events)} ({reason}); nothing is lost here, "
                f"send it: {command}"
            )

    def _wait(self, process: subprocess.Popen[bytes], seconds: float) -> int | None:
        """The mirror's exit code, None if it has not ended by then."""
        until = time.monotonic() + seconds
        with suppress(subprocess.TimeoutExpired):
            return process.wait(min(PATIENCE, seconds))
        tell(
            f"waiting up to {seconds:.0f} s for logger={self._logger.name}; all files are written",
            file=sys.stderr,
        )
        with suppress(subprocess.TimeoutExpired):
            return process.wait(max(0.0, until - time.monotonic()))
        return None

    def _listen(self, process: subprocess.Popen[bytes]) -> None:
        """Print the mirror's lines."""
        assert process.stdout is not None  # a pipe, see `_start_mirror`
        for line in process.stdout:
            with suppress(ValueError, KeyError):
                report = json.loads(line)
                tell(("warning: " if report["warning"] else "") + report["text"], file=sys.stderr)
        code = process.wait()
        if code and not self._finishing:
            self._warn(f"its process ended with code {code}, see {self._folder}/tracker")

    def _warn(self, text: str) -> None:
        from grpo_ustat.runs.log import warn

        warn(f"logger={self._logger.name}: {text}")


def _start_mirror(folder: Path, logger: Any) -> subprocess.Popen[bytes]:
    """Start it in a group of its own, so that Ctrl-C is the run's alone; signals are blocked from
    the first moment.
    """
    names = {"name": logger.name, "project": logger.project}
    job = MirrorJob(str(folder.absolute()), names, parent=os.getpid())
    command = [sys.executable, "-m", "grpo_ustat.mirror.follow", json.dumps(asdict(job))]
    environment = {k: v for k, v in os.environ.items() if k not in OF_RANKS} | MILD
    before = signal.pthread_sigmask(signal.SIG_BLOCK, (*STOPPING, signal.SIGINT, signal.SIGHUP))
    try:
        return subprocess.Popen(
            command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL,
            env=environment, process_group=0,
        )  # fmt: skip
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


if __name__ == "__main__":
    main()
