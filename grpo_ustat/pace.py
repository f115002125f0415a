"""How far the work at hand is: whoever does it says so, whoever shows it listens; nobody need."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass

SECONDS = 0.25  # at least, between two states that are told


@dataclass(frozen=True)
class State:
    """Of one activity.

    Attributes:
        doing: what, such as `writing`.
        done, total: completions; a total of 0 is not known.
        tokens: written so far, 0 where that is not counted.
        seconds: since it began.
    """

    doing: str
    done: int
    total: int
    tokens: int
    seconds: float


Listener = Callable[[State], object]
_listener: Listener | None = None


@contextmanager
def heard_by(listener: Listener | None) -> Iterator[None]:
    """Have a listener called with states that this process tells meanwhile; None: nobody."""
    global _listener
    before, _listener = _listener, listener
    try:
        yield
    finally:
        _listener = before


class Pace:
    """Tells how far an activity is, from now on, at most every quarter of a second.

    Args:
        doing, total: see `State`.
    """

    def __init__(self, doing: str, total: int = 0):
        self.doing, self.total, self.done, self.tokens = doing, total, 0, 0
        self._begun = time.monotonic()
        self._told = self._begun - SECONDS
        self.add()

    def add(self, done: int = 0, tokens: int = 0) -> None:
        """So many completions and tokens more."""
        self.done += done
        self.tokens += tokens
        if _listener is None:
            return
        now = time.monotonic()
        if now - self._told >= SECONDS or self.done == self.total > 0:
            self._told = now
            state = State(self.doing, self.done, self.total, self.tokens, now - self._begun)
            _listener(state)
