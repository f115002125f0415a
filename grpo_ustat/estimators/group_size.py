r"""Decision on the group size: a G whose error is close to the least one, or "not decided".

At a fixed number of rollouts the error at G, relative to that at another size, depends on the data
through the ratio k = C3/C1 and, weakly, through C2/C3:

    n MSE / C3 = G/k + C2/C3 + 1/(G-1)              G* = 1 + sqrt(k)

C1 is what is hard to know. A statement that is made only where C1 is significantly above 0 is made
mostly where C1 came out wrong, so k has a posterior instead. Its likelihood is that of Fieller's
(1954) statistic C1 - C3/k, Student's t. Its prior is weak and stated, and a statement is made only
where it holds under every prior of a class (Berger 1985, section 4.7): for pi = 2 C1/C3, which lies
in (0, 1] for any policy, the densities `a pi^(a-1)` with a = 1/4 and a = 3/4. The medians of G* are
6.7 and 3.2, and 17 and 0.5 % of the prior lie above G* = 48.

Prompts that were not drawn do not show. Where few of them carry the signal, C1 and its standard
error are too small together. So the variance of C1 at a hypothetical C1 = C3/k has a part
`kappa (C3/k)^2 / m_eff` with kappa = 2.25. `m_eff` is the effective number of prompts behind C3,
`1 / (1/m + Var(C3)/C3^2)`, since prompts with rewards that hardly vary tell nothing of C1 either.

Of the statements made, `scripts/benchmarks/decisions.py` counts the wrong ones, on populations with
G* from 2.5 to 48; its table is in docs/benchmarks.md.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import NamedTuple

import numpy as np
from scipy.special import stdtrit  # pyright: ignore[reportUnknownVariableType]

from grpo_ustat.estimators.intervals import CONFIDENCE, Interval, fieller_set, pooled_dof
from grpo_ustat.records import Array

CONSTANTS = ("c1", "c2", "c3")
# Group sizes are looked for up to here.
MAX_GROUP_SIZE = 1e6
# Exponents a of the prior densities of 2 C1/C3.
PRIOR_EXPONENTS = (0.25, 0.75)
# Variance of C1 that undrawn prompts may add, times m_eff / C1^2.
UNDRAWN_VARIANCE = 2.25
# Effective number of prompts below which nothing is decided.
MIN_EFFECTIVE_PROMPTS = 16
# Extra error that the chosen size may have, the smaller one first.
TOLERANCES = (0.05, 0.10)
PROBABILITY = 0.95
# Probability that an error said to be within .10 is within .05.
CLOSE_PROBABILITY = 0.80
# The sizes among which G* counts as decided whatever the number of rollouts.
USUAL_SIZES = tuple(2**power for power in range(1, 9))
# The critical value of a lower end without an upper one is so many times Student's t: it is given
# mostly where C1 came out too small.
ONE_SIDED_FACTOR = 2.0
LOG_RATIOS = np.linspace(math.log(2), math.log(2e4), 400)
MAX_PROMPTS = 10**6
COUNTS = 50
SIMULATED_STUDIES = 200


def best_group_size(
    c1: Array | float,
    c2: Array | float,
    c3: Array | float,
    prompt_cost: float = 0.0,
    completion_cost: float = 1.0,
) -> Array:
    """The G > 1 that minimises the error at a fixed cost, elementwise; NaN where there is none.

    Args:
        c1, c2, c3: constants, arrays of one shape.
        prompt_cost: k, shared by a prompt's group (reading it).
        completion_cost: c, of each completion.

    >>> float(best_group_size(1.0, 2.0, 9.0)), float(best_group_size(1.0, 2.0, 9.0, 10.0).round(2))
    (4.0, 7.77)
    """
    c1, c2, c3 = np.asarray(c1, float), np.asarray(c2, float), np.asarray(c3, float)
    usable = (c1 > 0) & (c3 > 0)
    if prompt_cost == 0:
        return 1 + np.sqrt(np.where(usable, c3, np.nan) / np.where(usable, c1, np.nan))
    low, high = np.full(c1.shape, 1 + 1e-6), np.full(c1.shape, MAX_GROUP_SIZE)
    for _ in range(80):
        middle = 1 + np.sqrt((low - 1) * (high - 1))
        weight_1, weight_2, weight_3 = _slope_weights(middle, prompt_cost, completion_cost)
        falls = weight_1 * c1 + weight_2 * c2 + weight_3 * c3 < 0
        low, high = np.where(falls, middle, low), np.where(falls, high, middle)
    return np.where(usable & (c2 >= 0), high, np.nan)


def _slope_weights(g: Array, k: float, c: float) -> tuple[Array, Array, Array]:
    """Weights of C1, C2, C3 in the derivative by G of K times the error at a fixed cost K.

    `(k + G c) { C1 + C2/G + C3/(G (G-1)) }` has the derivative
    `c C1 - k C2/G^2 - { c/(G-1)^2 + k (2G-1)/(G (G-1))^2 } C3`, increasing in G where C2, C3 >= 0.
    """
    return (
        np.full_like(g, c),
        -k / g**2,
        -c / (g - 1) ** 2 - k * (2 * g - 1) / (g * (g - 1)) ** 2,
    )


class ScalingEstimate(NamedTuple):
    """Estimates of C1, C2, C3 with what is known of their errors, to compare group sizes by.

    Attributes:
        constants_3: C1, C2, C3.
        covariance_33: of their errors, from a jackknife; NaN where there is none.
        dof: degrees of freedom of that covariance.
        prompts: how many they are from.
    """

    constants_3: Array
    covariance_33: Array
    dof: float
    prompts: float

    def n_mse(self, group_size: float) -> float:
        """n MSE(n/G, G) = G C1 + C2 + C3/(G-1), the same for every number of rollouts n."""
        return float(self.constants_3 @ [group_size, 1.0, 1 / (group_size - 1)])

    @property
    def undrawn(self) -> float:
        """Relative variance of C1 that undrawn prompts may add, `kappa / m_eff`."""
        c3 = float(self.constants_3[2])
        if not c3 > 0:
            return math.inf
        return UNDRAWN_VARIANCE * (1 / self.prompts + float(self.covariance_33[2, 2]) / c3**2)

    def decide(self, sizes: Sequence[int]) -> Decision:
        """Choose a group size, with what can be said of its error; see `Decision`.

        Args:
            sizes: admissible group sizes, each at least 2.
        """
        place, tolerance = _decide(
            self.constants_3[None], self.covariance_33[None], self.dof, self.prompts, sizes
        )
        known = float(tolerance[0])
        return Decision(sizes[int(place[0])], known if math.isfinite(known) else None)

    def group_size_interval(
        self, prompt_cost: float = 0.0, completion_cost: float = 1.0
    ) -> Interval:
        """The best G at a fixed cost.

        Where a usual size is decided, the interval is the smallest that contains the central 95 %
        of the posterior under each prior. Else it has no upper end, and its lower one is where
        Fieller's statistic has twice the critical value, by the data alone.

        The estimate is the plug-in where it lies in the interval; NaN where there is none. It is
        too large on average, since `1 + sqrt(C3/C1)` is convex in C1.

        Args:
            prompt_cost, completion_cost: see `best_group_size`.
        """

        def best(ratio: float) -> float:
            """The best G at C3/C1 = `ratio`, with C3 and C2 as estimated."""
            if math.isinf(ratio):
                return math.inf
            c1 = c3 / ratio
            return float(best_group_size(c1, max(c2, 0.0), c3, prompt_cost, completion_cost))

        c1, c2, c3 = map(float, self.constants_3)
        plain = float(best_group_size(c1, c2, c3, prompt_cost, completion_cost))
        if not self._complete or not self.covariance_33.any():
            return Interval(plain, math.nan, math.nan)
        if not c3 > 0:
            return Interval(plain, 1.0, math.inf)
        if self.decide(USUAL_SIZES).tolerance is None:
            low, _ = self._ratio_set(ONE_SIDED_FACTOR)
            return Interval(plain, best(low) if low > 0 else 1.0, math.inf)
        low, middle, high = map(best, self._ratio_quantiles(CONFIDENCE))
        return Interval(plain if low <= plain <= high else middle, low, high)

    def extra_error(self, group_size: float, reference: int, level: float = CONFIDENCE) -> Interval:
        """MSE(n/G, G) / MSE(n/R, R) - 1 at a fixed number of rollouts n, G against R.

        The estimate is the plug-in. It rises or falls with k = C3/C1, so its ends are its values
        at the ends of the central part of the posterior of k: one interval of k serves all G and R,
        and the intervals hold together, also for a reference that the same data chose.

        Returns:
            NaN where the estimate of either error is not positive; a width of 0 where G = R; ends
            that are NaN where fewer than 16 effective prompts are behind the constants.
        """
        error, other = self.n_mse(group_size), self.n_mse(reference)
        if not (error > 0 and other > 0):
            return Interval(math.nan, math.nan, math.nan)
        extra = error / other - 1
        if group_size == reference:
            return Interval(0.0, 0.0, 0.0)
        if not (self._complete and self._enough_prompts):
            return Interval(extra, math.nan, math.nan)
        low, _, high = self._ratio_quantiles(level)
        rest = max(float(self.constants_3[1]), 0.0) / float(self.constants_3[2])

        def relative(size: float, ratio: float) -> float:
            return size / ratio + rest + 1 / (size - 1)

        ends = [relative(group_size, k) / relative(reference, k) - 1 for k in (low, high)]
        return Interval(extra, min(extra, *ends), max(extra, *ends))

    def best_of(self, sizes: Sequence[int]) -> int:
        """The group size to take, decided or not: see `decide`."""
        if not self._complete or not self.constants_3[2] > 0:
            return min(sizes, key=self.n_mse)
        return self.decide(sizes).group_size

    def prompts_to_decide(self, sizes: Sequence[int]) -> tuple[float, float]:
        """The numbers of prompts with which half and nine in ten of such studies would decide.

        Studies are simulated: a true k from the posterior, C2 and C3 as estimated, and estimates
        around them whose covariance falls as one over the number of prompts.

        Returns:
            Infinite where no number up to 10^6 does, or where nothing is known yet.
        """
        if not self._complete or not self.constants_3[2] > 0:
            return math.inf, math.inf
        weights_AK = _posterior(
            self.constants_3[None], self.covariance_33[None], self.dof, self.prompts
        )[:, 0]
        rng = np.random.default_rng(0)
        ratios = np.exp(rng.choice(LOG_RATIOS, SIMULATED_STUDIES, p=weights_AK.mean(axis=0)))
        truth_S3 = np.tile(self.constants_3, (SIMULATED_STUDIES, 1))
        truth_S3[:, 0] = self.constants_3[2] / ratios
        values_3, vectors_33 = np.linalg.eigh(self.covariance_33)
        root_33: Array = vectors_33 * np.sqrt(np.maximum(values_3, 0.0))
        noise_S3: Array = rng.standard_normal((SIMULATED_STUDIES, 3)) @ root_33.transpose()

        def decided(count: float) -> float:
            """Share of studies of so many prompts that decide."""
            shrink = self.prompts / count
            covariance_S33 = np.broadcast_to(self.covariance_33 * shrink, (SIMULATED_STUDIES, 3, 3))
            estimates_S3 = truth_S3 + math.sqrt(shrink) * noise_S3
            _, tolerance_S = _decide(estimates_S3, covariance_S33, count - 1, count, sizes)
            return float(np.isfinite(tolerance_S).mean())

        counts = np.geomspace(self.prompts, MAX_PROMPTS, COUNTS)
        half = next((count for count in counts if decided(count) >= 0.5), math.inf)
        later = counts[counts >= half]
        return half, next((count for count in later if decided(count) >= 0.9), math.inf)

    @property
    def _complete(self) -> bool:
        """All three constants with their covariance; a stored result may lack some."""
        return bool(np.isfinite(self.constants_3).all() and np.isfinite(self.covariance_33).all())

    @property
    def _enough_prompts(self) -> bool:
        return self.undrawn <= UNDRAWN_VARIANCE / MIN_EFFECTIVE_PROMPTS

    def _ratio_quantiles(self, level: float) -> tuple[float, float, float]:
        """Ends of k = C3/C1 under all priors, with the mean of the medians of log k between."""
        weights_AK = _posterior(
            self.constants_3[None], self.covariance_33[None], self.dof, self.prompts
        )[:, 0]
        probabilities = ((1 - level) / 2, 0.5, (1 + level) / 2)
        quantiles_A3 = np.array([
            np.interp(probabilities, np.cumsum(weights_K) - weights_K / 2, LOG_RATIOS)
            for weights_K in weights_AK
        ])  # fmt: skip
        low, middle, high = (
            quantiles_A3[:, 0].min(), quantiles_A3[:, 1].mean(), quantiles_A3[:, 2].max()
        )  # fmt: skip
        return math.exp(low), math.exp(middle), math.exp(high)

    def _ratio_set(self, factor: float) -> tuple[float, float]:
        """Fieller's set of k = C3/C1, at `factor` times the critical value of 95 %."""
        c1, _, c3 = map(float, self.constants_3)
        variances = (
            float(self.covariance_33[2, 2]) + self.undrawn * c3**2,
            float(self.covariance_33[0, 2]),
            float(self.covariance_33[0, 0]),
        )
        critical = factor * float(stdtrit(self.dof, (1 + CONFIDENCE) / 2))
        return fieller_set(c3, c1, variances, critical)


