"""Handling of stop signals, which schedulers send before they reclaim a machine.

The signal handler only records the signal. After each step, a run checks for a recorded signal on
all ranks together. If there is one, the run saves its work and ends with exit code 75. A scheduler
must therefore leave enough time for finishing a step and saving.
"""

from __future__ import annotations

import signal
import threading
from types import FrameType
from typing import ClassVar, Self

# Exit code of a stopped run, which the same command continues. It is EX_TEMPFAIL of sysexits.h.
EXIT_CODE = 75
# Signals that stop a run.
STOPPING = (signal.SIGTERM, signal.SIGUSR1, signal.SIGUSR2)


class Stopped(Exception):
    """Exception that ends a run early on request, after its work was saved."""


class StopRequest:
    """Context in which stop signals are recorded; at its end the previous handlers are restored.

    A context inside another one starts with the signal that the outer one has recorded.
    """

    _inner: ClassVar[StopRequest | None] = None

    def __init__(self) -> None:
        # Number of the last stop signal; 0 if there was none.
        self.received = 0

    def __enter__(self) -> Self:
        self._outer, self._before = StopRequest._inner, {}
        StopRequest._inner = self
        # Python allows only the main thread to set handlers.
        if threading.current_thread() is threading.main_thread():
            self._before = {number: signal.signal(number, self._note) for number in STOPPING}
        if self._outer is not None:
            self.received = self._outer.received
        return self

    def __exit__(self, *failure: object) -> None:
        for number, handler in self._before.items():
            signal.signal(number, handler)
        StopRequest._inner = self._outer

    def _note(self, number: int, frame: FrameType | None) -> None:
        self.received = number
        self.on_signal(number)

    def on_signal(self, number: int) -> None:
        """Respond to a signal at once. This method does nothing; subclasses can override it."""

    @property
    def name(self) -> str:
        """Name of the received signal, or a text that says that another rank received one."""
        return signal.Signals(self.received).name if self.received else "a signal to another rank"


def stop_if_requested() -> None:
    """Raise `Stopped` if a stop signal was received.

    The caller must have saved its results.

    Raises:
        Stopped: the innermost `StopRequest` has recorded a signal.
    """
    request = StopRequest._inner
    if request is not None and request.received:
        raise Stopped(f"stopped by {request.name}")
