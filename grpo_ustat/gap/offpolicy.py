r"""Algorithm 2's gradient estimate from completions of an earlier policy (paper, section 8).

A minibatch has B prompts, drawn independently, with G completions each, sampled from the old policy
pi_old. With rewards z_i, the estimate at the parameters theta is

    1/(B G) sum_b sum_i { A_i w_i + beta k_i }      A_i = (z_i - mean of the group's others) / d

The vectors w (reward term) and k (KL penalty towards pi_ref, with weight beta) exist at two levels:

    level      w                                    k
    token      sum_t rho_t grad log pi(y_t)         sum_t (pi_ref/pi - 1) grad log pi(y_t)
    sequence   rho grad log pi(y)                   rho times the same

Here rho_t is the ratio pi_theta / pi_old of token t, and rho is the ratio of the whole completion.
The divisor d is the group's standard deviation, or 1 without normalisation (see `Normalisation`).
The level `token` is Algorithm 2. The level `sequence` multiplies both the reward term and the
penalty by the completion's ratio. It is unbiased without normalisation and serves as the reference.

The bias is the expectation of the estimate minus the target. For all theta the target is

    E[ grad V(x) / d(x) ]
        - beta sum_t E_{y ~ pi_theta} grad KL( pi_ref(.|y_<t) || pi_theta(.|y_<t) )

where d(x) is 1 without normalisation, and otherwise sigma(x), the standard deviation of the rewards
of pi_old. At theta = theta_old both levels have the same expectation. Without normalisation, the
target at theta_old equals this expectation. With normalisation, it is the limit of this expectation
as G grows.

Two choices in the target matter:

- If sigma(x) were the standard deviation of the rewards of pi_theta, the target would change by an
  amount of the order of the learning rate eta; see `token_bias2_own_sigma`.
- In the penalty, grad acts only on the divergence of the next token. The prefixes y_<t are
  distributed according to the current policy pi_theta, so that the target does not depend on the
  policy that wrote the completions. With prefixes from pi_old, a part of the penalty's bias would
  not be measured; see `token_bias2_kl_old_prefixes`.

Biases and variances are computed exactly: at theta_old for each group size, after updates for each
learning rate, and for each completion length. Only the parameters theta_k after k updates on random
minibatches are random.

In the names of arrays, Y is the number of completions, L their length in tokens, D the number of
parameters, E the number of learning rates, and R the number of random paths.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property

import numpy as np

from grpo_ustat.config.schema import ConfigError
from grpo_ustat.draws import generator
from grpo_ustat.estimators.baselines import leave_one_out
from grpo_ustat.estimators.intervals import (
    Interval,
    jackknife_variance,
    positive_interval,
    t_interval,
)
from grpo_ustat.estimators.moments import exact_moments
from grpo_ustat.estimators.scaling import ScalingLaw
from grpo_ustat.gap.claims import at_infinity
from grpo_ustat.gap.estimate_moments import (
    NORMALISATIONS,
    AdvantageMoments,
    EstimateMoments,
    Normalisation,
    advantage_moments,
    estimate_moments,
    group_moments,
    large_groups,
)
from grpo_ustat.gap.sequences import SequencePolicy
from grpo_ustat.records import BaselineContext

LEVELS = ("token", "sequence")
# A bias counts as rounding error if the ratio of its square to the variance is below this value.
ROUNDING = 1e-20
# Largest permitted change of a parameter. A larger change could make squares of pi_ref/pi_theta
# overflow.
MAX_CHANGE = 100.0


@dataclass(frozen=True)
class Setting:
    """Everything that defines the estimate except the current policy pi_theta."""

    # Policy that writes the completions, pi_old.
    old: SequencePolicy
    # Reference policy, pi_ref.
    reference: SequencePolicy
    # Reward of every possible completion.
    reward_PY: np.ndarray
    # Weight of the KL penalty.
    beta: float
    # Number of prompts in a minibatch, B.
    num_prompts: int
    # Number of completions per prompt, G.
    group_size: int
    # Divisor of the advantages.
    normalisation: Normalisation = Normalisation()

    def __post_init__(self):
        shape = self.old.logprob_PYL.shape
        assert self.reference.logprob_PYL.shape == shape and self.reward_PY.shape == shape[:2]

    @property
    def normalised(self) -> bool:
        """True if advantages are divided by a standard deviation."""
        return self.normalisation.kind != "none"

    @cached_property
    def advantages(self) -> list[AdvantageMoments]:
        """Moments of the advantages in groups of completions from pi_old, for each prompt.

        Raises:
            ValueError: If a prompt's rewards are all equal or not on a grid, or if every group is
                rejected.
        """
        pairs = zip(self.old.probabilities_PY, self.reward_PY, strict=True)
        return [advantage_moments(*pair, self.group_size, self.normalisation) for pair in pairs]

    def scale_P(self, policy: SequencePolicy) -> np.ndarray:
        """Return 1/d(x), where sigma(x) is computed for `policy`; 1 without normalisation."""
        if not self.normalised:
            return np.ones(len(self.reward_PY))
        centred_PY = self.reward_PY - policy.value_P(self.reward_PY)[:, None]
        return policy.value_P(centred_PY**2) ** -0.5

    def moments(
        self, weight_PYD: np.ndarray, penalty_PYD: np.ndarray | float = 0.0
    ) -> EstimateMoments:
        """Compute the mean and variance of each prompt's estimate.

        Args:
            weight_PYD: vectors w of the completions.
            penalty_PYD: vectors beta k of the completions; 0 to leave out the penalty.
        """
        law_PY, size = self.old.probabilities_PY, self.group_size
        if self.normalisation.kind in ("none", "sigma"):
            reward_PY = self.reward_PY * self.scale_P(self.old)[:, None]
            return group_moments(law_PY, weight_PYD, reward_PY, penalty_PYD).at(size)
        return estimate_moments(self.advantages, law_PY, weight_PYD, size, penalty_PYD)

    def tables(self, current: SequencePolicy, level: str) -> tuple[np.ndarray, np.ndarray]:
        """Return w and beta k, each [P, Y, D]: a vector for each prompt and possible completion."""
        ratio_PYL = np.exp(current.logprob_PYL - self.old.logprob_PYL)
        excess_PYL = np.exp(self.reference.logprob_PYL - current.logprob_PYL) - 1
        penalty_PYD = self.beta * current.weighted_scores(excess_PYL)
        if level == "token":
            return current.weighted_scores(ratio_PYL), penalty_PYD
        whole_PY1 = ratio_PYL.prod(axis=2)[..., None]
        return whole_PY1 * current.scores_PYD, whole_PY1 * penalty_PYD

    def target(
        self,
        current: SequencePolicy,
        prefixes: SequencePolicy | None = None,
        spread: SequencePolicy | None = None,
    ) -> tuple[np.ndarray, np.ndarray]:
        """Return the reward part and the penalty part of the target, each [D].

        Args:
            current: current policy, pi_theta.
            prefixes: policy that generates the prefixes, by default pi_theta.
            spread: policy whose rewards define sigma(x), by default pi_old.
        """
        law_PY = (prefixes or current).probabilities_PY
        penalty_PD = current.token_kl_gradient_PD(self.reference, law_PY)
        scale_P = self.scale_P(spread or self.old)
        policy_PD = scale_P[:, None] * current.gradient_PD(self.reward_PY)
        return policy_PD.mean(axis=0), -self.beta * penalty_PD.mean(axis=0)

    def whole_target(
        self, current: SequencePolicy, spread: SequencePolicy | None = None
    ) -> np.ndarray:
        """Return the target, which is the sum of its reward part and its penalty part, [D]."""
        policy_D, penalty_D = self.target(current, spread=spread)
        return policy_D + penalty_D

    def quality(self, current: SequencePolicy) -> dict[str, float]:
        """Compute squared biases, variances and mean squared errors of both levels.

        A key begins with the level and names the quantity, for example `token_bias2`:

        - `_bias2`, `_variance`, `_mse`: squared bias, variance and mean squared error. The ending
          `_kl` marks values of the penalty only, and `_policy` values without the penalty.
        - `_drift2`, with normalisation only: squared difference between the bias at `current` and
          the bias at theta_old.
        - `token_bias2_own_sigma`, with normalisation only: squared bias relative to a target with
          the sigma(x) of pi_theta.
        - `token_bias2_kl_old_prefixes`: squared bias of the penalty relative to a target with
          prefixes from pi_old.
        - `ratio_second_moment`: E rho^2, averaged over prompts.
        """
        values = {}
        policy_target_D, penalty_target_D = self.target(current)
        for level in LEVELS:
            weight_PYD, penalty_PYD = self.tables(current, level)
            both, plain = self.moments(weight_PYD, penalty_PYD), self.moments(weight_PYD)
            policy_D = plain.mean_PD.mean(axis=0) - policy_target_D
            penalty_D = (both.mean_PD - plain.mean_PD).mean(axis=0) - penalty_target_D
            variance = both.variance(self.num_prompts)
            values |= {
                f"{level}_bias2": squared_norm(policy_D + penalty_D),
                f"{level}_bias2_policy": squared_norm(policy_D),
                f"{level}_bias2_kl": squared_norm(penalty_D),
                f"{level}_variance": variance,
                f"{level}_variance_policy": plain.variance(self.num_prompts),
                f"{level}_mse": squared_norm(policy_D + penalty_D) + variance,
            }
        if self.normalised:
            for level in LEVELS:
                drift_D = self.bias(current, level) - self.bias_at_start_D
                values[f"{level}_drift2"] = squared_norm(drift_D)
            shift_D = self.whole_target(current, spread=current) - self.whole_target(current)
            own_sigma_D = self.bias(current, "token") - shift_D
            values["token_bias2_own_sigma"] = squared_norm(own_sigma_D)
        law_PY, penalty_PYD = self.old.probabilities_PY, self.tables(current, "token")[1]
        mean_D = np.einsum("py,pyd->d", law_PY, penalty_PYD) / len(law_PY)
        old_prefixes_D = mean_D - self.target(current, self.old)[1]
        values["token_bias2_kl_old_prefixes"] = squared_norm(old_prefixes_D)
        ratio_PY = current.probabilities_PY / law_PY
        values["ratio_second_moment"] = float((law_PY * ratio_PY**2).sum(axis=1).mean())
        return values

    @cached_property
    def bias_at_start_D(self) -> np.ndarray:
        """Bias at theta_old, which is the same for both levels, [D]."""
        return self.bias(self.old, "token")

    def bias(self, current: SequencePolicy, level: str) -> np.ndarray:
        """Return the estimate's expectation minus the whole target, [D]."""
        mean_D = self.moments(*self.tables(current, level)).mean_PD.mean(axis=0)
        return mean_D - self.whole_target(current)

    @property
    def divergence_cosines(self) -> list[float]:
        """Cosines at theta_old between the penalty's gradient and two exact KL gradients.

        The exact gradients are those of KL(pi_ref || pi) and of KL(pi || pi_ref), in this order,
        where both divergences are between distributions of whole completions.
        """
        old, reference = self.old, self.reference
        penalty_D = old.token_kl_gradient_PD(reference, old.probabilities_PY).mean(axis=0)
        cosines = []
        for other_PD in (old.kl_from_gradient_PD(reference), old.kl_to_gradient_PD(reference)):
            other_D = other_PD.mean(axis=0)
            norms = np.linalg.norm(penalty_D) * np.linalg.norm(other_D)
            cosines.append(float(penalty_D @ other_D / norms) if norms > 0 else 1.0)
        return cosines

    def first_order_bias(self, direction_D: np.ndarray) -> np.ndarray:
        """Return the derivative of the token-level bias at theta_old in one direction, [D].

        The advantages must be computed without normalisation. Let u_t be the derivative of the
        log-probability of token t in this direction, and u the sum of u_t over the completion. The
        derivative of the bias is `E[ z sum_t (u_t - u) grad log pi(y_t) ] - beta E[ u k ]`. The
        first term is there because each token lacks the ratios of the other tokens. The second is
        there because the penalty is not multiplied by a ratio.
        """
        assert not self.normalised
        change_PYL = self.old.token_scores_PYLD @ direction_D
        whole_PY1 = change_PYL.sum(axis=2, keepdims=True)
        other_tokens_PYD = self.old.weighted_scores(change_PYL - whole_PY1)
        other_tokens_PYD = self.reward_PY[..., None] * other_tokens_PYD
        bias_PYD = other_tokens_PYD - whole_PY1 * self.tables(self.old, "token")[1]
        law_PY = self.old.probabilities_PY
        return np.einsum("py,pyd->d", law_PY, bias_PYD) / len(law_PY)


