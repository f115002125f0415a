r"""Theorem 12: what Algorithm 2's gradient estimate is worth on the minibatches of a batch.

Setting, estimate and target are those of `grpo_ustat.gap.offpolicy`: leave-one-out advantages,
divided by the group's standard deviation as in the paper or by nothing, completions of pi_old. A
batch of B prompts, drawn independently, is split into m minibatches with an update on each, one
pass; the estimate of the last, after k = m - 1 updates by gradient ascent, is the farthest from
pi_old. Given theta_k its minibatch is fresh, and bias and variance are enumerated; only theta_k is
random. To first order in the learning rate the change of the bias is linear in
theta_k - theta_old, hence its square of order eta^2. The bias at theta_old itself, which
normalisation has, is the matter of `grpo_ustat.gap.theorem12_on_policy`.
"""

from __future__ import annotations

from dataclasses import replace

import numpy as np

from grpo_ustat.config.gap import Experiment, Theorem12Config
from grpo_ustat.config.schema import ConfigError
from grpo_ustat.estimators.advantage_moments import Normalisation
from grpo_ustat.estimators.intervals import t_interval
from grpo_ustat.estimators.scaling import ScalingLaw
from grpo_ustat.gap import theorem12_on_policy, theorem12_report
from grpo_ustat.gap.claims import (
    Claim,
    correct_family,
    enumeration_converges,
    interval_p_value,
    verdict_of,
    worst_verdict,
)
from grpo_ustat.gap.evidence import Evidence, Theorem, draws_nothing
from grpo_ustat.gap.offpolicy import ZERO, ByLength, Setting, by_length
from grpo_ustat.gap.offpolicy_paths import LeadingTerms, PathErrors, path_errors
from grpo_ustat.gap.sequences import MOST, SequencePolicy, build_sequences
from grpo_ustat.terminal.streams import percentage

SLOPE_TOLERANCE, TOLERANCE = 0.05, 0.05

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
    """Squared bias and variance by learning rate, by group size and by completion length.

    Args:
        policy: pi_old, of at least 2 tokens.
        reference: pi_ref, with the same prompts.
        reward_PY: rewards of all its completions on a grid, such that no token decides them alone.
        design: what is run and enumerated.
        seed: of the paths; the same completions are drawn at every learning rate.

    Raises:
        ConfigError: fewer rates, paths, lengths, tokens or completions than that needs, rewards
            that leave no bias or are on no grid, or a path that runs away.
    """
    check_design(len(policy.theta_LVV), design)
    rates, updates = np.array(sorted(set(design.learning_rates))), design.minibatches - 1
    shape = design.num_prompts // design.minibatches, design.group_size
    settings = [
        Setting(
            policy, reference, reward_PY, design.beta, *shape, Normalisation(kind, design.epsilon)
        )
        for kind in design.normalisations
    ]
    start = theorem12_on_policy.on_policy(
        settings[0], design.group_sizes, design.limit_sizes, design.epsilon, design.floor
    )
    paths = {
        setting.normalisation.kind: path_errors(setting, rates, updates, design.replicates, seed)
        for setting in settings
    }
    costs = by_length(design.lengths, design.shift, *shape)
    plain, normalised, notes = [], [], []
    if "none" in paths:
        plain = [*_plain_claims(paths["none"]), *_length_claims(costs)]
    if "group_std" in paths:
        normalised = theorem12_on_policy.claims(start, design.group_size)
        of_group_std, label = paths["group_std"], "||bias - bias at learning rate 0||^2"
        of_updates = [  # beyond what is there at learning rate 0
            _exact_slope_claim(of_group_std, "token_drift2", label),
            _slope_claim(of_group_std, "token_drift2", "", label),
            _variance_claim(of_group_std),
        ]
        normalised += [
            replace(claim, what=f"with normalisation: {claim.what}") for claim in of_updates
        ]
        notes = theorem12_on_policy.notes(start, design.group_size, design.floor)
    claims = correct_family([*normalised, *plain])
    return Evidence(
        bed=_bed(settings[0], design),
        claims=claims,
        panels=[*theorem12_on_policy.panels(start), *theorem12_report.panels(paths, costs)],
        rows=[*theorem12_on_policy.rows(start), *theorem12_report.rows(paths, costs)],
        answer=theorem12_report.answer(paths, start, worst_verdict(claims[len(normalised) :])),
        notes=[*notes, *theorem12_report.notes(paths, costs)],
        rollouts=len(paths) * design.replicates * updates * shape[0] * shape[1],
    )


