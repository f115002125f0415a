"""Trackers: accelerate's for wandb, TensorBoard and trackio, fed by a thread of their own.

A tracker shows what the run folder holds; it may fail, hang or be slow, and the run goes on as it
would alone. What was sent is marked in the folder, so that a run that goes on sends the rest, each
step once.
"""

from __future__ import annotations

import atexit
import json
import os
import queue
import sys
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager, suppress
from itertools import groupby
from pathlib import Path
from typing import Any
from uuid import uuid4

from grpo_ustat.distributed.processes import children
from grpo_ustat.distributed.signals import seconds_since_request
from grpo_ustat.runs import contents
from grpo_ustat.runs.backends import OPENERS, About, sync_command, unsent_runs
from grpo_ustat.runs.events import Damaged, Event, FolderReader, row_event
from grpo_ustat.runs.files import write_whole
from grpo_ustat.runs.folder import TRACKER_FOLDER
from grpo_ustat.terminal.console import excerpt, tell, warn
from grpo_ustat.terminal.streams import single_line, visible

MOST_WAITING_ROWS = 10_000  # rows that wait for a tracker which is slow
MOST_STEPS = 200  # completions of so many steps at most go into one table
LONGEST_NAME = 120  # of a run, in letters; wandb takes 128
STOP_MARGIN_SECONDS = 10.0  # seconds before a stopped run is killed that no tracker may use
WITH_EXIT_HOOKS = ("wandb", "opentelemetry", "trackio")  # packages that wait for a server at exit
QUIET_SECONDS = 2.0  # of waiting at the end of a run, before a line says so
STATE_SHAPE = {"run_id": str, "count": contents.Count, "sent": {}}  # of what was sent, see `Sender`


class Sender:
    """A tracker that is open for a run folder, and `tracker/<name>.json` there: the run's id, how
    many events the tracker was given, and the latest of each kind.

    Args:
        folder: the run folder.
        name: of the tracker.
        project: of the runs there.

    Raises:
        Damaged: a file of the folder.
        Exception: of the tracker.
    """

    def __init__(self, folder: Path, name: str, project: str | None):
        self._file = folder / TRACKER_FOLDER / f"{name}.json"
        self._file.parent.mkdir(exist_ok=True)
        self._state: dict[str, Any] = {"run_id": uuid4().hex[:8], "count": 0, "sent": {}}
        if self._file.is_file():
            parts = (folder, f"{TRACKER_FOLDER}/{name}.json", contents.parsed_json)
            stored, wrong = contents.checked(*parts, STATE_SHAPE)
            if wrong or not stored.keys() >= STATE_SHAPE.keys():
                raise Damaged(f"{self._file} is damaged: delete it, a new run begins there")
            self._state |= stored
        else:  # before anything is sent under this id
            write_whole(self._file, json.dumps(self._state))
        self._reader, place = FolderReader(folder), folder.absolute()
        about = About(
            folder=place / TRACKER_FOLDER,
            run_id=self._state["run_id"],
            name=excerpt(visible(f"{place.parent.name}/{place.name}"), LONGEST_NAME),
            group=excerpt(visible(place.parent.name), LONGEST_NAME),
            project=project,
            config=self._reader.config(),
        )
        self._tracker = OPENERS[name](about)

    def send_folder(self) -> None:
        """Send what the folder holds and the tracker was not given yet."""
        self._send([*self._reader.rows(), *self._reader.logs(), *self._reader.result()])

    def send_row(self, row: dict[str, Any]) -> None:
        """Send a row of metrics.jsonl, and what was logged beside it since the one before."""
        self._send([row_event(row), *self._reader.logs()])

    def _send(self, events: Iterable[Event]) -> None:
        sent = self._state["sent"]
        new = [event for event in events if event.is_new(sent)]
        for kind, same in groupby(new, key=lambda event: event.kind):
            pending, size = list(same), MOST_STEPS if kind == "completions" else 1
            for first in range(0, len(pending), size):
                group = pending[first : first + size]
                self._state["count"] += len(group)
                self._tracker.send(self._state["count"] - 1, group)
                sent |= {event.key: event.mark for event in group}
                write_whole(self._file, json.dumps(self._state))

    def close(self, outcome: str) -> str | None:
        """Send the run's last files and end it there; returns where to look at it, if anywhere."""
        self._send([*self._reader.logs(), *self._reader.result()])
        return self._tracker.close(outcome)