def estimate(
    setting: Setting, current: SequencePolicy, prompt_B: np.ndarray, outcome_BG: np.ndarray
) -> np.ndarray:
    """Compute Algorithm 2's gradient estimate from one minibatch, [D].

    Args:
        setting: setting with any normalisation except `group_std_redrawn`.
        current: current policy, pi_theta.
        prompt_B: indices of the minibatch's prompts.
        outcome_BG: indices of the completions of these prompts, sampled from pi_old.
    """
    weight_PYD, penalty_PYD = setting.tables(current, "token")
    rows = prompt_B[:, None], outcome_BG
    reward_BG, normalisation = setting.reward_PY[rows], setting.normalisation
    assert normalisation.kind != "group_std_redrawn"
    advantage_BG = leave_one_out(reward_BG, BaselineContext())
    if normalisation.kind == "sigma":
        advantage_BG = advantage_BG * setting.scale_P(setting.old)[prompt_B, None]
    elif setting.normalised:
        # Subtracting the first reward makes all values, and thus the std, exactly 0 if a group's
        # rewards are all equal.
        centred_BG = reward_BG - reward_BG[:, :1]
        advantage_BG = advantage_BG * normalisation.factor(
            centred_BG.std(axis=1, ddof=1, keepdims=True)
        )
    return (advantage_BG[..., None] * weight_PYD[rows] + penalty_PYD[rows]).mean(axis=(0, 1))


