r"""An enumerable policy whose value, gradient and moments are exact: the problem of the theory.

`pi_theta(y|x) = softmax_y( phi(x, y)' theta )` over a handful of outcomes, parameters shared by all
prompts; the score is `phi(x, y) - E phi(x, .)`.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from grpo_ustat.estimators.moments import Moments, exact_moments


@dataclass(frozen=True)
class TabularPolicy:
    """A softmax policy over P prompts with Y outcomes each.

    Attributes:
        features_PYD: phi(x, y), float64.
        theta_D: parameters.
        rewards_PY: r(x, y).
    """

    features_PYD: np.ndarray
    theta_D: np.ndarray
    rewards_PY: np.ndarray

    def __post_init__(self):
        assert self.features_PYD.shape[:2] == self.rewards_PY.shape
        assert self.features_PYD.dtype == self.rewards_PY.dtype == np.float64

    @property
    def probabilities_PY(self) -> np.ndarray:
        """pi(y|x), the probability of each outcome."""
        logits = self.features_PYD @ self.theta_D
        weights = np.exp(logits - logits.max(axis=1, keepdims=True))
        return weights / weights.sum(axis=1, keepdims=True)

    @property
    def scores_PYD(self) -> np.ndarray:
        """grad log pi(y|x), the score of each outcome."""
        mean = np.einsum("py,pyd->pd", self.probabilities_PY, self.features_PYD)
        return self.features_PYD - mean[:, None]

    @property
    def value_P(self) -> np.ndarray:
        """V(x), the mean reward of each prompt."""
        return (self.probabilities_PY * self.rewards_PY).sum(axis=1)

    @property
    def gradient_PD(self) -> np.ndarray:
        """g(x) = E[s z | x], the gradient of each prompt's mean reward."""
        weighted = self.probabilities_PY * self.rewards_PY
        return np.einsum("py,pyd->pd", weighted, self.scores_PYD)

    def moments(self) -> Moments:
        """Exact moments of every prompt."""
        q_PY = np.square(self.scores_PYD).sum(axis=2)
        g_sq_P = np.square(self.gradient_PD).sum(axis=1)
        return exact_moments(q_PY, self.rewards_PY, self.probabilities_PY, g_sq_P)

    def sample(self, count: int, rng: np.random.Generator) -> np.ndarray:
        """`count` outcomes of every prompt, int [P, count]."""
        cumulative = self.probabilities_PY.cumsum(axis=1)
        draws = rng.random((len(cumulative), count))
        return np.array(
            [
                np.searchsorted(c / c[-1], u, side="right")
                for c, u in zip(cumulative, draws, strict=True)
            ]
        )


def known_policy(prompts=30):
    """Prompts of four outcomes each."""
    rng = np.random.default_rng(5)
    features = rng.normal(size=(prompts, 4, 6))
    rewards = (rng.random((prompts, 4)) < 0.5).astype(float)
    theta = 0.5 * rng.normal(size=6)
    theta[0] = 0.4
    return TabularPolicy(features, theta, rewards)
