r"""What is left of Theorem 12 at learning rate 0: bias and variance at theta_old by group size.

There no ratio is missing and the bound's bias is 0. Divided by a group's own standard deviation the
estimate has a bias all the same, of order 1/G (`large_groups`); it is that of the mean, which more
prompts do not change. All is enumerated.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from grpo_ustat.config.schema import ConfigError
from grpo_ustat.gap.claims import at_infinity, enumerated_claim, limit_claim, nearing_claim
from grpo_ustat.gap.estimate_moments import Normalisation, group_moments, large_groups
from grpo_ustat.gap.evidence import Panel, PlotLine
from grpo_ustat.gap.offpolicy import ROUNDING, Setting
from grpo_ustat.runs.claims import comma_list
from grpo_ustat.runs.result import AGREES, DISAGREES, OPEN, Claim
from grpo_ustat.terminal.streams import percentage

SLOPE_TOLERANCE, TOLERANCE = 0.05, 0.01
LABELS = {
    "none": "without normalisation",
    "sigma": "divided by sigma(x)",
    "group_std": "divided by the group's std",
    "group_std_floor": "std at least the floor",
    "group_std_redrawn": "groups redrawn below the floor",
}


@dataclass(frozen=True)
class OnPolicy:
    """Exact values of every normalisation, by group size.

    Attributes:
        sizes: G.
        limit_sizes: G, 2G, 4G from which limits are extrapolated.
        values: by kind of normalisation, by name, an array over the sizes:
            `bias2_share`, ||bias||^2 / ||target||^2 without the KL term;
            `bias2_share_kl`, the same of the estimate with it;
            `variance`, B times the variance, without the KL term;
            `oracle`, B times the oracle's, C1 + (its variance given the prompt) / G;
            `exceeded`, the B from which ||bias||^2 is above the variance, infinite without bias;
            `silent`, chance of a group of equal rewards, mean over prompts.
        limits: the same of `none`, `sigma` and `group_std` with epsilon = 0 at `limit_sizes`, and
            `bias`, of which the squared norm is ||bias||^2.
        bias_limit: limit of G ||bias|| of `group_std` at epsilon = 0, by the delta method.
        target_norm: norm of the target with normalisation.
    """

    sizes: Sequence[int]
    limit_sizes: Sequence[int]
    values: dict[str, dict[str, np.ndarray]]
    limits: dict[str, dict[str, np.ndarray]]
    bias_limit: float
    target_norm: float

    def variance_ratio(self, kind: str) -> float:
        """Limit of G (B variance - C1) over that of the oracle's."""
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
    """Exact values of every normalisation at theta_old.

    Args:
        setting: whose group size and normalisation are put aside.
        group_sizes: G.
        limit_sizes: three, each twice the one before.
        epsilon: added to the group's standard deviation.
        floor: smallest standard deviation of `group_std_floor` and `group_std_redrawn`.
    """
    rules = [Normalisation(kind, epsilon, floor) for kind in LABELS]
    exact = [Normalisation(kind) for kind in ("none", "sigma", "group_std")]

    def by_size(rule: Normalisation, sizes: Sequence[int]) -> dict[str, np.ndarray]:
        rows = [
            on_policy_values(replace(setting, normalisation=rule, group_size=size))
            for size in sizes
        ]
        return {name: np.array([row[name] for row in rows]) for name in rows[0]}

    try:
        values = {rule.kind: by_size(rule, group_sizes) for rule in rules}
        limits = {rule.kind: by_size(rule, limit_sizes) for rule in exact}
    except ValueError as error:
        raise ConfigError(f"study=theorem12: {error}") from error
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
    """The values of one normalisation at one group size, see `OnPolicy`."""
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
    silent_P = (np.array(chance_KP) ** setting.group_size).sum(axis=0)
    return {
        "bias2_share": float(bias2 / np.square(target_D).sum()),
        "bias2_share_kl": float(np.square(both_D).sum() / np.square(whole_target_D).sum()),
        "bias": float(np.sqrt(bias2)),
        "variance": variance,
        "between": float(between),
        "oracle": float(between + oracle.first_P.mean() / setting.group_size),
        "exceeded": float(variance / bias2) if bias2 > ROUNDING * variance else float("inf"),
        "silent": float(silent_P.mean()),
    }