def tie(values: dict[str, np.ndarray], num_prompts: int) -> np.ndarray:
    """Return the number of prompts B at which both levels have the same mean squared error.

    With more prompts than the result, completion ratios have the smaller error. The result is
    negative if completion ratios have the smaller error for every B. It is NaN if token ratios have
    no bias.

    Args:
        values: squared biases and variances, with the keys of `Setting.quality`.
        num_prompts: number of prompts for which the variances in `values` were computed.

    >>> values = {"sequence_variance": 3.0, "token_variance": 1.0, "token_bias2": 0.5}
    >>> tie({name: np.array([x]) for name, x in values.items()}, 8).item()
    32.0
    """
    bias2, variance = values["token_bias2"], values["token_variance"]
    bias2 = np.where(bias2 > ROUNDING * variance, bias2, np.nan)
    return num_prompts * (values["sequence_variance"] - variance) / bias2


def squared_norm(vector_D: np.ndarray) -> float:
    """Return the squared norm ||v||^2."""
    return float(vector_D @ vector_D)


# At theta_old, by group size


@dataclass(frozen=True)
class OnPolicy:
    """Exact values for every normalisation and group size."""

    # Group sizes, G.
    sizes: Sequence[int]
    # Three group sizes G, 2G and 4G, from which limits as G grows are extrapolated.
    limit_sizes: Sequence[int]
    # The first key is the kind of normalisation, and the second is the name of the quantity. Each
    # array has one value per group size in `sizes`. Only `bias2_share_kl` includes the KL term.
    # - `bias2_share`: ||bias||^2 / ||target||^2
    # - `bias2_share_kl`: the same ratio with the KL term
    # - `bias`: ||bias||
    # - `variance`: B times the variance
    # - `between`: C1 of the oracle, whose baseline is the exact V(x)
    # - `oracle`: B times the oracle's variance, C1 + (variance given the prompt) / G
    # - `exceeded`: number of prompts B above which ||bias||^2 exceeds the variance; infinite if the
    #   bias is 0
    # - `zero_variance`: probability of a group with equal rewards, averaged over prompts
    values: dict[str, dict[str, np.ndarray]]
    # The same quantities at `limit_sizes`, for `none`, `sigma` and `group_std` with epsilon = 0.
    limits: dict[str, dict[str, np.ndarray]]
    # Limit of G ||bias|| for `group_std` at epsilon = 0, computed by the delta method.
    bias_limit: float
    # Norm of the target with normalisation, ||target||.
    target_norm: float

    def variance_ratio(self, kind: str) -> float:
        """Return the limit, as G grows, of the ratio of (B variance - C1) to its oracle's value.

        Args:
            kind: kind of normalisation, a key of `limits`.
        """
        values, sizes = self.limits[kind], np.array(self.limit_sizes)
        oracle = sizes * (values["oracle"] - values["between"])
        return float(at_infinity(sizes * (values["variance"] - values["between"]) / oracle))


