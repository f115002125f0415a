r"""Any baseline's gradient error from a score pool alone: groups drawn from it, no model pass.

Groups of G completions are drawn from each question's pool of N, their estimates compared with the
gradient of the rest of the pool (see `replay_draws`). Inner products within a question come from
its Gram matrix, those across questions from `features_PNR`; different questions are independent,
so with m questions, `mu_x = E ghat_x`, `mu = mean_x mu_x` and the targets tau_x, tau likewise,

    ||mu||^2   = 1/m^2 ( sum_x p_x + sum_{x != y} <mu_x, mu_y> )        p_x = ||mu_x||^2
    <mu, tau>  = 1/m^2 ( sum_x c_x + sum_{x != y} <mu_x, tau_y> )       c_x = <mu_x, tau_x>
    ||tau||^2  = 1/m^2 ( sum_x t_x + sum_{x != y} <tau_x, tau_y> )      t_x = ||tau_x||^2

are unbiased, and with `e_x = E||ghat_x||^2` they give every setting's error, see
`estimators.minibatch.decompose`. Targets of every rule: tau_x = g_x (`expected_reward`). Of a rule
whose mean goes elsewhere as G grows (`Baseline.target`), two more:

    own_mean       tau_x = mu_x = E ghat_x at this G. The error is the variance, estimated without
                   bias. For 0/1 rewards mu_x = w_G(V) g_x with a polynomial w_G: the gradient of an
                   objective of order G - 1 in V, of maxrl (epsilon 0) that of log V cut after G - 1
                   terms, `-sum_{k<G} (1-V)^k / k`; of rules that couple questions too
    LIMITS         tau_x = kappa_x g_x, where mu_x goes as G grows, see `target_scale`. sigma_x and
                   V_x are plugged in; the bias of order 1/(N V) is taken off by the jackknife, and
                   of order 1/(N V)^2 remains: only where `limit_refusal` finds completions enough
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import NamedTuple

import numpy as np

from grpo_ustat.estimators.baselines import BASELINES
from grpo_ustat.estimators.baselines.base import centre
from grpo_ustat.estimators.intervals import (
    Interval,
    is_binary,
    jackknife_variance,
    pooled_dof,
    positive_interval,
)
from grpo_ustat.estimators.minibatch import decompose, scale_free
from grpo_ustat.estimators.moments import Moments, pool_gradient_weights
from grpo_ustat.mse.replay_coupled import replay_coupled
from grpo_ustat.mse.replay_draws import LEAST_OUTSIDE, draw_orders
from grpo_ustat.mse.replay_independent import (
    PoolMoments,
    QuestionStats,
    delete_one_weights,
    question_stats,
    room_for_two,
)
from grpo_ustat.mse.rule_sizes import RuleLaw
from grpo_ustat.records import Array, ScorePool

NO_SPREAD = 1e-9  # a standard deviation or a value that is 0 but for rounding
LIMITS = ("g_over_sigma", "g_over_v", "kept_part")
TARGET_WORDS = {
    "expected_reward": "gradient of the expected reward",
    "own_mean": "rule's own mean at this G",
    "g_over_sigma": "limit g/(sigma + epsilon)",
    "g_over_v": "limit g/(V + epsilon)",
    "kept_part": "limit g/(V(1-V)) sigma_m, sigma_m of the part that is kept",
    "multiple_of_g": "limit, a multiple of g",
    "g_over_density": "limit g/f(V), f of the batch",
    "weighted_by_length": "limit E[L^-power (z - V) s]/sigma",
    "sum_g_over_sigma": "limit sum w_f g_f/sigma_f",
}
LEAST_SUPPORT = 5  # completions behind a divisor: scripts/benchmarks/limit_targets.py

Options = Mapping[str, Mapping[str, float]]
Setting = tuple[str, int | None]


@dataclass(frozen=True)
class ReplayPoint:
    """One rule at one group size against one target.

    Attributes:
        baseline, group_size: the rule and its G.
        target: what the rule is judged against, see the module's page.
        setting, num_prompts: how a batch's questions are drawn, and how many.
        draws: groups per question behind the numbers.
        mse: with its interval; NaN where the pool is too small for it.
        bias2, variance: its parts; NaN where the pool has no room for two disjoint groups.
        cosine: <E T, tau> / sqrt(E||T||^2 ||tau||^2), T the minibatch's estimate.
        best_scalar_mse: ||tau||^2 - <E T, tau>^2 / E||T||^2, the MSE of the best multiple of T.
            Both are None where the estimate of ||tau||^2 is not positive.
        law: what the error at any number of rollouts is made of; of the first setting alone, None
            for rules that couple questions, against the rule's own mean, of fewer than 4 questions,
            and where the pool has no room for two disjoint groups.
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
    law: RuleLaw | None = field(default=None, compare=False)


