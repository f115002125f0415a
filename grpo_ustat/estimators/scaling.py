r"""Scaling law of the gradient's mean squared error, and its consequences for G and n.

With the leave-one-out baseline, B independent prompts and G completions per prompt, the mean
squared error of the gradient estimate is (paper, Proposition 3, section 6):

    MSE(B, G) = 1/B { C1 + C2/G + C3/(G (G-1)) }
    C1 = tr Cov g(X)    C2 = E[ A_V - ||g||^2 ]    C3 = E[ D + ||g||^2 ]

Here g(X) is the gradient of the expected reward of a random prompt X; `moments` defines A_V and D.

**Best group size.** At a fixed number of rollouts n = B G, the error is
`1/n { G C1 + C2 + C3/(G-1) }`. For any n, this error is smallest at `G* = 1 + sqrt(C3/C1)`. The
paper writes the last term as C3/G and therefore obtains `G* = sqrt(C3/C1)`. The best G can also be
computed for a fixed cost. If a prompt costs k and a completion costs c, a batch costs
K = B (k + G c), and its error is `(k + G c)/K { C1 + C2/G + C3/(G (G-1)) }`. The G that minimises
this error does not depend on K.

**Noise scale.** The noise scale n_c is the number of rollouts per step at which the mean squared
error equals ||grad J||^2, where J is the expected reward over all prompts:

    n_c(G) = ( G C1 + C2 + C3/(G-1) ) / ||grad J||^2

It is the simple noise scale of McCandlish et al. (2018) for groups of G, in rollouts. Its minimum
over G is `( C1 + C2 + 2 sqrt(C1 C3) ) / ||grad J||^2` and is reached at G*. The gradient estimate
ghat from n rollouts satisfies

    E||ghat||^2 = ||grad J||^2 ( 1 + n_c/n )        noise share = n_c / ( n + n_c )

If the curvature of J is the same in all directions, the best step along ghat raises J by the
fraction `n / ( n + n_c )` of the increase from the best step along the true gradient. If n grows by
one percent, this fraction therefore grows by `n_c / ( n + n_c )` percent. The growth is half a
percent if n = n_c, about one percent if n is far smaller than n_c, and almost nothing if n is far
larger than n_c. In tokens, n_c rollouts cost `n_c (k + G c) / G`, because a group's prompt is read
only once and a group therefore costs k + G c tokens.

**Intervals.** Each of these quantities is a linear combination of the four constants C1, C2, C3 and
||grad J||^2, or a function of a ratio of two linear combinations. The intervals therefore need only
the covariance of the four estimates, which is computed with a jackknife. The interval of a linear
combination is a Student's t interval. The interval of a ratio is Fieller's (1954) set, which has no
upper end if the data do not exclude a denominator of 0. The interval of G* is computed from the
posterior in `group_size`.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
from numpy.typing import ArrayLike

from grpo_ustat.estimators.group_size import (
    MIN_RATIO,
    UNDRAWN_VARIANCE,
    USUAL_SIZES,
    WEAK_PRIOR,
    Decision,
    Estimates,
    Prior,
)
from grpo_ustat.estimators.intervals import (
    CONFIDENCE,
    UNDETERMINED,
    Interval,
    fieller_set,
    pooled_dof,
    t_interval,
    t_quantile,
)
from grpo_ustat.estimators.moments import Moments
from grpo_ustat.records import Array

CONSTANTS = ("c1", "c2", "c3")
CONSTANTS_AND_GRADIENT = (*CONSTANTS, "grad_sq")
# Weight vectors for `ScalingLaw.linear` and `ratio`; each selects one of the four constants.
C1, C2, C3, GRAD_SQ = np.eye(4)
# Lower bound of G*. It is valid for any policy, because C3 >= 2 C1.
MIN_GSTAR = 1 + math.sqrt(2)
# Largest group size in the search for the best G.
MAX_GROUP_SIZE = 1e6
# If an interval has no upper end, the critical value for its lower end is multiplied by this
# factor, because such intervals occur mostly when the denominator is underestimated.
ONE_SIDED_FACTOR = 2.0
# `divisible_rollouts` replaces a prime number of rollouts by the next multiple of this number.
WHOLE_GROUPS = 8


@dataclass(frozen=True)
class GroupSizeCosts:
    """Extra error of each admissible group size at a fixed number of rollouts."""

    # Number of rollouts per step, n.
    rollouts: int
    # Chosen G, a divisor of n; see `ScalingLaw.decide`.
    best: int
    # MSE at G divided by MSE at `best`, minus 1, with simultaneous 95 % intervals; the keys are the
    # group sizes G. `ScalingLaw.extra_error` explains when a value is NaN.
    extra: Mapping[int, Interval]
    # Bound on the extra error of `best` relative to the smallest error; None if the data do not
    # decide on a group size. See `Decision`.
    tolerance: float | None = None


@dataclass(frozen=True, eq=False)
class ScalingLaw:
    """C1, C2, C3 and ||grad J||^2, exact or estimated, with the covariance of their errors.

    >>> law = ScalingLaw.exact(c1=1.0, c2=2.0, c3=9.0, grad_sq=0.5)
    >>> law.mse(num_prompts=8, group_size=4), law.best_size(), law.least(divisors(48))
    (0.28125, 4.0, 4)
    >>> law.noise_scale(4).estimate, round(law.prompt_share(4).estimate, 3)
    (18.0, 0.444)
    """

    # C1, C2, C3 and ||grad J||^2; NaN for an unknown constant.
    constants_4: Array
    # Covariance of the errors of the four constants, as a sum of contributions: one from each of K
    # independent parts of the sample; NaN if unknown.
    covariance_K44: Array
    # Degrees of freedom of each contribution: the number of jackknife units in a part, minus 1.
    part_dof: float
    # Number of prompts in the sample.
    prompts: float
    # Prior of C1/C3 for decisions on the group size and for the interval of G*.
    prior: Prior = WEAK_PRIOR

    @classmethod
    def exact(cls, c1: float, c2: float, c3: float, grad_sq: float = math.nan) -> ScalingLaw:
        """Return the law with exactly known constants."""
        return cls(np.array([c1, c2, c3, grad_sq]), np.zeros((1, 4, 4)), math.inf, math.inf)

    @classmethod
    def of_moments(cls, moments: Moments, grad_sq: float) -> ScalingLaw:
        """Return the law of a fixed set of P prompts, with constants treated as exact.

        C1 is the variance of the gradient over these prompts, with divisor P.

        Args:
            moments: moments of the prompts, as exact values or unbiased estimates.
            grad_sq: ||grad J||^2 of the same prompts.
        """
        return cls.exact(
            c1=float(moments.g_sq.mean() - grad_sq),
            c2=float((moments.a_v - moments.g_sq).mean()),
            c3=float((moments.d + moments.g_sq).mean()),
            grad_sq=grad_sq,
        )

    @classmethod
    def jackknifed(
        cls, whole_4: Array, delete_one_4Kn: Array, prompts: float, prior: Prior = WEAK_PRIOR
    ) -> ScalingLaw:
        """Return the law with estimated constants and the jackknife covariance of their errors.

        Args:
            whole_4: C1, C2, C3 and ||grad J||^2, estimated from the whole sample.
            delete_one_4Kn: estimates of the same constants with one unit of the sample left out.
                The sample has K independent parts of n units each; entry (., k, i) leaves out unit
                i of part k. If the units are prompts, K = 1.
            prompts: number of prompts in the sample.
            prior: prior for decisions on the group size.
        """
        change = delete_one_4Kn - delete_one_4Kn.mean(axis=2, keepdims=True)
        count = change.shape[2]
        covariance_K44 = (count - 1) / count * np.einsum("akn,bkn->kab", change, change)
        return cls(np.asarray(whole_4, float), covariance_K44, count - 1, prompts, prior)

    @classmethod
    def of_steps(cls, values_4S: Array, prompts: float = math.inf) -> ScalingLaw:
        """Return the law with constants averaged over the policies of several steps.

        Args:
            values_4S: unbiased estimates of C1, C2, C3 and ||grad J||^2 for each of S >= 2 steps
                that share no completions; the jackknife leaves out one step at a time.
            prompts: number of prompts per step, which affects the interval of G*.
        """
        count = values_4S.shape[1]
        delete_one_4S = (values_4S.sum(axis=1, keepdims=True) - values_4S) / (count - 1)
        return cls.jackknifed(values_4S.mean(axis=1), delete_one_4S[:, None], count * prompts)

    @classmethod
    def stored(
        cls,
        c1: float,
        c2: float,
        c3: float,
        covariance: ArrayLike | None = None,
        dof: float | None = None,
        prior: Prior = WEAK_PRIOR,
    ) -> ScalingLaw:
        """Return the law with stored constants; ||grad J||^2 is NaN.

        Args:
            c1, c2, c3: constants of the law.
            covariance, dof: covariance of the errors of C1, C2 and C3, and its degrees of freedom,
                from `stored_errors`; both None if the errors are unknown.
            prior: prior for decisions on the group size.
        """
        covariance_K44 = np.full((1, 4, 4), math.nan)
        covariance_K44[0, :3, :3] = math.nan if covariance is None else covariance
        dof = 1.0 if dof is None else float(dof)
        return cls(np.array([c1, c2, c3, math.nan], float), covariance_K44, dof, dof + 1, prior)

    def stored_errors(self) -> dict[str, Any]:
        """Return the covariance of C1, C2 and C3 and its degrees of freedom for `result.json`.

        Both are None if the covariance is unknown.
        """
        is_known = np.isfinite(self.covariance_33).all()
        return {
            "covariance": self.covariance_33.tolist() if is_known else None,
            "dof": self.dof if is_known else None,
        }

    def with_c3(self, weights_4: Array) -> ScalingLaw:
        """Return the law in which a linear combination of the four constants replaces C3.

        Args:
            weights_4: weights of C1, C2, C3 and ||grad J||^2 in the new C3.
        """
        matrix_44 = np.stack([C1, C2, weights_4, GRAD_SQ])
        covariance_K44 = matrix_44 @ self.covariance_K44 @ matrix_44.T
        constants_4 = matrix_44 @ self.constants_4
        return replace(self, constants_4=constants_4, covariance_K44=covariance_K44)

    @property
    def c1(self) -> float:
        """Total variance of the gradient across prompts, tr Cov g(X)."""
        return float(self.constants_4[0])

    @property
    def c2(self) -> float:
        """Coefficient of 1/G in the noise from a prompt's completions."""
        return float(self.constants_4[1])

    @property
    def c3(self) -> float:
        """Coefficient of 1/(G (G-1)), the noise from the leave-one-out baseline."""
        return float(self.constants_4[2])

    @property
    def covariance_33(self) -> Array:
        """Covariance of the errors of C1, C2 and C3."""
        return self.covariance_K44[:, :3, :3].sum(axis=0)

    @property
    def dof(self) -> float:
        """Degrees of freedom of `covariance_33`.

        The formula of Welch and Satterthwaite gives degrees of freedom for each of the three
        constants. The result is the smallest of these three values.
        """
        variance_K3 = np.diagonal(self.covariance_K44[:, :3, :3], axis1=1, axis2=2)
        return min(pooled_dof(variance_K, self.part_dof) for variance_K in variance_K3.T)

    @property
    def has_errors(self) -> bool:
        """True if C1, C2, C3 and their errors are known; a stored result may lack the errors."""
        is_finite = (
            np.isfinite(self.constants_4[:3]).all() and np.isfinite(self.covariance_33).all()
        )
        return bool(is_finite) and math.isfinite(self.part_dof)

    @property
    def _estimates(self) -> Estimates:
        constants_S3, covariance_S33 = self.constants_4[None, :3], self.covariance_33[None]
        return Estimates(constants_S3, covariance_S33, self.dof, self.prompts, self.prior)

    @property
    def undrawn(self) -> float:
        """Allowance for prompts that were not drawn, as a relative variance of C1.

        It is `kappa / m_eff` in the docstring of `group_size`.
        """
        if not self.c3 > 0:
            return math.inf
        relative = float(self.covariance_33[2, 2]) / self.c3**2
        return UNDRAWN_VARIANCE * (1 / self.prompts + relative)

    def linear(self, weights_4: Array, level: float = CONFIDENCE) -> Interval:
        """Estimate a linear combination of the four constants, with a Student's t interval.

        Args:
            weights_4: weights of C1, C2, C3 and ||grad J||^2.
            level: confidence level.
        """
        variance_K = np.maximum(self._covariance(weights_4, weights_4), 0.0)
        dof = pooled_dof(variance_K, self.part_dof)
        estimate = float(_weighted(weights_4, self.constants_4).sum())
        return t_interval(estimate, float(variance_K.sum()), dof, level)

    def ratio(
        self, above_4: Array, below_4: Array, level: float = CONFIDENCE, factor: float = 1.0
    ) -> Interval:
        """Estimate the ratio of two linear combinations whose true values are at least 0.

        The interval comes from `fieller_set`.

        Args:
            above_4, below_4: weights of the four constants in numerator and denominator.
            level: confidence level.
            factor: number by which the critical value is multiplied; above 1 for a wider interval.

        Returns:
            The ratio. The estimate is NaN if the denominator is not positive, or if the interval is
            [0, infinity). The ends are NaN if the errors are unknown.
        """
        above, below = (float(_weighted(x, self.constants_4).sum()) for x in (above_4, below_4))
        above_K, mixed_K, below_K = (
            self._covariance(left, right)
            for left, right in ((above_4, above_4), (above_4, below_4), (below_4, below_4))
        )
        variances = float(above_K.sum()), float(mixed_K.sum()), float(below_K.sum())
        if math.isnan(sum(variances)) and not math.isnan(above):
            return UNDETERMINED._replace(estimate=above / below if below > 0 else math.nan)
        dof = min(pooled_dof(above_K, self.part_dof), pooled_dof(below_K, self.part_dof))
        low, high = fieller_set(above, below, variances, factor * t_quantile(dof, level))
        determined = below > 0 and not (low == 0 and math.isinf(high))
        return Interval(max(0.0, above / below) if determined else math.nan, low, high)

    def _covariance(self, left_4: Array, right_4: Array) -> Array:
        """Return the contribution of each of the K parts to a covariance, [K].

        It is the covariance of the errors of two linear combinations of the four constants.
        """
        return _weighted(np.outer(left_4, right_4), self.covariance_K44).sum(axis=(1, 2))

    def mse(self, num_prompts: int, group_size: float) -> float:
        """Compute MSE(B, G) for B independently drawn prompts; see the module's docstring."""
        second = self.c3 / (group_size * (group_size - 1))
        return (self.c1 + self.c2 / group_size + second) / num_prompts

    def n_mse(self, group_size: float) -> float:
        """Compute n times the MSE of n rollouts in groups of G, which does not depend on n.

        It is G C1 + C2 + C3/(G-1).
        """
        return group_size * self.c1 + self.c2 + self.c3 / (group_size - 1)

    def least(self, sizes: Sequence[int]) -> int:
        """Return the group size with the smallest estimated error at a fixed number of rollouts."""
        return min(sizes, key=self.n_mse)

    def best_of(self, sizes: Sequence[int]) -> int:
        """Return the group size that `decide` chooses, even if the data do not bound its error.

        If the errors of the constants are unknown, return the result of `least` instead.
        """
        if not (self.has_errors and self.c3 > 0):
            return self.least(sizes)
        return self.decide(sizes).group_size

    def decide(self, sizes: Sequence[int]) -> Decision:
        """Choose a group size, with a bound on its extra error; see `Decision`.

        Args:
            sizes: group sizes to choose from, each at least 2.
        """
        place, tolerance = self._estimates.decide(sizes)
        bound = float(tolerance[0])
        return Decision(sizes[int(place[0])], bound if math.isfinite(bound) else None)

    def support(self, sizes: Sequence[int]) -> tuple[int, float]:
        """Return the size that `decide` chooses, and how strongly the data support it.

        The support is the probability that the extra error of this size is at most 5 %, the
        smallest tolerance; see `Estimates.choose`. A decision also needs enough prompts.
        """
        place, probabilities, _ = self._estimates.choose(sizes)
        return sizes[int(place[0])], min(float(probabilities[0, 0]), 1.0)

    def costs(self, rollouts: int) -> GroupSizeCosts:
        """Compute the extra error of each admissible group size, with simultaneous intervals.

        Args:
            rollouts: number of rollouts per training step, n.

        Raises:
            ValueError: n < 2.
        """
        sizes = divisors(rollouts)
        best, tolerance = self.decide(sizes)
        extra = {size: self.extra_error(size, best) for size in sizes}
        return GroupSizeCosts(rollouts, best, extra, tolerance)

    def best_size(self, prompt_cost: float = 0.0, completion_cost: float = 1.0) -> float:
        """Return the G > 1 that minimises the error at a fixed cost; NaN if there is none.

        Args:
            prompt_cost: cost of reading a prompt, k, paid once per group.
            completion_cost: cost of a completion, c.

        >>> law = ScalingLaw.exact(1.0, 2.0, 9.0)
        >>> law.best_size(), round(law.best_size(10.0), 2)
        (4.0, 7.77)
        """
        if not (self.c1 > 0 and self.c3 > 0 and (prompt_cost == 0 or self.c2 >= 0)):
            return math.nan
        if prompt_cost == 0:
            return 1 + math.sqrt(self.c3 / self.c1)
        low, high = 1 + 1e-6, MAX_GROUP_SIZE
        for _ in range(80):
            middle = 1 + math.sqrt((low - 1) * (high - 1))
            if self._slope(middle, prompt_cost, completion_cost) < 0:
                low = middle
            else:
                high = middle
        return high

    def _slope(self, g: float, k: float, c: float) -> float:
        """Compute the derivative with respect to G of the error at a fixed cost K, times K.

        K times the error is `(k + G c) { C1 + C2/G + C3/(G (G-1)) }`. Its derivative is
        `c C1 - k C2/G^2 - { c/(G-1)^2 + k (2G-1)/(G (G-1))^2 } C3`, which increases with G if
        C2, C3 >= 0.
        """
        third = -c / (g - 1) ** 2 - k * (2 * g - 1) / (g * (g - 1)) ** 2
        return c * self.c1 - k / g**2 * self.c2 + third * self.c3

    def gstar(self, prompt_cost: float = 0.0, completion_cost: float = 1.0) -> Interval:
        """Estimate the best G at a fixed cost.

        If the data decide among `USUAL_SIZES`, the interval is the smallest one that contains the
        central 95 % of the posterior under every prior density. Without a prior, it is Fieller's
        set. If the data do not decide, the interval has no upper end. Its lower end is then the
        lower end of Fieller's set with twice the critical value.

        The estimate is the plug-in estimate if the interval contains it. If not, it is the best G
        for the posterior median of log(C3/C1), averaged over the prior densities. The estimate is
        NaN if there is no best G. It is too large on average, because `1 + sqrt(C3/C1)` is convex
        in C1.

        Args:
            prompt_cost, completion_cost: see `best_size`.
        """
        costs = prompt_cost, completion_cost
        plain = self.best_size(*costs)
        if not self.has_errors or not self.covariance_33.any():
            return Interval(plain, math.nan, math.nan)
        if not self.c3 > 0:
            return Interval(plain, 1.0, math.inf)
        if self.decide(USUAL_SIZES).tolerance is None:
            ((least, _),) = self._estimates.confidence_sets(CONFIDENCE, ONE_SIDED_FACTOR)
            low = self._best_at(least, *costs) if least > MIN_RATIO else 1.0
            return Interval(plain, low, math.inf)
        low, middle, high = (
            self._best_at(ratio, *costs) for ratio in self._estimates.ratio_quantiles(CONFIDENCE)
        )
        return Interval(plain if low <= plain <= high else middle, low, high)

    def gstar_of_data(self) -> Interval:
        """Estimate G* at a fixed number of rollouts from the data alone, without a prior.

        The interval is Fieller's set. It allows for the variance of prompts that were not drawn;
        see `group_size`. It has no upper end if the data do not exclude C1 = 0.
        """
        plain = self.best_size()
        if not self.has_errors or not self.covariance_33.any():
            return Interval(plain, math.nan, math.nan)
        if not self.c3 > 0:
            return Interval(plain, 1.0, math.inf)
        ((low, high),) = self._estimates.confidence_sets(CONFIDENCE)
        return Interval(plain, self._best_at(low), self._best_at(high))

    def _best_at(self, ratio: float, *costs: float) -> float:
        """Return the best G if C3/C1 equals `ratio`, and C2 and C3 equal their estimates."""
        if math.isinf(ratio):
            return math.inf
        return ScalingLaw.exact(self.c3 / ratio, max(self.c2, 0.0), self.c3).best_size(*costs)

    def extra_error(self, group_size: float, reference: int, level: float = CONFIDENCE) -> Interval:
        """Estimate the extra error of G compared with R, MSE(n/G, G) / MSE(n/R, R) - 1, at fixed n.

        The estimate uses the estimated constants. For the interval, note that the extra error is
        monotonic in k = C3/C1. The ends of its interval are therefore the extra errors at the two
        ends of the posterior interval of k. All pairs of G and R share this interval of k. The
        intervals of all extra errors therefore hold simultaneously, even if R was chosen with the
        same data.

        Args:
            group_size: G.
            reference: group size R with which G is compared.
            level: confidence level.

        Returns:
            The extra error; 0 with an interval of width 0 if G = R. All three numbers are NaN if
            the estimate of either MSE is not positive. The ends are NaN if the errors of the
            constants are unknown, or if there are too few effective prompts (see `Prior`).
        """
        error, other = self.n_mse(group_size), self.n_mse(reference)
        if not (error > 0 and other > 0):
            return UNDETERMINED
        extra = error / other - 1
        if group_size == reference:
            return Interval(0.0, 0.0, 0.0)
        least = self.prior.min_effective_prompts
        if not (self.has_errors and self.undrawn <= UNDRAWN_VARIANCE / least):
            return Interval(extra, math.nan, math.nan)
        low, _, high = self._estimates.ratio_quantiles(level)
        rest = max(self.c2, 0.0) / self.c3

        def relative(size: float, ratio: float) -> float:
            return size / ratio + rest + 1 / (size - 1)

        ends = [relative(group_size, k) / relative(reference, k) - 1 for k in (low, high)]
        return Interval(extra, min(extra, *ends), max(extra, *ends))

    def prompts_to_decide(self, sizes: Sequence[int]) -> tuple[float, float]:
        """Estimate how many prompts a study like this one needs to decide on a group size.

        The first number is the number of prompts at which 50 % of studies decide, the second the
        number at which 90 % decide. A number is infinite if 10^6 prompts do not suffice, or if the
        errors of the constants are unknown.

        Args:
            sizes: group sizes to choose from.
        """
        if not (self.has_errors and self.c3 > 0):
            return math.inf, math.inf
        return self._estimates.prompts_to_decide(sizes)

    def constants_ratio(self, level: float = CONFIDENCE) -> Interval:
        """Estimate k = C3/C1 with Fieller's interval, without a prior."""
        return self.ratio(C3, C1, level)

    def noise_scale(
        self,
        group_size: float,
        prompt_cost: float = 0.0,
        completion_cost: float = 1.0,
        level: float = CONFIDENCE,
    ) -> Interval:
        """Estimate n_c(G) with Fieller's interval, which has no upper end if ||grad J||^2 may be 0.

        Both ends are corrected for a selection effect. An upper end exists mostly in samples that
        overestimate ||grad J||^2. It is therefore computed at a higher two-sided confidence level
        (.995 for a `level` of .95), and it exists only if ||grad J||^2 differs from 0 at that
        level. The upper end is missing mostly in samples that underestimate ||grad J||^2. In this
        case the critical value for the lower end is doubled.

        Args:
            group_size: G > 1; if G is NaN, the result is NaN. At the estimate of G*, the result
                also estimates the minimum of n_c over G, because n_c has zero slope there. Its
                interval is then valid to first order.
            prompt_cost, completion_cost: cost of reading a prompt, k, and of a completion, c, in
                the unit of the result. The defaults give a result in rollouts.
            level: confidence level.

        >>> law = ScalingLaw.exact(1.0, 2.0, 9.0, 0.5)
        >>> law.noise_scale(4), law.noise_scale(4, 8.0, 3.0).estimate
        (Interval(estimate=18.0, low=18.0, high=18.0), 90.0)
        """
        if not math.isfinite(group_size):
            return UNDETERMINED
        unit = completion_cost + prompt_cost / group_size
        error_4 = unit * (group_size * C1 + C2 + C3 / (group_size - 1))
        high = self.ratio(error_4, GRAD_SQ, 1 - (1 - level) / 10).high
        factor = 1.0 if math.isfinite(high) else ONE_SIDED_FACTOR
        low = self.ratio(error_4, GRAD_SQ, level, factor).low
        return Interval(self.ratio(error_4, GRAD_SQ, level).estimate, low, high)

    def prompt_share(self, group_size: float, level: float = CONFIDENCE) -> Interval:
        """Estimate the share of the noise that comes from the random choice of prompts, in [0, 1].

        The share is G C1 / ( G C1 + C2 + C3/(G-1) ). Sampling more rollouts of the same prompts
        does not reduce this part of the noise. The interval is computed from Fieller's interval for
        the odds `G C1 / (C2 + C3/(G-1))`. The relative variance of C1 is increased by `undrawn`, to
        allow for prompts that were not drawn. This is done at each value of the odds that Fieller's
        method tests.

        Args:
            group_size: G > 1; if G is NaN, the result is NaN.
            level: confidence level.
        """
        if not math.isfinite(group_size):
            return UNDETERMINED
        prompts, completions = group_size * self.c1, self.c2 + self.c3 / (group_size - 1)
        if not prompts + completions > 0:
            return Interval(math.nan, 0.0, 1.0)
        share = min(max(prompts / (prompts + completions), 0.0), 1.0)
        if not np.isfinite(self.covariance_33).all():
            return UNDETERMINED._replace(estimate=share)
        weights_23 = np.array([[group_size, 0.0, 0.0], [0.0, 1.0, 1 / (group_size - 1)]])
        (above, mixed), (_, below) = weights_23 @ self.covariance_33 @ weights_23.T
        below += self.undrawn * completions**2
        critical = t_quantile(self.dof, level)
        odds = fieller_set(prompts, completions, (above, mixed, below), critical)
        low, high = (1.0 if math.isinf(x) else x / (1 + x) for x in odds)
        return Interval(share, low, high)

    def intervals(self, group_size: int) -> dict[str, Interval]:
        """Return the intervals of all quantities at a group size, keyed by name.

        The names are `c1`, `c2`, `c3`, `grad_sq`, `gstar`, `noise_scale`, `prompt_share`, and
        `noise_scale_best`, which is the noise scale at the estimate of G*.
        """
        numbers = zip(CONSTANTS_AND_GRADIENT, (C1, C2, C3, GRAD_SQ), strict=True)
        return {
            **{name: self.linear(weights_4) for name, weights_4 in numbers},
            "gstar": self.gstar(),
            "noise_scale": self.noise_scale(group_size),
            "noise_scale_best": self.noise_scale(self.best_size()),
            "prompt_share": self.prompt_share(group_size),
        }


