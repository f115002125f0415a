r"""Bounds on the sub-optimality gap Delta = J* - J (paper, Lemma 6, Theorems 7, 8).

J is the expected reward, and J* is its maximum. Assume that J is L-smooth, that
`|grad J|^2 / 2 >= mu Delta`, and that the gradient's mean squared error is at most s2. With the
learning rate eta_t, every step then satisfies

    E Delta_{t+1} <= ( 1 - 2 mu eta_t + mu L eta_t^2 ) E Delta_t  +  L eta_t^2 s2 / 2

Let r be the factor in front of `E Delta_t`. For a constant learning rate eta < 2/L, the bound after
T steps is `r^T Delta_0 + (L eta^2 s2 / 2)(1 - r^T)/(1 - r)`. For `eta_t = c/t` with `2 mu c > 1`,
the bound approaches `L c^2 s2 / (2 (2 mu c - 1)) / T` as T grows.

If J is exactly quadratic with curvature H, and the gradient estimator has covariance Sigma, the gap
itself can be computed. Let v be the displacement from the maximiser, and `m = E v v'`. Each step
replaces m by `(1 - eta H) m (1 - eta H) + eta^2 Sigma`, and the mean gap is
`E Delta = tr(H m) / 2`.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
from scipy.interpolate import PchipInterpolator
from scipy.stats import chi2

from grpo_ustat.records import Array

# Number of points at which a distribution function is computed; it is interpolated between them.
DISTRIBUTION_POINTS = 400
# Number of points between which quantiles are interpolated.
QUANTILE_POINTS = 20_000


def recursion(first: float, mu: float, smoothness: float, error: float, rates_T: Array) -> Array:
    """Return the bounds on E Delta after 0 ... T steps, computed by the recursion, [T + 1].

    Args:
        first: gap before the first step, Delta_0.
        mu, smoothness, error: the constants mu, L and s2 of the recursion.
        rates_T: learning rates eta_t of the T steps.

    >>> recursion(1.0, 0.5, 1.0, 0.0, np.array([1.0, 1.0])).tolist()
    [1.0, 0.5, 0.25]
    """
    bound = [first]
    for eta in rates_T:
        contraction = 1 - 2 * mu * eta + mu * smoothness * eta**2
        bound.append(contraction * bound[-1] + smoothness * eta**2 * error / 2)
    return np.array(bound)


def decaying_bound(mu: float, smoothness: float, error: float, c: float, steps_S: Array) -> Array:
    """Return `L c^2 s2 / (2 (2 mu c - 1) T)`, the bound for `eta_t = c/t` and large T.

    Args:
        mu, smoothness, error: the constants mu, L and s2 of the recursion.
        c: numerator of the learning rate.
        steps_S: numbers of steps T at which the bound is computed.

    Raises:
        ValueError: If 2 mu c <= 1.
    """
    if 2 * mu * c <= 1:
        raise ValueError(f"c={c} with mu={mu:.4g}: 2 mu c must exceed 1, use c > {0.5 / mu:.4g}")
    return smoothness * c**2 * error / (2 * (2 * mu * c - 1)) / steps_S


def quadratic_recursion(
    first_K: Array, curvature_KK: Array, sigma_KK: Array, rates_T: Array
) -> Array:
    """Return E Delta after 0 ... T steps, [T + 1].

    The result is exact if J is quadratic and the estimator's covariance is the same everywhere.

    Args:
        first_K: initial displacement v_0 from the maximiser.
        curvature_KK: curvature, H.
        sigma_KK: covariance of the gradient estimator, Sigma.
        rates_T: learning rates, eta_t.
    """
    moment_KK = np.outer(first_K, first_K)
    gaps: list[float] = []
    for eta in (*rates_T, 0.0):
        gaps.append(np.trace(curvature_KK @ moment_KK) / 2)
        contraction_KK = np.eye(len(first_K)) - eta * curvature_KK
        moment_KK = contraction_KK @ moment_KK @ contraction_KK + eta**2 * sigma_KK
    return np.array(gaps)


def limit_weights(curvature_KK: Array, sigma_KK: Array, c: float) -> Array:
    r"""Return the weights w_j of the gap's limit law, in descending order, [K].

    Theorem 8 states that for `eta_t = c/t` the law of `T Delta_T` converges to the law of
    `sum_j w_j chi2_1`, a weighted sum of independent chi-square variables. The weights are the
    eigenvalues of `H^{1/2} Gamma H^{1/2} / 2`. In the basis in which the curvature H is
    diag(lambda), Gamma is `Gamma_ij = c^2 Sigma_ij / (c (lambda_i + lambda_j) - 1)`.

    Args:
        curvature_KK: curvature H in the K coordinates of the policy.
        sigma_KK: covariance of the gradient estimator, Sigma.
        c: numerator of the learning rate.

    Raises:
        ValueError: If 2 c lambda_min <= 1.

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
    return np.linalg.eigvalsh(root[:, None] * gamma * root / 2)[::-1].astype(np.float64)


def mixture_cdf(weights_K: Array, values: Array) -> Array:
    """Return P(sum_j w_j chi2_1 <= x) for each x in `values`.

    The package gx2 (Das & Geisler) computes the probability at `DISTRIBUTION_POINTS` points; it is
    interpolated between them.

    Raises:
        ModuleNotFoundError: If gx2 is not installed; the extra [cli] includes it.
    """
    import gx2  # pyright: ignore[reportMissingTypeStubs]

    top = max(float(np.max(values)), float(weights_K.sum()))
    # The points are denser near 0, where the density of chi2_1 diverges like x^(-1/2).
    points = top * np.linspace(0, 1, DISTRIBUTION_POINTS) ** 3
    count = len(weights_K)
    mixture = list(map(float, weights_K)), [1] * count, [0] * count, 0, 0
    # The package gx2 has no type annotations.
    gx2_cdf: Callable[..., Array] = vars(gx2)["cdf"]
    cdf = np.array(gx2_cdf(points[1:], *mixture), dtype=float)
    cdf = np.maximum.accumulate(np.clip(np.concatenate([[0.0], cdf]), 0, 1))
    return PchipInterpolator(np.sqrt(points), cdf)(np.sqrt(np.clip(values, 0, top)))


def mixture_quantiles(weights_K: Array, levels: Array) -> Array:
    """Return the quantiles of `sum_j w_j chi2_1` at the given levels, from `mixture_cdf`."""
    # Upper limit of the quantiles: for a given total weight, the quantile is largest if all of the
    # weight is on a single chi2_1.
    top = float(weights_K.sum()) * float(chi2.ppf(np.max(levels), 1))
    points = 2 * top * np.linspace(0, 1, QUANTILE_POINTS) ** 3
    return np.interp(levels, mixture_cdf(weights_K, points), points)
