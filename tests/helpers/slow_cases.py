"""Cases of a test of which the fast suite runs a few, the slow suite the others."""

from __future__ import annotations

import pytest


def slow_but(cases, *fast):
    """The cases, a dictionary of tuples by name, as pytest's parameters; slow but those named."""
    assert set(fast) <= set(cases)
    return [
        pytest.param(*values, id=name, marks=() if name in fast else pytest.mark.slow(minutes=0.05))
        for name, values in cases.items()
    ]


def slow_after(count, cases):
    """The cases, tuples or single values, as pytest's parameters; slow but the first so many."""
    tuples = [case if isinstance(case, tuple) else (case,) for case in cases]
    slow = pytest.mark.slow(minutes=0.01)
    return [
        pytest.param(*values, marks=slow if place >= count else ())
        for place, values in enumerate(tuples)
    ]