def check_design(tokens: int, design: Theorem12Config) -> None:
    """Refuse what the study cannot be read from.

    Args:
        tokens: of a completion.
        design: what is run and enumerated.

    Raises:
        ConfigError: fewer rates, paths, lengths, tokens or completions than that needs.
    """
    rates, lengths = design.learning_rates, design.lengths
    if len(set(rates)) < 3 or min(rates) <= 0:
        raise ConfigError(f"learning_rates={rates}: use at least three, all above 0")
    longest = MOST.bit_length() - 1
    if len(set(lengths)) < 2 or min(lengths) < 1 or max(lengths) > longest:
        raise ConfigError(f"lengths={lengths}: use at least two, all of 1 to {longest}")
    least = {
        "the policy's tokens": (tokens, 2),
        "minibatches": (design.minibatches, 2),
        "group_size": (design.group_size, 2),
        "replicates": (design.replicates, 3),
        "beta": (design.beta, 0),
    }
    for name, (value, at_least) in least.items():
        if value < at_least:
            raise ConfigError(f"{name}={value}: use at least {at_least}")


def _bed(setting: Setting, design: Theorem12Config) -> dict[str, float | str]:
    prompts, count, length = setting.old.logprob_PYL.shape
    value_P = setting.old.value_P(setting.reward_PY)
    return {
        "prompts": prompts,
        "completions": count,
        "tokens": length,
        "reward levels": len(np.unique(setting.reward_PY)),
        "V of each prompt": ", ".join(f"{value:.3g}" for value in value_P),
        "J": float(value_P.mean()),
        "prompts of a batch, B": design.num_prompts,
        "minibatches of a batch": design.minibatches,
        "completions in a group, G": design.group_size,
        "beta": design.beta,
        "paths": design.replicates,
    }


def _plain_claims(paths: PathErrors) -> list[Claim]:
    """Claims on the theorem without normalisation.

    Raises:
        ConfigError: there is no bias along the exact path to speak of.
    """
    start, leading = paths.start, paths.leading
    assert leading is not None
    if not leading.exact > ZERO * start["token_variance"]:
        raise ConfigError(
            f"reward_PY leaves a squared bias of {leading.exact:.3g} eta^2 along the exact "
            "path: use rewards that no token decides alone, away from a stationary policy"
        )
    parts = {"": ""}
    if paths.setting.beta > 0:
        parts |= {"_policy": ", without the KL term", "_kl": ", of the KL term alone"}
    largest = max(start[f"{level}_bias2{x}"] for level in ("token", "sequence") for x in parts)
    variance, whole = paths.random["sequence_variance"], "with the completion's ratio"
    claims = [
        _zero_claim("bias^2 / variance at theta_k = theta_old", largest / start["token_variance"]),
        _exact_slope_claim(paths, "token_bias2", "bias^2"),
        _place_claim(paths),
        *(_slope_claim(paths, f"token_bias2{part}", words) for part, words in parts.items()),
        _leading_claim(paths, leading),
        _law_claim(paths, leading.law),
        _variance_claim(paths),
        _zero_claim(
            f"bias^2 / variance {whole}, without the KL term, at every learning rate",
            (paths.random["sequence_bias2_policy"] / variance).max(),
        ),
        _zero_claim(
            f"bias^2 / variance {whole}, on the KL term too, at every learning rate",
            (paths.random["sequence_bias2"] / variance).max(),
        ),
    ]
    return [replace(claim, what=f"without normalisation: {claim.what}") for claim in claims]


def _zero_claim(what: str, measured: float) -> Claim:
    """A value is 0 but for rounding."""
    how = f"exact to rounding: at most {ZERO:g}"
    return Claim(what, 0.0, float(measured), None, None, verdict_of(bool(measured <= ZERO)), how)


def _exact_slope_claim(paths: PathErrors, name: str, label: str) -> Claim:
    """An error of order eta^2 along the exact path, which has no noise."""
    steps = np.diff(np.log(paths.exact[name])) / np.diff(np.log(paths.rates))
    distances = np.abs(steps[:2] - 2)
    agrees = enumeration_converges(distances[0], distances[1], SLOPE_TOLERANCE)
    how = (
        f"between learning rates {paths.rates[0]:g} and {paths.rates[1]:g}, exact; within "
        f"{SLOPE_TOLERANCE}, not decided where further off and coming closer as they fall"
    )
    what = f"slope of log {label} on log learning rate, exact steps"
    return Claim(what, 2.0, float(steps[0]), None, None, verdict_of(agrees), how)


def _place_claim(paths: PathErrors) -> Claim:
    """After j updates the displacement is j eta times the target, to first order in eta."""
    last = paths.exact_by_place.shape[1] - 1
    ratio_E = paths.exact_by_place[:2, last] / paths.exact_by_place[:2, 1]
    distances = np.abs(ratio_E / last**2 - 1)
    how = (
        f"exact, at learning rate {paths.rates[0]:g}; within {percentage(TOLERANCE)}, not decided "
        "where coming closer; the first minibatch has no bias"
    )
    what = f"bias^2 of minibatch {last + 1} of a batch over that of the second, exact steps"
    agrees = enumeration_converges(distances[0], distances[1], TOLERANCE)
    return Claim(what, float(last**2), float(ratio_E[0]), None, None, verdict_of(agrees), how)


