r"""The minibatch error and the group size that minimises it (paper, Proposition 3, section 6).

For B prompts drawn independently, G completions each, leave-one-out baseline:

    MSE(B, G) = 1/B { C1 + C2/G + C3/(G (G-1)) }
    C1 = tr Cov g(X)    C2 = E[ A_V - ||g||^2 ]    C3 = E[ D + ||g||^2 ]

At a fixed number of rollouts n = B G this is `1/n { G C1 + C2 + C3/(G-1) }`, smallest at
`G* = 1 + sqrt(C3/C1)` whatever n; the paper, with C3/G as the last term, has `sqrt(C3/C1)`.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from grpo_ustat.estimators.moments import Moments


@dataclass(frozen=True)
class ScalingLaw:
    """The three constants.

    >>> law = ScalingLaw(c1=1.0, c2=2.0, c3=9.0)
    >>> law.mse(num_prompts=8, group_size=4), law.best_group_size
    (0.28125, 4.0)
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


def scaling_law(moments: Moments, grad_sq: float) -> ScalingLaw:
    """C1, C2, C3 of the prompts at hand (C1 with divisor P), from unbiased estimates.

    Args:
        moments: per-prompt moments.
        grad_sq: ||grad J||^2 of the same prompts.
    """
    return ScalingLaw(
        c1=float(moments.g_sq.mean() - grad_sq),
        c2=float((moments.a_v - moments.g_sq).mean()),
        c3=float((moments.d + moments.g_sq).mean()),
    )