def on_policy(
    setting: Setting,
    group_sizes: Sequence[int],
    limit_sizes: Sequence[int],
    epsilon: float,
    floor: float,
) -> OnPolicy:
    """Compute the exact values of `OnPolicy` for every normalisation.

    Args:
        setting: policies, rewards and beta. Its group size and normalisation are not used.
        group_sizes: group sizes, G.
        limit_sizes: three group sizes, each twice the previous one.
        epsilon: constant added to the group's standard deviation.
        floor: smallest standard deviation for `group_std_floor` and `group_std_redrawn`.
    """
    normalisations = [Normalisation(kind, epsilon, floor) for kind in NORMALISATIONS]
    exact = [Normalisation(kind) for kind in ("none", "sigma", "group_std")]

    def by_size(normalisation: Normalisation, sizes: Sequence[int]) -> dict[str, np.ndarray]:
        rows = [
            on_policy_values(replace(setting, normalisation=normalisation, group_size=size))
            for size in sizes
        ]
        return {name: np.array([row[name] for row in rows]) for name in rows[0]}

    try:
        values = {
            normalisation.kind: by_size(normalisation, group_sizes)
            for normalisation in normalisations
        }
        limits = {
            normalisation.kind: by_size(normalisation, limit_sizes) for normalisation in exact
        }
    except ValueError as error:
        raise ConfigError(f"theorem=theorem12: {error}") from error
    old = setting.old
    bias_PD = large_groups(old.probabilities_PY, old.scores_PYD, setting.reward_PY).bias_PD
    target_D = replace(setting, normalisation=Normalisation("sigma")).target(old)[0]
    return OnPolicy(
        group_sizes,
        limit_sizes,
        values,
        limits,
        float(np.linalg.norm(bias_PD.mean(axis=0))),
        float(np.linalg.norm(target_D)),
    )


