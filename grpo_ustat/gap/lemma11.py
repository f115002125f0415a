r"""Lemma 11: the normalised estimator for large groups, enumerated.

Whether `N = 1/G sum_i s_i (z_i - zbar_{-i}) / (std + epsilon)` tends to the U-statistic with kernel
h / sigma(x), how fast, and what is left at the scale of its own error. The formulas are those of
`grpo_ustat.estimators.normalised`; nothing is drawn.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from grpo_ustat.checks import ConfigError
from grpo_ustat.estimators.normalised import (
    Normalised,
    RightAndWrong,
    normalised,
    right_and_wrong,
)
from grpo_ustat.theorems.finding import Claim, Curve, Finding, Panel, decided
from grpo_ustat.theorems.limits import settled

SLOPE_TOLERANCE, TOLERANCE = 0.05, 0.01
FAR = (2**14, 2**15, 2**16)  # group sizes from which limits are extrapolated
DRAWN = 6  # prompts with a curve of their own

STATEMENT = (
    "Lemma 11: divided by the standard deviation of the group's own rewards, the estimate is, as "
    "the group grows, the U-statistic with kernel h / sigma(x)."
)


@dataclass(frozen=True)
class Measured:
    """Exact values at every group size.

    Attributes:
        moments: of the prompts.
        sizes: group sizes, ascending.
        epsilon: added to the standard deviation.
        at: at each group size, with the epsilon.
        plain: with epsilon = 0, as the lemma has it.
        far: with epsilon = 0 at the sizes of `FAR`.
        far_at: there with the epsilon.
    """

    moments: RightAndWrong
    sizes: Sequence[int]
    epsilon: float
    at: Sequence[Normalised]
    plain: Sequence[Normalised]
    far: Sequence[Normalised]
    far_at: Sequence[Normalised]

    @property
    def whole(self) -> float:
        """Limit of G Var U, mean over prompts."""
        return float((self.moments.within + 4 * self.moments.shift).mean())

    @property
    def ordinary(self) -> bool:
        """Whether anything of order 1/G is left of the squared difference."""
        return bool(self.moments.shift.mean() > 1e-9 * self.whole)

    def mean(self, name: str, *, epsilon: bool = False) -> np.ndarray:
        """Of a quantity over prompts, at every group size."""
        return np.array([getattr(x, name).mean() for x in (self.at if epsilon else self.plain)])

    def scaled(self, name: str) -> np.ndarray:
        """G times a quantity at the sizes of `FAR`, [3, P]."""
        pairs = zip(FAR, self.far, strict=True)
        return np.array([size * getattr(x, name) for size, x in pairs])


def at_infinity(values: np.ndarray) -> np.ndarray:
    """Of what is known at G, 2G and 4G, without its terms of order 1/G and 1/G^2 (Richardson).

    >>> at_infinity(np.array([1 + 1 / g + 3 / g**2 for g in (2, 4, 8)])).item()
    1.0
    """
    return (8 * values[2] - 6 * values[1] + values[0]) / 3


def lemma11(
    probability_PY: np.ndarray,
    score_PYK: np.ndarray,
    reward_PY: np.ndarray,
    group_sizes: Sequence[int],
    epsilon: float,
) -> Finding:
    """E||N - U||^2, the variances of both and the bias of N, exact at every group size.

    Args:
        probability_PY: of the outcomes of an enumerable policy.
        score_PYK: their scores.
        reward_PY: their rewards, each 0 or 1.
        group_sizes: at least three, for the curves and the rate; limits come from `FAR`.
        epsilon: added to the group's standard deviation.

    Raises:
        ConfigError: rewards other than 0 and 1, a prompt of which all groups are silent, fewer than
            three group sizes or one below 2, a negative epsilon.
    """
    measured = _measure(probability_PY, score_PYK, reward_PY, sorted(set(group_sizes)), epsilon)
    moments = measured.moments
    return Finding(
        statement=STATEMENT,
        bed={
            "prompts": len(moments.value),
            "outcomes": reward_PY.shape[1],
            "smallest V": float(moments.value.min()),
            "largest V": float(moments.value.max()),
            "epsilon": epsilon,
            "largest group": measured.sizes[-1],
        },
        claims=_claims(measured),
        panels=_panels(measured),
        rows=_rows(measured),
        answer=_answer(measured),
        notes=_notes(measured),
    )


def _measure(probability_PY, score_PYK, reward_PY, sizes: list[int], epsilon: float) -> Measured:
    if len(sizes) < 3 or sizes[0] < 2:
        raise ConfigError(f"group_sizes={sizes}: a rate needs at least three, each of 2 or more")
    if epsilon < 0:
        raise ConfigError(f"epsilon={epsilon} must be at least 0")
    try:
        moments = right_and_wrong(probability_PY, score_PYK, reward_PY)
    except ValueError as error:
        raise ConfigError(str(error)) from error
    tables = [
        [normalised(moments, size, x) for size in each]
        for each in (sizes, FAR)
        for x in (epsilon, 0.0)
    ]
    at, plain, far_at, far = tables
    return Measured(moments, sizes, epsilon, at, plain, far, far_at)


def _claims(measured: Measured) -> list[Claim]:
    moments, whole = measured.moments, measured.whole
    shift = float(moments.shift.mean())
    names = ("difference", "plain_variance", "variance", "bias")
    difference, plain, own, bias = (measured.scaled(name).mean(axis=1) for name in names)
    ratio = float((moments.within + moments.shift).mean() / whole)
    claims = [
        _rate(measured),
        _limit("limit of G E||N - U||^2", shift, difference, whole),
        _limit("limit of E||N - U||^2 / Var U", shift / whole, difference / plain, 1.0),
        _quarter(measured),
        _limit("limit of Var N / Var U", ratio, own / plain, 1.0),
        _limit("limit of G ||E N - g/sigma||", float(moments.bias.mean()), -bias, whole**0.5),
    ]
    return claims + [_floor(measured)] * (measured.epsilon > 0)


def _rate(measured: Measured) -> Claim:
    """The slope where something is left at order 1/G, else that of the next order."""
    sizes, values = np.array(measured.sizes[-3:]), measured.mean("difference")[-3:]
    predicted = -1.0 if measured.ordinary else -2.0
    slope = float(np.polyfit(np.log(sizes), np.log(values), 1)[0])
    off = np.abs(np.diff(np.log(values)) / np.diff(np.log(sizes)) - predicted)
    agrees = abs(slope - predicted) <= SLOPE_TOLERANCE or settled(off[1], off[0], 0.0)
    how = (
        f"exact at G = {', '.join(map(str, sizes))}, epsilon = 0, least squares; within "
        f"{SLOPE_TOLERANCE}, not decided where further off and coming closer"
    )
    what = "slope of log E||N - U||^2 on log G, mean over prompts"
    return Claim(what, predicted, slope, None, None, decided(agrees), how)


def _limit(what: str, predicted: float, values: np.ndarray, scale: float) -> Claim:
    """Values at the sizes of `FAR` against the delta method's constant."""
    found, off = float(at_infinity(values)), np.abs(values - predicted)
    close = abs(found - predicted) <= TOLERANCE * abs(predicted) + 1e-6 * scale
    agrees = bool(close) or settled(off[2], off[1], 0.0)
    how = (
        f"exact at G = {', '.join(map(str, FAR))}, epsilon = 0, mean over prompts, extrapolated in "
        f"1/G; within {TOLERANCE:.0%} of the delta method's, not decided where coming closer"
    )
    return Claim(what, predicted, found, None, None, decided(agrees), how)


