r"""Lemma 11: exact comparison of the normalised estimator N with a U-statistic U for large groups.

The lemma says that `N = 1/G sum_i s_i (z_i - zbar_{-i}) / (std + epsilon)` tends to U, the
U-statistic with kernel h / sigma(x). The test computes the rate of convergence and compares N - U
with the variance of U. It uses the formulas in `grpo_ustat.gap.normalised`, which define all
symbols, and draws no samples.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from grpo_ustat.config.gap import Experiment, Lemma11Config
from grpo_ustat.config.schema import ConfigError
from grpo_ustat.gap.claims import at_infinity, enumerated_claim, enumeration_converges, limit_claim
from grpo_ustat.gap.evidence import Evidence, Panel, PlotLine, Theorem
from grpo_ustat.gap.normalised import (
    NormalisedMoments,
    RightAndWrong,
    normalised_moments,
    right_and_wrong,
)
from grpo_ustat.gap.problems import build_problem
from grpo_ustat.runs.claims import Claim, comma_list
from grpo_ustat.terminal.streams import percentage

SLOPE_TOLERANCE, TOLERANCE = 0.05, 0.01
# Group sizes from which limits are extrapolated.
LIMIT_SIZES = (2**14, 2**15, 2**16)
# Largest number of prompts that get a curve in the figure.
MAX_CURVES = 6

STATEMENT = (
    "Lemma 11 compares two gradient estimates. N divides advantages by the standard deviation of "
    "the group's rewards. U is the U-statistic with kernel h / sigma(x), which divides them by the "
    "exact standard deviation sigma(x). As the group grows, N tends to U."
)


@dataclass(frozen=True)
class ExactValues:
    """Exact moments at every group size."""

    # Moments of each prompt's scores and rewards.
    moments: RightAndWrong
    # Group sizes in ascending order.
    sizes: Sequence[int]
    # Constant added to the group's standard deviation.
    epsilon: float
    # Moments of N and U with `epsilon`, at each group size.
    with_epsilon: Sequence[NormalisedMoments]
    # Moments of N and U with epsilon = 0, as in the lemma, at each group size.
    without: Sequence[NormalisedMoments]
    # Moments at the group sizes `LIMIT_SIZES`, first with `epsilon` and then with epsilon = 0.
    far_with_epsilon: Sequence[NormalisedMoments]
    far_without: Sequence[NormalisedMoments]

    @property
    def u_variance(self) -> float:
        """Mean over prompts of the limit of G Var U."""
        return float((self.moments.within + 4 * self.moments.shift).mean())

    @property
    def first_order(self) -> bool:
        """True if E||N - U||^2 has a term of order 1/G."""
        return bool(self.moments.shift.mean() > 1e-9 * self.u_variance)

    def far(self, name: str) -> np.ndarray:
        """Return G times a moment at epsilon = 0 for each of the three `LIMIT_SIZES`, [3, P].

        Args:
            name: field of `NormalisedMoments`.
        """
        pairs = zip(LIMIT_SIZES, self.far_without, strict=True)
        return np.array([size * getattr(values, name) for size, values in pairs])


def mean_by_size(values: Sequence[NormalisedMoments], name: str) -> np.ndarray:
    """Return the mean over prompts of one field of `NormalisedMoments` at every group size."""
    return np.array([getattr(at_size, name).mean() for at_size in values])


def lemma11(
    probability_PY: np.ndarray,
    score_PYK: np.ndarray,
    reward_PY: np.ndarray,
    group_sizes: Sequence[int],
    epsilon: float,
) -> Evidence:
    """Compute E||N - U||^2, both variances and the bias of N exactly at every group size.

    Args:
        probability_PY: probabilities of the outcomes of an enumerable policy.
        score_PYK: scores (gradients of the log-probability) of the Y outcomes, for K parameters.
        reward_PY: rewards of the outcomes, each 0 or 1.
        group_sizes: at least three group sizes, for the curves and the rate of convergence. The
            limits as G grows are instead extrapolated from `LIMIT_SIZES`.
        epsilon: constant added to the group's standard deviation.
    """
    sizes = sorted(set(group_sizes))
    try:
        moments = right_and_wrong(probability_PY, score_PYK, reward_PY)
    except ValueError as error:
        raise ConfigError(str(error)) from error
    exact = ExactValues(
        moments,
        sizes,
        epsilon,
        with_epsilon=[normalised_moments(moments, size, epsilon) for size in sizes],
        without=[normalised_moments(moments, size, 0.0) for size in sizes],
        far_with_epsilon=[normalised_moments(moments, size, epsilon) for size in LIMIT_SIZES],
        far_without=[normalised_moments(moments, size, 0.0) for size in LIMIT_SIZES],
    )
    return Evidence(
        problem={
            "prompts": len(moments.value),
            "outcomes": reward_PY.shape[1],
            "smallest V": float(moments.value.min()),
            "largest V": float(moments.value.max()),
            "epsilon": epsilon,
            "largest group": sizes[-1],
        },
        claims=_claims(exact),
        panels=_panels(exact),
        rows=_rows(exact),
        answer=_answer(exact),
        notes=_notes(exact),
    )


def _claims(exact: ExactValues) -> list[Claim]:
    """Make claims about the rate of convergence, the limits, the bound 1/4 and epsilon."""
    moments, u_variance = exact.moments, exact.u_variance
    shift = float(moments.shift.mean())
    names = ("difference", "plain_variance", "variance", "bias")
    difference, plain, variance, bias = (exact.far(name).mean(axis=1) for name in names)
    ratio = float((moments.within + moments.shift).mean() / u_variance)
    share_P = at_infinity(exact.far("difference") / exact.far("plain_variance"))
    largest = float(share_P.max())
    claims = [
        _rate_claim(exact),
        _limit_claim("limit of G E||N - U||^2", shift, difference, u_variance),
        _limit_claim("limit of E||N - U||^2 / Var U", shift / u_variance, difference / plain, 1.0),
        enumerated_claim(
            "limit of E||N - U||^2 / Var U, largest over prompts",
            "<= 0.25",
            largest,
            largest <= 0.25 + TOLERANCE**2,
            f"exact values, extrapolated in 1/G; largest value over {len(share_P)} prompts",
        ),
        _limit_claim("limit of Var N / Var U", ratio, variance / plain, 1.0),
        _limit_claim(
            "limit of G ||E N - g/sigma||", float(moments.bias.mean()), -bias, u_variance**0.5
        ),
    ]
    if exact.epsilon > 0:
        floor = float(moments.floor(exact.epsilon).mean())
        limit = float(at_infinity(mean_by_size(exact.far_with_epsilon, "difference")))
        claims.append(
            enumerated_claim(
                "limit of E||N - U||^2 with epsilon",
                floor,
                limit,
                abs(limit - floor) <= TOLERANCE * floor + 1e-12,
                f"exact values at epsilon = {exact.epsilon:g}, extrapolated in 1/G; agrees if "
                f"within {percentage(TOLERANCE)} of the prediction",
            )
        )
    return claims


def _rate_claim(exact: ExactValues) -> Claim:
    """Make a claim about the rate at which E||N - U||^2 falls with G.

    On log-log axes the predicted slope is -1 if there is a term of order 1/G, and -2 otherwise.
    """
    sizes, values = np.array(exact.sizes[-3:]), mean_by_size(exact.without, "difference")[-3:]
    predicted = -1.0 if exact.first_order else -2.0
    slope = float(np.polyfit(np.log(sizes), np.log(values), 1)[0])
    distances = np.abs(np.diff(np.log(values)) / np.diff(np.log(sizes)) - predicted)
    agrees = abs(slope - predicted) <= SLOPE_TOLERANCE
    agrees = agrees or enumeration_converges(distances[1], distances[0], 0.0)
    how = (
        f"exact values at G = {comma_list(sizes)} and epsilon = 0, fitted by least squares; agrees "
        f"if within {SLOPE_TOLERANCE} of the prediction, otherwise undecided if the slopes "
        "approach the prediction"
    )
    what = "slope of log E||N - U||^2 on log G, mean over prompts"
    return enumerated_claim(what, predicted, slope, agrees, how)


def _limit_claim(what: str, predicted: float, values: np.ndarray, scale: float) -> Claim:
    """Make a claim that the limit extrapolated from `LIMIT_SIZES` equals the delta-method value."""
    how = (
        f"exact values at G = {comma_list(LIMIT_SIZES)} and epsilon = 0, averaged over prompts and "
        f"extrapolated in 1/G; agrees if within {percentage(TOLERANCE)} of the delta-method value, "
        "otherwise undecided if the values approach it"
    )
    tolerance = TOLERANCE * abs(predicted) + 1e-6 * scale
    return limit_claim(what, predicted, values, tolerance, how)


def _panels(exact: ExactValues) -> list[Panel]:
    """Return three panels: E||N - U||^2 and both variances, their ratio by prompt, and the bias."""
    moments, sizes = exact.moments, np.array(exact.sizes, dtype=float)
    limits = {
        "E||N - U||^2": ("difference", moments.shift, moments.floor(exact.epsilon).mean()),
        "Var U": ("plain_variance", moments.within + 4 * moments.shift, 0.0),
        "Var N": ("variance", moments.within + moments.shift, 0.0),
    }
    errors = [
        PlotLine(label, sizes, mean_by_size(exact.with_epsilon, name))
        for label, (name, _, _) in limits.items()
    ]
    errors += [
        PlotLine(label, sizes, limit.mean() / sizes + floor, predicted=True)
        for label, (_, limit, floor) in limits.items()
    ]
    shares = []
    share_P = moments.shift / (moments.within + 4 * moments.shift)
    for prompt in np.argsort(moments.value)[:: -(-len(moments.value) // MAX_CURVES)]:
        label = f"V = {moments.value[prompt]:.3g}"
        share = np.array([x.difference[prompt] / x.plain_variance[prompt] for x in exact.without])
        shares.append(PlotLine(label, exact.sizes, share))
        limit = np.full(len(share), share_P[prompt])
        shares.append(PlotLine(label, exact.sizes, limit, predicted=True))
    bias = PlotLine("||E N - g/sigma||", sizes, -mean_by_size(exact.without, "bias"))
    limit = PlotLine(bias.label, sizes, moments.bias.mean() / sizes, predicted=True)
    size = "group size G"
    return [
        Panel("Difference and both variances", size, "mean over prompts", errors, "xy"),
        Panel("Difference relative to Var U", size, "E||N - U||^2 / Var U", shares, "x"),
        Panel("Bias of N, epsilon = 0", size, "mean over prompts", [bias, limit], "xy"),
    ]


def _rows(exact: ExactValues) -> list[dict[str, float]]:
    """Return one row per group size and prompt."""
    moments, floor_P = exact.moments, exact.moments.floor(exact.epsilon)
    return [
        {
            "group_size": size,
            "prompt": prompt,
            "value": float(moments.value[prompt]),
            "difference": float(values.difference[prompt]),
            "difference_without_epsilon": float(without.difference[prompt]),
            "difference_predicted": float(moments.shift[prompt] / size + floor_P[prompt]),
            "variance": float(values.variance[prompt]),
            "u_statistic_variance": float(values.plain_variance[prompt]),
            "bias": float(values.bias[prompt]),
        }
        for size, values, without in zip(
            exact.sizes, exact.with_epsilon, exact.without, strict=True
        )
        for prompt in range(len(moments.value))
    ]


def _answer(exact: ExactValues) -> str:
    """Return sentences that say in which sense the lemma holds."""
    if not exact.first_order:
        return (
            "On this policy N and U agree for large G even after multiplication by sqrt(G), which "
            "keeps their noise at a constant size. Every prompt has V = 1/2 or g = 0, so the "
            "squared difference E||N - U||^2 falls like 1/G^2."
        )
    moments, u_variance = exact.moments, exact.u_variance
    share, ratio = (
        moments.shift.mean() / u_variance,
        (moments.within + moments.shift).mean() / u_variance,
    )
    return (
        "The lemma holds in the sense of consistency: the normalised estimate N and the "
        "U-statistic U both tend to g/sigma. After multiplication by sqrt(G), which keeps their "
        "noise at a constant size, N and U still differ for large G, because the squared "
        "difference E||N - U||^2 falls only as 1/G. As G grows, the ratio of the squared "
        "difference to the variance of "
        f"U tends to {percentage(share, 1)}. The ratio of the variance of N to the variance of U "
        f"tends to {percentage(ratio, 1)}."
    )


def _notes(exact: ExactValues) -> list[str]:
    """Return notes on the difference between N and U and on the effect of epsilon."""
    moments = exact.moments
    fast = moments.shift <= 1e-9 * (moments.within + 4 * moments.shift)
    notes = [
        "At epsilon = 0, N - U has one part of order 1/sqrt(G): the expectation of U times the "
        "noise of the group's standard deviation. G times the mean square of this part tends to "
        "||g||^2 (mu4 - sigma^4)/(4 sigma^6) for each prompt.",
        "The noise of the standard deviation cancels part of the noise of U. A part of the "
        "variance of U is due to the random number of right answers in a group; only a quarter of "
        "this part remains in N. For large G, N therefore has a smaller variance than U if V is "
        "not 1/2 and g is not 0.",
        "With 0/1 rewards the squared difference E||N - U||^2 is, in the limit, at most a quarter "
        "of the variance of U. It equals a quarter if the scores depend only on the reward.",
        "If the baseline is the mean of the whole group, as in most code, N is multiplied by "
        "(G-1)/G. The limits above stay the same; only the bias of N at finite G changes, by "
        "-g/(sigma G).",
    ]
    if fast.any():
        notes.append(
            f"{fast.sum()} of {len(fast)} prompts have V = 1/2 or g = 0. For these prompts the "
            "squared difference falls like 1/G^2, so that N and U agree for large G even after "
            "multiplication by sqrt(G)."
        )
    if exact.epsilon and exact.first_order:
        floor = float(moments.floor(exact.epsilon).mean())
        notes.append(
            "With a fixed epsilon the difference between N and U does not vanish as G grows. At "
            f"epsilon = {exact.epsilon:g} the squared difference tends to {floor:.3g}. The term of "
            f"order 1/G is as large as this limit at G = {moments.shift.mean() / floor:.3g}."
        )
    return notes


def run(experiment: Experiment) -> Evidence:
    """Run `lemma11` on the test problem's initial policy."""
    problem, design = build_problem(experiment.problem), experiment.theorem
    probability_PYR, score_PYKR = problem.law(problem.start_K[:, None])
    law = probability_PYR[..., 0], score_PYKR[..., 0], problem.rewards_PY
    return lemma11(*law, design.group_sizes, design.epsilon)


def check(experiment: Experiment) -> None:
    """Raise ConfigError if the problem is invalid; see `build_problem`."""
    build_problem(experiment.problem)


THEOREM = Theorem(Lemma11Config, STATEMENT, run, check)
