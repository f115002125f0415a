"""Requests to stop: SIGTERM and SIGUSR1, as schedulers send them before they take a machine away.

A handler only notes the signal. The loop asks between steps, on all ranks together, saves and ends
with code 75; a step under way is finished first, so a scheduler must grant a step and a save.
"""

from __future__ import annotations

import signal
import threading
from types import FrameType

EXIT_CODE = 75  # EX_TEMPFAIL of sysexits.h: the same command goes on from here
STOPPING = (signal.SIGTERM, signal.SIGUSR1)


class StopRequest:
    """Notes a stopping signal while it is open; afterwards the handlers are as before.

    Attributes:
        received: number of the last such signal, 0 without one.
    """

    def __init__(self) -> None:
        self.received = 0

    def __enter__(self) -> StopRequest:
        self._before = {}
        if threading.current_thread() is threading.main_thread():  # others may set no handlers
            self._before = {number: signal.signal(number, self._note) for number in STOPPING}
        return self

    def __exit__(self, *failure: object) -> None:
        for number, handler in self._before.items():
            signal.signal(number, handler)

    def _note(self, number: int, frame: FrameType | None) -> None:
        self.received = number

    @property
    def name(self) -> str:
        """Which signal this process received, in words."""
        return signal.Signals(self.received).name if self.received else "a signal to another rank"
