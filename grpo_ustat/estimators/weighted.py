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

import numpy as np

ROUNDING = 1e-9  # of a mean, relative to the mean of norms


@dataclass(frozen=True)
class GroupMoments:
    """Mean and variance of the estimate, by prompt.

    Attributes:
        mean_PD: its mean.
        first_P: what is divided by G.
        second_P: what is divided by G (G-1).
    """

    mean_PD: np.ndarray
    first_P: np.ndarray
    second_P: np.ndarray

    def variance(self, num_prompts: int, group_size: int) -> float:
        """Trace of the covariance for B prompts drawn independently, G completions each."""
        between = np.square(self.mean_PD - self.mean_PD.mean(axis=0)).sum(axis=1)
        within = self.first_P / group_size + self.second_P / (group_size * (group_size - 1))
        return float((between + within).mean() / num_prompts)


def group_moments(
    probability_PY: np.ndarray,
    weight_PYD: np.ndarray,
    reward_PY: np.ndarray,
    beside_PYD: np.ndarray | float = 0.0,
) -> GroupMoments:
    """The same from all outcomes.

    Args:
        probability_PY: of the outcomes, under the policy that writes them.
        weight_PYD: w.
        reward_PY: z.
        beside_PYD: a.

    Raises:
        ValueError: the mean of w is not zero.

    >>> w = np.array([[[1.0], [-1.0]]])
    >>> found = group_moments(np.full((1, 2), 0.5), w, np.array([[1.0, 0.0]]))
    >>> found.mean_PD.item(), found.first_P.item(), found.second_P.item(), found.variance(1, 2)
    (0.5, 0.0, 0.5, 0.25)
    """
    assert weight_PYD.shape[:2] == probability_PY.shape == reward_PY.shape

    def mean(values):
        return np.einsum("py,py...->p...", probability_PY, values)

    def sq(vectors):
        return np.square(vectors).sum(axis=-1)

    norm, off = np.sqrt(mean(sq(weight_PYD))), np.sqrt(sq(mean(weight_PYD)))
    if (off > ROUNDING * norm).any():
        raise ValueError(f"the mean of the weights has norm {off.max():.3g}, which must be 0")
    centred_PY1 = (reward_PY - mean(reward_PY)[:, None])[..., None]
    own_PYD = weight_PYD * centred_PY1
    mean_PD = mean(own_PYD + beside_PYD)
    return GroupMoments(
        mean_PD=mean_PD,
        first_P=mean(sq(own_PYD + beside_PYD)) - sq(mean_PD),
        second_P=norm**2 * mean(np.square(centred_PY1[..., 0])) + sq(mean(own_PYD)),
    )
