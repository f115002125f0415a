r"""Bounds on the zero-variance share at other group sizes, from scalars that trainers log.

A log of scalars has the share z_G of zero-variance groups at one group size G, and often the mean
reward m, but not the rewards of each prompt. Neither number determines the share at another size,
because both are averages over prompts of unknown difficulty. Let p_X be the success probability of
a random prompt X. For rewards of 0 and 1,

    m = E p_X        z_G = E h_G(p_X),  h_G(p) = p^G + (1 - p)^G

The share at another size H therefore lies between the minimum and the maximum of `E h_H(p_X)` over
all distributions of p_X on [0, 1] that agree with the logged numbers. The logged numbers have
sampling errors, so a distribution agrees with them if m and z_G lie in their intervals. The
minimisation and the maximisation are linear programmes in the distribution.

**Grid.** The programmes are solved on a grid. Any distribution on [0, 1] can be moved to the grid:
the mass at each p is split between the two neighbouring grid points, such that the mean is
preserved. This changes `E f(p_X)` by at most the error of the linear interpolation of f. The
intervals and the bounds are therefore widened by these errors. The bounds are then valid for all
distributions on [0, 1].

**Other rewards.** For rewards with other values, let Q be the probability that a further completion
has the same reward as a given completion of the same prompt. Then `z_G = E Q^(G-1)`, and the mean
reward gives no information about z_G. The shares are moments of a distribution on [0, 1] and are
bounded by the same programmes.

**Why bounds.** The plug-in value `m^G + (1-m)^G` is not an estimate of the share. By convexity it
is a lower bound, which is reached if all prompts are equally difficult. For example, if half of the
prompts have p = 0.1 and half have p = 0.9, the true share at G = 8 is 0.43, but the plug-in value
is 0.008.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping

import numpy as np

from grpo_ustat.estimators.intervals import Interval
from grpo_ustat.records import Array

Function = Callable[[Array], Array]

# The programmes use a grid of GRID points. The interpolation error is computed at CHECKED_GRID
# points. Both grids are dense near 0 and 1, where the functions are steep.
GRID, CHECKED_GRID = 401, 20_001
# Amount by which intervals and bounds are also widened, because the solver is not exact. It is
# larger than the tolerance of the solver.
SOLVER_TOLERANCE = 1e-6


def zero_variance_bounds(
    group_size: int,
    shares: Mapping[int, Interval],
    mean_reward: Interval | None = None,
) -> tuple[float, float] | None:
    """Bound the share of zero-variance groups of a given size, from shares at other sizes.

    The bounds hold for any distribution of difficulty over prompts that agrees with the data.

    Args:
        group_size: size G for which the share is bounded.
        shares: interval of the logged share of zero-variance groups, by group size.
        mean_reward: interval of the mean reward, if every reward is 0 or 1; None for other rewards.

    Returns:
        Lower and upper bound; None if no distribution agrees with the intervals, for example
        because `mean_reward` is given for rewards other than 0 and 1.

    >>> half = Interval(0.5, 0.5, 0.5)
    >>> low, high = zero_variance_bounds(4, {2: half}, half)
    >>> round(low, 3), round(high, 3)  # only p = 0.5 agrees
    (0.125, 0.125)
    >>> low, high = zero_variance_bounds(4, {2: half})
    >>> round(low, 3), round(high, 3)  # Q = 0.5, or Q is 0 and 1 with equal probability
    (0.125, 0.5)
    """
    if mean_reward is None:
        constraints = [(_equal_rewards(size), share) for size, share in shares.items()]
        target = _equal_rewards(group_size)
    else:
        constraints = [(_zero_variance(size), share) for size, share in shares.items()]
        constraints.append((np.asarray, mean_reward))
        target = _zero_variance(group_size)
    high = _largest_mean(target, constraints)
    low = _largest_mean(lambda x: -target(x), constraints)
    if high is None or low is None:
        return None
    return max(0.0, -low), min(1.0, high)


def _zero_variance(size: int) -> Function:
    """Return the function from p to the probability that G rewards of 0 or 1 are equal."""
    return lambda p: p**size + (1 - p) ** size


def _equal_rewards(size: int) -> Function:
    """Return the function from Q to the probability that all G rewards are equal."""
    return lambda q: q ** (size - 1)


def _largest_mean(target: Function, constraints: list[tuple[Function, Interval]]) -> float | None:
    """Bound `E target(X)` from above, over all random variables X on [0, 1] that are allowed.

    Args:
        target: function whose expectation is bounded.
        constraints: functions f, each with an interval that must contain `E f(X)`.

    Returns:
        The bound; None if no distribution satisfies the constraints.
    """
    from scipy.optimize import linprog

    grid = _grid(GRID)
    rows: list[Array] = []
    ends: list[float] = []
    for function, interval in constraints:
        values, slack = function(grid), _interpolation_error(function) + SOLVER_TOLERANCE
        rows += [values, -values]
        ends += [interval.high + slack, slack - interval.low]
    solution = linprog(
        -target(grid), A_ub=np.stack(rows), b_ub=ends, A_eq=np.ones((1, GRID)), b_eq=[1.0]
    )
    if solution.fun is None:
        return None
    return -float(solution.fun) + _interpolation_error(target) + SOLVER_TOLERANCE


def _interpolation_error(function: Function) -> float:
    """Return the largest error of linear interpolation between the grid points."""
    grid, points = _grid(GRID), _grid(CHECKED_GRID)
    return float(np.abs(np.interp(points, grid, function(grid)) - function(points)).max())


def _grid(points: int) -> Array:
    """Return points in [0, 1] that are dense near both ends."""
    return (1 - np.cos(np.linspace(0, np.pi, points))) / 2
