r"""Theorem 12: errors of Algorithm 2's gradient estimate on minibatches of a batch.

`grpo_ustat.gap.offpolicy` defines the estimate and its target. Completions are sampled from pi_old.
Advantages use the leave-one-out baseline. They are tested with division by the group's standard
deviation, as in the paper, and without it.

A batch of B prompts, drawn independently, is split into m minibatches. One pass over the batch
makes one update on each minibatch. The test is about the last minibatch, which is used after
k = m - 1 updates, when the policy is farthest from pi_old. Given the parameters theta_k after these
updates, the last minibatch is independent of the earlier ones. The bias and variance of its
estimate are therefore computed exactly for a given theta_k. Only theta_k has to be simulated.

To first order in the learning rate eta, the change of the bias is linear in theta_k - theta_old, so
the squared change is of order eta^2. With normalisation there is a bias of order 1/G even at
theta_old (see `large_groups`). More prompts do not reduce this bias, because the estimate from
every prompt is biased.
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
# A limit as G grows agrees with the prediction if their relative distance is at most this value.
LIMIT_TOLERANCE = 0.01
LABELS = {
    "none": "without normalisation",
    "sigma": "divided by sigma(x)",
    "group_std": "divided by the group's std",
    "group_std_floor": "divided by max(std, floor)",
    "group_std_redrawn": "divided by std, redrawn if std < floor",
}
VERDICT_PREDICATES = {AGREES: "holds", DISAGREES: "fails in some claim", OPEN: "is undecided"}

STATEMENT = (
    "Theorem 12 is about Algorithm 2's gradient estimate, with advantages divided by the group's "
    "standard deviation. If the standard deviation of rewards is bounded away from 0, the mean "
    "squared error is the sum of a squared bias, the oracle's variance / (B G), and O(1/(B G^2)). "
    "The bias arises because the estimate uses the ratios of tokens instead of completions and "
    "because the KL term has no ratio. It vanishes as the learning rate tends to 0. In our reading "
    "the target is the expectation of g / sigma(x), since the paper calls the ground-truth "
    "gradient the derivative of E[2 arcsin sqrt V]. If the target contained the group's standard "
    "deviation, the bias at learning rate 0 would be 0 by definition. The assumption can be read "
    "as a bound on the standard deviation of every group or, as in the proof of Lemma 11, as a "
    "bound on sigma(x) only. Both readings are tested."
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
        policy: old policy pi_old, with at least 2 tokens per completion.
        reference: reference policy pi_ref, with the same prompts.
        reward_PY: rewards of all Y completions of each prompt. They must be evenly spaced (on a
            grid) and depend on more than one token.
        design: settings of the test.
        seed: seed of the minibatches on the random paths.
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
    """Return the facts that the page shows about the policy, the rewards and the batch."""
    prompts, count, length = setting.old.logprob_PYL.shape
    value_P = setting.old.value_P(setting.reward_PY)
    return {
        **{
            "prompts": prompts,
            "possible completions of a prompt": count,
            "tokens of a completion": length,
        },
        "reward levels": len(np.unique(setting.reward_PY)),
        "V of each prompt": ", ".join(f"{value:.3g}" for value in value_P),
        "J": float(value_P.mean()),
        "prompts of a batch, B": design.num_prompts,
        "minibatches of a batch": design.minibatches,
        "completions in a group, G": design.group_size,
        "beta": design.beta,
        "random paths of updates": design.replicates,
    }


# At learning rate 0


def _start_claims(start: OnPolicy, group_size: int) -> list[Claim]:
    """Make claims about the estimate at learning rate 0.

    The paper's divisor is tested at every G, other divisors that the theorem may cover at one G.

    Args:
        start: exact values at learning rate 0.
        group_size: group size G at which the other divisors are tested.
    """
    by_size = [_bias_claim(start, "group_std", size, "with normalisation") for size in start.sizes]
    guards = [
        _bias_claim(start, kind, group_size, LABELS[kind])
        for kind in ("group_std_floor", "group_std_redrawn", "sigma")
    ]
    how = (
        f"enumerated at G = {comma_list(start.limit_sizes)}, epsilon = 0, extrapolated in 1/G; "
        f"agrees within {percentage(LIMIT_TOLERANCE)}; a ratio other than 1 means that the "
        "variance differs from the oracle's by order 1/(B G), not 1/(B G^2)"
    )
    labels = {kind: LABELS[kind] for kind in ("none", "sigma")}
    oracles = []
    for kind, label in (labels | {"group_std": "with normalisation"}).items():
        ratio = start.variance_ratio(kind)
        what = f"as G grows: limit of (B variance - C1) / (the oracle's B variance - C1), {label}"
        oracles.append(enumerated_claim(what, 1.0, ratio, abs(ratio - 1) <= LIMIT_TOLERANCE, how))
    constant = limit_claim(
        "as G grows: limit of G ||bias|| at learning rate 0, with normalisation",
        start.bias_limit,
        np.array(start.limit_sizes) * start.limits["group_std"]["bias"],
        LIMIT_TOLERANCE * start.bias_limit,
        f"enumerated at G = {comma_list(start.limit_sizes)}, epsilon = 0, extrapolated in 1/G; "
        f"agrees within {percentage(LIMIT_TOLERANCE)} of the delta-method value, otherwise "
        "undecided if the values approach it",
    )
    return [*by_size, _order_claim(start), constant, *oracles, *guards]


def _bias_claim(start: OnPolicy, kind: str, size: int, label: str) -> Claim:
    """Make a claim that the estimate has no bias at learning rate 0, as the theorem states."""
    place = list(start.sizes).index(size)
    share = float(start.values[kind]["bias2_share"][place])
    exceeded = start.values[kind]["exceeded"][place]
    how = "enumerated; the value is the same for every B; agrees if it is 0 up to rounding"
    if np.isfinite(exceeded):
        how += f"; the squared bias exceeds the variance if B >= {np.ceil(exceeded):.0f}"
    what = f"bias^2 / ||target||^2 at learning rate 0, {label}, G = {size}"
    return enumerated_claim(what, 0.0, share, share <= ROUNDING, how)


def _order_claim(start: OnPolicy) -> Claim:
    """Make a claim that, as G grows, the squared bias at learning rate 0 falls like 1/G^2."""
    sizes, bias = np.log(start.limit_sizes), np.log(start.limits["group_std"]["bias"])
    slopes = 2 * np.diff(bias) / np.diff(sizes)
    how = (
        f"enumerated, epsilon = 0, between G = {start.limit_sizes[1]} and {start.limit_sizes[2]}; "
        f"agrees within {SLOPE_TOLERANCE}, otherwise undecided if the slopes approach the "
        "prediction"
    )
    what = "as G grows: slope of log bias^2 on log G at learning rate 0, with normalisation"
    return nearing_claim(what, -2.0, slopes[::-1], SLOPE_TOLERANCE, how)


def _start_panels(start: OnPolicy) -> list[Panel]:
    """Return panels against G: the squared bias, and the B above which it exceeds the variance."""
    size, sizes = "group size G", np.array(start.sizes, dtype=float)
    kinds = ("group_std", "group_std_floor", "group_std_redrawn")
    share = [PlotLine(LABELS[kind], sizes, start.values[kind]["bias2_share"]) for kind in kinds]
    limit = (start.bias_limit / start.target_norm / sizes) ** 2
    share.append(PlotLine("limit, order 1/G^2", sizes, limit, predicted=True))
    exceeded = [PlotLine(LABELS[kind], sizes, start.values[kind]["exceeded"]) for kind in kinds]
    return [
        Panel("Squared bias at learning rate 0", size, "bias^2 / ||target||^2", share, "xy"),
        Panel("Batch above which bias^2 > variance", size, "prompts B", exceeded, "xy"),
    ]


def _start_rows(start: OnPolicy) -> list[dict[str, Any]]:
    """Return one row of curves.csv per normalisation, quantity and group size."""
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
    """Return a row of curves.csv; values that are not finite become None."""
    place = {"axis": axis, "at": float(at), "path": path, "normalisation": normalisation}
    finite = float(value) if np.isfinite(value) else None
    return place | {"quantity": quantity, "value": finite, "low": low, "high": high}


def _start_answer(start: OnPolicy) -> str:
    """Summarise whether the theorem holds with normalisation at learning rate 0."""
    values = start.values["group_std"]
    if values["bias2_share"].max() <= ROUNDING:
        return "With normalisation there is no bias at learning rate 0 on this policy."
    shares = ", ".join(f"{100 * share:.3g}" for share in values["bias2_share"])
    exceeded = ", ".join(f"{batch:.0f}" for batch in np.ceil(values["exceeded"]))
    sizes, slope = comma_list(start.sizes), _order_claim(start)
    steep = f"on a log-log scale with slope {slope.measured:.2f} at the largest G tested"
    limit = {
        AGREES: "The squared bias vanishes like 1/G^2 as G grows",
        OPEN: f"It is undecided if the squared bias falls like 1/G^2; it falls {steep}",
        DISAGREES: f"The squared bias falls {steep}, not like 1/G^2",
    }[slope.verdict]
    return (
        "If advantages are normalised as in the paper and the target is the expectation of g / "
        "sigma(x), the theorem disagrees with the measurement at a fixed G. At learning rate 0 "
        "the theorem states that there is no bias. For every B, however, the squared bias is "
        f"{shares} % of ||target||^2 at G = {sizes}. In the same order of G, it exceeds the "
        f"variance from B = {exceeded} prompts on. {limit}."
    )


def _start_notes(start: OnPolicy, group_size: int, floor: float) -> list[str]:
    """Return notes on the bias that the theorem's bound omits, and on limits for the divisor."""
    place = list(start.sizes).index(group_size)
    at_size = {kind: {name: x[place] for name, x in v.items()} for kind, v in start.values.items()}
    std, ratio = at_size["group_std"], start.variance_ratio("group_std")
    with_guard = min(at_size[f"group_std_{guard}"]["bias2_share"] for guard in ("floor", "redrawn"))
    excess = group_size**2 * std["bias"] ** 2
    return [
        "The theorem's bound omits a bias. A group's standard deviation is random and depends on "
        "the same completions as the scores. Each group's estimate therefore has a bias of order "
        "1/G, which averaging over prompts does not remove. Its square is of order 1/G^2 and does "
        "not fall with B, so it is not O(1/(B G^2)). To compare it with the bound, it can be "
        f"written as a multiple of 1/(B G^2). At G = {group_size} this multiple is {excess:.3g} "
        f"for B = 1 and {1000 * excess:.3g} for B = 1000, and it grows without bound as B grows. "
        "For comparison, the variance is "
        f"{group_size**2 * std['variance']:.3g} / (B G^2).",
        f"With normalisation, G (B variance - C1) tends to {ratio:.3g} times the oracle's value as "
        "G grows. If this factor is below 1, the oracle's variance is only an upper bound. The "
        "variance itself tends to C1/B, as the oracle's variance does. The two variances differ by "
        "order 1/(B G), for two reasons: the noise of the standard deviation cancels part of the "
        "noise of the mean (Lemma 11), and biases that differ between prompts change C1 at order "
        "1/G.",
        "If rewards are independent, every bound delta > 0 on the standard deviation is violated "
        "by some groups. Some interval shorter than delta has probability p > 0 and therefore "
        "contains all G rewards with probability p^G. Here a group has zero variance with "
        f"probability {percentage(std['zero_variance'], 2)} at G = {group_size}. The assumption "
        "holds literally if small standard deviations are raised or their groups are redrawn. The "
        f"theorem then {'still fails' if with_guard > ROUNDING else 'holds'}. The squared bias is "
        f"{percentage(std['bias2_share'], 3)} of ||target||^2 if zero-variance groups have "
        "advantage 0, "
        f"{percentage(at_size['group_std_floor']['bias2_share'], 3)} if advantages are divided by "
        f"max(std, {floor:g}), and "
        f"{percentage(at_size['group_std_redrawn']['bias2_share'], 3)} if groups are redrawn "
        f"until std >= {floor:g}. If advantages are divided by sigma(x), which is unknown in "
        "training, the theorem holds.",
        "These shares exclude the KL term. With it, the squared bias is "
        f"{percentage(std['bias2_share_kl'], 3)} of ||target||^2 if zero-variance groups have "
        f"advantage 0, and {percentage(at_size['group_std_redrawn']['bias2_share_kl'], 3)} if "
        "groups are redrawn. The KL term itself has no bias on-policy.",
    ]


