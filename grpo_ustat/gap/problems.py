r"""Test problems with exactly computable J, maximum, gradient, curvature and covariances.

J is the expected reward of a policy. The policy has parameters theta in R^D but depends only on the
coordinates `u = Q theta` in R^K, where Q has orthonormal rows. The maximisers of J in theta
therefore form a flat set of dimension D - K. All quantities are functions of u, whatever Q is, and
are computed exactly by enumerating all Y outcomes y of every prompt x. Prompts are drawn uniformly.

Arrays hold R replicates of a simulation. R is the last axis of every array, because this layout is
the fastest.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass
from functools import cached_property
from itertools import product

import numpy as np

# Number of points of the grid in `Problem.sublevel_grid` along each coordinate.
GRID_POINTS = 41


@dataclass(frozen=True, kw_only=True)
class Problem(ABC):
    """Base class of test problems; subclasses define `law` and `curvature_at`."""

    # Rewards r(x, y).
    rewards_PY: np.ndarray
    # Number of parameters, D.
    parameters: int
    # Coordinates u of the initial policy.
    start_K: np.ndarray
    # Largest gap J* - J in the sublevel set `J* - J <= reach`. The theory is tested on this set.
    reach: float

    @property
    def box_K(self) -> np.ndarray:
        """Largest allowed distance |u_k - u*_k| from the maximiser u* along each coordinate.

        Simulations project u to this box. The distance is infinite if every u defines a policy.
        """
        return np.full(len(self.start_K), np.inf)

    @abstractmethod
    def law(self, u_KR: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Return the probabilities [P, Y, R] and the scores d log pi / du [P, Y, K, R]."""

    @abstractmethod
    def curvature_at(self, u_K: np.ndarray) -> np.ndarray:
        """Return the curvature -d^2 J / du du' at u, [K, K]."""

    def value(self, probability_PYR: np.ndarray) -> np.ndarray:
        """Return the expected reward V(x) of each prompt, [P, R]."""
        return np.einsum("pyr,py->pr", probability_PYR, self.rewards_PY)

    def objective(self, u_KR: np.ndarray) -> np.ndarray:
        """Return J, the mean of V(x) over prompts, [R]."""
        return self.value(self.law(u_KR)[0]).mean(axis=0)

    def gradient(self, u_KR: np.ndarray) -> np.ndarray:
        """Return the gradient dJ/du, [K, R]."""
        probability_PYR, score_PYKR = self.law(u_KR)
        weighted = probability_PYR * self.rewards_PY[..., None]
        return np.einsum("pyr,pykr->kr", weighted, score_PYKR) / len(self.rewards_PY)

    def gap(self, u_KR: np.ndarray) -> np.ndarray:
        """Return the gap J* - J, where J* is the maximum of J, [R]."""
        return self.highest - self.objective(u_KR)

    @cached_property
    def best_K(self) -> np.ndarray:
        """Maximiser of J, computed by Newton's method starting at 0."""
        u_K = np.zeros(len(self.start_K))
        for _ in range(50):
            u_K = u_K + np.linalg.solve(self.curvature_at(u_K), self.gradient(u_K[:, None])[:, 0])
        return u_K

    @property
    def curved(self) -> int:
        """Number of coordinates of u along which J curves at its maximisers.

        They are the first coordinates. J is flat along the others.
        """
        return len(self.start_K)

    def limits(self, u_KR: np.ndarray) -> np.ndarray:
        """Return the maximiser nearest to each u, [K, R]; [K, 1] if there is only one maximiser."""
        return self.best_K[:, None]

    @property
    def least_curvature(self) -> float:
        """Smallest curvature at any maximiser; directions in which J is flat do not count."""
        return float(np.linalg.eigvalsh(self.curvature_KK)[0])

    @cached_property
    def highest(self) -> float:
        """The maximum J* of J."""
        return float(self.objective(self.best_K[:, None])[0])

    @cached_property
    def curvature_KK(self) -> np.ndarray:
        """Curvature -d^2 J / du du' at the maximiser."""
        return self.curvature_at(self.best_K)

    def sublevel_grid(self) -> np.ndarray:
        """Return points of the sublevel set, on a grid around the maximiser, [K, points].

        The half-widths of the grid are first computed from the quadratic approximation of J. They
        are increased until the border of the grid lies outside the sublevel set.
        """
        half_K = np.sqrt(2 * self.reach * np.diag(np.linalg.inv(self.curvature_KK)))
        for _ in range(60):
            axes = [np.linspace(-half, half, GRID_POINTS) for half in half_K]
            grid_KR = self.best_K[:, None] + np.array(list(product(*axes))).T
            inside_R = self.gap(grid_KR) <= self.reach
            edge_R = (np.abs(grid_KR - self.best_K[:, None]) > 0.999 * half_K[:, None]).any(axis=0)
            if not (inside_R & edge_R).any():
                return grid_KR[:, inside_R]
            half_K = 1.1 * half_K
        raise ValueError(f"the sublevel set J* - J <= {self.reach} is unbounded: lower reach")

    @cached_property
    def constants(self) -> tuple[float, float]:
        """Constants (mu, L), computed on a grid of the sublevel set.

        mu is the constant of the Polyak-Lojasiewicz inequality `|dJ|^2 / 2 >= mu (J* - J)`, and L
        is the smoothness constant.
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
class CoinProblem(Problem):
    r"""Test problem in which each completion is a toss of two coins, the answer and the style.

    The answer to prompt x is right with probability
    `p_x = v_x + a_x' u - sum_k lambda_k u_k^2 / 2` and then has reward 1. The style is heads with
    probability `1/2 + n_x' u`. It earns no reward and only adds noise to the score (the gradient of
    the log-probability). There are four outcomes: right or wrong, each with heads or tails.

    Since the slopes a_x have mean zero over prompts, J is exactly quadratic,
    `J = mean v - u' diag(lambda) u / 2`. The constant mu of the Polyak-Lojasiewicz inequality is
    the smallest lambda, and the smoothness constant L is the largest. If all `v_x = 1/2` and all
    n_x = 0, Assumption 2 holds exactly at the maximiser.
    """

    # Probability v of a right answer at u = 0.
    value_P: np.ndarray
    # Slopes a of the probability of a right answer.
    slope_PK: np.ndarray
    # Slopes n of the probability of heads.
    style_PK: np.ndarray
    # Curvatures, lambda.
    lambda_K: np.ndarray

    @property
    def box_K(self) -> np.ndarray:
        """Half-widths of the smallest box that contains the sublevel set."""
        return np.sqrt(2 * self.reach / self.lambda_K)

    def law(self, u_KR: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Return probabilities and scores; see `Problem.law`."""
        bend_R = (self.lambda_K[:, None] * np.square(u_KR)).sum(axis=0) / 2
        right_PR = self.value_P[:, None] + self.slope_PK @ u_KR - bend_R
        heads_PR = 0.5 + self.style_PK @ u_KR
        slope_PKR = self.slope_PK[..., None] - self.lambda_K[:, None] * u_KR
        style_PKR = np.broadcast_to(self.style_PK[..., None], slope_PKR.shape)
        return _two_coins((right_PR, slope_PKR), (heads_PR, style_PKR))

    def curvature_at(self, u_K: np.ndarray) -> np.ndarray:
        """Return the curvature, which is the same for every u."""
        return np.diag(self.lambda_K)

    @cached_property
    def constants(self) -> tuple[float, float]:
        """Exact constants (mu, L), the smallest and the largest curvature."""
        return float(self.lambda_K.min()), float(self.lambda_K.max())