class Decision(NamedTuple):
    """The group size to take.

    Attributes:
        group_size: of the sizes asked for, the one whose expected extra error is least under the
            prior that is worst for it.
        tolerance: its error is within so much of the least one, as a share of it: .05 or .10, with
            a probability of .95 under every prior, and within .05 with .80; None: not decided.
    """

    group_size: int
    tolerance: float | None


def scaling_estimate(
    whole: Mapping[str, Array | float], delete_one: Mapping[str, Array], prompts: float
) -> ScalingEstimate:
    """C1, C2, C3 with the jackknife covariance of their errors.

    Args:
        whole: c1, c2, c3.
        delete_one: the same with one unit left out at a time, each [K, n]: K independent parts of
            n units each (K = 1 where prompts are left out). The degrees of freedom are Welch &
            Satterthwaite's for the sum of K parts, the least of the three constants'.
        prompts: how many the constants are from.
    """
    covariance_K33 = _jackknife_covariance(delete_one)
    count = delete_one["c1"].shape[1]
    variance_K3 = np.diagonal(covariance_K33, axis1=1, axis2=2)
    dof = min(pooled_dof(variance_K, count - 1) for variance_K in variance_K3.T)
    constants_3 = np.array([float(whole[name]) for name in CONSTANTS])
    return ScalingEstimate(constants_3, covariance_K33.sum(axis=0), dof, prompts)


