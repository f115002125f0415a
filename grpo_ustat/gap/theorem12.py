r"""Theorem 12: errors of Algorithm 2's gradient estimate on the minibatches of a batch.

Setting, estimate and target are those of `grpo_ustat.gap.offpolicy`: leave-one-out advantages,
divided by the group's standard deviation as in the paper or by nothing, completions of pi_old. A
batch of B prompts, drawn independently, is split into m minibatches with an update on each, one
pass; the estimate of the last, after k = m - 1 updates by gradient ascent, is the farthest from
pi_old. Given theta_k its minibatch is fresh, and bias and variance are enumerated; only theta_k is
random. To first order in the learning rate the change of the bias is linear in
theta_k - theta_old, hence its square of order eta^2. The bias at theta_old, which normalisation
causes, is of order 1/G (`large_groups`). It is a bias of the mean, so that more prompts do not
change it.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np

from grpo_ustat.config.gap import Experiment, Theorem12Config
from grpo_ustat.config.schema import ConfigError
from grpo_ustat.estimators.scaling import ScalingLaw
from grpo_ustat.gap.claims import (
    enumerated_claim,
    enumeration_converges,
    interval_p_value,
    limit_claim,
    mean_interval,
    nearing_claim,
)
from grpo_ustat.gap.estimate_moments import Normalisation
from grpo_ustat.gap.evidence import Evidence, Panel, PlotLine, Theorem
from grpo_ustat.gap.offpolicy import (
    ROUNDING,
    ByLength,
    OnPolicy,
    PathErrors,
    Setting,
    by_length,
    on_policy,
    path_errors,
)
from grpo_ustat.gap.sequences import SequencePolicy, build_sequences
from grpo_ustat.runs.claims import Claim, comma_list, correct_family, verdict_of, worst_verdict
from grpo_ustat.runs.record import AGREES, DISAGREES, OPEN
from grpo_ustat.terminal.streams import percentage

SLOPE_TOLERANCE, TOLERANCE = 0.05, 0.05
# Relative error within which a limit as G grows counts as reached.
LIMIT_TOLERANCE = 0.01
LABELS = {
    "none": "without normalisation",
    "sigma": "divided by sigma(x)",
    "group_std": "divided by the group's std",
    "group_std_floor": "std at least the floor",
    "group_std_redrawn": "groups redrawn below the floor",
}
VERDICT_PREDICATES = {AGREES: "holds", DISAGREES: "fails in some claim", OPEN: "is not decided"}

STATEMENT = (
    "Theorem 12: where the standard deviation of rewards is bounded away from 0, the mean squared "
    "error of Algorithm 2's gradient estimate, whose advantages are divided by that of their "
    "group, is a squared bias, from ratios of tokens in place of completions and from a KL term "
    "without a ratio, which vanishes with the learning rate, plus the oracle's variance / (B G) "
    "and O(1/(B G^2)). A reading: the target is the mean of g / sigma(x), since the paper calls "
    "the ground-truth gradient the derivative of E[2 arcsin sqrt V]; with the group's own standard "
    "deviation in the target the bias at learning rate 0 would be 0 by definition. Bounded away "
    "from 0 may be that of every group or, as Lemma 11's proof needs, sigma(x) alone: both are "
    "tried."
)


def theorem12(
    policy: SequencePolicy,
    reference: SequencePolicy,
    reward_PY: np.ndarray,
    design: Theorem12Config,
    seed: int,
) -> Evidence:
    """Compute squared bias and variance by learning rate, group size and completion length.

    Args:
        policy: pi_old, of at least 2 tokens.
        reference: pi_ref, with the same prompts.
        reward_PY: rewards of all its completions on a grid; no single token determines them.
        seed: of the paths; the same completions are drawn at every learning rate.
    """
    rates, updates = np.array(sorted(set(design.learning_rates))), design.minibatches - 1
    shape = design.num_prompts // design.minibatches, design.group_size
    setting = Setting(policy, reference, reward_PY, design.beta, *shape)
    start = on_policy(setting, design.group_sizes, design.limit_sizes, design.epsilon, design.floor)
    paths = {}
    for kind in design.normalisations:
        divided = replace(setting, normalisation=Normalisation(kind, design.epsilon))
        paths[kind] = path_errors(divided, rates, updates, design.replicates, seed)
    costs = by_length(design.lengths, design.shift, *shape)
    plain, normalised, notes = [], [], []
    if "none" in paths:
        plain = [*_plain_claims(paths["none"]), *_length_claims(costs)]
    if "group_std" in paths:
        of_updates = _drift_claims(paths["group_std"])
        normalised = [*_start_claims(start, design.group_size), *of_updates]
        notes = _start_notes(start, design.group_size, design.floor)
    claims = correct_family([*normalised, *plain])
    return Evidence(
        problem=_problem_facts(setting, design),
        claims=claims,
        panels=[*_start_panels(start), *_panels(paths, costs)],
        rows=[*_start_rows(start), *_rows(paths, costs)],
        answer=_answer(paths, start, worst_verdict(claims[len(normalised) :])),
        notes=[*notes, *_notes(paths, costs)],
        rollouts=len(paths) * design.replicates * updates * shape[0] * shape[1],
    )


def _problem_facts(setting: Setting, design: Theorem12Config) -> dict[str, float | str]:
    """Return facts on policy, rewards and batch for the reader of the report."""
    prompts, count, length = setting.old.logprob_PYL.shape
    value_P = setting.old.value_P(setting.reward_PY)
    return {
        **{"prompts": prompts, "completions": count, "tokens": length},
        "reward levels": len(np.unique(setting.reward_PY)),
        "V of each prompt": ", ".join(f"{value:.3g}" for value in value_P),
        "J": float(value_P.mean()),
        "prompts of a batch, B": design.num_prompts,
        "minibatches of a batch": design.minibatches,
        "completions in a group, G": design.group_size,
        "beta": design.beta,
        "paths": design.replicates,
    }


# At learning rate 0


def _start_claims(start: OnPolicy, group_size: int) -> list[Claim]:
    """Make claims of the theorem with normalisation, then of what would make it hold.

    Args:
        group_size: G at which other divisors are compared.
    """
    by_size = [_bias_claim(start, "group_std", size, "with normalisation") for size in start.sizes]
    guards = [
        _bias_claim(start, kind, group_size, LABELS[kind])
        for kind in ("group_std_floor", "group_std_redrawn", "sigma")
    ]
    how = (
        f"enumerated at G = {comma_list(start.limit_sizes)}, epsilon = 0, extrapolated in 1/G; "
        f"within {percentage(LIMIT_TOLERANCE)}: "
        "else what is left of the variance is of order 1/(B G), not 1/(B G^2)"
    )
    labels = {kind: LABELS[kind] for kind in ("none", "sigma")}
    oracles = []
    for kind, label in (labels | {"group_std": "with normalisation"}).items():
        ratio = start.variance_ratio(kind)
        what = f"as G grows: G (B variance - C1) over the oracle's, {label}"
        oracles.append(enumerated_claim(what, 1.0, ratio, abs(ratio - 1) <= LIMIT_TOLERANCE, how))
    constant = limit_claim(
        "as G grows: limit of G ||bias|| at learning rate 0, with normalisation",
        start.bias_limit,
        np.array(start.limit_sizes) * start.limits["group_std"]["bias"],
        LIMIT_TOLERANCE * start.bias_limit,
        f"enumerated at G = {comma_list(start.limit_sizes)}, epsilon = 0, extrapolated in 1/G; "
        f"within {percentage(LIMIT_TOLERANCE)} of the delta method's, not decided where coming "
        "closer",
    )
    return [*by_size, _order_claim(start), constant, *oracles, *guards]


def _bias_claim(start: OnPolicy, kind: str, size: int, label: str) -> Claim:
    """Test that the estimate has no bias at learning rate 0, as the theorem has it."""
    place = list(start.sizes).index(size)
    share = float(start.values[kind]["bias2_share"][place])
    exceeded = start.values[kind]["exceeded"][place]
    how = "enumerated, the same for every B; the theorem has no bias here: 0 to rounding"
    if np.isfinite(exceeded):
        how += f"; exceeds the variance from B = {np.ceil(exceeded):.0f} prompts"
    what = f"bias^2 / ||target||^2 at learning rate 0, {label}, G = {size}"
    return enumerated_claim(what, 0.0, share, share <= ROUNDING, how)


def _order_claim(start: OnPolicy) -> Claim:
    """Test that the squared bias is of order 1/G^2."""
    sizes, bias = np.log(start.limit_sizes), np.log(start.limits["group_std"]["bias"])
    slopes = 2 * np.diff(bias) / np.diff(sizes)
    how = (
        f"enumerated, epsilon = 0, between G = {start.limit_sizes[1]} and {start.limit_sizes[2]}; "
        f"within {SLOPE_TOLERANCE}, not decided where further off and coming closer"
    )
    what = "as G grows: slope of log bias^2 on log G at learning rate 0, with normalisation"
    return nearing_claim(what, -2.0, slopes[::-1], SLOPE_TOLERANCE, how)


def _start_panels(start: OnPolicy) -> list[Panel]:
    """Return panels of squared bias by group size, and of batches that do not average it out."""
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


def _start_rows(start: OnPolicy) -> list[dict[str, Any]]:
    """Return a row for each quantity and group size."""
    return [
        _row("group_size", size, "none", kind, name, value)
        for kind, values in start.values.items()
        for name, column in values.items()
        for size, value in zip(start.sizes, column, strict=True)
    ]


def _row(
    axis: str, at: float, path: str, normalisation: str, quantity: str, value: float,
    low: float | None = None, high: float | None = None,
) -> dict[str, Any]:  # fmt: skip
    """Return a row of curves.csv: a quantity at one place; None if it is not finite."""
    place = {"axis": axis, "at": float(at), "path": path, "normalisation": normalisation}
    finite = float(value) if np.isfinite(value) else None
    return place | {"quantity": quantity, "value": finite, "low": low, "high": high}


def _start_answer(start: OnPolicy) -> str:
    """Summarise the effect of normalisation on the theorem in one sentence."""
    values = start.values["group_std"]
    if values["bias2_share"].max() <= ROUNDING:
        return "With normalisation there is no bias at learning rate 0 on this policy."
    shares = ", ".join(f"{100 * share:.3g}" for share in values["bias2_share"])
    exceeded = ", ".join(f"{batch:.0f}" for batch in np.ceil(values["exceeded"]))
    sizes, slope = comma_list(start.sizes), _order_claim(start)
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


def _start_notes(start: OnPolicy, group_size: int, floor: float) -> list[str]:
    """Return notes on what the bound leaves out, and on whether coverage mends it."""
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
        f"{percentage(std['zero_variance'], 2)} at G = {group_size}. Guards make the assumption "
        f"hold to the letter {'and not' if with_guard > ROUNDING else 'and'} the theorem: "
        f"squared bias is {percentage(std['bias2_share'], 3)} of ||target||^2 with zero-variance "
        "groups at 0, "
        f"{percentage(at_size['group_std_floor']['bias2_share'], 3)} with max(std, {floor:g}), "
        f"{percentage(at_size['group_std_redrawn']['bias2_share'], 3)} with groups drawn again "
        f"until std >= {floor:g}. Divided by sigma(x) itself, which training does not know, the "
        "theorem holds.",
        "With the KL term the same squared bias is "
        f"{percentage(std['bias2_share_kl'], 3)} of ||target||^2: on-policy the KL term has no "
        "bias, with groups drawn again "
        f"{percentage(at_size['group_std_redrawn']['bias2_share_kl'], 3)}.",
    ]


# After updates


def _plain_claims(paths: PathErrors) -> list[Claim]:
    """Make claims without normalisation; a ConfigError if the exact path has hardly any bias."""
    start, leading = paths.start, paths.leading
    assert leading is not None
    if not leading.exact > ROUNDING * start["token_variance"]:
        raise ConfigError(
            f"reward_PY leaves a squared bias of {leading.exact:.3g} eta^2 along the exact "
            "path: use rewards that no token decides alone, away from a stationary policy"
        )
    parts = {"": ""}
    if paths.setting.beta > 0:
        parts |= {"_policy": ", without the KL term", "_kl": ", of the KL term alone"}
    largest = max(start[f"{level}_bias2{x}"] for level in ("token", "sequence") for x in parts)
    variance = paths.random["sequence_variance"]
    claims = [
        _zero_claim("bias^2 / variance at theta_k = theta_old", largest / start["token_variance"]),
        _exact_slope_claim(paths, "token_bias2", "bias^2"),
        _place_claim(paths),
        *(_slope_claim(paths, f"token_bias2{part}", words) for part, words in parts.items()),
        _leading_claim(paths, leading.random_R),
        _law_claim(paths, leading.law),
        _variance_claim(paths),
        *(
            _zero_claim(
                f"bias^2 / variance with the completion's ratio, {words}, at every learning rate",
                (paths.random[f"sequence_bias2{part}"] / variance).max(),
            )
            for part, words in (("_policy", "without the KL term"), ("", "on the KL term too"))
        ),
    ]
    return _prefixed("without normalisation", claims)


def _drift_claims(paths: PathErrors) -> list[Claim]:
    """Make claims with normalisation, beyond what is there at learning rate 0."""
    label = "||bias - bias at learning rate 0||^2"
    claims = [
        _exact_slope_claim(paths, "token_drift2", label),
        _slope_claim(paths, "token_drift2", "", label),
        _variance_claim(paths),
    ]
    return _prefixed("with normalisation", claims)


def _prefixed(words: str, claims: list[Claim]) -> list[Claim]:
    """Put words before what every claim says."""
    return [replace(claim, what=f"{words}: {claim.what}") for claim in claims]


def _zero_claim(what: str, measured: float) -> Claim:
    """Test that an enumerated quantity is 0."""
    how = f"exact to rounding: at most {ROUNDING:g}"
    return enumerated_claim(what, 0.0, measured, bool(measured <= ROUNDING), how)


def _exact_slope_claim(paths: PathErrors, name: str, label: str) -> Claim:
    """Test that an error is of order eta^2 along the exact path, which has no noise."""
    slopes = np.diff(np.log(paths.exact[name])) / np.diff(np.log(paths.rates))
    how = (
        f"between learning rates {paths.rates[0]:g} and {paths.rates[1]:g}, exact; within "
        f"{SLOPE_TOLERANCE}, not decided where further off and coming closer as they fall"
    )
    what = f"slope of log {label} on log learning rate, exact steps"
    return nearing_claim(what, 2.0, slopes[:2], SLOPE_TOLERANCE, how)


def _place_claim(paths: PathErrors) -> Claim:
    """Test the growth of the bias with the place of a minibatch in its batch.

    After j updates the displacement is j eta times the target, to first order in eta.
    """
    last = paths.exact_by_place.shape[1] - 1
    ratio_E = paths.exact_by_place[:2, last] / paths.exact_by_place[:2, 1]
    how = (
        f"exact, at learning rate {paths.rates[0]:g}; within {percentage(TOLERANCE)}, not decided "
        "where coming closer; the first minibatch has no bias"
    )
    what = f"bias^2 of minibatch {last + 1} of a batch over that of the second, exact steps"
    return nearing_claim(what, float(last**2), ratio_E, TOLERANCE * last**2, how)


def _slope_claim(paths: PathErrors, name: str, part: str, label: str = "bias^2") -> Claim:
    """Test that an error is of order eta^2 in the mean of the random paths."""
    slope, at_larger_rates = paths.slope(name), paths.slope(name, at=1).estimate
    count = paths.random[name].shape[1]
    distance, before = max(slope.low - 2, 2 - slope.high, 0), abs(at_larger_rates - 2)
    how = (
        f"the same of the mean over {count} paths, 95 % jackknife interval; "
        f"2 within {SLOPE_TOLERANCE} of it, not decided where wider than 0.5 or coming closer"
    )
    what = f"slope of log {label} on log learning rate, minibatch steps{part}"
    wide = slope.high - slope.low > 0.5
    agrees = None if wide else enumeration_converges(distance, before, SLOPE_TOLERANCE)
    p_value = interval_p_value(slope, count - 1, 2.0, SLOPE_TOLERANCE)
    return Claim(what, 2.0, *slope, verdict_of(agrees), how, p_value)


def _leading_claim(paths: PathErrors, limit_R: np.ndarray) -> Claim:
    """Test the constant of order eta^2."""
    bias2_over_eta2 = paths.random["token_bias2"].mean(axis=1)[:2] / paths.rates[:2] ** 2
    how = (
        f"exact given the paths, at learning rate {paths.rates[0]:g}; within "
        f"{percentage(TOLERANCE)} of what the derivative of the bias says, not decided where "
        "coming closer"
    )
    what = "bias^2 / its leading term of order eta^2, mean over paths"
    return nearing_claim(what, 1.0, bias2_over_eta2 / limit_R.mean(), TOLERANCE, how)


def _law_claim(paths: PathErrors, law: ScalingLaw) -> Claim:
    """Compare the variance before any update with Proposition 3."""
    predicted = law.mse(paths.setting.num_prompts, paths.setting.group_size)
    variance = paths.start["token_variance_policy"]
    agrees = bool(abs(variance / predicted - 1) <= 1e-10)
    how = "exact, B of a minibatch; the law of Proposition 3 by another route, to 1e-10"
    what = "variance at theta_old without the KL term, (C1 + C2/G + C3/(G(G-1)))/B"
    return enumerated_claim(what, predicted, variance, agrees, how)


def _variance_claim(paths: PathErrors) -> Claim:
    """Test the change of the variance by updates."""
    ratios_ER = paths.random["token_variance"] / paths.start["token_variance"]
    count, ratio = ratios_ER.shape[1], mean_interval(ratios_ER[0])
    inside = ratio.low - TOLERANCE <= 1 <= ratio.high + TOLERANCE
    last, before = np.abs(ratios_ER[:2].mean(axis=1) - 1)
    agrees = True if inside else enumeration_converges(last, before, TOLERANCE)
    how = (
        f"exact given the path, at learning rate {paths.rates[0]:g}, 95 % t interval over {count} "
        f"paths; 1 inside or within {percentage(TOLERANCE)}"
    )
    p_value = interval_p_value(ratio, count - 1, 1.0, TOLERANCE)
    return Claim("variance / variance at theta_old", 1.0, *ratio, verdict_of(agrees), how, p_value)


def _length_claims(costs: ByLength) -> list[Claim]:
    """Make claims on the cost of ratios of whole completions as these grow longer."""
    moment, length = costs.values["ratio_second_moment"], int(costs.lengths[-1])
    distance = np.abs(moment / costs.growth**costs.lengths - 1).max()
    return [
        enumerated_claim(
            f"E rho^2 of completions of {length} tokens, c^L with c = {costs.growth:.4g}",
            float(costs.growth**length),
            moment[-1],
            bool(distance <= 1e-10),
            "exact at every length, to 1e-10",
        ),
        enumerated_claim(
            "growth by a token of variance with the completion's ratio / with tokens'",
            f">= {costs.growth:.4g}",
            costs.growth_of_ratio,
            costs.growth_of_ratio >= costs.growth,
            f"exact, between the two largest lengths, up to {length}",
        ),
    ]


def _panels(paths: dict[str, PathErrors], costs: ByLength) -> list[Panel]:
    """Return panels of squared bias and MSE by learning rate, and of ratios by length."""
    rate, biases = "learning rate", []
    if "none" in paths:
        plain, labels = paths["none"], {"token_bias2": "minibatch steps"}
        rates, leading = plain.rates, plain.leading
        assert leading is not None
        if plain.setting.beta > 0:
            labels["token_bias2_policy"] = "without the KL term"
            labels["token_bias2_kl"] = "KL term alone"
            labels["token_bias2_kl_old_prefixes"] = "KL term, prefixes of pi_old in the target"
        random, exact = leading.random_R.mean() * rates**2, leading.exact * rates**2
        biases += [
            *(_band(label, plain, name) for name, label in labels.items()),
            PlotLine("minibatch steps", rates, random, predicted=True),
            PlotLine("exact steps", rates, plain.exact["token_bias2"]),
            PlotLine("exact steps", rates, exact, predicted=True),
        ]
    if "group_std" in paths:
        normalised = paths["group_std"]
        label = "with normalisation, minibatch steps"
        flat = np.full(len(normalised.rates), normalised.start["token_bias2"])
        biases += [
            _band(label, normalised, "token_bias2"),
            PlotLine(label, normalised.rates, flat, predicted=True),
            _band("its change since theta_old", normalised, "token_drift2"),
        ]
    lengths, moment = costs.lengths, "E rho^2 of the completion"
    growth = [
        PlotLine(moment, lengths, costs.values["ratio_second_moment"]),
        PlotLine(moment, lengths, costs.growth**lengths, predicted=True),
        PlotLine("variance ratio, completion : token", lengths, costs.variance_ratio),
    ]
    length = "completion length in tokens"
    return [
        Panel("Squared bias, token ratios", rate, "bias^2", biases, "xy"),
        *(
            Panel(f"MSE {words} normalisation", rate, "MSE", _error_lines(paths[kind]), "xy")
            for kind, words in (("none", "without"), ("group_std", "with"))
            if kind in paths
        ),
        Panel("What the completion's ratio costs", length, "factor", growth, "y"),
    ]


def _error_lines(paths: PathErrors) -> list[PlotLine]:
    """Return lines of the mean squared errors of both levels."""
    labels = {"token": "token ratios", "sequence": "completion's ratio"}
    lines = [_band(label, paths, f"{level}_mse") for level, label in labels.items()]
    flat = np.full(len(paths.rates), paths.start["token_variance"])
    return [*lines, PlotLine("variance at theta_old", paths.rates, flat, predicted=True)]


def _band(label: str, paths: PathErrors, name: str) -> PlotLine:
    """Return a line of the mean over random paths by learning rate, with its intervals."""
    estimate, low, high = (list(ends) for ends in zip(*paths.mean(name), strict=True))
    return PlotLine(label, paths.rates, estimate, low, high)


def _rows(paths: dict[str, PathErrors], costs: ByLength) -> list[dict[str, Any]]:
    """Return a row for each quantity at a learning rate, at a place in the batch or at a length.

    Learning rate 0 is theta_old. Places are those of minibatches along the exact path at the
    smallest learning rate.
    """
    rows = []
    for kind, errors in paths.items():
        rows += [_row("learning_rate", 0, "none", kind, *pair) for pair in errors.start.items()]
        columns = []
        for name in errors.random:
            columns.append(("minibatch", name, errors.mean(name)))
            columns.append(("exact", name, [(value,) for value in errors.exact[name]]))
        columns.append(("minibatch", "tie_num_prompts", [(value,) for value in errors.tie()]))
        for path, name, values in columns:
            for at, value in zip(errors.rates, values, strict=True):
                rows.append(_row("learning_rate", at, path, kind, name, *value))
        for place, value in enumerate(errors.exact_by_place[0], 1):
            rows.append(_row("minibatch", place, "exact", kind, "token_bias2", value))
    for name, values in costs.values.items():
        for at, value in zip(costs.lengths, values, strict=True):
            rows.append(_row("length", at, "none", "none", name, value))
    return rows


def _answer(paths: dict[str, PathErrors], start: OnPolicy, plain_verdict: str) -> str:
    """Summarise each normalisation in a sentence; `plain_verdict` is of all claims without it."""
    answers = []
    if "none" in paths:
        plain = paths["none"]
        slope, ratio = plain.slope("token_bias2").estimate, plain.random["token_variance"][0]
        change = abs(ratio.mean() / plain.start["token_variance"] - 1)
        answers.append(
            f"Without normalisation the theorem {VERDICT_PREDICATES[plain_verdict]}: squared bias "
            f"is {plain.start['token_bias2']:.1g} at learning rate 0 and falls with it like its "
            f"power {slope:.3f}; at {plain.rates[0]:g} the variance is {percentage(change, 2)} off "
            "the on-policy one, the oracle's and a term of order 1/(B G^2)."
        )
    if "group_std" in paths:
        answers.append(_start_answer(start))
    return " ".join(answers)


def _notes(paths: dict[str, PathErrors], costs: ByLength) -> list[str]:
    """Return limits, surprises and reasons."""
    lines = []
    if "group_std" in paths:
        normalised, rate = paths["group_std"], paths["group_std"].rates[-1]
        of_old, of_current = (
            normalised.mean(f"token_bias2{suffix}")[-1].estimate for suffix in ("", "_own_sigma")
        )
        lines.append(
            "With normalisation the target has sigma(x) of pi_old, whose groups advantages are of: "
            f"squared bias is {normalised.start['token_bias2']:.3g} at theta_old and {of_old:.3g} "
            f"at learning rate {rate:g}, {of_current:.3g} against a target with sigma(x) of "
            "pi_theta; the difference of the two targets is of order eta."
        )
    if "none" not in paths:
        return lines
    plain = paths["none"]
    setting, start, leading = plain.setting, plain.start, plain.leading
    assert leading is not None
    share = leading.law.c1 / setting.num_prompts / start["token_variance"]
    noise, several = leading.random_R.mean() / leading.exact, costs.lengths > 1
    lines += [
        "Without normalisation. " + _crossing(plain, leading.random_R.mean()),
        f"The smaller error is {_smaller_error(plain)} (learning rates).",
        "Both levels have the same error at the same theta_k in minibatches of as many prompts as "
        "follow; with more, the completion's ratio is better, where 0 with any number: "
        f"{_prompt_list(plain.rates, plain.tie())} (learning rates).",
        "The same by completion length, each token shifted alike: "
        f"{_prompt_list(costs.lengths[several], costs.tie[several])} (tokens).",
        "As the learning rate falls the levels differ by their variances, at order eta, and the "
        "sign of that difference depends on policy and rewards; squared bias is of order eta^2.",
        f"As the learning rate falls, squared bias of minibatch steps is {noise:.3g} times that of "
        "exact steps: the rest is noise in theta_k.",
        f"{percentage(share, 1)} of the on-policy variance is C1/B, from which prompts were "
        "drawn: no group size reduces it, so `oracle variance / (B G)` holds with G C1 inside the "
        "oracle's.",
        "Given theta_k the minibatch is fresh, as within one pass over a batch of prompts drawn "
        "independently; a second pass over the same completions may bias any ratio, and is not "
        "measured here.",
    ]
    if setting.beta > 0:
        of_reference, to_reference = setting.divergence_cosines
        lines += [
            "The KL term's target has prefixes of pi_theta, held fixed; with prefixes of pi_old "
            "its bias is that of the missing token ratio alone (rows token_bias2_kl_old_prefixes).",
            f"At theta_old what the KL term descends has cosine {of_reference:.4f} with the "
            "gradient of KL(pi_ref||pi) of completions and "
            f"{to_reference:.4f} with that of KL(pi||pi_ref).",
        ]
    return lines


def _smaller_error(paths: PathErrors) -> str:
    """Describe which level has the smaller error where, by 95 % t intervals of differences."""
    token, sequence = "that of token ratios", "that of the completion's ratio"
    rates: dict[str, list[str]] = {token: [], sequence: [], "not significantly different": []}
    difference_ER = paths.random["sequence_mse"] - paths.random["token_mse"]
    for rate, difference_R in zip(paths.rates, difference_ER, strict=True):
        _, low, high = mean_interval(difference_R)
        kind = token if low > 0 else sequence if high < 0 else "not significantly different"
        rates[kind].append(f"{rate:g}")
    return ", ".join(f"{kind} at {', '.join(at)}" for kind, at in rates.items() if at)


def _prompt_list(at: np.ndarray, prompts: np.ndarray) -> str:
    """Return numbers of prompts with the places that they belong to."""
    return ", ".join(f"{max(b, 0):.3g} at {a:g}" for a, b in zip(at, prompts, strict=True))


def _crossing(paths: PathErrors, limit: float) -> str:
    """Return the learning rate at which mean squared bias is the mean variance.

    The mean squared bias is `limit` eta^2 at first.
    """
    if paths.crossing is not None:
        return f"Squared bias equals the variance at learning rate {paths.crossing:.3g}."
    share_E, rate = paths.bias_share_E, np.sqrt(paths.start["token_variance"] / limit)
    return (
        f"Squared bias is {share_E[0]:.3g} to {share_E[-1]:.3g} of the variance; its leading "
        f"term would equal the on-policy variance at learning rate {rate:.3g}."
    )


def run(experiment: Experiment) -> Evidence:
    """Run `theorem12` on the policy that a configuration draws."""
    return theorem12(*build_sequences(experiment.problem), experiment.theorem, experiment.seed)


def check(experiment: Experiment) -> None:
    """Refuse completions of one token, and prompts of one reward."""
    if experiment.problem.length < 2:
        raise ConfigError(f"the policy's tokens={experiment.problem.length}: use at least 2")
    for prompt, reward_Y in enumerate(build_sequences(experiment.problem)[2]):
        if np.ptp(reward_Y) == 0:
            raise ConfigError(
                f"problem.difficulties={experiment.problem.difficulties} leaves prompt {prompt} "
                f"with reward {reward_Y[0]:g} alone: use less for it, or more problem.reward_levels"
            )


THEOREM = Theorem(Theorem12Config, STATEMENT, run, check)