def on_policy_values(setting: Setting) -> dict[str, float]:
    """Compute the values in `OnPolicy.values` for one normalisation and one group size."""
    old, (weight_PYD, penalty_PYD) = setting.old, setting.tables(setting.old, "token")
    plain, target_D = setting.moments(weight_PYD), setting.target(old)[0]
    bias2 = np.square(plain.mean_PD.mean(axis=0) - target_D).sum()
    whole_target_D = setting.whole_target(old)
    both_D = setting.moments(weight_PYD, penalty_PYD).mean_PD.mean(axis=0) - whole_target_D
    scaled_PY = setting.reward_PY * setting.scale_P(old)[:, None]
    oracle = group_moments(old.probabilities_PY, weight_PYD, scaled_PY)
    between = np.square(oracle.mean_PD - oracle.mean_PD.mean(axis=0)).sum(axis=1).mean()
    variance = plain.variance(1)
    levels_K = np.unique(setting.reward_PY)
    chance_KP = [old.value_P((setting.reward_PY == level).astype(float)) for level in levels_K]
    zero_variance_P = (np.array(chance_KP) ** setting.group_size).sum(axis=0)
    return {
        "bias2_share": float(bias2 / np.square(target_D).sum()),
        "bias2_share_kl": float(np.square(both_D).sum() / np.square(whole_target_D).sum()),
        "bias": float(np.sqrt(bias2)),
        "variance": variance,
        "between": float(between),
        "oracle": float(between + oracle.first_P.mean() / setting.group_size),
        "exceeded": float(variance / bias2) if bias2 > ROUNDING * variance else float("inf"),
        "zero_variance": float(zero_variance_P.mean()),
    }