# After updates


def _plain_claims(paths: PathErrors) -> list[Claim]:
    """Make claims about the estimate without normalisation.

    Raises:
        ConfigError: If the bias along the exact path is almost 0.
    """
    start, leading = paths.start, paths.leading
    assert leading is not None
    if not leading.exact > ROUNDING * start["token_variance"]:
        raise ConfigError(
            f"the rewards give a squared bias of only {leading.exact:.3g} eta^2 along the exact "
            "path: use rewards that depend on more than one token, and a policy whose gradient is "
            "not 0"
        )
    parts = {"": ""}
    if paths.setting.beta > 0:
        parts |= {"_policy": ", without the KL term", "_kl": ", KL term only"}
    largest = max(start[f"{level}_bias2{x}"] for level in ("token", "sequence") for x in parts)
    variance = paths.random["sequence_variance"]
    claims = [
        _zero_claim("bias^2 / variance at theta_old", largest / start["token_variance"]),
        _exact_slope_claim(paths, "token_bias2", "bias^2"),
        _place_claim(paths),
        *(_slope_claim(paths, f"token_bias2{part}", words) for part, words in parts.items()),
        _leading_claim(paths, leading.random_R),
        _law_claim(paths, leading.law),
        _variance_claim(paths),
        *(
            _zero_claim(
                f"largest bias^2 / variance with completion ratios over learning rates, {words}",
                (paths.random[f"sequence_bias2{part}"] / variance).max(),
            )
            for part, words in (("_policy", "without the KL term"), ("", "with the KL term"))
        ),
    ]
    return _prefixed("without normalisation", claims)