def _slope_claim(paths: PathErrors, name: str, part: str, label: str = "bias^2") -> Claim:
    """An error of order eta^2 in the mean of the random paths."""
    slope, at_larger_rates = paths.slope(name), paths.slope(name, at=1).estimate
    count = paths.random[name].shape[1]
    distance, before = max(slope.low - 2, 2 - slope.high, 0), abs(at_larger_rates - 2)
    how = (
        f"the same of the mean over {count} paths, 95 % jackknife interval; "
        f"2 within {SLOPE_TOLERANCE} of it, not decided where wider than 0.5 or coming closer"
    )
    what = f"slope of log {label} on log learning rate, minibatch steps{part}"
    agrees = None
    if slope.high - slope.low <= 0.5:
        agrees = enumeration_converges(distance, before, SLOPE_TOLERANCE)
    p_value = interval_p_value(slope, count - 1, 2.0, SLOPE_TOLERANCE)
    return Claim(what, 2.0, *slope, verdict_of(agrees), how, p_value)


def _leading_claim(paths: PathErrors, leading: LeadingTerms) -> Claim:
    """The constant of order eta^2."""
    bias2_over_eta2 = paths.random["token_bias2"].mean(axis=1)[:2] / paths.rates[:2] ** 2
    ratio = bias2_over_eta2 / leading.random_R.mean()
    distances = np.abs(ratio - 1)
    agrees = enumeration_converges(distances[0], distances[1], TOLERANCE)
    how = (
        f"exact given the paths, at learning rate {paths.rates[0]:g}; within "
        f"{percentage(TOLERANCE)} of what the derivative of the bias says, not decided where "
        "coming closer"
    )
    what = "bias^2 / its leading term of order eta^2, mean over paths"
    return Claim(what, 1.0, float(ratio[0]), None, None, verdict_of(agrees), how)


def _law_claim(paths: PathErrors, law: ScalingLaw) -> Claim:
    """The variance before any update beside Proposition 3."""
    predicted = law.mse(paths.setting.num_prompts, paths.setting.group_size)
    variance = paths.start["token_variance_policy"]
    agrees = abs(variance / predicted - 1) <= 1e-10
    how = "exact, B of a minibatch; the law of Proposition 3 by another route, to 1e-10"
    what = "variance at theta_old without the KL term, (C1 + C2/G + C3/(G(G-1)))/B"
    return Claim(what, predicted, variance, None, None, verdict_of(bool(agrees)), how)


def _variance_claim(paths: PathErrors) -> Claim:
    """What updates make of the variance."""
    ratios_ER = paths.random["token_variance"] / paths.start["token_variance"]
    count = ratios_ER.shape[1]
    ratio = t_interval(ratios_ER[0].mean(), ratios_ER[0].var(ddof=1) / count, count - 1)
    distances = np.abs(ratios_ER[:2].mean(axis=1) - 1)
    inside = ratio.low - TOLERANCE <= 1 <= ratio.high + TOLERANCE
    agrees = True if inside else enumeration_converges(distances[0], distances[1], TOLERANCE)
    how = (
        f"exact given the path, at learning rate {paths.rates[0]:g}, 95 % t interval over {count} "
        f"paths; 1 inside or within {percentage(TOLERANCE)}"
    )
    p_value = interval_p_value(ratio, count - 1, 1.0, TOLERANCE)
    return Claim("variance / variance at theta_old", 1.0, *ratio, verdict_of(agrees), how, p_value)


def _length_claims(costs: ByLength) -> list[Claim]:
    """What ratios of whole completions cost as they grow longer."""
    moment, length = costs.values["ratio_second_moment"], int(costs.lengths[-1])
    distance = np.abs(moment / costs.growth**costs.lengths - 1).max()
    return [
        Claim(
            f"E rho^2 of completions of {length} tokens, c^L with c = {costs.growth:.4g}",
            float(costs.growth**length),
            float(moment[-1]),
            None,
            None,
            verdict_of(bool(distance <= 1e-10)),
            "exact at every length, to 1e-10",
        ),
        Claim(
            "growth by a token of variance with the completion's ratio / with tokens'",
            f">= {costs.growth:.4g}",
            costs.growth_of_ratio,
            None,
            None,
            verdict_of(costs.growth_of_ratio >= costs.growth),
            f"exact, between the two largest lengths, up to {length}",
        ),
    ]


def study(experiment: Experiment) -> Evidence:
    """`theorem12` on the policy that a configuration draws."""
    return theorem12(*build_sequences(experiment.bed), experiment.study, experiment.seed)


def check(experiment: Experiment) -> None:
    """Refuse what the study cannot be read from, and prompts of one reward.

    Raises:
        ConfigError: naming the values and the fix.
    """
    check_design(experiment.bed.length, experiment.study)
    for prompt, reward_Y in enumerate(build_sequences(experiment.bed)[2]):
        if np.ptp(reward_Y) == 0:
            raise ConfigError(
                f"bed.difficulties={experiment.bed.difficulties} leaves prompt {prompt} with "
                f"reward {reward_Y[0]:g} alone: use less for it, or more bed.reward_levels"
            )


THEOREM = Theorem(Theorem12Config, STATEMENT, study, check, draws_nothing)