# After updates, by learning rate


@dataclass(frozen=True)
class Draws:
    """Minibatches of one path of U updates, whose completions were all sampled from pi_old.

    The same minibatches are used at every learning rate.
    """

    # Indices of each update's prompts, drawn independently and uniformly.
    prompt_UB: np.ndarray
    # Indices of the completions sampled for these prompts.
    outcome_UBG: np.ndarray


def draw(setting: Setting, updates: int, seed: int, replicate: int) -> Draws:
    """Draw the minibatches of one path.

    Args:
        setting: pi_old and shape of a minibatch.
        updates: number of updates, each with its own minibatch.
        seed, replicate: seed and number of the path, which together determine the random numbers.
    """
    rng = generator(seed, "theorem12", replicate)
    law_PY = setting.old.probabilities_PY
    prompt_UB = rng.integers(len(law_PY), size=(updates, setting.num_prompts))
    uniform_UBG = rng.random((*prompt_UB.shape, setting.group_size))
    cumulative_UBY = (law_PY / law_PY.sum(axis=1, keepdims=True)).cumsum(axis=1)[prompt_UB]
    below_UBG = (cumulative_UBY[:, :, None, :-1] <= uniform_UBG[..., None]).sum(axis=-1)
    return Draws(prompt_UB, below_UBG)


def update(
    setting: Setting, current: SequencePolicy, learning_rate: float, step_D: np.ndarray
) -> SequencePolicy:
    """Return the policy after one gradient-ascent update along `step_D`."""
    theta_D = current.theta_D + learning_rate * step_D
    farthest = np.abs(theta_D - setting.old.theta_D).max()
    if not farthest < MAX_CHANGE:
        raise ConfigError(
            f"learning_rate={learning_rate} changes a parameter by {farthest:.3g}, more than "
            f"{MAX_CHANGE:g}: use a smaller learning rate, fewer updates or a smaller beta"
        )
    return current.at(theta_D)


def random_path(setting: Setting, draws: Draws, learning_rate: float) -> SequencePolicy:
    """Return the policy after one update on each minibatch in turn, starting from pi_old."""
    current = setting.old
    for prompt_B, outcome_BG in zip(draws.prompt_UB, draws.outcome_UBG, strict=True):
        step_D = estimate(setting, current, prompt_B, outcome_BG)
        current = update(setting, current, learning_rate, step_D)
    return current


def exact_path(setting: Setting, updates: int, learning_rate: float) -> list[SequencePolicy]:
    """Return the policies of the path that follows the exact target, starting with pi_old."""
    path = [setting.old]
    for _ in range(updates):
        target_D = setting.whole_target(path[-1])
        path.append(update(setting, path[-1], learning_rate, target_D))
    return path


@dataclass(frozen=True)
class LeadingTerms:
    """Limits of errors as the learning rate eta tends to 0, without normalisation."""

    # Limit of bias^2 / eta^2 along the exact path, which is computed from the derivative of the
    # bias.
    exact: float
    # Limit of bias^2 / eta^2 along each random path.
    random_R: np.ndarray
    # C1, C2, C3 of Proposition 3 at theta_old, without the KL term.
    law: ScalingLaw