def _drift_claims(paths: PathErrors) -> list[Claim]:
    """Make claims about how updates change the bias, with normalisation."""
    label = "||bias - bias at learning rate 0||^2"
    claims = [
        _exact_slope_claim(paths, "token_drift2", label),
        _slope_claim(paths, "token_drift2", "", label),
        _variance_claim(paths),
    ]
    return _prefixed("with normalisation", claims)


def _prefixed(words: str, claims: list[Claim]) -> list[Claim]:
    """Add a prefix to each claim's description."""
    return [replace(claim, what=f"{words}: {claim.what}") for claim in claims]


def _zero_claim(what: str, measured: float) -> Claim:
    """Make a claim that an enumerated quantity is 0."""
    how = f"exact; agrees if at most {ROUNDING:g}, the size of rounding errors"
    return enumerated_claim(what, 0.0, measured, bool(measured <= ROUNDING), how)


def _exact_slope_claim(paths: PathErrors, name: str, label: str) -> Claim:
    """Make a claim that an error is of order eta^2 along the exact path."""
    slopes = np.diff(np.log(paths.exact[name])) / np.diff(np.log(paths.rates))
    how = (
        f"between learning rates {paths.rates[0]:g} and {paths.rates[1]:g}, exact; agrees within "
        f"{SLOPE_TOLERANCE}, otherwise undecided if the slope approaches the prediction as the "
        "rates fall"
    )
    what = f"slope of log({label}) on log(learning rate), exact steps"
    return nearing_claim(what, 2.0, slopes[:2], SLOPE_TOLERANCE, how)


