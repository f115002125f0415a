"""A process that follows a run folder and sends what comes to a tracker.

`python -m grpo_ustat.runs.mirror`, started by `runs.mirroring` beside a run, or by hand as
`python -m grpo_ustat.mirror`. It shares nothing with the run but the files that it reads: whatever
happens to it or to the tracker, the run goes on as it would alone, and what was not sent can be
sent later. A tracker that fails is opened again, in a process as good as new, ever more rarely.
"""

from __future__ import annotations

import json
import os
import resource
import signal
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

from grpo_ustat.runs.journal import FOLDER, InUse, Journal
from grpo_ustat.runs.sources import Item, Source
from grpo_ustat.runs.trackers import OPENERS, About, Tracker
from grpo_ustat.signals import STOPPING

TOLD = "GRPO_USTAT_TOLD"  # environment: the descriptor by which a mirror begun anew tells its run
LOOK = 1.0  # seconds between two looks into the folder
RETRY, LONGEST = 10.0, 600.0  # seconds before a tracker that failed is tried again; they double
HUNG = 60.0  # seconds of CPU time in which a tracker lets no other thread run
LAST_WORDS = 10.0  # seconds in which it finishes after its run was killed
MEMORY = 2**30  # bytes of data that a tracker may fill
LARGE = ("completions", "figure", "table")  # what a tracker may refuse and get all else
GATHERED = 200  # completions of so many steps at most go into one table


@dataclass
class Task:
    """What a mirror is to do; it survives `begin_anew`.

    Attributes:
        folder: the run folder.
        logger: `name`, `project` of the configuration.
        parent: process id of the run; None where it is a finished folder to be sent.
        outcome: how the run ended, None while it goes on.
        failures: in a row.
        last_try: whether the run has ended and the tracker failed since.
        said: what was said, so that it is said once.
    """

    folder: str
    logger: dict[str, Any]
    parent: int | None = None
    outcome: str | None = None
    failures: int = 0
    last_try: bool = False
    said: list[str] = field(default_factory=list)


class End:
    """Learns that the run has ended: from a line on standard input, or from its death."""

    def __init__(self, task: Task):
        self._task, self._told = task, threading.Event()
        if task.outcome is not None:
            self._told.set()
        if task.parent is not None:
            threading.Thread(target=self._watch_parent, daemon=True).start()
        if task.parent is not None and task.outcome is None:
            threading.Thread(target=self._listen, daemon=True).start()

    @property
    def outcome(self) -> str | None:
        """How the run ended, None while it goes on."""
        return self._task.outcome

    def wait(self, seconds: float) -> None:
        """So long at most, less if the run ends."""
        self._told.wait(seconds)

    def _listen(self) -> None:
        text = b""
        while not text.endswith(b"\n") and (part := os.read(0, 100)):
            text += part
        self._end(text.decode().strip() or "interrupted")

    def _watch_parent(self) -> None:
        while os.getppid() == self._task.parent:
            signal.setitimer(signal.ITIMER_PROF, HUNG)  # kills a process that never comes here
            time.sleep(0.5)
        self._end("interrupted")
        time.sleep(LAST_WORDS)
        end_now()

    def _end(self, outcome: str) -> None:
        self._task.outcome = self._task.outcome or outcome
        self._told.set()


def follow(task: Task, end: End, say: Callable[[str], None]) -> tuple[int, int]:
    """Send what comes until the run has ended and all of it is sent.

    Returns:
        How many items there were, and how many of them the tracker refused.

    Raises:
        InUse: another mirror does it.
        Exception: of the tracker.
    """
    journal = Journal(Path(task.folder), task.logger["name"])
    _take(journal)
    try:
        return _follow(task, end, journal, say)
    finally:
        journal.release()


def _follow(task: Task, end: End, journal: Journal, say: Callable[[str], None]) -> tuple[int, int]:
    source = Source(Path(task.folder))
    tracker = OPENERS[task.logger["name"]](_about(task, source, journal))
    journal.forget(journal.settled if tracker.arrived is None else tracker.arrived)
    refused: set[str] = set()
    while True:
        ended = end.outcome  # before the look: then all files are there
        refused |= _send(tracker, journal, source.items())
        task.failures = 0
        if ended is not None:
            say(f"logger={task.logger['name']}: {tracker.close(ended)}")
            journal.settle()
            return len(journal.entries), len(refused)
        end.wait(LOOK)