class _Means(NamedTuple):
    """What a setting's error is made of: means over questions and products of their means."""

    e: Array
    p: Array
    c: Array
    t: Array
    mu_sq: Array
    cross: Array
    target_sq: Array


def replay_refusal(baseline: str, setting: str, num_prompts: int | None) -> str | None:
    """Why replay has no row for a rule in a setting, or None where it has one."""
    rule = BASELINES[baseline]
    if rule.only_trains:
        return f"{baseline} remembers past batches, which a pool has none of"
    if rule.couples_prompts and setting not in ("all_questions_once", "without_replacement"):
        return f"{baseline} couples the questions of a batch: replay draws them without replacement"
    few = num_prompts is not None and num_prompts < rule.min_prompts
    if setting == "without_replacement" and rule.couples_prompts and few:
        return f"{baseline} needs at least {rule.min_prompts} questions in a batch"
    return None


def limit_refusal(rewards_PN: Array, baseline: str) -> str | None:
    """Why a rule cannot be judged against its limit as G grows, or None where it can.

    At least `LEAST_SUPPORT` completions of every question must carry the divisor: right ones behind
    V, the rarer of right and wrong ones behind sigma and a kept part. Of other rewards the
    effective number: with k right completions `(sum z)^2 / sum z^2` is k; of sigma it is
    `N sigma^4 / mu_4`.
    """
    target = BASELINES[baseline].target
    if target not in LIMITS:
        cosine = "against g" if target == "multiple_of_g" else "against its own mean at this G"
        return (
            f"{baseline} against its {TARGET_WORDS[target]}: its length is a number of the rule or "
            f"of each batch, so no error is defined; read its cosine {cosine}"
        )
    if target == "kept_part" and not is_binary(rewards_PN):
        return (
            f"{baseline} against its {TARGET_WORDS[target]}: with other rewards than 0 and 1 its "
            "mean goes to no multiple of g; read its error against its own mean at this G"
        )
    support_P = support(rewards_PN, target)
    few = int((support_P < LEAST_SUPPORT).sum())
    if not few:
        return None
    what = {
        ("g_over_v", True): "right completions",
        ("g_over_sigma", True): "completions of the rarer reward",
        ("kept_part", True): "completions of the rarer reward",
        ("g_over_v", False): "effective completions behind V",
        ("g_over_sigma", False): "effective completions behind sigma",
    }[target, is_binary(rewards_PN)]
    return (
        f"{baseline} against its {TARGET_WORDS[target]}: {few} of {len(support_P)} questions have "
        f"fewer than {LEAST_SUPPORT} {what} (fewest {support_P.min():.3g} of "
        f"{rewards_PN.shape[1]}), and the estimate would be biased: read its error against its own "
        "mean at this G, or take more completions of each question"
    )


