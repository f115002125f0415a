r"""Any baseline's gradient error from a score pool alone: groups drawn from it, no model pass.

Groups of G completions are drawn from each question's pool of N, their estimates compared with the
gradient of the rest of the pool (see `study.groups`). Inner products within a question come from
its Gram matrix, those across questions from `features_PNR`; different questions are independent,
so with m questions, `mu_x = E ghat_x`, `mu = mean_x mu_x` and the targets tau_x, tau likewise,

    ||mu||^2   = 1/m^2 ( sum_x p_x + sum_{x != y} <mu_x, mu_y> )        p_x = ||mu_x||^2
    <mu, tau>  = 1/m^2 ( sum_x c_x + sum_{x != y} <mu_x, tau_y> )       c_x = <mu_x, tau_x>
    ||tau||^2  = 1/m^2 ( sum_x t_x + sum_{x != y} <tau_x, tau_y> )      t_x = ||tau_x||^2

are unbiased, and with `e_x = E||ghat_x||^2` they give every setting's error, see
`estimators.settings`. Targets: tau_x = g_x (`expected_reward`), g_x / sigma_x (`arcsin`), g_x / V_x
(`log_value`); sigma_x and V_x are plugged in from the whole pool, a bias of O(1/N).
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from grpo_ustat.estimators.baselines import BASELINES
from grpo_ustat.estimators.intervals import (
    Interval,
    jackknife_variance,
    pooled_dof,
    positive_interval,
)
from grpo_ustat.estimators.moments import Moments, pool_gradient_weights
from grpo_ustat.estimators.settings import decompose, scale_free
from grpo_ustat.records import ScorePool
from grpo_ustat.study.apart import Facts, Measured, measure, room_for_two, weights_without
from grpo_ustat.study.coupled import replay_coupled
from grpo_ustat.study.groups import LEAST_REST, orders

NO_SPREAD = 1e-9  # a standard deviation or a value that is 0 but for rounding

Options = Mapping[str, Mapping[str, float]]
Setting = tuple[str, int | None]


@dataclass(frozen=True)
class Replayed:
    """One rule at one group size against one target.

    Attributes:
        baseline, group_size, setting, num_prompts: of the estimate.
        target: whose gradient it is judged against.
        draws: groups per question behind it.
        mse: with its interval; NaN where the pool is too small for it.
        bias2, variance: its parts; NaN where the pool has no room for two disjoint groups.
        cosine: <E T, tau> / sqrt(E||T||^2 ||tau||^2), T the minibatch's estimate.
        best_scalar_mse: ||tau||^2 - <E T, tau>^2 / E||T||^2, the MSE of the best multiple of T.
            Both are None where the estimate of ||tau||^2 is not positive.
    """

    baseline: str
    group_size: int
    target: str
    setting: str
    num_prompts: int | None
    draws: int
    mse: Interval
    bias2: float
    variance: float
    cosine: float | None
    best_scalar_mse: float | None


class _Means(NamedTuple):
    """What a setting's error is made of: means over questions and products of their means."""

    e: np.ndarray
    p: np.ndarray
    c: np.ndarray
    t: np.ndarray
    mu_sq: np.ndarray
    cross: np.ndarray
    target_sq: np.ndarray


def unmeasured(baseline: str, setting: str, num_prompts: int | None) -> str | None:
    """Why replay has no row for a rule in a setting, or None where it has one."""
    rule = BASELINES[baseline]
    if rule.only_trains:
        return f"{baseline} remembers past batches, which a pool has none of"
    if rule.couples_prompts and setting not in ("all_questions_once", "without_replacement"):
        return f"{baseline} couples the questions of a batch: replay draws them without replacement"
    if setting == "without_replacement" and rule.couples_prompts and num_prompts < rule.min_prompts:
        return f"{baseline} needs at least {rule.min_prompts} questions in a batch"
    return None


