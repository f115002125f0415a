r"""Error curves, scaling law and a test of Assumption 2 from a score pool, with intervals.

A score pool contains N completions of each of m questions, with their rewards and the inner
products of their scores. The symbols q, Z, M_0, A_V and A_b* are defined in `moments`.

The errors of the baselines none, oracle, leave_one_out, group_mean, constant, running_mean and
remax have unbiased estimates. The error of the baseline optimal depends on
`A_b* = A_V - E[Cov(q, Z)^2 / M_0]`. Because of the ratio in this formula, the estimate of A_b* is
consistent but not unbiased (see `moments.covariance_excess`).

Every statistic is computed from two inputs. The first are unbiased estimates of each question's
moments, averaged over questions. The second is `S = sum_{x != y} <ghat_x, ghat_y>`, a sum over
pairs of different questions. Here ghat_x is the gradient estimate from all completions of question
x. For example, the estimate of the squared length of the true gradient is

    ||grad J||^2 = 1/m^2 ( sum_x ||g_x||^2 + S )

Intervals apply to new questions: the jackknife leaves out one question at a time. A bootstrap over
completions is never used, because duplicate completions turn U-statistics into V-statistics.

The numbers for training (C1, C2, C3, G*, the noise scale) apply to the population from which the
questions are sampled, because a training step draws other questions from this population. They are
not computed for the m questions alone. The mean gradient of m given questions has the squared
length ||grad J||^2 + C1/m, so a noise scale for only these questions would grow with m by
construction.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, fields, replace

import numpy as np

from grpo_ustat.estimators.group_size import WEAK_PRIOR, Prior
from grpo_ustat.estimators.intervals import Interval, Tails, jackknife_interval, tails
from grpo_ustat.estimators.minibatch import decompose
from grpo_ustat.estimators.moments import (
    Moments,
    covariance_excess,
    pool_moments,
)
from grpo_ustat.estimators.scaling import CONSTANTS_AND_GRADIENT, ScalingLaw
from grpo_ustat.records import MIN_QUESTIONS, Array, ScorePool

Arrays = dict[str, Array]
# Number of questions whose gradients are read at once.
BLOCK = 64
# Group sizes at which the curves are computed.
CURVE_SIZES = (2, 3, 4, 5, 6, 8, 10, 12, 16, 20, 24, 32, 48, 64, 96, 128, 192, 256)


@dataclass(frozen=True)
class CurvePoint:
    """Point of an error curve, for one baseline, one group size and one setting."""

    baseline: str
    group_size: int
    # Sampling scheme for the questions of a batch; see `estimators.minibatch.decompose`.
    setting: str
    # Number of questions in a batch.
    num_prompts: int

    @property
    def is_new(self) -> bool:
        """True if each batch draws new questions from the population."""
        return self.setting == "with_replacement"

    @property
    def key(self) -> str:
        """Key of the point's mean squared error in `ClosedForm.statistics`."""
        return f"mse/{self.baseline}/{self.group_size}/{self.setting}/{self.num_prompts}"

    @property
    def ratio_key(self) -> str:
        """Key, in `ClosedForm.statistics`, of the point's error divided by the oracle's error.

        The oracle's error is for the same group size, setting and number of questions.
        """
        return f"ratio/{self.key.removeprefix('mse/')}"


@dataclass(frozen=True)
class Request:
    """Statistics to compute."""

    # Points of the error curves.
    points: list[CurvePoint]
    # Options of each baseline, by the name of the baseline.
    options: Mapping[str, Mapping[str, float]]
    # Costs of a prompt and of a completion, by the name of the unit of cost, such as `tokens`. For
    # each unit, the best group size at a fixed budget is computed.
    costs: Mapping[str, tuple[float, float]]
    # Prior of C1/C3 for decisions on the group size.
    prior: Prior = WEAK_PRIOR