def _place_claim(paths: PathErrors) -> Claim:
    """Make a claim about how the bias grows with a minibatch's position in the batch.

    To first order in eta, j updates move theta by j eta times the target. The squared bias of
    minibatch j + 1 is therefore proportional to j^2.
    """
    last = paths.exact_by_place.shape[1] - 1
    ratio_E = paths.exact_by_place[:2, last] / paths.exact_by_place[:2, 1]
    how = (
        f"exact, at learning rate {paths.rates[0]:g}; agrees within {percentage(TOLERANCE)}, "
        "otherwise undecided if the ratio approaches the prediction as the rate falls; the first "
        "minibatch has no bias"
    )
    what = f"bias^2 of minibatch {last + 1} divided by bias^2 of minibatch 2, exact steps"
    return nearing_claim(what, float(last**2), ratio_E, TOLERANCE * last**2, how)


def _slope_claim(paths: PathErrors, name: str, part: str, label: str = "bias^2") -> Claim:
    """Make a claim that the mean error over random paths is of order eta^2."""
    slope, at_larger_rates = paths.slope(name), paths.slope(name, at=1).estimate
    count = paths.random[name].shape[1]
    distance, before = max(slope.low - 2, 2 - slope.high, 0), abs(at_larger_rates - 2)
    how = (
        f"mean over {count} random paths, 95 % jackknife interval; agrees if 2 is within "
        f"{SLOPE_TOLERANCE} of the interval, undecided if the interval is wider than 0.5 or the "
        "slope approaches 2 as the rates fall"
    )
    what = f"slope of log({label}) on log(learning rate), minibatch steps{part}"
    wide = slope.high - slope.low > 0.5
    agrees = None if wide else enumeration_converges(distance, before, SLOPE_TOLERANCE)
    p_value = interval_p_value(slope, count - 1, 2.0, SLOPE_TOLERANCE)
    return Claim(what, 2.0, *slope, verdict_of(agrees), how, p_value)


