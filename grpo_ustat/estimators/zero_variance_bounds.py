r"""Bounds on the zero-variance share at other group sizes, from scalars that trainers log.

A log of scalars has the share z of zero-variance groups at one group size and often the mean
reward m, but not the rewards of each prompt. Neither z nor m determines the share at another size,
because both are averages over prompts of unknown difficulty. With success probability p_X of prompt
X and rewards of 0 and 1,

    m = E p_X        z_G = E h_G(p_X),  h_G(p) = p^G + (1 - p)^G

so the share at size G lies between the minimum and the maximum of `E h_G(p_X)` over all
distributions of p_X on [0, 1] that agree with the logged averages. Because of sampling errors, the
expectations need not equal the logged averages; they must lie in the averages' intervals. The
minimisation and the maximisation are linear programmes in the distribution.

They are solved on a grid. A distribution on [0, 1] is converted to a distribution on the grid by
splitting the mass at each p between the two neighbouring grid points such that the mean is
preserved. This conversion changes `E f(p_X)` by at most the error of the linear interpolation of f.
Intervals and bounds are therefore widened by these errors, so that the bounds are valid for all
distributions on [0, 1].

For rewards with other values, let Q be the probability that a further completion has the same
reward as a given completion of the same prompt. Then `z_G = E Q^(G-1)`, and the mean reward gives
no information about z_G. The shares z_G are moments of a distribution on [0, 1] and are bounded by
the same programme.

The plug-in value `m^G + (1-m)^G` does not estimate the share. By convexity it is a lower bound,
which is reached if all prompts are equally difficult. If half of the prompts have p = 0.1 and half
have p = 0.9, the true share at G = 8 is 0.43, and the plug-in gives 0.008.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping

import numpy as np

from grpo_ustat.estimators.intervals import Interval
from grpo_ustat.records import Array

Function = Callable[[Array], Array]

# Number of grid points of a programme, and number of points at which the interpolation error is
# computed. Both grids are dense near 0 and 1, where the functions are steep.
GRID, CHECKED_GRID = 401, 20_001
# Additional widening, which exceeds the tolerance of the solver.
SOLVER_TOLERANCE = 1e-6


def zero_variance_bounds(
    group_size: int,
    shares: Mapping[int, Interval],
    mean_reward: Interval | None = None,
) -> tuple[float, float] | None:
    """Bound the share of zero-variance groups of a given size over all mixtures of prompts.

    Args:
        group_size: size G for which the share is bounded.
        shares: interval of the logged share of zero-variance groups, by group size.
        mean_reward: interval of the mean reward, if every reward is 0 or 1; None for other rewards.

    Returns:
        Lower and upper bound; None if no mixture agrees with the intervals, for example because
        rewards have other values than 0 and 1.

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
    """Return the probability that G rewards of 0 or 1 are equal, given the success probability."""
    return lambda p: p**size + (1 - p) ** size


def _equal_rewards(size: int) -> Function:
    """Return the probability that the other G - 1 rewards equal the first, given Q."""
    return lambda q: q ** (size - 1)


def _largest_mean(target: Function, constraints: list[tuple[Function, Interval]]) -> float | None:
    """Bound `E target(X)` from above, over all X on [0, 1] that satisfy the constraints.

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
