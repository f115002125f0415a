r"""Enumerable autoregressive policy, used to test importance ratios and KL terms.

The policy writes completions of exactly L tokens from a vocabulary of V tokens. All Y = V^L
completions y are listed, so that expectations are exact sums. The logit of a token depends on its
position t, the previous token and the prompt x:

    pi(v | x, y_<t) = softmax_v( theta[t, y_{t-1}, v] + offset[x, v] )        y_{-1} = 0

All prompts share the D = L V^2 parameters theta. The score (gradient of the log-probability) of the
token at position t is nonzero only in row (t, y_{t-1}) of theta.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import cached_property

import numpy as np
from scipy.special import logsumexp

from grpo_ustat.draws import generator


@dataclass(frozen=True)
class SequencePolicy:
    """Policy over completions of L tokens from a vocabulary of V tokens.

    >>> policy = SequencePolicy(np.zeros((2, 2, 2)), np.zeros((1, 2)))
    >>> policy.completions_YL.tolist(), policy.probabilities_PY.tolist()
    ([[0, 0], [0, 1], [1, 0], [1, 1]], [[0.25, 0.25, 0.25, 0.25]])
    >>> reward_PY = np.array([[0.0, 0.0, 0.0, 1.0]])
    >>> policy.value_P(reward_PY).tolist(), policy.gradient_PD(reward_PY)[0, :2].tolist()
    ([0.25], [-0.125, 0.125])
    """

    # Parameters, indexed by position, previous token and token. At the first position, the previous
    # token is 0.
    theta_LVV: np.ndarray
    # Constant that each prompt adds to the logit of each token.
    offset_PV: np.ndarray

    def at(self, theta_D: np.ndarray) -> SequencePolicy:
        """Return the same policy with the parameters theta_D."""
        return replace(self, theta_LVV=theta_D.reshape(self.theta_LVV.shape))

    @property
    def theta_D(self) -> np.ndarray:
        """Parameters as a vector."""
        return self.theta_LVV.ravel()

    @cached_property
    def completions_YL(self) -> np.ndarray:
        """All completions as token indices, [Y, L]."""
        length, size, _ = self.theta_LVV.shape
        return np.indices((size,) * length).reshape(length, -1).T

    @cached_property
    def next_PYLV(self) -> np.ndarray:
        """Probabilities pi(v | x, y_<t) of all tokens at every position of every completion."""
        return np.exp(self._next_log_PYLV)

    @cached_property
    def logprob_PYL(self) -> np.ndarray:
        """Log-probabilities log pi(y_t | x, y_<t) of the completions' tokens."""
        return (self._next_log_PYLV * self._token_YLV).sum(axis=-1)

    @cached_property
    def probabilities_PY(self) -> np.ndarray:
        """Probabilities pi(y|x) of the completions."""
        return np.exp(self.logprob_PYL.sum(axis=-1))

    @cached_property
    def token_scores_PYLD(self) -> np.ndarray:
        """Token scores grad log pi(y_t | x, y_<t); a large array unless the policy is small."""
        positions_LL = np.eye(len(self.theta_LVV))
        return np.stack([self.weighted_scores(only_L) for only_L in positions_LL], axis=2)

    @cached_property
    def scores_PYD(self) -> np.ndarray:
        """Scores grad log pi(y|x) of the completions."""
        return self.weighted_scores(np.ones(len(self.theta_LVV)))

    def weighted_scores(self, weight_PYL: np.ndarray) -> np.ndarray:
        """Return `sum_t weight_t grad log pi(y_t | x, y_<t)`, [P, Y, D].

        The weights are broadcast to [P, Y, L].
        """
        return self._in_rows(weight_PYL[..., None] * (self._token_YLV - self.next_PYLV))

    def value_P(self, reward_PY: np.ndarray) -> np.ndarray:
        """Return the expected reward V(x)."""
        return (self.probabilities_PY * reward_PY).sum(axis=1)

    def gradient_PD(self, reward_PY: np.ndarray) -> np.ndarray:
        """Return the gradient of the expected reward V(x), which is `E[s z | x]`."""
        return _mean(self.probabilities_PY * reward_PY, self.scores_PYD)

    def token_kl_gradient_PD(self, reference: SequencePolicy, prefix_PY: np.ndarray) -> np.ndarray:
        """Return the gradient of the token-level KL divergence, summed over positions.

        The result is the gradient of `sum_t E KL( reference(. | x, y_<t) || policy(. | x, y_<t) )`
        with respect to the policy's parameters, where the distribution of the prefixes y_<t is held
        fixed. With prefixes from the policy, it is what the K3 penalty's gradient estimates.
        With prefixes from the reference, it is the gradient of KL(reference || policy) over
        completions.

        Args:
            reference: reference policy.
            prefix_PY: probabilities of the completions whose prefixes are used.
        """
        return _mean(prefix_PY, self._in_rows(self.next_PYLV - reference.next_PYLV))

    @cached_property
    def _next_log_PYLV(self) -> np.ndarray:
        logits_PLVV = self.theta_LVV + self.offset_PV[:, None, None]
        table_PLVV = logits_PLVV - logsumexp(logits_PLVV, axis=-1, keepdims=True)
        return table_PLVV[:, np.arange(len(self.theta_LVV)), self._previous_YL]

    @cached_property
    def _previous_YL(self) -> np.ndarray:
        previous = np.roll(self.completions_YL, 1, axis=1)
        previous[:, 0] = 0
        return previous

    @cached_property
    def _token_YLV(self) -> np.ndarray:
        return np.eye(self.theta_LVV.shape[1])[self.completions_YL]

    def _in_rows(self, block_PYLV: np.ndarray) -> np.ndarray:
        """Write values for the logits, [P, Y, L, V], into vectors of all parameters, [P, Y, D].

        The V values of the token at position t are written to row (t, previous token) of theta.
        """
        prompts, count, length, size = block_PYLV.shape
        rows = np.zeros((prompts, count, length, size, size))
        rows[:, np.arange(count)[:, None], np.arange(length), self._previous_YL] = block_PYLV
        return rows.reshape(prompts, count, -1)


def build_sequences() -> tuple[SequencePolicy, SequencePolicy, np.ndarray]:
    """Draw a policy, a reference policy and 0/1 rewards [P, Y] of four prompts, easy to hard.

    A completion has five tokens from a vocabulary of two. Each prompt's 32 completions get random
    ranks r = 0 ... 31. Those with `(r/32)^difficulty >= 1/2` are right. 16, 9, 6 and 5 completions
    of the four prompts are right.
    """
    draw, length, size, prompts = generator(0, "sequences"), 5, 2, 4
    theta = draw.normal(size=(length, size, size))
    policy = SequencePolicy(theta, draw.normal(size=(prompts, size)) / 2)
    reference_D = policy.theta_D + 0.33 * draw.normal(size=policy.theta_D.shape)
    count, difficulty_P1 = size**length, np.array([[1.0], [2.0], [3.0], [4.0]])
    rank_PY = draw.random((prompts, count)).argsort(axis=1).argsort(axis=1)
    return policy, policy.at(reference_D), np.floor(2 * (rank_PY / count) ** difficulty_P1)


def _mean(law_PY: np.ndarray, vectors_PYD: np.ndarray) -> np.ndarray:
    return np.einsum("py,pyd->pd", law_PY, vectors_PYD)
