r"""Choice of a group size whose error is close to the smallest error, if the data allow it.

At a fixed number of rollouts, the ratio of the errors at two group sizes depends on the data only
through k = C3/C1 and, weakly, C2/C3:

    n MSE / C3 = G/k + C2/C3 + 1/(G-1)              G* = 1 + sqrt(k)

The constants C1, C2 and C3 are defined in `scaling`. C1 is hard to estimate. If a decision required
C1 to be significantly above 0, decisions would be made mostly when C1 is overestimated. Therefore
the decision uses a posterior of k. The likelihood in it treats Fieller's (1954) statistic C1 - C3/k
as t-distributed. A bound on the error is stated only if every prior in a class of weak priors
supports it (Berger 1985, section 4.7); see `Prior`. The setting `NO_PRIOR` uses no posterior: a
bound is then stated only if it holds at every k in Fieller's 95 % confidence set.

If only a few prompts of the population have a large gradient, a sample of m prompts can miss them.
The estimate of C1 and its standard error are then both too small. To allow for such undrawn
prompts, `kappa (C3/k)^2 / m_eff`, with kappa = 2.25, is added to the variance of C1 when the value
C1 = C3/k is tested. Here `m_eff` is the effective number of prompts for C3,
`1 / (1/m + Var(C3)/C3^2)`. It replaces m, because prompts with nearly constant rewards give little
information about C1.

Both rules, with and without a prior, were tuned so that decisions are wrong in at most 5 % of the
studies that decide, even if studies draw prompts until they decide. For this, a decision needs at
least 16 effective prompts with the prior and at least 40 without it.

`scripts/benchmarks/error_rates.py` counts wrong decisions on populations with G* from
2.5 to 48. The results are in docs/benchmarks.md.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from grpo_ustat.estimators.intervals import CONFIDENCE, fieller_set, t_quantile
from grpo_ustat.records import Array, Mask

# Smallest k = C3/C1 of any policy.
MIN_RATIO = 2.0
# Variance that undrawn prompts may add to C1, in units of C1^2 / m_eff.
UNDRAWN_VARIANCE = 2.25
# Bounds on the extra error of the chosen size that a decision can state, in increasing order.
TOLERANCES = (0.05, 0.10)
# Minimum probability that the extra error is at most the stated bound.
PROBABILITY = 0.95
# Minimum probability that the extra error is at most .05 if the stated bound is .10.
CLOSE_PROBABILITY = 0.80
# Candidate sizes for a decision on G* that does not depend on the number of rollouts.
USUAL_SIZES = tuple(2**power for power in range(1, 9))
# TRL's default G.
USUAL_SIZE = 8
# Grid of log k on which posteriors are computed.
LOG_RATIOS = np.linspace(math.log(MIN_RATIO), math.log(2e4), 400)
# `prompts_to_decide` simulates studies with up to MAX_PROMPTS prompts. It tries COUNTS different
# numbers of prompts.
MAX_PROMPTS, COUNTS = 10**6, 50
SIMULATED_STUDIES = 200


@dataclass(frozen=True)
class Prior:
    """Class of prior densities of pi = 2 C1/C3, which is in (0, 1] for any policy.

    The densities are `a pi^(a-1)`, restricted to pi >= 1e-4, which means G* <= 142. A small
    exponent a gives large G* more weight. For a = 1/4, G* has a median of 5.7, and it exceeds 48
    with a probability of 8 %. For a = 3/4, G* has a median of 3.2, and it exceeds 48 with a
    probability of 0.4 %.
    """

    name: str
    # Exponents a, one for each density. Without exponents, the data alone decide.
    exponents: tuple[float, ...]
    # Effective number of prompts below which no decision is made.
    min_effective_prompts: int

    @property
    def weights_AK(self) -> Array:
        """Probability of each grid value of log k under each prior density.

        The array is [A, K] for A densities and the K values of `LOG_RATIOS`.
        """
        # The density a pi^(a-1) of pi = 2/k is proportional to k^-a in log k.
        weights_AK = np.exp(-np.array(self.exponents)[:, None] * LOG_RATIOS)
        return weights_AK / weights_AK.sum(axis=1, keepdims=True)

    def ratio_quantiles(self, level: float) -> tuple[float, float, float]:
        """Return the lower end, middle and upper end of k under the prior; see `_quantiles`."""
        return _quantiles(self.weights_AK, level)


WEAK_PRIOR = Prior("weak", (0.25, 0.75), min_effective_prompts=16)
NO_PRIOR = Prior("none", (), min_effective_prompts=40)
# Priors by name; the configuration key `study.prior` takes one of these names.
PRIORS = {prior.name: prior for prior in (WEAK_PRIOR, NO_PRIOR)}


class Decision(NamedTuple):
    """Chosen group size, with a bound on its error."""

    # Size with the smallest worst case. With a prior, the worst case of a size is its largest
    # expected extra error over the densities of the prior. Without a prior, it is the largest extra
    # error over the confidence set of k.
    group_size: int
    # Bound on the extra error relative to the smallest error; None if the data do not decide.
    # Bound .05: under every density of the prior, the extra error is at most .05 with a probability
    # of at least .95.
    # Bound .10: under every density, the extra error is at most .10 with a probability of at least
    # .95, and at most .05 with a probability of at least .80.
    # Without a prior, the extra error is at most the bound for every k in the 95 % confidence set.
    tolerance: float | None


class Estimates(NamedTuple):
    """Estimates of C1, C2 and C3 from S studies with equal numbers of prompts."""

    # C1, C2, C3.
    constants_S3: Array
    # Covariance of the errors of C1, C2 and C3; NaN if unknown.
    covariance_S33: Array
    # Degrees of freedom of each covariance.
    dof: float
    # Number of prompts in each study.
    prompts: float
    prior: Prior = WEAK_PRIOR

    def posterior(self) -> Array:
        """Compute the posterior probabilities of the grid values of log k, [A, S, K].

        A is the number of prior densities, S the number of studies and K the number of grid values.
        """
        inverse_K = np.exp(-LOG_RATIOS)
        c1_S1, c3_S1 = self.constants_S3[:, :1], self.constants_S3[:, 2:]
        var1_S1, mixed_S1, var3_S1 = (part_S[:, None] for part_S in self._variances())
        variance_SK = var1_S1 - 2 * mixed_S1 * inverse_K + var3_S1 * inverse_K**2
        variance_SK = np.maximum(variance_SK, np.finfo(float).tiny)
        squares_SK = (c1_S1 - c3_S1 * inverse_K) ** 2 / variance_SK
        log_likelihood_SK = -(self.dof + 1) / 2 * np.log1p(squares_SK / self.dof)
        log_weights_ASK = log_likelihood_SK + np.log(self.prior.weights_AK)[:, None]
        weights_ASK = np.exp(log_weights_ASK - log_weights_ASK.max(axis=2, keepdims=True))
        return weights_ASK / weights_ASK.sum(axis=2, keepdims=True)

    def _variances(self) -> tuple[Array, Array, Array]:
        """Return Var(C1), Cov(C1, C3) and Var(C3) for Fieller's statistic C1 - C3/k, [S] each.

        The variance for undrawn prompts is proportional to 1/k^2, as is the contribution of Var(C3)
        to the variance of the statistic. It is therefore included in Var(C3).
        """
        covariance_S33 = self.covariance_S33
        var1_S, mixed_S, var3_S = (covariance_S33[:, i, j] for i, j in ((0, 0), (0, 2), (2, 2)))
        undrawn_S = UNDRAWN_VARIANCE * (self.constants_S3[:, 2] ** 2 / self.prompts + var3_S)
        return var1_S, mixed_S, var3_S + undrawn_S

    def confidence_sets(self, level: float, factor: float = 1.0) -> Array:
        """Compute the ends of each study's confidence set of k, without a prior, [S, 2].

        The sets are Fieller's (1954), clipped to the possible values of k, which are at least 2. A
        set has no upper end if the data do not exclude C1 = 0.

        Args:
            level: confidence level.
            factor: number by which the critical value is multiplied; above 1 for wider sets.
        """
        critical = factor * t_quantile(self.dof, level)
        numbers_S5 = zip(
            self.constants_S3[:, 2], self.constants_S3[:, 0], *reversed(self._variances()),
            strict=True,
        )  # fmt: skip
        sets = [
            fieller_set(float(above), float(below), (float(v3), float(mixed), float(v1)), critical)
            for above, below, v3, mixed, v1 in numbers_S5
        ]
        return np.maximum(np.array(sets), MIN_RATIO)

    def decide(self, sizes: Sequence[int]) -> tuple[Array, Array]:
        """Choose a size for each study, with the bound on its extra error.

        Returns:
            The index of the chosen size in `sizes`, [S]. The bound, one of `TOLERANCES`, or NaN if
            the study does not decide, [S].
        """
        place_S, (close_S, loose_S), enough_S = self.choose(sizes)
        tolerance_S = np.full(len(self.constants_S3), np.nan)
        close = CLOSE_PROBABILITY if self.prior.exponents else 0.0
        loosely_S = enough_S & (loose_S >= PROBABILITY) & (close_S >= close)
        tolerance_S[loosely_S] = TOLERANCES[1]
        tolerance_S[enough_S & (close_S >= PROBABILITY)] = TOLERANCES[0]
        return place_S, tolerance_S

    def choose(self, sizes: Sequence[int]) -> tuple[Array, Array, Mask]:
        """Choose a size for each study; see `Decision.group_size`.

        Returns:
            The index of the chosen size in `sizes`, [S]. For each of the two `TOLERANCES`, the
            probability that the extra error of this size is at most the tolerance, [2, S]; it is
            the smallest probability over the prior densities, and 1 or 0 without a prior. A mask
            that is True for studies with enough prompts for a decision, [S].
        """
        complete_S = np.isfinite(self.constants_S3).all(axis=1)
        complete_S &= np.isfinite(self.covariance_S33).all(axis=(1, 2))
        usable_S = complete_S & (self.constants_S3[:, 2] > 0)
        safe_S3 = np.where(usable_S[:, None], self.constants_S3, 1.0)
        safe_S33 = np.where(usable_S[:, None, None], self.covariance_S33, np.eye(3))
        safe = self._replace(constants_S3=safe_S3, covariance_S33=safe_S33)
        of_studies = safe._expected_best if self.prior.exponents else safe._minimax
        effective_S = 1 / (1 / self.prompts + safe_S33[:, 2, 2] / safe_S3[:, 2] ** 2)
        return *of_studies(sizes), usable_S & (effective_S >= self.prior.min_effective_prompts)

    def _extra_errors(self, inverse_SK: Array, sizes: Sequence[int]) -> Array:
        """Compute the extra error of each size, relative to the smallest error, at values of 1/k.

        Args:
            inverse_SK: K values of 1/k for each of S studies; S may be 1 for the same values in all
                studies.
            sizes: group sizes.

        Returns:
            The error of a size divided by the smallest error, minus 1, [S, K, number of sizes].
        """
        sizes_G = np.array(sizes, float)
        rest_S = np.maximum(self.constants_S3[:, 1], 0.0) / self.constants_S3[:, 2]
        error_SKG = inverse_SK[..., None] * sizes_G + rest_S[:, None, None] + 1 / (sizes_G - 1)
        return error_SKG / error_SKG.min(axis=2, keepdims=True) - 1

    def _expected_best(self, sizes: Sequence[int]) -> tuple[Array, Array]:
        """Choose the size with the smallest expected extra error under its worst prior density."""
        weights_ASK = self.posterior()
        extra_SKG = self._extra_errors(np.exp(-LOG_RATIOS)[None], sizes)
        expected_ASG = np.einsum("ask,skg->asg", weights_ASK, extra_SKG)
        place_S = expected_ASG.max(axis=0).argmin(axis=1)
        chosen_SK = np.take_along_axis(extra_SKG, place_S[:, None, None], axis=2)[..., 0]
        probability_2S = np.stack([
            (weights_ASK * (chosen_SK <= tolerance)).sum(axis=2).min(axis=0)
            for tolerance in TOLERANCES
        ])  # fmt: skip
        return place_S, probability_2S

    def _minimax(self, sizes: Sequence[int]) -> tuple[Array, Array]:
        """Choose the size whose largest extra error in the confidence set of k is smallest.

        It suffices to compare the two ends of the set. The ratio of the errors at two sizes is
        monotonic in k, and the extra error of a size is the maximum of such ratios, minus 1. It is
        therefore largest at an end of the set.
        """
        inverse_S2 = 1 / self.confidence_sets(CONFIDENCE)
        worst_SG = self._extra_errors(inverse_S2, sizes).max(axis=1)
        within_2S = worst_SG.min(axis=1) <= np.array(TOLERANCES)[:, None]
        return worst_SG.argmin(axis=1), within_2S.astype(float)

    def ratio_quantiles(self, level: float) -> tuple[float, float, float]:
        """Return the lower end, middle and upper end of k = C3/C1 in a single study.

        With a prior, they are quantiles of the posterior; see `_quantiles`. Without a prior, they
        are the ends of the confidence set and the estimate of k, clipped to the set.
        """
        if self.prior.exponents:
            return _quantiles(self.posterior()[:, 0], level)
        ((low, high),) = self.confidence_sets(level)
        c1, _, c3 = self.constants_S3[0]
        middle = c3 / c1 if c1 > 0 else math.inf
        return float(low), float(np.clip(middle, low, high)), float(high)

    def prompts_to_decide(self, sizes: Sequence[int]) -> tuple[float, float]:
        """Estimate how many prompts a study like this one needs to decide on G.

        The function simulates studies with increasing numbers of prompts. The true k of each
        simulated study is drawn from this study's posterior under the weak prior; C2 and C3 are
        this study's estimates. The covariance of the errors is inversely proportional to the number
        of prompts. The simulated studies decide with the prior of this study.

        Returns:
            The numbers of prompts at which 50 % and 90 % of the simulated studies decide. A number
            is infinite if 10^6 prompts do not suffice.
        """
        (constants_3,), (covariance_33,) = self.constants_S3, self.covariance_S33
        weights_K = self._replace(prior=WEAK_PRIOR).posterior()[:, 0].mean(axis=0)
        rng = np.random.default_rng(0)
        ratios_S = np.exp(rng.choice(LOG_RATIOS, SIMULATED_STUDIES, p=weights_K))
        truth_S3 = np.tile(constants_3, (SIMULATED_STUDIES, 1))
        truth_S3[:, 0] = constants_3[2] / ratios_S
        values_3, vectors_33 = np.linalg.eigh(covariance_33)
        root_33: Array = vectors_33 * np.sqrt(np.maximum(values_3, 0.0))
        noise_S3: Array = rng.standard_normal((SIMULATED_STUDIES, 3)) @ root_33.transpose()

        def decided(count: float) -> float:
            """Return the share of studies with `count` prompts that decide on G."""
            shrink = self.prompts / count
            covariance_S33 = np.broadcast_to(covariance_33 * shrink, (SIMULATED_STUDIES, 3, 3))
            estimates_S3 = truth_S3 + math.sqrt(shrink) * noise_S3
            studies = Estimates(estimates_S3, covariance_S33, count - 1, count, self.prior)
            _, tolerance_S = studies.decide(sizes)
            return float(np.isfinite(tolerance_S).mean())

        counts = np.geomspace(self.prompts, MAX_PROMPTS, COUNTS)
        half = next((count for count in counts if decided(count) >= 0.5), math.inf)
        later = counts[counts >= half]
        return half, next((count for count in later if decided(count) >= 0.9), math.inf)


def _quantiles(weights_AK: Array, level: float) -> tuple[float, float, float]:
    """Return the lower end, middle and upper end of k under A distributions on the grid.

    The interval from the lower to the upper end contains the central part of every distribution,
    where the central part has probability `level`. The middle is computed from the median of log k
    under each distribution: it is the exponential of the mean of these medians.
    """
    probabilities = ((1 - level) / 2, 0.5, (1 + level) / 2)
    quantiles_A3 = np.array([
        np.interp(probabilities, np.cumsum(weights_K) - weights_K / 2, LOG_RATIOS)
        for weights_K in weights_AK
    ])  # fmt: skip
    low, middle, high = (
        quantiles_A3[:, 0].min(), quantiles_A3[:, 1].mean(), quantiles_A3[:, 2].max()
    )  # fmt: skip
    return math.exp(low), math.exp(middle), math.exp(high)
