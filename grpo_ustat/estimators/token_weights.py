r"""Token weights of a row that was not sampled from the current policy.

A row is a completion. It was sampled from a policy mu, but the gradient is taken at the current
policy pi. A row with advantage A adds to the update

    w ( A sum_t omega_t u_t - beta sum_t kappa_t u_t )

Here u_t = grad log pi(token t | before), w is the weight of the row from
`row_weights.token_weights`, omega_t is the token weight, and beta and kappa_t belong to a KL
penalty. Let l_t, o_t and r_t be the log-probabilities of token t under pi, under mu and under a
reference model. The importance ratio of the token is rho_t = exp(l_t - o_t). The setting
`importance_sampling_level` determines the ratio rho:

    token: rho = rho_t; sequence: (prod_t rho_t)^(1/L); whole_sequence: prod_t rho_t

The token weights omega follow from the derivatives of the losses with respect to l_t:

    form       omega                                     source
    none       1                                         no ratio: staleness is ignored
    clip       rho; 0 if clipped: A > 0 and              Schulman et al. 2017
               rho > 1 + epsilon_high, or A < 0 and
               rho < 1 - epsilon
    cispo      min(rho_t, epsilon_high)                  MiniMax-M1 2025
    sapo       4 s (1 - s) rho_t, s = sigmoid(tau (rho_t - 1)),  arXiv 2511.20347
               tau = 1 if A > 0, else 1.05
    vespo      W^k exp(lambda (1 - W)), W = prod_t rho_t,        arXiv 2602.10693
               (k, lambda) = (2, 3) if A >= 0, else (3, 2)

The level `whole_sequence` without clipping is unbiased: with W = prod_t rho_t, reward R and score
s, `E_mu[ W R s ] = E_pi[ R s ]` (Theorem 12 without normalisation). All other weights are biased.

**Kinds of vectors.** The sums over t are the vectors of a row; they are computed before A is known.
Clipping, `sapo` and `vespo` depend on the sign of A, so a row then has one vector for each sign
(`KINDS`). A KL penalty in the loss adds another vector. A KL penalty in the reward Z does not:

    k3 in the loss     kappa_t = 1 - exp(r_t - l_t)
    k2 in the loss     kappa_t = l_t - r_t
    k1 in the reward   Z - beta sum_t (o_t - r_t) replaces Z

**Corrections.** Completions can come from an inference engine whose probabilities differ slightly
from the model's. omega is then multiplied by a correction, as in TRL 1.16
(`vllm_importance_sampling_mode`). Let q be the ratio pi/mu of each token (`token_...`), or of the
whole completion (`sequence_...`). With `..._truncate`, the correction is min(q, cap). With
`..._mask`, it is q if q <= cap, and 0 otherwise. If the loss has one ratio per completion, TRL
multiplies its (B, 1) losses by (B, T) corrections and sums over tokens. In effect, each token is
multiplied by the mean correction of its completion (`TokenWeights.shared`).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from grpo_ustat.records import Array, Mask

ALL, POSITIVE, NEGATIVE, PENALTY = KINDS = ("all", "positive", "negative", "penalty")
CORRECTIONS = ("token_truncate", "token_mask", "sequence_truncate", "sequence_mask")
# tau of `sapo` for positive advantages, then for all other advantages.
SAPO_TEMPERATURES = (1.0, 1.05)
# k and lambda of `vespo`. The first value of each is for advantages of at least 0, the second for
# negative advantages.
VESPO_POWERS, VESPO_DECAYS = (2.0, 3.0), (3.0, 2.0)
# Lower and upper bound to which `vespo` clips log W.
VESPO_LOG_RATIOS = (float(np.log(1e-8)), 20.0)


@dataclass(frozen=True)
class TokenWeights:
    """Definition of the token weights of a row; by default all weights are 1."""

    # Level of the importance ratio: none, token, sequence or whole_sequence.
    level: str = "none"
    # Function of the importance ratio: clip, cispo, sapo or vespo.
    form: str = "clip"
    # Clipping bounds of the ratio: 1 - epsilon and 1 + epsilon_high; `cispo` uses epsilon_high
    # itself as the upper bound. None if the ratio is not clipped.
    epsilon: float | None = None
    epsilon_high: float | None = None
    # Coefficient of the KL penalty; 0 if there is no penalty.
    beta: float = 0.0
    # Estimator of the KL penalty: k1, k2 or k3; None if there is no penalty.
    kl_estimator: str | None = None
    # Place of the KL penalty: "loss" or "reward"; None if there is no penalty.
    kl_in: str | None = None
    # Correction for a sampler whose probabilities differ from the model's, one of `CORRECTIONS`;
    # None if there is no correction.
    correction: str | None = None
    # Cap of the ratio q in the correction.
    cap: float = 3.0
    # True if each token gets the mean correction of its completion instead of its own.
    shared: bool = False

    @property
    def kinds(self) -> tuple[str, ...]:
        """Kinds of vectors of each row; see the module's docstring."""
        by_sign = self.level != "none" and (
            self.form in ("sapo", "vespo") or (self.form == "clip" and self.epsilon is not None)
        )
        penalty = (PENALTY,) if self.beta and self.kl_in == "loss" else ()
        return ((POSITIVE, NEGATIVE) if by_sign else (ALL,)) + penalty

    @property
    def unbiased(self) -> bool:
        """True if the expectation of the update does not depend on the sampling policy mu."""
        exact = self.level == "whole_sequence" and self.form == "clip" and self.epsilon is None
        return exact and not self.beta and self.correction is None