def _jackknife_covariance(delete_one: Mapping[str, Array]) -> Array:
    """Covariance of (C1, C2, C3) from each of K independent parts of n units, [K, 3, 3]."""
    change = np.stack(
        [delete_one[x] - delete_one[x].mean(axis=1, keepdims=True) for x in CONSTANTS]
    )
    count = change.shape[2]
    return (count - 1) / count * np.einsum("akn,bkn->kab", change, change)


def _posterior(constants_S3: Array, covariance_S33: Array, dof: float, prompts: float) -> Array:
    """Posterior weights of log k on the grid, for each prior and study, [A, S, K]."""
    inverse_K = np.exp(-LOG_RATIOS)
    c1_S1, c3_S1 = constants_S3[:, :1], constants_S3[:, 2:]
    var1_S1, mixed_S1, var3_S1 = (
        covariance_S33[:, i, j][:, None] for i, j in ((0, 0), (0, 2), (2, 2))
    )
    undrawn_S1 = UNDRAWN_VARIANCE * (c3_S1**2 / prompts + var3_S1)
    variance_SK = var1_S1 - 2 * mixed_S1 * inverse_K + (var3_S1 + undrawn_S1) * inverse_K**2
    squares_SK = (c1_S1 - c3_S1 * inverse_K) ** 2 / np.maximum(variance_SK, np.finfo(float).tiny)
    log_likelihood_SK = -(dof + 1) / 2 * np.log1p(squares_SK / dof)
    # The density a pi^(a-1) of pi = 2/k is proportional to k^-a in log k.
    prior_A1K = -np.array(PRIOR_EXPONENTS)[:, None, None] * LOG_RATIOS
    log_weights_ASK = log_likelihood_SK + prior_A1K
    weights_ASK = np.exp(log_weights_ASK - log_weights_ASK.max(axis=2, keepdims=True))
    return weights_ASK / weights_ASK.sum(axis=2, keepdims=True)


