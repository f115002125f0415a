r"""What importance ratios cost as completions get longer, the change of each token fixed.

Tokens 0 and 1; pi_old writes both evenly, pi_theta has token 1 at logit `shift` everywhere, with
chance p; the reward is the square of the share of ones, which no token decides alone. A token's
`E rho_t^2 = 2 (p^2 + (1-p)^2) = c` and, tokens being independent, a completion's is c^L.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from grpo_ustat.policy.sequences import SequencePolicy
from grpo_ustat.theorems.offpolicy import Setting, tie


@dataclass(frozen=True)
class ByLength:
    """Exact values at every length.

    Attributes:
        num_prompts: B.
        lengths: L, ascending.
        growth: c, E rho_t^2 of a token.
        values: by name as in `Setting.quality`, an array over the lengths each.
    """

    num_prompts: int
    lengths: np.ndarray
    growth: float
    values: dict[str, np.ndarray]

    @property
    def variance_ratio(self) -> np.ndarray:
        """Variance with the completion's ratio to that with each token's."""
        return self.values["sequence_variance"] / self.values["token_variance"]

    @property
    def growth_of_ratio(self) -> float:
        """Its growth by a token, between the two largest lengths."""
        steps = np.diff(self.lengths)[-1]
        return float((self.variance_ratio[-1] / self.variance_ratio[-2]) ** (1 / steps))

    @property
    def tie(self) -> np.ndarray:
        """The B at which both levels have the same error; NaN for one token."""
        return tie(self.values, self.num_prompts)


def by_length(lengths: Sequence[int], shift: float, num_prompts: int, group_size: int) -> ByLength:
    """Bias and variance of both levels at every length, without a penalty.

    Args:
        lengths: at least two.
        shift: of the logit of token 1.
        num_prompts, group_size: B and G.
    """
    chance = 1 / (1 + np.exp(-shift))
    sizes = sorted(set(lengths))
    found = [_one(length, shift, num_prompts, group_size) for length in sizes]
    values = {name: np.array([each[name] for each in found]) for name in found[0]}
    growth = float(2 * (chance**2 + (1 - chance) ** 2))
    return ByLength(num_prompts, np.array(sizes), growth, values)


def _one(length: int, shift: float, num_prompts: int, group_size: int) -> dict[str, float]:
    old = SequencePolicy(np.zeros((length, 2, 2)), np.zeros((1, 2)))
    reward_PY = np.square(old.completions_YL.mean(axis=1))[None]
    theta_LVV = np.zeros((length, 2, 2))
    theta_LVV[..., 1] = shift
    setting = Setting(old, old, reward_PY, 0.0, num_prompts, group_size)
    return setting.quality(old.at(theta_LVV.ravel()))
