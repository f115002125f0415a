r"""Choice of a group size whose error is close to the smallest error, if the data allow it.

At a fixed number of rollouts, the ratio of the errors at two group sizes depends on the data only
through k = C3/C1 and, weakly, C2/C3:

    n MSE / C3 = G/k + C2/C3 + 1/(G-1)              G* = 1 + sqrt(k)

C1 is hard to estimate. If a decision required C1 to be significantly above 0, decisions would be
made mostly when C1 is overestimated. Therefore the decision uses a posterior of k. Its likelihood
treats Fieller's (1954) statistic C1 - C3/k as t-distributed. A bound on the error is stated only if
every prior in a class of weak priors supports it (Berger 1985, section 4.7). The priors are
densities of pi = 2 C1/C3, which is in (0, 1] for any policy: `a pi^(a-1)` with a = 1/4 and a = 3/4.
Under the first prior, G* has a median of 6.7 and exceeds 48 with a probability of 17 %. Under the
second prior, the median is 3.2 and the probability is 0.5 %.

If few prompts carry the signal, the sample can miss them, and C1 and its standard error are then
both too small. Therefore `kappa (C3/k)^2 / m_eff`, with kappa = 2.25, is added to the variance of
C1 at a hypothetical C1 = C3/k. Here `m_eff` is the effective number of prompts for C3, `1 / (1/m +
Var(C3)/C3^2)`. The effective number is used instead of m, because prompts with nearly constant
rewards give little information about C1.

`scripts/benchmarks/error_rates.py group_size` counts wrong decisions on populations with G* from
2.5 to 48. The resulting table is in docs/benchmarks.md.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from grpo_ustat.records import Array, Mask

# Exponents a of the prior densities of pi = 2 C1/C3.
PRIOR_EXPONENTS = (0.25, 0.75)
# Variance that undrawn prompts may add to C1, in units of C1^2 / m_eff.
UNDRAWN_VARIANCE = 2.25
# Effective number of prompts below which no decision is made.
MIN_EFFECTIVE_PROMPTS = 16
# Bounds on the extra error of the chosen size, in increasing order.
TOLERANCES = (0.05, 0.10)
PROBABILITY = 0.95
# Minimum probability that the extra error is at most .05 if the stated bound is .10.
CLOSE_PROBABILITY = 0.80
# Candidate sizes for a decision on G* that does not depend on the number of rollouts.
USUAL_SIZES = tuple(2**power for power in range(1, 9))
# TRL's default G.
USUAL_SIZE = 8
LOG_RATIOS = np.linspace(math.log(2), math.log(2e4), 400)
# Largest number of prompts in simulated studies, and how many different values up to this number
# are tried.
MAX_PROMPTS, COUNTS = 10**6, 50
SIMULATED_STUDIES = 200


class Decision(NamedTuple):
    """Chosen group size, with a bound on its error."""

    # Admissible size whose expected extra error, under the prior that makes it largest, is
    # smallest.
    group_size: int
    # Bound on the extra error relative to the smallest error. If the bound is .05, the extra error
    # is at most .05 with a probability of at least .95 under every prior. If the bound is .10, the
    # extra error is, under every prior, at most .10 with a probability of at least .95 and at most
    # .05 with a probability of at least .80. None if the data do not decide.
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

    def posterior(self) -> Array:
        """Compute the posterior weights of log k on the grid, by prior and study, [A, S, K]."""
        inverse_K = np.exp(-LOG_RATIOS)
        c1_S1, c3_S1 = self.constants_S3[:, :1], self.constants_S3[:, 2:]
        var1_S1, mixed_S1, var3_S1 = (
            self.covariance_S33[:, i, j][:, None] for i, j in ((0, 0), (0, 2), (2, 2))
        )
        undrawn_S1 = UNDRAWN_VARIANCE * (c3_S1**2 / self.prompts + var3_S1)
        variance_SK = var1_S1 - 2 * mixed_S1 * inverse_K + (var3_S1 + undrawn_S1) * inverse_K**2
        variance_SK = np.maximum(variance_SK, np.finfo(float).tiny)
        squares_SK = (c1_S1 - c3_S1 * inverse_K) ** 2 / variance_SK
        log_likelihood_SK = -(self.dof + 1) / 2 * np.log1p(squares_SK / self.dof)
        # The density a pi^(a-1) of pi = 2/k is proportional to k^-a in log k.
        prior_A1K = -np.array(PRIOR_EXPONENTS)[:, None, None] * LOG_RATIOS
        log_weights_ASK = log_likelihood_SK + prior_A1K
        weights_ASK = np.exp(log_weights_ASK - log_weights_ASK.max(axis=2, keepdims=True))
        return weights_ASK / weights_ASK.sum(axis=2, keepdims=True)

    def decide(self, sizes: Sequence[int]) -> tuple[Array, Array]:
        """Return the index of the size that each study chooses, and its tolerance or NaN."""
        place_S, (close_S, loose_S), enough_S = self.choose(sizes)
        tolerance_S = np.full(len(self.constants_S3), np.nan)
        loosely_S = enough_S & (loose_S >= PROBABILITY) & (close_S >= CLOSE_PROBABILITY)
        tolerance_S[loosely_S] = TOLERANCES[1]
        tolerance_S[enough_S & (close_S >= PROBABILITY)] = TOLERANCES[0]
        return place_S, tolerance_S

    def choose(self, sizes: Sequence[int]) -> tuple[Array, Array, Mask]:
        """Choose the size with the smallest expected extra error under the worst prior.

        Returns:
            The index of the size that each study chooses, [S]. The probability that its extra error
            is at most each of `TOLERANCES`, the smallest under all priors, [2, S]. True for a study
            with enough prompts for a decision, [S].
        """
        sizes_G = np.array(sizes, float)
        complete_S = np.isfinite(self.constants_S3).all(axis=1)
        complete_S &= np.isfinite(self.covariance_S33).all(axis=(1, 2))
        usable_S = complete_S & (self.constants_S3[:, 2] > 0)
        safe_S3 = np.where(usable_S[:, None], self.constants_S3, 1.0)
        safe_S33 = np.where(usable_S[:, None, None], self.covariance_S33, np.eye(3))
        weights_ASK = self._replace(constants_S3=safe_S3, covariance_S33=safe_S33).posterior()
        rest_S = np.maximum(safe_S3[:, 1], 0.0) / safe_S3[:, 2]
        error_SKG = (
            np.exp(-LOG_RATIOS)[:, None] * sizes_G + rest_S[:, None, None] + 1 / (sizes_G - 1)
        )
        extra_SKG = error_SKG / error_SKG.min(axis=2, keepdims=True) - 1
        expected_ASG = np.einsum("ask,skg->asg", weights_ASK, extra_SKG)
        place_S = expected_ASG.max(axis=0).argmin(axis=1)
        chosen_SK = np.take_along_axis(extra_SKG, place_S[:, None, None], axis=2)[..., 0]
        effective_S = 1 / (1 / self.prompts + safe_S33[:, 2, 2] / safe_S3[:, 2] ** 2)
        enough_S = usable_S & (effective_S >= MIN_EFFECTIVE_PROMPTS)
        probability_2S = np.stack([
            (weights_ASK * (chosen_SK <= tolerance)).sum(axis=2).min(axis=0)
            for tolerance in TOLERANCES
        ])  # fmt: skip
        return place_S, probability_2S, enough_S

    def ratio_quantiles(self, level: float) -> tuple[float, float, float]:
        """Return the lower end, middle and upper end of one study's k = C3/C1, over all priors.

        The middle is the exponential of the mean over priors of the posterior median of log k.
        """
        probabilities = ((1 - level) / 2, 0.5, (1 + level) / 2)
        quantiles_A3 = np.array([
            np.interp(probabilities, np.cumsum(weights_K) - weights_K / 2, LOG_RATIOS)
            for weights_K in self.posterior()[:, 0]
        ])  # fmt: skip
        low, middle, high = (
            quantiles_A3[:, 0].min(), quantiles_A3[:, 1].mean(), quantiles_A3[:, 2].max()
        )  # fmt: skip
        return math.exp(low), math.exp(middle), math.exp(high)

    def prompts_to_decide(self, sizes: Sequence[int]) -> tuple[float, float]:
        """Estimate how many prompts 50 % and 90 % of similar studies need to decide on G.

        Studies are simulated with a true k drawn from the posterior, with the estimated C2 and C3,
        and with errors whose covariance is inversely proportional to the number of prompts.

        Returns:
            The two numbers of prompts. A number is infinite if 10^6 prompts do not suffice.
        """
        (constants_3,), (covariance_33,) = self.constants_S3, self.covariance_S33
        weights_K = self.posterior()[:, 0].mean(axis=0)
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
            _, tolerance_S = Estimates(estimates_S3, covariance_S33, count - 1, count).decide(sizes)
            return float(np.isfinite(tolerance_S).mean())

        counts = np.geomspace(self.prompts, MAX_PROMPTS, COUNTS)
        half = next((count for count in counts if decided(count) >= 0.5), math.inf)
        later = counts[counts >= half]
        return half, next((count for count in later if decided(count) >= 0.9), math.inf)
