r"""Policies whose whole truth is known: J, its maximum, gradient, curvature and all covariances.

A bed has parameters theta in R^D, of which the policy sees `u = Q theta` in R^K alone (Q has
orthonormal rows), so that its maximisers form a flat set of dimension D - K. Everything is a
function of u and enumerated over the outcomes y of every prompt x, drawn uniformly. Replicates R
come last in every shape, where arithmetic on them is fastest.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass
from functools import cached_property
from itertools import product

import numpy as np

LEAST = 0.02  # probability that any outcome of a coin keeps within the box
CELLS = 41  # of a grid, along each coordinate


@dataclass(frozen=True, kw_only=True)
class Bed(ABC):
    """What all beds share; a kind of bed says `law` and `curvature_at`.

    Attributes:
        rewards_PY: r(x, y).
        projection_KD: Q, orthonormal rows.
        start_K: u of the first policy.
        reach: the sublevel set `J* - J <= reach` is where theory is asked to hold.
        box_K: |u_k - u*_k| stays within, as a projection; infinite where any u is a policy.
    """

    rewards_PY: np.ndarray
    projection_KD: np.ndarray
    start_K: np.ndarray
    reach: float

    @property
    def box_K(self) -> np.ndarray:
        """No box."""
        return np.full(len(self.start_K), np.inf)

    @abstractmethod
    def law(self, u_KR: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Probabilities [P, Y, R] and scores d log pi / d u [P, Y, K, R]."""

    @abstractmethod
    def curvature_at(self, u_K: np.ndarray) -> np.ndarray:
        """-d^2 J / du du', [K, K]."""

    def value(self, probability_PYR: np.ndarray) -> np.ndarray:
        """V(x), [P, R]."""
        return np.einsum("pyr,py->pr", probability_PYR, self.rewards_PY)

    def objective(self, u_KR: np.ndarray) -> np.ndarray:
        """J, [R]."""
        return self.value(self.law(u_KR)[0]).mean(axis=0)

    def gradient(self, u_KR: np.ndarray) -> np.ndarray:
        """dJ/du, [K, R]."""
        probability_PYR, score_PYKR = self.law(u_KR)
        weighted = probability_PYR * self.rewards_PY[..., None]
        return np.einsum("pyr,pykr->kr", weighted, score_PYKR) / len(self.rewards_PY)

    def gap(self, u_KR: np.ndarray) -> np.ndarray:
        """J* - J, [R]."""
        return self.highest - self.objective(u_KR)

    @cached_property
    def best_K(self) -> np.ndarray:
        """The maximiser next to 0, by Newton's method."""
        u_K = np.zeros(len(self.start_K))
        for _ in range(50):
            u_K = u_K + np.linalg.solve(self.curvature_at(u_K), self.gradient(u_K[:, None])[:, 0])
        return u_K

    @cached_property
    def highest(self) -> float:
        """J*."""
        return float(self.objective(self.best_K[:, None])[0])

    @cached_property
    def curvature_KK(self) -> np.ndarray:
        """-d^2 J / du du' at the maximiser."""
        return self.curvature_at(self.best_K)

    def sublevel_grid(self) -> np.ndarray:
        """Points of the sublevel set, [K, points], on a grid about the maximiser.

        Its half-widths are those of the quadratic model, stretched until no point of the grid's
        border is within.
        """
        half_K = np.sqrt(2 * self.reach * np.diag(np.linalg.inv(self.curvature_KK)))
        for _ in range(60):
            axes = [np.linspace(-half, half, CELLS) for half in half_K]
            grid_KR = self.best_K[:, None] + np.array(list(product(*axes))).T
            inside_R = self.gap(grid_KR) <= self.reach
            edge_R = (np.abs(grid_KR - self.best_K[:, None]) > 0.999 * half_K[:, None]).any(axis=0)
            if not (inside_R & edge_R).any():
                return grid_KR[:, inside_R]
            half_K = 1.1 * half_K
        raise ValueError(f"the sublevel set J* - J <= {self.reach} has no end: lower reach")

    @cached_property
    def constants(self) -> tuple[float, float]:
        """(mu, L): of the Polyak-Lojasiewicz inequality `|dJ|^2 / 2 >= mu (J* - J)` and of
        smoothness, both on a grid of the sublevel set.
        """
        grid_KR = self.sublevel_grid()
        gap_R, slope_R = self.gap(grid_KR), np.square(self.gradient(grid_KR)).sum(axis=0)
        far_R = gap_R > 1e-9 * self.reach
        local = np.linalg.eigvalsh(self.curvature_KK)
        curvatures = [np.abs(np.linalg.eigvalsh(self.curvature_at(u))).max() for u in grid_KR.T]
        return (
            float(min((slope_R[far_R] / (2 * gap_R[far_R])).min(), local[0])),
            float(max(*curvatures, local[-1])),
        )