@dataclass(frozen=True)
class PathErrors:
    """Exact errors of the estimate at the last policy of each path of k updates.

    An exact path follows the exact target; a random path follows estimates on minibatches. The keys
    of all dictionaries are those of `Setting.quality`.
    """

    # Policies, rewards and shape of a minibatch.
    setting: Setting
    # Learning rates in ascending order, [E].
    rates: np.ndarray
    # Errors at theta_old, before any update.
    start: dict[str, float]
    # Errors at the end of the exact path, each [E].
    exact: dict[str, np.ndarray]
    # Errors at the end of the R random paths, each [E, R].
    random: dict[str, np.ndarray]
    # Squared bias with token ratios after 0, 1, ..., k updates along the exact path, [E, k + 1].
    exact_by_place: np.ndarray
    # Limits as eta tends to 0. None with normalisation, because the bias then does not tend to 0.
    leading: LeadingTerms | None = None

    def mean(self, name: str) -> list[Interval]:
        """Return the mean of an error over random paths for each learning rate, with an interval.

        Args:
            name: key of `random`.
        """
        values_ER = self.random[name]
        count = values_ER.shape[1]
        pairs = zip(values_ER.mean(axis=1), values_ER.var(axis=1, ddof=1) / count, strict=True)
        return [positive_interval(float(mean), float(var), count - 1) for mean, var in pairs]

    def slope(self, name: str, at: int = 0) -> Interval:
        """Return the slope of log(mean error) on log(eta) between two neighbouring learning rates.

        The interval is computed with the jackknife, which leaves out one path at a time.

        Args:
            name: key of `random`.
            at: index of the smaller of the two learning rates.
        """
        low, high = self.random[name][at : at + 2]
        step, count = np.log(self.rates[at + 1] / self.rates[at]), len(low)
        without_R = np.log((high.sum() - high) / (low.sum() - low)) / step
        estimate = float(np.log(high.sum() / low.sum()) / step)
        return t_interval(estimate, float(jackknife_variance(without_R)), count - 1)

    @property
    def bias_share_E(self) -> np.ndarray:
        """Mean squared bias divided by mean variance, with token ratios, for each rate, [E]."""
        mean = {name: self.random[f"token_{name}"].mean(axis=1) for name in ("bias2", "variance")}
        return mean["bias2"] / mean["variance"]

    @property
    def crossing(self) -> float | None:
        """Learning rate at which squared bias and variance are equal, interpolated on a log scale.

        None if the squared bias is smaller at every learning rate, or already larger at the
        smallest one.
        """
        above = np.flatnonzero(self.bias_share_E >= 1)
        if not len(above) or above[0] == 0:
            return None
        ends = slice(above[0] - 1, above[0] + 1)
        logs, rates = np.log(self.bias_share_E[ends]), np.log(self.rates[ends])
        return float(np.exp(np.interp(0.0, logs, rates)))

    def tie(self) -> np.ndarray:
        """Return the B at which both levels have the same error, for each learning rate, [E]."""
        mean = {name: values_ER.mean(axis=1) for name, values_ER in self.random.items()}
        return tie(mean, self.setting.num_prompts)


def path_errors(
    setting: Setting, rates_E: np.ndarray, updates: int, replicates: int, seed: int
) -> PathErrors:
    """Compute errors of the estimate at the last policy of each exact or random path.

    Args:
        setting: policies, rewards and shape of a minibatch.
        rates_E: learning rates in ascending order.
        updates: number of updates on a path, k.
        replicates: number of random paths.
        seed: seed of the minibatches. The seed and a path's number determine its random numbers.
    """
    draws = [draw(setting, updates, seed, replicate) for replicate in range(replicates)]
    paths = [exact_path(setting, updates, rate) for rate in rates_E]
    exact = [setting.quality(path[-1]) for path in paths]
    places = [[np.square(setting.bias(x, "token")).sum() for x in path] for path in paths]
    table = [[setting.quality(random_path(setting, x, rate)) for x in draws] for rate in rates_E]
    leading = None
    if not setting.normalised:
        leading = LeadingTerms(
            exact=leading_term(setting, updates * setting.whole_target(setting.old)),
            random_R=np.array([leading_term(setting, sum_of_steps(setting, x)) for x in draws]),
            law=on_policy_law(setting),
        )
    return PathErrors(
        setting=setting,
        rates=rates_E,
        start=setting.quality(setting.old),
        exact={name: np.array([x[name] for x in exact]) for name in exact[0]},
        random={name: np.array([[x[name] for x in row] for row in table]) for name in exact[0]},
        exact_by_place=np.array(places),
        leading=leading,
    )


