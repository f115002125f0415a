r"""Exact covariance matrices of gradient estimators (paper, Lemma 1, Theorem 2, Proposition 3).

A completion has the score s (the gradient of its log-probability) and the reward z. A prompt has
the expected reward V, the reward variance sigma^2 and the gradient g = E[s z]. With G completions,
the covariance of the estimator for one prompt depends on the baseline b:

    any b(x)         ( E[s s' (z - b)^2] - g g' ) / G
    leave-one-out    ( E[s s' (z - V)^2] - g g' ) / G  +  ( E[s s'] sigma^2 + g g' ) / ( G (G-1) )

For B prompts X drawn independently, the covariance is `( Cov g(X) + E cov_X ) / B`, where cov_X is
the covariance above. The traces of these matrices are the errors that `estimators.moments`
computes.

In the names of arrays, K is the number of parameters, Y the number of possible completions of a
prompt (outcomes), and R the number of policies. In a simulation, each of the R replicates has a
policy of its own.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from grpo_ustat.config.gap import SIMULATED_BASELINES
from grpo_ustat.records import Array


@dataclass(frozen=True)
class CovarianceParts:
    """Parts of the covariance `( prompts + completions / G + pairs / (G (G-1)) ) / B`."""

    # Cov g(X), the variation between prompts. Its trace is C1.
    prompts: Array
    # Coefficient of 1/G. Its trace is C2.
    completions: Array
    # Coefficient of 1/(G (G-1)). Its trace is C3. It is zero for exact baselines, because only an
    # estimated baseline adds noise.
    pairs: Array

    def covariance(self, num_prompts: int, group_size: int) -> Array:
        """Return the covariance for B prompts with G completions each, [K, K, R]."""
        pairs = self.pairs / (group_size * (group_size - 1)) if group_size > 1 else 0 * self.pairs
        return (self.prompts + self.completions / group_size + pairs) / num_prompts


def covariance_parts(
    probability_PYR: Array, score_PYKR: Array, rewards_PY: Array, baseline: str
) -> CovarianceParts:
    """Return the parts of an estimator's covariance at every replicate's policy.

    Args:
        probability_PYR: probabilities, pi(y|x).
        score_PYKR: scores, d log pi(y|x) / du, for the policy's coordinates u.
        rewards_PY: rewards, r(x, y).
        baseline: one of `SIMULATED_BASELINES`. `optimal` is the baseline that minimises the trace
            of each prompt's covariance: `b* = E[q z] / E q` with `q = ||s||^2`.

    Raises:
        ValueError: If the baseline is not in `SIMULATED_BASELINES`.
    """
    if baseline not in SIMULATED_BASELINES:
        raise ValueError(
            f"baseline {baseline!r} has no exact covariance: use {', '.join(SIMULATED_BASELINES)}"
        )
    z_PYR = np.broadcast_to(rewards_PY[..., None], probability_PYR.shape)
    value_PR = (probability_PYR * z_PYR).sum(axis=1)
    g_PKR = np.einsum("pyr,pykr->pkr", probability_PYR * z_PYR, score_PYKR)
    mean_KR = g_PKR.mean(axis=0)
    b_PR = baseline_values(probability_PYR, score_PYKR, rewards_PY, baseline)
    first = _second_moment(probability_PYR * np.square(z_PYR - b_PR[:, None]), score_PYKR)
    products = np.einsum("pkr,plr->klr", g_PKR, g_PKR) / len(g_PKR)
    pairs = np.zeros_like(products)
    if baseline == "leave_one_out":
        variance_PR = (probability_PYR * np.square(z_PYR - value_PR[:, None])).sum(axis=1)
        pairs = _second_moment(probability_PYR * variance_PR[:, None], score_PYKR) + products
    return CovarianceParts(products - mean_KR[:, None] * mean_KR[None], first - products, pairs)


def baseline_values(
    probability_PYR: Array, score_PYKR: Array, rewards_PY: Array, baseline: str
) -> Array:
    """Return the exact baseline b(x), [P, R]; `leave_one_out` gives its expectation V."""
    if baseline == "none":
        return np.zeros((len(rewards_PY), probability_PYR.shape[-1]))
    weight_PYR = probability_PYR
    if baseline == "optimal":
        weight_PYR = probability_PYR * np.square(score_PYKR).sum(axis=2)
    return (weight_PYR * rewards_PY[..., None]).sum(axis=1) / weight_PYR.sum(axis=1)


def _second_moment(weight_PYR: Array, score_PYKR: Array) -> Array:
    """Return the mean over prompts of `sum_y w s s'` with the given weights w, [K, K, R]."""
    total_KKR = np.einsum("pyr,pykr,pylr->klr", weight_PYR, score_PYKR, score_PYKR)
    return total_KKR / len(weight_PYR)