def own_mean_refusal(baseline: str, group_sizes: list[int], count: int) -> str | None:
    """Why a rule has no row against its own mean at some G; None where it has a row at every G."""
    coupled = BASELINES[baseline].couples_prompts  # its groups are left out whole
    needed = {
        size: max(2 * size, size + LEAST_OUTSIDE) if coupled else 2 * size + 1
        for size in group_sizes
    }
    short = [size for size in group_sizes if count < needed[size]]
    if not short:
        return None
    groups = "two disjoint groups need" if coupled else "two disjoint groups and one more need"
    return (
        f"{baseline} against its own mean at G = {', '.join(map(str, short))}: {groups} "
        f"{needed[max(short)]} completions of each question, got {count}: take more"
    )


def support(rewards_PN: Array, target: str) -> Array:
    """How many completions of each question estimate the divisor, V or sigma, [P]."""
    count, total_P = rewards_PN.shape[1], rewards_PN.sum(axis=1)
    if target == "g_over_v":
        squares_P = np.square(rewards_PN).sum(axis=1)
        return np.divide(total_P**2, squares_P, out=np.zeros_like(total_P), where=squares_P > 0)
    if is_binary(rewards_PN):
        return np.minimum(total_P, count - total_P)
    centred_PN = centre(rewards_PN)
    second_P, fourth_P = (np.power(centred_PN, k).mean(axis=1) for k in (2, 4))
    return np.divide(count * second_P**2, fourth_P, out=np.zeros_like(total_P), where=fourth_P > 0)


def targets(pool: ScorePool, baseline: str, size: int) -> list[str]:
    """The targets against which a rule at one G has rows; the refusals explain the absent ones."""
    limit, count = BASELINES[baseline].target, pool.rewards_PN.shape[1]
    names = ["expected_reward"]
    if limit != "expected_reward" and own_mean_refusal(baseline, [size], count) is None:
        names.append("own_mean")
    if limit != "expected_reward" and limit_refusal(pool.rewards_PN, baseline) is None:
        names.append(limit)
    return names


def replay(
    pool: ScorePool,
    baselines: list[str],
    rules_options: Options,
    group_sizes: list[int],
    settings: list[Setting],
    draws: int,
    seed: int,
    interval: str,
) -> list[ReplayPoint]:
    """Errors of all rules at all group sizes, but for the rows that `replay_refusal` explains.

    All rules and group sizes share the draws: their differences are less noisy than they are, and
    no rule's numbers depend on the others asked for.

    Args:
        pool: N >= G + 3 completions of each of m questions, for the largest G.
        baselines: keys of `BASELINES`.
        rules_options: options by rule, none by default.
        group_sizes: every G.
        settings: (setting, B), see `estimators.minibatch.decompose`.
        draws: groups drawn per question.
        seed: of the draws.
        interval: `completions`, given the questions: each question's delete-one jackknife, whose
            variances add up. `questions`, as a sample of questions: they are deleted in turn.

    Raises:
        ValueError: a group leaves fewer than 3 completions of the pool.
    """
    count, room = pool.rewards_PN.shape[1], max(group_sizes) + LEAST_OUTSIDE
    if count < room:
        raise ValueError(
            f"replay of groups of {max(group_sizes)} needs pools of {room} completions, got {count}"
        )
    moments = PoolMoments(pool)
    points: list[ReplayPoint] = []
    for name in baselines:
        rule_settings = [each for each in settings if replay_refusal(name, *each) is None]
        for size in group_sizes if rule_settings else ():
            options = rules_options.get(name, {})
            if BASELINES[name].couples_prompts:
                rows = replay_coupled(
                    pool, name, options, size, rule_settings, draws, seed, interval
                )
                points += [ReplayPoint(name, size, *row) for row in rows]
            else:
                points += _replay_independent(
                    moments, name, options, size, rule_settings, draws, seed, interval
                )
    return points