def leading_term(setting: Setting, direction_D: np.ndarray) -> float:
    """Return the limit of bias^2 / eta^2 on a path that leaves theta_old in `direction_D`."""
    return float(np.square(setting.first_order_bias(direction_D)).sum())


def sum_of_steps(setting: Setting, draws: Draws) -> np.ndarray:
    """Return the sum of the minibatches' gradient estimates at theta_old, [D]."""
    pairs = zip(draws.prompt_UB, draws.outcome_UBG, strict=True)
    return np.sum([estimate(setting, setting.old, *pair) for pair in pairs], axis=0)


def on_policy_law(setting: Setting) -> ScalingLaw:
    """Return C1, C2, C3 of Proposition 3 at theta_old, without the KL term."""
    old, reward_PY = setting.old, setting.reward_PY
    g_PD, q_PY = old.gradient_PD(reward_PY), np.square(old.scores_PYD).sum(axis=2)
    g_sq_P = np.square(g_PD).sum(axis=1)
    moments = exact_moments(q_PY, reward_PY, old.probabilities_PY, g_sq_P)
    return ScalingLaw.of_moments(moments, float(np.square(g_PD.mean(axis=0)).sum()))


# By completion length


@dataclass(frozen=True)
class ByLength:
    """Exact values for policies that differ only in the completion length."""

    # Number of prompts, B.
    num_prompts: int
    # Completion lengths L in ascending order.
    lengths: np.ndarray
    # Second moment of a token's ratio, c = E rho_t^2.
    growth: float
    # Array over the lengths for each key of `Setting.quality`.
    values: dict[str, np.ndarray]

    @property
    def variance_ratio(self) -> np.ndarray:
        """Variance with completion ratios divided by variance with token ratios."""
        return self.values["sequence_variance"] / self.values["token_variance"]

    @property
    def growth_of_ratio(self) -> float:
        """Factor by which `variance_ratio` grows per token, between the two largest lengths."""
        steps = np.diff(self.lengths)[-1]
        return float((self.variance_ratio[-1] / self.variance_ratio[-2]) ** (1 / steps))

    @property
    def tie(self) -> np.ndarray:
        """Number of prompts B at which both levels have the same error; NaN if L = 1."""
        return tie(self.values, self.num_prompts)


def by_length(lengths: Sequence[int], shift: float, num_prompts: int, group_size: int) -> ByLength:
    """Compute bias and variance of both levels for every completion length, without a penalty.

    The test policy has one prompt and a vocabulary of two tokens, 0 and 1. Under pi_old both tokens
    have probability 1/2. The reward is the square of the fraction of tokens that are 1.

    Args:
        lengths: at least two completion lengths, in tokens.
        shift: change from pi_old to pi_theta of the logit of token 1.
        num_prompts: number of prompts, B.
        group_size: number of completions per prompt, G.
    """
    rows, ascending = [], sorted(set(lengths))
    for length in ascending:
        old = SequencePolicy(np.zeros((length, 2, 2)), np.zeros((1, 2)))
        reward_PY = np.square(old.completions_YL.mean(axis=1))[None]
        theta_LVV = np.zeros((length, 2, 2))
        theta_LVV[..., 1] = shift
        setting = Setting(old, old, reward_PY, 0.0, num_prompts, group_size)
        rows.append(setting.quality(old.at(theta_LVV.ravel())))
    values = {name: np.array([row[name] for row in rows]) for name in rows[0]}
    chance = 1 / (1 + np.exp(-shift))
    growth = float(2 * (chance**2 + (1 - chance) ** 2))
    return ByLength(num_prompts, np.array(ascending), growth, values)