def _leading_claim(paths: PathErrors, limit_R: np.ndarray) -> Claim:
    """Make a claim that the squared bias divided by eta^2 tends to its limit `limit_R`.

    The limit of each random path is computed from the derivative of the bias.
    """
    bias2_over_eta2 = paths.random["token_bias2"].mean(axis=1)[:2] / paths.rates[:2] ** 2
    how = (
        f"exact given the paths, at learning rate {paths.rates[0]:g}; agrees within "
        f"{percentage(TOLERANCE)} of the value computed from the derivative of the bias, otherwise "
        "undecided if the ratio approaches 1 as the rate falls"
    )
    what = "bias^2 / its leading term of order eta^2, mean over paths"
    return nearing_claim(what, 1.0, bias2_over_eta2 / limit_R.mean(), TOLERANCE, how)


def _law_claim(paths: PathErrors, law: ScalingLaw) -> Claim:
    """Make a claim that Proposition 3 gives the variance before any update."""
    predicted = law.mse(paths.setting.num_prompts, paths.setting.group_size)
    variance = paths.start["token_variance_policy"]
    agrees = bool(abs(variance / predicted - 1) <= 1e-10)
    how = (
        "exact; B is the number of prompts in a minibatch; C1, C2, C3 are computed separately from "
        "Proposition 3; agrees within a relative distance of 1e-10"
    )
    what = "variance at theta_old without the KL term, (C1 + C2/G + C3/(G(G-1)))/B"
    return enumerated_claim(what, predicted, variance, agrees, how)


def _variance_claim(paths: PathErrors) -> Claim:
    """Make a claim that updates at a small learning rate do not change the variance."""
    ratios_ER = paths.random["token_variance"] / paths.start["token_variance"]
    count, ratio = ratios_ER.shape[1], mean_interval(ratios_ER[0])
    inside = ratio.low - TOLERANCE <= 1 <= ratio.high + TOLERANCE
    last, before = np.abs(ratios_ER[:2].mean(axis=1) - 1)
    agrees = True if inside else enumeration_converges(last, before, TOLERANCE)
    how = (
        f"exact given the path, at learning rate {paths.rates[0]:g}, 95 % t interval over {count} "
        f"paths; agrees if 1 is within {percentage(TOLERANCE)} of the interval"
    )
    p_value = interval_p_value(ratio, count - 1, 1.0, TOLERANCE)
    return Claim("variance / variance at theta_old", 1.0, *ratio, verdict_of(agrees), how, p_value)


def _length_claims(costs: ByLength) -> list[Claim]:
    """Make claims about how the cost of completion ratios grows with the completion length."""
    moment, length = costs.values["ratio_second_moment"], int(costs.lengths[-1])
    distance = np.abs(moment / costs.growth**costs.lengths - 1).max()
    return [
        enumerated_claim(
            f"E rho^2 of completions of L = {length} tokens; predicted is c^L with "
            f"c = {costs.growth:.4g}",
            float(costs.growth**length),
            moment[-1],
            bool(distance <= 1e-10),
            "exact; agrees to 1e-10 at every length",
        ),
        enumerated_claim(
            "factor per token by which (variance with completion ratios) / (variance with token "
            "ratios) grows",
            f">= {costs.growth:.4g}",
            costs.growth_of_ratio,
            costs.growth_of_ratio >= costs.growth,
            f"exact, between the two largest lengths; the largest is {length} tokens",
        ),
    ]


def _panels(paths: dict[str, PathErrors], costs: ByLength) -> list[Panel]:
    """Return panels of the squared bias and MSE by learning rate, and of two factors by length."""
    rate, biases = "learning rate", []
    if "none" in paths:
        plain, labels = paths["none"], {"token_bias2": "minibatch steps"}
        rates, leading = plain.rates, plain.leading
        assert leading is not None
        if plain.setting.beta > 0:
            labels["token_bias2_policy"] = "without the KL term"
            labels["token_bias2_kl"] = "KL term only"
            labels["token_bias2_kl_old_prefixes"] = "KL term, target with prefixes of pi_old"
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
            _band("with normalisation, change since theta_old", normalised, "token_drift2"),
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
        Panel("Cost of completion ratios", length, "factor", growth, "y"),
    ]