def claims(start: OnPolicy, group_size: int) -> list[Claim]:
    """Claims of the theorem with normalisation, then of what would make it hold.

    Args:
        start: exact values.
        group_size: G at which other divisors are compared.
    """
    by_size = [_bias_claim(start, "group_std", size, "with normalisation") for size in start.sizes]
    guards = [
        _bias_claim(start, kind, group_size, LABELS[kind])
        for kind in ("group_std_floor", "group_std_redrawn", "sigma")
    ]
    how = (
        f"enumerated at G = {comma_list(start.limit_sizes)}, epsilon = 0, extrapolated in 1/G; "
        f"within {percentage(TOLERANCE)}: "
        "else what is left of the variance is of order 1/(B G), not 1/(B G^2)"
    )
    labels = {kind: LABELS[kind] for kind in ("none", "sigma")}
    oracles = []
    for kind, label in (labels | {"group_std": "with normalisation"}).items():
        ratio = start.variance_ratio(kind)
        what = f"as G grows: G (B variance - C1) over the oracle's, {label}"
        oracles.append(enumerated_claim(what, 1.0, ratio, abs(ratio - 1) <= TOLERANCE, how))
    constant = limit_claim(
        "as G grows: limit of G ||bias|| at learning rate 0, with normalisation",
        start.bias_limit,
        np.array(start.limit_sizes) * start.limits["group_std"]["bias"],
        TOLERANCE * start.bias_limit,
        f"enumerated at G = {comma_list(start.limit_sizes)}, epsilon = 0, extrapolated in 1/G; "
        f"within {percentage(TOLERANCE)} of the delta method's, not decided where coming closer",
    )
    return [*by_size, _slope_claim(start), constant, *oracles, *guards]


def _bias_claim(start: OnPolicy, kind: str, size: int, label: str) -> Claim:
    """The theorem has no bias at learning rate 0."""
    place = list(start.sizes).index(size)
    share = float(start.values[kind]["bias2_share"][place])
    exceeded = start.values[kind]["exceeded"][place]
    how = "enumerated, the same for every B; the theorem has no bias here: 0 to rounding"
    if np.isfinite(exceeded):
        how += f"; exceeds the variance from B = {np.ceil(exceeded):.0f} prompts"
    what = f"bias^2 / ||target||^2 at learning rate 0, {label}, G = {size}"
    return enumerated_claim(what, 0.0, share, share <= ROUNDING, how)


def _slope_claim(start: OnPolicy) -> Claim:
    """The squared bias is of order 1/G^2."""
    sizes, bias = np.log(start.limit_sizes), np.log(start.limits["group_std"]["bias"])
    slopes = 2 * np.diff(bias) / np.diff(sizes)
    how = (
        f"enumerated, epsilon = 0, between G = {start.limit_sizes[1]} and {start.limit_sizes[2]}; "
        f"within {SLOPE_TOLERANCE}, not decided where further off and coming closer"
    )
    what = "as G grows: slope of log bias^2 on log G at learning rate 0, with normalisation"
    return nearing_claim(what, -2.0, slopes[::-1], SLOPE_TOLERANCE, how)


def panels(start: OnPolicy) -> list[Panel]:
    """Squared bias by group size, and the batch that does not average it out."""
    size, sizes = "group size G", np.array(start.sizes, dtype=float)
    kinds = ("group_std", "group_std_floor", "group_std_redrawn")
    share = [PlotLine(LABELS[kind], sizes, start.values[kind]["bias2_share"]) for kind in kinds]
    limit = (start.bias_limit / start.target_norm / sizes) ** 2
    share.append(PlotLine("limit, order 1/G^2", sizes, limit, predicted=True))
    exceeded = [PlotLine(LABELS[kind], sizes, start.values[kind]["exceeded"]) for kind in kinds]
    return [
        Panel("Squared bias at learning rate 0", size, "bias^2 / ||target||^2", share, "xy"),
        Panel("Batch from which bias^2 > variance", size, "prompts B", exceeded, "xy"),
    ]


def rows(start: OnPolicy) -> list[dict[str, Any]]:
    """A quantity a row, at a group size."""
    return [
        row("group_size", size, "none", kind, name, value)
        for kind, values in start.values.items()
        for name, column in values.items()
        for size, value in zip(start.sizes, column, strict=True)
    ]


