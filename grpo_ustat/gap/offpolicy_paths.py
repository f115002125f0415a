"""Paths on which Algorithm 2's updates lead, and what its gradient estimate is worth there."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from grpo_ustat.config.schema import ConfigError
from grpo_ustat.draws import generator
from grpo_ustat.estimators.intervals import (
    Interval,
    jackknife_variance,
    positive_interval,
    t_interval,
)
from grpo_ustat.estimators.moments import exact_moments
from grpo_ustat.estimators.scaling import ScalingLaw
from grpo_ustat.gap.offpolicy import Setting, estimate, tie
from grpo_ustat.gap.sequences import SequencePolicy

LARGEST_CHANGE = 100.0  # change of a parameter beyond which squares of pi_ref/pi_theta may overflow


@dataclass(frozen=True)
class Draws:
    """The minibatches that one path steps on: parts of a batch, completions of pi_old.

    They are the same at every learning rate.

    Attributes:
        prompt_UB: prompts of each update, drawn independently and evenly.
        outcome_UBG: their completions.
    """

    prompt_UB: np.ndarray
    outcome_UBG: np.ndarray


def draw(setting: Setting, updates: int, seed: int, replicate: int) -> Draws:
    """The draws of one replicate, from a generator that seed and replicate alone decide."""
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
    """The policy after one update."""
    theta_D = current.theta_D + learning_rate * step_D
    farthest = np.abs(theta_D - setting.old.theta_D).max()
    if not farthest < LARGEST_CHANGE:
        raise ConfigError(
            f"learning_rate={learning_rate} takes a parameter {farthest:.3g} away, more than "
            f"{LARGEST_CHANGE:g}: use a smaller learning rate, fewer updates or a smaller beta"
        )
    return current.at(theta_D)


def random_path(setting: Setting, draws: Draws, learning_rate: float) -> SequencePolicy:
    """The policy after one update on each minibatch, plain gradient ascent."""
    current = setting.old
    for prompt_B, outcome_BG in zip(draws.prompt_UB, draws.outcome_UBG, strict=True):
        step_D = estimate(setting, current, prompt_B, outcome_BG)
        current = update(setting, current, learning_rate, step_D)
    return current


def exact_path(setting: Setting, updates: int, learning_rate: float) -> list[SequencePolicy]:
    """theta_old and the policy after every update along the target itself, without noise."""
    path = [setting.old]
    for _ in range(updates):
        target_D = setting.whole_target(path[-1])
        path.append(update(setting, path[-1], learning_rate, target_D))
    return path


@dataclass(frozen=True)
class LeadingTerms:
    """What errors without normalisation tend to as the learning rate eta falls.

    Attributes:
        exact: limit of bias^2 / eta^2 along the exact path, by the derivative of the bias.
        random_R: the same of every random path.
        law: C1, C2, C3 of Proposition 3 at theta_old, without the KL term.
    """

    exact: float
    random_R: np.ndarray
    law: ScalingLaw


@dataclass(frozen=True)
class PathErrors:
    """Exact errors at the ends of all paths.

    Attributes:
        setting: who wrote, and the shape of a minibatch.
        rates: learning rates, ascending, E of them.
        start: errors at theta_old.
        exact: errors after steps along the target, [E] each.
        random: errors after steps on minibatches, [E, R] each.
        exact_by_place: bias^2 with token ratios of every minibatch of the batch along the exact
            path, [E, k + 1].
        leading: limits as eta falls; None with normalisation, whose bias has another limit.
    """

    setting: Setting
    rates: np.ndarray
    start: dict[str, float]
    exact: dict[str, np.ndarray]
    random: dict[str, np.ndarray]
    exact_by_place: np.ndarray
    leading: LeadingTerms | None = None

    def mean(self, name: str) -> list[Interval]:
        """Over random paths, with t intervals, on the log scale where they allow it."""
        values_ER = self.random[name]
        count = values_ER.shape[1]
        pairs = zip(values_ER.mean(axis=1), values_ER.var(axis=1, ddof=1) / count, strict=True)
        return [positive_interval(float(mean), float(var), count - 1) for mean, var in pairs]

    def slope(self, name: str, at: int = 0) -> Interval:
        """Slope of log mean bias^2 on log eta from rate `at` to the next, delete-one-path
        jackknife.
        """
        low, high = self.random[name][at : at + 2]
        step, count = np.log(self.rates[at + 1] / self.rates[at]), len(low)
        without_R = np.log((high.sum() - high) / (low.sum() - low)) / step
        whole = float(np.log(high.sum() / low.sum()) / step)
        return t_interval(whole, float(jackknife_variance(without_R)), count - 1)

    @property
    def bias_share_E(self) -> np.ndarray:
        """Mean squared bias over mean variance, both with token ratios."""
        mean = {name: self.random[f"token_{name}"].mean(axis=1) for name in ("bias2", "variance")}
        return mean["bias2"] / mean["variance"]

    @property
    def crossing(self) -> float | None:
        """The learning rate at which `bias_share_E` is 1, interpolated on the log scale; None where
        no rate is above it, or the first is already.
        """
        above = np.flatnonzero(self.bias_share_E >= 1)
        if not len(above) or above[0] == 0:
            return None
        ends = slice(above[0] - 1, above[0] + 1)
        logs, rates = np.log(self.bias_share_E[ends]), np.log(self.rates[ends])
        return float(np.exp(np.interp(0.0, logs, rates)))

    def tie(self) -> np.ndarray:
        """The B at which both levels have the same error at every rate, theta_k as it is, [E]."""
        mean = {name: values_ER.mean(axis=1) for name, values_ER in self.random.items()}
        return tie(mean, self.setting.num_prompts)


def path_errors(
    setting: Setting, rates_E: np.ndarray, updates: int, replicates: int, seed: int
) -> PathErrors:
    """Errors at the ends of an exact and of many random paths.

    Args:
        setting: who wrote, and the shape of a minibatch.
        rates_E: learning rates, ascending.
        updates: k.
        replicates: random paths, keyed by seed and number.
        seed: of their completions.
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
    """Limit of bias^2 / eta^2 of a path that leaves theta_old in this direction."""
    return float(np.square(setting.first_order_bias(direction_D)).sum())


def sum_of_steps(setting: Setting, draws: Draws) -> np.ndarray:
    """The direction in which a random path leaves theta_old, [D]."""
    pairs = zip(draws.prompt_UB, draws.outcome_UBG, strict=True)
    return np.sum([estimate(setting, setting.old, *pair) for pair in pairs], axis=0)


def on_policy_law(setting: Setting) -> ScalingLaw:
    """C1, C2, C3 of Proposition 3 at theta_old, without the KL term."""
    old, reward_PY = setting.old, setting.reward_PY
    g_PD, q_PY = old.gradient_PD(reward_PY), np.square(old.scores_PYD).sum(axis=2)
    g_sq_P = np.square(g_PD).sum(axis=1)
    moments = exact_moments(q_PY, reward_PY, old.probabilities_PY, g_sq_P)
    return ScalingLaw.of_moments(moments, float(np.square(g_PD.mean(axis=0)).sum()))
