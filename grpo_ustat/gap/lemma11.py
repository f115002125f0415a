r"""Lemma 11: the normalised estimator N against the U-statistic U, for rewards of 0 and 1.

Completion i of a prompt has the score s_i (the gradient of its log-probability) and the reward z_i,
and zbar_{-i} is the mean reward of the group's other completions. The two estimates are

    N = 1/G sum_i s_i (z_i - zbar_{-i}) / (std + epsilon)
    U = 1/G sum_i s_i (z_i - zbar_{-i}) / sigma

N divides by std, the standard deviation of the group's rewards with divisor G-1. U divides by the
exact sigma, with `sigma^2 = v = V (1 - V)`, and is the U-statistic with kernel h / sigma.

A group with n right answers has `std^2 = n (G-n) / (G (G-1))`. Given n, the scores are independent.
The score of a right answer has mean g / V and covariance trace t_1. The score of a wrong answer has
mean -g / (1-V) and covariance trace t_0. All moments are therefore sums over n:

    E[sigma U | n] = std^2 g / sigma^2
    tr Cov(sigma U | n) = ( (G-n)^2 n t_1 + n^2 (G-n) t_0 ) / (G (G-1))^2

At epsilon = 0 the following limits hold as G grows:

    G Var U -> within + 4 shift      within = ( (1-V)^2 V t_1 + V^2 (1-V) t_0 ) / v
    G Var N -> within +   shift      shift  = ||g||^2 (1 - 4v) / (4 v^2)
    G E||N - U||^2 ->     shift
    G (E N - g/sigma) -> -g (1 - 4v) / (8 v^(3/2))
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import numpy as np
from scipy import stats

from grpo_ustat.config.gap import GapConfig
from grpo_ustat.gap.claims import at_infinity, enumerated_claim, enumeration_converges, limit_claim
from grpo_ustat.gap.evidence import Evidence, Panel, Series, Theorem
from grpo_ustat.gap.problems import PROBLEMS
from grpo_ustat.records import Array
from grpo_ustat.runs.claims import Claim, comma_list
from grpo_ustat.terminal.streams import percentage

SLOPE_TOLERANCE, TOLERANCE = 0.05, 0.01
# Group sizes from which limits are extrapolated.
LIMIT_SIZES = (2**14, 2**15, 2**16)
STATEMENT = (
    "Lemma 11 compares two gradient estimates. N divides advantages by the standard deviation of "
    "the group's rewards. U is the U-statistic with kernel h / sigma(x), which divides them by the "
    "exact standard deviation sigma(x). As the group grows, N tends to U."
)
HOW = (
    f"exact values at G = {comma_list(LIMIT_SIZES)} and epsilon = 0, averaged over prompts and "
    f"extrapolated in 1/G; agrees if within {percentage(TOLERANCE)} of the delta-method value, "
    "otherwise undecided if the values approach it"
)


def by_prompt(law_PY: Array, score_PYK: Array, reward_PY: Array) -> tuple[Array, ...]:
    """Return V, ||g||^2, t_1 and t_0, each [P]."""
    value_P, traces = (law_PY * reward_PY).sum(axis=1), list[Array]()
    g_PK = np.einsum("py,pyk->pk", law_PY * reward_PY, score_PYK)
    for mask_PY, chance_P in ((reward_PY, value_P), (1 - reward_PY, 1 - value_P)):
        given_PY = law_PY * mask_PY / chance_P[:, None]
        centred_PYK = score_PYK - np.einsum("py,pyk->pk", given_PY, score_PYK)[:, None]
        traces.append((given_PY * np.square(centred_PYK).sum(axis=2)).sum(axis=1))
    return value_P, np.square(g_PK).sum(axis=1), *traces


def mean_weight(value: Array, group_size: int, epsilon: float) -> Array:
    """Return the factor w in `E N = w grad V`, the expectation of the normalised estimate.

    The factor is `w = E[ std^2 / (std + epsilon) ] / sigma^2` and depends only on V.

    Args:
        value: expected rewards V, as an array of any shape.
        group_size: number of completions per prompt, G >= 2.
        epsilon: constant added to std.

    >>> float(mean_weight(np.array(0.5), 4096, 0.0).round(2))  # 1 / sigma
    2.0
    """
    n = np.arange(1, group_size)
    std_n = np.sqrt(n * (group_size - n) / (group_size * (group_size - 1)))
    law = np.asarray(stats.binom.pmf(n, group_size, value[..., None]))
    return (law * std_n**2 / (std_n + epsilon)).sum(axis=-1) / (value * (1 - value))


def moments(prompts: tuple[Array, ...], size: int, epsilon: float) -> dict[str, Array]:
    """Return E||N - U||^2, Var N, Var U and the bias of N along g, each [P].

    Args:
        prompts: result of `by_prompt`.
        size: number of completions per prompt, G >= 2.
        epsilon: constant added to std.

    >>> coin = tuple(np.array([x]) for x in (0.5, 0.25, 0.0, 0.0))
    >>> pair = moments(coin, 2, 0.0)  # s = +-1; U is 0 or 2, N 0 or sqrt 2
    >>> [round(float(x[0]), 4) for x in pair.values()]
    [0.1716, 0.5, 1.0, -0.2929]
    """
    value_P, g_sq_P, right_P, wrong_P = prompts
    n, sigma_P = np.arange(size + 1.0), np.sqrt(value_P * (1 - value_P))
    law_Pn = np.asarray(stats.binom.pmf(n, size, value_P[:, None]))
    var_n = n * (size - n) / (size * (size - 1))
    own_n = np.where(var_n > 0, 1 / (np.sqrt(np.where(var_n > 0, var_n, 1)) + epsilon), 0)
    noise_Pn = (size - n) ** 2 * n * right_P[:, None] + n**2 * (size - n) * wrong_P[:, None]
    mean_sq_Pn = g_sq_P[:, None] * (var_n / sigma_P[:, None] ** 2) ** 2
    second_Pn = mean_sq_Pn + noise_Pn / (size * (size - 1)) ** 2

    def second(factor_Pn: Array) -> Array:
        return (law_Pn * factor_Pn**2 * second_Pn).sum(axis=1)

    mean_P = np.sqrt(g_sq_P) * mean_weight(value_P, size, epsilon)
    return {
        "difference": second(own_n - 1 / sigma_P[:, None]),
        "variance": second(own_n) - mean_P**2,
        "u_statistic_variance": second(1 / sigma_P[:, None]) - g_sq_P / sigma_P**2,
        "bias": mean_P - np.sqrt(g_sq_P) / sigma_P,
    }


def limits(prompts: tuple[Array, ...]) -> tuple[Array, Array, Array]:
    """Return within, shift and the limit of `G ||E N - g/sigma||` at epsilon = 0, each [P]."""
    p, g_sq, right, wrong = prompts
    v = p * (1 - p)
    bias = np.sqrt(g_sq) * (1 - 4 * v) / (8 * v**1.5)
    return (1 - p) * right + p * wrong, g_sq * (1 - 4 * v) / (4 * v**2), bias


def lemma11(
    law_PY: Array, score_PYK: Array, reward_PY: Array, group_sizes: Sequence[int], epsilon: float
) -> Evidence:
    """Compare the exact moments of N and U with their limits.

    Args:
        law_PY: probability of each of the Y outcomes (possible completions) of a prompt.
        score_PYK: score of each outcome, for K parameters.
        reward_PY: reward of each outcome, 0 or 1. Both occur for every prompt.
        group_sizes: three or more group sizes, G.
        epsilon: constant added to std.
    """
    prompts, sizes = by_prompt(law_PY, score_PYK, reward_PY), sorted(group_sizes)
    (within, shift, bias), (p, g_sq, *_) = limits(prompts), prompts
    u_variance, sigma = float((within + 4 * shift).mean()), np.sqrt(p * (1 - p))
    rows = [
        {"group_size": size} | {k: float(x.mean()) for k, x in moments(prompts, size, 0.0).items()}
        for size in sizes
    ]
    far = [moments(prompts, size, 0.0) for size in LIMIT_SIZES]
    far_nP = {
        name: np.array([n * x[name] for n, x in zip(LIMIT_SIZES, far, strict=True)])
        for name in far[0]
    }
    difference, variance, plain, bias_n = (x.mean(axis=1) for x in far_nP.values())
    last, logs = np.log([row["difference"] for row in rows[-3:]]), np.log(sizes[-3:])
    slope, slopes = float(np.polyfit(logs, last, 1)[0]), np.diff(last) / np.diff(logs)
    # Without the part of order 1/G, the next one decides.
    steep = -1.0 if shift.mean() > 1e-9 * u_variance else -2.0
    before, after = np.abs(slopes - steep).tolist()
    near = abs(slope - steep) <= SLOPE_TOLERANCE
    agrees = near or enumeration_converges(after, before, 0.0)
    share = float(at_infinity(far_nP["difference"] / far_nP["u_statistic_variance"]).max())

    def limit(what: str, predicted: float, values: Array, scale: float) -> Claim:
        tolerance = TOLERANCE * abs(predicted) + 1e-6 * scale
        return limit_claim(what, float(predicted), values, tolerance, HOW)

    claims = [
        enumerated_claim(
            "slope of log E||N - U||^2 on log G, mean over prompts", steep, slope, agrees,
            f"exact values at G = {comma_list(sizes[-3:])} and epsilon = 0, fitted by least "
            f"squares; agrees if within {SLOPE_TOLERANCE} of the prediction, otherwise undecided "
            "if the slopes approach the prediction",
        ),
        limit("limit of G E||N - U||^2", shift.mean(), difference, u_variance),
        limit("limit of E||N - U||^2 / Var U", shift.mean() / u_variance, difference / plain, 1.0),
        enumerated_claim(
            "limit of E||N - U||^2 / Var U, largest over prompts", "<= 0.25", share,
            share <= 0.25 + TOLERANCE**2,
            f"exact values, extrapolated in 1/G; largest value over {len(p)} prompts",
        ),
        limit(
            "limit of Var N / Var U", (within + shift).mean() / u_variance, variance / plain, 1.0
        ),
        limit("limit of G ||E N - g/sigma||", bias.mean(), -bias_n, u_variance**0.5),
    ]  # fmt: skip
    if epsilon > 0:
        floor = float((g_sq * (1 / (sigma + epsilon) - 1 / sigma) ** 2).mean())
        means = [moments(prompts, size, epsilon)["difference"].mean() for size in LIMIT_SIZES]
        value = float(at_infinity(np.array(means)))
        claims.append(
            enumerated_claim(
                "limit of E||N - U||^2 with epsilon", floor, value,
                abs(value - floor) <= TOLERANCE * floor + 1e-12,
                f"exact values at epsilon = {epsilon:g}, extrapolated in 1/G; agrees if within "
                f"{percentage(TOLERANCE)} of the prediction",
            )
        )  # fmt: skip
    labels = ("E||N - U||^2", "Var N", "Var U", "bias of N")
    series = [
        Series(label, sizes, [abs(row[name]) for row in rows])
        for label, name in zip(labels, far[0], strict=True)
    ]
    series[0] = replace(series[0], predicted=shift.mean() / np.array(sizes))
    panel = Panel("group size G", "mean over prompts, epsilon = 0", series)
    facts = {"prompts": len(p), "smallest V": float(p.min()), "largest V": float(p.max())}
    return Evidence(claims, panel, rows, facts)


def run(config: GapConfig) -> Evidence:
    """Run `lemma11` on the test problem's initial policy."""
    problem, design = PROBLEMS[config.theorem.problem], config.theorem
    law_PYR, score_PYKR = problem.law(problem.start_K[:, None])
    return lemma11(
        law_PYR[..., 0], score_PYKR[..., 0], problem.rewards_PY, design.group_sizes, design.epsilon
    )


THEOREM = Theorem(STATEMENT, run)
