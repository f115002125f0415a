r"""Algorithm 2's gradient estimate at parameters that no longer wrote the completions (section 8).

A minibatch of B prompts, drawn independently, with G completions each of pi_old, gives at theta

    1/(B G) sum_b sum_i { A_i w_i + beta k_i }      A_i = z_i - mean of the group's others

    level      w                                    k
    token      sum_t rho_t grad log pi(y_t)         sum_t (pi_ref/pi - 1) grad log pi(y_t)
    sequence   rho grad log pi(y)                   rho times the same

with rho_t the token's ratio pi_theta / pi_old, rho the whole completion's. `token` is Algorithm 2;
`sequence`, with the ratio on the penalty too, is the unbiased reference.

The target is what both have as their mean at theta = theta_old, for all theta:

    grad J(theta) - beta sum_t E_{y ~ pi_theta} grad KL( pi_ref(.|y_<t) || pi_theta(.|y_<t) )

where grad acts on the divergence of the next token alone. Prefixes have the law of pi_theta, the
policy at hand, not that of pi_old: the target does not depend on who wrote the completions. With
prefixes of pi_old in it part of the penalty's bias is not counted: `token_bias2_kl_old_prefixes`.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from grpo_ustat.estimators.baselines import leave_one_out
from grpo_ustat.estimators.weighted import group_moments
from grpo_ustat.policy.sequences import SequencePolicy
from grpo_ustat.records import BaselineContext

LEVELS = ("token", "sequence")
ZERO = 1e-20  # a squared bias this far below the variance is rounding


@dataclass(frozen=True)
class Setting:
    """Who wrote, who is the reference, and the shape of a minibatch.

    Attributes:
        old: pi_old.
        reference: pi_ref.
        reward_PY: rewards of all completions.
        beta: weight of the penalty.
        num_prompts: B.
        group_size: G.
    """

    old: SequencePolicy
    reference: SequencePolicy
    reward_PY: np.ndarray
    beta: float
    num_prompts: int
    group_size: int

    def __post_init__(self):
        shape = self.old.logprob_PYL.shape
        assert self.reference.logprob_PYL.shape == shape and self.reward_PY.shape == shape[:2]

    def tables(self, current: SequencePolicy, level: str) -> tuple[np.ndarray, np.ndarray]:
        """w and beta k of every completion, each [P, Y, D]."""
        ratio_PYL = np.exp(current.logprob_PYL - self.old.logprob_PYL)
        excess_PYL = np.exp(self.reference.logprob_PYL - current.logprob_PYL) - 1
        penalty_PYD = self.beta * current.weighted_scores(excess_PYL)
        if level == "token":
            return current.weighted_scores(ratio_PYL), penalty_PYD
        whole_PY1 = ratio_PYL.prod(axis=2)[..., None]
        return whole_PY1 * current.scores_PYD, whole_PY1 * penalty_PYD

    def target(
        self, current: SequencePolicy, prefixes: SequencePolicy | None = None
    ) -> tuple[np.ndarray, np.ndarray]:
        """Both parts of what the estimate is for, reward and penalty, each [D].

        Args:
            current: pi_theta.
            prefixes: who writes the prefixes, pi_theta where None.
        """
        law_PY = (prefixes or current).probabilities_PY
        penalty_PD = current.token_kl_gradient_PD(self.reference, law_PY)
        policy_PD = current.gradient_PD(self.reward_PY)
        return policy_PD.mean(axis=0), -self.beta * penalty_PD.mean(axis=0)

    def quality(self, current: SequencePolicy) -> dict[str, float]:
        """Squared biases, variances and errors of both levels; `_kl` of the penalty's part alone.

        `_policy` is without the penalty; `ratio_second_moment` is E rho^2, mean over prompts.
        """
        found = {}
        for level in LEVELS:
            found |= {f"{level}_{k}": v for k, v in self._errors(current, level).items()}
        law_PY, penalty_PYD = self.old.probabilities_PY, self.tables(current, "token")[1]
        mean_D = np.einsum("py,pyd->d", law_PY, penalty_PYD) / len(law_PY)
        found["token_bias2_kl_old_prefixes"] = _sq(mean_D - self.target(current, self.old)[1])
        ratio_PY = current.probabilities_PY / law_PY
        found["ratio_second_moment"] = float((law_PY * ratio_PY**2).sum(axis=1).mean())
        return found

    def _errors(self, current: SequencePolicy, level: str) -> dict[str, float]:
        weight_PYD, penalty_PYD = self.tables(current, level)
        of, policy_D, penalty_D = self.old.probabilities_PY, *self.target(current)
        both = group_moments(of, weight_PYD, self.reward_PY, penalty_PYD)
        plain = group_moments(of, weight_PYD, self.reward_PY)
        policy_D = plain.mean_PD.mean(axis=0) - policy_D
        penalty_D = (both.mean_PD - plain.mean_PD).mean(axis=0) - penalty_D
        shape = (self.num_prompts, self.group_size)
        return {
            "bias2": _sq(policy_D + penalty_D),
            "bias2_policy": _sq(policy_D),
            "bias2_kl": _sq(penalty_D),
            "variance": both.variance(*shape),
            "variance_policy": plain.variance(*shape),
            "mse": _sq(policy_D + penalty_D) + both.variance(*shape),
        }

    def first_order_bias(self, direction_D: np.ndarray) -> np.ndarray:
        """Derivative at theta_old of the token level's bias along a direction, [D].

        With u_t the derivative of token t's log-probability and u their sum over the completion,
        `E[ z sum_t (u_t - u) grad log pi(y_t) ] - beta E[ u k ]`: ratios of other tokens are
        missing in the first term, all ratios in the second.
        """
        change_PYL = self.old.token_scores_PYLD @ direction_D
        whole_PY1 = change_PYL.sum(axis=2, keepdims=True)
        missing_PYD = self.old.weighted_scores(change_PYL - whole_PY1)
        missing_PYD = self.reward_PY[..., None] * missing_PYD
        missing_PYD = missing_PYD - whole_PY1 * self.tables(self.old, "token")[1]
        law_PY = self.old.probabilities_PY
        return np.einsum("py,pyd->d", law_PY, missing_PYD) / len(law_PY)


def estimate(
    setting: Setting, current: SequencePolicy, prompt_B: np.ndarray, outcome_BG: np.ndarray
) -> np.ndarray:
    """Algorithm 2's gradient estimate from one minibatch, [D]."""
    weight_PYD, penalty_PYD = setting.tables(current, "token")
    own = prompt_B[:, None], outcome_BG
    advantage_BG = leave_one_out(setting.reward_PY[own], BaselineContext())
    return (advantage_BG[..., None] * weight_PYD[own] + penalty_PYD[own]).mean(axis=(0, 1))


def tie(values: dict[str, np.ndarray], num_prompts: int) -> np.ndarray:
    """The B at which both levels have the same error, variances being those of `num_prompts`.

    With more prompts the completion's ratio is the better one; negative where it always is,
    NaN where there is no bias.

    >>> values = {"sequence_variance": 3.0, "token_variance": 1.0, "token_bias2": 0.5}
    >>> tie({name: np.array([x]) for name, x in values.items()}, 8).item()
    32.0
    """
    bias2, variance = values["token_bias2"], values["token_variance"]
    bias2 = np.where(bias2 > ZERO * variance, bias2, np.nan)
    return num_prompts * (values["sequence_variance"] - variance) / bias2


def _sq(vector_D: np.ndarray) -> float:
    return float(vector_D @ vector_D)