def _decide(
    constants_S3: Array, covariance_S33: Array, dof: float, prompts: float, sizes: Sequence[int]
) -> tuple[Array, Array]:
    """The place of the size to take and its tolerance, NaN where not decided, of each study."""
    sizes_G = np.array(sizes, float)
    c3_S = constants_S3[:, 2]
    complete_S = np.isfinite(constants_S3).all(axis=1) & np.isfinite(covariance_S33).all(
        axis=(1, 2)
    )
    usable_S = complete_S & (c3_S > 0)
    safe_S3 = np.where(usable_S[:, None], constants_S3, 1.0)
    safe_S33 = np.where(usable_S[:, None, None], covariance_S33, np.eye(3))
    weights_ASK = _posterior(safe_S3, safe_S33, dof, prompts)
    rest_S = np.maximum(safe_S3[:, 1], 0.0) / safe_S3[:, 2]
    error_SKG = np.exp(-LOG_RATIOS)[:, None] * sizes_G + rest_S[:, None, None] + 1 / (sizes_G - 1)
    extra_SKG = error_SKG / error_SKG.min(axis=2, keepdims=True) - 1
    expected_ASG = np.einsum("ask,skg->asg", weights_ASK, extra_SKG)
    place_S = expected_ASG.max(axis=0).argmin(axis=1)
    chosen_SK = np.take_along_axis(extra_SKG, place_S[:, None, None], axis=2)[..., 0]
    effective_S = 1 / (1 / prompts + safe_S33[:, 2, 2] / safe_S3[:, 2] ** 2)
    enough_S = usable_S & (effective_S >= MIN_EFFECTIVE_PROMPTS)
    tolerance_S = np.full(len(constants_S3), np.nan)
    close_S, loose_S = (
        (weights_ASK * (chosen_SK <= tolerance)).sum(axis=2).min(axis=0) for tolerance in TOLERANCES
    )
    loosely_S = enough_S & (loose_S >= PROBABILITY) & (close_S >= CLOSE_PROBABILITY)
    tolerance_S[loosely_S] = TOLERANCES[1]
    tolerance_S[enough_S & (close_S >= PROBABILITY)] = TOLERANCES[0]
    return place_S, tolerance_S
