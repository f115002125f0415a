r"""Exact errors of Algorithm 2's gradient estimate from completions of an earlier policy.

A minibatch has B prompts, drawn independently, with G completions each, sampled from the old policy
pi_old. With rewards z_i of 0 or 1, the estimate at the parameters theta is

    1/(B G) sum_b sum_i { A_i w_i + beta k_i }      A_i = (z_i - mean of the group's others) / d

The vectors w (reward term) and k (KL penalty towards pi_ref, with weight beta) exist at two levels:

    level      w                                    k
    token      sum_t rho_t grad log pi(y_t)         sum_t (pi_ref/pi - 1) grad log pi(y_t)
    sequence   rho grad log pi(y)                   rho times the same

Here rho_t is the ratio pi_theta / pi_old of token t, and rho is the ratio of the whole completion.
The level `token` is Algorithm 2. The level `sequence` is unbiased without normalisation and serves
as the reference. The divisor d is defined by `Setting.divisor`.

The bias is the expectation of the estimate minus the target. For all theta the target is

    E[ grad V(x) / d(x) ]
        - beta sum_t E_{y ~ pi_theta} grad KL( pi_ref(.|y_<t) || pi_theta(.|y_<t) )

where d(x) is 1 without normalisation, and otherwise sigma(x), the standard deviation of the rewards
of pi_old. In the penalty, grad acts only on the divergence of the next token.

A group with n right answers has the standard deviation `std_n = sqrt(n (G-n) / (G (G-1)))`. The
advantages are `(G-n) / ((G-1) d_n)` for a right answer and `-n / ((G-1) d_n)` for a wrong one. Sums
over n give the moments of the advantages of one completion and of two completions, given their
rewards. With A' w' + a' for a second completion of the group and a = beta k, the moments of a
prompt's estimate N are

    E N        = E[ w E(A | z) + a ]
    E||N||^2   = 1/G E||A w + a||^2 + (1 - 1/G) E< A w + a, A' w' + a' >

If rejected groups are redrawn, all expectations are conditional on acceptance of the group.

In the names of arrays, Y is the number of completions, L their length in tokens, D the number of
parameters, and E the number of learning rates.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property

import numpy as np
from scipy import stats

from grpo_ustat.gap.sequences import SequencePolicy
from grpo_ustat.records import Array

LEVELS = ("token", "sequence")
# Divisors of the advantages; see `Setting.divisor`.
DIVISORS = ("none", "sigma", "group_std", "group_std_floor", "group_std_redrawn")


@dataclass(frozen=True)
class Moments:
    """Mean and variance of an estimate for each prompt."""

    mean_PD: Array
    # Trace of the covariance of the estimate from one group of the prompt.
    within_P: Array

    def variance(self, num_prompts: int) -> float:
        """Return the trace of the covariance of the mean estimate over B random prompts."""
        between_P = np.square(self.mean_PD - self.mean_PD.mean(axis=0)).sum(axis=1)
        return float((between_P + self.within_P).mean() / num_prompts)


@dataclass(frozen=True)
class Setting:
    """Everything that defines the estimate except the current policy pi_theta."""

    # Policy that writes the completions, pi_old.
    old: SequencePolicy
    # Reference policy, pi_ref.
    reference: SequencePolicy
    # Reward of every possible completion, 0 or 1. Both occur for every prompt.
    reward_PY: Array
    # Weight of the KL penalty.
    beta: float
    # Number of prompts in a minibatch, B.
    num_prompts: int
    # Number of completions per prompt, G.
    group_size: int
    # Divisor of the advantages, where std is the standard deviation of the group's rewards:
    # - `none`: 1
    # - `sigma`: exact standard deviation of the prompt's rewards
    # - `group_std`: std + epsilon
    # - `group_std_floor`: max(std, floor)
    # - `group_std_redrawn`: std; a group with std < floor is sampled again
    divisor: str = "none"
    epsilon: float = 0.0
    floor: float = 0.0

    @cached_property
    def value_P(self) -> Array:
        """Expected reward of pi_old, V(x)."""
        return self.old.value_P(self.reward_PY)

    @cached_property
    def sigma_P(self) -> Array:
        """Standard deviation of the rewards of pi_old, sigma(x)."""
        return np.sqrt(self.value_P * (1 - self.value_P))

    @property
    def scale_P(self) -> Array:
        """The factor 1/d(x) of the target."""
        return np.ones_like(self.sigma_P) if self.divisor == "none" else 1 / self.sigma_P

    def factor(self, std: Array) -> Array:
        """Return 1/d for groups with the given standard deviations; 0 for a zero-variance group.

        `std` is broadcast with the prompts on the first axis.
        """
        divisors = {
            "none": np.ones_like(std),
            "sigma": np.broadcast_to(self.sigma_P[:, None], (len(self.sigma_P), std.shape[-1])),
            "group_std_floor": np.maximum(std, self.floor),
            "group_std_redrawn": std,
        }
        divisor = divisors.get(self.divisor, std + self.epsilon)
        return np.where(std > 0, 1 / np.where(std > 0, divisor, 1.0), 0.0)

    @cached_property
    def advantages(self) -> tuple[Array, Array]:
        """Moments of the advantages of one completion and of two completions of a group.

        The first array, [3, 2, P], has E[1], E[A] and E[A^2] given the reward 0 or 1. The second,
        [3, 2, 2, P], has E[1], E[A] and E[A A'] given both rewards.
        """
        size = self.group_size

        def given(*rewards: int) -> list[Array]:
            """Return E[1], E[A] and E[A A'] of completions with these rewards, each [P]."""
            others = np.arange(size - len(rewards) + 1)
            law_Pn = np.asarray(stats.binom.pmf(others, len(others) - 1, self.value_P[:, None]))
            n = (others + sum(rewards))[None].astype(float)
            std = np.sqrt(n * (size - n) / (size * (size - 1)))
            if self.divisor == "group_std_redrawn":
                law_Pn = law_Pn * (std >= self.floor)
            first, last = (
                self.factor(std) * (size * z - n) / (size - 1) for z in (rewards[0], rewards[-1])
            )
            return [(law_Pn * x).sum(axis=1) for x in (1.0, first, first * last)]

        one = np.array([given(z) for z in (0, 1)]).swapaxes(0, 1)
        two = np.array([[given(z, other) for other in (0, 1)] for z in (0, 1)])
        accepted_P = one[0, 0] * (1 - self.value_P) + one[0, 1] * self.value_P
        return one / accepted_P, np.moveaxis(two, 2, 0) / accepted_P

    def moments(self, weight_PYD: Array, beside_PYD: Array | float = 0.0) -> Moments:
        """Compute the mean and variance of each prompt's estimate.

        Args:
            weight_PYD: vectors w of the completions.
            beside_PYD: vectors beta k of the completions; 0 to leave out the penalty.
        """
        one, two = self.advantages
        beside_PYD = np.broadcast_to(beside_PYD, weight_PYD.shape)
        law_zPY = self.old.probabilities_PY * np.stack([1 - self.reward_PY, self.reward_PY])
        w, a = (np.einsum("zpy,pyd->zpd", law_zPY, x) for x in (weight_PYD, beside_PYD))
        mean_PD = np.einsum("zp,zpd->pd", one[1], w) + np.einsum("zp,zpd->pd", one[0], a)
        squares_P, products_P = 0.0, 0.0
        # The scalar product of A w + a with itself, or with A' w' + a'.
        for scale, power, (x, x_sum), (y, y_sum) in (
            (1, 2, (weight_PYD, w), (weight_PYD, w)),
            (2, 1, (weight_PYD, w), (beside_PYD, a)),
            (1, 0, (beside_PYD, a), (beside_PYD, a)),
        ):
            own_zP = np.einsum("zpy,pyd,pyd->zp", law_zPY, x, y)
            squares_P += scale * (one[power] * own_zP).sum(axis=0)
            products_P += scale * np.einsum("zqp,zpd,qpd->p", two[power], x_sum, y_sum)
        second_P = squares_P / self.group_size + (1 - 1 / self.group_size) * products_P
        return Moments(mean_PD, second_P - np.square(mean_PD).sum(axis=1))

    def tables(self, current: SequencePolicy, level: str) -> tuple[Array, Array]:
        """Return w and beta k, each [P, Y, D]: a vector for each prompt and possible completion."""
        ratio_PYL = np.exp(current.logprob_PYL - self.old.logprob_PYL)
        excess_PYL = np.exp(self.reference.logprob_PYL - current.logprob_PYL) - 1
        penalty_PYD = self.beta * current.weighted_scores(excess_PYL)
        if level == "token":
            return current.weighted_scores(ratio_PYL), penalty_PYD
        whole_PY1 = ratio_PYL.prod(axis=2)[..., None]
        return whole_PY1 * current.scores_PYD, whole_PY1 * penalty_PYD

    def target(self, current: SequencePolicy) -> tuple[Array, Array]:
        """Return the reward part and the penalty part of the target, each [D]."""
        penalty_PD = current.token_kl_gradient_PD(self.reference, current.probabilities_PY)
        policy_PD = self.scale_P[:, None] * current.gradient_PD(self.reward_PY)
        return policy_PD.mean(axis=0), -self.beta * penalty_PD.mean(axis=0)

    def bias(self, current: SequencePolicy, level: str = "token") -> Array:
        """Return the estimate's expectation minus the target, [D]."""
        mean_D = self.moments(*self.tables(current, level)).mean_PD.mean(axis=0)
        return mean_D - sum(self.target(current))

    @cached_property
    def bias_at_start_D(self) -> Array:
        """Bias at theta_old, which is the same for both levels, [D]."""
        return self.bias(self.old)

    def quality(self, current: SequencePolicy) -> dict[str, float]:
        """Compute squared biases and variances of both levels.

        A key begins with the level and names the quantity: `_bias2` or `_variance`. The ending
        `_kl` marks values of the penalty only, and `_policy` values without the penalty.
        `token_drift2` is the squared difference between the bias at `current` and at theta_old.
        """
        values: dict[str, float] = {}
        policy_target_D, penalty_target_D = self.target(current)
        for level in LEVELS:
            weight_PYD, penalty_PYD = self.tables(current, level)
            both, plain = self.moments(weight_PYD, penalty_PYD), self.moments(weight_PYD)
            policy_D = plain.mean_PD.mean(axis=0) - policy_target_D
            penalty_D = (both.mean_PD - plain.mean_PD).mean(axis=0) - penalty_target_D
            values |= {
                f"{level}_bias2": squared_norm(policy_D + penalty_D),
                f"{level}_bias2_policy": squared_norm(policy_D),
                f"{level}_bias2_kl": squared_norm(penalty_D),
                f"{level}_variance": both.variance(self.num_prompts),
            }
            if level == "token":
                drift_D = policy_D + penalty_D
                if current is not self.old:
                    drift_D = drift_D - self.bias_at_start_D
                values["token_drift2"] = squared_norm(drift_D)
        return values

    def first_order_bias(self, direction_D: Array) -> Array:
        """Return the derivative of the token-level bias at theta_old in one direction, [D].

        The advantages must be computed without normalisation. Let u_t be the derivative of the
        log-probability of token t in this direction, and u the sum of u_t over the completion. The
        derivative of the bias is `E[ z sum_t (u_t - u) grad log pi(y_t) ] - beta E[ u k ]`. The
        first term is there because each token lacks the ratios of the other tokens. The second is
        there because the penalty is not multiplied by a ratio.
        """
        change_PYL = self.old.token_scores_PYLD @ direction_D
        whole_PY1 = change_PYL.sum(axis=2, keepdims=True)
        other_tokens_PYD = self.old.weighted_scores(change_PYL - whole_PY1)
        bias_PYD = self.reward_PY[..., None] * other_tokens_PYD
        bias_PYD = bias_PYD - whole_PY1 * self.tables(self.old, "token")[1]
        law_PY = self.old.probabilities_PY
        return np.einsum("py,pyd->d", law_PY, bias_PYD) / len(law_PY)


def squared_norm(vector_D: Array) -> float:
    """Return the squared norm ||v||^2."""
    return float(vector_D @ vector_D)


# The path of exact updates


def exact_path(setting: Setting, updates: int, learning_rate: float) -> list[SequencePolicy]:
    """Return the policies of the path that follows the exact target, starting with pi_old."""
    path = [setting.old]
    for _ in range(updates):
        step_D = learning_rate * sum(setting.target(path[-1]))
        path.append(path[-1].at(path[-1].theta_D + step_D))
    return path


@dataclass(frozen=True)
class PathErrors:
    """Errors of the estimate after k updates along the exact path.

    The keys of the dictionaries are those of `Setting.quality`.
    """

    # Policies, rewards and shape of a minibatch.
    setting: Setting
    # Learning rates in ascending order, [E].
    rates: Array
    # Errors at theta_old, before any update.
    start: dict[str, float]
    # Errors at the end of the path, each [E].
    end: dict[str, Array]
    # Squared bias with token ratios after 0, 1, ..., k updates, [E, k + 1].
    by_place: Array

    @cached_property
    def leading(self) -> float:
        """Limit of bias^2 / eta^2 after k updates as the learning rate eta tends to 0.

        It is meaningful only without normalisation.
        """
        updates = self.by_place.shape[1] - 1
        direction_D = updates * sum(self.setting.target(self.setting.old))
        return squared_norm(self.setting.first_order_bias(direction_D))


def path_errors(setting: Setting, rates_E: Array, updates: int) -> PathErrors:
    """Compute the errors of the estimate after k updates along the exact path.

    Args:
        setting: policies, rewards and shape of a minibatch.
        rates_E: learning rates in ascending order.
        updates: number of updates on the path, k.
    """
    paths = [exact_path(setting, updates, rate) for rate in rates_E]
    ends = [setting.quality(path[-1]) for path in paths]
    return PathErrors(
        setting=setting,
        rates=rates_E,
        start=setting.quality(setting.old),
        end={name: np.array([x[name] for x in ends]) for name in ends[0]},
        by_place=np.array([[squared_norm(setting.bias(x)) for x in path] for path in paths]),
    )


# At theta_old, by group size


def on_policy(setting: Setting, divisor: str, sizes: Sequence[int]) -> dict[str, Array]:
    """Compute the exact errors at theta_old without the KL term, by group size.

    Returns:
        Arrays with one value per group size:

        - `bias2_share`: ||bias||^2 / ||target||^2
        - `bias`: ||bias||
        - `variance`: B times the variance
        - `between`: C1 of the oracle, whose baseline is the exact V(x)
        - `oracle`: B times the oracle's variance, C1 + (variance given the prompt) / G
    """
    scores_PYD, reward_PY, law_PY = (
        setting.old.scores_PYD, setting.reward_PY, setting.old.probabilities_PY
    )  # fmt: skip
    rows: list[list[float]] = []
    for size in sizes:
        at = replace(setting, divisor=divisor, group_size=size)
        plain, target_D = at.moments(scores_PYD), at.target(at.old)[0]
        bias2 = squared_norm(plain.mean_PD.mean(axis=0) - target_D)
        centred_PY = (reward_PY - at.value_P[:, None]) * at.scale_P[:, None]
        mean_PD = at.scale_P[:, None] * at.old.gradient_PD(reward_PY)
        second_P = (law_PY * centred_PY**2 * np.square(scores_PYD).sum(axis=2)).sum(axis=1)
        within = (second_P - np.square(mean_PD).sum(axis=1)).mean()
        between = np.square(mean_PD - mean_PD.mean(axis=0)).sum(axis=1).mean()
        share, bias = bias2 / squared_norm(target_D), bias2**0.5
        rows.append([share, bias, plain.variance(1), between, between + within / size])
    names = "bias2_share", "bias", "variance", "between", "oracle"
    return dict(zip(names, np.array(rows).T, strict=True))