@dataclass(frozen=True, kw_only=True)
class Coins(Bed):
    r"""Answers that are coins: right with `p_x = v_x + a_x' u - sum_k lambda_k u_k^2 / 2`.

    Beside its answer a completion shows a matter of style, heads with `1/2 + n_x' u`, which earns
    nothing: noise in the score. Outcomes: right or wrong, with heads or tails. The slopes a_x have
    mean zero, so J is exactly quadratic: `J = mean v - u' diag(lambda) u / 2`, mu the smallest and
    L the largest lambda, everywhere. With all `v_x = 1/2` and no style Assumption 2 holds exactly
    at the maximiser.

    Attributes:
        value_P, slope_PK, style_PK, curvature_K: v, a, n, lambda.
    """

    value_P: np.ndarray
    slope_PK: np.ndarray
    style_PK: np.ndarray
    lambda_K: np.ndarray

    def __post_init__(self):
        if np.abs(self.slope_PK.mean(axis=0)).max() > 1e-12:
            raise ValueError(f"slopes {self.slope_PK.tolist()} must have mean 0 over prompts")
        probability = self.law(self._corners())[0]
        if probability.min() < LEAST**2:
            raise ValueError(
                f"reach={self.reach} lets a probability fall to {probability.min():.3g}: lower it"
            )

    @property
    def box_K(self) -> np.ndarray:
        """The smallest that holds the sublevel set."""
        return np.sqrt(2 * self.reach / self.lambda_K)

    def _corners(self) -> np.ndarray:
        """Where probabilities, concave or linear in u, are smallest."""
        return np.array(list(product(*([-b, b] for b in self.box_K)))).T

    def law(self, u_KR: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """See `Bed.law`."""
        bend_R = (self.lambda_K[:, None] * np.square(u_KR)).sum(axis=0) / 2
        right_PR = self.value_P[:, None] + self.slope_PK @ u_KR - bend_R
        heads_PR = 0.5 + self.style_PK @ u_KR
        slope_PKR = self.slope_PK[..., None] - self.lambda_K[:, None] * u_KR
        style_PKR = np.broadcast_to(self.style_PK[..., None], slope_PKR.shape)
        answers = [(right_PR, slope_PKR), (1 - right_PR, -slope_PKR)]
        styles = [(heads_PR, style_PKR), (1 - heads_PR, -style_PKR)]
        pairs = list(product(answers, styles))
        probability = np.stack([a * b for (a, _), (b, _) in pairs], axis=1)
        scores = [da / a[:, None] + db / b[:, None] for (a, da), (b, db) in pairs]
        return probability, np.stack(scores, axis=1)

    def curvature_at(self, u_K: np.ndarray) -> np.ndarray:
        """See `Bed.curvature_at`; the same everywhere."""
        return np.diag(self.lambda_K)

    @cached_property
    def constants(self) -> tuple[float, float]:
        """See `Bed.constants`; exact."""
        return float(self.lambda_K.min()), float(self.lambda_K.max())


@dataclass(frozen=True, kw_only=True)
class Softmax(Bed):
    r"""A tabular softmax policy, `pi(y|x) ~ exp( phi_y' u + o_xy )`.

    The features phi are shared by the prompts, whose offsets o pull them apart: no u suits all, so
    the maximiser is finite. No inequality holds for all u (a bounded J on all of R^K has none):
    mu and L are those of the sublevel set, from which replicates that leave it are counted.

    Attributes:
        feature_YK, offset_PY: phi, o.
    """

    feature_YK: np.ndarray
    offset_PY: np.ndarray

    def law(self, u_KR: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """See `Bed.law`."""
        logits_PYR = (self.feature_YK @ u_KR)[None] + self.offset_PY[..., None]
        weights_PYR = np.exp(logits_PYR - logits_PYR.max(axis=1, keepdims=True))
        probability_PYR = weights_PYR / weights_PYR.sum(axis=1, keepdims=True)
        mean_PKR = np.einsum("pyr,yk->pkr", probability_PYR, self.feature_YK)
        return probability_PYR, self.feature_YK[None, ..., None] - mean_PKR[:, None]

    def curvature_at(self, u_K: np.ndarray) -> np.ndarray:
        """See `Bed.curvature_at`: `-E[(r - V) s s']`."""
        probability_PYR, score_PYKR = self.law(u_K[:, None])
        value_P1 = self.value(probability_PYR)
        weight_PY = probability_PYR[..., 0] * (self.rewards_PY - value_P1)
        score = score_PYKR[..., 0]
        return -np.einsum("py,pyk,pyl->kl", weight_PY, score, score) / len(self.rewards_PY)


def projection(coordinates: int, parameters: int, seed: int) -> np.ndarray:
    """Q: orthonormal rows in a random direction, [K, D]; the identity where K = D."""
    if coordinates == parameters:
        return np.eye(coordinates)
    normal = np.random.Generator(np.random.Philox(seed)).standard_normal((parameters, coordinates))
    return np.linalg.qr(normal)[0].T