def replay(
    pool: ScorePool,
    baselines: list[str],
    rules_options: Options,
    group_sizes: list[int],
    settings: list[Setting],
    draws: int,
    seed: int,
    interval: str,
) -> list[Replayed]:
    """Errors of all rules at all group sizes, but for the rows that `unmeasured` explains.

    All rules and group sizes share the draws: their differences are less noisy than they are, and
    no rule's numbers depend on the others asked for.

    Args:
        pool: N >= G + 3 completions of each of m questions, for the largest G.
        baselines: keys of `BASELINES`.
        rules_options: options by rule, none by default.
        group_sizes: every G.
        settings: (setting, B), see `estimators.settings.decompose`.
        draws: groups drawn per question.
        seed: of the draws.
        interval: `completions`, given the questions: each question's delete-one jackknife, whose
            variances add up. `questions`, as a sample of questions: they are deleted in turn.

    Raises:
        ValueError: a group leaves fewer than 3 completions of the pool.
    """
    count, room = pool.rewards_PN.shape[1], max(group_sizes) + LEAST_REST
    if count < room:
        raise ValueError(
            f"replay of groups of {max(group_sizes)} needs pools of {room} completions, got {count}"
        )
    facts, result = Facts(pool), []
    for name in baselines:
        asked = [each for each in settings if unmeasured(name, *each) is None]
        for size in group_sizes if asked else ():
            options = rules_options.get(name, {})
            if BASELINES[name].couples_prompts:
                rows = replay_coupled(pool, name, options, size, asked, draws, seed, interval)
                result += [Replayed(name, size, "expected_reward", *row) for row in rows]
            else:
                result += _replay_apart(facts, name, options, size, asked, draws, seed, interval)
    return result


def _replay_apart(facts: Facts, name, options, size, settings, draws, seed, interval):
    questions, count = facts.pool.rewards_PN.shape
    found = [
        measure(facts, x, name, options, orders(seed, 0, x, draws, count), size)
        for x in range(questions)
    ]
    rows = []
    for target in dict.fromkeys(("expected_reward", BASELINES[name].target)):
        sums = _Sums(facts, found, target, "running" in BASELINES[name].needs)
        whole = sums.whole()
        deleted = sums.without_questions() if interval == "questions" else sums.without_one()
        if BASELINES[name].unbiased:
            whole, deleted = _unbiased(whole), _unbiased(deleted)
        for setting, num_prompts in settings:
            known = _Row(setting, num_prompts, questions, count, size, name)
            rows.append(
                Replayed(name, size, target, setting, num_prompts, draws, *known(whole, deleted))
            )
    return rows


def _unbiased(means: _Means) -> _Means:
    """E ghat_x = tau_x: then p = 2 c - t, and what is noise in both drops out of e - p."""
    return means._replace(p=2 * means.c - means.t, mu_sq=2 * means.cross - means.target_sq)


@dataclass(frozen=True)
class _Row:
    """From the means of a rule at one G, whole and deleted, to the numbers of a setting."""

    setting: str
    num_prompts: int | None
    questions: int
    count: int
    size: int
    name: str

    def __call__(self, whole: _Means, deleted: _Means):
        """(mse, bias2, variance, cosine, best_scalar_mse)."""
        mse, bias2, variance = (float(x) for x in self._decompose(whole))
        # Without p the mse still stands, save where it depends on p, see `decompose`.
        by_p = self.setting == "with_replacement" and self.num_prompts > 1
        if not room_for_two(self.name, self.size, self.count):
            mse, bias2, variance = math.nan if by_p else mse, math.nan, math.nan
        spread, dof = self._spread(deleted, by_p)
        own = self.setting == "one_question"
        cross = float(whole.c if own else whole.cross)
        target_sq = float(whole.t if own else whole.target_sq)
        comparable = scale_free(mse + 2 * cross - target_sq, cross, target_sq)
        return positive_interval(mse, spread, max(dof, 1)), bias2, variance, *comparable

    def _decompose(self, means: _Means):
        products = means[4:] if self.setting != "one_question" else means[1:4]
        return decompose(
            self.setting, self.num_prompts, self.questions, means.e, means.p, *products
        )

    def _spread(self, deleted: _Means, by_p: bool) -> tuple[float, float]:
        """Jackknife variance of the mse and its degrees of freedom."""
        over_questions = deleted.e.ndim == 1
        left = self.count if over_questions else self.count - 1
        if by_p and not room_for_two(self.name, self.size, left):
            return math.nan, 1.0
        variances = jackknife_variance(self._decompose(deleted)[0])
        if over_questions:
            return float(variances) if self.questions > 3 else math.nan, self.questions - 1
        return float(variances.sum()), pooled_dof(variances, self.count - 1)


def target_scale(target: str, moments: Moments) -> np.ndarray:
    """kappa with tau = kappa g: 1, 1/sigma or 1/V; 0 where sigma or V is 0."""
    if target == "expected_reward":
        return np.ones_like(moments.value)
    divisor = np.sqrt(moments.var_z) if target == "arcsin" else moments.value
    return np.divide(1, divisor, out=np.zeros_like(divisor), where=divisor > NO_SPREAD)