def _quarter(measured: Measured) -> Claim:
    share_P = at_infinity(measured.scaled("difference") / measured.scaled("plain_variance"))
    most = float(share_P.max())
    agrees = decided(most <= 0.25 + TOLERANCE**2)
    how = f"exact, extrapolated as above; the largest of {len(share_P)} prompts"
    what = "limit of E||N - U||^2 / Var U, of any prompt"
    return Claim(what, "<= 0.25", most, None, None, agrees, how)


def _floor(measured: Measured) -> Claim:
    predicted = float(measured.moments.floor(measured.epsilon).mean())
    found = float(at_infinity(np.array([x.difference.mean() for x in measured.far_at])))
    agrees = decided(abs(found - predicted) <= TOLERANCE * predicted + 1e-12)
    how = (
        f"exact, extrapolated as above with epsilon = {measured.epsilon:g}; within {TOLERANCE:.0%}"
    )
    what = "what epsilon leaves of E||N - U||^2 in the limit"
    return Claim(what, predicted, found, None, None, agrees, how)


def _panels(measured: Measured) -> list[Panel]:
    moments, sizes = measured.moments, np.array(measured.sizes, dtype=float)
    limits = {
        "E||N - U||^2": ("difference", moments.shift),
        "Var U": ("plain_variance", moments.within + 4 * moments.shift),
        "Var N": ("variance", moments.within + moments.shift),
    }
    floor = moments.floor(measured.epsilon).mean()
    errors = [Curve(k, sizes, measured.mean(n, epsilon=True)) for k, (n, _) in limits.items()]
    for label, (_, limit) in limits.items():
        left = floor if label.startswith("E") else 0.0
        errors.append(Curve(label, sizes, limit.mean() / sizes + left, predicted=True))
    bias = Curve("||E N - g/sigma||", sizes, -measured.mean("bias"))
    expected = Curve(bias.label, sizes, moments.bias.mean() / sizes, predicted=True)
    size = "group size G"
    return [
        Panel("Difference and both variances", size, "mean over prompts", errors, "xy"),
        Panel("Share of U's variance", size, "E||N - U||^2 / Var U", _shares(measured), "x"),
        Panel("Bias of N, epsilon = 0", size, "mean over prompts", [bias, expected], "xy"),
    ]