@dataclass(frozen=True, kw_only=True)
class RidgeCoinProblem(Problem):
    r"""Coin problem with a ridge of maximisers: u = (v, w), J curves along v and is flat along w.

    As in `CoinProblem`, a completion is a toss of two coins. The answer to prompt x is right with
    probability `p_x = v_x + a_x v - lambda(w) v^2 / 2`, where `lambda(w) = lambda (1 + rho w)`. The
    style earns no reward and is heads with probability `1/2 + n_x (1 + kappa w) v + m_x w`.

    Since the slopes a_x have mean zero over prompts, `J = mean v_x - lambda(w) v^2 / 2`. J is
    largest at v = 0 for any w. These maximisers have different curvature and noise. Each replicate
    converges to a random w, since the sum over steps of the squared learning rates is finite.
    """

    # Probability v_x of a right answer at v = 0.
    value_P: np.ndarray
    # Slopes a of the probability of a right answer along v.
    slope_P: np.ndarray
    # Slopes n of the probability of heads along v.
    style_P: np.ndarray
    # Slopes m of the probability of heads along w.
    along_P: np.ndarray
    # Curvature lambda at w = 0.
    curvature: float
    # Relative change rho of the curvature along w.
    bend: float
    # Relative change kappa of the style slopes along w.
    spread: float
    # Largest allowed |w|, enforced by projection.
    width: float

    @property
    def curved(self) -> int:
        """Always 1, since J curves along v and is flat along w."""
        return 1

    def limits(self, u_KR: np.ndarray) -> np.ndarray:
        """Return the maximiser nearest to each u = (v, w) by setting v to 0 and keeping w."""
        return np.stack([np.zeros_like(u_KR[1]), u_KR[1]])

    @property
    def least_curvature(self) -> float:
        """Smallest curvature along the ridge within the box."""
        return self.curvature * (1 - abs(self.bend) * self.width)

    @cached_property
    def best_K(self) -> np.ndarray:
        """Maximiser in the middle of the ridge."""
        return np.zeros(2)

    @property
    def box_K(self) -> np.ndarray:
        """Half-widths of the smallest box that contains the sublevel set."""
        return np.array([np.sqrt(2 * self.reach / self.least_curvature), self.width])

    def law(self, u_KR: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Return probabilities and scores, see `Problem.law`."""
        v_R, w_R = u_KR
        lambda_R = self.curvature * (1 + self.bend * w_R)
        right_PR = self.value_P[:, None] + self.slope_P[:, None] * v_R - lambda_R * v_R**2 / 2
        bent_R = -self.curvature * self.bend * v_R**2 / 2
        slope_PKR = np.stack(
            [self.slope_P[:, None] - lambda_R * v_R, np.broadcast_to(bent_R, right_PR.shape)],
            axis=1,
        )
        style_PR = self.style_P[:, None] * (1 + self.spread * w_R)
        heads_PR = 0.5 + style_PR * v_R + self.along_P[:, None] * w_R
        along_PR = self.style_P[:, None] * self.spread * v_R + self.along_P[:, None]
        style_PKR = np.stack([style_PR, along_PR], axis=1)
        return _two_coins((right_PR, slope_PKR), (heads_PR, style_PKR))

    def curvature_at(self, u_K: np.ndarray) -> np.ndarray:
        """Return the curvature at u, see `Problem.curvature_at`."""
        across = self.curvature * self.bend * u_K[0]
        return np.array([[self.curvature * (1 + self.bend * u_K[1]), across], [across, 0.0]])

    def sublevel_grid(self) -> np.ndarray:
        """Return the points of a grid over the box that lie in the sublevel set, [K, points]."""
        axes = [np.linspace(-half, half, GRID_POINTS) for half in self.box_K]
        grid_KR = np.array(list(product(*axes))).T
        return grid_KR[:, self.gap(grid_KR) <= self.reach]

    @cached_property
    def constants(self) -> tuple[float, float]:
        """Constants (mu, L) on the sublevel set.

        mu is the smallest lambda(w), since `|dJ|^2 / 2 >= lambda(w) (J* - J)`. L is the largest
        norm of the curvature on a grid.
        """
        norms = [np.linalg.norm(self.curvature_at(u_K), 2) for u_K in self.sublevel_grid().T]
        return self.least_curvature, float(max(norms))


def _two_coins(answer: tuple, style: tuple) -> tuple[np.ndarray, np.ndarray]:
    """Return probabilities and scores of the four joint outcomes of two independent coins.

    Args:
        answer: probability of the first side of the answer's coin, [P, R], and its derivative with
            respect to u, [P, K, R].
        style: the same two arrays for the style's coin.
    """
    (right_PR, slope_PKR), (heads_PR, style_PKR) = answer, style
    answers = [(right_PR, slope_PKR), (1 - right_PR, -slope_PKR)]
    styles = [(heads_PR, style_PKR), (1 - heads_PR, -style_PKR)]
    pairs = list(product(answers, styles))
    probability = np.stack([a * b for (a, _), (b, _) in pairs], axis=1)
    scores = [da / a[:, None] + db / b[:, None] for (a, da), (b, db) in pairs]
    return probability, np.stack(scores, axis=1)


def _coin_rewards(prompts: int) -> np.ndarray:
    """Return the rewards of the four joint outcomes, [P, 4]."""
    return np.tile([1.0, 1.0, 0.0, 0.0], (prompts, 1))


@dataclass(frozen=True, kw_only=True)
class SoftmaxProblem(Problem):
    r"""Test problem with the softmax policy `pi(y|x)` proportional to `exp( phi_y' u + o_xy )`.

    All prompts share the features phi but have different offsets o. The best u differs between
    prompts, so the maximiser is finite. J is bounded on R^K, so a Polyak-Lojasiewicz inequality
    cannot hold for all u. The constants mu and L are therefore computed on the sublevel set, and
    replicates that leave the set are counted.
    """

    # Features, phi.
    feature_YK: np.ndarray
    # Offsets of the logits, o.
    offset_PY: np.ndarray

    def law(self, u_KR: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Return probabilities and scores, see `Problem.law`."""
        logits_PYR = (self.feature_YK @ u_KR)[None] + self.offset_PY[..., None]
        weights_PYR = np.exp(logits_PYR - logits_PYR.max(axis=1, keepdims=True))
        probability_PYR = weights_PYR / weights_PYR.sum(axis=1, keepdims=True)
        mean_PKR = np.einsum("pyr,yk->pkr", probability_PYR, self.feature_YK)
        return probability_PYR, self.feature_YK[None, ..., None] - mean_PKR[:, None]

    def curvature_at(self, u_K: np.ndarray) -> np.ndarray:
        """Return the curvature at u, which is `-E[(r - V) s s']` with scores s."""
        probability_PYR, score_PYKR = self.law(u_K[:, None])
        value_P1 = self.value(probability_PYR)
        weight_PY = probability_PYR[..., 0] * (self.rewards_PY - value_P1)
        score = score_PYKR[..., 0]
        return -np.einsum("py,pyk,pyl->kl", weight_PY, score, score) / len(self.rewards_PY)


def _softmax() -> SoftmaxProblem:
    features = np.array([[2.0, 0.0], [-2.0, 0.0], [0.0, 2.0], [0.0, -2.0], [0.0, 0.0]])
    # Points u at which all outcomes of a prompt have equal probability.
    centres = np.array([[0.4, 0.0], [-0.4, 0.0], [0.0, 0.3], [0.0, -0.3]])
    return SoftmaxProblem(
        rewards_PY=np.tile([0.0, 0.0, 0.0, 0.0, 1.0], (4, 1)), parameters=8,
        start_K=np.array([0.25, 0.2]), reach=0.05,
        feature_YK=features, offset_PY=-centres @ features.T,
    )  # fmt: skip


# Choices of `theorem.problem=`, except `sequences`, which is in `gap.sequences`.
PROBLEMS: dict[str, Problem] = {
    # J is exactly quadratic, and Assumption 2 holds at its maximiser.
    "coins": CoinProblem(
        rewards_PY=_coin_rewards(4), parameters=8, start_K=np.array([0.2, 0.2]), reach=0.1,
        value_P=np.full(4, 0.5), lambda_K=np.array([1.0, 0.6]),
        slope_PK=np.array([[0.25, 0.125], [-0.25, 0.125], [0.125, -0.25], [-0.125, 0.0]]),
        style_PK=np.array([[0.63, 0.09], [-0.63, 0.09], [0.63, -0.09], [-0.63, -0.09]]),
    ),
    # An easy and a hard prompt, whose gradients have opposite directions.
    "unequal_coins": CoinProblem(
        rewards_PY=_coin_rewards(2), parameters=4, start_K=np.array([0.1]), reach=0.1,
        value_P=np.array([0.5, 0.88]), lambda_K=np.array([1.0]),
        slope_PK=np.array([[0.15], [-0.15]]), style_PK=np.zeros((2, 1)),
    ),
    # The noise is large where J curves little. The best G depends on T and the learning rate.
    "uneven_coins": CoinProblem(
        rewards_PY=_coin_rewards(2), parameters=8, start_K=np.zeros(2), reach=0.02,
        value_P=np.full(2, 0.5), lambda_K=np.array([1.0, 0.1]),
        slope_PK=np.array([[0.3, 0.0], [-0.3, 0.0]]), style_PK=np.array([[0.0, 0.7], [0.0, -0.7]]),
    ),
    # The styles cause noise along v, and `along` causes noise along w. They are uncorrelated.
    "ridge_coins": RidgeCoinProblem(
        rewards_PY=_coin_rewards(4), parameters=8, start_K=np.array([0.1, 0.0]), reach=0.012,
        value_P=np.full(4, 0.5), slope_P=np.array([0.1, -0.1, 0.1, -0.1]),
        style_P=np.array([0.4, 0.4, -0.4, -0.4]), along_P=np.array([0.6, -0.6, -0.6, 0.6]),
        curvature=1.0, bend=0.8, spread=1.8, width=0.5,
    ),
    # Four prompts share two coordinates but have different optima. Assumption 2 is violated.
    "softmax": _softmax(),
}  # fmt: skip