@dataclass(frozen=True)
class ClosedForm:
    """Statistics of a pool with their intervals, and other numbers without intervals."""

    # Statistics by name; `_statistics` computes most of them.
    # `mse/...`: error at a point of a curve; see `CurvePoint.key`.
    # `ratio/...`: this error divided by the oracle's error. Its interval is computed on the log
    # scale. The comparison is paired, because both errors come from the same completions.
    # In the following names, G is one of `CURVE_SIZES`, or `best` for the best G.
    # `gstar`: G* at a fixed number of rollouts.
    # `gstar_paper`: `gstar` minus 1, which is sqrt(C3/C1), the G* of the paper.
    # `gstar_NAME`: best G at a fixed cost in the unit NAME.
    # `noise/G`: noise scale n_c in rollouts.
    # `noise_tokens/G`: noise scale n_c in tokens; here `best` is the best G at a fixed number of
    # tokens.
    # `prompt_share/G`: share of the noise from prompts; see `estimators.scaling`.
    statistics: dict[str, Interval]
    # For every point, a tuple about the gradient estimate T of a batch: bias^2, variance, E||T||^2,
    # <E T, grad J> and ||grad J||^2.
    parts: dict[CurvePoint, tuple[float, ...]]
    # Scaling law, which contains C1, C2, C3, ||grad J||^2 and the covariance of their errors.
    law: ScalingLaw
    # Measures of heavy tails: of the squared score norms, and of A_0, A_V and C3, which determine
    # the curves. They show if the intervals can be trusted; see `Tails.heavy`.
    tails: Tails

    def __getitem__(self, name: str) -> Interval:
        return self.statistics[name]


def closed_form(pool: ScorePool, request: Request) -> ClosedForm:
    """Compute every statistic of the pool.

    Args:
        pool: pool of N >= 4 completions for each of m questions. With fewer than 4 questions, there
            are no intervals, and the statistics for new questions are NaN.
        request: points of the curves and other choices.
    """
    moments = pool_moments(pool.rewards_PN, pool.gram_PNN)
    # Unbiased estimates for each question by name, [m]. Every statistic is computed from their
    # means over questions and from the products between questions.
    per_question = {f.name: getattr(moments, f.name) for f in fields(moments)}
    per_question["excess"] = covariance_excess(pool.sq_norm_PN, pool.rewards_PN)
    per_question |= _fixed_baselines(pool, request, moments)
    means = {name: values.mean() for name, values in per_question.items()}
    with_others_P, count = _with_others(pool), len(pool.rewards_PN)
    estimates = _statistics(means, with_others_P.sum() / count**2, count, count, request)
    if count < MIN_QUESTIONS:
        new = [key for x in request.points if x.is_new for key in (x.key, x.ratio_key)]
        new += [*CONSTANTS_AND_GRADIENT, *(name for name in estimates if name.startswith("n_mse/"))]
        estimates |= dict.fromkeys(new, np.full((), np.nan))
        delete_one = dict.fromkeys(estimates, np.full((1, MIN_QUESTIONS), np.nan))
    else:
        delete_one = _delete_one_question(per_question, with_others_P, request)
    intervals: dict[str, Interval] = {}
    for name, value in estimates.items():
        positive = name.startswith(("mse/", "n_mse/", "ratio/")) and count >= MIN_QUESTIONS
        intervals[name] = jackknife_interval(float(value), delete_one[name], positive=positive)
    whole_4, delete_one_4Kn = (
        np.stack([values[name] for name in CONSTANTS_AND_GRADIENT])
        for values in (estimates, delete_one)
    )
    law = ScalingLaw.jackknifed(whole_4, delete_one_4Kn, count, request.prior)
    intervals |= _of_training(law, request.costs)

    def crossover(excess: float) -> float:
        """Return the G above which leave_one_out has a smaller error than none.

        This G is 1 + 1/excess = 1 + C3 / (A_0 - A_V). It is infinite if `excess` <= 0.
        """
        return 1 + 1 / excess if excess > 0 else math.inf

    estimate, low, high = intervals["vanilla_excess"]
    intervals["crossover"] = Interval(crossover(estimate), crossover(high), crossover(low))
    norms = pool.sq_norm_PN
    pool_tails = tails(
        norms.mean(axis=1)[None] if count > 1 else norms,
        [delete_one[name] for name in ("a0", "a_v", "c3")],
    )
    levels = estimates["grad_sq"], estimates["grad_sq_at_hand"]
    parts = {
        point: tuple(map(float, _point_moments(point, means, *levels)[1:]))
        for point in request.points
    }
    return ClosedForm(intervals, parts, law, pool_tails)