def _weighted(weights: Array, values: Array) -> Array:
    """Multiply weights and values elementwise; a weight of 0 gives 0 even if the value is NaN."""
    return np.where(weights != 0, weights * values, 0.0)


def noise_share(scale: Interval, rollouts: float) -> Interval:
    """Compute the noise share n_c / (n + n_c), the part of E||ghat||^2 that is noise.

    Args:
        scale: n_c with its interval.
        rollouts: number of rollouts per step, n.

    >>> noise_share(Interval(300.0, 100.0, math.inf), 100.0)
    Interval(estimate=0.75, low=0.5, high=1.0)
    """
    return Interval(*(1.0 if math.isinf(x) else x / (rollouts + x) for x in scale))


def divisors(rollouts: int) -> list[int]:
    """List the group sizes G >= 2 that divide n.

    Raises:
        ValueError: n < 2.
    """
    if rollouts < 2:
        raise ValueError(f"rollouts={rollouts}: a group needs at least 2 rollouts")
    return [size for size in range(2, rollouts + 1) if rollouts % size == 0]


def divisible_rollouts(rollouts: int) -> int:
    """Return n, or the next multiple of 8 if n is prime, because a prime n allows only G = n.

    >>> divisible_rollouts(10), divisible_rollouts(97), divisible_rollouts(2)
    (10, 104, 8)
    """
    if any(rollouts % size == 0 for size in range(2, rollouts)):
        return rollouts
    return math.ceil(rollouts / WHOLE_GROUPS) * WHOLE_GROUPS
