"""Whether a limit is reached, from two points on the way to it."""

from __future__ import annotations

CLOSER = 0.9


def settled(near: float, far: float, tolerance: float, closer: float = CLOSER) -> bool | None:
    """True within the tolerance, None where further off and coming closer, else False.

    Args:
        near: distance from the limit at the last point.
        far: at the one before.
        tolerance: of the last.
        closer: the share of `far` that `near` may be at most; towards a wrong limit both settle.

    >>> settled(0.01, 0.02, 0.05), settled(0.1, 0.2, 0.05), settled(0.199, 0.2, 0.05)
    (True, None, False)
    """
    if near <= tolerance:
        return True
    return None if near <= closer * far else False
