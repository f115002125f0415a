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