class Tracking:
    """A tracker as its run sees it: no method raises, and only `finish` waits.

    Args:
        folder: the run folder, with its configuration.
        logger: a `LoggerConfig`, not `none`.
    """

    def __init__(self, folder: Path, logger: Any):
        self._folder, self._logger, self._owner = folder, logger, os.getpid()
        self._rows: queue.Queue[dict[str, Any] | None] = queue.Queue(MOST_WAITING_ROWS)
        self._dropped, self._outcome = 0, "interrupted"
        self._ending, self._over = threading.Event(), threading.Event()
        self._exit_hooks: list[Callable[..., object]] = []
        self._thread = threading.Thread(target=self._work, name="tracker", daemon=True)
        try:
            import accelerate.tracking  # noqa: F401  # not while this thread imports from it too

            self._thread.start()
        except (ImportError, RuntimeError) as error:  # the latter beyond a limit of threads
            self._switch_off(describe(error))

    def put(self, row: dict[str, Any]) -> None:
        """Have a row of metrics.jsonl sent, or dropped where too many wait."""
        if self._over.is_set():
            return
        try:
            self._rows.put_nowait(row)
        except queue.Full:
            if not self._dropped:
                self._warn(f"cannot keep up, rows are dropped there; {self._folder} has them all")
            self._dropped += 1

    def finish(self, outcome: str, grace_seconds: float) -> None:
        """Wait until all is sent, at most `finish_seconds`; then abandon the tracker.

        Args:
            outcome: done, stopped, failed or interrupted.
            grace_seconds: between a signal to the run and its kill.
        """
        if os.getpid() != self._owner or self._thread.ident is None:
            return
        patience = self._logger.finish_seconds
        if outcome == "stopped":
            remaining = grace_seconds - seconds_since_request() - STOP_MARGIN_SECONDS
            patience = max(0.0, min(patience, remaining))
        name, self._outcome, until = self._logger.name, outcome, time.monotonic() + patience
        self._ending.set()
        with suppress(queue.Full):  # else the thread does not wait, and looks when it is empty
            self._rows.put_nowait(None)
        try:
            self._thread.join(min(QUIET_SECONDS, patience))
            if self._thread.is_alive() and patience > QUIET_SECONDS and not self._over.is_set():
                line = f"waiting up to {patience:.0f} s for logger={name}; all files are written"
                tell(line, file=sys.stderr)
                self._thread.join(max(0.0, until - time.monotonic()))
        finally:  # also where the waiting is interrupted
            if self._thread.is_alive():
                self._switch_off(f"did not end in {patience:.0f} s and is left to itself")
                leave_alone(self._exit_hooks)
                if self._exit_hooks:
                    self._thread.join(
                        QUIET_SECONDS
                    )  # wandb forgets its process, see `forget_service`
        if self._dropped:
            tell(f"logger={name}: {self._dropped} rows were dropped", file=sys.stderr)

    def _work(self) -> None:
        """Open the tracker, send what comes, and close it; in the thread."""
        with noted_exit_hooks(self._exit_hooks):
            try:
                sender = Sender(self._folder, self._logger.name, self._logger.project)
                sender.send_folder()
                while not (self._ending.is_set() and self._rows.empty()):
                    row = self._rows.get()
                    if row is not None:
                        sender.send_row(row)
                where = sender.close(self._outcome)
                if where is not None and not self._over.is_set():
                    tell(f"logger={self._logger.name}: {where}", file=sys.stderr)
            except BaseException as error:  # a tracker may raise SystemExit
                self._switch_off(describe(error))
                leave_alone(self._exit_hooks)
                forget_service(self._logger.name)

    def _switch_off(self, reason: str) -> None:
        """Send nothing more, and say so once."""
        if self._over.is_set():
            return
        self._over.set()
        rest = ""
        with suppress(OSError):
            unsent = unsent_runs(self._folder)
            rest = f". To send the rest: {sync_command(unsent)}" if unsent else ""
        self._warn(f"{reason}; it is off, the run is whole without it{rest}")

    def _warn(self, text: str) -> None:
        warn(f"logger={self._logger.name}: {text}")


def describe(error: BaseException) -> str:
    """An error's type and message, in a line."""
    if isinstance(error, Damaged):
        return str(error)
    return f"{type(error).__name__}: {single_line(error, 300)}".removesuffix(": ")


@contextmanager
def noted_exit_hooks(found: list[Callable[..., object]]) -> Iterator[None]:
    """Record what trackers register with `atexit` within the block, such as wandb's wait for its
    server.
    """
    register = atexit.register

    def note(function: Callable[..., Any], /, *args: Any, **kwargs: Any) -> Callable[..., Any]:
        if str(getattr(function, "__module__", "")).partition(".")[0] in WITH_EXIT_HOOKS:
            found.append(function)
        return register(function, *args, **kwargs)

    atexit.register = note
    try:
        yield
    finally:
        if atexit.register is note:
            atexit.register = register


def leave_alone(exit_hooks: Sequence[Callable[..., object]]) -> None:
    """Keep a tracker that failed or hangs from delaying the exit of this process: take back what it
    registered with `atexit`, and kill wandb's own process.
    """
    for hook in exit_hooks:
        atexit.unregister(hook)
    for child in children(os.getpid()):
        with suppress(Exception):  # it may have ended
            if child.name().startswith("wandb-core"):
                child.kill()


def forget_service(name: str) -> None:
    """Have wandb forget its process, so that a later run of this sweep starts another one."""
    if name == "wandb" and "wandb" in sys.modules:
        with suppress(BaseException):
            sys.modules["wandb"].teardown()
