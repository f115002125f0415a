r"""Choice of a group size whose error is close to the smallest error, if the data allow it.

At a fixed number of rollouts, the ratio of the errors at two group sizes depends on the data only
through k = C3/C1 and, weakly, C2/C3:

    n MSE / C3 = G/k + C2/C3 + 1/(G-1)              G* = 1 + sqrt(k)

C1 is hard to estimate. If a decision required C1 to be significantly above 0, decisions would be
made mostly when C1 is overestimated. Therefore the decision uses a posterior of k. Its likelihood
treats Fieller's (1954) statistic C1 - C3/k as t-distributed. A bound on the error is stated only if
every prior in a class of weak priors supports it (Berger 1985, section 4.7); see `Prior`. Without a
prior, a bound is stated only if it holds at every k in Fieller's 95 % confidence set.

If few prompts carry the signal, the sample can miss them, and C1 and its standard error are then
both too small. Therefore `kappa (C3/k)^2 / m_eff`, with kappa = 2.25, is added to the variance of
C1 at a hypothetical C1 = C3/k. Here `m_eff` is the effective number of prompts for C3, `1 / (1/m +
Var(C3)/C3^2)`. The effective number is used instead of m, because prompts with nearly constant
rewards give little information about C1.

Both rules were tuned so that decisions are wrong in at most 5 % of the studies that decide, even if
studies draw prompts until they decide. Without a prior, this needs 40 instead of 16 effective
prompts.

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
# Bounds on the extra error of the chosen size, in increasing order.
TOLERANCES = (0.05, 0.10)
PROBABILITY = 0.95
# Minimum probability that the extra error is at most .05 if the stated bound is .10.
CLOSE_PROBABILITY = 0.80
# Candidate sizes for a decision on G* that does not depend on the number of rollouts.
USUAL_SIZES = tuple(2**power for power in range(1, 9))
# TRL's default G.
USUAL_SIZE = 8
# Grid of log k on which posteriors are computed.
LOG_RATIOS = np.linspace(math.log(MIN_RATIO), math.log(2e4), 400)
# Largest number of prompts in simulated studies, and how many different values up to this number
# are tried.
MAX_PROMPTS, COUNTS = 10**6, 50
SIMULATED_STUDIES = 200


@dataclass(frozen=True)
class Prior:
    """Class of prior densities of pi = 2 C1/C3, which is in (0, 1] for any policy.

    The densities are `a pi^(a-1)`, restricted to pi >= 1e-4, which is G* <= 142. A small exponent a
    gives large G* more weight. For a = 1/4, G* has a median of 5.7 and exceeds 48 with a
    probability of 8 %. For a = 3/4, the median is 3.2 and the probability is 0.4 %.
    """

    name: str
    # Exponents a, one for each density. Without exponents, the data alone decide.
    exponents: tuple[float, ...]
    # Effective number of prompts below which no decision is made.
    min_effective_prompts: int

    @property
    def weights_AK(self) -> Array:
        """Probabilities of the values of log k on the grid, for each density, [A, K]."""
        # The density a pi^(a-1) of pi = 2/k is proportional to k^-a in log k.
        weights_AK = np.exp(-np.array(self.exponents)[:, None] * LOG_RATIOS)
        return weights_AK / weights_AK.sum(axis=1, keepdims=True)

    def ratio_quantiles(self, level: float) -> tuple[float, float, float]:
        """Return the lower end, middle and upper end of k under all densities; see `_quantiles`."""
        return _quantiles(self.weights_AK, level)


WEAK_PRIOR = Prior("weak", (0.25, 0.75), min_effective_prompts=16)
NO_PRIOR = Prior("none", (), min_effective_prompts=40)
# Priors by name, as in `study.prior`.
PRIORS = {prior.name: prior for prior in (WEAK_PRIOR, NO_PRIOR)}


class Decision(NamedTuple):
    """Chosen group size, with a bound on its error."""

    # Admissible size whose expected extra error, under the prior that makes it largest, is
    # smallest. Without a prior, the size whose largest extra error in the confidence set of k is
    # smallest.
    group_size: int
    # Bound on the extra error relative to the smallest error. If the bound is .05, the extra error
    # is at most .05 with a probability of at least .95 under every prior. If the bound is .10, the
    # extra error is, under every prior, at most .10 with a probability of at least .95 and at most
    # .05 with a probability of at least .80. Without a prior, the extra error is at most the bound
    # for every k in the 95 % confidence set. None if the data do not decide.
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
        """Compute the posterior weights of log k on the grid, by prior and study, [A, S, K]."""
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
        """Return Var(C1), Cov(C1, C3) and Var(C3), [S] each.

        Var(C3) includes the variance that undrawn prompts may add to C1, in units of 1/k^2.
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
            factor: multiplier of the critical value.
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
        """Return the index of the size that each study chooses, and its tolerance or NaN."""
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
            The index of the size that each study chooses, [S]. The probability that its extra error
            is at most each of `TOLERANCES`, the smallest under all priors, [2, S]; without a prior,
            it is 1 or 0. True for a study with enough prompts for a decision, [S].
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
        """Compute each size's error relative to the smallest, minus 1, at values of 1/k, [S, K, G].

        Args:
            inverse_SK: values of 1/k for each study.
        """
        sizes_G = np.array(sizes, float)
        rest_S = np.maximum(self.constants_S3[:, 1], 0.0) / self.constants_S3[:, 2]
        error_SKG = inverse_SK[..., None] * sizes_G + rest_S[:, None, None] + 1 / (sizes_G - 1)
        return error_SKG / error_SKG.min(axis=2, keepdims=True) - 1

    def _expected_best(self, sizes: Sequence[int]) -> tuple[Array, Array]:
        """Choose the size with the smallest expected extra error under its worst prior."""
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

        The ratio of the errors at two sizes is monotonic in k. The extra error of a size is the
        maximum of such ratios, minus 1, so it is largest at an end of the set.
        """
        inverse_S2 = 1 / self.confidence_sets(CONFIDENCE)
        worst_SG = self._extra_errors(inverse_S2, sizes).max(axis=1)
        within_2S = worst_SG.min(axis=1) <= np.array(TOLERANCES)[:, None]
        return worst_SG.argmin(axis=1), within_2S.astype(float)

    def ratio_quantiles(self, level: float) -> tuple[float, float, float]:
        """Return the lower end, middle and upper end of one study's k = C3/C1; see `_quantiles`.

        Without a prior, the ends are those of the confidence set, and the middle is the estimate.
        """
        if self.prior.exponents:
            return _quantiles(self.posterior()[:, 0], level)
        ((low, high),) = self.confidence_sets(level)
        c1, _, c3 = self.constants_S3[0]
        middle = c3 / c1 if c1 > 0 else math.inf
        return float(low), float(np.clip(middle, low, high)), float(high)

    def prompts_to_decide(self, sizes: Sequence[int]) -> tuple[float, float]:
        """Estimate how many prompts 50 % and 90 % of similar studies need to decide on G.

        Studies are simulated with a true k drawn from the posterior under the weak prior, with the
        estimated C2 and C3, and with errors whose covariance is inversely proportional to the
        number of prompts. They decide with the prior of this study.

        Returns:
            The two numbers of prompts. A number is infinite if 10^6 prompts do not suffice.
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
    """Return the lower end, middle and upper end of k under several distributions on the grid.

    The ends enclose the central part, of probability `level`, of every distribution. The middle is
    the exponential of the mean over the distributions of the median of log k.
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