# Importance weights that make the gradient unbiased; their variance can be very large.
EXACT = TokenWeights(level="whole_sequence")


def token_factors(
    weights: TokenWeights,
    kind: str,
    own_NT: Array,
    old_NT: Array,
    counts_NT: Mask,
    reference_NT: Array | None = None,
) -> Array:
    """Compute the token weights of one kind of vector, [N, T]; 0 for tokens that do not count.

    The result is kappa if `kind` is the penalty, and omega for other kinds. The kinds `positive`
    and `negative` give omega for an advantage of this sign.

    Args:
        weights: definition of the token weights.
        kind: one of `weights.kinds`.
        own_NT: log-probabilities under the current policy, l.
        old_NT: log-probabilities under the policy that wrote the rows, o.
        counts_NT: True for tokens that the policy wrote.
        reference_NT: log-probabilities under the reference model, r; only for a penalty.

    >>> own, old = np.log([[0.5, 0.5]]), np.log([[0.25, 0.5]])
    >>> counts, clipped = np.ones((1, 2), bool), TokenWeights("token", "clip", 0.2, 0.2)
    >>> token_factors(clipped, "positive", own, old, counts).round(3).tolist()
    [[0.0, 1.0]]
    >>> token_factors(clipped, "negative", own, old, counts).round(3).tolist()
    [[2.0, 1.0]]
    >>> whole = TokenWeights(correction="sequence_truncate")
    >>> token_factors(whole, "all", own, old, counts).tolist()
    [[2.0, 2.0]]
    """
    if kind == PENALTY:
        assert reference_NT is not None
        lead_NT = np.where(counts_NT, own_NT - reference_NT, 0.0)
        return lead_NT if weights.kl_estimator == "k2" else -np.expm1(-lead_NT)
    change_NT = np.where(counts_NT, own_NT - old_NT, 0.0)
    total_N1 = change_NT.sum(axis=1, keepdims=True)
    factor_NT = counts_NT.astype(float)
    if weights.level != "none":
        log_ratio = {
            "token": change_NT,
            "sequence": total_N1 / np.maximum(counts_NT.sum(axis=1, keepdims=True), 1),
            "whole_sequence": total_N1,
        }[weights.level]
        factor_NT *= _of_ratio(weights, kind, log_ratio)
    if weights.correction is not None:
        level, way = weights.correction.split("_")
        gap = np.exp(change_NT if level == "token" else total_N1)
        beyond = gap > weights.cap
        corrected = np.where(beyond, weights.cap if way == "truncate" else 0.0, gap)
        if weights.shared and level == "token":
            counted_N1 = np.maximum(counts_NT.sum(axis=1, keepdims=True), 1)
            corrected = (corrected * counts_NT).sum(axis=1, keepdims=True) / counted_N1
        factor_NT *= corrected
    return factor_NT


def _of_ratio(weights: TokenWeights, kind: str, log_ratio: Array) -> Array:
    """Compute omega from the logarithm of the ratio rho, for the sign of A that `kind` gives."""
    ratio, below = np.exp(log_ratio), kind == NEGATIVE
    if weights.form == "cispo":
        high = weights.epsilon_high
        return ratio if high is None else np.minimum(ratio, high)
    if weights.form == "sapo":
        # SciPy is imported here so that a rejected command line fails without loading it.
        from scipy.special import expit

        gate = expit(SAPO_TEMPERATURES[below] * (ratio - 1))
        return 4 * gate * (1 - gate) * ratio
    if weights.form == "vespo":
        bounded = np.clip(log_ratio, *VESPO_LOG_RATIOS)
        decay = VESPO_DECAYS[below]
        return np.exp(decay + VESPO_POWERS[below] * bounded - decay * np.exp(bounded))
    if weights.epsilon is None:
        return ratio
    assert weights.epsilon_high is not None
    inside = ratio >= 1 - weights.epsilon if below else ratio <= 1 + weights.epsilon_high
    return ratio * inside


def by_kind(advantage: Array, kinds: Sequence[str], beta: float = 0.0) -> Array:
    """Return the factor by which each kind of vector is multiplied in the update, [K, ...].

    It is the advantage, or 0 if the kind is for advantages of the other sign, or -beta for the
    penalty.

    Args:
        advantage: advantages of the rows.
        kinds: K kinds of vectors.
        beta: coefficient of the KL penalty.

    >>> by_kind(np.array([2.0, -1.0]), ("positive", "negative", "penalty"), 0.5).tolist()
    [[2.0, 0.0], [0.0, -1.0], [-0.5, -0.5]]
    """
    of = {
        ALL: advantage,
        POSITIVE: np.maximum(advantage, 0.0),
        NEGATIVE: np.minimum(advantage, 0.0),
        PENALTY: np.full_like(advantage, -beta),
    }
    return np.stack([of[kind] for kind in kinds])


def reward_penalty(
    weights: TokenWeights, old_NT: Array, reference_NT: Array, counts_NT: Mask
) -> Array:
    """Compute the penalty, beta times k1, that is subtracted from each completion's reward, [N]."""
    return weights.beta * np.where(counts_NT, old_NT - reference_NT, 0.0).sum(axis=1)