def _of_training(law: ScalingLaw, costs: Mapping[str, tuple[float, float]]) -> dict[str, Interval]:
    """Compute G*, the noise scale and the prompts' share of the noise for the population."""
    best = law.gstar()
    intervals = {"gstar": best, "gstar_paper": Interval(*(x - 1 for x in best))}
    for name, of_unit in costs.items():
        intervals[f"gstar_{name}"] = law.gstar(*of_unit)
    sizes = {str(size): float(size) for size in CURVE_SIZES}
    for name, size in (sizes | {"best": _decided(best)}).items():
        intervals[f"noise/{name}"] = law.noise_scale(size)
        intervals[f"prompt_share/{name}"] = law.prompt_share(size)
    if "tokens" in costs:
        best_tokens = _decided(intervals["gstar_tokens"])
        for name, size in (sizes | {"best": best_tokens}).items():
            intervals[f"noise_tokens/{name}"] = law.noise_scale(size, *costs["tokens"])
    return intervals


def _decided(best: Interval) -> float:
    """Return G* if both ends of its interval are finite; otherwise return NaN.

    The function decides if statistics at G* are reported. If G* is uncertain, the error at the
    estimated G* would underestimate the smallest error.
    """
    return best.estimate if math.isfinite(best.high) else math.nan


def _fixed_baselines(pool: ScorePool, request: Request, moments: Moments) -> Arrays:
    """Compute A_b = E[q (Z - b)^2] of the baselines constant, remax and running_mean.

    The values b of these baselines do not depend on the group. For constant and remax, b is known.
    For running_mean it must be estimated: with a fixed policy, a running mean converges to b, the
    mean of V over questions. For each question, `b = o + V/m`, where o is the contribution of the
    other questions. Products with the question's V are computed from the question's moments. The
    estimate of o^2 is the square of the estimate of o minus the variance of that estimate.

    Args:
        pool: score pool.
        request: points and options; only baselines of these points are computed.
        moments: moments of each question, [P].
    """
    names = {point.baseline for point in request.points}
    a_b: Arrays = {}
    baselines_P: dict[str, Array | None] = {"remax": pool.greedy_P}
    if "constant" in request.options:
        value = request.options["constant"]["value"]
        baselines_P["constant"] = np.full(len(pool.rewards_PN), value)
    for name in names & set(baselines_P):
        b = baselines_P[name]
        # A pool that is measured with remax contains greedy rewards.
        assert b is not None
        a_b[f"a_{name}"] = moments.a_0 - 2 * b * moments.m1 + b * b * moments.m0
    if "running_mean" in names:
        count, size = pool.rewards_PN.shape
        means_P = pool.rewards_PN.mean(axis=1)
        noise_P = pool.rewards_PN.var(axis=1, ddof=1) / size
        o = (means_P.sum() - means_P) / count
        noise = (noise_P.sum() - noise_P) / count**2
        v_m0 = moments.m1 - moments.cov_qz
        first = o * moments.m1 + moments.v_m1 / count
        second = (o * o - noise) * moments.m0 + 2 * o * v_m0 / count + moments.v2_m0 / count**2
        a_b["a_running_mean"] = moments.a_0 - 2 * first + second
    return a_b


