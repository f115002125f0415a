"""Cases of a test of which a quicker suite runs a few, the slow or the nightly one the others."""

from __future__ import annotations

from itertools import product

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


def nightly_but(kept, *axes):
    """Every combination of names, one of each axis, as pytest's parameters; nightly but `kept`."""
    names = ["-".join(combination) for combination in product(*axes)]
    assert set(kept) <= set(names)
    return [
        pytest.param(
            *combination, id=name, marks=() if name in kept else pytest.mark.nightly(minutes=0.05)
        )
        for name, combination in zip(names, product(*axes), strict=True)
    ]