def _take(journal: Journal) -> None:
    """The mirror of a launch before, whose run was killed, may have its last words."""
    until = time.monotonic() + 2 * LAST_WORDS
    while True:
        try:
            return journal.take()
        except InUse:
            if time.monotonic() > until:
                raise
            time.sleep(0.5)


def _about(task: Task, source: Source, journal: Journal) -> About:
    place = Path(task.folder).absolute()
    return About(
        folder=place / FOLDER,
        run_id=journal.run_id,
        name=f"{place.parent.name}/{place.name}",
        group=place.parent.name,
        project=task.logger["project"],
        config=source.config(),
    )


def _send(tracker: Tracker, journal: Journal, items: list[Item]) -> set[str]:
    """Hand over what is new; returns the pictures and tables that the tracker refused.

    Raises:
        Exception: it refused numbers.
    """
    refused = set()
    for group in _groups(journal.pending(items)):
        try:
            tracker.send(len(journal.entries) + len(group) - 1, group)
        except Exception:
            if group[-1].kind not in LARGE:
                raise
            traceback.print_exc()
            refused |= {item.key for item in group}
        else:
            journal.note(group)
    tracker.flush()
    if tracker.lasting:
        journal.settle()
    return refused


def _groups(items: list[Item]) -> list[list[Item]]:
    """Completions of steps that follow each other together, all else one by one."""
    found: list[list[Item]] = []
    for kind, same in groupby(items, key=lambda item: item.kind):
        items, size = list(same), GATHERED if kind == "completions" else 1
        found += [items[at : at + size] for at in range(0, len(items), size)]
    return found


def main() -> NoReturn:
    """Do the task of the command line's JSON; the end of this process is its exit code."""
    task, environment = Task(**json.loads(sys.argv[1])), dict(os.environ)
    told = _quiet(task)
    become_humble()
    end = End(task)
    try:
        _, refused = follow(task, end, lambda text: _say(told, text, warning=False))
    except InUse as error:
        _warn_once(task, told, str(error))
        end_now(3)
    except BaseException as error:  # a tracker may raise SystemExit, or be out of memory
        traceback.print_exc()
        _warn_once(task, told, f"{describe(error)}; the run goes on, it is tried again")
        _again(task, end, told, environment)
    end_now(int(refused > 0))


def _again(task: Task, end: End, told: int, environment: dict[str, str]) -> NoReturn:
    """Begin anew after a while; once the run has ended, at once and only once.

    In the environment as it was: trackers leave their own traces there.
    """
    if task.last_try:
        end_now(1)
    task.failures += 1
    end.wait(min(LONGEST, RETRY * 2 ** (task.failures - 1)))
    task.last_try = task.outcome is not None
    kill_children()
    os.set_inheritable(told, True)
    command = [sys.executable, "-m", "grpo_ustat.runs.mirror", json.dumps(asdict(task))]
    os.execve(sys.executable, command, environment | {TOLD: str(told)})


def _warn_once(task: Task, told: int, text: str) -> None:
    text = f"logger={task.logger['name']}: {text}"
    if text not in task.said and len(task.said) < 3:
        task.said.append(text)
        _say(told, text, warning=True)


def _say(told: int, text: str, warning: bool) -> None:
    """A line for the run to print."""
    line = json.dumps({"text": _one_line(text), "warning": warning}) + "\n"
    with suppress(OSError):
        os.write(told, line.encode())


def describe(error: BaseException) -> str:
    """What a tracker raised, for a line."""
    return f"{type(error).__name__}: {error}".removesuffix(": ")


def end_now(code: int = 1) -> NoReturn:
    """Without whatever a tracker would do or wait for at exit."""
    kill_children()
    os._exit(code)


def kill_children() -> None:
    """What a tracker has started."""
    import psutil

    for process in psutil.Process().children(recursive=True):
        with suppress(psutil.NoSuchProcess):
            process.kill()


def _quiet(task: Task) -> int:
    """All that is printed here goes to a file; returns the descriptor by which the run is told."""
    told = int(os.environ.pop(TOLD, 0)) or os.dup(1)
    os.set_inheritable(told, False)
    place = Path(task.folder) / FOLDER
    place.mkdir(exist_ok=True)
    log = os.open(place / f"{task.logger['name']}.log", os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    os.dup2(log, 1), os.dup2(log, 2)
    return told


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


def _one_line(text: str) -> str:
    """What a stranger's message may print on the run's terminal."""
    shown = "".join(c if c.isprintable() else " " for c in text)
    return " ".join(shown.split())[:300]


if __name__ == "__main__":
    main()