def _replay_independent(
    moments: PoolMoments,
    name: str,
    options: Mapping[str, float],
    size: int,
    settings: list[Setting],
    draws: int,
    seed: int,
    interval: str,
) -> Iterator[ReplayPoint]:
    """Points of a rule that treats questions independently, one per target and setting."""
    questions, count = moments.pool.rewards_PN.shape
    stats = [
        question_stats(moments, x, name, options, draw_orders(seed, 0, x, draws, count), size)
        for x in range(questions)
    ]
    for target in targets(moments.pool, name, size):
        sums = _QuestionSums(
            moments,
            stats,
            target_scale(target, moments.whole, options),
            target_scale(target, moments.delete_one, options),
            "running" in BASELINES[name].needs,
        )
        means = [sums.whole(), sums.delete_one_completion(), sums.delete_one_question()]
        if target == "own_mean":
            means = [_against_own_mean(x) for x in means]
        elif target in LIMITS:
            means[0] = _jackknife_corrected(means[0], means[1])
        elif BASELINES[name].unbiased:
            means = [_with_unbiased_mean(x) for x in means]
        whole, without_completion, without_question = means
        delete_one = without_question if interval == "questions" else without_completion
        law = None
        if target != "own_mean" and room_for_two(name, size, count) and questions >= 4:
            law = _law(whole, without_question, name, size, target, questions)
        for place, (setting, num_prompts) in enumerate(settings):
            numbers = _setting_numbers(
                whole, delete_one, setting, num_prompts, questions, count, size, name, target
            )
            row = (name, size, target, setting, num_prompts, draws)
            yield ReplayPoint(*row, *numbers, law=None if place else law)


def _law(
    whole: _Means,
    delete_one: _Means,
    name: str,
    size: int,
    target: str,
    questions: int,
) -> RuleLaw:
    """The law of a rule at one G, of the population that the questions are a sample of: its
    products of means are those of pairs of different questions.
    """

    def parts(means: _Means) -> Array:
        """The rows of `RuleLaw.whole_5`."""
        share = 1 / questions
        mu_sq, cross, target_sq = (
            (both - share * own) / (1 - share)
            for both, own in zip(means[4:], means[1:4], strict=True)
        )
        bias2 = mu_sq - 2 * cross + target_sq
        return np.stack([bias2, means.e - mu_sq, means.p - mu_sq, cross, target_sq])

    return RuleLaw(name, size, target, parts(whole), parts(delete_one)[:, None])


def _with_unbiased_mean(means: _Means) -> _Means:
    """The means of a rule with E ghat_x = tau_x: then p = 2 c - t, and the noise that p and c share
    drops out of e - p.
    """
    return means._replace(p=2 * means.c - means.t, mu_sq=2 * means.cross - means.target_sq)


def _against_own_mean(means: _Means) -> _Means:
    """The means of a rule against its own mean tau_x = mu_x: no bias, the error is the variance."""
    return means._replace(c=means.p, t=means.p, cross=means.mu_sq, target_sq=means.mu_sq)


def _jackknife_corrected(whole: _Means, delete_one: _Means) -> _Means:
    """The means that hold a plugged-in sigma or V, less their jackknifed bias.

    Questions are independent samples of N each: their biases `(N-1) (mean_i theta_{-i} - theta)`
    add up.
    """
    count = delete_one.e.shape[1]
    corrected = {}
    for key in ("c", "t", "cross", "target_sq"):
        theta, delete_one_PN = getattr(whole, key), getattr(delete_one, key)
        corrected[key] = theta - (count - 1) * (delete_one_PN.mean(axis=1) - theta).sum()
    return whole._replace(**corrected)