def _error_lines(paths: PathErrors) -> list[PlotLine]:
    """Return curves of the mean squared error by learning rate, for both kinds of ratio."""
    labels = {"token": "token ratios", "sequence": "completion ratios"}
    lines = [_band(label, paths, f"{level}_mse") for level, label in labels.items()]
    flat = np.full(len(paths.rates), paths.start["token_variance"])
    return [*lines, PlotLine("variance at theta_old", paths.rates, flat, predicted=True)]


def _band(label: str, paths: PathErrors, name: str) -> PlotLine:
    """Return a curve of the mean of an error over random paths, with intervals, by learning rate.

    Args:
        label: label in the legend.
        paths: errors on all paths.
        name: key of `PathErrors.random`.
    """
    estimate, low, high = (list(ends) for ends in zip(*paths.mean(name), strict=True))
    return PlotLine(label, paths.rates, estimate, low, high)


def _rows(paths: dict[str, PathErrors], costs: ByLength) -> list[dict[str, Any]]:
    """Return the rows of curves.csv: one per quantity and learning rate, minibatch or length.

    Rows with learning rate 0 are for theta_old. The rows for minibatches give the squared bias of
    each minibatch of the batch along the exact path, at the smallest learning rate.
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
    """Summarise the results without and with normalisation.

    Args:
        paths: errors by kind of normalisation.
        start: exact values at learning rate 0.
        plain_verdict: worst verdict among the claims without normalisation.
    """
    answers = []
    if "none" in paths:
        plain = paths["none"]
        slope, ratio = plain.slope("token_bias2").estimate, plain.random["token_variance"][0]
        change = abs(ratio.mean() / plain.start["token_variance"] - 1)
        answers.append(
            f"Without normalisation the theorem {VERDICT_PREDICATES[plain_verdict]}. The squared "
            f"bias is {plain.start['token_bias2']:.1g} at learning rate 0 and grows like the "
            f"learning rate to the power {slope:.3f}. At learning rate {plain.rates[0]:g} the "
            f"variance differs by {percentage(change, 2)} from the variance at learning rate 0, "
            "which is the oracle's variance plus a term of order 1/(B G^2)."
        )
    if "group_std" in paths:
        answers.append(_start_answer(start))
    return " ".join(answers)


def _notes(paths: dict[str, PathErrors], costs: ByLength) -> list[str]:
    """Return notes on limitations, unexpected results and explanations."""
    lines = []
    if "group_std" in paths:
        normalised, rate = paths["group_std"], paths["group_std"].rates[-1]
        of_old, of_current = (
            normalised.mean(f"token_bias2{suffix}")[-1].estimate for suffix in ("", "_own_sigma")
        )
        lines.append(
            "With normalisation the target uses sigma(x) of pi_old, which samples the groups. The "
            f"squared bias is {normalised.start['token_bias2']:.3g} at theta_old and {of_old:.3g} "
            f"at learning rate {rate:g}. With sigma(x) of pi_theta in the target, the squared bias "
            f"at learning rate {rate:g} would be {of_current:.3g}. The two targets differ by an "
            "amount of the order of the learning rate."
        )
    if "none" not in paths:
        return lines
    plain = paths["none"]
    setting, start, leading = plain.setting, plain.start, plain.leading
    assert leading is not None
    share = leading.law.c1 / setting.num_prompts / start["token_variance"]
    noise, several = leading.random_R.mean() / leading.exact, costs.lengths > 1
    lines += [
        "The following notes are about advantages without normalisation. "
        + _crossing(plain, leading.random_R.mean()),
        "Kind of ratio with the smaller mean squared error, by learning rate: "
        f"{_smaller_error(plain)}.",
        "At a certain number of prompts in a minibatch, token ratios and completion ratios have "
        "the same error. With more prompts, completion ratios have the smaller error. By learning "
        f"rate, this number is {_prompt_list(plain.rates, plain.tie())}. A value of 0 means that "
        "completion ratios have the smaller error for any number of prompts.",
        "By completion length in tokens, the number of prompts with equal errors is "
        f"{_prompt_list(costs.lengths[several], costs.tie[several])}. Here the logits of every "
        "token change by the same amount at every length.",
        "At small learning rates eta, the errors with token ratios and with completion ratios "
        "differ by order eta. This difference comes from their variances, since the squared bias "
        "is only of order eta^2. Its sign depends on the policy and the rewards.",
        "Exact steps are updates along the exact target, and minibatch steps are updates along "
        "estimates. As the learning rate tends to 0, the squared bias after minibatch steps is "
        f"{noise:.3g} times the squared bias after exact steps. The difference is due to noise in "
        "theta_k.",
        f"{percentage(share, 1)} of the on-policy variance is C1/B, the variance between prompts. "
        "C1/B is the same for every group size, so the term `oracle variance / (B G)` is correct "
        "only if the oracle's variance includes G C1.",
        "Given theta_k, the last minibatch is independent of the earlier minibatches, because the "
        "batch is used in one pass and its prompts are drawn independently. A second pass over the "
        "same completions could bias the estimate with any ratio. This bias is not measured here.",
    ]
    if setting.beta > 0:
        of_reference, to_reference = setting.divergence_cosines
        lines += [
            "The target of the KL term uses prefixes from pi_theta, whose distribution is held "
            "fixed in the derivative. If the target used prefixes from pi_old, the KL term would "
            "be biased only because the ratio of the token itself is missing (rows "
            "token_bias2_kl_old_prefixes of curves.csv).",
            f"At theta_old the gradient of the KL term has cosine {of_reference:.4f} with the "
            f"gradient of KL(pi_ref||pi) over completions and {to_reference:.4f} with the gradient "
            "of KL(pi||pi_ref).",
        ]
    return lines


def _smaller_error(paths: PathErrors) -> str:
    """List, for each kind of ratio, the learning rates at which it has the smaller error.

    Two errors differ significantly if the 95 % t interval of their difference excludes 0.
    """
    token, sequence = "token ratios", "completion ratios"
    rates: dict[str, list[str]] = {token: [], sequence: [], "not significantly different": []}
    difference_ER = paths.random["sequence_mse"] - paths.random["token_mse"]
    for rate, difference_R in zip(paths.rates, difference_ER, strict=True):
        _, low, high = mean_interval(difference_R)
        kind = token if low > 0 else sequence if high < 0 else "not significantly different"
        rates[kind].append(f"{rate:g}")
    return ", ".join(f"{kind} at {', '.join(at)}" for kind, at in rates.items() if at)


def _prompt_list(at: np.ndarray, prompts: np.ndarray) -> str:
    """List numbers of prompts, each with its learning rate or completion length."""
    return ", ".join(f"{max(b, 0):.3g} at {a:g}" for a, b in zip(at, prompts, strict=True))


def _crossing(paths: PathErrors, limit: float) -> str:
    """Return a sentence that gives the learning rate at which squared bias and variance are equal.

    Args:
        paths: errors on all paths.
        limit: limit of (mean squared bias) / eta^2 as eta tends to 0.
    """
    if paths.crossing is not None:
        return f"The squared bias equals the variance at learning rate {paths.crossing:.3g}."
    share_E, rate = paths.bias_share_E, np.sqrt(paths.start["token_variance"] / limit)
    return (
        f"The squared bias is {share_E[0]:.3g} to {share_E[-1]:.3g} times the variance. Its "
        f"leading term would equal the on-policy variance at learning rate {rate:.3g}."
    )


def run(experiment: Experiment) -> Evidence:
    """Run `theorem12` on the random policy that the configuration defines."""
    return theorem12(*build_sequences(experiment.problem), experiment.theorem, experiment.seed)


def check(experiment: Experiment) -> None:
    """Refuse completions of a single token, and prompts for which all rewards are the same."""
    if experiment.problem.length < 2:
        raise ConfigError(f"problem.length={experiment.problem.length}: use at least 2 tokens")
    for prompt, reward_Y in enumerate(build_sequences(experiment.problem)[2]):
        if np.ptp(reward_Y) == 0:
            raise ConfigError(
                f"problem.difficulties={experiment.problem.difficulties} gives all completions of "
                f"prompt {prompt} the reward {reward_Y[0]:g}: lower its difficulty or raise "
                "problem.reward_levels"
            )


THEOREM = Theorem(Theorem12Config, STATEMENT, run, check)