def _statistics(
    means: Arrays, between: Array | float, count: int, questions: int, request: Request
) -> Arrays:
    """Compute all statistics, keyed by name.

    The arithmetic is elementwise in `means` and `between`. The same function therefore computes the
    statistics of the whole sample and those without each unit of the jackknife.

    Args:
        means: moments averaged over questions, by name.
        between: S/m^2; see the module's docstring.
        count: number of questions behind `means`: m, or m - 1 if a question is left out.
        questions: number of questions in the pool, m.
        request: points of the curves and other choices.
    """
    # C1 and ||grad J||^2 of the population from which the questions are sampled.
    c1 = (means["g_sq"] - means["g_sq"] / count - between) * count / max(1, count - 1)
    grad_sq = means["g_sq"] - c1
    at_hand = grad_sq + c1 / questions
    c2, c3 = means["a_v"] - means["g_sq"], means["d"] + means["g_sq"]
    spread = means["var_q"] * means["var_z"]
    with np.errstate(invalid="ignore", divide="ignore"):
        result = {
            "grad_sq": grad_sq, "grad_sq_at_hand": at_hand, "g_sq": means["g_sq"],
            "c1": c1, "c2": c2, "c3": c3,
            "a0": means["a_0"], "a_v": means["a_v"], "a_bstar": means["a_v"] - means["excess"],
            "av_minus_abstar": means["excess"], "av_minus_a0": means["a_v"] - means["a_0"],
            "share": means["excess"] / np.where(means["a_v"] > 0, means["a_v"], np.nan),
            "corr": means["cov_qz"] / np.sqrt(np.where(spread > 0, spread, np.nan)),
            "vanilla_excess": np.where(c3 > 0, (means["a_0"] - means["a_v"]) / c3, np.nan),
        }  # fmt: skip
    for size in CURVE_SIZES:
        result[f"n_mse/{size}"] = size * c1 + c2 + c3 / (size - 1)
    for point in request.points:
        result[point.key] = _point_moments(point, means, grad_sq, at_hand)[0]
    for point in request.points:
        oracle = replace(point, baseline="oracle")
        least = _point_moments(oracle, means, grad_sq, at_hand)[0]
        result[point.ratio_key] = result[point.key] / np.where(least > 0, least, np.nan)
    return result


def _point_moments(
    point: CurvePoint, means: Arrays, grad_sq: Array, at_hand: Array
) -> tuple[Array, ...]:
    """Return the mean squared error of one point, and the moments from which it is computed.

    Args:
        point: baseline, group size, setting and number of questions.
        means: moments averaged over questions, by name.
        grad_sq: squared length of the population's gradient.
        at_hand: squared length of the mean gradient of the pool's questions.

    Returns:
        The mean squared error, bias^2, variance, E||T||^2, <E T, grad J> and ||grad J||^2, where T
        is the gradient estimate of a batch.
    """
    second, shrink, size = 0.0, 1.0, point.group_size
    # Advantages with group_mean are (G-1)/G times the advantages with leave_one_out, so both
    # baselines have the same A_b before this factor is applied.
    if point.baseline in ("leave_one_out", "group_mean"):
        a_b, second = means["a_v"], (means["d"] + means["g_sq"]) / (size * (size - 1))
    elif point.baseline == "optimal":
        a_b = means["a_v"] - means["excess"]
    else:
        # A_b = E[q (z - b)^2], averaged over questions.
        a_b = means[{"none": "a_0", "oracle": "a_v"}.get(point.baseline, f"a_{point.baseline}")]
    if point.baseline == "group_mean":
        shrink = (size - 1) / size
    e = means["g_sq"] + (a_b - means["g_sq"]) / size + second
    target = grad_sq if point.is_new else at_hand
    mse, bias2, variance = decompose(
        point.setting, point.num_prompts, shrink**2 * e, shrink**2 * means["g_sq"],
        shrink**2 * target, shrink * target, target,
    )  # fmt: skip
    return mse, bias2, variance, variance + shrink**2 * target, shrink * target, target


def _with_others(pool: ScorePool) -> Array:
    """Compute <ghat_x, sum_{y != x} ghat_y> for each question x, [m]."""
    blocks = [slice(x, x + BLOCK) for x in range(0, len(pool.rewards_PN), BLOCK)]
    total_R = np.zeros(pool.gradients_of(slice(1)).shape[1])
    for rows in blocks:
        total_R = np.concatenate([total_R[None], pool.gradients_of(rows)]).sum(axis=0)
    products: list[Array] = []
    for rows in blocks:
        gradients_PR = pool.gradients_of(rows)
        products.append((gradients_PR * (total_R - gradients_PR)).sum(axis=1))
    return np.concatenate(products)


def _delete_one_question(per_question: Arrays, with_others_P: Array, request: Request) -> Arrays:
    """Compute every statistic without each question x, as the one row [1, m] of a jackknife."""
    count = len(with_others_P)
    means: Arrays = {}
    for name, values_P in per_question.items():
        mean = values_P.mean()
        means[name] = (mean + (mean - values_P) / (count - 1))[None]
    between_P = (with_others_P.sum() - 2 * with_others_P) / (count - 1) ** 2
    return _statistics(means, between_P[None], count - 1, count, request)
