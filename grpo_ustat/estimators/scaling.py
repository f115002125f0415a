r"""The minibatch error and the group size that minimises it (paper, Proposition 3, section 6).

For B prompts drawn independently, G completions each, leave-one-out baseline:

    MSE(B, G) = 1/B { C1 + C2/G + C3/(G (G-1)) }
    C1 = tr Cov g(X)    C2 = E[ A_V - ||g||^2 ]    C3 = E[ D + ||g||^2 ]

At a fixed number of rollouts n = B G this is `1/n { G C1 + C2 + C3/(G-1) }`, smallest at
`G* = 1 + sqrt(C3/C1)` whatever n; the paper, with C3/G as the last term, has `sqrt(C3/C1)`. At a
fixed cost K = B (k + G c), k spent once per prompt and c per completion, the error is
`(k + G c)/K { C1 + C2/G + C3/(G (G-1)) }`: its minimum does not depend on K either.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np

LARGEST = 1e6  # group sizes are looked for up to here


@dataclass(frozen=True)
class ScalingLaw:
    """The three constants.

    >>> law = ScalingLaw(c1=1.0, c2=2.0, c3=9.0)
    >>> law.mse(num_prompts=8, group_size=4), law.best_group_size, law.best_divisor(48)
    (0.28125, 4.0, 4)
    """

    c1: float
    c2: float
    c3: float

    def mse(self, num_prompts: int, group_size: int) -> float:
        """Predicted MSE(B, G), prompts drawn independently."""
        second = self.c3 / (group_size * (group_size - 1))
        return (self.c1 + self.c2 / group_size + second) / num_prompts

    @property
    def best_group_size(self) -> float:
        """G* = 1 + sqrt(C3 / C1); NaN where an estimate of C1 or C3 is not positive."""
        return 1 + self.paper_group_size

    @property
    def paper_group_size(self) -> float:
        """sqrt(C3 / C1), the paper's form."""
        if self.c1 <= 0 or self.c3 <= 0:
            return math.nan
        return math.sqrt(self.c3 / self.c1)

    def best_divisor(self, rollouts: int) -> int:
        """The G >= 2 that divides n and has the smallest predicted error at that n.

        Raises:
            ValueError: n < 2.
        """
        if rollouts < 2:
            raise ValueError(f"rollouts={rollouts}: leave-one-out needs at least 2")
        sizes = [g for g in range(2, rollouts + 1) if rollouts % g == 0]
        return min(sizes, key=lambda g: self.mse(rollouts // g, g))


def best_group_size(c1, c2, c3, prompt_cost: float = 0.0, completion_cost: float = 1.0):
    """The G > 1 that minimises the error at a fixed cost, elementwise; NaN where there is none.

    Args:
        c1, c2, c3: constants, arrays of one shape.
        prompt_cost: k, shared by a prompt's group (reading it).
        completion_cost: c, of each completion.

    >>> float(best_group_size(1.0, 2.0, 9.0)), float(best_group_size(1.0, 2.0, 9.0, 10.0).round(2))
    (4.0, 7.77)
    """
    c1, c2, c3 = (np.asarray(x, dtype=float) for x in (c1, c2, c3))
    usable = (c1 > 0) & (c3 > 0)
    if prompt_cost == 0:
        return 1 + np.sqrt(np.where(usable, c3, np.nan) / np.where(usable, c1, np.nan))
    k, c = prompt_cost, completion_cost

    def slope(g):
        """Of the error in G, times a positive factor; increasing where c2 >= 0."""
        pair = g * (g - 1)
        return c * c1 - k * c2 / g**2 - c * c3 / (g - 1) ** 2 - k * c3 * (2 * g - 1) / pair**2

    low, high = np.full(c1.shape, 1 + 1e-6), np.full(c1.shape, LARGEST)
    for _ in range(80):
        middle = 1 + np.sqrt((low - 1) * (high - 1))
        falls = slope(middle) < 0
        low, high = np.where(falls, middle, low), np.where(falls, high, middle)
    return np.where(usable & (c2 >= 0), high, np.nan)