def _shares(measured: Measured) -> list[Curve]:
    moments, curves = measured.moments, []
    limits = moments.shift / (moments.within + 4 * moments.shift)
    for prompt in np.argsort(moments.value)[:: -(-len(moments.value) // DRAWN)]:
        label = f"V = {moments.value[prompt]:.3g}"
        found = [x.difference[prompt] / x.plain_variance[prompt] for x in measured.plain]
        curves.append(Curve(label, measured.sizes, found))
        flat = np.full(len(found), limits[prompt])
        curves.append(Curve(label, measured.sizes, flat, predicted=True))
    return curves


def _rows(measured: Measured) -> list[dict[str, float]]:
    return [
        {
            "group_size": size,
            "prompt": prompt,
            "value": float(measured.moments.value[prompt]),
            "difference": float(at.difference[prompt]),
            "difference_without_epsilon": float(plain.difference[prompt]),
            "difference_predicted": float(
                measured.moments.shift[prompt] / size
                + measured.moments.floor(measured.epsilon)[prompt]
            ),
            "variance": float(at.variance[prompt]),
            "u_statistic_variance": float(at.plain_variance[prompt]),
            "bias": float(at.bias[prompt]),
        }
        for size, at, plain in zip(measured.sizes, measured.at, measured.plain, strict=True)
        for prompt in range(len(measured.moments.value))
    ]


def _answer(measured: Measured) -> str:
    if not measured.ordinary:
        return (
            "It holds for sqrt(G)-limits too on this policy, where every prompt has V = 1/2 or "
            "g = 0: the squared difference falls like 1/G^2."
        )
    moments, whole = measured.moments, measured.whole
    share, ratio = moments.shift.mean() / whole, (moments.within + moments.shift).mean() / whole
    return (
        "The lemma holds as consistency, both estimates tend to g/sigma, and not for "
        "sqrt(G)-limits: the squared difference falls like 1/G, as U's variance does, and stays "
        f"{share:.1%} of it; the normalised estimate keeps {ratio:.1%} of U's variance."
    )


def _notes(measured: Measured) -> list[str]:
    moments = measured.moments
    fast = moments.shift <= 1e-9 * (moments.within + 4 * moments.shift)
    notes = [
        "The difference of order 1/sqrt(G) is U's mean times the noise of the group's standard "
        "deviation; its limit is ||g||^2 (mu4 - sigma^4)/(4 sigma^6) per prompt, and no other term "
        "is of that order at epsilon = 0.",
        "That noise cancels part of U's own: N keeps a quarter of the variance that U has from the "
        "number of right answers, so in the limit it has the smaller one unless V = 1/2 or g = 0.",
        "With 0/1 rewards the share is at most a quarter, where scores depend on the reward alone.",
        "With the group's own mean in place of the others', as code has it, N is (G-1)/G as long: "
        "the same limits, but for the bias, which gains -g/(sigma G).",
    ]
    if fast.any():
        notes.append(
            f"{fast.sum()} of {len(fast)} prompts have V = 1/2 or g = 0: there the squared "
            "difference falls like 1/G^2 and the sqrt(G)-limits agree."
        )
    if measured.epsilon and measured.ordinary:
        floor = float(moments.floor(measured.epsilon).mean())
        notes.append(
            f"A fixed epsilon leaves a difference for ever: epsilon = {measured.epsilon:g} leaves "
            f"{floor:.3g}, as much as the rest at G = {moments.shift.mean() / floor:.3g}."
        )
    return notes