class _Sums:
    """Sums within and between questions, whole and with a completion or a question left out.

    All sums between questions are linear in each question's mu_x and tau_x: leaving out one of
    its completions changes them by an inner product, exactly.
    """

    def __init__(self, facts: Facts, found: list[Measured], target: str, shares_b: bool):
        self.facts, self.found, self.target, self.count = facts, found, target, len(found)
        pool = facts.pool
        self.scale_P = target_scale(target, facts.whole)
        self.e, self.p = (np.array([getattr(x, key) for x in found]) for key in ("e", "p"))
        self.c = self.scale_P * np.array([x.c for x in found])
        self.t = self.scale_P**2 * facts.whole.g_sq
        self.tau_PN = self.scale_P[:, None] * pool_gradient_weights(pool.rewards_PN)
        features = pool.features_PNR
        self.mu_PR = np.array([x.mean_N @ f for x, f in zip(found, features, strict=True)])
        self.tau_PR = np.array([w @ f for w, f in zip(self.tau_PN, features, strict=True)])
        self.other_mu_PR = self.mu_PR.sum(axis=0) - self.mu_PR
        self.other_tau_PR = self.tau_PR.sum(axis=0) - self.tau_PR
        self.e_PN = np.array([x.e_N for x in found])
        if shares_b:
            self.e_PN += self._through_shared_b()

    def whole(self) -> _Means:
        """Of the whole pool."""
        pairs = [x.sum() / self.count**2 for x in self._pairs()]
        inner = [x.mean() for x in (self.e, self.p, self.c, self.t)]
        return _Means(*inner, *(a / self.count + b for a, b in zip(inner[1:], pairs, strict=True)))

    def without_one(self) -> _Means:
        """Without completion i of question x, [P, N]."""
        scale_PN = target_scale(self.target, self.facts.without)
        inside = (
            self.e_PN - self.e[:, None],
            np.array([x.p_N for x in self.found]) - self.p[:, None],
            scale_PN * np.array([x.c_N for x in self.found]) - self.c[:, None],
            scale_PN**2 * self.facts.without.g_sq - self.t[:, None],
        )
        rows = [self._moved(x, scale_PN[x]) for x in range(self.count)]
        between = np.array(rows).transpose(1, 0, 2)
        changes = [x / self.count for x in inside]
        changes += [(a + b) / self.count**2 for a, b in zip(inside[1:], between, strict=True)]
        return _Means(*(a + b for a, b in zip(self.whole(), changes, strict=True)))

    def without_questions(self) -> _Means:
        """Without question x, [P]: means over the others and over their pairs, at the same m.

        A sum over ordered pairs loses the pairs with x on either side.
        """
        left, m = self.count - 1, self.count
        inner = [(x.sum() - x) / max(left, 1) for x in (self.e, self.p, self.c, self.t)]
        pairs = [(x.sum() - lost) / max(left * (left - 1), 1) for x, lost in
                 zip(self._pairs(), self._lost(), strict=True)]  # fmt: skip
        between = [a / m + (1 - 1 / m) * b for a, b in zip(inner[1:], pairs, strict=True)]
        return _Means(*inner, *between)

    def _pairs(self):
        """Every question's products with all others, of (mu, mu), (mu, tau), (tau, tau), [P]."""
        yield (self.mu_PR * self.other_mu_PR).sum(axis=1)
        yield (self.mu_PR * self.other_tau_PR).sum(axis=1)
        yield (self.tau_PR * self.other_tau_PR).sum(axis=1)

    def _lost(self):
        """What the sums over ordered pairs lose with question x."""
        mu_mu, mu_tau, tau_tau = self._pairs()
        yield 2 * mu_mu
        yield mu_tau + (self.tau_PR * self.other_mu_PR).sum(axis=1)
        yield 2 * tau_tau

    def _moved(self, x: int, scale_N: np.ndarray) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """What leaving out each completion of x adds to the sums over ordered pairs, each [N]."""
        pool, found = self.facts.pool, self.found[x]
        towards = np.stack([self.other_mu_PR[x], self.other_tau_PR[x]], axis=1)
        to_mu_N, to_tau_N = (pool.features_PNR[x] @ towards).T
        mu_NN = found.mean_NN - found.mean_N
        tau_NN = scale_N[:, None] * weights_without(pool.rewards_PN[x]) - self.tau_PN[x]
        return 2 * mu_NN @ to_mu_N, mu_NN @ to_tau_N + tau_NN @ to_mu_N, 2 * tau_NN @ to_tau_N

    def _through_shared_b(self) -> np.ndarray:
        """A running mean is every question's: leaving out z_i moves the others' e too, [P, N]."""
        slope_P = np.array([x.slope for x in self.found])
        shift_PN = (self.facts.without.value - self.facts.whole.value[:, None]) / self.count
        return (slope_P.sum() - slope_P)[:, None] * shift_PN
