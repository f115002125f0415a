r"""From gradient errors to the sub-optimality gap Delta = J* - J (paper, Lemma 6, Theorems 7, 8).

With J L-smooth, `|grad J|^2 / 2 >= mu Delta` and a gradient error of at most s2, every step has

    E Delta_{t+1} <= ( 1 - 2 mu eta_t + mu L eta_t^2 ) E Delta_t  +  L eta_t^2 s2 / 2

whose solution for a constant rate eta < 2/L is `r^T Delta_0 + (L eta^2 s2 / 2)(1 - r^T)/(1 - r)`,
and for `eta_t = c/t` with `2 mu c > 1` tends to `L c^2 s2 / (2 (2 mu c - 1)) / T`.

Where J is exactly quadratic with curvature H the recursion for `m = E v v'`, v the distance to the
maximiser, is an equality, `m <- (1 - eta H) m (1 - eta H) + eta^2 Sigma`, `E Delta = tr(H m) / 2`.
"""

from __future__ import annotations

from types import ModuleType

import numpy as np
from scipy.interpolate import PchipInterpolator
from scipy.optimize import brentq
from scipy.stats import chi2

POINTS = 400  # of a distribution function, between which it is interpolated


def recursion(
    first: float, mu: float, smoothness: float, error: float, rates_T: np.ndarray
) -> np.ndarray:
    """The bound on E Delta after 0 ... T steps, [T + 1], from its exact recursion.

    >>> recursion(1.0, 0.5, 1.0, 0.0, np.array([1.0, 1.0])).tolist()
    [1.0, 0.5, 0.25]
    """
    bound = [first]
    for eta in rates_T:
        keeps = 1 - 2 * mu * eta + mu * smoothness * eta**2
        bound.append(keeps * bound[-1] + smoothness * eta**2 * error / 2)
    return np.array(bound)


def decaying_bound(
    mu: float, smoothness: float, error: float, c: float, steps_S: np.ndarray
) -> np.ndarray:
    """`L c^2 s2 / (2 (2 mu c - 1) T)`, the limit's bound for `eta_t = c/t`; for T large.

    Raises:
        ValueError: 2 mu c <= 1.
    """
    if 2 * mu * c <= 1:
        raise ValueError(f"c={c} with mu={mu:.4g}: 2 mu c must exceed 1, use c > {0.5 / mu:.4g}")
    return smoothness * c**2 * error / (2 * (2 * mu * c - 1)) / steps_S


def quadratic_recursion(
    first_K: np.ndarray, curvature_KK: np.ndarray, sigma_KK: np.ndarray, rates_T: np.ndarray
) -> np.ndarray:
    """E Delta after 0 ... T steps of a quadratic J with constant noise, [T + 1]; exact there.

    Args:
        first_K: v_0, the first distance to the maximiser.
        curvature_KK: H.
        sigma_KK: the gradient estimator's covariance.
        rates_T: eta_t.
    """
    moment, found = np.outer(first_K, first_K), []
    for eta in (*rates_T, 0.0):
        found.append(np.trace(curvature_KK @ moment) / 2)
        keeps = np.eye(len(first_K)) - eta * curvature_KK
        moment = keeps @ moment @ keeps + eta**2 * sigma_KK
    return np.array(found)


def limit_weights(curvature_KK: np.ndarray, sigma_KK: np.ndarray, c: float) -> np.ndarray:
    r"""w_j of `T Delta_T -> sum_j w_j chi2_1` for `eta_t = c/t` (Theorem 8), descending, [K].

    In the basis where H is diag(lambda),
    `Gamma_ij = c^2 Sigma_ij / (c (lambda_i + lambda_j) - 1)`, and w are the eigenvalues of
    `H^{1/2} Gamma H^{1/2} / 2`.

    Raises:
        ValueError: 2 c lambda_min <= 1.

    >>> limit_weights(np.eye(1), np.eye(1), 1.0).tolist()
    [0.5]
    """
    lambda_K, basis = np.linalg.eigh(curvature_KK)
    if 2 * c * lambda_K[0] <= 1:
        raise ValueError(
            f"c={c} with smallest curvature {lambda_K[0]:.4g}: 2 c lambda must exceed 1, use "
            f"c > {0.5 / lambda_K[0]:.4g}"
        )
    sigma = basis.T @ sigma_KK @ basis
    gamma = c**2 * sigma / (c * (lambda_K[:, None] + lambda_K) - 1)
    root = np.sqrt(lambda_K)
    return np.linalg.eigvalsh(root[:, None] * gamma * root / 2)[::-1]


def mixture_cdf(weights_K: np.ndarray, values: np.ndarray) -> np.ndarray:
    """P(sum_j w_j chi2_1 <= x) by gx2 (Das & Geisler), interpolated between POINTS of its values.

    Raises:
        ImportError: without gx2.
    """
    top = max(float(np.max(values)), float(weights_K.sum()))
    # chi2_1 has a density like x^(-1/2) at 0: points crowd there
    points = top * np.linspace(0, 1, POINTS) ** 3
    known = np.array(_gx2().cdf(points[1:], *_mixture(weights_K)), dtype=float)
    known = np.maximum.accumulate(np.clip(np.concatenate([[0.0], known]), 0, 1))
    return PchipInterpolator(np.sqrt(points), known)(np.sqrt(np.clip(values, 0, top)))


def mixture_quantiles(weights_K: np.ndarray, levels: np.ndarray) -> np.ndarray:
    """Quantiles of `sum_j w_j chi2_1`, from gx2's distribution function."""
    cdf, law = _gx2().cdf, _mixture(weights_K)
    top = float(weights_K.sum()) * float(chi2.ppf(max(levels), 1))  # the one with all weight on one

    def above(x: float, level: float) -> float:
        return float(cdf(x, *law)) - level

    return np.array([brentq(above, 0.0, 2 * top, args=(level,)) for level in levels])


def _gx2() -> ModuleType:
    import gx2

    return gx2


def _mixture(weights_K: np.ndarray) -> tuple:
    count = len(weights_K)
    return list(map(float, weights_K)), [1] * count, [0] * count, 0, 0
