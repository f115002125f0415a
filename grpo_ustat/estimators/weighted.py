r"""The error of a leave-one-out estimate whose completions another policy wrote, exactly.

Of one prompt, with any vectors w of mean zero in place of the scores and any vectors a beside them,

    1/G sum_i { w_i (z_i - zbar_{-i}) + a_i }

has the Hoeffding decomposition of the U-statistic (paper, Lemma 1): a is averaged as it is and adds
to the first-order part alone. With mu = E[w z] and all means those of the policy that wrote,

    mean        mu + E a
    variance    ( E||w (z - V) + a||^2 - ||mu + E a||^2 ) / G
                + ( E||w||^2 sigma^2 + ||mu||^2 ) / ( G (G-1) )

Importance ratios leave w such a vector: both `sum_t rho_t grad log pi(y_t)` with each token's ratio
and `rho grad log pi(y)` with the completion's have mean zero under the policy that wrote.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial

import numpy as np

from grpo_ustat.records import Array

ROUNDING = 1e-9  # of a mean, relative to the mean of norms


@dataclass(frozen=True)
class EstimateMoments:
    """Mean and variance of an estimate at one group size, by prompt.

    Attributes:
        mean_PD: its mean.
        within_P: trace of its covariance given the prompt.
    """

    mean_PD: Array
    within_P: Array

    def variance(self, num_prompts: int) -> float:
        """Trace of the covariance for B prompts drawn independently."""
        between_P = np.square(self.mean_PD - self.mean_PD.mean(axis=0)).sum(axis=1)
        return float((between_P + self.within_P).mean() / num_prompts)


@dataclass(frozen=True)
class GroupMoments:
    """Mean and variance of the estimate as functions of the group size, by prompt.

    Attributes:
        mean_PD: its mean.
        first_P: what is divided by G in the variance.
        second_P: what is divided by G (G-1) in it.
    """

    mean_PD: Array
    first_P: Array
    second_P: Array

    def at(self, group_size: int) -> EstimateMoments:
        """The moments of the estimate from groups of G completions."""
        within_P = self.first_P / group_size + self.second_P / (group_size * (group_size - 1))
        return EstimateMoments(self.mean_PD, within_P)


def outcome_mean(probability_PY: Array, values: Array) -> Array:
    """Mean over the outcomes of values of shape [P, Y, ...], shape [P, ...]."""
    return np.einsum("py,py...->p...", probability_PY, values)


def group_moments(
    probability_PY: Array,
    weight_PYD: Array,
    reward_PY: Array,
    beside_PYD: Array | float = 0.0,
) -> GroupMoments:
    """The moments of the estimate, exactly, from all Y outcomes of each prompt.

    Args:
        probability_PY: of the outcomes, under the policy that writes them.
        weight_PYD: w, a vector of D numbers for each outcome.
        reward_PY: z.
        beside_PYD: a.

    Raises:
        ValueError: the mean of w is not zero.

    >>> w = np.array([[[1.0], [-1.0]]])
    >>> moments = group_moments(np.full((1, 2), 0.5), w, np.array([[1.0, 0.0]]))
    >>> moments.mean_PD.item(), moments.first_P.item(), moments.second_P.item()
    (0.5, 0.0, 0.5)
    >>> moments.at(2).variance(1)
    0.25
    """
    assert weight_PYD.shape[:2] == probability_PY.shape == reward_PY.shape

    mean = partial(outcome_mean, probability_PY)

    def sq(vectors: Array) -> Array:
        return np.square(vectors).sum(axis=-1)

    norm_P, offset_P = np.sqrt(mean(sq(weight_PYD))), np.sqrt(sq(mean(weight_PYD)))
    if (offset_P > ROUNDING * norm_P).any():
        raise ValueError(f"the mean of the weights has norm {offset_P.max():.3g}, which must be 0")
    centred_PY1 = (reward_PY - mean(reward_PY)[:, None])[..., None]
    own_PYD = weight_PYD * centred_PY1
    mean_PD = mean(own_PYD + beside_PYD)
    return GroupMoments(
        mean_PD=mean_PD,
        first_P=mean(sq(own_PYD + beside_PYD)) - sq(mean_PD),
        second_P=norm_P**2 * mean(np.square(centred_PY1[..., 0])) + sq(mean(own_PYD)),
    )