def _setting_numbers(
    whole: _Means,
    delete_one: _Means,
    setting: str,
    num_prompts: int | None,
    questions: int,
    count: int,
    size: int,
    name: str,
    target: str,
) -> tuple[Interval, float, float, float | None, float | None]:
    """(mse, bias2, variance, cosine, best_scalar_mse) of a rule at one G in one setting.

    Args:
        whole: means of the whole pool.
        delete_one: the same with one completion [P, N] or one question [P] left out.
        setting: how questions are drawn, see `decompose`.
        num_prompts: B, where the setting has one.
        questions: m.
        count: N.
        size: G.
        name: of the rule.
        target: what the rule is judged against.
    """

    def parts(means: _Means) -> tuple[Array, Array, Array]:
        products = means[1:4] if setting == "one_question" else means[4:]
        return decompose(setting, num_prompts, questions, means.e, means.p, *products)

    mse, bias2, variance = (float(x) for x in parts(whole))
    # Without p the mse still stands, save where it depends on p, see `decompose`.
    several = num_prompts is not None and num_prompts > 1
    mse_needs_p = target == "own_mean" or (setting == "with_replacement" and several)
    if not room_for_two(name, size, count):
        mse, bias2, variance = math.nan if mse_needs_p else mse, math.nan, math.nan
    over_questions = delete_one.e.ndim == 1
    jackknife, dof = math.nan, 1.0
    if not mse_needs_p or room_for_two(name, size, count if over_questions else count - 1):
        variances = jackknife_variance(parts(delete_one)[0])
        if over_questions:
            jackknife, dof = float(variances) if questions > 3 else math.nan, questions - 1
        else:
            jackknife, dof = float(variances.sum()), pooled_dof(variances, count - 1)
    one_question = setting == "one_question"
    cross = float(whole.c if one_question else whole.cross)
    target_sq = float(whole.t if one_question else whole.target_sq)
    comparable = scale_free(mse + 2 * cross - target_sq, cross, target_sq)
    return positive_interval(mse, jackknife, max(dof, 1)), bias2, variance, *comparable


def target_scale(target: str, moments: Moments, options: Mapping[str, float]) -> Array:
    """kappa with tau = kappa g; 0 where sigma or V is 0.

        g_over_sigma, g_over_v   1/(sigma + epsilon), 1/(V + epsilon)
        kept_part                sigma_m^2/(sigma_m + epsilon) / sigma^2, see `group.pods`
        others                   1

    Args:
        target: what the rule is judged against.
        moments: of questions.
        options: of the rule.
    """
    if target not in LIMITS:
        return np.ones_like(moments.value)
    spread, epsilon = np.sqrt(np.maximum(moments.var_z, 0.0)), options.get("epsilon", 0.0)
    divisor = moments.value if target == "g_over_v" else spread
    kappa = 1 / (np.maximum(divisor, NO_SPREAD) + epsilon)
    if target == "kept_part":
        v, share = moments.value, options["share"]
        right = np.clip(0.5, 1 - (1 - v) / share, v / share)  # of the part
        kept = np.sqrt(right * (1 - right))
        kappa = kept**2 / (kept + epsilon) / np.maximum(moments.var_z, NO_SPREAD)
    return np.where(divisor > NO_SPREAD, kappa, 0.0)