def row(
    axis: str, at: float, path: str, normalisation: str, quantity: str, value: float,
    low: float | None = None, high: float | None = None,
) -> dict[str, Any]:  # fmt: skip
    """A row of the study's curves.csv: a quantity at one place; None where it is not finite."""
    place = {"axis": axis, "at": float(at), "path": path, "normalisation": normalisation}
    finite = float(value) if np.isfinite(value) else None
    return place | {"quantity": quantity, "value": finite, "low": low, "high": high}


def answer(start: OnPolicy) -> str:
    """What normalisation does to the theorem, one sentence."""
    values = start.values["group_std"]
    if values["bias2_share"].max() <= ROUNDING:
        return "With normalisation there is no bias at learning rate 0 on this policy."
    shares = ", ".join(f"{100 * share:.3g}" for share in values["bias2_share"])
    exceeded = ", ".join(f"{batch:.0f}" for batch in np.ceil(values["exceeded"]))
    sizes, slope = comma_list(start.sizes), _slope_claim(start)
    steep = f"log G with slope {slope.measured:.2f} at the largest G tried"
    limit = {
        AGREES: "it vanishes as G grows, like 1/G^2",
        OPEN: f"it falls on {steep}, whether like 1/G^2 is not decided",
        DISAGREES: f"it falls on {steep}, not like 1/G^2",
    }[slope.verdict]
    return (
        "With normalisation, as the paper has it, and with the mean of g / sigma(x) read as its "
        "target, it disagrees at a fixed G: at learning rate 0, "
        f"where its bias is 0, squared bias is {shares} % of ||target||^2 at G = {sizes}, for "
        f"every B, and above the variance from B = {exceeded}; {limit}."
    )


def notes(start: OnPolicy, group_size: int, floor: float) -> list[str]:
    """What the bound leaves out, and whether coverage mends it."""
    place = list(start.sizes).index(group_size)
    at_size = {kind: {name: x[place] for name, x in v.items()} for kind, v in start.values.items()}
    std, ratio = at_size["group_std"], start.variance_ratio("group_std")
    with_guard = min(at_size[f"group_std_{guard}"]["bias2_share"] for guard in ("floor", "redrawn"))
    excess = group_size**2 * std["bias"] ** 2
    return [
        "What the bound leaves out: a group's standard deviation is random and shares its "
        "completions with the scores, a bias of order 1/G in the mean of one group, which a mean "
        "over prompts keeps. O(1/(B G^2)) cannot hold a squared bias of order 1/G^2 that does not "
        f"fall with B: at G = {group_size} it is {excess:.3g} / (B G^2) at B = 1, "
        f"{1000 * excess:.3g} / (B G^2) at B = 1000, and without end; the variance there is "
        f"{group_size**2 * std['variance']:.3g} / (B G^2).",
        f"With normalisation G (B variance - C1) tends to {ratio:.3g} times the oracle's as G "
        "grows; the variance itself tends to C1/B, as the oracle's does: the noise of the standard "
        "deviation goes with that of the mean (Lemma 11), and biases that differ by prompt change "
        "C1 at order 1/G. So the difference is of order 1/(B G); where the factor is below 1 the "
        "oracle's variance is an upper bound, not what is there.",
        "Coverage: no law of independent rewards keeps the standard deviation of every group above "
        "some delta > 0, since an interval shorter than delta has a chance p > 0 and holds all G "
        "rewards with chance p^G; here a group has zero variance with chance "
        f"{percentage(std['silent'], 2)} at G = {group_size}. Guards make the assumption hold to "
        f"the letter {'and not' if with_guard > ROUNDING else 'and'} the theorem: squared bias is "
        f"{percentage(std['bias2_share'], 3)} of ||target||^2 with zero-variance groups at 0, "
        f"{percentage(at_size['group_std_floor']['bias2_share'], 3)} with max(std, {floor:g}), "
        f"{percentage(at_size['group_std_redrawn']['bias2_share'], 3)} with groups drawn again "
        f"until std >= {floor:g}. Divided by sigma(x) itself, which training does not know, the "
        "theorem holds.",
        "With the KL term the same squared bias is "
        f"{percentage(std['bias2_share_kl'], 3)} of ||target||^2: on-policy the KL term has no "
        "bias, with groups drawn again "
        f"{percentage(at_size['group_std_redrawn']['bias2_share_kl'], 3)}.",
    ]
