"""Requests to stop: signals that schedulers send before they take a machine away.

A handler only records the signal. Work checks for it between steps, on all ranks together, saves
and ends with code 75. A step that has begun is finished first, so a scheduler must grant the time
of a step and a save.
"""

from __future__ import annotations

import signal
import threading
import time
from types import FrameType
from typing import ClassVar

# EX_TEMPFAIL of sysexits.h: the same command continues from here.
EXIT_CODE = 75
STOPPING = (signal.SIGTERM, signal.SIGUSR1, signal.SIGUSR2)


class Stopped(Exception):
    """Work that ended early by request, after it was saved as far as possible."""


class StopRequest:
    """Recorder of a stopping signal while it is open; afterwards the handlers are restored.

    An inner request starts with the signal that an outer one has recorded.
    """

    _inner: ClassVar[StopRequest | None] = None
    # Time of the first signal.
    _since: ClassVar[float | None] = None

    def __init__(self) -> None:
        # Number of the last stopping signal, 0 without one.
        self.received = 0

    def __enter__(self) -> StopRequest:
        self._outer, self._before = StopRequest._inner, {}
        StopRequest._inner = self
        # Python lets no other thread set handlers.
        if threading.current_thread() is threading.main_thread():
            self._before = {number: signal.signal(number, self._note) for number in STOPPING}
        if self._outer is not None:
            self.received = self._outer.received
        else:
            StopRequest._since = None
        return self

    def __exit__(self, *failure: object) -> None:
        for number, handler in self._before.items():
            signal.signal(number, handler)
        StopRequest._inner = self._outer

    def _note(self, number: int, frame: FrameType | None) -> None:
        self.received = number
        StopRequest._since = StopRequest._since or time.monotonic()
        self.on_signal(number)

    def on_signal(self, number: int) -> None:
        """Respond at once to a signal, in subclasses; does nothing here."""

    @property
    def name(self) -> str:
        """The signal that this process received, in words."""
        return signal.Signals(self.received).name if self.received else "a signal to another rank"


def stop_if_requested() -> None:
    """End the work if a signal asked for it; the caller has saved its results.

    Raises:
        Stopped: a signal came to this process since the innermost StopRequest was opened.
    """
    request = StopRequest._inner
    if request is not None and request.received:
        raise Stopped(f"stopped by {request.name}")


def seconds_since_request() -> float:
    """Return the seconds since the first stopping signal to this process; 0 without one."""
    return time.monotonic() - StopRequest._since if StopRequest._since else 0.0