class _QuestionSums:
    """Sums within and between questions, whole and with a completion or a question left out.

    All sums between questions are linear in each question's mu_x and tau_x: leaving out one of
    its completions changes them by an inner product, exactly.

    Args:
        moments: of the pool.
        stats: of every question under one rule and group size.
        scale_P, scale_PN: kappa with tau = kappa g of the whole pool, and without completion i.
        shares_baseline: whether the rule's b is the mean over all questions, as a running mean is.
    """

    def __init__(
        self,
        moments: PoolMoments,
        stats: list[QuestionStats],
        scale_P: Array,
        scale_PN: Array,
        shares_baseline: bool,
    ):
        self.moments, self.stats, self.count = moments, stats, len(stats)
        self.scale_P, self.scale_PN = scale_P, scale_PN
        pool = moments.pool
        self.e, self.p = (np.array([getattr(x, key) for x in stats]) for key in ("e", "p"))
        self.c = self.scale_P * np.array([x.c for x in stats])
        self.t = self.scale_P**2 * moments.whole.g_sq
        self.tau_PN = self.scale_P[:, None] * pool_gradient_weights(pool.rewards_PN)
        features = pool.features_PNR
        self.mu_PR = np.array([x.mean_N @ f for x, f in zip(stats, features, strict=True)])
        self.tau_PR = np.array([w @ f for w, f in zip(self.tau_PN, features, strict=True)])
        self.other_mu_PR = self.mu_PR.sum(axis=0) - self.mu_PR
        self.other_tau_PR = self.tau_PR.sum(axis=0) - self.tau_PR
        self.e_PN = np.array([x.e_N for x in stats])
        if shares_baseline:  # leaving out z_i moves the b, and with it the e, of the others too
            slope_P = np.array([x.slope for x in stats])
            shift_PN = (moments.delete_one.value - moments.whole.value[:, None]) / self.count
            self.e_PN += (slope_P.sum() - slope_P)[:, None] * shift_PN

    def whole(self) -> _Means:
        """Means of the whole pool."""
        pairs = [x.sum() / self.count**2 for x in self._products_with_others()]
        inner = [x.mean() for x in (self.e, self.p, self.c, self.t)]
        return _Means(*inner, *(a / self.count + b for a, b in zip(inner[1:], pairs, strict=True)))

    def delete_one_completion(self) -> _Means:
        """Means without completion i of question x, [P, N]."""
        inside = (
            self.e_PN - self.e[:, None],
            np.array([x.p_N for x in self.stats]) - self.p[:, None],
            self.scale_PN * np.array([x.c_N for x in self.stats]) - self.c[:, None],
            self.scale_PN**2 * self.moments.delete_one.g_sq - self.t[:, None],
        )
        pool, rows = self.moments.pool, []
        for x, stats in enumerate(self.stats):  # what the sums over ordered pairs gain, [3, N]
            others_R2 = np.stack([self.other_mu_PR[x], self.other_tau_PR[x]], axis=1)
            to_mu_N, to_tau_N = (pool.features_PNR[x] @ others_R2).T
            mu_NN = stats.mean_NN - stats.mean_N
            tau_NN = self.scale_PN[x][:, None] * delete_one_weights(pool.rewards_PN[x])
            tau_NN -= self.tau_PN[x]
            mu_tau_N = mu_NN @ to_tau_N + tau_NN @ to_mu_N
            rows.append((2 * mu_NN @ to_mu_N, mu_tau_N, 2 * tau_NN @ to_tau_N))
        between = np.array(rows).transpose(1, 0, 2)
        changes = [x / self.count for x in inside]
        changes += [(a + b) / self.count**2 for a, b in zip(inside[1:], between, strict=True)]
        return _Means(*(a + b for a, b in zip(self.whole(), changes, strict=True)))

    def delete_one_question(self) -> _Means:
        """Means without question x, [P]: over the others and over their pairs, at the same m.

        A sum over ordered pairs loses the pairs with x on either side.
        """
        m, others = self.count, self.count - 1
        inner = [(x.sum() - x) / max(others, 1) for x in (self.e, self.p, self.c, self.t)]
        mu_mu, mu_tau, tau_tau = self._products_with_others()
        tau_mu = (self.tau_PR * self.other_mu_PR).sum(axis=1)
        losses = ((mu_mu, 2 * mu_mu), (mu_tau, mu_tau + tau_mu), (tau_tau, 2 * tau_tau))
        pairs = [(x.sum() - loss) / max(others * (others - 1), 1) for x, loss in losses]
        between = [a / m + (1 - 1 / m) * b for a, b in zip(inner[1:], pairs, strict=True)]
        return _Means(*inner, *between)

    def _products_with_others(self) -> tuple[Array, Array, Array]:
        """Every question's products with all others, of (mu, mu), (mu, tau), (tau, tau), [P]."""
        return (
            (self.mu_PR * self.other_mu_PR).sum(axis=1),
            (self.mu_PR * self.other_tau_PR).sum(axis=1),
            (self.tau_PR * self.other_tau_PR).sum(axis=1),
        )
