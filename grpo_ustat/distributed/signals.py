"""Stop requests: signals that schedulers send before they reclaim a machine.

A handler only records the signal. Between steps, the work checks for a signal on all ranks
together, saves, and ends with exit code 75. A step in progress is finished first, so a scheduler
must leave enough time for a step and a save.
"""

from __future__ import annotations

import signal
import threading
import time
from types import FrameType
from typing import ClassVar

# EX_TEMPFAIL of sysexits.h, which means that running the same command again continues the work.
EXIT_CODE = 75
STOPPING = (signal.SIGTERM, signal.SIGUSR1, signal.SIGUSR2)


class Stopped(Exception):
    """Early end of the work on request, after everything that could be saved was saved."""


class StopRequest:
    """Context that records stop signals and restores the previous handlers at its end.

    A nested request starts with the signal that the outer request has recorded.
    """

    _inner: ClassVar[StopRequest | None] = None
    # Time of the first stop signal, by the monotonic clock.
    _since: ClassVar[float | None] = None

    def __init__(self) -> None:
        # Number of the last stop signal; 0 if there was none.
        self.received = 0

    def __enter__(self) -> StopRequest:
        self._outer, self._before = StopRequest._inner, {}
        StopRequest._inner = self
        # Python allows only the main thread to set handlers.
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
        """Respond to a signal immediately; subclasses can override this empty method."""

    @property
    def name(self) -> str:
        """Name of the signal that this process received, or a text if another rank received one."""
        return signal.Signals(self.received).name if self.received else "a signal to another rank"


def stop_if_requested() -> None:
    """Raise `Stopped` if a signal requested a stop; the caller must have saved its results.

    Raises:
        Stopped: the innermost open StopRequest has recorded a signal.
    """
    request = StopRequest._inner
    if request is not None and request.received:
        raise Stopped(f"stopped by {request.name}")


def seconds_since_request() -> float:
    """Return the seconds since this process received its first stop signal; 0 if there was none."""
    return time.monotonic() - StopRequest._since if StopRequest._since else 0.0
